"""The conversations of the demo model: right answers, and a training that never meets what is held out."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from random import Random

import pytest
from support.selection import by_night

from ops.demo_model import wordings
from ops.demo_model.corpus import (
    BEYOND_SUMS,
    FOURTH_PHASE,
    NUM_PHASES,
    VERSION,
    Maker,
    conversations,
    frame_words,
    listed,
)
from ops.demo_model.messages import Conversation, Exchange
from ops.demo_model.renamed import OF_KIND, letters_of
from ops.demo_model.wordings import bare, core, is_held_out

NUM_DRAWN = by_night(100, 400)


def drawn(make: Callable[[Maker], Exchange], *, held_out: bool = False) -> list[Exchange]:
    maker = Maker(Random(f"test {make.__name__}"), held_out=held_out)
    return [make(maker) for _ in range(NUM_DRAWN)]


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_no_wording_of_the_training_is_one_of_those_held_out() -> None:
    trained = {bare(sentence) for name in wordings.names() for sentence in wordings.wording(name).trained}
    held_out = [bare(sentence) for name in wordings.names() for sentence in wordings.wording(name).held_out]
    assert len(held_out) > 200 and trained.isdisjoint(held_out)


def test_a_wording_is_bare_the_same_with_other_punctuation_and_politeness() -> None:
    assert bare('Please note: "{number}"!') == bare("note {number} now") == "note {number}"
    assert bare("Compute {a} + {b}.") == bare("compute {a}+{b}") != bare("compute {a}-{b}")


@pytest.mark.parametrize("name", wordings.names())
def test_a_held_out_wording_has_no_word_that_those_of_the_training_do_not_have(name: str) -> None:
    wording = wordings.wording(name)
    known = {word for sentence in wording.trained for word in core(sentence).split()}
    assert wording.held_out
    for sentence in wording.held_out:
        assert known.issuperset(core(sentence).split()), sentence


def test_brackets_stand_for_each_of_their_alternatives() -> None:
    assert wordings.expanded("[a|b] c[| {d}]") == ["a c", "a c {d}", "b c", "b c {d}"]
    assert wordings.expanded("{a}-{b}") == ["{a}-{b}"]


@pytest.mark.parametrize("held_out", [False, True])
def test_whatever_is_asked_is_one_of_the_sentences_of_its_side(held_out: bool) -> None:
    maker = Maker(Random(0), held_out=held_out)
    for name in wordings.names():
        if name.startswith("person_"):
            continue
        wording = wordings.wording(name)
        sentences = wording.held_out if held_out else wording.trained
        fields = {field for sentence in sentences for field in re.findall(r"\{(\w+)\}", sentence)}
        values = {field: f"<{field}>" for field in fields}
        expected = {core(sentence.format(**values)) for sentence in sentences}
        asked = {core(maker.ask(name, order=bool(number % 2), **values)) for number in range(40 * len(sentences))}
        assert asked == expected, name


def test_no_value_of_the_training_is_one_of_those_held_out() -> None:
    for conversation in itertools.islice(conversations("test"), 4000):
        for message in conversation.messages:
            if message["role"] == "user":
                words = re.findall(r"[A-Za-z]+", message["content"])
                met = [word for word in words if is_held_out(word) and word.casefold() not in frame_words()]
                assert not met, message["content"]


@pytest.mark.parametrize("name", ["words", "names", "cities", "colors", "jobs"])
def test_the_listed_values_are_divided_and_the_words_that_the_corpus_speaks_with_are_none(name: str) -> None:
    trained, held_out = listed(name, False), listed(name, True)
    assert set(trained).isdisjoint(held_out) and len(held_out) > 1
    assert {value.casefold() for value in (*trained, *held_out)}.isdisjoint(frame_words())
    assert len(trained) + len(held_out) >= len(wordings.values(name)) - 3


@pytest.mark.parametrize("make", [Maker.add, Maker.subtract, Maker.compare, Maker.sort, Maker.count])
def test_no_numbers_of_a_request_are_on_both_sides(make: Callable[[Maker], Exchange]) -> None:
    trained, held_out = (
        {frozenset(numbers_in(each.request)) for each in drawn(make, held_out=side) if each.word != "Equal"}
        for side in (False, True)
    )
    assert trained.isdisjoint(held_out)


@pytest.mark.night
def test_no_number_that_is_to_be_remembered_is_met_in_the_training() -> None:
    texts = [str(each["content"]) for one in itertools.islice(conversations("test"), 4000) for each in one.messages]
    met = {number for text in texts for number in numbers_in(text) if number >= BEYOND_SUMS}
    assert met and not any(is_held_out((number,)) for number in met)
    held_out = itertools.islice(conversations("test", held_out=True), 2000)
    answers = [str(one.messages[-1]["content"]) for one in held_out]
    numbers = [number for text in answers if text.startswith("You told me") for number in numbers_in(text)]
    assert len(numbers) > 20 and all(number >= BEYOND_SUMS and is_held_out((number,)) for number in numbers)


@pytest.mark.parametrize("make", [Maker.spell, Maker.reverse, Maker.echo])
def test_what_is_held_out_has_a_word_that_the_training_never_has(make: Callable[[Maker], Exchange]) -> None:
    """Neither as it is nor reversed, which would be the answer to another one."""
    for exchange in drawn(make, held_out=True):
        words = [word for word in re.findall(r"[A-Za-z]+", exchange.request) if word.casefold() not in frame_words()]
        assert any(is_held_out(word) and is_held_out(word[::-1]) for word in words), exchange


@pytest.mark.parametrize(
    ("held_out", "num", "expected"),
    [
        (False, 30, "1767ed16390fe4ba5c2e4465bed1cd048f2a54a1517804c0d6c5dac4fa1674a2"),
        (True, 30, "17bf248939a71ca2eaca71dcbc1f97b5e4808d2620291ebb19d0f7b6debb3724"),
        *(
            pytest.param(held_out, 1000, expected, marks=pytest.mark.night)
            for held_out, expected in (
                (False, "fe73a5b37d457c1669a8f86e4b687fa057122d68d3b33f238a73d5bf23b896ef"),
                (True, "ea3fc1848051d037c76d5fdeeca9072ba385469e6a4b486142e587d9c80d3b2d"),
            )
        ),
    ],
)
def test_the_corpus_is_to_the_byte_the_one_that_the_demo_model_learnt_from(
    held_out: bool, num: int, expected: str
) -> None:
    """Other bytes need a new VERSION and a new training; then a new digest belongs here."""
    digest = hashlib.sha256()
    for phase in range(NUM_PHASES):
        for one in itertools.islice(conversations("bytes", held_out=held_out, phase=phase), num):
            digest.update(json.dumps(dataclasses.asdict(one)).encode())
    assert (VERSION, digest.hexdigest()) == (7, expected)


@pytest.mark.night
def test_no_name_of_a_tool_in_the_training_is_one_of_those_held_out() -> None:
    def names(conversation: Conversation) -> set[str]:
        return {letters_of(tool["function"]["name"]) for tool in conversation.tools}

    trained, held_out = (
        set().union(*map(names, itertools.islice(conversations("names", held_out=side, phase=FOURTH_PHASE), 3000)))
        for side in (False, True)
    )
    own = {letters_of(name) for name in OF_KIND}
    assert own < trained and not any(map(is_held_out, trained - own)) and len(trained) > 500
    assert all(map(is_held_out, held_out - own)) and trained & held_out <= own and len(held_out) > 200
