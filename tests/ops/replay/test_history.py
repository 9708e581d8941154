"""A recorded request after any token, and two answers to it compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from support.histories import answered, entries_of

from ops.replay.report import explanations
from ops.replay.source import History
from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    Preempted,
    SamplingParams,
    Submitted,
    TakenOver,
    Timings,
    Tokenized,
    TokensProduced,
    TopLogprob,
    Usage,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.recording import Recording
from pipeline.views.recorded import Maker, State

BEGUN: Sequence[tuple[str, AnyEvent]] = (
    ("0-1", Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams(), ms=1000)),
    ("0-2", Tokenized(token_ids=(7, 8), fingerprint="t", by="tokenize-0", ms=1001)),
)
FIRST = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w", numerics="a/b", version="1", ms=1002)
SECOND = FIRST.model_copy(update={"epoch": 2, "numerics": "c/d", "ms": 1020})
SCORE = Logprob(token=12, text="l", logprob=-0.5, top=(TopLogprob(token=12, text="l", logprob=-0.5),))


def token(n: int, text: str, ms: int = 0, epoch: int = 1, score: Logprob | None = None) -> tuple[str, TokensProduced]:
    scores = () if score is None else (score,)
    return f"{n}-0", TokensProduced(tokens=(10 + n,), text=text, step=f"{epoch}-{n}", ms=ms, scores=scores)


def finished(n: int, reason: FinishReason = "length", stop_string: str = "") -> tuple[str, Finished]:
    usage, timings = Usage(prompt_tokens=2, completion_tokens=n), Timings(admitted_ms=1, first_token_ms=2, total_ms=3)
    return SEAL, Finished(n=n, reason=reason, stop_string=stop_string, usage=usage, timings=timings)


def history(*pairs: tuple[str, AnyEvent], begun: Iterable[tuple[str, AnyEvent]] = BEGUN) -> History:
    return History(Recording("u", tuple(entries_of([*begun, *pairs]))))


def answer(*token_ids: int, end: AnyEvent | None = None) -> History:
    """Return a finished request, or one with another *end*, each of whose tokens has its number as text."""
    _, _, *rest = answered(*token_ids, text=lambda each: f"{each} ", end=end)
    return history(*rest)


TAKEN_OVER = history(
    ("0-3", FIRST),
    token(1, "He", 1010),
    ("1-1", TakenOver(engine="generate-0", epoch=2, ms=1015)),
    ("1-2", SECOND),
    token(2, "", 1030, epoch=2, score=SCORE),
    ("2-1", Preempted(engine="generate-0", epoch=2, step=9, ms=1031)),
    token(3, "llo", 1040, epoch=2),
    finished(3),
)


def test_a_history_is_walked_event_by_event() -> None:
    kinds = [moment.event.kind for moment in TAKEN_OVER.walk()]
    assert kinds == [
        *("submitted", "tokenized", "admitted", "tokens", "taken_over"),
        *("admitted", "tokens", "preempted", "tokens", "finished"),
    ]


def test_the_state_after_each_token_has_the_text_so_far_and_who_made_it() -> None:
    states = [TAKEN_OVER.at(n) for n in range(4)]
    assert [state.text for state in states] == ["", "He", "He", "Hello"]
    assert [state.token_ids for state in states] == [(), (11,), (11, 12), (11, 12, 13)]
    assert [(state.at_ms, state.pause_ms) for state in states] == [(0, 0), (10, 10), (30, 20), (40, 10)]
    assert [[mark.kind for mark in state.marks] for state in states] == [
        [],
        ["admitted"],
        ["taken_over", "admitted"],
        ["preempted"],
    ]
    makers = [state.last.by for state in states[1:] if state.last is not None]
    assert makers == [
        Maker("generate-0", 1, "w", "a/b", "1"),
        *[Maker("generate-0", 2, "w", "c/d", "1")] * 2,
    ]
    scores = [state.last.score for state in states[1:] if state.last is not None]
    assert scores == [None, SCORE, None]


def test_before_its_first_token_a_request_has_no_last_one() -> None:
    assert history().at(0) == State(0, (), "", None, 0, 0, 0, 0, ())


@pytest.mark.parametrize("n", [-1, 4])
def test_a_token_that_never_was_has_no_state(n: int) -> None:
    with pytest.raises(IndexError, match=f"3 .* {n}"):
        TAKEN_OVER.at(n)


def test_a_history_that_lacks_a_token_is_damaged() -> None:
    with pytest.raises(UndecodableEvent, match="2-0"):
        history(token(2, "x"))
    with pytest.raises(UndecodableEvent, match="dreamt"):
        History(Recording("u", (Entry("0-1", {"kind": "dreamt"}),)))


@pytest.mark.parametrize(
    ("recorded", "now", "found"),
    [
        (answer(1, 2, 3), answer(1, 2, 3), (3, None)),
        (answer(1, 2, 3), answer(1, 9, 3), (1, (2, 2, 9))),
        (answer(1, 2, 3), answer(1, 2), (2, (3, 3, None))),
        (answer(1, 2), answer(1, 2, 3), (2, (3, None, 3))),
        (answer(1, 2, end=Cancelled(by="client")), answer(1, 2, 3), (2, None)),
        (answer(1, 2, 3), answer(1, 2, end=Cancelled(by="client")), (2, None)),
        (answer(1, 2, 3, end=Cancelled(by="client")), answer(1, 2), (2, (3, 3, None))),
    ],
)
def test_answers_are_compared_as_far_as_the_model_made_both(
    recorded: History, now: History, found: tuple[int, tuple[int, int | None, int | None] | None]
) -> None:
    compared = recorded.compare(now)
    place = compared.difference
    assert (compared.num_tokens, place and (place.n, place.recorded, place.now)) == found
    assert compared.other == "" and compared.is_identical is (found[1] is None)


def test_the_same_tokens_with_another_text_or_end_are_a_difference() -> None:
    mine, theirs = history(token(1, "Hello"), finished(1)), history(token(1, "Help"), finished(1))
    assert mine.compare(theirs).other == "its text differs from character 4 on"
    assert history(token(1, "He"), finished(1)).compare(mine).other == "its text differs from character 3 on"
    stopped = history(token(1, "Hello"), finished(1, "stop", "!"))
    assert mine.compare(stopped).other == "it ended otherwise: length recorded, stop ('!') now"
    assert not mine.compare(stopped).is_identical


def test_an_error_before_all_tokens_came_again_is_a_difference() -> None:
    failed = Failed(status=500, code="engine_error", message="No.")
    assert answer(1, 2).compare(answer(1, end=failed)).other == "it failed after 1 of 2 tokens: engine_error: No."
    assert answer(1, 2, end=failed).compare(answer(1, 2, 3)).is_identical
    assert answer(1, 2, end=failed).compare(answer(1, 2, end=failed)).is_identical


KERNELS = "bfloat16/none/avx512/1/64/torch-2.13.0+cpu-avx512/sampler-2"
TORCH = "bfloat16/none/torch-2.13.0+cpu-avx512/cpu/sampler-2"
MODE = "deterministic-128-pages-16-nvidia-h100"
BATCH = "torch computed it, and its results depend on the batch and on the number of threads"


def made(numerics: str = KERNELS, weights: str = "w", version: str = "0.1.0") -> Maker:
    return Maker("generate-0", 1, weights, numerics, version)


@pytest.mark.parametrize(
    ("recorded", "now", "reasons"),
    [
        (made(), made(), []),
        (made(), made(weights="x"), ["weights: recorded w, now x"]),
        (made(), made(version="0.2.0"), ["version of MiniSGL: recorded 0.1.0, now 0.2.0"]),
        (made(version=""), made(), []),
        (made(), made(KERNELS.replace("bfloat16", "float32")), ["dtype: recorded bfloat16, now float32"]),
        (made(), made(KERNELS.replace("none", "int8")), ["quantization: recorded none, now int8"]),
        (made(), made(KERNELS.replace("/1/", "/2/")), ["version of the kernels: recorded 1, now 2"]),
        (made(), made(KERNELS.replace("/64/", "/16/")), ["page size: recorded 64, now 16"]),
        (made(), made(TORCH), ["kernels: recorded avx512, now torch"]),
        (made(KERNELS.removesuffix("/sampler-2")), made(), ["sampler: recorded sampler-1, now sampler-2"]),
        (made(TORCH.removesuffix("/sampler-2")), made(TORCH), ["sampler: recorded sampler-1, now sampler-2"]),
        (made(TORCH), made(TORCH.replace("/cpu/", "/fi/")), ["attention: recorded cpu, now fi"]),
        (made(f"{KERNELS}/ranks-2"), made(), ["ranks: recorded ranks-2, now ranks-1"]),
        (made(TORCH), made(f"{TORCH}/ranks-4"), ["ranks: recorded ranks-1, now ranks-4"]),
        (made(TORCH), made(TORCH), [BATCH]),
        (made(f"{TORCH}/{MODE}"), made(f"{TORCH}/{MODE}"), []),
        (made(TORCH), made(f"{TORCH}/{MODE}"), [f"deterministic: recorded deterministic-no, now {MODE}"]),
        (made(f"{TORCH}/{MODE}"), made(f"{TORCH}/{MODE}/new-1"), ["new: recorded new-no, now new-1"]),
        (made(), made(f"{KERNELS}/llguidance-1.9.0"), []),
        (
            made(f"{KERNELS}/llguidance-1.9.0"),
            made(f"{KERNELS}/llguidance-1.9.1"),
            ["llguidance: recorded llguidance-1.9.0, now llguidance-1.9.1"],
        ),
        (made(""), made(), ["one of the histories does not say how its engine computed"]),
        (made("counting"), made("adding"), ["numerics: recorded counting, now adding"]),
    ],
)
def test_what_explains_other_tokens_is_told_by_name(recorded: Maker, now: Maker, reasons: list[str]) -> None:
    assert explanations(recorded, now) == reasons
