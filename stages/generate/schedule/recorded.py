"""A schedule that records its inputs and the chunks that it plans, for the journal.

`StepCompleted.inputs` explains the words of a record. A snapshot is the whole schedule as JSON, but without tokens:
those are in the histories. Each page of the prefix cache has a digest of its tokens instead.
"""

from __future__ import annotations

import dataclasses
from base64 import b64decode, b64encode
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

import orjson

from pipeline.errors import UndecodableEvent
from pipeline.events import Chunk, Failed, StepRow, TokenRow
from stages.generate.kvcache import cache_name, remade
from stages.generate.kvcache.base import Allocation, CacheSnapshot, Held, LocalLayers, PrefixCache
from stages.generate.schedule.plan import BatchPlan, PlanRow, RowScores
from stages.generate.schedule.request import NewRequest, Request
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits, Turns, by_order

SNAPSHOT_EVERY: Final = 1000
"""Number of steps from one snapshot to the next .."""
SNAPSHOT_EVERY_S: Final = 60.0
""".. unless this time is over: an engine with little to do makes few steps before they expire."""
SNAPSHOT_VERSION: Final = 5
"""2: the prompt that lacks the fewest tokens is computed first. 3: local layers have parts of pages of their own. 4:
there are drafts. 5: owners take turns."""
LITERAL: Final = frozenset({"plan", "complete", "skip", "start over"})
"""A record without any of these words ends with the usual ones."""
USUAL: Final = ("plan", "complete")
LANDED: Final = frozenset({"complete", "start over"})
"""Words after which a step is no longer in flight."""


class RecordedSchedule(Schedule):
    """A schedule that records its calls until `note` returns them."""

    def __init__(self, cache: PrefixCache, limits: ScheduleLimits, eos_ids: Sequence[int], identity: Identity) -> None:
        super().__init__(cache, limits, eos_ids, identity)
        self._said: list[str] = []
        self._chunks: list[Chunk] = []
        """Chunks of the plan that is being made."""
        self._chunks_in_flight: deque[list[Chunk]] = deque()
        """Chunks of each step in flight, oldest first. Empty once `note` has returned them."""
        self._chunks_landed: list[Chunk] = []
        self._drafts_said: list[str] = []

    # the calls that are recorded

    def add(self, new: NewRequest) -> Failed | None:
        failed = super().add(new)
        if failed is None:
            self._said.append(f"add {len(new.output_ids)} {len(new.prompt_ids)} {new.uid}")
        return failed

    def drop(self, uid: str) -> bool:
        was_here = super().drop(uid)
        if was_here:
            self._said.append(f"drop {uid}")
        return was_here

    def flush(self) -> int:
        self._said.append("flush")
        return super().flush()

    def isolate(self, uid: str | None) -> list[StepRow]:
        self._said.append("all" if uid is None else f"alone {uid}")
        return super().isolate(uid)

    def plan(
        self, mixed_prefill_length: int | None = None, row_cost: int | None = None
    ) -> tuple[BatchPlan, list[StepRow]] | None:
        in_flight = bool(self._flights)
        budget = f" {mixed_prefill_length}" if in_flight and mixed_prefill_length is not None else ""
        self._drafts_said = []
        planned = super().plan(mixed_prefill_length, row_cost)
        if planned is not None:
            self._said += (*self._drafts_said, f"plan{budget}")
            self._chunks_in_flight.append(self._chunks)
            self._chunks = []
        elif in_flight:  # else nothing is here, and the attempt has touched no page
            self._said.append(f"no plan{budget}")
        return planned

    def start_over(self) -> list[StepRow]:
        self._said.append("start over")
        self._land(len(self._chunks_in_flight))
        return super().start_over()

    def complete(self, token_ids: Sequence[int], scores: Mapping[int, RowScores] | None = None) -> list[TokenRow]:
        self._said.append("complete")
        self._land(1)
        return super().complete(token_ids, scores)

    def skip_step(self) -> int:
        self._said.append("skip")
        return super().skip_step()

    def _drafted_rows(
        self, request: Request, drafts: Sequence[int], new_pages: Sequence[int], first_page: int
    ) -> list[PlanRow]:
        token_ids = drafts if request.is_constrained else ()
        word = "force" if request.are_forced else "draft"
        self._drafts_said.append(" ".join(map(str, (word, len(drafts), request.uid, *token_ids))))
        return super()._drafted_rows(request, drafts, new_pages, first_page)

    def _chunk(self, request: Request, budget: int, pages: list[int], first_page: int) -> PlanRow:
        row = super()._chunk(request, budget, pages, first_page)
        self._chunks.append(Chunk(uid=request.uid, start=row.start, count=len(row.token_ids)))
        return row

    def note(self) -> tuple[tuple[str, ...], tuple[Chunk, ...]]:
        """Return `inputs` and `chunks` of a step, since the last call.

        The chunks are those of the step that has landed since; if none has, those of the steps in flight.
        """
        said = tuple(self._said)
        self._said.clear()
        if LANDED.isdisjoint(said):
            for chunks in self._chunks_in_flight:
                self._chunks_landed += chunks
                chunks.clear()
        told = tuple(self._chunks_landed)
        self._chunks_landed.clear()
        if said[-2:] == USUAL and LITERAL.isdisjoint(said[:-2]):
            said = said[:-2]
        return said, told

    def _land(self, count: int) -> None:
        for _ in range(count):
            self._chunks_landed += self._chunks_in_flight.popleft()

    # snapshots

    @property
    def sampled(self) -> list[tuple[str, bool]]:
        """Uids of the rows that the oldest step in flight samples, in order, and whether the request is still here."""
        return [(request.uid, self._by_uid.get(request.uid) is request) for request, *_ in self._flights[0]]

    def snapshot(self) -> str:
        """Return the schedule as JSON. No step may be in flight."""
        assert not self._flights, "a snapshot has no place for tokens that are not known"
        snapshot = self._cache.snapshot([request.allocation for request in self._running])
        plain = {
            "v": SNAPSHOT_VERSION,
            "identity": dataclasses.asdict(self.identity),
            "limits": dataclasses.asdict(self._limits),
            "eos_ids": self._eos_ids,
            "cache": cache_name(self._cache),
            "num_pages": self._cache.num_pages,
            "page_size": self._cache.page_size,
            "local": dataclasses.astuple(self._cache.local),
            "alone": self._alone,
            "arrived": self._num_arrived,
            "prefilled": self._num_prefilled,
            "turns": [self._turns.clock, self._turns.given, self._turns.active],
            "requests": [
                [
                    *(one.uid, one.arrival, one.num_output, one.num_computed, one.chunks, one.stands_still),
                    *(one.came_at, one.acceptance, one.forced_acceptance),
                ]
                for one in (*self._running, *self._waiting)
            ],
            "held": [dataclasses.astuple(held) for held in snapshot.held],
            "parents": b64encode(snapshot.parents).decode(),
            "digests": b64encode(snapshot.digests).decode(),
            "uses": b64encode(snapshot.uses).decode(),
        }
        return orjson.dumps(plain).decode()

    @classmethod
    def restored(
        cls,
        snapshot: str,
        number: int,
        request_of: Callable[[str, int], NewRequest],
        *,
        num_pages: int = 0,
        **other_limits: int,
    ) -> Self:
        """Return the schedule of a snapshot, before step *number*. *request_of* returns a request with n output tokens.

        *num_pages* and *other_limits* replace the snapshot's. If there are fewer pages, or fewer requests may run, the
        last ones wait, as if they had been preempted.

        Raises:
            UndecodableEvent: This code cannot read the snapshot.
        """
        try:
            plain = orjson.loads(snapshot)
            if plain["v"] != SNAPSHOT_VERSION:
                raise UndecodableEvent(
                    f"a MiniSGL that plans by other rules wrote the snapshot (version {plain['v']}, here "
                    f"{SNAPSHOT_VERSION}); use that version of MiniSGL"
                )
            parents, digests, uses = (b64decode(plain[name]) for name in ("parents", "digests", "uses"))
            cached = CacheSnapshot(tuple(Held(*held) for held in plain["held"]), parents, digests, uses)
            limits = dataclasses.replace(ScheduleLimits(**plain["limits"]), **other_limits)
            local = LocalLayers(*plain["local"])
            if local.num_parts:
                local = dataclasses.replace(local, largest_chunk=max(local.largest_chunk, limits.largest_chunk))
            pages = max(num_pages, plain["num_pages"])
            limits = dataclasses.replace(limits, context=min(limits.context, local.capacity(pages, plain["page_size"])))
            cache, allocations = remade(plain["cache"], pages, plain["page_size"], cached, local)
            schedule = cls(cache, limits, plain["eos_ids"], Identity(**plain["identity"]))
            for at, (uid, arrival, n, num_computed, chunks, *others) in enumerate(plain["requests"]):
                request = schedule._put_back(request_of(uid, n), arrival)
                request.stands_still, request.came_at, request.acceptance, request.forced_acceptance = others
                if at < len(allocations) and not schedule._tables:
                    cache.end(allocations[at])
                elif at < len(allocations):
                    schedule._waiting.remove(request)
                    insort(schedule._running, request, key=by_order)
                    request.table, request.allocation = schedule._tables.popleft(), allocations[at]
                    request.num_computed, request.chunks = num_computed, chunks
            schedule._num_arrived, schedule._alone, schedule._step = plain["arrived"], plain["alone"], number - 1
            schedule._num_prefilled, schedule._turns = plain["prefilled"], Turns(*plain["turns"])
            schedule._take_away(plain["num_pages"] - (num_pages or plain["num_pages"]))
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise UndecodableEvent(f"the snapshot of a schedule does not decode: {error!r}") from error
        return schedule

    def _take_away(self, num_pages: int) -> None:
        """Remove pages for ever: unused prefixes go first, then requests are preempted, the last one first."""
        while self._cache.num_available < num_pages:
            self._preempt(self._running[-1], [], self.next_step)
        for _ in range(num_pages):
            self._cache.grow(Allocation(), 1)

    def _put_back(self, new: NewRequest, arrival: int) -> Request:
        self._num_arrived = arrival
        failed = super().add(new)
        if failed is not None:
            raise UndecodableEvent(f"the request {new.uid} does not fit the schedule that had it: {failed.message}")
        return self._by_uid[new.uid]


def snapshot_uids(snapshot: str) -> list[str]:
    """Return the uids of the requests in a snapshot.

    Raises:
        UndecodableEvent: This code cannot read the snapshot.
    """
    try:
        return [uid for uid, *_ in orjson.loads(snapshot)["requests"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UndecodableEvent(f"the snapshot of a schedule does not decode: {error!r}") from error
