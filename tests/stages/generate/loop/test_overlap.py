"""With overlap a request gets the tokens, the end and the scores that it gets without, whatever happens around it.

The engine of these stories keeps in its pages, in the place of keys and values, the tokens that they come from. A token
is a function of what the pages hold, so a wrong page, row, position or placeholder changes it. Hypothesis makes up what
happens, and shortens the stories that fail.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import noted
from support.journalled import journal_of, silent_loop
from support.selection import by_night

from pipeline.events import Failed, SamplingParams, Score, StepCompleted, TokenRow
from pipeline.log.journal import steps
from pipeline.stage.worker import Stop
from stages.generate.kvcache import make_cache
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, LocalLayers
from stages.generate.loop.log_thread import Arrived, Ended, Flush, Update
from stages.generate.loop.updates import Room
from stages.generate.loop.worker import GenerateWorker
from stages.generate.ranks.channel import Follower, Leader
from stages.generate.ranks.steps import FollowingEngine, LaunchingEngine
from stages.generate.schedule.again import differences
from stages.generate.schedule.plan import BatchPlan, Computed, PlanRow, RowScores, Sample
from stages.generate.schedule.recorded import RecordedSchedule
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, ScheduleLimits

EOS, VOCABULARY, POISON = 9, 12, 11
MOST_ROUNDS: Final = 20_000
"""Of the loop. A story that takes more of them has a request that waits for ever."""


@dataclass(frozen=True)
class Arrival:
    """A request comes."""

    after: int
    """Rounds of the loop since what happened before."""
    request: NewRequest
    resumed: bool = False
    suspect: bool = False


@dataclass(frozen=True)
class Cancel:
    """One of the requests that are here ends elsewhere. Sometimes it comes again, under the same uid."""

    after: int
    which: int
    returns: bool = False


@dataclass(frozen=True)
class FlushCache:
    """A client empties the prefix cache."""

    after: int


@dataclass(frozen=True)
class Death:
    """The engine dies before it has committed its last step, and another one goes on."""

    after: int


@dataclass(frozen=True)
class Story:
    """What happens, and to what kind of engine."""

    happens: tuple[Arrival | Cancel | FlushCache | Death, ...]
    cache: str
    num_pages: int
    page_size: int
    limits: ScheduleLimits
    lazy: bool
    """Whether the engine computes a step only when somebody waits for it, or for a later one."""
    local: LocalLayers = NO_LOCAL_LAYERS


class Misread(BaseException):
    """A row reads what was not written for it. No loop takes this for an engine's failure."""


@dataclass(eq=False)
class Launched:
    """A step of the pages."""

    plan: BatchPlan
    before: Launched | None
    pages: list[tuple[int, ...]] = field(default_factory=list)
    """Pages of each row; and its local ones, by their place among them."""
    local: list[dict[int, int]] = field(default_factory=list)
    samples: list[Sample] | None = None
    """As soon as they are settled."""
    held: list[tuple[int, ...]] = field(default_factory=list)
    """What the pages hold of each row, once it is computed."""
    token_ids: list[int] | None = None
    error: Exception | None = None

    @property
    def is_drawn(self) -> bool:
        return self.token_ids is not None


class Pages:
    """An engine whose slots hold all tokens up to their own. It computes steps in the order of their launches."""

    def __init__(self, story: Story) -> None:
        self._lazy, self._page_size = story.lazy, story.page_size
        self._local = story.local
        num_parts = story.num_pages * (1 + story.local.num_parts)
        self._slots: list[tuple[int, ...]] = [()] * (num_parts * story.page_size)
        self._tables: dict[int, list[int]] = {}
        self._local_tables: dict[int, dict[int, int]] = {}
        """Table -> page -> its first local part, for all of them."""
        self._queue: deque[Launched] = deque()

    def forward(self, plan: BatchPlan) -> Computed:
        raise NotImplementedError

    def end(self) -> None: ...

    def launch(self, plan: BatchPlan, before: Launched | None) -> Launched:
        if before is not None:
            self._settle(before)
        for row in plan.rows:
            table = self._tables.setdefault(row.table, [])
            table[row.first_page :] = row.new_pages or table[row.first_page :]
            first_parts = row.new_local[:: max(self._local.num_parts, 1)]
            self._local_tables.setdefault(row.table, {}).update(enumerate(first_parts, row.first_local))
        launched = Launched(plan, before)
        launched.pages = [tuple(self._tables[row.table]) for row in plan.rows]
        launched.local = [dict(self._local_tables[row.table]) for row in plan.rows]
        self._queue.append(launched)
        if not self._lazy:
            self._compute_up_to(launched)
            if launched.error is not None:
                raise launched.error
        return launched

    def wait(self, launched: Launched) -> Computed:
        self._settle(launched)
        self._compute_up_to(launched)
        if launched.error is not None:
            raise launched.error
        token_ids = self._drawn(launched)
        scores: dict[int, RowScores] = {}
        tokens = iter(token_ids)
        for row, held in zip(launched.plan.rows, launched.held, strict=True):
            token = next(tokens) if row.sample is not None else None
            of_token = row.sample is not None and row.sample.params.logprobs is not None
            of_prompt = [Score(logprob=-float(target), top=()) for target in row.scoring.targets] if row.scoring else []
            if of_token or of_prompt:
                score = Score(logprob=-float(sum(held) + (token or 0)), top=()) if of_token else None
                scores[row.table] = RowScores((score,) if score else (), tuple(of_prompt))
        return Computed(token_ids, scores)

    def _settle(self, launched: Launched) -> None:
        """The host reads what the schedule knows. From now on a draw does not wait for it."""
        if launched.samples is None:
            launched.samples = [row.sample.settled() for row in launched.plan.rows if row.sample is not None]

    def _compute_up_to(self, last: Launched) -> None:
        while last in self._queue:
            launched = self._queue.popleft()
            known = [] if launched.before is None else self._drawn(launched.before)
            for row, pages, local in zip(launched.plan.rows, launched.pages, launched.local, strict=True):
                launched.held.append(self._computed(row, pages, local, known))
            if any(POISON in held for held in launched.held):
                launched.error = IndexError("poison")

    def _computed(
        self, row: PlanRow, pages: Sequence[int], local: Mapping[int, int], known: Sequence[int]
    ) -> tuple[int, ...]:
        token_ids = [token if token >= 0 else [*known, *[0] * 99][-1 - token] for token in row.token_ids]
        held = self._slots[self._slot(pages, row.start - 1)] if row.start else ()
        if self._local.num_parts:
            for position in range(max(0, row.start + 1 - self._local.window), row.start):
                if self._slots[self._slot(local, position)] != held[: position + 1]:
                    raise Misread(row, position)
        for offset, token in enumerate(token_ids):
            held = (*held, token)
            self._slots[self._slot(pages, row.start + offset)] = held
            if self._local.num_parts:
                self._slots[self._slot(local, row.start + offset)] = held
        return held

    def _slot(self, pages: Sequence[int] | Mapping[int, int], position: int) -> int:
        return pages[position // self._page_size] * self._page_size + position % self._page_size

    def _drawn(self, launched: Launched) -> list[int]:
        if launched.token_ids is None:
            assert launched.samples is not None
            sampling = [
                held for row, held in zip(launched.plan.rows, launched.held, strict=True) if row.sample is not None
            ]
            launched.token_ids = [draw(*one) for one in zip(sampling, launched.samples, strict=True)]
        return launched.token_ids


class InCalls(Pages):
    """Such an engine that computes several steps in one call."""

    computes_several = True

    def __init__(self, story: Story) -> None:
        super().__init__(story)
        self.lengths: list[int] = []
        """Number of steps in each call."""

    def several(self, plan: BatchPlan, most: int, ends: Sequence[Sequence[int]]) -> list[Computed]:
        made: list[Computed] = []
        while len(made) < most:
            made.append(self.wait(self.launch(plan, None)))
            token_ids = made[-1].token_ids
            if any(token in of_row for token, of_row in zip(token_ids, ends, strict=True)):
                break
            rows = [
                dataclasses.replace(row, start=row.start + 1, token_ids=(token,), new_pages=(), new_local=())
                for row, token in zip(plan.rows, token_ids, strict=True)
            ]
            plan = dataclasses.replace(plan, rows=tuple(rows))
        self.lengths.append(len(made))
        return made


def draw(held: tuple[int, ...], sample: Sample) -> int:
    """Return what this model says after *held*: always the same."""
    number = sum((position + 1) * token for position, token in enumerate(held)) + len(held)
    if sample.seen is not None:
        output = list(held[sample.prompt_length :])
        assert set(sample.seen.prompt_ids) == set(held[: sample.prompt_length])
        assert dict(zip(sample.seen.output_ids, sample.seen.counts, strict=True)) == Counter(output)
        number += sum(place * token for place, token in enumerate(sample.seen.output_ids))
    token = EOS if number % 7 == 0 else number % 5
    while token in sample.forbidden:
        token = (token + 1) % (POISON - 1)
    return token


class Rank(Pages):
    """One rank's part of such an engine. Notes what it does at the same time as the other rank, and in its place.

    A forward pass of ranks must not fail, so the poison works when tokens are drawn.
    """

    def __init__(self, story: Story) -> None:
        super().__init__(dataclasses.replace(story, lazy=True))
        self.done: list[tuple[object, ...]] = []
        self.num_gathered = 0

    def launch(self, plan: BatchPlan, before: Launched | None) -> Launched:
        launched = super().launch(plan, before)
        self._compute_up_to(launched)
        self.done.append(("forward", plan.step, *launched.held))
        return launched

    def settle(self, launched: Launched) -> list[int]:
        if not launched.is_drawn:
            self.follow_draw(launched)
        if launched.error is not None:
            raise launched.error
        self._settle(launched)
        return self._drawn(launched)

    def wait(self, launched: Launched) -> Computed:
        self.settle(launched)
        self.follow_scores(launched)
        return super().wait(launched)

    def follow_launch(self, plan: BatchPlan, token_ids: Sequence[int] = ()) -> Launched:
        before = Launched(BatchPlan(0, (), 0), None, token_ids=list(token_ids))
        return self.launch(plan, before if token_ids else None)

    def follow_draw(self, launched: Launched) -> None:
        self.num_gathered += 1
        self.done.append(("logits", launched.plan.step, sum(row.sample is not None for row in launched.plan.rows)))

    def follow_scores(self, launched: Launched, num_done: int = 0) -> None:
        for row in [row for row in launched.plan.rows if row.scoring is not None and row.scoring.targets][num_done:]:
            self.num_gathered += 1
            self.done.append(("scores", launched.plan.step, row.table))


class Wire:
    """In place of a gloo group both ends of which are in this thread: keeps what is sent until it is received."""

    def __init__(self) -> None:
        self.sent = deque[torch.Tensor]()
        self.receives = False

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Wire:
        (ints,) = tensors
        if self.receives:
            ints.copy_(self.sent.popleft())
        else:
            self.sent.append(ints.clone())
        return self

    def wait(self) -> None: ...


class Apart(BaseException):
    """Two ranks do not do the same. No loop takes this for an engine's failure."""


class TwoRanks:
    """Rank 0's engine of a story. Another rank follows after each call."""

    def __init__(self, story: Story) -> None:
        self._wire = Wire()
        ranks: Any = Rank(story), Rank(story)
        self._done = tuple(rank.done for rank in ranks)
        self._leader = Leader(self._wire, print, idle_s=1e6)
        self._leading = LaunchingEngine(ranks[0], self._leader, ranks[0], VOCABULARY)
        self._following = FollowingEngine(ranks[1], Follower(self._wire))

    def forward(self, plan: BatchPlan) -> Computed:
        raise NotImplementedError

    def end(self) -> None:
        self._leader.leave()

    def launch(self, plan: BatchPlan, before: Any) -> Any:
        try:
            return self._leading.launch(plan, before)
        finally:
            self._follow()

    def wait(self, launched: Any) -> Computed:
        try:
            return self._leading.wait(launched)
        finally:
            self._follow()

    def _follow(self) -> None:
        self._wire.receives = True
        while self._wire.sent:
            self._following.follow()
        self._wire.receives = False
        mine, its = self._done
        if mine != its:
            raise Apart(mine, its)
        mine.clear()
        its.clear()


class Dies(Exception):
    """The engine dies."""


class Told:
    """The log of a story without a log: a worker's log thread and its lease."""

    def __init__(self, story: Story) -> None:
        self.stop = Stop()
        self.lost = threading.Event()
        self.status = SimpleNamespace(flushed_pages=0, books_wrong=0)
        self.came: dict[str, NewRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[object]] = {}
        self.ends: dict[str, object] = {}
        self.here: list[str] = []
        self.journal: list[list[tuple[int, StepCompleted]]] = [[]]
        """The steps of each engine."""
        self._gone: set[str] = set()
        """Uids that the engine has consumed: it says nothing more of them."""
        self._left: set[str] = set()
        """Those that ended elsewhere, and that the engine has not consumed."""
        self._returns: list[NewRequest] = []
        self._happens = deque(story.happens)
        self._rounds = self._quiet = 0
        self._dies = False

    # as a log thread

    def next_update(self, timeout_s: float = 0.0) -> Update | None:
        self._rounds += 1
        assert self._rounds < MOST_ROUNDS, "something waits for ever"
        while self._returns and self._returns[0].uid not in self._left:
            return self._arrived(self._returns.pop(0), resumed=True)
        if not self._happens:
            if timeout_s and not self._returns:
                assert not self.here, "a request waits for ever"
                self.stop.set()
            return None
        self._quiet += 1
        if self._quiet <= self._happens[0].after and not timeout_s:
            return None
        self._quiet = 0
        return self._next(self._happens.popleft())

    def _next(self, event: Arrival | Cancel | FlushCache | Death) -> Update | None:
        match event:
            case Arrival(request=request, resumed=resumed, suspect=suspect):
                return self._arrived(request, resumed, suspect)
            case Cancel(which=which, returns=returns) if self.here:
                uid = self.here.pop(which % len(self.here))
                self._left.add(uid)
                if returns:
                    self._returns.append(dataclasses.replace(self.came[uid], output_ids=tuple(self.tokens[uid])))
                else:
                    self.ends[uid] = "cancelled"
                return Ended(uid)
            case FlushCache():
                return Flush("1-0")
            case Death():
                self._dies = True
        return None

    def _arrived(self, request: NewRequest, resumed: bool, suspect: bool = False) -> Arrived:
        uid = request.uid
        self._gone.discard(uid)
        if uid not in self.came:
            self.came[uid], self.tokens[uid], self.scores[uid] = request, list(request.output_ids), []
        else:
            request = dataclasses.replace(request, output_ids=tuple(self.tokens[uid]))
        self.here.append(uid)
        return Arrived(request, resumed or bool(request.output_ids), suspect)

    def commit(self, number: int, event: StepCompleted, ended: Sequence[str], room: Room, **_: Any) -> None:
        if self._dies:
            self._dies = False
            raise Dies
        steps_before = self.journal[-1]
        assert number == len(steps_before) + 1, "step numbers rise, and none is left out"
        steps_before.append((number, event))
        for row in event.rows:
            assert row.uid not in self._gone, "the engine speaks of a request that it has consumed"
            known = len(self.tokens[row.uid])
            if isinstance(row, TokenRow):
                assert row.uid in self.here and row.n == known + 1 and row.token >= 0
                self.tokens[row.uid].append(row.token)
                self.scores[row.uid].append((row.score, row.prompt_scores))
                if row.end is not None:
                    self.ends[row.uid] = row.end
            elif row.uid in self.here:
                assert row.n == known
                if isinstance(row.event, Failed):
                    self.ends[row.uid] = row.event.code
        self._gone |= set(ended)
        self._left -= set(ended)
        self.here = [uid for uid in self.here if uid not in ended]

    def idle(self, room: Room) -> None: ...

    def close(self) -> None: ...

    # as a lease

    def report_progress(self, patience_s: float = 0.0) -> None: ...

    def say(self, **_: Any) -> None: ...

    # between two engines

    def next_engine(self) -> None:
        """Bring what the dead one had in hand."""
        for uid in self._left:
            self._gone.add(uid)
        self._left.clear()
        arrivals = [
            Arrival(0, dataclasses.replace(self.came[uid], output_ids=tuple(self.tokens[uid])), True, at % 3 == 2)
            for at, uid in enumerate(self.here)
        ]
        self.here.clear()
        self._happens.extendleft(reversed(arrivals))
        self.journal.append([])

    def request_of(self, uid: str, n: int) -> NewRequest:
        return dataclasses.replace(self.came[uid], output_ids=tuple(self.tokens[uid][:n]))


class Checked(RecordedSchedule):
    """A schedule that checks its books after each step."""

    def complete(self, token_ids: Sequence[int], scores: Mapping[int, RowScores] | None = None) -> list[TokenRow]:
        rows = super().complete(token_ids, scores)
        assert self.problems() == []
        return rows


def lived(
    story: Story,
    *,
    overlap: bool,
    snapshot_every: int = 9,
    make: type[Pages] | type[TwoRanks] = Pages,
    told: Told | None = None,
) -> Told:
    """Let engines live a story, one after the other."""
    told = told or Told(story)
    together_s = 60.0 if make is InCalls else 0.0
    with silent_loop(snapshot_every):
        while not told.stop:
            identity = Identity("generate-0", len(told.journal), "w", "n")
            local = story.local
            if local.num_parts:
                local = dataclasses.replace(local, largest_chunk=story.limits.largest_chunk)
            cache = make_cache(story.cache, story.num_pages, story.page_size, local)
            capacity = local.capacity(story.num_pages, story.page_size)
            limits = dataclasses.replace(story.limits, context=min(story.limits.context, capacity))
            schedule = Checked(cache, limits, [EOS], identity)
            log, engine = cast(Any, told), make(story)
            try:
                GenerateWorker(engine, schedule, log, log, overlap=overlap, together_s=together_s).run(told.stop)
            except Dies:
                told.next_engine()
            except Apart as apart:
                raise AssertionError("the ranks are not at the same place") from apart
            else:
                assert schedule.problems() == [] and schedule.free_pages == story.num_pages
            finally:
                engine.end()
    assert told.status.books_wrong == 0
    return told


def planned_again(told: Told) -> None:
    """See that the steps of each engine are planned again as they were."""
    for epoch, made in enumerate(told.journal, 1):
        for step, different in differences(steps(journal_of(made, epoch)), told.request_of):
            assert not different, f"step {step.id}: {different}"


def same_for_each_request(one: Told, other: Told) -> None:
    """See that two runs of a story gave each request the same; of one that was cancelled, as far as both came."""
    assert one.came.keys() == other.came.keys()
    for uid in one.came:
        ours, theirs = (told.tokens[uid] for told in (one, other))
        if "cancelled" in (one.ends[uid], other.ends[uid]):
            length = min(len(ours), len(theirs))
            ours, theirs = ours[:length], theirs[:length]
        else:
            assert one.ends[uid] == other.ends[uid]
            assert one.scores[uid] == other.scores[uid]
        assert ours == theirs


# stories

AFTER = st.integers(0, 7)
PROMPTS = st.builds(
    lambda begin, rest: (*begin, *rest),
    st.sampled_from([(), (0, 1, 0, 1, 2, 0), (2, 2, 1)]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 1, 2, 5, 12, 30]),
    min_tokens=st.sampled_from([0, 0, 3]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (3,)]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    logprobs=st.sampled_from([None, None, 0]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
REQUESTS = st.builds(
    NewRequest,
    st.just(""),
    PROMPTS,
    st.sampled_from([(), (), (), (1,), (2, 0, 1)]),
    SAMPLING,
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    bad_words=st.sampled_from([(), (), ((4,), (0, 1))]),
)
HAPPENINGS = st.one_of(
    st.builds(Arrival, AFTER, REQUESTS, suspect=st.booleans()),
    st.builds(Arrival, AFTER, REQUESTS, suspect=st.booleans()),
    st.builds(Cancel, AFTER, st.integers(0, 9), st.booleans()),
    st.sampled_from([FlushCache(0), Death(2), Death(5)]),
)


def told_as_a_story(happens: Sequence[Arrival | Cancel | FlushCache | Death], poisoned: int, **engine: Any) -> Story:
    """Give the requests their uids, and one of them the poison: if all rows of a step raise, the engine ends."""
    named: list[Any] = []
    for at, event in enumerate(happens):
        if isinstance(event, Arrival):
            request = dataclasses.replace(event.request, uid=f"r{at}")
            if at == poisoned:
                request = dataclasses.replace(request, prompt_ids=(*request.prompt_ids, POISON))
            resumed = bool(request.output_ids)
            event = dataclasses.replace(event, request=request, resumed=resumed, suspect=event.suspect and resumed)
        named.append(event)
    return Story(tuple(named), **engine)


STORIES = st.builds(
    told_as_a_story,
    st.lists(HAPPENINGS, min_size=3, max_size=14),
    poisoned=st.integers(0, 20),
    cache=st.sampled_from(["radix", "radix", "naive"]),
    num_pages=st.integers(10, 16),
    page_size=st.sampled_from([1, 2, 4]),
    limits=st.builds(
        ScheduleLimits,
        context=st.integers(8, 10) | st.integers(8, 40),
        max_prefill_length=st.integers(1, 20),
        mixed_prefill_length=st.integers(1, 6),
        max_running_requests=st.integers(1, 5),
        vocab_size=st.just(VOCABULARY),
    ),
    lazy=st.booleans(),
    local=st.sampled_from([NO_LOCAL_LAYERS, *(LocalLayers(1 + window % 2, window) for window in (1, 3, 4, 7))]),
)


@settings(max_examples=by_night(50, 2000), deadline=None)
@given(STORIES)
def test_a_request_gets_the_same_with_overlap_and_without(story: Story) -> None:
    without, with_it = lived(story, overlap=False), lived(story, overlap=True)
    same_for_each_request(without, with_it)
    planned_again(without)
    planned_again(with_it)


@settings(max_examples=by_night(20, 2000), deadline=None)
@given(STORIES)
def test_ranks_give_a_request_with_overlap_what_one_process_gives_without(story: Story) -> None:
    """Two ranks, that is; all that one says to the other goes through frames."""
    same_for_each_request(lived(story, overlap=False), lived(story, overlap=True, make=TwoRanks))


@settings(max_examples=by_night(50, 2000), deadline=None)
@given(STORIES)
def test_steps_in_one_call_give_a_request_what_single_steps_give(story: Story) -> None:
    single, in_calls = lived(story, overlap=False), lived(story, overlap=False, make=InCalls)
    same_for_each_request(single, in_calls)
    planned_again(in_calls)


def test_calls_end_where_a_row_ends_or_needs_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    happens = (
        Arrival(0, NewRequest("a", (1, 2, 0, 1, 2), (), SamplingParams(ignore_eos=True, max_tokens=30))),
        Arrival(1, NewRequest("b", (2, 1, 1), (), SamplingParams(ignore_eos=True, max_tokens=6))),
    )
    story = Story(happens, "radix", num_pages=30, page_size=16, limits=LIMITS, lazy=False)
    calls = noted(monkeypatch, InCalls, "several", lambda pages, plan, most, ends: (len(plan.rows), most))
    single, in_calls = lived(story, overlap=False), lived(story, overlap=False, make=InCalls)
    same_for_each_request(single, in_calls)
    # b has 5 tokens to go, then a comes to the end of its page, and to its last token.
    assert calls == [(2, 5), (1, 5), (1, 8), (1, 8), (1, 2)]


@pytest.mark.parametrize("at", range(1, 9))
def test_an_engine_that_dies_at_any_step_of_a_call_costs_no_token(at: int) -> None:
    class Mortal(Told):
        """Its engine dies when it commits this step of its first call."""

        def commit(self, number: int, event: StepCompleted, ended: Sequence[str], room: Room, **rest: Any) -> None:
            self._dies = self._dies or (len(self.journal) == 1 and number == 2 + at)
            super().commit(number, event, ended, room, **rest)

    happens = (Arrival(0, NewRequest("a", (1, 2), (), SamplingParams(ignore_eos=True, max_tokens=25))),)
    story = Story(happens, "radix", num_pages=30, page_size=16, limits=LIMITS, lazy=False)
    single, died = lived(story, overlap=False), lived(story, overlap=False, make=InCalls, told=Mortal(story))
    assert len(died.journal) == 2
    same_for_each_request(single, died)
    planned_again(died)


def test_steps_are_launched_ahead_while_a_request_that_was_taken_over_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happens = tuple(Arrival(0, NewRequest(uid, (2, 1), (1,), ENDLESS), resumed=True) for uid in "ab")
    limits = dataclasses.replace(LIMITS, max_running_requests=1)
    story = Story(happens, "radix", num_pages=30, page_size=4, limits=limits, lazy=True)
    without = lived(story, overlap=False)
    ahead = noted(monkeypatch, Pages, "launch", lambda pages, plan, before: before is not None)
    with_it = lived(story, overlap=True, snapshot_every=1000)
    same_for_each_request(without, with_it)
    planned_again(with_it)
    assert ahead.count(False) <= 4 and ahead.count(True) > 60  # two steps for each request come one by one


ENDLESS = SamplingParams(ignore_eos=True)
LIMITS = ScheduleLimits(40, 16, 4, max_running_requests=4, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(Cancel(5, 0), id="cancel"),
        pytest.param(Arrival(5, NewRequest("b", (2, 1), (1,), ENDLESS), resumed=True), id="takeover"),
        pytest.param(Arrival(5, NewRequest("b", (2, 1), (1,), ENDLESS), resumed=True, suspect=True), id="suspect"),
        pytest.param(Arrival(5, NewRequest("b", (2, POISON), (), ENDLESS)), id="failure"),
    ],
)
def test_what_waits_for_the_step_in_flight(then: Arrival | Cancel) -> None:
    happens = (Arrival(0, NewRequest("a", (1, 2), (), ENDLESS)), then)
    story = Story(happens, "radix", num_pages=30, page_size=4, limits=LIMITS, lazy=True)
    without, with_it = lived(story, overlap=False), lived(story, overlap=True)
    same_for_each_request(without, with_it)
    planned_again(with_it)
