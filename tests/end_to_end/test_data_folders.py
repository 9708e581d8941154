"""The data folder of a server that had another Redis: the new one finishes what was begun there."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from redis_servers import Servers, running_server
from servers import eventually, serve
from streams import LONG, Stream, events_of, family_of

from pipeline.events import Finished, TokensProduced

pytestmark = pytest.mark.slow

PROMPT = "Tell me a story."


def test_a_stream_that_redis_6_has_begun_is_finished(redis_servers: Servers, tmp_path: Path) -> None:
    """All is killed in the middle of a stream; the next `minisgl serve` is given the folder, with its own server."""
    data = tmp_path / "data"
    data.mkdir()
    with running_server(redis_servers.binary("oldest"), data, "--appendonly", "yes") as older:
        with serve(tmp_path, redis_url=older.url) as server, family_of(server.command) as family:
            stream = Stream(server, PROMPT)
            eventually(lambda: stream.num_frames > 20, "it has begun")
            for process in family:
                process.send_signal(signal.SIGKILL)
        older.process.kill()
        older.process.wait()
    with serve(tmp_path) as server:
        events = httpx.get(f"{server.url}/v1/requests/{stream.uid}/events", timeout=120)
        assert events.text.endswith("data: [DONE]\n\n")
        with server.log() as log:
            lived = events_of(log, stream.uid)
            assert log.snapshot().redis.name == "Valkey"
        tokens = [event for event in lived if isinstance(event, TokensProduced)]
        assert [event.count for event in tokens] == [1] * LONG
        assert len({event.step.partition("-")[0] for event in tokens}) == 2, "an epoch before and one after"
        assert isinstance(lived[-1], Finished)
        assert "".join(event.text for event in tokens) == Stream(server, PROMPT).answer[0]
