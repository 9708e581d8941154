"""Bodies, chunks and frames, as the official client reads them."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pipeline.errors import RequestError
from pipeline.events import Admitted, Cancelled, Failed, Finished, FinishReason, Timings, TokensProduced, Usage
from pipeline.names import SEAL
from web.openai.errors import error_body, error_of
from web.openai.responses import ChatFrames, completion

UID = "0" * 32


def finished(reason: FinishReason = "stop") -> Finished:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
    return Finished(n=3, reason=reason, usage=usage, timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3))


def tokens(n: int, text: str) -> tuple[str, TokensProduced]:
    return f"{n}-0", TokensProduced(count=1, tokens=(5,), text=text, step="1-1")


def split(frames: bytes) -> list[bytes]:
    """Return the frames one by one."""
    *each, rest = frames.split(b"\n\n")
    assert rest == b""
    return [frame + b"\n\n" for frame in each]


def documents(frames: bytes) -> list[dict[str, object]]:
    """Return the JSON of each frame but [DONE], split as line-based clients do it."""
    lines = [line for line in frames.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def test_a_completion_is_what_the_official_client_expects() -> None:
    parsed = ChatCompletion.model_validate_json(completion(UID, 5, "org/m", 'a "b"\n', finished("length")), strict=True)
    assert (parsed.id, parsed.model, parsed.created) == (f"chatcmpl-{UID}", "org/m", 5)
    assert (parsed.choices[0].message.content, parsed.choices[0].finish_reason) == ('a "b"\n', "length")
    assert parsed.usage is not None and parsed.usage.prompt_tokens_details is not None
    assert (parsed.usage.total_tokens, parsed.usage.prompt_tokens_details.cached_tokens) == (10, 4)


@pytest.mark.parametrize("include_usage", [False, True])
def test_chunks_are_what_the_official_client_expects(include_usage: bool) -> None:
    frames = ChatFrames(UID, 5, 'or"g/m', include_usage=include_usage)
    stream = frames.of(*tokens(1, 'a "b"\n')) + frames.of(SEAL, finished())
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
    frames = ChatFrames(UID, 5, "m", include_usage=include_usage)
    role, first = split(frames.of(*tokens(17, "x")))
    assert first.startswith(b"id: 17-0\ndata: {") and b"id: " not in role
    *others, last = split(frames.of(SEAL, finished()))
    assert last.startswith(f"id: {SEAL}\n".encode())
    assert len(others) == include_usage and not any(b"id: " in other for other in others)


def test_tokens_without_text_make_no_frame_but_the_first_one_that_there_is() -> None:
    frames = ChatFrames(UID, 5, "m", include_usage=False)
    assert b'"role":"assistant"' in frames.of(*tokens(1, ""))
    assert frames.of(*tokens(2, "")) == b""
    assert b"assistant" not in frames.of(*tokens(3, "x"))


def test_what_is_not_for_clients_makes_no_frame() -> None:
    admitted = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f")
    assert ChatFrames(UID, 5, "m", include_usage=False).of("0-3", admitted) == b""


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\u0085b", "\u2028\u0085\u2029", "é…—漢字🙂", "\x00\r\n"])
def test_no_text_can_break_a_frame_in_two(text: str) -> None:
    _, frame = split(ChatFrames(UID, 5, "m", include_usage=False).of(*tokens(1, text)))
    assert len(frame.decode().splitlines()) == 3
    (chunk,) = documents(frame)
    assert ChatCompletionChunk.model_validate(chunk).choices[0].delta.content == text


def test_a_failure_in_a_stream_is_a_frame() -> None:
    event = Failed(status=503, code="shutting_down", message="Come again.", param="")
    frame = ChatFrames(UID, 5, "m", include_usage=False).of(SEAL, event)
    expected = {"message": "Come again.", "type": "service_unavailable", "param": None, "code": "shutting_down"}
    assert documents(frame) == [{"error": expected}]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable"),
    ],
)
def test_every_error_has_the_nested_body(status: int, kind: str) -> None:
    body = json.loads(error_body(RequestError("No.", status=status, param="p", code="c")))
    assert body == {"error": {"message": "No.", "type": kind, "param": "p", "code": "c"}}


def test_a_cancelled_request_has_a_status_that_no_client_retries() -> None:
    assert error_of(Cancelled(by="operator")).status == 499
