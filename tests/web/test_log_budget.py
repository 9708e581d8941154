"""A web process with a log of 16 MiB on a real Redis: it takes bodies up to that, and again when histories are gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.raw_client import Answer, Client, connect, request
from support.redis_servers import Servers, command, running_server, until
from support.stand_in_stages import StandIn
from support.web_process import Server, serving
from support.web_site import CHAT, chat

from pipeline.log.protocol import RequestLimits
from stages.tokenize.worker import MOST_ANSWERED
from web.config import LEAST_LOG_BYTES

BODY = "x" * 1_000_000
RETENTION_S = 3.0
"""Longer than it takes to fill the log."""
MARGIN_BYTES = 4 * len(BODY)
"""What Redis takes beyond the budget for a moment: the buffers in which a body comes and goes to a worker."""


def used_bytes(url: str, field: str = "used_memory") -> int:
    found = re.search(rb"^%b:(\d+)" % field.encode(), command(url, "INFO", "memory"), re.MULTILINE)
    assert found
    return int(found[1])


def post(server: Server, path: str, body: dict[str, object]) -> Answer:
    with closing(connect(server.port)) as client:
        client.send(request(body, path=path))
        return client.answer()


@pytest.mark.slow
@pytest.mark.night  # it waits until the histories are gone; by day test_budget.py refuses
def test_bodies_fill_the_log_to_its_budget_streams_end_and_there_is_room_when_the_histories_are_gone(
    redis_servers: Servers, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(running_server(redis_servers.binary("embedded"), tmp_path)).url
        stand_in = stack.enter_context(closing(StandIn(url, renews=True)))
        stand_in.stages.log.limits = RequestLimits(retention_s=RETENTION_S)
        server = stack.enter_context(serving(url, "--max-log-bytes", str(LEAST_LOG_BYTES)))
        streams = [stack.enter_context(closing(connect(server.port))) for _ in range(3)]
        for stream in streams:
            stream.send(request(chat("held", stream=True)))
        chunks = [begun(stream) for stream in streams]
        empty_bytes = used_bytes(url)
        refused = filled(server, CHAT, chat(BODY))
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert "--max-log-bytes" in refused.error["message"] and 1 <= int(refused.headers["retry-after"]) <= 30
        assert post(server, "/tokenize", {"prompt": BODY}).status == 503
        assert used_bytes(url) > LEAST_LOG_BYTES - MARGIN_BYTES
        stand_in.released.set()
        assert all(b"[DONE]" in b"".join(rest) for rest in chunks)
        assert used_bytes(url, "used_memory_peak") < LEAST_LOG_BYTES + MARGIN_BYTES

        until(lambda: used_bytes(url) < empty_bytes + MARGIN_BYTES)
        until(lambda: post(server, CHAT, chat("hello")).status == 200)  # the memory was read again
        assert filled(server, "/tokenize", {"prompt": BODY[:MOST_ANSWERED]}).status == 503  # with large answers, too
        until(lambda: used_bytes(url) < empty_bytes + MARGIN_BYTES)


def filled(server: Server, path: str, body: dict[str, object]) -> Answer:
    """Send *body* until it is refused; return the refusal."""
    while (answer := post(server, path, body)).status == 200:
        pass
    return answer


def begun(stream: Client) -> Iterator[bytes]:
    """Return the rest of an answer whose first text has come."""
    assert stream.head().status == 200
    chunks = stream.chunks()
    while b"Hel" not in next(chunks):
        pass
    return chunks
