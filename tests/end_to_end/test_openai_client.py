"""The official client, with its strict validation, against a model that is made to say `She sells 你好! 🙂`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from support.checkpoints import END, STOP, make_checkpoint, reference_tokens
from support.servers import Server, serve
from support.streams import events_of, tokens_in
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.events import AnyEvent, Finished, Tokenized

pytestmark = pytest.mark.slow

MODEL = "org/name"
CYCLE = ("She", "Ġsells", "Ġ", "ä", "½ł", "å", "¥½", "!", "ĠðŁ", "ĻĤ", STOP, "Z", END, "A", "Ġends")
"""What the model says, over and over, as it stands in the vocabulary: 你, 好 and 🙂 are two tokens each."""
SECOND = {"ĻĤ": "Z", "Z": "A"}
"""What it says after a token when what comes next in the cycle is forbidden."""
ENDS = (STOP, END, "Ġends")
"""Its end-of-sequence tokens; the last one is no special token."""
TEXT = "She sells 你好! 🙂"
"""The text up to the first of them."""
NUM_TOKENS = CYCLE.index(STOP) + 1
ROUND = TEXT + "ZA ends"
"""The text of all of `CYCLE`: special tokens have none."""
REPLACEMENT = "\ufffd"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "你好! 你好吗?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token depends on the last one alone: no attention, no MLP, a basis vector for each token."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "forced", "qwen3", tie=False)
    ids = vocabulary(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        states, scores = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
        states[:, 0] = 1.0  # after any other token the cycle begins
        scores[ids[CYCLE[0]], 0] = 1.0
        for state, (token, following) in enumerate(zip(CYCLE, (*CYCLE[1:], CYCLE[0]), strict=True), start=1):
            states[ids[token]].zero_()[state] = 1.0
            scores[ids[following], state] = 1.0
            if token in SECOND:
                scores[ids[SECOND[token]], state] = 0.5
    model.generation_config.eos_token_id = [ids[token] for token in ENDS]
    model.save_pretrained(folder)
    tokens, _ = reference_tokens(folder, [ids["Ċ"]], 2 * len(CYCLE))
    assert tokens == 2 * [ids[token] for token in CYCLE]
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model", str(folder), "--served-model-name", MODEL, "other-name")
    with serve(tmp_path_factory.mktemp("openai"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


@dataclass(frozen=True)
class Streamed:
    """All chunks of one answer."""

    chunks: tuple[ChatCompletionChunk, ...]

    @property
    def deltas(self) -> list[str]:
        return [choice.delta.content or "" for chunk in self.chunks for choice in chunk.choices]

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def finish_reasons(self) -> list[str | None]:
        return [choice.finish_reason for chunk in self.chunks for choice in chunk.choices]


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def vocabulary(folder: Path) -> dict[str, int]:
    return cast(dict[str, int], tokenizer_of(folder).get_vocab())


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> ChatCompletion:
    given: Any = {"model": MODEL, "messages": messages, "temperature": 0} | options
    return cast(ChatCompletion, client.chat.completions.create(**given))


def stream(client: openai.OpenAI, **options: Any) -> Streamed:
    given: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": True} | options
    with client.chat.completions.create(**given) as chunks:
        return Streamed(tuple(chunks))


def usage_of(completion: ChatCompletion) -> CompletionUsage:
    assert completion.usage is not None
    return completion.usage


def text_of(completion: ChatCompletion) -> str:
    text: str | None = completion.choices[0].message.content
    assert text is not None
    return text


def history(server: Server, answer_id: str) -> list[AnyEvent]:
    with server.log() as log:
        return events_of(log, answer_id.removeprefix("chatcmpl-"))


def tokenized_in(events: Sequence[AnyEvent]) -> tuple[int, ...]:
    return next(event.token_ids for event in events if isinstance(event, Tokenized))


def template_ids(folder: Path, messages: Sequence[ChatCompletionMessageParam]) -> tuple[int, ...]:
    tokenizer = tokenizer_of(folder)
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def assert_both_ways(client: openai.OpenAI, text: str, reason: str, **options: Any) -> ChatCompletion:
    """Ask with and without a stream: *text* and *reason* it is; return the whole answer."""
    whole, streamed = ask(client, **options), stream(client, **options)
    assert (text_of(whole), whole.choices[0].finish_reason) == (text, reason)
    assert (streamed.text, streamed.finish_reasons[-1]) == (text, reason)
    assert streamed.finish_reasons[:-1] == [None] * (len(streamed.finish_reasons) - 1)
    return whole


def test_an_answer_has_its_text_its_reason_and_its_usage(client: openai.OpenAI, server: Server, folder: Path) -> None:
    answer = ask(client)
    assert answer.model == MODEL
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].message.role == "assistant"
    assert (text_of(answer), answer.choices[0].finish_reason) == (TEXT, "stop")
    events = history(server, answer.id)
    assert tokens_in(events) == [vocabulary(folder)[token] for token in CYCLE[:NUM_TOKENS]]
    usage = usage_of(answer)
    assert usage.prompt_tokens == len(tokenized_in(events)) == len(template_ids(folder, HELLO))
    assert usage.completion_tokens == NUM_TOKENS
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    end = events[-1]
    assert isinstance(end, Finished) and end.usage.completion_tokens == NUM_TOKENS


def test_the_deltas_of_a_stream_are_the_answer_and_never_half_a_character(client: openai.OpenAI) -> None:
    streamed = stream(client)
    assert streamed.chunks[0].choices[0].delta.role == "assistant"
    assert streamed.text == text_of(ask(client)) == TEXT
    assert not any(REPLACEMENT in delta for delta in streamed.deltas)
    assert {"你", "好"} <= set(streamed.deltas), "a character comes as soon as it is whole"
    assert len({chunk.id for chunk in streamed.chunks}) == 1
    assert {chunk.model for chunk in streamed.chunks} == {MODEL}
    assert all(chunk.usage is None for chunk in streamed.chunks)
    assert streamed.finish_reasons[-1] == "stop" and not any(streamed.finish_reasons[:-1])


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        pytest.param("你好", "She sells ", 7, id="over four tokens"),
        pytest.param("好", "She sells 你", 7, id="over two tokens"),
        pytest.param("el", "She s", 2, id="inside a token"),
        pytest.param("ells 你", "She s", 5, id="from inside a token"),
        pytest.param("She", "", 1, id="at once"),
        pytest.param(["nothing like it", "!", "好!"], "She sells 你", 8, id="the first of several to begin"),
        pytest.param("🙂 and more", TEXT, NUM_TOKENS, id="begun but never met"),
    ],
)
def test_a_stop_string_cuts_the_text_before_it(
    client: openai.OpenAI, server: Server, stop: str | list[str], text: str, num_tokens: int
) -> None:
    whole = assert_both_ways(client, text, "stop", stop=stop)
    assert usage_of(whole).completion_tokens == len(tokens_in(history(server, whole.id))) == num_tokens


@pytest.mark.parametrize("max_tokens", range(1, NUM_TOKENS))
def test_max_tokens_ends_with_length(client: openai.OpenAI, server: Server, max_tokens: int) -> None:
    """A character that is cut in two is the one thing that is shown as U+FFFD, as transformers decodes it."""
    whole, streamed = ask(client, max_tokens=max_tokens), stream(client, max_tokens=max_tokens)
    assert whole.choices[0].finish_reason == streamed.finish_reasons[-1] == "length"
    assert usage_of(whole).completion_tokens == len(tokens_in(history(server, whole.id))) == max_tokens
    text = text_of(whole)
    assert streamed.text == text
    assert TEXT.startswith(text.removesuffix(REPLACEMENT))
    assert text.endswith(REPLACEMENT) == (CYCLE[max_tokens - 1] in ("ä", "å", "ĠðŁ"))


@pytest.mark.parametrize(
    ("min_tokens", "text", "end"),
    [(10, TEXT, STOP), (11, TEXT + "Z", END), (12, TEXT + "ZA", "Ġends")],
)
def test_every_end_of_sequence_token_ends_and_is_not_shown(
    client: openai.OpenAI, server: Server, folder: Path, min_tokens: int, text: str, end: str
) -> None:
    """`min_tokens` forbids them until so many tokens are there, and so leads past the first ones."""
    whole = assert_both_ways(client, text, "stop", extra_body={"min_tokens": min_tokens})
    tokens = tokens_in(history(server, whole.id))
    assert tokens[-1] == vocabulary(folder)[end]
    assert usage_of(whole).completion_tokens == len(tokens) == min_tokens + 1


def test_min_tokens_puts_off_stop_tokens_and_stop_strings(client: openai.OpenAI, folder: Path) -> None:
    first = {"ignore_eos": True, "min_tokens": len(CYCLE)}
    whole = assert_both_ways(client, ROUND + "She sells ", "stop", stop="你好", extra_body=first)
    assert usage_of(whole).completion_tokens == len(CYCLE) + 7


def test_the_asynchronous_client_streams_many_answers_side_by_side(server: Server) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60, _strict_response_validation=True
        ) as client:

            async def one() -> str:
                chunks = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stream=True)
                return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])

            return await asyncio.gather(*(one() for _ in range(12)))

    assert asyncio.run(ask_all()) == 12 * [TEXT]


def test_choices_and_logprobs_are_as_the_client_expects_them_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(0, TEXT), (1, TEXT)]
    assert usage_of(whole).completion_tokens == 2 * NUM_TOKENS
    told: dict[int, list[str]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**asked, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            for token in choice.logprobs.content or [] if choice.logprobs else []:
                assert len(token.top_logprobs) == 2
                told[choice.index].append(token.token)
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [token.token for token in choice.logprobs.content] == told[choice.index]
        assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content[:-1]).decode() == TEXT


@pytest.mark.parametrize("num_prompts", [0, 1, 2])
@pytest.mark.parametrize("in_ids", [False, True])
def test_completions_are_as_the_client_expects_them_whole_and_streamed(
    client: openai.OpenAI, folder: Path, num_prompts: int, in_ids: bool
) -> None:
    prompt: Any = [vocabulary(folder)["Ċ"]] if in_ids else "\n"
    asked: dict[str, Any] = {"model": MODEL, "prompt": [prompt] * num_prompts or prompt}
    asked |= {"temperature": 0, "logprobs": 1, "stop": "!"}
    whole = client.completions.create(**asked)
    expected = TEXT.partition("!")[0]
    assert [choice.text for choice in whole.choices] == [expected] * len(whole.choices)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    texts = dict.fromkeys(range(len(whole.choices)), "")
    with openai.OpenAI(base_url=client.base_url, api_key="any", max_retries=0) as lax:  # its type knows no open chunk
        for chunk in lax.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert list(texts.values()) == [expected] * max(num_prompts, 1)
    assert chunk.usage == whole.usage
