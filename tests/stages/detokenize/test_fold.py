"""The fold of the detokenizer: steps in, events for histories and clients out. No Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.folds import DECODER, admitted, drafted_rows, token_row
from support.histories import moments_of

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    Finished,
    FinishReason,
    Markup,
    Preempted,
    Presentation,
    SamplingParams,
    Score,
    Scores,
    StepCompleted,
    StepRow,
    StepStats,
    Submitted,
    Tokenized,
    TokensProduced,
    TokenText,
    Usage,
)
from pipeline.log.protocol import Produced
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, tokens_id
from stages.detokenize.fold import AUTOMATONS_KEPT, DetokenizeFold
from stages.detokenize.text import StopAutomaton

NO_MARKUP = Markup()


def history(
    tokens: str = "",
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    submitted: dict[str, Any] | None = None,
    markup: Markup = NO_MARKUP,
    **sampling: Any,
) -> list[tuple[str, AnyEvent]]:
    """Return the history of a request that has these *tokens*; *submitted* are more fields of its first event."""
    params = SamplingParams.model_validate(sampling)
    first = Submitted(ms=1000, endpoint="chat", frontend="web-0", sampling=params, **(submitted or {}))
    return [
        (SUBMITTED_ID, first),
        (TOKENIZED_ID, Tokenized(ms=1001, token_ids=prompt_ids, fingerprint="f", by="tokenize-0", markup=markup)),
        *(
            (tokens_id(n), TokensProduced(ms=1002, count=1, tokens=(ord(letter),), text=letter, step="1-1"))
            for n, letter in enumerate(tokens, start=1)
        ),
    ]


def completed(*rows: StepRow, ms: int = 1010, released: tuple[str, ...] = (), forward_ms: float = 0) -> StepCompleted:
    return StepCompleted(ms=ms, rows=rows, released=released, figures=StepStats(forward_ms=forward_ms))


class Fold(DetokenizeFold):
    """A fold that has learnt request `a`, which had these *tokens* before."""

    def __init__(self, tokens: str = "", *, known: bool = True, **more: Any) -> None:
        super().__init__(DECODER)
        self.n = len(tokens)
        if known:
            self.learn("a", moments_of(history(tokens, **more)))

    def step(self, *rows: StepRow, **more: Any) -> list[Produced]:
        return self.apply(completed(*rows, **more), "1-1")

    def says(self, letters: str, end: FinishReason | None = None) -> list[Produced]:
        """Return what follows from the next tokens of `a`, each in a step of its own; *end* comes with the last."""
        produced = []
        for number, letter in enumerate(letters, start=1):
            self.n += 1
            produced += self.step(token_row("a", self.n, letter, end if number == len(letters) else None))
        return produced


def text(produced: Sequence[Produced]) -> str:
    return "".join(item.event.text for item in produced if isinstance(item.event, TokensProduced))


def tokens(produced: Sequence[Produced]) -> TokensProduced:
    """Return the only event."""
    (item,) = produced
    assert isinstance(item.event, TokensProduced)
    return item.event


def finished(produced: Sequence[Produced]) -> Finished:
    """Return the last event, which seals the history."""
    assert produced[-1].entry_id == SEAL
    assert isinstance(produced[-1].event, Finished)
    return produced[-1].event


def test_a_request_seen_first_is_asked_for_once() -> None:
    fold = Fold(known=False)
    step = completed(admitted("a"), token_row("a", 1), token_row("b", 1))
    assert fold.unknown(step) == ["a", "b"]
    fold.learn("a", moments_of(history()))
    assert fold.unknown(step) == ["b"]


def test_a_token_becomes_an_event_with_the_id_of_its_number() -> None:
    (item,) = Fold().apply(completed(token_row("a", 1, "x", chunks=2)), "1-5")
    assert (item.entry_id, item.n, item.frontend) == ("1-0", 1, "web-0")
    assert item.event == TokensProduced(count=1, tokens=(ord("x"),), text="x", step="1-5", chunks=2)


def test_the_tokens_of_a_step_with_drafts_are_one_event() -> None:
    fold, rows = Fold("ab"), [*drafted_rows("a", 3, "cde", 4), token_row("b", 1)]
    assert fold.unknown(completed(*rows)) == ["b"]
    assert fold.unknown(completed(admitted("a", n=3), token_row("a", 4))) == ["a"], "it lacks a token"
    (item,) = fold.step(*rows[:3])
    assert (item.entry_id, item.n) == ("5-0", 5)
    told: dict[str, Any] = {"count": 3, "tokens": tuple(map(ord, "cde")), "drafted": 4, "accepted": 2}
    assert item.event == TokensProduced(text="cde", step="1-1", **told)
    assert fold.step(*rows[:3]) == [], "a step that comes again is folded already"
    (item,) = fold.step(*drafted_rows("a", 6, "f", 3))
    assert item.event == TokensProduced(tokens=(ord("f"),), text="f", step="1-1", drafted=3)


def test_the_tokens_of_a_text_with_markup_are_an_event_each() -> None:
    produced = Fold(markup=Markup(think=("<a>", "</a>"))).step(*drafted_rows("a", 1, "xyz", 4))
    events = [item.event for item in produced if isinstance(item.event, TokensProduced)]
    assert [(event.text, event.count, event.drafted, event.accepted) for event in events] == [
        *(("x", 1, 4, 2), ("y", 1, 0, 0), ("z", 1, 0, 0)),
    ]


@pytest.mark.parametrize("end", [None, "stop"])
def test_a_stop_string_within_a_step_ends_the_request_there(end: FinishReason | None) -> None:
    produced = Fold(stop=("bc",)).step(*drafted_rows("a", 1, "abcde", 4, end=end))
    assert text(produced) == "a" and [item.n for item in produced] == [3, 3]
    assert finished(produced).usage.completion_tokens == 3 and finished(produced).stop_string == "bc"
    event = produced[0].event
    assert isinstance(event, TokensProduced) and (event.count, event.accepted) == (3, 3), "none of what was cut off"
    assert produced[-1].tell_engine == (end is None)


def test_usage_counts_the_drafts_of_a_prediction_alone() -> None:
    predicted = {"prediction": "xyz"}
    fold = Fold(submitted=predicted)
    steps = [drafted_rows("a", 1, "xyz", 4), drafted_rows("a", 4, "xy", 8, predicted=True)]
    entries = [item for rows in steps for item in fold.step(*rows)]
    again = Fold(known=False)
    again.learn("a", moments_of([*history(submitted=predicted), *((item.entry_id, item.event) for item in entries)]))
    for each in (fold, again):
        usage = finished(each.step(*drafted_rows("a", 6, "xyz", 2, predicted=True, end="length"))).usage
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (3, 7)


def test_marks_follow_the_events_at_their_number() -> None:
    fold = Fold()
    assert [item.entry_id for item in fold.step(admitted("a"), token_row("a", 1))] == ["0-3", "1-0"]
    preempted = EventRow(uid="a", n=1, event=Preempted(engine="generate-0", epoch=1, step=2))
    second = fold.step(preempted, admitted("a", n=1), token_row("a", 2))
    assert [item.entry_id for item in second] == ["1-1", "1-2", "2-0"]


def test_the_end_seals_with_reason_usage_and_timings() -> None:
    fold = Fold()
    fold.step(admitted("a", cached=2), ms=1004)
    fold.step(token_row("a", 1), ms=1007)
    produced = fold.step(token_row("a", 2, end="length"), ms=1015)
    end, timings = finished(produced), finished(produced).timings
    assert (end.n, end.reason, produced[-1].tell_engine) == (2, "length", False)
    assert end.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)
    assert (timings.admitted_ms, timings.first_token_ms, timings.total_ms) == (4, 7, 15)


def test_a_request_is_admitted_before_the_step_that_has_its_prompt_is_computed() -> None:
    timings = finished(Fold().step(admitted("a"), token_row("a", 1, end="length"), forward_ms=7.9)).timings
    assert (timings.admitted_ms, timings.first_token_ms) == (3, 10)


def test_a_request_whose_first_step_waited_for_redis_was_admitted_before_that() -> None:
    step = StepCompleted(rows=(admitted("a"), token_row("a", 1, end="length")), made_ms=1007, ms=1010)
    timings = finished(Fold().apply(step, "1-1")).timings
    assert (timings.admitted_ms, timings.first_token_ms) == (7, 10)


@pytest.mark.parametrize("before", ["", "w", "wx"])
def test_a_stop_string_ends_the_request_before_it_and_tells_the_engine(before: str) -> None:
    """Also where another detokenizer has shown, or held back, what came *before*."""
    produced = Fold(before, stop=["xy"]).says("wxy"[len(before) :])
    assert before[:1] + text(produced) == "w"
    end = finished(produced)
    assert (end.reason, end.n, end.stop_string, produced[-1].tell_engine) == ("stop", 3, "xy", True)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_token_that_ends_a_request_met_no_stop_string(reason: FinishReason) -> None:
    end = finished(Fold(stop=["xy"]).says("x", reason))
    assert (end.reason, end.stop_string) == (reason, "")


@pytest.mark.parametrize(("n", "stop"), [(1, ["x"]), (3, [])], ids=["a stop string", "a hole"])
def test_what_comes_after_an_end_is_dropped_and_not_asked_for_until_the_engine_lets_go(n: int, stop: list[str]) -> None:
    fold = Fold(stop=stop)
    fold.step(token_row("a", n, "x"))
    late = completed(token_row("a", n + 1, "y"))
    assert fold.unknown(late) == [] and fold.apply(late, "1-2") == []
    fold.step(released=("a",))
    assert fold.num_known == 0 and fold.unknown(late) == ["a"]


def test_a_stop_string_in_the_token_that_ends_anyway_needs_no_word_to_the_engine() -> None:
    produced = Fold(stop=["x"]).says("x", "length")
    assert finished(produced).reason == "stop" and not produced[-1].tell_engine


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    fold = Fold(stop=["xyz"])
    assert text(fold.says("x")) == "" and text(fold.says("y", "length")) == "xy"


def test_a_step_said_twice_says_nothing_new() -> None:
    fold = Fold()
    assert fold.step(token_row("a", 1)) and fold.step(token_row("a", 1)) == []


def test_a_hole_is_filled_from_the_history() -> None:
    fold = Fold()
    step = completed(token_row("a", 3, "z"))
    assert fold.unknown(step) == ["a"]
    fold.learn("a", moments_of(history("xy")))
    assert fold.unknown(step) == []
    assert [item.entry_id for item in fold.apply(step, "1-3")] == ["3-0"]


def the_loss(produced: Sequence[Produced]) -> tuple[int, str]:
    """Return n and the message of the only item, which ends a request with the loss of tokens and tells its engine."""
    (item,) = produced
    assert (item.entry_id, item.frontend, item.tell_engine) == (SEAL, "web-0", True)
    assert isinstance(item.event, Failed) and (item.event.status, item.event.code) == (500, "log_lost")
    assert item.event.n == item.n
    return item.n, item.event.message.partition(" lost ")[2].partition(" of ")[0]


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        (token_row("a", 3, "z"), "token 2"),
        (token_row("a", 6, "z"), "tokens 2 to 5"),
        (admitted("a", n=4), "tokens 2 to 4"),
    ],
)
def test_a_hole_that_the_history_has_too_ends_the_request(row: StepRow, lost: str) -> None:
    fold = Fold()
    assert fold.unknown(completed(row)) == ["a"]
    fold.learn("a", moments_of(history("x")))
    assert the_loss(fold.step(row)) == (1, lost)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_a_hole_inside_a_history_ends_the_request_whichever_token_comes(n: int) -> None:
    """An engine that took it over counts the tokens that are left, so what it computes is in the wrong place."""
    fold = Fold(known=False)
    fold.learn("a", moments_of([pair for pair in history("vwxy") if pair[0] not in (tokens_id(1), tokens_id(3))]))
    step = completed(token_row("a", n, "z", end="length"))
    assert fold.unknown(step) == []
    assert the_loss(fold.apply(step, "1-5")) == (4, "tokens 1, 3")
    assert fold.num_known == 0


def test_a_history_that_names_no_prompt_is_no_history() -> None:
    with pytest.raises(UndecodableEvent, match="no prompt"):
        Fold().learn("a", moments_of(history("x")[2:]))


@pytest.mark.parametrize(
    "pairs", [[*history("x"), (SEAL, Cancelled(n=1, by="client"))], []], ids=["cancelled", "history gone"]
)
def test_a_request_that_is_over_gets_no_more_events(pairs: list[tuple[str, AnyEvent]]) -> None:
    fold = Fold(known=False)
    fold.learn("a", moments_of(pairs))
    step = completed(token_row("a", 2, "y"))
    assert fold.unknown(step) == [] and fold.apply(step, "1-2") == []


def test_what_an_engine_cannot_run_fails_with_its_number() -> None:
    failed = Failed(status=400, code="context_length_exceeded", message="too long")
    (item,) = Fold().step(EventRow(uid="a", n=0, event=failed))
    assert item.entry_id == SEAL and item.event == failed


@pytest.mark.parametrize(
    ("more", "shown", "met"),
    [
        ({}, "ab", "\xc8"),
        ({"include_stop_str_in_output": True}, "ab\xc8", "\xc8"),
        ({"skip_special_tokens": False}, "ab", "\xc8"),  # there it is text
        ({"min_tokens": 4}, "abc", ""),
        ({"stop": ["bX", "\xc8"]}, "ab", "\xc8"),  # "b" was held back
        ({"stop": ["ab", "\xc8"]}, "", "ab"),
        ({"stop": ["\xc8c"]}, "abc", ""),  # more than the token
    ],
)
def test_a_stop_string_that_is_a_special_token_ends_the_answer_though_the_token_has_no_text(
    more: dict[str, Any], shown: str, met: str
) -> None:
    produced = Fold(**({"stop": ["\xc8"]} | more)).says("ab\xc8c"[: 2 if met == "ab" else 3 if met else 4], None)
    assert text(produced) == shown
    assert (produced[-1].entry_id == SEAL) == bool(met)
    assert not met or finished(produced).stop_string == met


def test_siblings_share_what_is_prepared_of_their_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[str]] = []

    class Counted(StopAutomaton):
        def __init__(self, stops: Sequence[str]) -> None:
            made.append(stops)
            super().__init__(stops)

    monkeypatch.setattr("stages.detokenize.fold.StopAutomaton", Counted)
    fold = Fold(known=False)
    for number in range(50):
        fold.learn(f"a.{number}", moments_of(history("xx", stop=["END", "STOP"])))
    assert made == [("END", "STOP")]
    for number in range(AUTOMATONS_KEPT + 1):
        fold.learn(f"b.{number}", moments_of(history(stop=[f"{number}"])))
    fold.learn("a", moments_of(history(stop=["END", "STOP"])))
    assert made.count(("END", "STOP")) == 2, "only the last ones are kept"


def test_after_a_failed_commit_the_step_can_be_folded_again() -> None:
    fold = Fold()
    step = completed(token_row("a", 1))
    before = fold.apply(step, "1-1")
    fold.forget(step)
    assert fold.unknown(step) == ["a"]
    fold.learn("a", moments_of(history()))
    assert fold.apply(step, "1-1") == before


def test_nothing_is_remembered_of_ended_requests() -> None:
    fold = Fold(known=False)
    for number in range(50):
        uid, stops = str(number), number % 2 == 1
        fold.learn(uid, moments_of(history(stop=["q"] if stops else [])))
        fold.step(token_row(uid, 1, "q", end=None if stops else "length"))
        fold.step(released=(uid,) if stops else ())
    assert fold.num_known == 0


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abSTO")])
def test_a_stop_string_is_shown_to_who_wants_it(include: bool, shown: str) -> None:
    produced = Fold(stop=["TOP", "STO"], include_stop_str_in_output=include).says("abSTOP")
    assert text(produced) == shown and finished(produced).usage.completion_tokens == 5


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "ab")])
def test_the_token_that_ends_an_answer_is_shown_to_who_wants_it(include: bool, shown: str) -> None:
    assert text(Fold(include_stop_str_in_output=include).says("ab", "stop")) == shown


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "aĬb")])
def test_special_tokens_are_shown_to_who_wants_them(skip: bool, shown: str) -> None:
    assert text(Fold(skip_special_tokens=skip).says("aĬb")) == shown


def test_scores_are_told_with_the_texts_of_their_tokens() -> None:
    row = token_row("a", 1, "x").model_copy(update={"score": Score(logprob=-2, top=((ord("y"), -0.5),))})
    (score,) = tokens(Fold(logprobs=1).step(row)).scores
    assert (score.token, score.text, score.logprob) == (ord("x"), "x", -2)
    assert [(other.token, other.text, other.logprob) for other in score.top] == [(ord("y"), "y", -0.5)]


# what is told of the prompt


def test_a_prompt_is_told_of_with_the_first_token_alone_and_by_whoever_folds_it() -> None:
    shown = {"presentation": Presentation(token_ids=True, echo=True)}
    first = token_row("a", 1).model_copy(update={"prompt_scores": Scores((Score(logprob=-1), Score(logprob=-2)))})
    for _ in range(2):
        fold = Fold(prompt_ids=(97, 98, 99), submitted=shown, prompt_logprobs=0)
        fold.step(admitted("a", cached=2))
        told = tokens(fold.step(first)).prompt
        assert told is not None and tokens(fold.step(token_row("a", 2))).prompt is None
        assert (told.num_tokens, told.cached_tokens, told.token_ids, told.text) == (3, 2, (97, 98, 99), "abc")
        assert told.first == TokenText(token=97, text="a")
        assert [(score.text, score.logprob) for score in told.scores] == [("b", -1), ("c", -2)]


def test_the_only_token_of_a_prompt_is_told_where_its_scores_are_wanted() -> None:
    told = tokens(Fold(prompt_ids=(97,), prompt_logprobs=0).says("x")).prompt
    assert told is not None and told.first == TokenText(token=97, text="a") and not told.scores


@pytest.mark.parametrize(("truncate", "repeated"), [(None, "as it was sent"), (2, "\x01\x02\x03")])
def test_a_prompt_is_repeated_as_it_was_sent_or_where_it_was_cut_as_it_was_read(
    truncate: int | None, repeated: str
) -> None:
    asked = {"prompt": "as it was sent", "truncate_prompt_tokens": truncate, "presentation": Presentation(echo=True)}
    told = tokens(Fold(submitted=asked).says("x")).prompt
    assert told is not None and (told.text, told.token_ids, told.first) == (repeated, (), None)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_of_a_prompt_that_came_as_tokens_are_repeated(skip: bool) -> None:
    asked = {"prompt_ids": tuple(map(ord, "aĬb")), "presentation": Presentation(echo=True)}
    fold = Fold(prompt_ids=tuple(map(ord, "aĬb")), submitted=asked, skip_special_tokens=skip)
    told = tokens(fold.says("x")).prompt
    assert told is not None and told.text == "aĬb"


@pytest.mark.parametrize("echo", [False, True])
def test_a_prompt_is_remembered_only_where_it_is_told(echo: bool) -> None:
    """It can be long, and many siblings have it."""
    fold = Fold(submitted={"prompt": "Hi", "presentation": Presentation(echo=echo)})
    request = fold._requests["a"]
    assert request is not None and request.submitted.prompt == ("Hi" if echo else "")


def test_who_asked_for_nothing_is_told_nothing_of_the_prompt() -> None:
    event = tokens(Fold().says("x"))
    assert event.prompt is None and event.scores == ()


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_special_tokens_of_the_markup_are_text_and_others_are_not_also_in_a_history_that_is_learnt(
    num_before: int,
) -> None:
    letters = "aÐbÑcÐ"
    fold = Fold(letters[:num_before], markup=Markup(tools="mistral", tokens=(ord("Ð"),)))
    expected = "".join(letter for letter in letters[num_before:] if letter != "Ñ")
    assert text(fold.says(letters[num_before:])) == expected
    shown = Fold(markup=Markup(tools="mistral", tokens=(ord("Ð"),)), skip_special_tokens=False)
    assert text(shown.says(letters)) == letters
    assert text(Fold().says(letters)) == "abc"


def test_the_markup_is_told_with_the_first_token_alone() -> None:
    markup = Markup(tools="hermes", think=("<think>", "</think>"), opens_thinking=True)
    told = [item.event for item in Fold(markup=markup).says("abc")]
    assert [event.markup for event in told if isinstance(event, TokensProduced)] == [markup, None, None]
    assert [event.markup for event in (tokens(Fold("a", markup=markup).says("b")), tokens(Fold().says("a")))] == [
        None,
        None,
    ]
