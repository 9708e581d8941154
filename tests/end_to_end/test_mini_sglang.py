"""What clients of Mini-SGLang run into and here do not: a test for each, on one real server that outlives them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from checkpoints import BOS, STOP
from servers import Server
from streams import events_of
from transformers import PreTrainedTokenizerFast

from pipeline.events import Tokenized
from pipeline.names import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

HELLO: Any = [{"role": "user", "content": "Hello!"}]


def workers(server: Server) -> set[int]:
    """Return the process ids of all workers."""
    return {process.pid for stage in STAGES for process in server.command.workers(stage)}


def said(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> str:
    """Return the most probable answer."""
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 8, **fields}
    return client.chat.completions.create(messages=messages, **asked).choices[0].message.content or ""


@pytest.fixture(scope="module")
def server(llama3_server: Server) -> Iterator[Server]:
    before = workers(llama3_server)
    yield llama3_server
    assert workers(llama3_server) == before, "nothing that a client sends ends a process"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def refused(server: Server, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    """Return the error that a 400 has; the server answers as before."""
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert server.post({"messages": HELLO, "max_tokens": 1}).status_code == 200
    error: dict[str, Any] = response.json()["error"]
    return error


def test_1_a_prompt_that_is_too_long_is_refused_and_nobody_waits_for_ever(server: Server) -> None:
    error = refused(server, {"messages": [{"role": "user", "content": "word " * 4000}]})
    assert error["code"] == "context_length_exceeded"


def test_2_an_answer_is_streamed_to_who_asks_for_it_alone(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    chunks = client.chat.completions.create(stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said(client)


def test_3_an_answer_that_was_cut_says_length(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    cut = client.chat.completions.create(model="default", messages=HELLO, max_tokens=3, extra_body=extra)
    assert cut.choices[0].finish_reason == "length"


def test_4_chunks_have_what_openais_have(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="default", messages=HELLO, max_tokens=3, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.id.startswith("chatcmpl-") and chunk.created > 1_700_000_000 and chunk.model for chunk in chunks)
    usage = client.chat.completions.create(model="default", messages=HELLO, max_tokens=3).usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_5_nothing_that_changes_the_answer_is_accepted_and_ignored(server: Server, client: openai.OpenAI) -> None:
    wild: dict[str, Any] = {"temperature": 1.5, "seed": 1}
    several = client.chat.completions.create(model="default", messages=HELLO, n=2, max_tokens=8, **wild).choices
    assert len({choice.message.content for choice in several}) == 2
    whole = said(client, **wild)
    assert said(client, stop=whole[1:3], **wild) == whole.partition(whole[1:3])[0]
    for field, value in (("response_format", {"type": "json_object"}), ("presence_penalty", 3)):
        assert refused(server, {"messages": HELLO, field: value})["param"] == field


def test_6_a_chat_that_says_no_length_ends_where_the_model_ends_it(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="default", messages=HELLO, extra_body={"ignore_eos": True}).usage
    assert usage is not None and usage.completion_tokens > 16


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/metrics", "/ready", "/v1/models", "/openapi.json"])
def test_6_what_tools_look_for_is_there(server: Server, path: str) -> None:
    response = httpx.get(f"{server.url}{path}", timeout=60)
    assert response.status_code == (405 if path == "/v1/completions" else 200)


def test_7_contents_have_parts_and_developers_a_role(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    assert said(client, [{"role": "user", "content": parts}]) == said(client)
    told = [said(client, [{"role": role, "content": "Be brief."}, *HELLO]) for role in ("developer", "system")]
    assert told[0] == told[1] != said(client)


def test_8_a_chat_without_a_prompt_is_the_clients_mistake(server: Server) -> None:
    assert refused(server, {})["param"] == "messages"


def test_9_newlines_do_not_break_the_frames_of_generate(server: Server, llama3: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(llama3)
    newline = str(tokenizer.get_vocab()["Ċ"])
    body = {"text": "Hello", "stream": True, "sampling_params": {"max_new_tokens": 3, "logit_bias": {newline: 100}}}
    frames = httpx.post(f"{server.url}/generate", json=body, timeout=60).text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]" and all(frame.count("\n") == 0 for frame in frames)
    assert r"\n\n\n" in frames[-2]
    plain = httpx.post(f"{server.url}/generate", json={"prompt": "Hello", "max_tokens": 4}, timeout=60)
    assert plain.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("wrong", [{"max_tokens": -1}, {"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}])
def test_10_a_value_out_of_range_is_refused_and_ends_no_engine(server: Server, wrong: dict[str, Any]) -> None:
    assert refused(server, {"messages": HELLO, **wrong})["param"] == next(iter(wrong))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/generate", {"text": ""}),
        ("/generate", {"input_ids": []}),
        ("/generate", {"prompt": ""}),
    ],
)
def test_11_an_empty_prompt_is_refused_and_ends_no_engine(server: Server, path: str, body: dict[str, Any]) -> None:
    refused(server, body, path)


def test_13_no_two_requests_have_one_id(client: openai.OpenAI) -> None:
    ids = {client.chat.completions.create(model="default", messages=HELLO, max_tokens=1).id for _ in range(5)}
    assert len(ids) == 5 and all(len(each) == len("chatcmpl-") + 32 for each in ids)


def test_14_a_model_that_is_not_served_is_not_found_and_models_have_names(client: openai.OpenAI, llama3: Path) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert [model.id for model in client.models.list()] == [llama3.name]


def test_17_a_conversation_that_the_template_refuses_fails_alone(server: Server) -> None:
    error = refused(server, {"messages": [{"role": "assistant", "content": "I begin."}]})
    assert error["code"] == "template_error"


def test_25_a_prompt_begins_once(server: Server, llama3: Path) -> None:
    begins = PreTrainedTokenizerFast.from_pretrained(llama3).get_vocab()[BOS]
    uid = server.post({"messages": HELLO, "max_tokens": 1}).headers["x-minisgl-uid"]
    with server.log() as log:
        (tokenized,) = [event for event in events_of(log, uid) if isinstance(event, Tokenized)]
    assert tokenized.token_ids.count(begins) == 1 == tokenized.token_ids[:1].count(begins)


def test_26_and_27_every_end_token_of_the_model_ends_an_answer_and_none_is_shown(server: Server, llama3: Path) -> None:
    vocabulary = PreTrainedTokenizerFast.from_pretrained(llama3).get_vocab()
    for token in (STOP, "<|endoftext|>"):
        body = {"messages": HELLO, "max_tokens": 9, "logit_bias": {str(vocabulary[token]): 100}}
        answer = server.post(body).json()
        assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == 1


def test_28_half_a_character_at_the_end_is_not_held_back_for_ever(server: Server, llama3: Path) -> None:
    half = PreTrainedTokenizerFast.from_pretrained(llama3).get_vocab()["ä"]  # the first byte of many characters
    answer = server.post({"messages": HELLO, "max_tokens": 2, "logit_bias": {str(half): 100}}).json()
    assert answer["choices"][0]["message"]["content"] == "\ufffd\ufffd"


def test_36_greedy_is_greedy_whatever_top_p_says(client: openai.OpenAI) -> None:
    assert len({said(client, **fields) for fields in ({}, {"top_p": 0.1}, {"seed": 9})}) == 1
