"""Every field has the effect that its row of the table says, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import STOP
from fields import EOS, FIELDS, Field, Said
from servers import Server, serve
from streams import events_of
from transformers import PreTrainedTokenizerFast

from pipeline.events import Finished, TokensProduced
from pipeline.redis_log import RedisLog

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Tell me how a log remembers."}]


@pytest.fixture(scope="module")
def server(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), "--model", str(llama3), "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def log(server: Server) -> Iterator[RedisLog]:
    with server.log() as log:
        yield log


@pytest.fixture(scope="module")
def eos(llama3: Path) -> str:
    return str(PreTrainedTokenizerFast.from_pretrained(llama3).convert_tokens_to_ids(STOP))


def ask(server: Server, log: RedisLog, eos: str, fields: Mapping[str, Any]) -> Said:
    body = {"messages": MESSAGES, **fields}
    if "logit_bias" in body:
        body["logit_bias"] = {eos if token == EOS else token: bias for token, bias in body["logit_bias"].items()}
    response = server.post(body)
    assert response.status_code == 200, response.text
    events = events_of(log, response.headers["x-minisgl-uid"])
    tokens = [token for event in events if isinstance(event, TokensProduced) for token in event.tokens]
    choice = response.json()["choices"][0]
    finished = events[-1]
    assert isinstance(finished, Finished) and finished.reason == choice["finish_reason"]
    return Said(choice["message"]["content"], tokens, choice["finish_reason"])


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.name)
def test_a_field_does_what_its_row_says(server: Server, log: RedisLog, eos: str, row: Field) -> None:
    without = ask(server, log, eos, row.base)
    asked = {**row.base, row.name: row.value, **row.more(without)}
    said = ask(server, log, eos, asked)
    assert row.shows(without, said), (row.effect, without, said)
    assert ask(server, log, eos, asked).token_ids == said.token_ids, "the same request gives the same answer"


@pytest.mark.parametrize("certain", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}], ids=lambda field: next(iter(field)))
def test_where_one_token_is_left_the_answer_is_the_greedy_one(
    server: Server, log: RedisLog, eos: str, certain: dict[str, float]
) -> None:
    greedy = ask(server, log, eos, {"temperature": 0, "max_tokens": 24, **certain})
    assert ask(server, log, eos, {"temperature": 2, "max_tokens": 24, **certain}).token_ids == greedy.token_ids
    assert ask(server, log, eos, {"temperature": 0, "max_tokens": 24}).token_ids == greedy.token_ids


def test_a_token_that_the_model_does_not_have_is_refused_before_anything_is_computed(server: Server) -> None:
    response = server.post({"messages": MESSAGES, "logit_bias": {"99999999": 1}})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logit_bias") and "token 99999999" in error["message"]
