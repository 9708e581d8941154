"""The fold of the detokenizer: steps in, events for histories and clients out. No Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from histories import moments_of

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    Figures,
    Finished,
    FinishReason,
    Preempted,
    Presentation,
    SamplingParams,
    Score,
    StepCompleted,
    StepRow,
    Submitted,
    Tokenized,
    TokenRow,
    TokensProduced,
    ToldToken,
)
from pipeline.log.protocol import Produced
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, tokens_id
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.text import Decoder


def letters(token_ids: Sequence[int]) -> str:
    """Token 97 is `a`; tokens above 200 are special and have no text."""
    return "".join(chr(token) for token in token_ids if token < 200)


DECODER = Decoder(letters, lambda ids: "".join(map(chr, ids)), chr)


def history(*tokens: int, **sampling: Any) -> list[tuple[str, AnyEvent]]:
    params = SamplingParams.model_validate(sampling)
    events: list[tuple[str, AnyEvent]] = [
        (SUBMITTED_ID, Submitted(ms=1000, endpoint="chat", frontend="web-0", sampling=params)),
        (TOKENIZED_ID, Tokenized(ms=1001, token_ids=(1, 2, 3), fingerprint="f", by="tokenize-0")),
    ]
    for n, token in enumerate(tokens, start=1):
        events.append((tokens_id(n), TokensProduced(ms=1002, count=1, tokens=(token,), text=chr(token), step="1-1")))
    return events


def token_row(uid: str, n: int, letter: str, end: FinishReason | None = None, chunks: int = 0) -> TokenRow:
    return TokenRow(uid=uid, n=n, token=ord(letter), end=end, chunks=chunks)


def admitted(uid: str, n: int = 0, cached: int = 0) -> EventRow:
    event = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f", cached_tokens=cached)
    return EventRow(uid=uid, n=n, event=event)


def completed(*rows: StepRow, ms: int = 1010, let_go: tuple[str, ...] = ()) -> StepCompleted:
    return StepCompleted(ms=ms, rows=rows, let_go=let_go)


def texts(produced: Sequence[Produced]) -> list[str]:
    return [item.event.text for item in produced if isinstance(item.event, TokensProduced)]


def make_fold(uid: str = "a", **sampling: Any) -> DetokenizeFold:
    fold = DetokenizeFold(DECODER)
    fold.learn(uid, moments_of(history(**sampling)))
    return fold


def test_a_request_seen_first_is_asked_for_once() -> None:
    fold = DetokenizeFold(DECODER)
    step = completed(admitted("a"), token_row("a", 1, "x"), token_row("b", 1, "y"))
    assert fold.unknown(step) == ["a", "b"]
    fold.learn("a", moments_of(history()))
    assert fold.unknown(step) == ["b"]


def test_a_token_becomes_an_event_with_the_id_of_its_number() -> None:
    (item,) = make_fold().apply(completed(token_row("a", 1, "x", chunks=2)), "1-5")
    assert (item.entry_id, item.n, item.frontend) == ("1-0", 1, "web-0")
    assert item.event == TokensProduced(count=1, tokens=(ord("x"),), text="x", step="1-5", chunks=2)


def test_marks_follow_the_events_at_their_number() -> None:
    fold = make_fold()
    first = fold.apply(completed(admitted("a"), token_row("a", 1, "x")), "1-1")
    assert [item.entry_id for item in first] == ["0-3", "1-0"]
    preempted = EventRow(uid="a", n=1, event=Preempted(engine="generate-0", epoch=1, step=2))
    second = fold.apply(completed(preempted, admitted("a", n=1), token_row("a", 2, "y")), "1-2")
    assert [item.entry_id for item in second] == ["1-1", "1-2", "2-0"]


def test_the_end_seals_with_reason_usage_and_timings() -> None:
    fold = make_fold()
    fold.apply(completed(admitted("a", cached=2), ms=1004), "1-1")
    fold.apply(completed(token_row("a", 1, "x"), ms=1007), "1-2")
    *_, last = fold.apply(completed(token_row("a", 2, "y", end="length"), ms=1015), "1-3")
    assert last.entry_id == SEAL and not last.tell_engine
    assert isinstance(last.event, Finished)
    assert (last.event.n, last.event.reason) == (2, "length")
    assert (last.event.usage.prompt_tokens, last.event.usage.completion_tokens, last.event.usage.cached_tokens) == (
        3,
        2,
        2,
    )
    timings = last.event.timings
    assert (timings.admitted_ms, timings.first_token_ms, timings.total_ms) == (4, 7, 15)


def test_a_request_is_admitted_before_the_step_that_has_its_prompt_is_computed() -> None:
    fold = make_fold()
    step = StepCompleted(ms=1010, rows=(admitted("a"), token_row("a", 1, "x", end="length")))
    *_, last = fold.apply(step.model_copy(update={"figures": Figures(forward_ms=7.9)}), "1-1")
    assert isinstance(last.event, Finished)
    assert (last.event.timings.admitted_ms, last.event.timings.first_token_ms) == (3, 10)


def test_a_stop_string_ends_the_request_before_it_and_tells_the_engine() -> None:
    fold = make_fold(stop=["xy"])
    assert texts(fold.apply(completed(token_row("a", 1, "w")), "1-1")) == ["w"]
    assert texts(fold.apply(completed(token_row("a", 2, "x")), "1-2")) == [""]
    tokens, end = fold.apply(completed(token_row("a", 3, "y")), "1-3")
    assert isinstance(tokens.event, TokensProduced) and tokens.event.text == ""
    assert isinstance(end.event, Finished) and (end.event.reason, end.event.n) == ("stop", 3)
    assert end.tell_engine and end.event.stop_string == "xy"


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_token_that_ends_a_request_met_no_stop_string(end: FinishReason) -> None:
    *_, last = make_fold(stop=["xy"]).apply(completed(token_row("a", 1, "x", end=end)), "1-1")
    assert isinstance(last.event, Finished) and (last.event.reason, last.event.stop_string) == (end, "")


def test_what_comes_after_a_stop_string_is_dropped_until_the_engine_lets_go() -> None:
    fold = make_fold(stop=["x"])
    fold.apply(completed(token_row("a", 1, "x")), "1-1")
    late = completed(token_row("a", 2, "y"))
    assert fold.unknown(late) == [] and fold.apply(late, "1-2") == []
    fold.apply(completed(let_go=("a",)), "1-3")
    assert fold.unknown(late) == ["a"]


def test_a_stop_string_in_the_token_that_ends_anyway_needs_no_word_to_the_engine() -> None:
    fold = make_fold(stop=["x"])
    *_, end = fold.apply(completed(token_row("a", 1, "x", end="length")), "1-1")
    assert isinstance(end.event, Finished) and end.event.reason == "stop" and not end.tell_engine


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    fold = make_fold(stop=["xyz"])
    fold.apply(completed(token_row("a", 1, "x")), "1-1")
    tokens, _ = fold.apply(completed(token_row("a", 2, "y", end="length")), "1-2")
    assert isinstance(tokens.event, TokensProduced) and tokens.event.text == "xy"


def test_a_step_said_twice_says_nothing_new() -> None:
    fold = make_fold()
    step = completed(token_row("a", 1, "x"))
    assert fold.apply(step, "1-1") and fold.apply(step, "1-1") == []


def test_a_hole_is_filled_from_the_history() -> None:
    fold = make_fold()
    step = completed(token_row("a", 3, "z"))
    assert fold.unknown(step) == ["a"]
    fold.learn("a", moments_of(history(ord("x"), ord("y"))))
    assert fold.unknown(step) == []
    assert [item.entry_id for item in fold.apply(step, "1-3")] == ["3-0"]


def the_loss(produced: Sequence[Produced]) -> str:
    """Return the message of the only item, which ends a request with the loss of tokens and tells its engine."""
    (item,) = produced
    assert item.entry_id == SEAL and item.frontend == "web-0" and item.tell_engine
    assert isinstance(item.event, Failed) and (item.event.status, item.event.code) == (500, "log_lost")
    assert item.event.n == item.n
    return item.event.message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (token_row("a", 3, "z"), "token 2 of"),
        (token_row("a", 6, "z"), "tokens 2 to 5 of"),
        (admitted("a", n=4), "tokens 2 to 4 of"),
    ],
)
def test_a_hole_that_the_history_has_too_ends_the_request(row: StepRow, words: str) -> None:
    fold = make_fold()
    step = completed(row)
    assert fold.unknown(step) == ["a"]
    fold.learn("a", moments_of(history(ord("x"))))
    produced = fold.apply(step, "1-3")
    assert words in the_loss(produced) and produced[0].n == 1


def test_after_a_hole_nothing_is_said_or_asked_until_the_engine_lets_go() -> None:
    fold = DetokenizeFold(DECODER)
    fold.learn("a", moments_of(history()))
    fold.apply(completed(token_row("a", 3, "z")), "1-3")
    late = completed(token_row("a", 4, "z"))
    assert fold.unknown(late) == [] and fold.apply(late, "1-4") == []
    fold.apply(completed(let_go=("a",)), "1-5")
    assert fold.num_known == 0


@pytest.mark.parametrize("n", [3, 4, 5])
def test_a_hole_inside_a_history_ends_the_request_whichever_token_comes(n: int) -> None:
    """An engine that took it over counts the tokens that are left, so what it computes is in the wrong place."""
    fold = DetokenizeFold(DECODER)
    whole = history(*b"vwxy")
    fold.learn("a", moments_of([pair for pair in whole if pair[0] not in (tokens_id(1), tokens_id(3))]))
    step = completed(token_row("a", n, "z", end="length"))
    assert fold.unknown(step) == []
    produced = fold.apply(step, "1-5")
    assert "tokens 1, 3 of" in the_loss(produced) and produced[0].n == 4
    assert fold.num_known == 0


def test_a_history_that_names_no_prompt_is_no_history() -> None:
    with pytest.raises(UndecodableEvent, match="no prompt"):
        DetokenizeFold(DECODER).learn("a", moments_of(history(ord("x"))[2:]))


def test_a_successor_goes_on_with_what_was_held_back() -> None:
    fold = DetokenizeFold(DECODER)
    fold.learn("a", moments_of(history(ord("w"), ord("x"), stop=["xy"])))
    tokens, end = fold.apply(completed(token_row("a", 3, "y")), "1-3")
    assert isinstance(tokens.event, TokensProduced) and tokens.event.text == ""
    assert isinstance(end.event, Finished) and end.event.reason == "stop"


def test_a_request_that_was_cancelled_gets_no_more_events() -> None:
    fold = DetokenizeFold(DECODER)
    fold.learn("a", moments_of([*history(ord("x")), (SEAL, Cancelled(n=1, by="client"))]))
    assert fold.apply(completed(token_row("a", 2, "y")), "1-2") == []


def test_a_history_that_is_gone_gets_no_more_events() -> None:
    fold = DetokenizeFold(DECODER)
    fold.learn("a", [])
    step = completed(token_row("a", 1, "y"))
    assert fold.unknown(step) == [] and fold.apply(step, "1-1") == []


def test_what_an_engine_cannot_run_fails_with_its_number() -> None:
    failed = Failed(status=400, code="context_length_exceeded", message="too long")
    (item,) = make_fold().apply(completed(EventRow(uid="a", n=0, event=failed)), "1-1")
    assert item.entry_id == SEAL and item.event == failed


def test_after_a_failed_commit_the_step_can_be_folded_again() -> None:
    fold = make_fold()
    step = completed(token_row("a", 1, "x"))
    before = fold.apply(step, "1-1")
    fold.forget(step)
    assert fold.unknown(step) == ["a"]
    fold.learn("a", moments_of(history()))
    assert fold.apply(step, "1-1") == before


def test_nothing_is_remembered_of_ended_requests() -> None:
    fold = DetokenizeFold(DECODER)
    for number in range(50):
        uid = str(number)
        fold.learn(uid, moments_of(history(stop=["q"] if number % 2 else [])))
        fold.apply(completed(token_row(uid, 1, "q", end=None if number % 2 else "length")), f"1-{number + 1}")
        fold.apply(completed(let_go=(uid,) if number % 2 else ()), f"1-{number + 100}")
    assert fold.num_known == 0


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abSTO")])
def test_a_stop_string_is_shown_to_who_wants_it(include: bool, shown: str) -> None:
    fold = make_fold(stop=["TOP", "STO"], include_stop_str_in_output=include)
    produced = [
        item
        for n, letter in enumerate("abSTOP", start=1)
        for item in fold.apply(completed(token_row("a", n, letter)), f"1-{n}")
    ]
    assert "".join(texts(produced)) == shown
    assert isinstance(produced[-1].event, Finished) and produced[-1].event.usage.completion_tokens == 5


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "ab")])
def test_the_token_that_ends_an_answer_is_shown_to_who_wants_it(include: bool, shown: str) -> None:
    fold = make_fold(include_stop_str_in_output=include)
    first = fold.apply(completed(token_row("a", 1, "a")), "1-1")
    assert "".join(texts([*first, *fold.apply(completed(token_row("a", 2, "b", end="stop")), "1-2")])) == shown


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "aĬb")])
def test_special_tokens_are_shown_to_who_wants_them(skip: bool, shown: str) -> None:
    fold = make_fold(skip_special_tokens=skip)
    steps = [fold.apply(completed(token_row("a", n, letter)), f"1-{n}") for n, letter in enumerate("aĬb", start=1)]
    assert "".join(text for step in steps for text in texts(step)) == shown


def test_scores_are_told_with_the_texts_of_their_tokens() -> None:
    fold = make_fold(logprobs=1)
    row = token_row("a", 1, "x").model_copy(update={"score": Score(logprob=-2, top=((ord("y"), -0.5),))})
    (item,) = fold.apply(completed(row), "1-1")
    assert isinstance(item.event, TokensProduced)
    (score,) = item.event.scores
    assert (score.token, score.text, score.logprob) == (ord("x"), "x", -2)
    assert [(other.token, other.text, other.logprob) for other in score.top] == [(ord("y"), "y", -0.5)]


def test_a_prompt_is_told_of_with_the_first_token_alone_and_by_whoever_folds_it() -> None:
    events = history(prompt_logprobs=0)
    submitted, tokenized = events[0][1], events[1][1]
    assert isinstance(submitted, Submitted) and isinstance(tokenized, Tokenized)
    shown = Presentation(token_ids=True, echo=True)
    events[0] = (SUBMITTED_ID, submitted.model_copy(update={"presentation": shown}))
    events[1] = (TOKENIZED_ID, tokenized.model_copy(update={"token_ids": (97, 98, 99)}))
    first = token_row("a", 1, "x").model_copy(update={"prompt_scores": (Score(logprob=-1), Score(logprob=-2))})
    for again in range(2):
        fold = DetokenizeFold(DECODER)
        fold.learn("a", moments_of(events))
        fold.apply(completed(admitted("a", cached=2)), f"{again + 1}-1")
        (one,) = fold.apply(completed(first), f"{again + 1}-2")
        (two,) = fold.apply(completed(token_row("a", 2, "y")), f"{again + 1}-3")
        assert isinstance(one.event, TokensProduced) and isinstance(two.event, TokensProduced)
        told = one.event.prompt
        assert told is not None and two.event.prompt is None
        assert (told.num_tokens, told.cached_tokens, told.token_ids, told.text) == (3, 2, (97, 98, 99), "abc")
        assert told.first == ToldToken(token=97, text="a")
        assert [(score.text, score.logprob) for score in told.scores] == [("b", -1), ("c", -2)]


def test_the_only_token_of_a_prompt_is_told_where_its_scores_are_wanted() -> None:
    events = history(prompt_logprobs=0)
    events[1] = (TOKENIZED_ID, Tokenized(ms=1001, token_ids=(97,), fingerprint="f", by="tokenize-0"))
    fold = DetokenizeFold(DECODER)
    fold.learn("a", moments_of(events))
    (item,) = fold.apply(completed(token_row("a", 1, "x")), "1-1")
    assert isinstance(item.event, TokensProduced) and item.event.prompt is not None
    assert (item.event.prompt.first, item.event.prompt.scores) == (ToldToken(token=97, text="a"), ())


@pytest.mark.parametrize(("truncate", "text"), [(None, "as it was sent"), (2, "\x01\x02\x03")])
def test_a_prompt_is_repeated_as_it_was_sent_or_where_it_was_cut_as_it_was_read(
    truncate: int | None, text: str
) -> None:
    events = history()
    submitted = events[0][1]
    assert isinstance(submitted, Submitted)
    asked = {"prompt": "as it was sent", "truncate_prompt_tokens": truncate, "presentation": Presentation(echo=True)}
    events[0] = (SUBMITTED_ID, submitted.model_copy(update=asked))
    fold = DetokenizeFold(DECODER)
    fold.learn("a", moments_of(events))
    (item,) = fold.apply(completed(token_row("a", 1, "x")), "1-1")
    assert isinstance(item.event, TokensProduced) and item.event.prompt is not None
    assert (item.event.prompt.text, item.event.prompt.token_ids, item.event.prompt.first) == (text, (), None)


def test_who_asked_for_nothing_is_told_nothing_of_the_prompt() -> None:
    (item,) = make_fold().apply(completed(token_row("a", 1, "x")), "1-1")
    assert isinstance(item.event, TokensProduced) and item.event.prompt is None and item.event.scores == ()
