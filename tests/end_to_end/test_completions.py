"""/v1/completions and log-probabilities on a real server: what evaluation harnesses send, held to transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.servers import Server
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

CONTEXTS = [random.Random(seed).choices(range(4, 400), k=length) for seed, length in ((1, 70), (2, 9), (3, 150))]
CONTINUATIONS = [random.Random(seed).choices(range(4, 400), k=length) for seed, length in ((4, 3), (5, 20), (6, 1))]
TEXT = "She sells sea shells by the sea shore; 你好, Grüße 🙂"


@pytest.fixture(scope="module")
def server(llama3_server: Server) -> Server:
    return llama3_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(llama3: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(llama3)
    return tokenizer


def theirs(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logprobs_TV: row t is of the token after the first t + 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logprobs_TV: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
    return logprobs_TV


def chosen(logprobs_TV: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each of *token_ids* but the first."""
    return [float(logprobs_TV[place, token]) for place, token in enumerate(token_ids[1:])]


def test_the_loglikelihood_request_of_lm_eval_is_answered_as_transformers_would(server: Server, llama3: Path) -> None:
    prompts = [context + continuation for context, continuation in zip(CONTEXTS, CONTINUATIONS, strict=True)]
    body = {
        "model": "default", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0,
        "seed": 1234,
    }  # fmt: skip
    for _ in range(2):  # the second time the prompts are in the cache
        answer = server.ask("/v1/completions", body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        for choice, context, prompt in zip(answer["choices"], CONTEXTS, prompts, strict=True):
            told = choice["logprobs"]
            logprobs_TV = theirs(llama3, prompt)
            assert len(told["tokens"]) == len(prompt) + 1
            assert sum(told["token_logprobs"][len(context) : -1]) == pytest.approx(
                sum(chosen(logprobs_TV, prompt)[len(context) - 1 :]), abs=1e-3
            )
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            for place in range(len(context), len(prompt)):  # lm-eval's `is_greedy`
                best = max(told["top_logprobs"][place], key=told["top_logprobs"][place].get)
                greedy = int(logprobs_TV[place - 1].argmax()) == prompt[place]
                assert (best == told["tokens"][place]) is greedy
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "no cached page is read"


def test_a_chats_logprobs_are_transformers(server: Server, llama3: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    body = {
        "messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "temperature": 1.5, "seed": 4,
        "repetition_penalty": 1.3, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 2, "return_token_ids": True,
    }  # fmt: skip
    answer = server.ask("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    prompt, output = answer["prompt_token_ids"], choice["token_ids"]
    assert TEXT in str(tokenizer.decode(prompt))
    logprobs_TV = theirs(llama3, [*prompt, *output])
    content = choice["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx(
        chosen(logprobs_TV, [*prompt, *output])[len(prompt) - 1 :], abs=1e-4
    )
    for place, one in enumerate(content):
        best = logprobs_TV[len(prompt) - 1 + place].topk(5)
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    for token, told, logprob in zip(prompt[1:], rest, chosen(logprobs_TV, prompt), strict=True):
        assert told[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4) and len(told) in (2, 3)


def test_the_bytes_of_a_chats_tokens_are_its_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Hi"}], max_tokens=60, logprobs=True, temperature=0,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None and len(choice.logprobs.content) == 60
    raw = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert raw.decode(errors="replace") == choice.message.content


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_says_what_the_whole_one_says(client: openai.OpenAI, echo: bool) -> None:
    asked: dict[str, Any] = {
        "model": "default", "prompt": [TEXT, "Once"], "n": 2, "max_tokens": 9, "seed": 3, "echo": echo, "logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = client.completions.create(**asked)
    texts, logprobs, tokens = (dict[int, list[Any]]() for _ in range(3))
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts.setdefault(choice.index, []).append(choice.text)
            tokens.setdefault(choice.index, []).extend(getattr(choice, "token_ids", None) or [])
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or [])
        usage = chunk.usage
    assert {choice.index: choice.text for choice in whole.choices} == {
        index: "".join(parts) for index, parts in sorted(texts.items())
    }
    assert [choice.token_ids for choice in whole.choices] == [tokens[index] for index in range(4)]
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        theirs, ours = choice.logprobs.token_logprobs, logprobs[choice.index]
        assert (theirs[0] is None, ours[0] is None) == (echo, echo)
        assert ours[1:] == pytest.approx(theirs[1:], abs=1e-4)
    assert whole.choices[0].text.startswith(TEXT) is echo
    assert whole.usage is not None and usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.completion_tokens == 36


def test_each_choice_is_what_its_own_seed_gives_and_the_first_what_a_single_one_would_be(
    client: openai.OpenAI,
) -> None:
    asked: dict[str, Any] = {"model": "default", "max_tokens": 8, "seed": 11, "temperature": 1.5}
    several = [choice.text for choice in client.completions.create(prompt=["Once", TEXT], n=3, **asked).choices]
    again = [choice.text for choice in client.completions.create(prompt=["Once", TEXT], n=3, **asked).choices]
    assert several == again and len(set(several)) == 6
    assert client.completions.create(prompt="Once", **asked).choices[0].text == several[0]
    assert client.completions.create(prompt=TEXT, **asked).choices[0].text == several[3]


def test_an_echo_of_token_ids_has_all_of_them_and_every_token_begins_where_its_text_does(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tokenizer(f"{TEXT}{tokenizer.eos_token} Once ☃ more")["input_ids"]
    for prompt, text in ((ids, tokenizer.decode(ids)), (TEXT, TEXT)):  # the tokenizer begins a text with a token
        asked: dict[str, Any] = {"model": "default", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        choice = client.completions.create(**asked, echo=True, logprobs=0).choices[0]
        told = choice.logprobs
        assert choice.text.startswith(text) and told is not None and told.text_offset and told.tokens
        assert told.text_offset == sorted(told.text_offset) and told.text_offset[-1] <= len(choice.text)
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            shown = not token.startswith("bytes:") and (prompt is ids or token != tokenizer.bos_token)
            assert choice.text.startswith(token, offset) or not shown
