"""Bodies, chunks and frames, as the official client reads them."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.chunks import UID, answered, documents, ended, finished, frames_of, split

from pipeline.errors import RequestError
from pipeline.events import (
    Admitted,
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    Logprobs,
    Presentation,
    PromptInfo,
    SamplingParams,
    Submitted,
    TokensProduced,
    TokenText,
    TopLogprob,
)
from pipeline.names import SEAL
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT
from web.wire.frames import ClientEvent, Frames
from web.wire.openai.errors import error_body, error_of


def submitted(model: str = "m", endpoint: str = CHAT_ENDPOINT, **shown: Any) -> Submitted:
    presentation = Presentation(**shown)
    return Submitted(
        endpoint=endpoint, frontend="web-0", model=model, sampling=SamplingParams(), presentation=presentation
    )


def tokens(n: int, text: str, index: int = 0, **more: Any) -> ClientEvent:
    return ClientEvent(f"{n}-0", n, TokensProduced(count=1, tokens=(5,), text=text, step="1-1", **more), index)


def whole(events: Sequence[Submitted], *texts: str, reason: FinishReason = "stop", **more: Any) -> bytes:
    """Return the body of an answer in which each choice has one token."""
    given = ((tokens(1, text, index, **more), ended(finished(reason), index)) for index, text in enumerate(texts))
    return answered(events, itertools.chain(*given))


def chat_frames(model: str = "m", **shown: Any) -> Frames:
    return frames_of([submitted(model, **shown)])


def test_a_completion_is_what_the_official_client_expects() -> None:
    parsed = ChatCompletion.model_validate_json(whole([submitted("org/m")], 'a "b"\n', reason="length"), strict=True)
    assert (parsed.id, parsed.model, parsed.created) == (f"chatcmpl-{UID}", "org/m", 5)
    assert (parsed.choices[0].message.content, parsed.choices[0].finish_reason) == ('a "b"\n', "length")
    assert parsed.usage is not None and parsed.usage.prompt_tokens_details is not None
    assert (parsed.usage.total_tokens, parsed.usage.prompt_tokens_details.cached_tokens) == (10, 4)


@pytest.mark.parametrize("include_usage", [False, True])
def test_chunks_are_what_the_official_client_expects(include_usage: bool) -> None:
    frames = chat_frames('or"g/m', include_usage=include_usage)
    stream = frames.of(tokens(1, 'a "b"\n')) + frames.of(ended(finished()))
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in documents(stream)]
    assert {(chunk.id, chunk.model, chunk.created) for chunk in chunks} == {(f"chatcmpl-{UID}", 'or"g/m', 5)}
    role, text, last, *rest = chunks
    assert (role.choices[0].delta.role, role.choices[0].delta.content) == ("assistant", "")
    assert text.choices[0].delta.content == 'a "b"\n'
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert [chunk.choices for chunk in rest] == ([[]] if include_usage else [])
    assert [chunk.usage is not None for chunk in chunks] == [False] * 3 + [True] * include_usage


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_last_frame_of_an_event_carries_its_history_id(include_usage: bool) -> None:
    frames = chat_frames(include_usage=include_usage)
    role, first = split(frames.of(tokens(17, "x")))
    assert first.startswith(b"id: 17-0\ndata: {") and b"id: " not in role
    *others, last = split(frames.of(ended(finished())))
    assert last.startswith(f"id: {SEAL}\n".encode())
    assert len(others) == include_usage and not any(b"id: " in other for other in others)


def test_tokens_without_text_make_no_frame_but_the_first_one_that_there_is() -> None:
    frames = chat_frames()
    assert b'"role":"assistant"' in frames.of(tokens(1, ""))
    assert frames.of(tokens(2, "")) == b""
    assert b"assistant" not in frames.of(tokens(3, "x"))


def test_what_is_not_for_clients_makes_no_frame() -> None:
    admitted = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f")
    assert chat_frames().of(ClientEvent("0-3", 0, admitted)) == b""


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\u0085b", "\u2028\u0085\u2029", "é…—漢字🙂", "\x00\r\n"])
def test_no_text_can_break_a_frame_in_two(text: str) -> None:
    _, frame = split(chat_frames().of(tokens(1, text)))
    assert len(frame.decode().splitlines()) == 3
    (chunk,) = documents(frame)
    assert ChatCompletionChunk.model_validate(chunk).choices[0].delta.content == text


def test_a_failure_in_a_stream_is_a_frame() -> None:
    event = Failed(status=503, code="shutting_down", message="Come again.", param="")
    frame = chat_frames().of(ended(event))
    expected = {"message": "Come again.", "type": "service_unavailable", "param": None, "code": "shutting_down"}
    assert documents(frame) == [{"error": expected}]


def test_every_error_has_the_nested_body() -> None:
    told = {}
    for status in (400, 404, 429, 500, 503):
        body = json.loads(error_body(RequestError("No.", status=status, param="p", code="c")))
        told[status] = body["error"].pop("type")
        assert body == {"error": {"message": "No.", "param": "p", "code": "c"}}
    wrong = "invalid_request_error"
    assert told == {400: wrong, 404: wrong, 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


def test_a_cancelled_request_has_a_status_that_no_client_retries() -> None:
    assert error_of(Cancelled(by="operator")).status == 499


def score(text: str, logprob: float, *top: tuple[str, float]) -> Logprob:
    others = tuple(TopLogprob(token=token_of(other), text=other, logprob=less) for other, less in top)
    return Logprob(token=token_of(text), text=text, logprob=logprob, top=others)


TOKENS = {"r ": 5, "you": 6, "x": 1, "me": 2}


def token_of(text: str) -> int:
    """Return the token that has this text."""
    return TOKENS.get(text) or zlib.crc32(text.encode()) % 2**31


PROMPT = PromptInfo(
    num_tokens=2,
    token_ids=(8, 9),
    text="Dear ",
    scores=Logprobs((score("r ", -3.0, ("x", -0.5)),)),
    first=TokenText(token=8, text="Dea"),
)


def test_a_chats_logprobs_have_the_bytes_of_every_token() -> None:
    scores = (score("bytes:\\xe4\\xbd", -0.5, ("é", -0.25), ("a", -9999.0)),)
    parsed = ChatCompletion.model_validate_json(whole([submitted()], "", scores=scores), strict=True)
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    (token,) = logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("bytes:\\xe4\\xbd", -0.5, [0xE4, 0xBD])
    assert [(one.token, one.logprob, one.bytes) for one in token.top_logprobs] == [
        ("é", -0.25, [0xC3, 0xA9]),
        ("a", -9999.0, [0x61]),
    ]


def test_a_completion_echoes_its_prompt_with_the_logprobs_of_all_but_its_first_token() -> None:
    event = submitted(endpoint=COMPLETIONS_ENDPOINT, echo=True)
    scores = (score("you", -1.0, ("me", -0.5)),)
    parsed = Completion.construct(**json.loads(whole([event], "you", scores=scores, prompt=PROMPT)))
    (choice,) = parsed.choices
    assert (choice.text, choice.index) == ("Dear you", 0) and choice.logprobs is not None
    assert choice.logprobs.tokens == ["Dea", "r ", "you"]
    assert choice.logprobs.token_logprobs == [None, -3.0, -1.0]
    assert choice.logprobs.top_logprobs == [None, {"r ": -3.0, "x": -0.5}, {"you": -1.0, "me": -0.5}]
    assert choice.logprobs.text_offset == [0, 3, 5]


def test_tokens_are_named_by_their_ids_where_the_client_wants_that() -> None:
    scores = (score("you", -1.0, ("me", -0.5)),)
    event = submitted(endpoint=COMPLETIONS_ENDPOINT, echo=True, tokens_as_ids=True)
    logprobs = json.loads(whole([event], "you", scores=scores, prompt=PROMPT))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:8", "token_id:5", "token_id:6"]
    assert logprobs["top_logprobs"][1:] == [
        {"token_id:5": -3.0, "token_id:1": -0.5},
        {"token_id:6": -1.0, "token_id:2": -0.5},
    ]
    assert logprobs["text_offset"] == [0, 3, 5], "in the text, not in the names"
    chat = json.loads(whole([submitted(tokens_as_ids=True)], "you", scores=scores))["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in (*chat, *chat[0]["top_logprobs"])] == [
        ("token_id:6", list(b"you")),
        ("token_id:2", list(b"me")),
    ]


@pytest.mark.parametrize(
    ("text", "pieces", "offsets"),
    [
        ("<s>Dear <b>you", ["<s>", "Dear", " ", "<b>", "you"], [0, 3, 7, 8, 11]),
        ("Dear you", ["<|begin_of_text|>", "Dear", " you"], [0, 0, 4]),
        ("Dear you", ["▁Dear".replace("▁", " "), " you", "<|end|>"], [0, 4, 8]),
        ("a漢b", ["a", "bytes:\\xe6\\xbc", "bytes:\\xa2", "b"], [0, 1, 1, 2]),
        ("a\ufffdb", ["a", "bytes:\\xe6", "b"], [0, 1, 2]),
        ("e\u0301 x", ["é", " x"], [0, 2]),
        ("", ["a", "b"], [0, 0]),
    ],
)
def test_a_token_begins_where_its_text_does_and_one_that_is_not_shown_where_the_next_one_does(
    text: str, pieces: list[str], offsets: list[int]
) -> None:
    event = submitted(endpoint=COMPLETIONS_ENDPOINT, echo=True)
    first, *rest = pieces
    scores = tuple(score(piece, -1.0) for piece in rest)
    prompt = PromptInfo(
        num_tokens=len(pieces), text=text, scores=Logprobs(scores), first=TokenText(token=1, text=first)
    )
    answer = json.loads(whole([event], "!", scores=(score("!", -1.0),), prompt=prompt))["choices"][0]
    assert answer["text"] == text + "!" and answer["logprobs"]["text_offset"] == [*offsets, len(text)]
    given = submitted(endpoint=COMPLETIONS_ENDPOINT)
    choice = json.loads(whole([given], text, scores=(score(first, -1.0), *scores)))["choices"][0]
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize(
    ("end", "stop_reason", "matched_stop"),
    [
        (finished("length"), None, None),
        (finished().model_copy(update={"stop_string": "END"}), "END", "END"),
        (finished(), None, 5),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT_ENDPOINT, COMPLETIONS_ENDPOINT])
def test_an_answer_says_what_ended_it_as_vllm_and_sglang_say_it(
    endpoint: str, end: Finished, stop_reason: object, matched_stop: object
) -> None:
    event = submitted(endpoint=endpoint, stream=True)
    given = tokens(1, "a"), ended(end)
    whole_one = json.loads(answered([event], given))["choices"][0]
    last = documents(b"".join(map(frames_of([event]).of, given)))[-1]["choices"][0]
    for told in (whole_one, last):
        assert (told["finish_reason"], told["stop_reason"], told["matched_stop"]) == (
            end.reason,
            stop_reason,
            matched_stop,
        )


def test_a_stop_token_that_the_client_named_is_a_stop_reason_of_vllm() -> None:
    event = submitted().model_copy(update={"sampling": SamplingParams(stop_token_ids=(4, 5))})
    told = json.loads(whole([event], ""))["choices"][0]
    assert (told["stop_reason"], told["matched_stop"]) == (5, 5)


def test_a_streamed_completion_says_the_same_as_a_whole_one() -> None:
    event = submitted(endpoint=COMPLETIONS_ENDPOINT, echo=True, stream=True, token_ids=True)
    frames = frames_of([event])
    you, there = (score("you", -1.0),), (score("!", -2.0),)
    stream = frames.of(tokens(1, "you", scores=you, prompt=PROMPT)) + frames.of(tokens(2, "!", scores=there))
    chunks = [Completion.construct(**each) for each in documents(stream + frames.of(ended(finished())))]
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(f"cmpl-{UID}", "text_completion")}
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Dear you!"
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [logprob for one in told for logprob in one.token_logprobs or ()] == [None, -3.0, -1.0, -2.0]
    assert [offset for one in told for offset in one.text_offset or ()] == [0, 3, 5, 8]
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]
    assert [extra.get("prompt_token_ids") for extra in extras] == [[8, 9], None, None, None]
    assert [extra.get("token_ids") for extra in extras] == [None, [5], [5], None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]


def test_who_asks_for_no_token_gets_the_prompt_and_pays_for_none() -> None:
    event = submitted(endpoint=COMPLETIONS_ENDPOINT, echo=True, prompt_only=True)
    parsed = Completion.construct(**json.loads(whole([event], "you", prompt=PROMPT)))
    assert (parsed.choices[0].text, parsed.choices[0].finish_reason) == ("Dear ", "length")
    assert parsed.usage is not None and parsed.usage.completion_tokens == 0


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    events = [submitted(choices=2)] * 4  # two prompts
    parsed = ChatCompletion.model_validate_json(whole(events, "a", "b", "c", "d"), strict=True)
    assert [(choice.index, choice.message.content) for choice in parsed.choices] == list(enumerate("abcd"))
    assert parsed.usage is not None and (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (14, 12)


def test_the_stream_of_several_says_whose_each_chunk_is_and_no_ids() -> None:
    events = [submitted(choices=2, stream=True, include_usage=True)] * 2
    frames = frames_of(events)
    order = (tokens(1, "b", 1), tokens(1, "a"), ended(finished()), tokens(2, "c", 1), ended(finished("length"), 1))
    stream = b"".join(map(frames.of, order))
    assert b"id: " not in stream.replace(b'"id"', b"")
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in documents(stream)]
    assert [chunk.id for chunk in chunks] == [f"chatcmpl-{UID}"] * 8
    told = [
        (chunk.choices[0].index, chunk.choices[0].delta.content, chunk.choices[0].finish_reason)
        for chunk in chunks[:-1]
    ]
    assert told == [
        (1, "", None), (1, "b", None), (0, "", None), (0, "a", None),
        (0, None, "stop"), (1, "c", None), (1, None, "length"),
    ]  # fmt: skip
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_one_of_several_is_read_by_its_own_uid_with_its_own_index_and_ids() -> None:
    frames = frames_of([submitted(choices=4, stream=True)], f"{UID}.3")
    role, text = split(frames.of(tokens(1, "x")))
    assert text.startswith(b"id: 1-0\n") and b"id: " not in role
    assert [chunk["choices"][0]["index"] for chunk in documents(role + text)] == [3, 3]
    assert {chunk["id"] for chunk in documents(role + text)} == {f"chatcmpl-{UID}"}


def test_counts_come_with_every_chunk_where_they_are_asked_for() -> None:
    frames = chat_frames(stream=True, include_usage=True, continuous_usage=True)
    prompt = PromptInfo(num_tokens=7, cached_tokens=4)
    stream = frames.of(tokens(1, "a", prompt=prompt)) + frames.of(tokens(2, "b")) + frames.of(ended(finished()))
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in documents(stream)]
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks if chunk.usage]
    assert counts == [(7, 0), (7, 1), (7, 2), (7, 3), (7, 3)], "the role comes before any token"


@pytest.mark.parametrize("endpoint", [CHAT_ENDPOINT, COMPLETIONS_ENDPOINT])
def test_where_cached_tokens_were_is_told_once_where_it_is_asked_for(endpoint: str) -> None:
    event, prompt = submitted(endpoint=endpoint, cache_details=True), PromptInfo(num_tokens=7, cached_tokens=4)
    frames = frames_of([event])
    stream = frames.of(tokens(1, "a", prompt=prompt)) + frames.of(ended(finished()))
    told = [chunk["sglext"] for chunk in documents(stream) if "sglext" in chunk]
    body = json.loads(whole([event], "a", prompt=prompt))
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and told == [body["sglext"]] == [{"cached_tokens_details": {"device": cached, "host": 0}}]


def test_a_prompt_of_one_token_has_that_one_without_a_score() -> None:
    prompt = PromptInfo(num_tokens=1, text="A", first=TokenText(token=8, text="A"))
    completion = submitted(endpoint=COMPLETIONS_ENDPOINT, echo=True, prompt_scores=True)
    parsed = json.loads(whole([completion], "you", scores=(score("you", -1.0),), prompt=prompt))["choices"][0]
    assert (parsed["logprobs"]["tokens"], parsed["logprobs"]["token_logprobs"]) == (["A", "you"], [None, -1.0])
    assert parsed["prompt_logprobs"] == [None]
    frames = frames_of([completion])
    opening = documents(frames.of(tokens(1, "", prompt=prompt)))[0]
    assert opening["choices"][0]["logprobs"]["tokens"] == ["A"]


def test_a_prompts_logprobs_are_told_by_token_id() -> None:
    event = submitted(prompt_scores=True)
    (first, second) = json.loads(whole([event], "you", prompt=PROMPT))["prompt_logprobs"]
    assert first is None
    assert second == {"5": {"logprob": -3.0, "decoded_token": "r "}, "1": {"logprob": -0.5, "decoded_token": "x"}}
