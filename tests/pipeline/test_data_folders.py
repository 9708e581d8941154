"""Data folders that other servers wrote: the embedded one goes on with them, or says why it cannot."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from support.lived_requests import LivedRequests
from support.redis_servers import STARTED, Servers, command, embedded, rewrite, running_server

from pipeline.errors import ConfigError, LogUnavailable
from pipeline.events import Finished, TokensProduced, decode
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process.redis_server import EmbeddedRedis

OF_VALKEY, OF_REDIS_8 = b"VALKEY080", b"REDIS0012"
"""How their files of data begin: format and its number."""
KEEP = ("--appendonly", "yes", "--appendfsync", "always")
"""Without the second, what is acknowledged while a rewrite ends may be written a second later."""
UNKNOWN = bytes([77])
"""A kind of value that no server knows."""


@pytest.mark.parametrize("place", STARTED)
def test_requests_that_another_version_has_begun_are_finished(
    redis_servers: Servers, tmp_path: Path, place: str
) -> None:
    """It is killed; half of what it holds is in its snapshot, the rest in commands behind that."""
    with running_server(redis_servers.binary(place), tmp_path, *KEEP) as server:
        log = RedisLog(server.url, Names())
        lived = LivedRequests(log)
        done, running, waiting = lived.running(), lived.running(), lived.submitted()
        lived.tokens(done, "a", "b")
        lived.tokens(running, "a")
        rewrite(server.url)
        lived.finished(done, 2)
        lived.tokens(running, "b", after=1)
        before = log.histories([done, running, waiting])
        held = log.snapshot()
        server.process.kill()
        server.process.wait()
    with closing(log), embedded(tmp_path) as server_now:
        assert server_now.url == server.url
        assert log.histories([done, running, waiting]) == before
        now = log.snapshot()
        assert now.redis.name == "Valkey"
        assert (now.occupancy, now.pending, set(now.living)) == (held.occupancy, held.pending, {running, waiting})
        with pytest.raises(LogUnavailable):  # who goes on is told that it is another server
            lived.tokens(running, "c", after=2)
        lived.tokens(running, "c", after=2)
        lived.finished(running, 3)
        lived.taken_in(waiting)
        lived.tokens(waiting, "a")
        lived.finished(waiting, 1)
        for uid, tokens in ((done, "ab"), (running, "abc"), (waiting, "a")):
            events = [decode(entry.fields) for entry in log.histories([uid])[0]]
            assert "".join(event.text for event in events if isinstance(event, TokensProduced)) == tokens
            assert isinstance(events[-1], Finished)
        assert log.living() == []


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """What the embedded server has written of one stream."""
    with embedded(tmp_path) as server:
        command(server.url, "XADD", "stream", "1-0", "field", "value")
        rewrite(server.url)
    (path,) = tmp_path.glob("appendonlydir/*.base.rdb")
    assert path.read_bytes().startswith(OF_VALKEY)
    return path


def test_a_format_with_a_number_of_redis_8_is_read(snapshot: Path, tmp_path: Path) -> None:
    """Our streams are in it as in older ones. The last 8 bytes are a checksum; 0 means that there is none."""
    snapshot.write_bytes(OF_REDIS_8 + snapshot.read_bytes().removeprefix(OF_VALKEY)[:-8] + bytes(8))
    with embedded(tmp_path) as server:
        assert command(server.url, "XRANGE", "stream", "-", "+") == [[b"1-0", [b"field", b"value"]]]


def test_data_that_cannot_be_read_are_named_with_the_remedy(snapshot: Path, tmp_path: Path) -> None:
    whole = snapshot.read_bytes()
    for spoilt in (OF_REDIS_8 + UNKNOWN + whole.removeprefix(OF_VALKEY), b"REDIS9999" + whole, whole[:-40]):
        snapshot.write_bytes(spoilt)
        with pytest.raises(ConfigError, match="--redis-url") as raised:
            EmbeddedRedis(tmp_path)
        assert f"{tmp_path} is damaged" in str(raised.value) and "WARNING" not in str(raised.value)
    snapshot.write_bytes(whole)
    with embedded(tmp_path) as server:
        assert command(server.url, "EXISTS", "stream") == 1
