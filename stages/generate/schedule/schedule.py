"""The schedule: a pure fold. Requests and sampled tokens come in, plans and rows of the step log go out.

No clock, no random number, no set order, no torch: the same calls give the same plans. Decodes come first, then chunks
of prompts, under two budgets: one for steps in which nothing decodes, a small one beside running streams.

Requests have an order, their priority and then their arrival. Who waits comes in by it and prompts are computed by it;
the last in it gives its pages back when they run out, and only then: who waits pushes nobody out. The first in it is
computed in every step from its admission to its end, and it waits only for those that run already.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.events import (
    Admitted,
    EventRow,
    Failed,
    FinishReason,
    Preempted,
    SamplingParams,
    Score,
    StepRow,
    TokenRow,
)
from stages.generate.kvcache.base import Holding, PrefixCache
from stages.generate.schedule.bad_words import BadWords
from stages.generate.schedule.plan import BatchPlan, PlanRow, RowScores, Sample, Scoring

MOST_TAKEN = 8
"""An engine takes no more new requests than this at a step, so that many engines share a burst."""


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What bounds a plan; lengths are in tokens."""

    context: int
    """The served context: prompt + output of one request. At most what the cache holds."""
    max_prefill_length: int
    mixed_prefill_length: int
    max_running_requests: int
    vocab_size: int
    mixed_prefill_per_request: int = 0
    """Beside running streams, so much for each request in hand may be prefilled where that is more than
    `mixed_prefill_length`: the more run, the longer a step takes anyway, and the more wait, the more wait for it."""

    def prefill_budget(self, num_streams: int, num_requests: int) -> int:
        """Return how many prompt tokens a step may have in which *num_streams* of *num_requests* decode."""
        if not num_streams:
            return self.max_prefill_length
        for_all = min(self.mixed_prefill_per_request * num_requests, self.max_prefill_length)
        return max(self.mixed_prefill_length, for_all)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who computes: what the marks in the histories say."""

    engine: str
    epoch: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it comes from the log; `output_ids` is not empty when its computation goes on."""

    uid: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """The lower runs earlier; of equal ones the one that came first."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not come out."""


@dataclass(slots=True, eq=False)
class _Running:
    """What the schedule remembers of a request."""

    uid: str
    priority: int
    arrival: int
    """Counts up."""
    prompt_length: int
    token_ids: list[int]
    """Prompt + output."""
    limit: int
    """Length at which it ends."""
    sampling: SamplingParams
    bad_words: BadWords
    table: int = -1
    holding: Holding = field(default_factory=Holding)
    num_computed: int = 0
    """Keys and values of the tokens before this position are in the pages, once the plans made so far have run."""
    chunks: int = 0
    """Prefill chunks planned since it was admitted; 0 once it decodes."""
    prompt_scores: list[Score] = field(default_factory=list)
    """Of the prompt's tokens that were computed so far, until they are told with the first token."""
    stands_still: bool = False
    """It came with tokens of another engine: somebody watches a stream that stands still until it is computed."""

    @property
    def order(self) -> tuple[int, int]:
        """The lowest comes first, the highest is preempted first."""
        return self.priority, self.arrival

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of the prompt are wanted, so that none of it may come from the cache."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0

    @property
    def decodes(self) -> bool:
        return self.chunks == 0 and self.num_computed == len(self.token_ids) - 1


def _order(request: _Running) -> tuple[int, int]:
    return request.order


class Schedule:
    """Waiting and running requests of one engine, and the pages they hold."""

    def __init__(self, cache: PrefixCache, limits: ScheduleLimits, eos_ids: Sequence[int], identity: Identity) -> None:
        assert limits.context <= cache.num_pages * cache.page_size, "the served context is what the cache holds"
        self.identity = identity
        self._cache = cache
        self._limits = limits
        self._eos_ids = tuple(eos_ids)
        # Both in their order.
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._by_uid: dict[str, _Running] = {}
        self._tables = deque(range(limits.max_running_requests))
        self._num_arrived = 0
        self._step = 0
        self._planned: list[tuple[_Running, int]] = []
        self._alone: str | None = None
        """The only request that may run."""

    # what goes in

    def add(self, new: NewRequest) -> Failed | None:
        """Queue a request; or return why it can never run here."""
        length = len(new.prompt_ids)
        strange = next((token for token in new.prompt_ids if not 0 <= token < self._limits.vocab_size), None)
        if strange is not None:
            return Failed(
                status=400,
                code="invalid_token",
                message=f"The prompt has token {strange}, but the model's vocabulary has {self._limits.vocab_size}; "
                "tokenizer and weights do not belong together, or the text has a token that was added later.",
            )
        if length + 1 > self._limits.context:
            return Failed(
                status=400,
                code="context_length_exceeded",
                message=f"This model's maximum context length is {self._limits.context} tokens, of which one at least "
                f"is for the answer. However, the prompt has {length} tokens; shorten it.",
            )
        limit = self._limits.context
        if new.sampling.max_tokens is not None:
            limit = min(limit, length + new.sampling.max_tokens)
        if length + len(new.output_ids) >= limit:
            return Failed(
                status=500,
                code="context_length_exceeded",
                message=f"The request had {length + len(new.output_ids)} tokens when its engine was replaced by one "
                f"with a served context of {self._limits.context}; send it again.",
            )
        request = _Running(
            uid=new.uid,
            priority=new.priority,
            arrival=self._num_arrived,
            prompt_length=length,
            token_ids=[*new.prompt_ids, *new.output_ids],
            limit=limit,
            sampling=new.sampling,
            bad_words=BadWords(new.bad_words),
            stands_still=bool(new.output_ids),
        )
        self._num_arrived += 1
        insort(self._waiting, request, key=_order)
        self._by_uid[new.uid] = request
        return None

    def drop(self, uid: str) -> bool:
        """Forget a request that ended elsewhere and free its pages; False when it is not here."""
        request = self._by_uid.pop(uid, None)
        if request is None:
            return False
        if request.table >= 0:
            self._leave(request)
        else:
            self._waiting.remove(request)
        return True

    def flush(self) -> int:
        """Forget the prefixes that no running request holds; return how many pages that freed."""
        return self._cache.flush()

    def isolate(self, uid: str | None) -> list[StepRow]:
        """Run the request *uid*, which is here or comes next, and no other, until this is called with None.

        Return the marks of those that gave their pages back for it.
        """
        self._alone = uid
        marks: list[StepRow] = []
        for request in reversed([request for request in self._running if uid is not None and request.uid != uid]):
            self._preempt(request, marks, self.next_step)
        return marks

    def num_output(self, uid: str) -> int | None:
        """Return how many tokens a request has; None when it is not here."""
        request = self._by_uid.get(uid)
        return None if request is None else request.num_output

    def num_tokens(self, uid: str) -> int:
        """Return how many tokens, prompt and output, a request has that is here."""
        return len(self._by_uid[uid].token_ids)

    def holder(self, table: int) -> tuple[str, int]:
        """Return the uid of the running request that holds a row of the page table, and how many tokens it has."""
        return next((request.uid, request.num_output) for request in self._running if request.table == table)

    @property
    def room(self) -> int:
        """How many new requests may be taken from the log now; none while taken ones wait for pages."""
        if self._waiting:
            return 0
        return min(MOST_TAKEN, self._limits.max_running_requests - len(self._running))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_pages(self) -> int:
        return self._cache.num_available

    @property
    def num_pages(self) -> int:
        return self._cache.num_pages

    def problems(self) -> list[str]:
        """Return what is wrong with the books; empty when all is well."""
        found = self._cache.problems([request.holding for request in self._running])
        if len(self._tables) + len(self._running) != self._limits.max_running_requests:
            found.append(f"{len(self._tables)} tables free with {len(self._running)} requests running")
        if len(self._by_uid) != len(self._running) + len(self._waiting):
            found.append(f"{len(self._by_uid)} uids, {len(self._running)} running, {len(self._waiting)} waiting")
        return found

    # what comes out

    def plan(self) -> tuple[BatchPlan, list[StepRow]] | None:
        """Return the next step and the marks (Admitted, Preempted) that go with it; None when nothing is to be done."""
        marks: list[StepRow] = []
        self._planned = []
        rows = self._plan_decodes(marks)
        num_decode_rows = len(rows)
        budget = self._limits.prefill_budget(num_decode_rows, len(self._running) + len(self._waiting))
        if any(request.stands_still for request in (*self._waiting, *self._running)):
            budget = self._limits.max_prefill_length  # a stream is as well served by an end of this as by steady steps
        rows += self._plan_prefills(budget, marks)
        if not rows:
            may_run = self._by_uid if self._alone is None else {self._alone} & self._by_uid.keys()
            assert not may_run, "requests are here, but no row could be planned"
            return None
        self._step += 1
        return BatchPlan(self._step, tuple(rows), num_decode_rows), marks

    def start_over(self) -> list[StepRow]:
        """Undo the last plan, which failed, and return the marks that say so.

        Preempts all that runs and forgets the prefixes, which the plan may not have filled.
        """
        marks: list[StepRow] = []
        self._planned = []
        for request in reversed(self._running[:]):
            self._preempt(request, marks, self._step)
        self._cache.flush()
        return marks

    def complete(self, token_ids: Sequence[int], scores: Mapping[int, RowScores] | None = None) -> list[TokenRow]:
        """Fold the tokens sampled by the last plan, one for each row with a Sample; return them as rows of the log.

        *scores*: as `Computed.scores`.
        """
        rows: list[TokenRow] = []
        scores = scores or {}
        for request in self._running if scores else ():
            if request.table in scores:
                request.prompt_scores += scores[request.table].prompt
        sampled = iter(token_ids)
        for request, chunks in self._planned:
            token = next(sampled)
            if request.uid not in self._by_uid:
                continue  # it ended elsewhere while the step ran
            request.token_ids.append(token)
            end = self._end_of(request, token)
            row = TokenRow(uid=request.uid, n=request.num_output, token=token, end=end, chunks=chunks)
            if request.table in scores:
                told = {"score": scores[request.table].token, "prompt_scores": tuple(request.prompt_scores) or None}
                request.prompt_scores.clear()
                row = row.model_copy(update=told)
            rows.append(row)
            if end is not None:
                del self._by_uid[request.uid]
                self._leave(request)
        self._planned = []
        return rows

    @property
    def next_step(self) -> int:
        """The number that the next plan will have."""
        return self._step + 1

    def skip_step(self) -> int:
        """Return the number of a step without rows, which only says what was let go."""
        self._step += 1
        return self._step

    # how

    def _plan_decodes(self, marks: list[StepRow]) -> list[PlanRow]:
        rows: list[PlanRow] = []
        for request in list(self._running):
            if request.table < 0 or not request.decodes:
                continue  # preempted by an earlier one just now, or its prompt is not through
            first_page = len(request.holding.pages)
            pages = self._pages_for(request, marks)
            if pages is not None:
                rows.append(self._row(request, 1, pages, first_page))
        return rows

    def _pages_for(self, request: _Running, marks: list[StepRow]) -> list[int] | None:
        """Return the page that the next token needs beyond those held, preempting the last request while there is
        none; None when that was *request* itself."""
        missing = self._pages_missing(request, request.num_computed + 1)
        while (pages := self._cache.grow(request.holding, missing)) is None:
            last = self._running[-1]
            self._preempt(last, marks, self.next_step)
            if last is request:
                return None
        return pages

    def _plan_prefills(self, budget: int, marks: list[StepRow]) -> list[PlanRow]:
        rows: list[PlanRow] = []
        # Who was preempted for a running request would only take back what that one needs.
        crowded = (
            any(isinstance(mark, EventRow) and isinstance(mark.event, Preempted) for mark in marks) and self._running
        )
        begun = deque(request for request in self._running if request.chunks > 0)
        admits = not crowded
        while budget > 0:
            following = self._next_waiting() if admits and self._tables else None
            if following is not None and (not begun or following.priority < begun[0].priority):
                admits = self._admit(following, marks)
                if not admits:
                    continue  # with those that have their pages
                rows.append(self._chunk(following, budget, list(following.holding.pages), 0))
            elif begun:
                request = begun.popleft()
                rows.append(self._chunk(request, budget, [], len(request.holding.pages)))
            else:
                break
            budget -= len(rows[-1].token_ids)
        return rows

    def _admit(self, request: _Running, marks: list[StepRow]) -> bool:
        """Give a waiting request the pages of all its tokens; False when there are not as many."""
        holding = self._cache.begin(() if request.scores_prompt else request.token_ids)
        request.holding = holding
        if self._cache.grow(holding, self._pages_missing(request, len(request.token_ids))) is None:
            self._cache.end(holding)
            return False
        self._waiting.remove(request)
        request.table = self._tables.popleft()
        request.num_computed = holding.cached_tokens
        insort(self._running, request, key=_order)
        marks.append(self._mark(request, self._admitted(holding)))
        return True

    def _next_waiting(self) -> _Running | None:
        if self._alone is None:
            return self._waiting[0] if self._waiting else None
        return next((request for request in self._waiting if request.uid == self._alone), None)

    def _chunk(self, request: _Running, budget: int, pages: list[int], first_page: int) -> PlanRow:
        request.chunks += 1
        count = min(budget, len(request.token_ids) - request.num_computed)
        return self._row(request, count, pages, first_page)

    def _row(self, request: _Running, count: int, pages: list[int], first_page: int) -> PlanRow:
        start, end = request.num_computed, request.num_computed + count
        last = end == len(request.token_ids)
        if last:
            self._planned.append((request, request.chunks))
            request.chunks = 0
            request.stands_still = False
        request.num_computed = end
        self._cache.fill(request.holding, request.token_ids, end)
        return PlanRow(
            table=request.table,
            start=start,
            token_ids=tuple(request.token_ids[start:end]),
            new_pages=tuple(pages),
            first_page=first_page,
            sample=self._sample(request) if last else None,
            scoring=self._scoring(request, start, end),
        )

    def _scoring(self, request: _Running, start: int, end: int) -> Scoring | None:
        num_top = request.sampling.prompt_logprobs
        if num_top is None or not request.scores_prompt:
            return None
        return Scoring(tuple(request.token_ids[start + 1 : end + 1]), num_top)

    def _sample(self, request: _Running) -> Sample:
        sampling = request.sampling
        forbidden: tuple[int, ...] = ()
        if request.num_output < sampling.min_tokens:
            forbidden = sampling.stop_token_ids if sampling.ignore_eos else self._eos_ids + sampling.stop_token_ids
        if request.bad_words:
            forbidden += request.bad_words.completed_by(request.token_ids, request.num_output)
        seen = request.token_ids if sampling.penalizes else ()
        return Sample(sampling, len(request.token_ids), forbidden, seen, request.prompt_length)

    def _end_of(self, request: _Running, token: int) -> FinishReason | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self._eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(request.token_ids) >= request.limit else None

    def _pages_missing(self, request: _Running, length: int) -> int:
        return -(-length // self._cache.page_size) - len(request.holding.pages)

    def _preempt(self, request: _Running, marks: list[StepRow], step: int) -> None:
        self._leave(request)
        request.num_computed = request.chunks = 0
        request.prompt_scores.clear()
        insort(self._waiting, request, key=_order)
        identity = self.identity
        event = Preempted(engine=identity.engine, epoch=identity.epoch, step=step)
        marks.append(self._mark(request, event))

    def _leave(self, request: _Running) -> None:
        """Give back what a running request holds."""
        self._running.remove(request)
        self._cache.end(request.holding)
        self._tables.append(request.table)
        request.table = -1

    def _admitted(self, holding: Holding) -> Admitted:
        identity = self.identity
        return Admitted(
            engine=identity.engine,
            epoch=identity.epoch,
            step=self.next_step,
            fingerprint=identity.fingerprint,
            cached_tokens=holding.cached_tokens,
        )

    def _mark(self, request: _Running, event: Admitted | Preempted) -> EventRow:
        return EventRow(uid=request.uid, n=request.num_output, event=event)
