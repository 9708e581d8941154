"""The schedule: a pure fold. Requests and sampled tokens come in, plans and rows of the step log go out.

It has no clock, random number, set order or torch: the same calls return the same plans. Decodes come first, then
chunks of prompts, under two budgets: a large one for steps in which nothing decodes, a small one beside running
streams. The caller of `plan` may set the small one, from measured times for example.

Owners take turns: the prompts of the owner are next of whom the fewest tokens were computed, by its weight. An owner
that comes, or comes back, begins where the others are (`Turns`). When pages run out, the owner that holds most of them
gives some back: the last of its running requests is preempted. A waiting request never displaces a running one.

An owner's requests are ordered by priority, then by arrival. Its prompts are computed, and its waiting requests
admitted, in another order: by priority, then those whose streams pause, then the one that lacks the fewest tokens. So a
question does not wait behind a document. A prompt ages while others of its owner are computed: it waits for at most
PATIENCE times as many tokens as it lacks. Only a request that may overtake is ordered by priority before its owner.

A plan may be made while the step before is in flight, whose tokens are not known yet. Then each token that this step
samples has a placeholder, which `complete` replaces. So calls come as `plan`, `complete`, `plan`, .. or as `plan`,
`plan`, `complete`, `plan`, `complete`, .. If a request leaves while a step in flight has a row of it, it keeps its
pages and its row of the page table until that step has landed: nothing else is written there before.

If no step is in flight, a request may have drafts: tokens that may come next. Each has a decode row of its own, and is
in the request's list of tokens as if it were known. `complete` keeps what the rows drew while that is what was drafted.
So the tokens are the same as without drafts, and come in fewer steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from operator import attrgetter

from pipeline.events import Admitted, EventRow, Failed, Preempted, Scores, StepRow, TokenRow
from stages.generate.kvcache.base import PrefixCache
from stages.generate.schedule.bad_words import BadWords
from stages.generate.schedule.plan import NOT_A_NUMBER, BatchPlan, PlanRow, RowScores, Work
from stages.generate.schedule.request import MANY_STREAMS, NewRequest, Request


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """Bounds of a plan; lengths are in tokens."""

    context: int
    """The served context: prompt + output of one request. At most what the cache holds."""
    max_prefill_length: int
    mixed_prefill_length: int
    max_running_requests: int
    vocab_size: int
    mixed_prefill_per_request: int = 0
    """Raises `mixed_prefill_length` to this many tokens for each request in hand: with many running a step is long
    anyway, and with many waiting more requests gain from it."""
    most_drafts: int = 0
    """Largest number of drafts of a request in a step."""

    @property
    def largest_chunk(self) -> int:
        """Largest number of prompt tokens of a step."""
        return max(self.max_prefill_length, self.mixed_prefill_length)

    def prefill_budget(self, num_streams: int, num_requests: int) -> int:
        """Return the largest number of prompt tokens of a step in which *num_streams* of *num_requests* decode."""
        if not num_streams:
            return self.max_prefill_length
        for_all = min(self.mixed_prefill_per_request * num_requests, self.max_prefill_length)
        return max(self.mixed_prefill_length, for_all)


@dataclass(frozen=True, slots=True)
class Identity:
    """The engine that computes, for the marks in the histories."""

    engine: str
    epoch: int
    fingerprint: str
    """Fingerprint of the weights."""
    numerics: str = ""
    version: str = ""
    """Version of MiniSGL."""


by_order = attrgetter("order")
MOST_TAKEN = 8
"""Largest number of new requests that an engine takes at a step, so that many engines share a burst. As many waiting
requests are compared when the next prompt is chosen."""
PATIENCE = 8
"""See the first lines."""


class Turns:
    """How many tokens of each owner's prompts were computed, by its weight: weighted fair queueing, as in take.lua.

    The clock is what an owner would have that always had prompts. Who had none begins there: it saved nothing, and is
    before all that come later.
    """

    def __init__(
        self, clock: int = 0, given: Mapping[str, int] | None = None, active: Mapping[str, int] | None = None
    ) -> None:
        self.clock = clock
        self.given = dict(given or {})
        """Owner -> thousandths of tokens by weight, of those that have prompts or are ahead of the clock."""
        self.active = dict(active or {})
        """Owners with prompts at the last plan, and the band of each one's first, in the order in which they began."""

    def order(self, owner: str, band: int) -> tuple[int, int, int, str]:
        """Sort key of an owner whose first prompt is in *band*: the lowest is next, of equal ones the one that began
        last."""
        given, has_begun = self.given.get(owner, 0), band >= self.active.get(owner, band + 1)
        began = list(self.active).index(owner) if has_begun else len(self.active)
        return band, given if has_begun else max(given, self.clock), -began, owner

    def begin(self, bands: Mapping[str, int]) -> None:
        """Begin a plan at which the owners of *bands* have prompts."""
        orders = {owner: self.order(owner, band) for owner, band in bands.items()}
        ahead = {owner: given for owner, given in self.given.items() if given > self.clock}
        self.given = ahead | {owner: given for owner, (_, given, _, _) in orders.items()}
        self.active = {owner: bands[owner] for owner in sorted(bands, key=lambda one: (-orders[one][2], one))}

    def give(self, owner: str, weight: int, num_tokens: int, weights: int) -> None:
        """Count computed tokens of an owner's prompts. *weights*: of all that have prompts as urgent as that."""
        self.clock = max(self.clock, self.given[owner]) + 1000 * num_tokens // weights
        self.given[owner] += 1000 * num_tokens // weight


class Schedule:
    """Waiting and running requests of one engine, and the pages they hold."""

    def __init__(self, cache: PrefixCache, limits: ScheduleLimits, eos_ids: Sequence[int], identity: Identity) -> None:
        capacity = cache.local.capacity(cache.num_pages, cache.page_size)
        assert limits.context <= capacity, "the served context is what the cache holds"
        assert not cache.local.num_parts or limits.largest_chunk <= cache.local.largest_chunk
        self.identity = identity
        self._cache = cache
        self._limits = limits
        self._eos_ids = tuple(eos_ids)
        # Both are in order of priority and arrival.
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._by_uid: dict[str, Request] = {}
        self._tables = deque(range(limits.max_running_requests))
        self._num_arrived = 0
        self._turns = Turns()
        self._num_prefilled = 0
        """Number of prompt tokens planned so far."""
        self._step = 0
        self._flights: deque[list[tuple[Request, int, int, int]]] = deque()
        """Tokens that each step in flight samples, oldest step first: requests, chunks, positions of tokens, numbers of
        drafts before them."""
        self._sampled: list[tuple[Request, int, int, int]] = []
        """The same for the plan that is being made."""
        self._num_plans = self._num_landed = 0
        """Number of plans made, and of those no longer in flight."""
        self._leaving: list[Request] = []
        """Requests that have left, but a step in flight still uses their pages and tables."""
        self._alone: str | None = None
        """The only request that may run; None: all may."""
        self._is_crowded = False
        """Whether the last plan had no pages or no table for a waiting request."""

    # inputs

    def add(self, new: NewRequest) -> Failed | None:
        """Queue a request; return a failure if it can never run here."""
        length = len(new.prompt_ids)
        strange = next((token for token in new.prompt_ids if not 0 <= token < self._limits.vocab_size), None)
        if strange is not None:
            return Failed(
                status=400,
                code="invalid_token",
                message=f"The prompt has token {strange}, but the model's vocabulary has {self._limits.vocab_size}; "
                "the tokenizer does not fit the weights, or the text uses a token that was added to it later.",
            )
        if length + 1 > self._limits.context:
            return Failed(
                status=400,
                code="context_length_exceeded",
                message=f"This model's maximum context length is {self._limits.context} tokens. However, the prompt "
                f"has {length} tokens, and the answer needs at least one; shorten the prompt.",
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
        request = Request(
            uid=new.uid,
            priority=new.priority,
            arrival=self._num_arrived,
            came_at=self._num_prefilled,
            prompt_length=length,
            token_ids=[*new.prompt_ids, *new.output_ids],
            limit=limit,
            sampling=new.sampling,
            bad_words=BadWords(new.bad_words),
            is_constrained=bool(new.grammar),
            grammar_param=new.grammar_param,
            matcher=new.matcher,
            reads_cache=new.reads_cache,
            stands_still=bool(new.output_ids),
            prediction=tuple(takewhile(lambda token: 0 <= token < self._limits.vocab_size, new.prediction)),
            owner=new.owner,
            weight=new.weight,
            overtakes=new.overtakes,
        )
        self._num_arrived += 1
        insort(self._waiting, request, key=by_order)
        self._by_uid[new.uid] = request
        return None

    def drop(self, uid: str) -> bool:
        """Forget a request that ended elsewhere, and free its pages once no step in flight uses them.

        Return False if the schedule does not have it.
        """
        request = self._by_uid.pop(uid, None)
        if request is None:
            return False
        request.matcher = None  # what comes next does not matter now
        if request.table >= 0:
            self._leave(request)
        else:
            self._waiting.remove(request)
        return True

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    def prefixes(self, most: int, namespace: str) -> list[bytes]:
        """As PrefixCache."""
        return self._cache.prefixes(most, namespace)

    def flush(self) -> int:
        """Remove the prefixes that no running request holds; return the number of freed pages."""
        return self._cache.flush()

    def misfits(self) -> list[tuple[str, int, str, str]]:
        """Return the requests of the oldest step in flight whose matchers gave up before their token was drawn: uids,
        numbers of output tokens, reasons, fields that asked for the grammar. They must leave before the step is
        complete: their tokens are invalid.
        """
        gave_up = [one for one, *_ in self._flights[0] if one.matcher is not None and one.matcher.error]
        here = [one for one in dict.fromkeys(gave_up) if self._by_uid.get(one.uid) is one]
        return [
            (one.uid, one.num_output, one.matcher.error, one.grammar_param) for one in here if one.matcher is not None
        ]

    def isolate(self, uid: str | None) -> list[StepRow]:
        """Run only the request *uid*, which is here or comes next, until the next call with None.

        Return the marks of the requests that were preempted for it. No step may be in flight.
        """
        self._alone = uid
        marks: list[StepRow] = []
        for request in reversed([request for request in self._running if uid is not None and request.uid != uid]):
            self._preempt(request, marks, self.next_step)
        return marks

    def num_output(self, uid: str) -> int | None:
        """Return how many output tokens a request has; None: it is not here."""
        request = self._by_uid.get(uid)
        return None if request is None else request.num_output

    def num_tokens(self, uid: str) -> int:
        """Return how many tokens, prompt and output, a request of this schedule has."""
        return self._by_uid[uid].num_known

    def holder(self, table: int) -> tuple[str, int]:
        """Return the uid and the number of output tokens of the request that holds a row of the page table.

        Raises:
            KeyError: No request holds the row.
        """
        for request in self._running:
            if request.table == table:
                return request.uid, request.num_output
        raise KeyError(table)

    @property
    def room(self) -> int:
        """Number of new requests that may be taken from the log now; 0 while taken ones wait for pages."""
        return max(min(MOST_TAKEN - len(self._waiting), self.spare), 0)

    @property
    def spare(self) -> int:
        """Number of new requests that could run now, however many of them are taken at once."""
        if self._waiting and (self._is_crowded or self._alone is not None):
            return 0
        return max(self._limits.max_running_requests - len(self._running) - len(self._waiting), 0)

    @property
    def room_for_others(self) -> tuple[int, tuple[str, ...]]:
        """Number of new requests that may be taken where there is no other room, but not of the owners that wait here:
        one owner's requests must not keep the others from their turn."""
        free = self._limits.max_running_requests - len(self._running)
        if not self._waiting or not free or self._alone is not None:
            return 0, ()
        return max(2 * MOST_TAKEN - len(self._waiting), 0), tuple({request.owner: None for request in self._waiting})

    @property
    def may_admit(self) -> bool:
        """Whether the next plan may admit a request."""
        return bool(self._waiting and self._tables)

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
        """Return what is wrong with the page allocation; empty: nothing."""
        holders = [*self._running, *self._leaving]
        found = self._cache.problems([request.allocation for request in holders])
        if len(self._tables) + len(holders) != self._limits.max_running_requests:
            found.append(f"{len(self._tables)} tables free with {len(holders)} requests running or leaving")
        if self._leaving and not self._flights:
            found.append(f"{len(self._leaving)} requests are leaving with no step in flight")
        if len(self._by_uid) != len(self._running) + len(self._waiting):
            found.append(f"{len(self._by_uid)} uids, {len(self._running)} running, {len(self._waiting)} waiting")
        return found

    # outputs

    @property
    def has_prompts(self) -> bool:
        """Whether a request has a prompt that is not computed yet."""
        return bool(self._waiting) or any(request.chunks > 0 for request in self._running)

    @property
    def work(self) -> Work:
        """The work that there is before the next plan is made."""
        decoding = [request for request in self._running if request.decodes]
        return Work(
            streams=len(decoding),
            context=sum(request.num_computed + 1 for request in decoding),
            prompts=[(len(one.token_ids) - missing, missing) for one, missing in self._prompts()],
        )

    @property
    def may_draft(self) -> bool:
        """Whether a plan may have drafts if no step is in flight."""
        return self._limits.most_drafts > 0 and 0 < len(self._running) < MANY_STREAMS

    def expects_drafts(self, row_cost: int | None) -> bool:
        """Return whether a request copies, and drafts of it would pay. *row_cost*: see `plan`."""
        if row_cost is None:
            return False
        most, streams = self._limits.most_drafts, len(self._running)
        return any(one.copies and one.most_drafts(most, streams, row_cost) for one in self._running)

    def plan(
        self, mixed_prefill_length: int | None = None, row_cost: int | None = None
    ) -> tuple[BatchPlan, list[StepRow]] | None:
        """Return the next step and its marks (Admitted, Preempted); None: there is nothing to compute.

        While a step is in flight, None also means that it must land first: every request waits for it, or there are too
        few pages. A request is preempted only once all its tokens are known.

        *mixed_prefill_length*: the largest number of prompt tokens, instead of the limits'. *row_cost*: the time of one
        more row, in thousandths of a step without drafts; 0: as many as possible are drafted. None: nothing is.
        """
        assert len(self._flights) < 2, "a placeholder names a row of the step right before"
        if self._flights and (self._is_short or any(ahead for *_, ahead in self._flights[-1])):
            return None
        marks: list[StepRow] = []
        self._sampled = []
        rows = self._plan_decodes(marks, row_cost)
        num_decode_rows, num_drafts = len(rows), sum(ahead > 0 for *_, ahead in self._sampled)
        num_streams = num_decode_rows - num_drafts
        if self._waiting or num_streams < len(self._running):  # else all decode, as in most steps
            rows += self._plan_prefills(self._prefill_budget(num_streams, mixed_prefill_length), marks)
        if not rows:
            may_run = self._by_uid if self._alone is None else {self._alone} & self._by_uid.keys()
            assert not may_run or self._flights, "requests are here, but no row could be planned"
            return None
        self._flights.append(self._sampled)
        self._num_plans += 1
        self._step += 1
        return BatchPlan(self._step, tuple(rows), num_decode_rows, num_drafts), marks

    def alike(self, most: int) -> tuple[int, list[tuple[int, ...]]]:
        """Return how many steps, the last planned one included and at most *most*, have the same rows if no row draws a
        token that ends it; and these tokens, of each row.

        It is more than 1 only if nothing waits, and each row decodes a token that depends on the logits alone.
        """
        ends: list[tuple[int, ...]] = []
        if most == 1:
            return 1, ends
        for request, chunks, position, ahead in self._sampled:
            room = len(request.allocation.pages) * self._cache.page_size - request.num_computed
            most = min(most, request.limit - position, 1 + room)
            if chunks or ahead or not request.is_simple:
                return 1, []
            ends.append(request.ends(self._eos_ids))
        return (1, []) if self._waiting or len(ends) != len(self._running) else (most, ends)

    def start_over(self) -> list[StepRow]:
        """Undo the plan of the oldest step in flight, which failed, and the one after it: preempt every running request
        and return their marks. The next plan has the number after that of the failed one.

        Also remove all prefixes, because the plans may not have filled their pages.
        """
        marks: list[StepRow] = []
        self._step -= len(self._flights) - 1
        for request, *_ in chain.from_iterable(self._flights):
            del request.token_ids[request.num_known :]
            request.num_drafts = 0
        self._flights.clear()
        self._num_landed = self._num_plans
        self._let_leave()
        for request in reversed(self._running[:]):
            self._preempt(request, marks, self._step)
        self._cache.flush()
        return marks

    def complete(self, token_ids: Sequence[int], scores: Mapping[int, RowScores] | None = None) -> list[TokenRow]:
        """Fold the tokens that the oldest step in flight sampled, one for each row with a Sample; return them as rows
        of the log.

        *scores*: see `Computed.scores`.
        """
        rows: list[TokenRow] = []
        scores = scores or {}
        for request in self._running if scores else ():
            if request.table in scores:
                request.prompt_scores.extend(scores[request.table].prompt)
        page_size = self._cache.page_size
        self._num_landed += 1
        refused: Request | None = None
        of_drafts: dict[int, dict[str, int]] = {}
        """Index of a request's first row -> what is told of its drafts."""
        for (request, chunks, position, ahead), token in zip(self._flights[0], token_ids, strict=True):
            if ahead and (request is refused or token == NOT_A_NUMBER):
                if request is not refused:  # another step will find that out
                    self._refuse(request, position)
                    refused = request
                continue
            draft = request.token_ids[position]  # or a placeholder, below 0
            end = request.learn(position, token, self._eos_ids)
            if draft >= 0:
                request.judge(was_right=token == draft)
                if token != draft or end is not None:
                    self._refuse(request, position + 1)
                    refused = request
            elif not request.num_drafts:
                request.hope()
            if self._by_uid.get(request.uid) is not request:
                continue  # the request ended while the step ran; its uid may have come again
            if request.num_computed > position and request.num_known % page_size == 0:
                self._cache.fill(request.allocation, request.token_ids, request.num_known)  # by the step in flight
            if end is None and not chunks:  # pydantic checks defaults as slowly as other values
                row = TokenRow(uid=request.uid, n=request.num_output, token=token)
            else:
                row = TokenRow(uid=request.uid, n=request.num_output, token=token, end=end, chunks=chunks)
            if request.num_drafts and not ahead:
                told = {"drafted": request.num_drafts, "accepted": 0, "predicted": request.is_predicted}
                of_drafts[len(rows)] = told
            if draft >= 0 and token == draft:
                of_drafts[len(rows) - ahead]["accepted"] += 1
            if request.table in scores or request.prompt_scores:  # the last chunk may have had no token to score
                of_it = scores[request.table].tokens[ahead:] if request.table in scores else ()
                scored = {"score": of_it[0] if of_it else None, "prompt_scores": request.prompt_scores or None}
                request.prompt_scores = Scores()
                row = row.model_copy(update=scored)
            rows.append(row)
            if end is not None:
                del self._by_uid[request.uid]
                self._leave(request)
        for index, told in of_drafts.items():
            rows[index] = rows[index].model_copy(update=told)
        for request, *_, ahead in self._flights.popleft():
            if ahead == request.num_drafts > 0:
                self._settle_drafts(request)
        self._let_leave()
        return rows

    def _refuse(self, request: Request, length: int) -> None:
        """Remove the drafts of a request from its token number *length* on."""
        del request.token_ids[length:]
        request.num_computed = length - 1

    def _settle_drafts(self, request: Request) -> None:
        """Give back the pages of drafts that were refused."""
        request.num_drafts = 0
        if request.table >= 0:
            num_pages = -(-len(request.token_ids) // self._cache.page_size)
            self._cache.shrink(request.allocation, request.num_computed, num_pages)

    @property
    def next_step(self) -> int:
        """Number that the next plan will have."""
        return self._step + 1

    def skip_step(self) -> int:
        """Return the number of a step that computes nothing."""
        self._step += 1
        return self._step

    # parts

    def _prefill_budget(self, num_streams: int, mixed_prefill_length: int | None) -> int:
        """Return the most prompt tokens of a step in which *num_streams* decode. *mixed_prefill_length*: see `plan`."""
        limits = self._limits
        if any(request.stands_still for request in (*self._waiting, *self._running)):
            return limits.max_prefill_length  # one long step serves a paused stream best
        if mixed_prefill_length is not None:
            # Without streams, a prompt must go on: the streams of the budget may have been preempted meanwhile.
            return max(min(mixed_prefill_length, limits.max_prefill_length), 0 if num_streams else 1)
        return limits.prefill_budget(num_streams, len(self._running) + len(self._waiting))

    def _plan_decodes(self, marks: list[StepRow], row_cost: int | None) -> list[PlanRow]:
        rows: list[PlanRow] = []
        page_size, number = self._cache.page_size, self._num_plans + 1
        while self._is_short and not self._cache.can_grow(
            (one.allocation, self._pages_missing(one, one.num_computed + 1)) for one in self._running if one.decodes
        ):
            self._preempt(self._last(), marks, self.next_step)
        drafts_of = self._drafts_of(row_cost)
        for request in self._running:
            if not request.decodes:
                continue  # its prompt is not done
            start, first_page = request.num_computed, len(request.allocation.pages)
            if drafts := drafts_of.get(request.uid):
                missing = max(self._pages_missing(request, start + 1 + len(drafts)), 0)
                if (new_pages := self._cache.grow(request.allocation, missing)) is not None:
                    rows += self._drafted_rows(request, drafts, new_pages, first_page)
                    continue
            if start < first_page * page_size and (start + 1) % page_size:
                # As `_row`, for the usual case: the page has room and does not become full, so the cache does not
                # change.
                request.stands_still = False
                request.num_computed, request.last_plan = start + 1, number
                sample, token = request.sample(self._eos_ids), request.token_ids[start]
                rows.append(PlanRow(request.table, start, (token,), (), first_page, sample))
                self._expect(request, 0)
                continue
            pages = self._cache.grow(request.allocation, self._pages_missing(request, start + 1))
            assert pages is not None, "there are enough for all that decode"
            rows.append(self._row(request, 1, pages, first_page))
        return rows

    def _drafts_of(self, row_cost: int | None) -> dict[str, Sequence[int]]:
        """Return uid -> drafts, for the requests that have some in the plan being made. *row_cost*: see `plan`."""
        if row_cost is None or self._flights or not self._limits.most_drafts:
            return {}
        decoding = [request for request in self._running if request.decodes]
        if len(decoding) >= MANY_STREAMS:
            return {}
        # Each request may need a page for its next token, and one that waits may need many. Drafts have what is left.
        pages = 0 if self._waiting else self._cache.num_available - len(decoding)
        found: dict[str, Sequence[int]] = {}
        for request in decoding:
            drafts = self._drafts_for(request, len(decoding), row_cost)
            if not drafts:
                continue
            held = len(request.allocation.pages)
            most = (held + max(pages, 0)) * self._cache.page_size - request.num_computed - 1
            if drafts := drafts[: max(most, 0)]:
                pages -= max(self._pages_missing(request, request.num_computed + 1 + len(drafts)), 0)
                found[request.uid] = drafts
        return found

    def _drafts_for(self, request: Request, streams: int, row_cost: int) -> Sequence[int]:
        """Return the tokens that are drafted for a request that decodes, one of *streams*."""
        most = self._limits.most_drafts
        proposed = request.drafts(request.most_drafts(most, streams, row_cost))
        request.are_forced = False
        if not request.is_constrained:
            return proposed
        most_forced = request.most_drafts(most, streams, row_cost, forced=True)
        if request.matcher is None or not (proposed or most_forced):
            return ()
        drafts, request.are_forced = request.matcher.draft(proposed, most_forced)
        request.is_predicted = request.is_predicted and not request.are_forced
        return drafts

    def _drafted_rows(
        self, request: Request, drafts: Sequence[int], new_pages: Sequence[int], first_page: int
    ) -> list[PlanRow]:
        """Return the rows of a request's next token and of *drafts*. It has pages for all of them."""
        start, allocation = request.num_computed, request.allocation
        end, num_pages = start + 1 + len(drafts), len(allocation.pages)
        request.num_computed, request.last_plan, request.stands_still = end, self._num_plans + 1, False
        request.num_drafts = len(drafts)
        first_local, new_local = self._cache.cover(allocation, end)
        self._cache.fill(allocation, request.token_ids, start + 1)
        sample = request.sample(self._eos_ids)
        token = request.token_ids[start]
        rows = [
            PlanRow(request.table, start, (token,), tuple(new_pages), first_page, sample, None, new_local, first_local)
        ]
        for ahead, draft in enumerate(drafts, 1):
            self._sampled.append((request, 0, len(request.token_ids), ahead - 1))
            request.token_ids.append(draft)
            sample = request.sample(self._eos_ids, ahead)
            rows.append(PlanRow(request.table, start + ahead, (draft,), (), num_pages, sample, is_draft=True))
        self._expect(request, 0)
        return rows

    def _expect(self, request: Request, chunks: int) -> None:
        """Append a placeholder to a request for the token that the plan being made samples."""
        self._sampled.append((request, chunks, len(request.token_ids), request.num_drafts))
        request.token_ids.append(-len(self._sampled))

    def _last(self) -> Request:
        """Return the running request that is preempted first: the last one of the owner that holds most, by weight."""
        held: dict[tuple[int, str], int] = {}
        for one in self._running:
            owner = one.band, one.owner
            held[owner] = held.get(owner, 0) + 1000 * len(one.allocation.pages) // one.weight
        return max(self._running, key=lambda one: (one.band, held[one.band, one.owner], one.order))

    def _plan_prefills(self, budget: int, marks: list[StepRow]) -> list[PlanRow]:
        rows: list[PlanRow] = []
        # A request that was just preempted for a running one would only take back the pages that the running one needs.
        crowded = self._running and any(isinstance(one, EventRow) and isinstance(one.event, Preempted) for one in marks)
        if budget > 0:
            self._is_crowded = bool(crowded)
        prompts: dict[str, deque[Request]] = {}
        for request, _ in self._prompts():
            prompts.setdefault(request.owner, deque()).append(request)
        if prompts:
            self._turns.begin({owner: queue[0].band for owner, queue in prompts.items()})
        while prompts and budget > 0:
            owner = min(prompts, key=lambda owner: self._turns.order(owner, prompts[owner][0].band))
            urgent = [queue[0].weight for queue in prompts.values() if queue[0].band <= prompts[owner][0].band]
            request = prompts[owner].popleft()
            if not prompts[owner]:
                del prompts[owner]
            pages: list[int] = []
            if request.table < 0:
                self._is_crowded = self._is_crowded or not self._tables or not self._admit(request, marks)
                if self._is_crowded:
                    continue  # the requests that have their pages go on
                pages = list(request.allocation.pages)
            rows.append(self._chunk(request, budget, pages, len(request.allocation.pages) - len(pages)))
            count = len(rows[-1].token_ids)
            budget -= count
            self._num_prefilled += count
            self._turns.give(owner, request.weight, count, sum(urgent))
        return rows

    def _prompts(self) -> list[tuple[Request, int]]:
        """Return each request with uncomputed prompt tokens, and their number, in the order of computation.

        Only the first MOST_TAKEN waiting requests are looked up in the cache.
        """
        waiting = [one for one in self._waiting if self._alone in (None, one.uid)]
        prompts = [(one, len(one.token_ids) - one.num_computed) for one in self._running if one.chunks > 0]
        for number, one in enumerate(waiting):
            is_cached = number < MOST_TAKEN and one.may_read_cache
            cached = self._cache.num_cached(one.token_ids) if is_cached else 0
            prompts.append((one, len(one.token_ids) - cached))

        bands: dict[str, int] = {}
        for one, _ in prompts:
            bands[one.owner] = min(one.band, bands.get(one.owner, one.band))
        turns = {owner: self._turns.order(owner, band)[1:] for owner, band in bands.items()}

        def order(prompt: tuple[Request, int]) -> tuple[int, tuple[int, int, str], int, bool, int, int]:
            one, missing = prompt
            pauses = one.stands_still or one.num_output > 0
            aged = PATIENCE * missing + one.came_at
            return one.band, turns[one.owner], one.priority, not pauses, aged, one.arrival

        return sorted(prompts, key=order)

    def _admit(self, request: Request, marks: list[StepRow]) -> bool:
        """Allocate pages for all tokens of a waiting request; return False if there are not enough."""
        allocation = self._cache.begin(request.token_ids if request.may_read_cache else ())
        request.allocation = allocation
        if self._cache.grow(allocation, self._pages_missing(request, len(request.token_ids))) is None:
            self._cache.end(allocation)
            return False
        self._waiting.remove(request)
        request.table = self._tables.popleft()
        request.num_computed = allocation.cached_tokens
        insort(self._running, request, key=by_order)
        marks.append(self._mark(request, self._admitted(request)))
        return True

    def _chunk(self, request: Request, budget: int, pages: list[int], first_page: int) -> PlanRow:
        request.chunks += 1
        count = min(budget, len(request.token_ids) - request.num_computed)
        return self._row(request, count, pages, first_page)

    def _row(self, request: Request, count: int, pages: list[int], first_page: int) -> PlanRow:
        start, end = request.num_computed, request.num_computed + count
        last = end == len(request.token_ids)
        request.num_computed = end
        request.last_plan = self._num_plans + 1
        first_local, new_local = self._cache.cover(request.allocation, end)
        self._cache.fill(request.allocation, request.token_ids, min(end, request.num_known))
        row = PlanRow(
            table=request.table,
            start=start,
            token_ids=tuple(request.token_ids[start:end]),
            new_pages=tuple(pages),
            first_page=first_page,
            sample=request.sample(self._eos_ids) if last else None,
            scoring=request.scoring(start, end),
            new_local=new_local,
            first_local=first_local,
        )
        if last:
            self._expect(request, request.chunks)
            request.chunks = 0
            request.stands_still = False
        return row

    @property
    def _is_short(self) -> bool:
        """Whether there are too few pages for the next tokens of the requests that decode."""
        free = self._cache.num_available
        if free >= len(self._running):
            return False
        return sum(self._pages_missing(one, one.num_computed + 1) for one in self._running if one.decodes) > free

    def _pages_missing(self, request: Request, length: int) -> int:
        return -(-length // self._cache.page_size) - len(request.allocation.pages)

    def _preempt(self, request: Request, marks: list[StepRow], step: int) -> None:
        assert request.last_plan <= self._num_landed, "its tokens are known, and its pages are free now"
        self._leave(request)
        request.num_computed = request.chunks = 0
        request.prompt_scores = Scores()
        insort(self._waiting, request, key=by_order)
        identity = self.identity
        event = Preempted(engine=identity.engine, epoch=identity.epoch, step=step)
        marks.append(self._mark(request, event))

    def _leave(self, request: Request) -> None:
        """Stop running a request, and free its pages and table once no step in flight has a row of it."""
        self._running.remove(request)
        self._leaving.append(request)
        if request.last_plan <= self._num_landed:
            self._let_leave()

    def _let_leave(self) -> None:
        """Free the pages and tables of leaving requests that no step in flight has a row of."""
        for request in [request for request in self._leaving if request.last_plan <= self._num_landed]:
            self._leaving.remove(request)
            self._cache.end(request.allocation)
            self._tables.append(request.table)
            request.table = -1

    def _admitted(self, request: Request) -> Admitted:
        identity = self.identity
        return Admitted(
            engine=identity.engine,
            epoch=identity.epoch,
            step=self.next_step,
            fingerprint=identity.fingerprint,
            numerics=identity.numerics,
            version=identity.version,
            cached_tokens=request.allocation.cached_tokens,
            prompt_tokens=request.prompt_length,
        )

    def _mark(self, request: Request, event: Admitted | Preempted) -> EventRow:
        return EventRow(uid=request.uid, n=request.num_output, event=event)
