"""What came of a request, from its history or from a stream; and where two answers differ."""

from __future__ import annotations

import dataclasses

import pytest
from support.histories import recording

from ops.bench.load import Answer
from ops.replay.traffic import Difference, Outcome, first_difference, is_comparable, outcome_of, outcome_seen
from pipeline.walk import walk


def outcome(words: str, end: str = "stop") -> Outcome:
    """Return what came of a request whose tokens are the *words*."""
    history = recording([f"{word} " for word in words.split()], end).entries
    return outcome_of(moment.event for moment in walk(history))


def test_times_are_those_between_the_commits() -> None:
    whole = outcome("a b c d")
    assert (whole.ttft_ms, whole.tpot_ms, whole.e2e_ms) == (20, 10, 55)
    assert (whole.end, whole.text, whole.output_tokens) == ("stop", "a b c d ", 4)
    assert (whole.prompt_tokens, whole.cached_tokens, whole.error) == (9, 4, "")
    assert whole.is_whole


def test_a_single_token_has_no_time_per_token_and_none_has_no_time_at_all() -> None:
    assert outcome("a").tpot_ms is None and outcome("a").ttft_ms == 20
    assert outcome("").ttft_ms is None


def test_an_end_before_the_end_is_not_whole() -> None:
    left, failed = outcome("a b", "cancelled"), outcome("a b", "failed")
    assert (left.end, left.by_client, left.e2e_ms, left.error) == ("cancelled", True, 35, "")
    assert (failed.end, failed.by_client, failed.e2e_ms) == ("failed", False, None)
    assert failed.error == "503 poisonous: it broke"
    assert not left.is_whole and not failed.is_whole


def test_a_stream_is_measured_by_the_clock_of_the_client() -> None:
    answer = Answer(10.0, 13.0, (11.0, 12.0), "a b", prompt_tokens=9, output_tokens=5, reason="length")
    seen = outcome_seen(answer, left=False)
    assert (seen.end, seen.ttft_ms, seen.tpot_ms, seen.e2e_ms) == ("length", 1000, 250, 3000)
    assert seen.tokens is None
    assert outcome_seen(answer, left=True).end == "cancelled"
    broken = outcome_seen(dataclasses.replace(answer, error="it broke"), left=False)
    assert (broken.end, broken.error) == ("failed", "it broke")


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (outcome("a b c"), outcome("a b c"), None),
        (outcome("a b c"), outcome("a x c"), Difference(2, 2, "b c ", "x c ")),
        (outcome("a b"), outcome("a b c"), Difference(3, 4, "", "c ")),
        (outcome("a b c"), outcome("a b"), Difference(3, 4, "c ", "")),
        (outcome("a b", "cancelled"), outcome("a b c"), None),
        (outcome("a b c"), outcome("a b", "cancelled"), None),
        (outcome("a b", "cancelled"), outcome("a x", "cancelled"), Difference(2, 2, "b ", "x ")),
        (outcome("a b"), Outcome("stop", "a b "), None),
        (outcome("a b"), Outcome("stop", "a c "), Difference(None, 2, "b ", "c ")),
        (outcome("a b"), Outcome("stop", "a "), Difference(None, 2, "b ", "")),
        (outcome("a b"), Outcome("cancelled", "a "), None),
        (Outcome("stop", "a", (1, 2)), Outcome("stop", "a", (1, 3)), Difference(2, 1, "token id 2", "token id 3")),
        (Outcome("stop", "a", (1, 2)), Outcome("stop", "a", (1,)), Difference(2, 1, "token id 2", "the end")),
    ],
)
def test_answers_are_compared_token_by_token_or_by_their_text(
    before: Outcome, after: Outcome, difference: Difference | None
) -> None:
    assert is_comparable(before, after)
    assert first_difference(before, after) == difference


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (outcome("a b"), outcome("a", "failed")),
        (outcome("a b", "failed"), outcome("a b")),
        (outcome("a b", "cancelled"), outcome("", "cancelled")),
        (outcome("", "cancelled"), outcome("a b")),
        (outcome("a b"), Outcome("")),
    ],
)
def test_where_nothing_can_be_compared_nothing_is(before: Outcome, after: Outcome) -> None:
    assert not is_comparable(before, after)


def test_a_difference_says_where_and_how() -> None:
    assert str(Difference(2, 2, "b c", "x c")) == "token 2: 'b c', now 'x c'"
    assert str(Difference(None, 2, "b", "")) == "character 3: 'b', now ''"
