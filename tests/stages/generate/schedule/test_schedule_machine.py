"""Pages, prefix cache and schedule together, through random lives of requests.

A memory beside them stores, where an engine stores keys and values, the tokens that these were computed from, in each
part of a page. So what a plan reads can be compared literally with what it must find. Hypothesis makes up the stories
and shortens those that fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.selection import by_night

from pipeline.events import Admitted, EventRow, Preempted, SamplingParams, StepRow, TokenRow
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, Allocation, LocalLayers
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.kvcache.radix import RadixCache
from stages.generate.schedule.plan import BatchPlan, PlanRow
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import MOST_TAKEN, PATIENCE, Identity, Schedule, ScheduleLimits

EOS = 9
WEIGHTS = {"": 1, "ann": 1, "bob": 3}
"""Owner -> weight."""
LETTERS = st.integers(0, 2)
"""Few tokens, so that prefixes are shared."""
WHICH = st.integers(0, 99)
STORIES = settings(max_examples=by_night(20, 200), stateful_step_count=40, deadline=None)


def next_token(tokens: tuple[int, ...]) -> int:
    """Return what this model says after *tokens*: the same always, now and then the end."""
    number = sum((position + 1) * token for position, token in enumerate(tokens)) + len(tokens)
    return EOS if number % 11 == 0 else number % 3


@dataclass
class Life:
    """What must be true of one request, kept without pages or plans."""

    uid: str
    priority: int
    arrival: int
    came_at: int
    """Number of prompt tokens that had been planned when it came."""
    tokens: list[int]
    prompt_length: int
    limit: int
    ignores_eos: bool
    owner: str = ""
    overtakes: bool = False
    table: int = -1
    computed: int = 0
    chunks: int = 0
    """Pieces in which its tokens were computed since it was admitted last; 0 once it decodes."""
    decodes: bool = False
    """It got a token since it was admitted last, so from now on it gets one in each step."""
    stands_still: bool = False
    """It came with output, of which nothing is computed here yet."""

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.arrival

    @property
    def band(self) -> int:
        return self.priority if self.overtakes else 0

    @property
    def runs(self) -> bool:
        return self.table >= 0

    def end_after(self, token: int) -> str | None:
        if token == EOS and not self.ignores_eos:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None


class Memory:
    """The pages of an engine: in each slot all tokens up to its own position, from which keys and values came."""

    def __init__(self, num_pages: int, page_size: int, local: LocalLayers) -> None:
        self.page_size = page_size
        self.local = local
        self.slots: list[tuple[int, ...]] = [()] * (num_pages * (1 + local.num_parts) * page_size)
        self.tables: dict[int, list[int]] = {}
        self.local_tables: dict[int, dict[int, tuple[int, ...]]] = {}
        """Table -> index of a page -> its local parts."""
        self.drafted: set[int] = set()
        """Tables whose last row had a draft: their last pages may have been given back."""

    def extend(self, row: PlanRow) -> None:
        """Append a row's pages to its table, as every rank does; the first ones of a request begin it anew."""
        table = self.tables.setdefault(row.table, [])
        local = self.local_tables.setdefault(row.table, {})
        if row.first_page == 0:
            table.clear()
        elif row.table in self.drafted and row.first_page < len(table):
            del table[row.first_page :]
            for index in [index for index in local if index >= row.first_page]:
                del local[index]
        (self.drafted.add if row.is_draft else self.drafted.discard)(row.table)
        assert row.first_page == len(table), "a plan says each page of a table once, in order"
        table += row.new_pages
        num_parts = self.local.num_parts
        told = range(row.first_local, row.first_local + len(row.new_local) // max(num_parts, 1))
        if row.first_page == 0 and row.new_pages:
            local.clear()
        for at, index in enumerate(told):
            assert index not in local, "a plan says the local parts of a page once"
            local[index] = row.new_local[at * num_parts : (at + 1) * num_parts]

    def slots_of(self, table: int, position: int) -> list[int]:
        """Return the slot in each part of its page, the global one first; no local ones once they are given back."""
        index, offset = divmod(position, self.page_size)
        local = self.local_tables[table].get(index, ()) if self.local.num_parts else ()
        return [part * self.page_size + offset for part in (self.tables[table][index], *local)]

    def write(self, row: PlanRow, tokens: list[int]) -> set[int]:
        """Compute a row and return the slots that it wrote and that had something else before."""
        written = set()
        for position in range(row.start, row.start + len(row.token_ids)):
            slots = self.slots_of(row.table, position)
            assert len(slots) == 1 + self.local.num_parts
            for slot in slots:
                if self.slots[slot] != tuple(tokens[: position + 1]):
                    written.add(slot)
                self.slots[slot] = tuple(tokens[: position + 1])
        return written

    def garble(self, row: PlanRow) -> None:
        """Fail in the middle of a row: nobody knows what its slots hold."""
        for position in range(row.start, row.start + len(row.token_ids)):
            for slot in self.slots_of(row.table, position):
                self.slots[slot] = ()

    def check(self, table: int, tokens: list[int], length: int) -> None:
        """See that the table holds what was computed from exactly these tokens, up to *length*, where it is seen."""
        for position in range(length):
            slots = self.slots_of(table, position)
            is_seen = position > length - self.local.window
            assert len(slots) == 1 + self.local.num_parts or not is_seen
            for slot in slots if is_seen else slots[:1]:
                assert self.slots[slot] == tuple(tokens[: position + 1])


class NaiveNotedCache(NaiveCache):
    """Notes whether it ever had too few pages since the note was taken away."""

    has_refused = False

    def grow(self, allocation: Allocation, count: int) -> list[int] | None:
        pages = super().grow(allocation, count)
        self.has_refused |= pages is None
        return pages


class NotedCache(NaiveNotedCache, RadixCache):
    """Notes how much of a prompt it was last asked for and had: pages may come and go while a plan is made."""

    def __init__(self, num_pages: int, page_size: int, local: LocalLayers) -> None:
        super().__init__(num_pages, page_size, local)
        self.noted: dict[tuple[int, ...], int] = {}

    def num_cached(self, token_ids: Sequence[int]) -> int:
        found = self.noted[tuple(token_ids)] = super().num_cached(token_ids)
        return found


class Machine(RuleBasedStateMachine):
    """The lives of requests, told to a schedule and to the model beside it."""

    kind: type[NaiveNotedCache]

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(2, 12),
        limits=st.builds(
            ScheduleLimits,
            context=st.integers(8, 48),
            max_prefill_length=st.integers(1, 24),
            mixed_prefill_length=st.integers(1, 6),
            mixed_prefill_per_request=st.integers(0, 3),
            max_running_requests=st.integers(1, 5),
            vocab_size=st.just(10),
            most_drafts=st.integers(0, 5),
        ),
        local=st.sampled_from([NO_LOCAL_LAYERS, *(LocalLayers(n, w) for n in (1, 3) for w in (1, 2, 3, 5, 8, 13))]),
    )
    def begin(self, page_size: int, num_pages: int, limits: ScheduleLimits, local: LocalLayers) -> None:
        self.num_pages = num_pages
        if local.num_parts:
            local = replace(local, largest_chunk=limits.largest_chunk)
        capacity = local.capacity(num_pages, page_size)
        assert capacity >= num_pages * page_size
        most_drafts = min(limits.most_drafts, limits.largest_chunk - 1)
        self.limits = replace(limits, context=min(limits.context, capacity), most_drafts=most_drafts)
        self.cache = self.kind(num_pages, page_size, local)
        self.schedule = Schedule(self.cache, self.limits, [EOS], Identity("generate-0", 1, "f"))
        self.memory = Memory(num_pages, page_size, local)
        self.lives: dict[str, Life] = {}
        self.known: list[list[int]] = []
        """Prompts that came, and whole conversations: what a next prompt may begin like."""
        self.num_added = 0
        self.num_prefilled = 0
        """Number of prompt tokens planned so far."""
        self.given: int | None = None
        """The budget that plans are given; None: that of the limits."""
        self.row_cost: int | None = None
        """What plans are told of the cost of a draft; None: they have none."""
        self.clock, self.given_to, self.had_prompts = 0, dict[str, int](), dict[str, int]()
        """How much of each owner's prompts was computed, as the schedule counts it."""
        self.pages_held: dict[str, int] = {}
        self.alone: str | None = None
        self.looked_up: set[str] = set()
        """Uids of those that wait and are looked up in the cache."""
        """The only request that may run: one that is here or comes next."""

    # what happens; one rule has all rare events, so that most of a story is requests and steps

    @rule(
        prompt=st.lists(LETTERS, min_size=1, max_size=24),
        like=st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(0, 30))),
        num_output=st.sampled_from([0, 0, 0, 1, 5]),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        ignores_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1, -1, 2]),
        owner=st.sampled_from(["", "", "ann", "bob"]),
        overtakes=st.sampled_from([False, False, False, True]),
        copies=st.sampled_from([1, 1, 1, 3]),
    )
    def add(self, prompt: list[int], like: tuple[int, int] | None, num_output: int, copies: int, **more: Any) -> None:
        """Requests come: new, the same several times, with the prefix of an earlier one, or resumed with output."""
        if like is not None and self.known:
            which, kept = like
            prompt = self.known[which % len(self.known)][:kept] + prompt
        for _ in range(copies):
            self._add(prompt, [1] * num_output, **more)

    @precondition(lambda self: self.lives)
    @rule(
        count=st.integers(1, 6),
        given=st.one_of(st.none(), st.integers(0, 30)),
        row_cost=st.sampled_from([None, 0, 0, 60, 300]),
    )
    def steps(self, count: int, given: int | None, row_cost: int | None) -> None:
        self.given, self.row_cost = given, row_cost
        for _ in range(count):
            self._step([])
            self.the_books_are_right()
            self.every_page_still_holds_what_its_holder_computed()

    @precondition(lambda self: self.lives)
    @rule(
        kind=st.sampled_from(
            ["leave", "leave and return", "leave in a step", "flush", "fail", "isolate", "isolate next"]
        ),
        which=WHICH,
    )
    def something_else(self, kind: str, which: int) -> None:
        life = self.lives[sorted(self.lives)[which % len(self.lives)]]
        match kind:
            case "leave":
                self._drop(life.uid)
            case "leave and return":  # often in the middle of a prompt
                self._drop(life.uid)
                more = life.priority, life.owner, life.overtakes
                self._add(life.tokens[: life.prompt_length], [], None, life.ignores_eos, *more)
            case "leave in a step":
                self._step([life.uid])
            case "flush":
                before = self.schedule.free_pages
                assert 0 <= self.schedule.flush() <= self.num_pages
                assert self.schedule.free_pages == before
                assert self.schedule.flush() == 0
            case "fail":
                self._fail(which)
            case "isolate":
                self._isolate(life.uid)
                self._step([])
            case "isolate next":
                self._isolate(str(self.num_added))
                assert self.schedule.num_running == 0 and self.schedule.plan() is None

    @precondition(lambda self: self.alone is not None)
    @rule()
    def let_all_run(self) -> None:
        self._isolate(None)

    # what must be true

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.schedule.problems() == []
        running = [life for life in self.lives.values() if life.runs]
        assert self.schedule.num_running == len(running) <= self.limits.max_running_requests
        assert self.schedule.num_waiting == len(self.lives) - len(running)
        in_hand = len(running), len(self.lives) - len(running)
        free = min(self.limits.max_running_requests - in_hand[0], MOST_TAKEN) - in_hand[1]
        assert 0 <= self.schedule.room <= max(free, 0)
        assert self.schedule.room == 0 or self.alone is None or in_hand[1] == 0

    @invariant()
    def every_page_still_holds_what_its_holder_computed(self) -> None:
        for life in self.lives.values():
            if life.runs:
                self.memory.check(life.table, life.tokens, life.computed)

    def teardown(self) -> None:
        """Let everything end. Each step computes a token. That is lost only if a page is taken for an output token, and
        output tokens are never lost. So between two of them there are at most as many steps as there are tokens in all.
        """
        if not hasattr(self, "lives"):
            return
        self._isolate(None)
        self.given = self.row_cost = None
        most, num_steps = (len(self.lives) * (self.limits.context + 1)) ** 2, 0
        while self.lives:
            self._step([])
            self.the_books_are_right()
            self.every_page_still_holds_what_its_holder_computed()
            num_steps += 1
            assert num_steps <= most, "a request starves"
        assert self.schedule.plan() is None
        assert self.schedule.free_pages == self.num_pages

    # how

    def _add(
        self,
        prompt: list[int],
        output: list[int],
        max_tokens: int | None,
        ignores_eos: bool,
        priority: int,
        owner: str,
        overtakes: bool,
    ) -> None:
        context, uid = self.limits.context, str(self.num_added)
        limit = min(context, len(prompt) + max_tokens) if max_tokens is not None else context
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignores_eos)
        new = NewRequest(
            *(uid, tuple(prompt), tuple(output), sampling, priority),
            owner=owner,
            weight=WEIGHTS[owner],
            overtakes=overtakes,
        )
        failed = self.schedule.add(new)
        fits = len(prompt) + 1 <= context and len(prompt) + len(output) < limit
        assert (failed is None) == fits
        if fits:
            arrived = uid, priority, self.num_added, self.num_prefilled
            self.lives[uid] = Life(*arrived, [*prompt, *output], len(prompt), limit, ignores_eos, owner, overtakes)
            self.lives[uid].stands_still = bool(output)
            self.known.append(prompt)
        self.num_added += 1

    def _step(self, dropped: list[str]) -> None:
        """One whole step; requests that end elsewhere while it runs leave no row."""
        plan = self._plan()
        if plan is None:
            return
        sampled = self._compute(plan)
        for uid in dropped:
            self._drop(uid)
        self._fold(self.schedule.complete([next_token(tuple(tokens)) for _, tokens in sampled]), sampled)

    def _fail(self, which: int) -> None:
        """The engine raises in the middle of a step; whose fault it was, if anybody's, is dropped; all start over."""
        plan = self._plan()
        if plan is None:
            return
        for row in plan.rows:
            self.memory.extend(row)
            self.memory.garble(row)
        if which % 2:
            self._drop(self._holder(plan.rows[which % len(plan.rows)]).uid)
        self._hear(self.schedule.start_over())
        assert not any(life.runs for life in self.lives.values())
        assert self.schedule.free_pages == self.num_pages

    def _plan(self) -> BatchPlan | None:
        """Let a plan be made, and see that it keeps every promise."""
        decoding = {life.uid for life in self.lives.values() if life.decodes}
        work = self.schedule.work
        assert work.streams == len(decoding)
        left = self._prompts(())
        bands = {one.owner: one.band for one in reversed(left)}
        turns = {owner: self._turn(owner, band)[1:] for owner, band in bands.items()}
        in_turn = sorted(left, key=lambda one: (one.band, turns[one.owner]))
        assert work.prompts == [(len(one.tokens) - self._lacks(one), self._lacks(one)) for one in in_turn]
        self.pages_held = {one.uid: len(one.allocation.pages) for one in self.schedule._running}
        given = self.given if decoding or self.given is None else max(self.given, 1)
        self.cache.has_refused = False
        planned = self.schedule.plan(given, self.row_cost)
        if planned is None:
            assert not self._may_run()
            return None
        plan, marks = planned
        kinds = {mark.event.kind for mark in marks if isinstance(mark, EventRow)}
        assert kinds in (set(), {"admitted"}, {"preempted"}), "who gave way would only take back what was needed"
        self._hear(marks, plan)
        decodes, prefills = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
        most = self.limits.max_prefill_length
        beside = min(most, self.limits.mixed_prefill_per_request * len(self.lives))
        budget = max(self.limits.mixed_prefill_length, beside) if decodes else most
        if given is not None:
            budget = max(min(given, most), 0 if decodes else 1)  # each stream may have been preempted
        if any(life.stands_still for life in self.lives.values()):
            budget = most
        count = sum(len(row.token_ids) for row in prefills)
        self.num_prefilled += count
        assert count <= budget
        self._check_the_order(prefills, marks, is_budget_left=count < budget)
        drafts = [row for row in decodes if row.is_draft]
        assert len(drafts) == plan.num_drafts and not any(row.is_draft for row in prefills)
        assert not drafts or self.row_cost is not None
        tables = [row.table for row in plan.rows if not row.is_draft]
        assert len(set(tables)) == len(tables) and all(0 <= t < self.limits.max_running_requests for t in tables)
        for row in decodes:
            life = self._holder(row)
            before = [draft.start for draft in drafts if draft.table == row.table and draft.start < row.start]
            ahead = len(before) + 1 if row.is_draft else 0
            assert ahead <= self.limits.most_drafts and len(life.tokens) + ahead < life.limit
            assert life.decodes and len(row.token_ids) == 1 and row.start == len(life.tokens) - 1 + ahead
            assert row.sample is not None and row.sample.position == row.start + 1 and row.sample.ahead in (0, ahead)
        still_decoding = {uid for uid in decoding if self.lives[uid].decodes}
        assert {self._holder(row).uid for row in decodes} == still_decoding, "a decode was delayed"
        for row in prefills:
            life = self._holder(row)
            assert not life.decodes and row.start >= life.computed
            assert life.chunks == 0 or row.new_pages == (), "the first chunk said all pages"
            life.chunks += 1
            life.stands_still = life.stands_still and row.sample is None
            assert (row.sample is not None) == (row.start + len(row.token_ids) == len(life.tokens))
        return plan

    def _has_no_place(self, life: Life, marks: list[StepRow]) -> bool:
        """Return whether a request that waits could not be let in."""
        return (
            any(isinstance(mark, EventRow) and isinstance(mark.event, Preempted) for mark in marks)
            or self.schedule.num_running == self.limits.max_running_requests
            or self.schedule.free_pages * self.memory.page_size < len(life.tokens)
            # a row that was planned later may have given back local parts
            or (self.memory.local.num_parts > 0 and self.cache.has_refused)
        )

    def _check_the_order(self, prefills: Sequence[PlanRow], marks: list[StepRow], *, is_budget_left: bool) -> None:
        """No prompt is computed while one before it goes without. Only who waits without a place is passed over, and
        with it all that wait behind it; then no request is taken.
        """
        cut = [row.sample is None for row in prefills]
        assert not any(cut if is_budget_left else cut[:-1]), "a prompt is cut where budget is left"
        computed = [self._holder(row) for row in prefills]
        admitted = [mark.uid for mark in marks if isinstance(mark, EventRow) and isinstance(mark.event, Admitted)]
        order = self._in_turn(self._prompts(admitted), prefills)
        assert computed == [life for life in order if life in computed]
        reached = len(order) if is_budget_left else order.index(computed[-1]) if computed else 0
        passed_over = [life for life in order[:reached] if life not in computed]
        if passed_over:
            assert not any(life.runs for life in passed_over), "it goes without"
            assert self._has_no_place(passed_over[0], marks)
            behind = order[order.index(passed_over[0]) :]
            assert not any(life.uid in admitted for life in behind), "it takes the place of one before it"
            assert self.schedule.room == 0

    def _in_turn(self, order: list[Life], prefills: Sequence[PlanRow]) -> list[Life]:
        """Return the requests in the order in which their owners take turns. The owner is next of whom least was
        computed, by its weight; who comes late saved nothing."""
        counts = {self._holder(row).uid: len(row.token_ids) for row in prefills}
        left, sequence = list(order), list[Life]()
        if not left:
            return sequence
        firsts = {life.owner: life for life in reversed(left)}
        turns = {owner: self._turn(owner, life.band) for owner, life in firsts.items()}
        ahead = {owner: given for owner, given in self.given_to.items() if given > self.clock}
        self.given_to = ahead | {owner: turn[1] for owner, turn in turns.items()}
        self.had_prompts = {owner: turns[owner][0] for owner in sorted(turns, key=lambda one: (-turns[one][2], one))}
        while left:
            firsts = {life.owner: life for life in reversed(left)}
            owner = min(firsts, key=lambda one: self._turn(one, firsts[one].band))
            first = firsts[owner]
            sequence.append(first)
            left.remove(first)
            if count := counts.get(first.uid):
                weights = sum(WEIGHTS[one] for one, life in firsts.items() if life.band <= first.band)
                self.clock = max(self.clock, self.given_to[owner]) + 1000 * count // weights
                self.given_to[owner] += 1000 * count // WEIGHTS[owner]
        return sequence

    def _turn(self, owner: str, band: int) -> tuple[int, int, int, str]:
        """Of owners that were given as much, the one that began last is next. Who had nothing as urgent saved none."""
        given, waits = self.given_to.get(owner, 0), [*self.had_prompts]
        if owner in waits and band >= self.had_prompts[owner]:
            return band, given, -waits.index(owner), owner
        return band, max(given, self.clock), -len(waits), owner

    def _prompts(self, admitted: Collection[str]) -> list[Life]:
        """Return the requests whose prompts are not computed, each owner's in their order. *admitted*: uids of those
        that waited until this plan.
        """
        may_run = sorted(self._may_run(), key=lambda life: life.order)
        begun = [life for life in may_run if life.runs and life.uid not in admitted and not life.decodes]
        waiting = [life for life in may_run if not life.runs or life.uid in admitted]
        self.looked_up = {life.uid for life in waiting[:MOST_TAKEN]}

        def order(life: Life) -> tuple[int, int, bool, int, int]:
            aged = PATIENCE * self._lacks(life) + life.came_at
            pauses = life.stands_still or len(life.tokens) > life.prompt_length
            return life.band, life.priority, not pauses, aged, life.arrival

        return sorted([*begun, *waiting], key=order)

    def _lacks(self, life: Life) -> int:
        """Return how many tokens of a prompt must be computed, before the plan that is checked."""
        found = life.computed
        if not life.chunks and isinstance(self.cache, NotedCache) and life.uid in self.looked_up:
            found = self.cache.noted[tuple(life.tokens)]
        return len(life.tokens) - found

    def _hear(self, marks: list[StepRow], plan: BatchPlan | None = None) -> None:
        """Fold the marks: the last request is preempted of the owner that holds the most pages, by its weight."""
        for mark in marks:
            assert isinstance(mark, EventRow)
            life = self.lives[mark.uid]
            assert mark.n == len(life.tokens) - life.prompt_length
            if isinstance(mark.event, Preempted):
                others = [other for other in self.lives.values() if other.runs and other.uid != self.alone] or [life]
                held: dict[tuple[int, str], int] = {}
                for one in others if plan is not None else ():
                    held[one.band, one.owner] = held.get((one.band, one.owner), 0) + self._pages_of(one)
                last = max(others, key=lambda one: (one.band, held.get((one.band, one.owner), 0), one.order))
                assert life is (last if plan is not None else max(others, key=lambda one: one.order))
                life.table, life.computed, life.chunks, life.decodes = -1, 0, 0, False
            else:
                assert isinstance(mark.event, Admitted) and plan is not None
                row = next(row for row in plan.rows if self.schedule.holder(row.table)[0] == mark.uid)
                assert row.start == mark.event.cached_tokens < len(life.tokens)
                assert all(other.table != row.table for other in self.lives.values())
                life.table = row.table

    def _pages_of(self, life: Life) -> int:
        """Return what a request counts of its pages, before the plan that is checked."""
        return 1000 * self.pages_held[life.uid] // WEIGHTS[life.owner]

    def _isolate(self, uid: str | None) -> None:
        """Let one request run and no other, or all again."""
        self.alone = uid
        self._hear(self.schedule.isolate(uid))
        assert uid is None or all(life.uid == uid for life in self.lives.values() if life.runs)

    def _may_run(self) -> list[Life]:
        return [life for life in self.lives.values() if self.alone in (None, life.uid)]

    def _holder(self, row: PlanRow) -> Life:
        uid, n = self.schedule.holder(row.table)
        life = self.lives[uid]
        assert life.table == row.table and n == len(life.tokens) - life.prompt_length
        return life

    def _compute(self, plan: BatchPlan) -> list[tuple[str, list[int]]]:
        """Run a plan as an engine does, all writes before any read; return who samples, and after which tokens."""
        for row in plan.rows:
            self.memory.extend(row)
        written: set[int] = set()
        seen: dict[int, list[int]] = {}
        """Table -> tokens and drafts."""
        sampled = []
        for row in plan.rows:
            life = self._holder(row)
            tokens = seen[row.table] = [*seen[row.table], *row.token_ids] if row.is_draft else life.tokens
            assert list(row.token_ids) == tokens[row.start : row.start + len(row.token_ids)]
            slots = self.memory.write(row, tokens)
            assert written.isdisjoint(slots), "two rows write into one slot"
            written |= slots
            if row.sample is not None:
                sampled.append((life.uid, tokens))
        for row in plan.rows:
            life = self._holder(row)
            assert len(self.memory.tables[row.table]) == -(-len(seen[row.table]) // self.memory.page_size)
            self.memory.check(row.table, seen[row.table], row.start)
            if not row.is_draft:
                life.computed = row.start + len(row.token_ids)
        return sampled

    def _fold(self, rows: list[TokenRow], sampled: list[tuple[str, list[int]]]) -> None:
        """Fold the tokens of a step: one for each that sampled and is still there, up to a draft that was wrong."""
        coming = iter(rows)
        for uid, tokens in sampled:
            life = self.lives.get(uid)
            if life is None or tokens != life.tokens:
                continue
            row, life.computed = next(coming), len(tokens)
            assert row.uid == uid
            assert row.token == next_token(tuple(life.tokens))
            assert row.chunks == life.chunks
            life.tokens = [*tokens, row.token]
            life.decodes, life.chunks = True, 0
            assert row.n == len(life.tokens) - life.prompt_length
            assert row.end == life.end_after(row.token)
            if row.end is not None:
                self.known.append(self.lives.pop(row.uid).tokens)
        assert not [*coming]

    def _drop(self, uid: str) -> None:
        assert self.schedule.drop(uid)
        assert not self.schedule.drop(uid)
        del self.lives[uid]


class RadixMachine(Machine):
    kind = NotedCache


class NaiveMachine(Machine):
    kind = NaiveNotedCache


TestRequestsOverARadixCacheLiveAsTheyShould = RadixMachine.TestCase
TestRequestsOverANaiveCacheLiveAsTheyShould = NaiveMachine.TestCase
TestRequestsOverARadixCacheLiveAsTheyShould.settings = STORIES
TestRequestsOverANaiveCacheLiveAsTheyShould.settings = STORIES
