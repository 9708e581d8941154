"""An answer, folded from the frames of a stream that may break and go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ops.shell.reply import Piece, Reply
from ops.sse_reader import Frame


def chunk(content: str | None = None, event_id: str = "", **delta: Any) -> Frame:
    choice = {"index": 0, "delta": {"content": content} | delta, "finish_reason": None}
    return Frame(json.dumps({"choices": [choice]}), event_id)


FINISH = Frame(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
DONE = Frame("[DONE]")


def taken(reply: Reply, *frames: Frame) -> list[Piece]:
    return [piece for frame in frames for piece in reply.take(frame)]


def test_text_and_thoughts_come_in_their_order_and_thoughts_are_not_the_answer() -> None:
    reply = Reply()
    pieces = taken(reply, chunk("", role="assistant"), chunk(reasoning_content="hm"), chunk("A"), FINISH, DONE)
    assert pieces == [Piece("hm", "thought"), Piece("A")]
    assert (reply.text, reply.finish_reason, reply.is_done) == ("A", "stop", True)


def test_the_counts_come_with_a_chunk_of_their_own() -> None:
    reply = Reply()
    taken(reply, chunk("A"), Frame('{"choices": [], "usage": {"prompt_tokens": 3}}'))
    assert reply.usage == {"prompt_tokens": 3} and not reply.has_ended


def test_other_choices_than_the_first_are_not_shown() -> None:
    reply = Reply()
    assert taken(reply, Frame('{"choices": [{"index": 1, "delta": {"content": "no"}}]}')) == []


def test_an_answer_that_does_not_stream_is_one_piece() -> None:
    reply = Reply()
    message = {"choices": [{"message": {"content": "All of it."}, "finish_reason": "stop"}], "usage": {"x": 1}}
    assert taken(reply, Frame(json.dumps(message))) == [Piece("All of it.")]
    assert reply.has_ended and reply.usage == {"x": 1}


@pytest.mark.parametrize("num_before", range(6))
@pytest.mark.parametrize("torn_again", range(4))
def test_a_stream_that_goes_on_after_an_id_says_nothing_twice(num_before: int, torn_again: int) -> None:
    """The server says an event in several frames, of which the last has its id; the stream breaks anywhere."""
    frames = [chunk("Hel"), chunk("lo"), chunk(", ", "1-0"), chunk(reasoning="so"), chunk("you", "2-0")]
    reply = Reply()
    shown = taken(reply, *frames[:num_before])
    for num in (torn_again, None):
        reply.go_on()
        start = {"": 0, "1-0": 3, "2-0": 5}[reply.last_id]
        shown += taken(reply, *frames[start:][:num])
    taken(reply, FINISH, DONE)
    assert reply.text == "Hello, you" == "".join(piece.text for piece in shown if piece.kind == "text")
    assert "".join(piece.text for piece in shown if piece.kind == "thought") == "so"


@pytest.mark.parametrize(
    "frame",
    [
        Frame('{"error": {"message": "It broke.", "code": "engine_error"}}'),
        Frame('{"error": "It broke."}', kind="error"),
        Frame("It broke.", kind="error"),
        Frame('{"object": "error", "message": "It broke."}'),
    ],
)
def test_an_error_in_the_stream_is_an_error(frame: Frame) -> None:
    reply = Reply()
    taken(reply, chunk("A"), frame)
    assert reply.refusal is not None and "It broke." in reply.refusal.message and not reply.has_ended


@pytest.mark.parametrize("data", ["[]", "{}", "null", '{"choices": null}', '{"choices": [null, {"delta": 5}]}'])
def test_a_chunk_that_says_nothing_is_passed_over(data: str) -> None:
    reply = Reply()
    assert taken(reply, Frame(data), chunk("A")) == [Piece("A")]


@pytest.mark.parametrize("data", ["{", "x\x1b[2J", 100_000 * "["])
def test_what_is_not_json_ends_the_answer(data: str) -> None:
    reply = Reply()
    taken(reply, Frame(data))
    assert reply.refusal is not None and "not JSON" in reply.refusal.message and "\x1b" not in reply.refusal.message
