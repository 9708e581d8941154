"""What a stream is taken for, byte by byte; and what is sent, and when, to a server that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest
from support.openai_stand_in import (
    DONE,
    FINISH,
    ROLE,
    Body,
    Frames,
    OpenAIStandIn,
    data,
    prompt_tokens,
    text_chunk,
    usage_chunk,
    whole,
)
from support.servers import free_port

from ops.bench import datasets
from ops.bench.datasets import Session, Span, Writer
from ops.bench.load import (
    CHAT,
    CHAT_PROMPT,
    COMPLETIONS,
    NOT_SENT,
    Form,
    Load,
    Measured,
    ServerRefused,
    calibrate,
    connected,
    read_stream,
)

LENGTHS = (Span(10, 20), Span(4, 4))
GOOD = [ROLE, text_chunk("你好"), text_chunk(" world"), FINISH, usage_chunk(9, 7, 4), DONE]


def measure(
    server: OpenAIStandIn, sessions: Sequence[Session], concurrency: int, form: Form | None = None
) -> list[Measured]:
    """Send *sessions*; a concurrency of 0 sends them when they are due."""

    async def send() -> list[Measured]:
        async with connected(server.url, api_key="key", timeout_s=30) as client:
            load = Load(client, form or Form(CHAT, "m"), Writer().write, lambda _: None)
            return await (load.at_once(sessions, concurrency) if concurrency else load.when_due(sessions))

    return asyncio.run(send())


def one_error(server: OpenAIStandIn) -> str:
    [one] = measure(server, datasets.drawn(1, 0, *LENGTHS), 1)
    assert one.answer.error
    return one.answer.error


def test_tokens_are_those_of_usage_and_times_those_of_chunks_with_text() -> None:
    answer = read_stream(10.0, [(10.0 + place, frame) for place, frame in enumerate(GOOD, start=1)])
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 7, 4)
    assert answer.content_s == (12.0, 13.0)
    assert (answer.sent_s, answer.ended_s) == (10.0, 16.0)
    assert answer.text == "你好 world" and not answer.error


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_may_be_cut_anywhere_and_a_chunk_arrives_with_its_end(size: int) -> None:
    stream = b"".join(GOOD)
    arrivals = [(float(start), stream[start : start + size]) for start in range(0, len(stream), size)]
    answer = read_stream(0.0, arrivals)
    assert answer.text == "你好 world" and answer.output_tokens == 7 and not answer.error
    ends = [stream.index(frame) + len(frame) - 1 for frame in GOOD[1:3]]  # where the blank line of a frame ends
    assert answer.content_s == tuple(float(end // size * size) for end in ends)


def test_comments_carriage_returns_ids_and_a_missing_last_line_break_are_understood() -> None:
    stream = b": waiting\r\n\r\n" + b"id: 1-0\r\n".join(frame.replace(b"\n", b"\r\n") for frame in GOOD)
    answer = read_stream(0.0, [(1.0, stream.rstrip())])
    assert answer.text == "你好 world" and not answer.error


def test_completions_and_thoughts_bring_text_too() -> None:
    completion = data({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
    thought = data({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    frames = [completion, thought, FINISH, usage_chunk(1, 2), DONE]
    answer = read_stream(0.0, [(float(place), frame) for place, frame in enumerate(frames)])
    assert answer.content_s == (0.0, 1.0)
    assert answer.text == "a"


def test_an_answer_without_text_came_when_it_was_finished() -> None:
    answer = read_stream(0.0, [(1.0, ROLE), (2.0, FINISH), (3.0, usage_chunk(1, 1))])
    assert answer.content_s == (2.0,) and answer.output_tokens == 1 and not answer.error


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([ROLE, text_chunk("a"), data({"error": {"message": "the engine\ndied"}}), DONE], "stream: the engine died"),
        ([text_chunk("a"), data({"error": "gone"}), FINISH, usage_chunk(1, 1)], "error in the stream: gone"),
        ([text_chunk("a"), usage_chunk(1, 1), DONE], "ended without a finish_reason"),
        ([text_chunk("a"), FINISH, DONE], "ended without `usage`"),
        ([text_chunk("a"), FINISH, data({"choices": [], "usage": {"total_tokens": 3}})], "ended without `usage`"),
        ([b"data: {\n\n", FINISH, usage_chunk(1, 1)], "a chunk is not JSON: {"),
        ([b"data: [1]\n\n", FINISH, usage_chunk(1, 1)], "a chunk is not a JSON object: [1]"),
        ([b'{"id": "no stream at all"}'], "ended without a finish_reason"),
        ([], "ended without a finish_reason"),
    ],
)
def test_what_is_no_whole_answer_has_an_error(frames: Frames, says: str) -> None:
    answer = read_stream(0.0, [(1.0, frame) for frame in frames])
    assert says in answer.error and answer.output_tokens == 0


def test_a_request_asks_for_a_stream_with_usage_and_an_exact_length(stand_in: OpenAIStandIn) -> None:
    [one] = measure(stand_in, datasets.drawn(1, 0, *LENGTHS), 1)
    [body] = stand_in.bodies
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["model"]) == (4, True, 0.0, "m")
    assert stand_in.paths == ["/v1/chat/completions"]
    assert stand_in.headers[0]["authorization"] == "Bearer key"
    assert one.answer.output_tokens == 4 and len(one.answer.content_s) == 2
    assert one.answer.prompt_tokens == prompt_tokens(body)


@pytest.mark.parametrize(
    ("fix_length", "fields"), [("min-tokens", {"min_tokens": 4}), ("no", {}), ("ignore-eos", {"ignore_eos": True})]
)
def test_the_length_is_fixed_with_the_field_that_the_server_knows(fix_length: str, fields: dict[str, Any]) -> None:
    body = orjson.loads(Form(CHAT, "m", fix_length=fix_length).body([], 4, stream=True))
    assert {name: body[name] for name in ("min_tokens", "ignore_eos") if name in body} == fields


@pytest.mark.parametrize(
    ("endpoint", "path"), [(COMPLETIONS, "/v1/completions"), (CHAT_PROMPT, "/v1/chat/completions")]
)
def test_a_prompt_is_sent_as_text_where_there_are_no_messages(
    stand_in: OpenAIStandIn, endpoint: str, path: str
) -> None:
    [session] = datasets.drawn(1, 0, *LENGTHS)
    measure(stand_in, [session], 1, Form(endpoint, "m"))
    assert stand_in.bodies[0]["prompt"] == Writer().write(session.turns[0]) and "messages" not in stand_in.bodies[0]
    assert stand_in.paths == [path]


def test_each_turn_contains_the_answers_before_it(stand_in: OpenAIStandIn) -> None:
    sessions = datasets.multi_turn(6, 0, *LENGTHS, turns=3)
    measured = measure(stand_in, sessions, 2)
    assert [(one.session, one.turn) for one in measured] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for session in sessions:
        said = [Writer().write(turn) for turn in session.turns]
        [last] = [body["messages"] for body in stand_in.bodies if body["messages"][-1]["content"] == said[2]]
        assert [message["content"] for message in last] == [said[0], "abab", said[1], "abab", said[2]]
        assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]


class Gate:
    """Lets requests pass in groups: so many must be under way at once, and it counts the most there were."""

    def __init__(self, size: int) -> None:
        self._barrier = asyncio.Barrier(size)
        self._under_way = 0
        self.most = 0

    async def __call__(self) -> None:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await self._barrier.wait()
        self._under_way -= 1


def test_a_fixed_concurrency_is_reached_and_never_exceeded(stand_in: OpenAIStandIn) -> None:
    stand_in.gate = gate = Gate(3)
    measured = measure(stand_in, datasets.drawn(9, 0, *LENGTHS), 3)
    assert gate.most == 3
    assert len(measured) == 9 and not any(one.answer.error for one in measured)


def test_requests_that_are_due_wait_for_no_answer(stand_in: OpenAIStandIn) -> None:
    stand_in.gate = gate = Gate(8)
    sessions = datasets.poisson(datasets.drawn(8, 0, *LENGTHS), 200.0, 0)
    measured = measure(stand_in, sessions, 0)
    assert gate.most == 8
    assert [one.session for one in measured] == list(range(8))
    assert all(one.lag_s >= 0 for one in measured)
    for earlier, later in pairwise(zip(measured, sessions, strict=True)):
        planned_s = later[1].due_s - earlier[1].due_s
        sent_s = (later[0].answer.sent_s - later[0].lag_s) - (earlier[0].answer.sent_s - earlier[0].lag_s)
        assert sent_s == pytest.approx(planned_s)  # sent = start + due + lag, for all of them


def test_a_refusal_is_told_in_one_line_with_its_status(stand_in: OpenAIStandIn) -> None:
    stand_in.script = lambda body: (503, {"error": {"message": "the queue\n is full", "code": "queue_full"}})
    assert one_error(stand_in) == "HTTP 503: the queue is full"
    stand_in.script = lambda body: (422, {"detail": [{"msg": "no"}]})
    assert one_error(stand_in) == 'HTTP 422: [{"msg": "no"}]'
    stand_in.script = lambda body: (500, {})
    assert one_error(stand_in) == "HTTP 500: {}"
    stand_in.script = lambda body: (400, {"error": "x" * 1000})
    assert len(one_error(stand_in)) < 500


def test_a_connection_that_breaks_is_a_failure(stand_in: OpenAIStandIn) -> None:
    stand_in.script = lambda body: [ROLE, text_chunk("a")]
    stand_in.cut = True
    assert one_error(stand_in).startswith("the connection broke: ")


def test_a_failure_ends_its_conversation_and_no_other(stand_in: OpenAIStandIn) -> None:
    sessions = datasets.multi_turn(6, 0, *LENGTHS, turns=3)
    refused = Writer().write(sessions[0].turns[1])

    def script(body: Body) -> Frames | tuple[int, object]:
        return (400, {"error": "too long"}) if body["messages"][-1]["content"] == refused else whole(body)

    stand_in.script = script
    errors = [one.answer.error for one in measure(stand_in, sessions, 2)]
    assert errors == ["", "HTTP 400: too long", NOT_SENT, "", "", ""]


def test_words_are_measured_in_the_tokens_of_the_server(stand_in: OpenAIStandIn) -> None:
    async def ask() -> tuple[str, Writer]:
        async with connected(f"{stand_in.url}/v1/", timeout_s=30) as client:
            return await client.served_model(), await calibrate(client, Form(CHAT, "m"), datasets.WORDS)

    assert asyncio.run(ask()) == ("stand-in", Writer(tokens_per_word=2.0, overhead_tokens=5.0))


def test_a_server_that_is_not_there_is_told_by_name() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def ask() -> str:
        async with connected(url, timeout_s=30) as client:
            return await client.served_model()

    with pytest.raises(ServerRefused, match=url):
        asyncio.run(ask())
