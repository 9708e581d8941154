"""The data folder of a server that had another Redis: the embedded one goes on with what was begun there."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from support.lived_requests import LivedRequests
from support.redis_servers import Servers, running_server
from support.servers import serve
from support.streams import LONG, Stream, events_of

from pipeline.events import Finished, Tokenized, TokensProduced
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process.redis_server import EmbeddedRedis


@pytest.mark.parametrize("place", ["oldest", "path"])
def test_what_another_redis_has_written_is_read_and_gone_on_with(
    place: str, redis_servers: Servers, tmp_path: Path
) -> None:
    inbox = Inbox.submitted(Names())
    persists = ("--appendonly", "yes", "--appendfsync", "always")  # `everysec` may hold a write back for 2 s
    with running_server(redis_servers.binary(place), tmp_path, *persists) as older:
        with closing(RedisLog(older.url, Names())) as log:
            lived = LivedRequests(log)
            ended, running = lived.running(), lived.running()
            lived.tokens(ended, "He", "y")
            lived.finished(ended, 2)
            lived.tokens(running, "He", "y")
            uids = [ended, running, lived.submitted()]
            assert len(log.read(inbox, "tokenize-0", max_entries=1, block_ms=0)) == 1
            histories, living = log.histories(uids), log.living()
        older.process.kill()
        older.process.wait()
    server = EmbeddedRedis(tmp_path)
    try:
        with closing(RedisLog(server.url, Names())) as log:
            assert log.snapshot().redis.name == "Valkey"
            assert (log.histories(uids), log.living()) == (histories, living)
            (entry,) = log.pending(inbox, "tokenize-0")
            assert log.tokenized(entry, Tokenized(token_ids=(5,), fingerprint="t1", by="tokenize-0"))
            assert log.backlog(inbox) == 0
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.night  # the test above shows on every change what it needs of the log
def test_a_stream_that_redis_6_has_begun_is_finished(redis_servers: Servers, tmp_path: Path) -> None:
    """All is killed in the middle of a stream; the next `minisgl serve` is given the folder, with its own server."""
    data = tmp_path / "data"
    data.mkdir()
    with running_server(redis_servers.binary("oldest"), data, "--appendonly", "yes") as older:
        with serve(tmp_path, redis_url=older.url) as server:
            stream = Stream(server, "Tell me a story.").begun(20)
            for process in server.command.processes():
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
        assert "".join(event.text for event in tokens) == Stream(server, "Tell me a story.").answer[0]
