"""What a detokenizer says to /metrics of the requests whose steps it folds, by Redis' clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from histories import moments_of
from measured import count_of, total_of

from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    Figures,
    SamplingParams,
    StepCompleted,
    StepRow,
    Submitted,
    Tokenized,
    TokenRow,
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
from stages.detokenize.text import Decoder

BEGAN_MS = 10_000
OF_FINISHED = (
    *(REQUEST_SECONDS, QUEUE_SECONDS, PREFILL_SECONDS, DECODE_SECONDS, INFERENCE_SECONDS),
    *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS),
)


def characters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


class Rig:
    """A fold and its meter, as the worker feeds them; the histories are kept here."""

    def __init__(self) -> None:
        self.measures = Measures()
        self.histories: dict[str, list[tuple[str, AnyEvent]]] = {}
        self._number = 0
        self.restart()

    def restart(self) -> None:
        """Let another worker go on."""
        self.fold = DetokenizeFold(Decoder(characters, characters, chr))
        self.meter = DetokenizeMeter(self.measures)

    def submit(self, uid: str, at_ms: int, prompt_tokens: int = 3, **sampling: object) -> None:
        params = SamplingParams.model_validate(sampling)
        self.histories[uid] = [
            (SUBMITTED_ID, Submitted(ms=BEGAN_MS + at_ms, endpoint="chat", frontend="web-0", sampling=params)),
            (TOKENIZED_ID, Tokenized(ms=BEGAN_MS, token_ids=(1,) * prompt_tokens, fingerprint="f", by="tokenize-0")),
        ]

    def step(self, at_ms: int, *rows: StepRow, forward_ms: float = 0, let_go: Sequence[str] = ()) -> None:
        figures = Figures(forward_ms=forward_ms)
        step = StepCompleted(ms=BEGAN_MS + at_ms, rows=rows, let_go=tuple(let_go), figures=figures)
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

    def total(self, family: Family) -> float:
        return total_of(self.measures, family)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def admitted(uid: str, n: int = 0) -> EventRow:
    return EventRow(uid=uid, n=n, event=Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f"))


def row(uid: str, n: int, *, last: bool = False, letter: str = "x") -> TokenRow:
    return TokenRow(uid=uid, n=n, token=ord(letter), end="length" if last else None)


def test_the_times_of_a_request_are_those_of_its_events(rig: Rig) -> None:
    rig.submit("a", 0, prompt_tokens=7)
    rig.step(50, admitted("a"), row("a", 1), forward_ms=30.9)
    assert (rig.count(FIRST_TOKEN_SECONDS), rig.total(FIRST_TOKEN_SECONDS)) == (1, 0.05)
    rig.step(52, row("a", 2))
    rig.step(59, row("a", 3, last=True))
    assert (rig.count(BETWEEN_TOKENS_SECONDS), rig.total(BETWEEN_TOKENS_SECONDS)) == (2, 0.009)
    assert rig.count(REQUEST_SUCCESS, "length") == 1 and rig.count(REQUEST_SUCCESS, "stop") == 0
    assert [rig.count(family) for family in OF_FINISHED] == [1] * len(OF_FINISHED)
    assert rig.total(QUEUE_SECONDS) == 0.02, "it waited until the step began that has its prompt"
    assert rig.total(PREFILL_SECONDS) == 0.03
    assert rig.total(DECODE_SECONDS) == 0.009
    assert rig.total(INFERENCE_SECONDS) == 0.039
    assert rig.total(REQUEST_SECONDS) == 0.059
    assert rig.total(PER_TOKEN_SECONDS) == 0.0045
    assert (rig.total(REQUEST_PROMPT_TOKENS), rig.total(REQUEST_GENERATION_TOKENS)) == (7, 3)
    assert rig.meter.num_known == 0


def test_a_prompt_in_several_chunks_waits_no_longer_once_its_first_is_computed(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(40, admitted("a"), forward_ms=25)
    rig.step(70, row("a", 1, last=True), forward_ms=28)
    assert (rig.total(QUEUE_SECONDS), rig.total(PREFILL_SECONDS)) == (0.015, 0.055)


def test_requests_of_one_step_are_counted_each(rig: Rig) -> None:
    uids = [f"{number}" for number in range(5)]
    for uid in uids:
        rig.submit(uid, 0)
    rig.step(10, *(row(uid, 1) for uid in uids[:3]))
    rig.step(14, *(row(uid, 2) for uid in uids[:3]), *(row(uid, 1) for uid in uids[3:]))
    rig.step(20, *(row(uid, 3) for uid in uids[:2]), row("3", 2))
    assert (rig.count(FIRST_TOKEN_SECONDS), rig.total(FIRST_TOKEN_SECONDS)) == (5, 0.058)
    assert (rig.count(BETWEEN_TOKENS_SECONDS), rig.total(BETWEEN_TOKENS_SECONDS)) == (6, 0.03)


def test_a_single_token_has_no_time_between_two(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(5, admitted("a"), row("a", 1, last=True))
    assert (rig.count(REQUEST_SECONDS), rig.count(PER_TOKEN_SECONDS), rig.count(BETWEEN_TOKENS_SECONDS)) == (1, 0, 0)


def test_a_pause_is_measured_though_another_detokenizer_goes_on_after_it(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(10, admitted("a"), row("a", 1))
    rig.step(12, row("a", 2))
    rig.restart()
    rig.step(3012, row("a", 3))
    assert rig.count(FIRST_TOKEN_SECONDS) == 1
    assert (rig.count(BETWEEN_TOKENS_SECONDS), rig.total(BETWEEN_TOKENS_SECONDS)) == (2, 3.002)


def test_what_is_folded_again_counts_once(rig: Rig) -> None:
    rig.submit("a", 0)
    for _ in range(2):
        rig.step(10, row("a", 1))
    assert (rig.count(FIRST_TOKEN_SECONDS), rig.count(BETWEEN_TOKENS_SECONDS)) == (1, 0)


def test_a_request_that_failed_is_an_error_and_none_of_the_finished(rig: Rig) -> None:
    rig.submit("a", 0)
    failed = Failed(status=500, code="engine_error", message="It raised.")
    rig.step(10, row("a", 1))
    rig.step(12, EventRow(uid="a", n=1, event=failed))
    assert rig.count(REQUEST_SUCCESS, "error") == 1 and rig.count(REQUEST_SECONDS) == 0
    assert rig.meter.num_known == 0


def test_what_comes_after_a_stop_string_is_no_token_of_the_request(rig: Rig) -> None:
    rig.submit("a", 0, stop=["y"])
    rig.step(10, row("a", 1))
    rig.step(20, row("a", 2, letter="y"))
    rig.step(30, row("a", 3))
    rig.step(40, let_go=["a"])
    assert rig.count(REQUEST_SUCCESS, "stop") == 1
    assert rig.count(BETWEEN_TOKENS_SECONDS) == 1 and rig.total(REQUEST_GENERATION_TOKENS) == 2
    assert rig.meter.num_known == 0


def test_a_request_that_others_ended_is_forgotten_and_counted_by_them(rig: Rig) -> None:
    rig.submit("a", 0)
    rig.step(10, row("a", 1))
    assert rig.meter.num_known == 1
    rig.step(20, let_go=["a"])
    assert rig.meter.num_known == 0
    rig.submit("b", 0)
    rig.histories["b"].append((SEAL, Cancelled(by="client")))
    rig.step(30, row("b", 1))
    assert rig.meter.num_known == 0 and rig.count(FIRST_TOKEN_SECONDS) == 1
    assert not any(rig.count(REQUEST_SUCCESS, reason) for reason in REQUEST_SUCCESS.known)


def test_a_clock_that_goes_back_makes_no_sum_smaller(rig: Rig) -> None:
    rig.submit("a", 1000)
    rig.step(500, admitted("a"), row("a", 1))
    rig.step(400, row("a", 2, last=True))
    for family in (FIRST_TOKEN_SECONDS, BETWEEN_TOKENS_SECONDS, *OF_FINISHED[:5], PER_TOKEN_SECONDS):
        assert (rig.count(family), rig.total(family)) == (1, 0)
