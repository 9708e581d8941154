"""The evaluation of the demo model: held-out questions, the same ones every time, each answered as if it were alone."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer

from ops.demo_model.corpus import frame_words
from ops.demo_model.evaluate import FAMILIES, REACHES, Examiner, main
from ops.demo_model.renamed import OF_KIND, letters_of
from ops.demo_model.wordings import is_held_out
from stages.generate.model.checkpoint import DEMO_FOLDER

TRAINED = {letters_of(name) for name in OF_KIND}


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return Examiner(DEMO_FOLDER)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_asks_the_same_questions_every_time(examiner: Examiner, family: str) -> None:
    questions = examiner.questions(family, 4)
    assert questions == examiner.questions(family, 4) and len(questions) == 4
    assert all(each.expected and each.prompt.endswith("<|im_start|>assistant\n") for each in questions)


@pytest.mark.parametrize("family", ["echo", "spell", "reverse", "call get_weather", "use get_weather"])
def test_its_values_are_held_out(examiner: Examiner, family: str) -> None:
    for each in examiner.questions(family, 50):
        asked = each.prompt.partition("<|im_start|>user\n")[2]
        words = [word for word in re.findall(r"[A-Za-z]+", asked) if word.casefold() not in frame_words()]
        assert any(is_held_out(word) for word in words), asked


@pytest.mark.parametrize("family", ["call a renamed tool", "use a renamed tool", "call an invented name"])
def test_its_tools_have_names_that_are_held_out_and_one_of_them_is_called(examiner: Examiner, family: str) -> None:
    called = set()
    for each in examiner.questions(family, 50):
        functions = [tool["function"] for tool in each.tools]
        names = [function["name"] for function in functions]
        assert len({*map(letters_of, names)} - TRAINED) == 2 and all(is_held_out(letters_of(name)) for name in names), (
            names
        )
        *_, text = re.findall(r"<tool_call>\n(.*)\n</tool_call>", each.prompt + each.expected)
        call = json.loads(text)
        called.add(place := names.index(call["name"]))
        assert list(call["arguments"]) == functions[place]["parameters"]["required"]
    assert called == {0, 1}


@pytest.mark.parametrize("family", REACHES)
def test_what_is_to_be_recalled_is_as_far_away_as_the_family_says(
    examiner: Examiner, tokenizer: Tokenizer, family: str
) -> None:
    least, most = REACHES[family]
    told = [each for each in examiner.questions(family, 10) if "have not told" not in each.expected]
    assert len(told) > 5
    for each in told:
        value = each.expected.rstrip(".").split()[-1]
        _, found, rest = each.prompt.lower().partition(value.lower())
        assert found and least <= len(tokenizer.encode(rest).ids) <= most + len(tokenizer.encode(value).ids) + 20


def test_a_counting_list_of_200_tokens_has_them(examiner: Examiner, tokenizer: Tokenizer) -> None:
    questions = examiner.questions("count, 200 tokens", 10)
    assert all(len(tokenizer.encode(each.expected).ids) >= 200 for each in questions)


def test_many_questions_at_once_are_answered_like_each_alone(examiner: Examiner) -> None:
    questions = examiner.questions("use add", 5) + examiner.questions("spell", 5)
    together = sorted(examiner.answer(questions), key=lambda each: each.prompt)
    alone = [examiner.answer([question])[0] for question in sorted(questions, key=lambda each: each.prompt)]
    for one, other in zip(together, alone, strict=True):
        assert one.expected == other.expected and one.answer.startswith(other.answer)  # alone has the least room
    assert len({each.answer for each in together}) > 1


def test_the_command_prints_scores_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(DEMO_FOLDER), "--number", "3", "--family", "greet", "--family", "echo", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["number"] == 3 and set(told["scores"]) == {"greet", "echo"}
    assert all(0 <= score <= 1 for score in told["scores"].values())
