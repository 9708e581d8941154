"""The tokenizer's endpoints of a real server, against transformers on the same folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints import BOS, STOP, TEXT
from support.servers import NARROW, Server, eventually
from support.streams import PROMPTS, Stream
from transformers import PreTrainedTokenizerFast

from pipeline.names import GENERATE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("narrow_server")]

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好, how are you? 🙂"}]


@pytest.fixture(scope="module")
def server(narrow_server: Server) -> Server:
    return narrow_server


@pytest.fixture(scope="module")
def tokenizer(llama3: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(llama3)
    return tokenizer


def post(server: Server, path: str, body: Mapping[str, Any], status: int = 200) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("special", [None, True, False])
def test_the_tokens_of_a_text_are_transformers_own_and_become_the_text_again(
    server: Server, tokenizer: PreTrainedTokenizerFast, special: bool | None
) -> None:
    told = post(server, "/tokenize", {"prompt": TEXT, "add_special_tokens": special, "return_token_strs": True})
    expected = tokenizer([TEXT], add_special_tokens=special is not False)["input_ids"][0]
    assert (told["tokens"], told["count"], told["max_model_len"]) == (expected, len(expected), NARROW)
    assert told["count"] > NARROW, "no context is a bound here"
    assert len(told["token_strs"]) == told["count"] and "Ġlog" in told["token_strs"]
    text = post(server, "/v1/detokenize", {"tokens": told["tokens"]})
    assert text == {"prompt": tokenizer.decode(expected), "text": tokenizer.decode(expected)}
    assert text["text"] == (TEXT if special is False else BOS + TEXT)


def test_a_prompt_that_begins_with_the_first_token_gets_another_one_and_a_warning(
    server: Server, tokenizer: PreTrainedTokenizerFast
) -> None:
    bos = tokenizer.convert_tokens_to_ids(BOS)
    for special, begin, warning in ((None, [bos, bos], "double_bos=prompt"), (False, [bos], None)):
        body = {"prompt": f"{BOS}Hello", "add_special_tokens": special}
        response = httpx.post(f"{server.url}/tokenize", json=body, timeout=60)
        tokens = response.json()["tokens"]
        assert tokens[: tokens.count(bos)] == begin and response.headers.get("x-minisgl-warnings") == warning


@pytest.mark.parametrize("opened", [None, False])
def test_the_tokens_of_a_conversation_are_transformers_own_and_those_that_a_chat_computes(
    server: Server, tokenizer: PreTrainedTokenizerFast, opened: bool | None
) -> None:
    body = {"messages": CONVERSATION, "add_generation_prompt": opened}
    told = post(server, "/v1/tokenize", body)
    expected = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=opened is not False, return_dict=False)
    assert told["tokens"] == expected and told["token_strs"] is None
    chat = server.post({"messages": CONVERSATION, "max_tokens": 1}).json()
    assert (chat["usage"]["prompt_tokens"] == told["count"]) is (opened is None)


def test_what_the_tokenizer_is_like_is_enough_to_do_without_it(
    server: Server, tokenizer: PreTrainedTokenizerFast, llama3: Path
) -> None:
    response = httpx.get(f"{server.url}/tokenizer_info", timeout=60)
    told = response.json()
    assert response.status_code == 200 and told["chat_template"] == tokenizer.chat_template
    assert (told["bos_token"], told["eos_token"]) == (BOS, STOP) and str(llama3) not in response.text
    eos = post(server, "/tokenize", {"prompt": told["eos_token"], "add_special_tokens": False})["tokens"]
    assert eos == [tokenizer.eos_token_id]


def test_what_is_wrong_is_said_with_the_field(server: Server, tokenizer: PreTrainedTokenizerFast) -> None:
    unknown = len(tokenizer)
    error = post(server, "/detokenize", {"tokens": [5, unknown]}, 400)["error"]
    assert error["param"] == "tokens" and f"no token {unknown};" in error["message"]
    body = {"messages": CONVERSATION, "chat_template_kwargs": {"tokenize": True}}
    assert post(server, "/tokenize", body, 400)["error"]["param"] == "chat_template_kwargs"
    error = post(server, "/tokenize", {"messages": CONVERSATION[1:] * 2}, 400)["error"]
    assert (error["code"], error["param"]) == ("template_error", "messages")
    error = post(server, "/tokenize", {"prompt": "a, b; c. " * 100_000}, 413)["error"]
    assert (error["code"], error["param"]) == ("request_too_large", "prompt")


def test_the_tokenizer_answers_while_every_engine_is_busy(server: Server) -> None:
    (engine,) = server.command.workers(GENERATE)
    engine.suspend()  # so busy that it says nothing at all
    try:
        with server.log() as log:
            stream = Stream(server, PROMPTS[0], max_tokens=4)
            eventually(lambda: len(log.living()) == 1, "the chat is in the log")
            assert post(server, "/tokenize", {"prompt": "log", "add_special_tokens": False})["count"] >= 1
            assert httpx.get(f"{server.url}/tokenizer_info", timeout=60).status_code == 200
            assert len(log.living()) == 1 and stream.num_frames == 0
    finally:
        engine.resume()
    eventually(lambda: stream.is_over, "the chat is answered, too", 60)
    assert stream.num_frames > 1 and stream.error is None
