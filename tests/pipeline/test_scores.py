"""Scores in arrays: what they say, what they take, and what is refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.events import (
    Logprob,
    Logprobs,
    PromptInfo,
    Score,
    Scores,
    TokenRow,
    TokensProduced,
    TopLogprob,
    decode,
    encode,
)
from pipeline.scores import DECODED_AT_ONCE

TOLD = tuple(
    Logprob(
        token=token,
        text=f"<{token}>",
        logprob=-token / 7,
        top=tuple(TopLogprob(token=other, text=f"<{other}>", logprob=-other / 3) for other in others),
    )
    for token, others in ((5, (1, 2)), (6, ()), (5, (2, 99_999)))
)


def prompt_of(scores: Any) -> dict[str, str]:
    event = TokensProduced(tokens=(1,), text="", step="1-1", prompt=PromptInfo(num_tokens=4, scores=scores))
    return encode(event)


def test_they_say_what_they_were_made_of_and_are_told_slice_by_slice() -> None:
    scores = Logprobs(TOLD)
    assert tuple(scores) == TOLD and scores == TOLD and scores == Logprobs(TOLD) != Logprobs(TOLD[1:])
    assert (len(scores), scores.num_pairs) == (3, 7) and not Logprobs()
    assert (scores[-1], scores[1:]) == (TOLD[-1], list(TOLD[1:]))
    assert [(token.text, len(top)) for token, top in scores.rows(1)] == [("<6>", 0), ("<5>", 2)]
    with pytest.raises(IndexError):
        scores[3]


def test_an_event_keeps_them_bit_by_bit_whether_it_is_new_or_old() -> None:
    new = prompt_of(TOLD)
    event = decode(new)
    assert isinstance(event, TokensProduced) and event.prompt is not None and event.prompt.scores == TOLD
    old = orjson.loads(new["prompt"]) | {"scores": [score.model_dump(mode="json") for score in TOLD]}
    again = decode(new | {"prompt": orjson.dumps(old).decode()})
    assert again == event and encode(again) == new


def test_those_of_an_event_are_decoded_piece_by_piece_wherever_one_looks() -> None:
    many = Logprobs(
        Logprob(
            token=place,
            text=f"<{place}>",
            logprob=-place / 7,
            top=tuple(TopLogprob(token=other, text=f"<{other}>", logprob=-other / 3) for other in range(place % 5)),
        )
        for place in range(DECODED_AT_ONCE)  # three pairs each, so three pieces
    )
    event = decode(prompt_of(many))
    assert isinstance(event, TokensProduced) and event.prompt is not None
    scores = event.prompt.scores
    for start in (DECODED_AT_ONCE - 1, 0, 1_025, 2_050):
        assert list(scores.rows(start)) == list(many.rows(start))
        assert list(scores.tokens(start)) == list(many.tokens(start))
        assert scores[start] == many[start]
    assert (len(scores), scores.num_pairs) == (len(many), many.num_pairs)
    assert prompt_of(scores) == prompt_of(many) and scores == many
    scores.extend(TOLD)
    assert list(scores) == [*many, *TOLD]


def test_a_row_of_a_step_keeps_them_whether_it_is_new_or_old() -> None:
    said = (Score(logprob=-0.1, top=((7, -0.2),)), Score(logprob=-9999.0))
    row = TokenRow(uid="a", n=1, token=2, prompt_scores=Scores(said))
    plain = orjson.loads(orjson.dumps(row.model_dump(mode="json")))
    assert TokenRow.model_validate(plain) == row and row.prompt_scores == said
    old = plain | {"prompt_scores": [score.model_dump(mode="json") for score in said]}
    assert TokenRow.model_validate(old) == row
    assert row.prompt_scores.with_texts((3, 4), str) == (
        Logprob(token=3, text="3", logprob=-0.1, top=(TopLogprob(token=7, text="7", logprob=-0.2),)),
        Logprob(token=4, text="4", logprob=-9999.0),
    )


def test_a_pair_takes_16_bytes_of_the_log() -> None:
    one = Score(logprob=-13.421519, top=tuple((token, -13.421519) for token in range(20)))
    scores = Scores([one] * 1000).with_texts(range(1000), lambda token: "x")
    texts = 1000 * len('"1000":"x",')
    assert len(prompt_of(scores)["prompt"]) < 16.3 * scores.num_pairs + texts


@pytest.mark.parametrize(
    "damage",
    [
        {"ends": "AAAA"},
        {"ends": ""},
        {"tokens": "AQAAAA=="},
        {"logprobs": "no base64"},
        {"texts": {"x": ""}},
        {"texts": 5},
        {"tokens": None},
        {"ends": "BwAAAAMAAAAHAAAA"},
    ],
)
def test_damaged_ones_do_not_decode(damage: dict[str, Any]) -> None:
    adapter = TypeAdapter(Logprobs)
    plain = adapter.dump_python(Logprobs(TOLD), mode="json")
    assert adapter.validate_python(plain) == TOLD
    with pytest.raises(ValidationError):
        adapter.validate_python(plain | damage)
