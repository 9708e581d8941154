"""What a detokenizer says to /metrics of the requests whose steps it folds, by Redis' clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.folds import DECODER, admitted, drafted_rows, token_row
from support.histories import moments_of
from support.measured import count_of, total_of

from pipeline.events import (
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    SamplingParams,
    StepCompleted,
    StepRow,
    StepStats,
    Submitted,
    Tokenized,
)
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    BETWEEN_TOKENS_SECONDS,
    DECODE_SECONDS,
    FIRST_TOKEN_SECONDS,
    INFERENCE_SECONDS,
    PER_TOKEN_SECONDS,
    PREFILL_SECONDS,
    QUEUE_SECONDS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SECONDS,
    REQUEST_SUCCESS,
    Family,
)
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.meter import DetokenizeMeter

BEGAN_MS = 10_000
OF_FINISHED = (
    *(REQUEST_SECONDS, QUEUE_SECONDS, PREFILL_SECONDS, DECODE_SECONDS, INFERENCE_SECONDS),
    *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS),
)


class Rig:
    """A fold and its meter, as the worker feeds them; the histories are kept here."""

    def __init__(self) -> None:
        self.measures = Measures()
        self.histories: dict[str, list[tuple[str, AnyEvent]]] = {}
        self._number = 0
        self.restart()

    def restart(self) -> None:
        """Let another worker go on."""
        self.fold = DetokenizeFold(DECODER)
        self.meter = DetokenizeMeter(self.measures)

    def submit(self, uid: str, at_ms: int, prompt_tokens: int = 3, **sampling: object) -> None:
        params = SamplingParams.model_validate(sampling)
        self.histories[uid] = [
            (SUBMITTED_ID, Submitted(ms=BEGAN_MS + at_ms, endpoint="chat", frontend="web-0", sampling=params)),
            (TOKENIZED_ID, Tokenized(ms=BEGAN_MS, token_ids=(1,) * prompt_tokens, fingerprint="f", by="tokenize-0")),
        ]

    def step(self, at_ms: int, *rows: StepRow, forward_ms: float = 0, released: Sequence[str] = ()) -> None:
        figures = StepStats(forward_ms=forward_ms)
        step = StepCompleted(ms=BEGAN_MS + at_ms, rows=rows, released=tuple(released), figures=figures)
        self._number += 1
        for uid in self.fold.unknown(step):
            moments = moments_of(self.histories[uid])
            self.fold.learn(uid, moments)
            self.meter.learn(uid, moments)
        produced = self.fold.apply(step, f"1-{self._number}")
        for item in produced:
            event = item.event.model_copy(update={"ms": step.ms})
            self.histories[item.uid].append((item.entry_id, event))
        self.meter.committed(step, produced)

    def count(self, family: Family, *labels: str) -> float:
        return count_of(self.measures, family, *labels)

    def totals(self, *families: Family) -> list[float]:
        return [total_of(self.measures, family) for family in families]

    def seen(self, family: Family) -> tuple[float, float]:
        """Return how often a histogram was given something, and the sum of that."""
        return count_of(self.measures, family), total_of(self.measures, family)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_times_of_a_request_are_those_of_its_events(rig: Rig) -> None:
    rig.submit("a", 0, prompt_tokens=7)
    rig.step(50, admitted("a"), token_row("a", 1), forward_ms=30.9)
    assert rig.seen(FIRST_TOKEN_SECONDS) == (1, 0.05)
    rig.step(52, token_row("a", 2))
    rig.step(59, token_row("a", 3, end="length"))
    assert rig.seen(BETWEEN_TOKENS_SECONDS) == (2, 0.009)
    assert rig.count(REQUEST_SUCCESS, "length") == 1 and rig.count(REQUEST_SUCCESS, "stop") == 0
    assert [rig.count(family) for family in OF_FINISHED] == [1] * len(OF_FINISHED)
    # It waited until the step began that has its prompt.
    assert rig.totals(*OF_FINISHED, PER_TOKEN_SECONDS) == [0.059, 0.02, 0.03, 0.009, 0.039, 7, 3, 0.0045]
    assert rig.meter.num_known == 0


def test_a_prompt_in_several_chunks_waits_no_longer_once_its_first_is_computed(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(40, admitted("a"), forward_ms=25)
    rig.step(70, token_row("a", 1, end="length"), forward_ms=28)
    assert rig.totals(QUEUE_SECONDS, PREFILL_SECONDS) == [0.015, 0.055]


def test_requests_of_one_step_are_counted_each(rig: Rig) -> None:
    uids = [f"{number}" for number in range(5)]
    for uid in uids:
        rig.submit(uid, 0)
    rig.step(10, *(token_row(uid, 1) for uid in uids[:3]))
    rig.step(14, *(token_row(uid, 2) for uid in uids[:3]), *(token_row(uid, 1) for uid in uids[3:]))
    rig.step(20, *(token_row(uid, 3) for uid in uids[:2]), token_row("3", 2))
    assert rig.seen(FIRST_TOKEN_SECONDS) == (5, 0.058)
    assert rig.seen(BETWEEN_TOKENS_SECONDS) == (6, 0.03)


def test_a_single_token_has_no_time_between_two(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(5, admitted("a"), token_row("a", 1, end="length"))
    assert (rig.count(REQUEST_SECONDS), rig.count(PER_TOKEN_SECONDS), rig.count(BETWEEN_TOKENS_SECONDS)) == (1, 0, 0)


def test_a_pause_is_measured_though_another_detokenizer_goes_on_after_it(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(10, admitted("a"), token_row("a", 1))
    rig.step(12, token_row("a", 2))
    rig.restart()
    rig.step(3012, token_row("a", 3))
    assert rig.count(FIRST_TOKEN_SECONDS) == 1
    assert rig.seen(BETWEEN_TOKENS_SECONDS) == (2, 3.002)


def test_what_is_folded_again_counts_once(rig: Rig) -> None:
    rig.submit("a", 0)
    for _ in range(2):
        rig.step(10, token_row("a", 1))
    assert (rig.count(FIRST_TOKEN_SECONDS), rig.count(BETWEEN_TOKENS_SECONDS)) == (1, 0)


def test_a_request_that_failed_is_an_error_and_none_of_the_finished(rig: Rig) -> None:
    rig.submit("a", 0)
    failed = Failed(status=500, code="engine_error", message="It raised.")
    rig.step(10, token_row("a", 1))
    rig.step(12, EventRow(uid="a", n=1, event=failed))
    assert rig.count(REQUEST_SUCCESS, "error") == 1 and rig.count(REQUEST_SECONDS) == 0
    assert rig.meter.num_known == 0


def test_the_tokens_of_a_step_with_drafts_come_at_once(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(10, token_row("a", 1))
    rig.step(30, *drafted_rows("a", 2, "xyz", 4))
    assert rig.count(BETWEEN_TOKENS_SECONDS) == 3 and rig.totals(BETWEEN_TOKENS_SECONDS) == [pytest.approx(0.02)]


def test_what_comes_after_a_stop_string_is_no_token_of_the_request(rig: Rig) -> None:
    rig.submit("a", 0, stop=["y"])
    rig.step(10, token_row("a", 1))
    rig.step(20, token_row("a", 2, "y"))
    rig.step(30, token_row("a", 3))
    rig.step(40, released=["a"])
    assert rig.count(REQUEST_SUCCESS, "stop") == 1
    assert rig.count(BETWEEN_TOKENS_SECONDS) == 1 and rig.totals(REQUEST_GENERATION_TOKENS) == [2]
    assert rig.meter.num_known == 0


def test_a_request_that_others_ended_is_forgotten_and_counted_by_them(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(10, token_row("a", 1))
    assert rig.meter.num_known == 1
    rig.step(20, released=["a"])
    assert rig.meter.num_known == 0
    rig.submit("b", 0)
    rig.histories["b"].append((SEAL, Cancelled(by="client")))
    rig.step(30, token_row("b", 1))
    assert rig.meter.num_known == 0 and rig.count(FIRST_TOKEN_SECONDS) == 1
    assert not any(rig.count(REQUEST_SUCCESS, reason) for reason in REQUEST_SUCCESS.known)


def test_a_clock_that_goes_back_makes_no_sum_smaller(rig: Rig) -> None:
    rig.submit("a", 1000)
    rig.step(500, admitted("a"), token_row("a", 1))
    rig.step(400, token_row("a", 2, end="length"))
    for family in (FIRST_TOKEN_SECONDS, BETWEEN_TOKENS_SECONDS, *OF_FINISHED[:5], PER_TOKEN_SECONDS):
        assert rig.seen(family) == (1, 0)
