"""Which characters a pattern can take one after the other, against what it takes of random texts."""

from __future__ import annotations

import random

import pytest
from support.split_patterns import KNOWN
from tokenizers import Regex, pre_tokenizers

from stages.tokenize.patterns import Pattern, UnknownPattern, literal

CHARACTERS = "aAbcdexyz'sS1 2-.\n\r/é中\u0301"


@pytest.mark.parametrize("source", KNOWN.values(), ids=KNOWN)
def test_where_a_pattern_cannot_take_both_characters_it_finds_the_same_in_both_halves(source: str) -> None:
    pattern, splits = Pattern(source), pre_tokenizers.Split(Regex(source), "isolated")
    draw, num_cut = random.Random(source), 0
    for _ in range(1500):
        text = "".join(draw.choice(CHARACTERS) for _ in range(draw.randrange(2, 14)))
        place = draw.randrange(1, len(text))
        if pattern.can_take_both(text[place - 1], text[place]):
            continue
        num_cut += 1
        ends = {end for _, (_, end) in splits.pre_tokenize_str(text)}
        first = {end for _, (_, end) in splits.pre_tokenize_str(text[:place])}
        second = {place + end for _, (_, end) in splits.pre_tokenize_str(text[place:])}
        assert ends | {place} == first | second, (text, place)
        if pattern.takes_alone(text[place - 1]):
            assert place in ends, (text, place)
    assert num_cut > 100


def test_a_match_that_looks_at_what_follows_ends_nowhere_safely() -> None:
    spaces = Pattern(r"\s+(?!\S)|\s+|\S")
    assert spaces.can_take_both(" ", "a") and not spaces.can_take_both("a", " ")


def test_a_pattern_of_a_text_takes_its_characters_in_their_order() -> None:
    text = literal("a.]")
    assert text.can_take_both("a", ".") and text.can_take_both(".", "]")
    assert not text.can_take_both(".", "a") and not text.can_take("b")


@pytest.mark.parametrize(
    "source",
    [r"a\b", "^a", "a$", r"\Aa", "(?<=b)a", "(?<!b)a", r"(a)\1", "(?>a)", "(?i)a", "a*", "", "[a", "(a", "a)", r"a\X"],
)
def test_a_pattern_that_looks_behind_or_that_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(UnknownPattern):
        Pattern(source)
