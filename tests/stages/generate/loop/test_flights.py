"""A step that fails: whose fault it is, and who notices. Some requests have ended while it was in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from structlog.testing import capture_logs
from support.calls import noted
from support.schedules import make_schedule, planned, request, steps

from pipeline.errors import DeviceFull
from pipeline.events import EventRow, Failed, Score, StepRow, TokenRow
from pipeline.metrics.counters import Measures
from stages.generate.loop.flights import Flight, Flights
from stages.generate.loop.meter import EngineMeter
from stages.generate.schedule.plan import NOT_A_NUMBER, BatchPlan, Computed, RowScores
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Schedule

TOKEN = 7


class Engine:
    """Launches nothing, and gives every row the same token, but not the rows of the tables that are not numbers."""

    def __init__(
        self,
        *,
        broken: bool = False,
        not_numbers: tuple[int, ...] = (),
        error: Exception | None = None,
        error_alone: Exception | None = None,
        num_more: int = 0,
        num_more_alone: int = 0,
        scores: Mapping[int, RowScores] = MappingProxyType({}),
    ) -> None:
        """*num_more*: tokens that it returns beyond those that it was asked for; below 0: that it leaves out."""
        self.num_more, self.num_more_alone, self.scores = num_more, num_more_alone, scores
        self.not_numbers = not_numbers
        self.error = RuntimeError("CUDA error: an illegal memory access was encountered") if broken else error
        self.error_alone = error_alone or self.error

    def forward(self, plan: BatchPlan) -> Computed:
        return self.wait(self.launch(plan, None)).checked()

    def launch(self, plan: BatchPlan, before: BatchPlan | None) -> BatchPlan:
        return plan

    def wait(self, launched: BatchPlan) -> Computed:
        error = self.error if len(launched.rows) > 1 else self.error_alone
        if error is not None:
            raise error
        tokens = [NOT_A_NUMBER if row.table in self.not_numbers else TOKEN for row in launched.rows]
        is_alone = len(launched.rows) == 1
        num_more = self.num_more_alone if is_alone else self.num_more
        tokens = (tokens + [TOKEN] * max(num_more, 0))[: len(tokens) + num_more]
        return Computed(tokens, {} if is_alone else self.scores)


def landed(engine: Engine, *left: str, b: NewRequest | None = None) -> tuple[Schedule, list[StepRow]]:
    """Launch a step of the requests a, b and c, let some leave, and land it."""
    schedule = make_schedule()
    for new in (request("a"), b or request("b"), request("c")):
        assert schedule.add(new) is None
    flights = Flights(engine, schedule, EngineMeter(Measures(), schedule), None)
    flights.launch(Flight(*planned(schedule), number=1, budget=None))
    for uid in left:
        schedule.drop(uid)
    _, rows, failed = flights.land()
    assert schedule.problems() == []
    assert failed == [row.uid for row in rows if isinstance(row, EventRow) and isinstance(row.event, Failed)]
    return schedule, rows


@pytest.mark.parametrize("left", [(), ("b",), ("a", "b"), ("a", "b", "c")])
def test_an_engine_that_raises_on_all_rows_is_broken_even_if_some_requests_have_ended(left: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError, match="CUDA error"):
        landed(Engine(broken=True), *left)


def test_a_row_that_is_not_a_number_harms_nobody_if_its_request_has_ended() -> None:
    schedule, rows = landed(Engine(not_numbers=(1,)), "b")
    assert [(row.uid, row.token) for row in rows if isinstance(row, TokenRow)] == [("a", TOKEN), ("c", TOKEN)]
    assert schedule.num_running == 2


def test_a_request_whose_row_is_not_a_number_fails_alone() -> None:
    schedule, rows = landed(Engine(not_numbers=(0, 1)), "b")
    (failed,) = (row for row in rows if isinstance(row, EventRow) and isinstance(row.event, Failed))
    assert failed.uid == "a"
    assert schedule.num_output("c") == 0 and schedule.num_waiting == 1, "it begins again"


def test_a_full_device_ends_the_engine_and_its_batch_is_in_the_log() -> None:
    with capture_logs() as lines, pytest.raises(DeviceFull):
        landed(Engine(error=DeviceFull("Tried to allocate 2.00 GiB.")))
    (line,) = lines
    assert (line["event"], line["error"]) == ("out_of_memory", "Tried to allocate 2.00 GiB.")
    assert (line["decode_rows"], line["uids"]) == (0, ["a", "b", "c"])
    assert len(line["prefill_tokens"]) == 3 and min(line["prefill_tokens"]) > 0


def test_a_device_that_is_full_when_a_row_is_tried_alone_ends_the_engine() -> None:
    full = DeviceFull("no memory")
    with pytest.raises(DeviceFull):
        landed(Engine(error=ValueError("a bad row"), error_alone=full))


@pytest.mark.parametrize("left", [(), ("b",)])
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine(num_more=-1), "2 tokens for 3 rows"),
        (Engine(num_more=1), "4 tokens for 3 rows"),
        (Engine(scores={0: RowScores(prompt=(Score(logprob=-1),))}), "1 scores for 0 tokens of a prompt"),
        (Engine(scores={7: RowScores()}), "scores of 1 rows that are not in the step"),
    ],
    ids=["fewer tokens", "more tokens", "scores that nobody asked for", "scores of others"],
)
def test_a_step_with_another_number_of_results_than_was_asked_for_is_begun_again_and_loses_no_row(
    engine: Engine, words: str, left: tuple[str, ...]
) -> None:
    with capture_logs() as lines:
        schedule, rows = landed(engine, *left)
    assert [(line["event"], words in str(line["exc_info"])) for line in lines] == [("step_failed", True)]
    assert not any(isinstance(row, TokenRow) for row in rows)
    assert not any(isinstance(row, EventRow) and isinstance(row.event, Failed) for row in rows)
    here = [uid for uid in "abc" if uid not in left]
    assert [schedule.num_output(uid) for uid in here] == [0] * len(here) and schedule.num_waiting == len(here)
    answers = {row.uid: row.token for _, _, said in steps(schedule, most=1) for row in said}
    assert answers.keys() == set(here)


def test_an_engine_that_returns_a_wrong_number_of_tokens_for_every_row_is_broken() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        landed(Engine(num_more=1, num_more_alone=1))


def test_a_bug_of_the_schedule_is_not_taken_for_a_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    launched = noted(monkeypatch, engine, "launch")

    def bug(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Schedule, "complete", bug)
    with capture_logs() as lines, pytest.raises(KeyError, match="a bug"):
        landed(engine)
    assert len(launched) == 1 and lines == [], "nothing is computed again, and the engine is not blamed"


class GivesUp:
    """A matcher that passes a limit."""

    error = "too many items"

    def advance(self, token: int) -> None:
        raise AssertionError("it goes no further")

    def draft(self, proposed: Sequence[int], most_forced: int) -> tuple[Sequence[int], bool]:
        return (), False

    def allowed(self, ahead: int = 0) -> None:
        return None


BOUND = replace(request("b", length=3, output=(7, 7)), grammar="g", grammar_param="ebnf", matcher=GivesUp())


def test_a_request_whose_matcher_gives_up_fails_alone_and_before_its_token_counts() -> None:
    schedule, rows = landed(Engine(not_numbers=(0,)), b=BOUND)  # its stream pauses, so it comes first
    assert [(row.uid, row.token) for row in rows if isinstance(row, TokenRow)] == [("a", TOKEN), ("c", TOKEN)]
    (told,) = (row for row in rows if isinstance(row, EventRow))
    assert (told.uid, told.n) == ("b", 2)
    assert isinstance(told.event, Failed) and told.event.code == "grammar_too_complex"
    assert told.event.param == "ebnf" and schedule.num_running == 2


def test_a_matcher_that_gives_up_fails_its_request_also_when_the_step_fails_for_another_one() -> None:
    _, rows = landed(Engine(not_numbers=(0, 1)), b=BOUND)
    ends = {row.uid: row.event.code for row in rows if isinstance(row, EventRow) and isinstance(row.event, Failed)}
    assert ends["b"] == "grammar_too_complex"
