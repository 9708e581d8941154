"""Every field has the effect that its row of the table says, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.checkpoints import STOP
from support.fields import EOS, FIELDS, PROMPT, Field, Said
from support.kernel_variants import VARIANTS
from support.selection import AT_NIGHT
from support.servers import Server
from support.streams import events_of, tokens_in
from transformers import PreTrainedTokenizerFast

from pipeline.events import Finished, Submitted
from pipeline.log.redis import RedisLog

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

AT_ONCE = 8 if VARIANTS else 1  # torch alone promises no equal tokens in company
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def server(llama3_server: Server) -> Server:
    return llama3_server


@pytest.fixture(scope="module")
def log(server: Server) -> Iterator[RedisLog]:
    with server.log() as log:
        yield log


@pytest.fixture(scope="module")
def eos(tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.convert_tokens_to_ids(STOP))


def ask(server: Server, log: RedisLog, eos: str, fields: Mapping[str, Any], *, completions: bool = False) -> Said:
    asked = {"prompt": PROMPT} if completions else {"messages": MESSAGES}
    body = {**asked, **fields}
    if "logit_bias" in body:
        body["logit_bias"] = {eos if token == EOS else token: bias for token, bias in body["logit_bias"].items()}
    path = "/v1/completions" if completions else "/v1/chat/completions"
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    uid = response.headers["x-minisgl-uid"]
    events = events_of(log, uid if body.get("n", 1) == 1 else f"{uid}.0")
    submitted, finished = events[0], events[-1]
    assert isinstance(submitted, Submitted) and isinstance(finished, Finished)
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        answer: Any = [json.loads(line) for line in lines]
        choices = [choice for chunk in answer for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        reason = choices[-1]["finish_reason"]
    else:
        answer = response.json()
        text = answer["choices"][0]["text"] if completions else answer["choices"][0]["message"]["content"]
        reason = answer["choices"][0]["finish_reason"]
    assert finished.reason == reason
    return Said(text, tokens_in(events), reason, finished.usage.prompt_tokens, answer, submitted.model_dump())


@pytest.fixture(scope="module")
def answers(server: Server, log: RedisLog, eos: str) -> list[Future[tuple[Said, Said]]]:
    """What each row is answered without its field, and with it. All of them are asked side by side."""

    def both(row: Field) -> tuple[Said, Said]:
        without = ask(server, log, eos, row.base, completions=row.completions)
        asked = {**row.base, row.name: row.value, **row.more(without)}
        said = ask(server, log, eos, asked, completions=row.completions)
        if AT_NIGHT:
            again = ask(server, log, eos, asked, completions=row.completions)
            assert again.token_ids == said.token_ids, "the same request gives the same answer"
        return without, said

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [pool.submit(both, row) for row in FIELDS]  # all are done at the end of the block


@pytest.mark.parametrize(
    "number", range(len(FIELDS)), ids=[row.name + "-completions" * row.completions for row in FIELDS]
)
def test_a_field_does_what_its_row_says(answers: list[Future[tuple[Said, Said]]], number: int) -> None:
    without, said = answers[number].result()
    assert FIELDS[number].shows(without, said), (FIELDS[number].effect, without, said)


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
