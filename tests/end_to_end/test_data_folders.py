"""The data folder of a server that had another Redis: the embedded one goes on with what was begun there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from support.lived_requests import LivedRequests
from support.redis_servers import Servers, running_server

from pipeline.events import Tokenized
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
