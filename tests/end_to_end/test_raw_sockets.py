"""Clients that leave or do not read, with real stages behind: the engine has its slot back, and the server can stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_checkpoint
from raw_client import Client, connect, request
from servers import Server, eventually, serve

from pipeline.events import AnyEvent, Cancelled, Failed, Finished, TokensProduced, decode
from pipeline.log.redis import RedisLog

pytestmark = pytest.mark.slow

CONTEXT = 65536
"""Enough for a request to run for as long as a test does."""
SHORT_TOKENS = 40


def endless(**fields: Any) -> dict[str, Any]:
    return {"prompt": "The log", "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3", max_positions=CONTEXT)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that runs one request at a time."""
    flags = ("--model", str(folder), "--max-running-requests", "1")
    with serve(tmp_path_factory.mktemp("sockets"), *flags) as server:
        yield server


def connected(server: Server, **options: int) -> Client:
    port = httpx.URL(server.url).port
    assert port is not None
    return connect(port, **options)


def events(log: RedisLog, uid: str) -> list[AnyEvent]:
    return [decode(entry.fields) for entry in log.histories([uid])[0]]


def num_tokens(log: RedisLog, uid: str) -> int:
    return sum(event.count for event in events(log, uid) if isinstance(event, TokensProduced))


def sent(client: Client, log: RedisLog, body: dict[str, Any]) -> str:
    """Send a request and return its uid, as soon as it is accepted."""
    before = set(log.living())
    client.send(request(body))
    eventually(lambda: set(log.living()) > before, "the request is accepted")
    (uid,) = set(log.living()) - before
    return uid


@pytest.mark.parametrize("how", ["closes", "resets", "half-closes"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_who_leaves_frees_the_engine_for_the_next_and_who_leaves_the_queue_never_begins(
    server: Server, stream: bool, how: str
) -> None:
    with server.log() as log, closing(connected(server)) as first, closing(connected(server)) as queued:
        running = sent(first, log, endless(stream=stream))
        eventually(lambda: num_tokens(log, running) > 0, "the first runs")
        waiting = sent(queued, log, endless(stream=stream))
        queued.leave(how)
        first.leave(how)
        eventually(lambda: log.living() == [], "both are cancelled")
        for uid in (waiting, running):
            end = events(log, uid)[-1]
            assert isinstance(end, Cancelled) and end.by == "client"
            assert (end.n > 0) == (uid == running)
        answer = server.post({"prompt": "The log", "max_tokens": 1})
        assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_signal_ends_a_server_with_a_short_an_endless_and_an_unread_stream(
    folder: Path, tmp_path: Path, redis_url: str
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path, "--model", str(folder), redis_url=redis_url))
        log = stack.enter_context(server.log())
        unread = stack.enter_context(closing(connected(server, receive_bytes=1024)))
        long, short = (stack.enter_context(closing(connected(server))) for _ in range(2))
        uids = [sent(client, log, endless(stream=True)) for client in (unread, long)]
        ended = sent(short, log, endless(stream=True, max_tokens=SHORT_TOKENS))
        for client in (long, short):
            assert client.head().status == 200
        server.command.process.send_signal(signal.SIGTERM)
        *_, last = short.chunks()
        assert b'"finish_reason":"length"' in last and last.endswith(b"data: [DONE]\n\n")
        *_, last = long.chunks()
        assert b'"code":"shutting_down"' in last and last.endswith(b"data: [DONE]\n\n")
        assert server.command.process.wait(30) == 0
        assert isinstance(events(log, ended)[-1], Finished)
        for uid in uids:
            end = events(log, uid)[-1]
            assert isinstance(end, Failed) and end.code == "shutting_down"
