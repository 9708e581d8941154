"""/generate, /abort_request and /health_generate on a real server, in the forms of SGLang and of Mini-SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Server, eventually
from transformers import PreTrainedTokenizerFast

from ops.sse_reader import frames_in

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

TEXT = "She sells sea shells by the sea shore; 你好, Grüße 🙂"
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(llama3_server: Server) -> Server:
    return llama3_server


@pytest.fixture(scope="module")
def tokenizer(llama3: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(llama3)
    return tokenizer


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def generate(server: Server, **body: Any) -> Any:
    return server.ask("/generate", body)


def data_of(response: httpx.Response) -> list[str]:
    """Return the data of each frame, as a browser reads it."""
    return [frame.data for frame in frames_in(response.content)]


def frames(response: httpx.Response) -> list[Any]:
    """Return the JSON of each line but [DONE], as SGLang's own clients read them."""
    *lines, done = [line for line in response.content.splitlines() if line.strip()]
    assert done == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def completion(server: Server, **body: Any) -> Any:
    """Return the choice with which /v1/completions answers the same, and its usage."""
    answer = server.ask("/v1/completions", {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **body})
    return answer["choices"][0], answer["usage"]


def without_its_own(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what two that are the same differ in."""
    varying = ("id", "cached_tokens", "e2e_latency")
    return answer | {"meta_info": {name: v for name, v in answer["meta_info"].items() if name not in varying}}


def test_sglangs_form_says_what_a_completion_says(server: Server) -> None:
    answer = generate(server, text=TEXT, sampling_params=GREEDY)
    choice, usage = completion(server, prompt=TEXT, return_token_ids=True)
    assert (answer["text"], answer["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = answer["meta_info"]
    assert [meta["prompt_tokens"], meta["completion_tokens"]] == [usage["prompt_tokens"], 24]
    assert meta["finish_reason"] == {"type": "length", "length": 24} and 0 < meta["e2e_latency"] < 120


def test_the_last_frame_of_a_stream_is_the_whole_answer_and_the_others_grow_towards_it(server: Server) -> None:
    scores = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
    response = post(server, "/generate", {"text": TEXT, "sampling_params": GREEDY, "stream": True, **scores})
    *growing, last = frames(response)
    answer = generate(server, text=TEXT, sampling_params=GREEDY, **scores)
    assert without_its_own(last) == without_its_own(answer)
    assert [frame["output_ids"] for frame in growing] == [answer["output_ids"][:n] for n in range(1, 25)]
    for frame in growing:
        meta = frame["meta_info"]
        assert answer["text"].startswith(frame["text"]) and meta["finish_reason"] is None
        assert meta["prompt_tokens"] == answer["meta_info"]["prompt_tokens"]
        assert meta["input_token_logprobs"] == answer["meta_info"]["input_token_logprobs"]
        assert (
            meta["output_token_logprobs"] == answer["meta_info"]["output_token_logprobs"][: meta["completion_tokens"]]
        )
    uid = response.headers["x-minisgl-uid"]
    assert {frame["meta_info"]["id"] for frame in (*growing, last)} == {uid}
    again = httpx.get(f"{server.url}/v1/requests/{uid}/events")
    assert data_of(again) == data_of(response)


def test_mini_sglangs_form_streams_the_same_text_with_its_line_breaks(
    server: Server, tokenizer: PreTrainedTokenizerFast
) -> None:
    for prompt in (TEXT, "\n\n- one\n- two\n"):
        choice, _ = completion(server, prompt=prompt, max_tokens=64)
        response = post(server, "/generate", {"prompt": prompt, "max_tokens": 64, "ignore_eos": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *said, done = frames_in(response.content)
        text = choice["text"].replace("\r\n", "\n").replace("\r", "\n")
        assert (done.data, "".join(frame.data for frame in said)) == ("[DONE]", text)
        again = httpx.get(f"{server.url}/v1/requests/{response.headers['x-minisgl-uid']}/events")
        assert data_of(again) == data_of(response)
    sixteen = frames_in(post(server, "/generate", {"prompt": TEXT, "ignore_eos": True}).content)
    short, _ = completion(server, prompt=TEXT, max_tokens=16)
    assert "".join(frame.data for frame in sixteen) == short["text"] + "[DONE]"


def test_requests_are_ended_by_the_ids_of_their_answers_and_all_at_once(server: Server) -> None:
    def living() -> int:
        with server.log() as log:
            return len(log.living())

    long = {"text": TEXT, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "n": 2}, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for ask in ({"rid": "one of them"}, {"rid": "all of them"}, {"abort_all": True}):
            with client.stream("POST", "/generate", json=long) as response:
                lines = response.iter_lines()
                frame = json.loads(next(line for line in lines if line).removeprefix("data: "))
                uid = frame["meta_info"]["id"] if ask.get("rid") == "one of them" else response.headers["x-minisgl-uid"]
                said = client.post("/abort_request", json={"rid": uid} if "rid" in ask else ask).json()
                assert len(said["aborted"]) == (1 if ask.get("rid") == "one of them" else 2)
                *_, error, done = [line for line in lines if line]
                assert '"code":"cancelled"' in error and done == "data: [DONE]"
            eventually(lambda: living() == 0, "the siblings are over")
