"""A failover that loses the last commits: what `--acks` promises, and what goes on without it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_servers import Pair, Servers, paired
from support.selection import by_night
from support.servers import Server, eventually, serve, wait_until_ready
from support.streams import Stream, assert_nothing_is_left, body

from pipeline.names import GENERATE, WEB

pytestmark = pytest.mark.slow

WINDOW_S = by_night(0.0, 3.0)
"""How long the replica gets nothing, besides the time that the test takes, before it becomes the server."""
LONG = by_night(700, 4000)
TWO = {"n": 2, "temperature": 1.0, "seed": 7}


@contextlib.contextmanager
def replicated(redis_servers: Servers, folder: Path, *flags: str) -> Iterator[tuple[Pair, Server]]:
    pair = paired(redis_servers.binary("embedded"), folder / "redis")
    with pair as servers, serve(folder, *flags, redis_url=servers.url) as server:
        yield servers, server


def texts(frames: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
    """Return the text of each choice, and why it ended."""
    assert not (errors := [frame for frame in frames if "error" in frame]), errors
    choices = [choice for frame in frames for choice in frame["choices"]]
    found: dict[int, tuple[str, str]] = {}
    for choice in choices:
        text, _ = found.get(choice["index"], ("", ""))
        said = choice.get("delta", choice.get("message", {})).get("content") or ""
        found[choice["index"]] = (text + said, choice["finish_reason"])
    return found


class Asked:
    """Streams, one of two choices among them, and clients that wait for whole answers under idempotency keys."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor, when: str, key: str = "") -> None:
        self._server, self._key = server, key
        streams = [Stream(server, f"{when} {number}.", max_tokens=LONG) for number in range(2)]
        self.streams = [*streams, Stream(server, f"{when}, twice.", max_tokens=LONG, **TWO)]
        self._bodies = [body(f"{when}, whole.", max_tokens=LONG, **more) for more in ({}, TWO)]
        self._whole = [pool.submit(self._ask, place) for place in range(2)]

    def _ask(self, place: int) -> httpx.Response:
        key = {"Idempotency-Key": f"{self._key}-{place}"} if self._key else {}
        return self._server.post(self._bodies[place], headers=key)

    def begun(self) -> Asked:
        """Wait until all are there."""
        for stream in self.streams:
            stream.begun()
        return self

    @property
    def answers(self) -> list[dict[int, tuple[str, str]]]:
        frames = [*(stream.frames for stream in self.streams), *([each.result().json()] for each in self._whole)]
        return [*map(texts, frames)]

    @property
    def answers_after_a_reconnect(self) -> list[dict[int, tuple[str, str]]]:
        """The answers of the clients that can come back: to a stream after its last character, or under a key."""
        for each in self._whole:
            with contextlib.suppress(httpx.TransportError):
                each.result()
        frames = [resumed(self._server, stream) for stream in self.streams[:2]]
        return [*map(texts, (*frames, *([self._ask(place).json()] for place in range(2))))]


def resumed(server: Server, stream: Stream) -> list[dict[str, Any]]:
    """Return the frames of a stream that broke off, and those that come after its characters: the log may have lost its
    last events, and may cut the tokens into other ones the second time."""
    whole = "\n".join(stream.join().lines).rpartition("\n\n")[0]
    frames = frames_in(whole)
    num_characters = sum(len(choice["delta"].get("content", "")) for frame in frames for choice in frame["choices"])
    path = f"{server.url}/v1/requests/{stream.uid}/events?after_characters={num_characters}"
    rest = httpx.get(path, timeout=120)
    assert rest.status_code == 200, rest.text
    return [*frames, *frames_in(rest.text)]


def frames_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_what_a_failover_loses_begins_again_under_its_clients(
    redis_servers: Servers, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with replicated(redis_servers, tmp_path) as (pair, server):
        undisturbed = [Asked(server, pool, when) for when in ("Before", "Meanwhile")]
        expected = [asked.answers for asked in undisturbed]
        before = Asked(server, pool, "Before").begun()
        pair.replication.hold()
        window = Asked(server, pool, "Meanwhile").begun()
        time.sleep(WINDOW_S)
        with held(server):
            assert not any(stream.is_over for stream in (*before.streams, *window.streams))
            pair.fail_over()
        assert [before.answers, window.answers] == expected
        assert len(server.command.log_lines("submitted_again")) == len(window.streams) + 2
        with server.log() as log:
            assert_nothing_is_left(log)


def test_every_request_that_got_200_survives_a_failover_and_its_web_process(
    redis_servers: Servers, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with replicated(redis_servers, tmp_path, "--acks", "1") as (pair, server):
        expected = Asked(server, pool, "Before").answers
        before = Asked(server, pool, "Before", "key").begun()
        eventually(lambda: living(server) == len([*flat(expected)]), "all are there")
        pair.replication.hold()
        for stream in before.streams:
            stream.begun(stream.num_frames + 20)
        with held(server):
            assert not any(stream.is_over for stream in before.streams)
            began_s = time.monotonic()
            for answer in [pool.submit(server.post, body(f"Meanwhile {number}.")) for number in range(4)]:
                response = answer.result()
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (503, "not_replicated")
                assert "Only 0 of 1 replicas within 1 s (--acks 1) have the request" in error["message"]
            assert time.monotonic() - began_s < 2.5
            (web,) = server.command.workers(WEB)
            web.kill()
            pair.fail_over()
        wait_until_ready(server.url, [server.command])
        assert before.answers_after_a_reconnect == [*expected[:2], *expected[3:]]
        with server.log() as log:
            assert_nothing_is_left(log)


def flat(answers: Sequence[Mapping[int, object]]) -> Iterator[object]:
    return (choice for answer in answers for choice in answer.values())


@contextlib.contextmanager
def held(server: Server) -> Iterator[None]:
    """Let the engine stand still."""
    (engine,) = server.command.workers(GENERATE)
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def living(server: Server) -> int:
    with server.log() as log:
        return len(log.living())
