"""A Redis Cluster: nodes that do not have the log, hand it over, or are down; how the node that has it is found."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from support.log_contract import NAMES, SUBMITTED, Scene, submitted, with_front
from support.redis_servers import QUERY, Servers, command, running_server, until
from support.servers import free_port

from pipeline.errors import ConfigError, Fenced, GroupLost, LogError, LogReadOnly, LogUnavailable
from pipeline.log.address import connect, parse_address
from pipeline.log.check import check_server
from pipeline.log.protocol import Owner, Submission
from pipeline.log.redis import AsyncRedisLog, RedisLog

PLACES = ("embedded", "path")
"""Valkey 9 and Redis 7: the tests need `cluster-port`, which 6.2 has not."""


def host_of(url: str) -> str:
    return url.removeprefix("redis://").partition("/")[0]


@dataclass(frozen=True)
class Cluster:
    """Two nodes. The first has all slots."""

    first: str
    second: str

    def ask_first(self, *words: str | int | bytes) -> bytes:
        answer = command(self.first, "CLUSTER", *words)
        assert isinstance(answer, bytes | int)
        return answer if isinstance(answer, bytes) else str(answer).encode()

    def say(self, *words: str | int | bytes) -> None:
        for url in (self.first, self.second):
            command(url, "CLUSTER", *words)

    @property
    def slot(self) -> bytes:
        """The hash slot of all keys of the log."""
        return self.ask_first("KEYSLOT", NAMES.live)

    def node(self, url: str) -> bytes:
        found = command(url, "CLUSTER", "MYID")
        assert isinstance(found, bytes)
        return found

    @property
    def url(self) -> str:
        """Any node, of which one is not there."""
        return f"redis+cluster://127.0.0.1:1,{host_of(self.second)},{host_of(self.first)}{QUERY}"

    def give(self, url: str) -> None:
        """Let the node at *url* have the log."""
        other = self.second if url == self.first else self.first
        with contextlib.suppress(redis.ResponseError):  # it has it already; else its claim must be the newer one
            command(url, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.node(other))
        for each in (url, other):
            command(each, "CLUSTER", "SETSLOT", self.slot, "NODE", self.node(url))

    def is_up(self) -> bool:
        return all(b"cluster_state:ok" in command(url, "CLUSTER", "INFO") for url in (self.first, self.second))


@pytest.fixture(scope="module")
def clusters(redis_servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cluster]]:
    """Those of all places at once: a new node takes no commands for two seconds."""
    found: dict[str, Cluster] = {}
    with contextlib.ExitStack() as stack:
        for place in PLACES:
            with contextlib.suppress(pytest.skip.Exception):
                binary = redis_servers.binary(place)
                urls, ports = [], []
                for _ in range(2):
                    port, bus = free_port(), free_port()
                    words: list[str | int] = ["--port", port, "--bind", "127.0.0.1", "--cluster-port", bus]
                    words += ["--cluster-enabled", "yes"]
                    words += ["--cluster-allow-replica-migration", "no"]  # a node without slots stays one of its own
                    stack.enter_context(running_server(binary, tmp_path_factory.mktemp(place), *words))
                    urls.append(f"redis://127.0.0.1:{port}/0{QUERY}")
                    ports.append((port, bus))
                found[place] = Cluster(*urls)
                command(urls[0], "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                command(urls[1], "CLUSTER", "MEET", "127.0.0.1", *ports[0])
        until(lambda: all(cluster.is_up() for cluster in found.values()), timeout_s=30)
        yield found


@pytest.fixture(params=PLACES)
def cluster(request: pytest.FixtureRequest, clusters: dict[str, Cluster]) -> Iterator[Cluster]:
    """A cluster without keys, whose first node has the log."""
    if request.param not in clusters:
        pytest.skip(f"no server from {request.param}")
    cluster = clusters[request.param]
    yield cluster
    cluster.say("SETSLOT", cluster.slot, "STABLE")
    for url in (cluster.first, cluster.second):
        command(url, "FLUSHALL")
    cluster.give(cluster.first)
    until(cluster.is_up)


def everything(scene: Scene) -> list[Callable[[], object]]:
    """Return a script that is sent again and one that is not, commands of both kinds, and a batch."""
    log, owner = scene.log, Owner("generate-0", 1, "n")
    return [
        scene.submit,
        scene.end,
        lambda: scene.take(owner),
        lambda: scene.step(owner, 1),
        lambda: log.acquire("web-0", "n", 1000),
        lambda: log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=0),
        lambda: log.histories(["a"]),
        scene.prepare,
    ]


def assert_all_raise(scene: Scene, kind: type[LogError], words: str) -> None:
    for call in everything(scene):
        with pytest.raises(LogError, match=words) as raised:
            call()
        assert type(raised.value) is kind

    async def act(front: AsyncRedisLog) -> None:
        for question in (
            front.submit("a", [submitted()]),
            front.histories({"a": ""}),
            front.open_replies("web-0"),
            front.follow_replies("web-0", "0-0", lambda *_: False, block_ms=1),
        ):
            with pytest.raises(LogError, match=words) as raised:
                await question
            assert type(raised.value) is kind

    assert isinstance(scene.log, RedisLog)
    with_front(scene.log.url, act)


def test_a_node_without_the_log_is_refused_at_the_start_in_one_line_that_names_the_other(cluster: Cluster) -> None:
    check_server(cluster.first)
    where = host_of(cluster.first)
    line = (
        r"--redis-url redis://\S+: a node of a cluster that does not have the log of --namespace test "
        rf"\(MOVED \d+ {where}\); use redis\+cluster://, which asks the nodes for the one that has it"
    )
    with pytest.raises(ConfigError, match=rf"^{line}$"):
        check_server(cluster.second, 0, "test")


def test_a_node_that_hands_the_log_over_is_refused_at_the_start(cluster: Cluster) -> None:
    command(cluster.second, "CLUSTER", "SETSLOT", cluster.slot, "IMPORTING", cluster.node(cluster.first))
    command(cluster.first, "CLUSTER", "SETSLOT", cluster.slot, "MIGRATING", cluster.node(cluster.second))
    with pytest.raises(ConfigError, match="ASK "):
        check_server(cluster.first, 0, "test")


def test_after_a_failover_in_a_cluster_all_wait_until_their_node_has_the_log(cluster: Cluster) -> None:
    with closing(RedisLog(cluster.second, NAMES)) as log:
        scene = Scene(log)
        assert_all_raise(scene, LogReadOnly, "this node of a cluster does not have the log at the moment: MOVED ")
        cluster.give(cluster.second)
        scene.prepare()
        assert scene.submit() is Submission.ACCEPTED


def test_while_a_cluster_moves_the_log_all_wait(cluster: Cluster) -> None:
    with closing(RedisLog(cluster.first, NAMES)) as log:
        scene = Scene(log)
        scene.prepare()
        assert scene.submit("a") is Submission.ACCEPTED
        command(cluster.second, "CLUSTER", "SETSLOT", cluster.slot, "IMPORTING", cluster.node(cluster.first))
        command(cluster.first, "CLUSTER", "SETSLOT", cluster.slot, "MIGRATING", cluster.node(cluster.second))
        with pytest.raises(LogUnavailable, match=r"^TRYAGAIN "):
            scene.submit("b")
        with pytest.raises(LogReadOnly, match="ASK "):
            log.histories(["b"])
        cluster.say("SETSLOT", cluster.slot, "STABLE")
        assert scene.submit("b") is Submission.ACCEPTED


def test_while_a_cluster_is_down_all_wait(cluster: Cluster) -> None:
    slot = cluster.slot
    with closing(RedisLog(cluster.first, NAMES)) as log:
        scene = Scene(log)
        cluster.say("DELSLOTS", slot)
        check_server(cluster.first, 0, "test")
        assert_all_raise(scene, LogReadOnly, "^CLUSTERDOWN ")
        command(cluster.first, "CLUSTER", "ADDSLOTS", slot)
        until(cluster.is_up)
        scene.prepare()
        assert scene.submit() is Submission.ACCEPTED


# An address of the cluster


def owner_by(url: str, key: str = NAMES.live) -> int:
    """Return the port of the node to which *url* leads."""
    with connect(url, key) as client:
        assert client.exists(key) == 0
        connection = client.connection_pool.get_connection()
        assert isinstance(connection.port, int)
        return connection.port


def port_of(url: str) -> int:
    return int(host_of(url).partition(":")[2])


def test_any_node_leads_to_the_one_that_has_the_log(cluster: Cluster) -> None:
    for named in (host_of(cluster.first), host_of(cluster.second), f"127.0.0.1:1,{host_of(cluster.second)}"):
        assert owner_by(f"redis+cluster://{named}{QUERY}") == port_of(cluster.first)
    cluster.give(cluster.second)
    assert owner_by(cluster.url) == port_of(cluster.second)
    assert owner_by(cluster.url, "{other}:live") == port_of(cluster.first)
    check_server(cluster.url, 0, "test")


def test_all_follow_the_log_to_another_node(cluster: Cluster) -> None:
    with closing(RedisLog(cluster.url, NAMES)) as log:
        scene = Scene(log)
        before = log.incarnation()
        for call in everything(scene):
            with contextlib.suppress(LogError):  # there is no such request, or group
                call()

        async def act(front: AsyncRedisLog) -> None:
            def questions() -> list[Coroutine[Any, Any, object]]:
                following = front.follow_replies("web-0", "0-0", lambda *_: False, block_ms=1)
                return [front.histories({"a": ""}), front.read_histories({"a": "0-0"}, block_ms=1), following]

            for question in questions():
                await question
            command(cluster.first, "FLUSHALL")
            cluster.give(cluster.second)
            for question, again in zip(questions(), questions(), strict=True):
                with contextlib.suppress(LogReadOnly):
                    await question
                await again

        with_front(cluster.url, act)
        with pytest.raises(LogReadOnly, match="MOVED "):  # by one of its two kinds of connections; both follow then
            scene.prepare()
        for call in everything(scene):
            with contextlib.suppress(Fenced, GroupLost):  # the new node says so
                call()
        assert log.incarnation() != before


def test_a_connection_that_was_just_used_does_not_go_back_to_the_old_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.log.drivers.FRESH_S", 60.0)
    with closing(RedisLog(cluster.url, NAMES)) as log:
        log.wait("0-0", "0-0", block_ms=1)
        cluster.give(cluster.second)
        with pytest.raises(LogReadOnly, match="MOVED "):
            log.wait("0-0", "0-0", block_ms=1)
        log.wait("0-0", "0-0", block_ms=1)


def test_a_closed_connection_to_a_node_is_an_error_once_because_the_next_node_may_lack_commits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.log.drivers.FRESH_S", -1.0)
    with closing(RedisLog(cluster.url, NAMES)) as log:
        log.wait("0-0", "0-0", block_ms=1)
        command(cluster.first, "CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(LogUnavailable, match="closed the connection"):
            log.wait("0-0", "0-0", block_ms=1)
        log.wait("0-0", "0-0", block_ms=1)


def test_a_reader_that_waits_is_told_when_the_log_moves(cluster: Cluster) -> None:
    with closing(RedisLog(cluster.url, NAMES)) as log, ThreadPoolExecutor() as threads:
        log.prepare(SUBMITTED)
        waiting = threads.submit(log.read, SUBMITTED, "tokenize-0", max_entries=1, block_ms=2000)
        until(lambda: b"blocked_clients:1" in command(cluster.first, "INFO", "clients"))
        with contextlib.suppress(redis.ResponseError):  # the first one still has keys; it hears it from the second
            cluster.give(cluster.second)
        with pytest.raises((LogReadOnly, GroupLost), match=r"MOVED |UNBLOCKED "):  # Redis 7 removes the keys first
            waiting.result(10)
        until(lambda: owner_by(cluster.url) == port_of(cluster.second))


def test_while_no_node_has_the_log_all_wait(cluster: Cluster) -> None:
    slot = cluster.slot
    with closing(RedisLog(cluster.url, NAMES)) as log:
        scene = Scene(log)
        cluster.say("DELSLOTS", slot)
        assert_all_raise(scene, LogReadOnly, "^CLUSTERDOWN ")
        command(cluster.first, "CLUSTER", "ADDSLOTS", slot)
        until(cluster.is_up)
        scene.prepare()
        assert scene.submit() is Submission.ACCEPTED


def test_a_cluster_of_which_no_node_answers_is_named_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"none of 2 nodes of the cluster says .*refused.*; name nodes that run"):
        check_server("redis+cluster://127.0.0.1:1,127.0.0.1:2")


@contextlib.contextmanager
def node_that_says(*replies: bytes) -> Iterator[int]:
    """Run a node that answers each connection with the next of *replies*, and then hangs up; give its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    while b"EXISTS" not in connection.recv(4096):
                        connection.sendall(b"+OK\r\n")
                    connection.sendall(reply)

        with ThreadPoolExecutor() as threads:
            answering = threads.submit(answer)
            yield listener.getsockname()[1]
            answering.result(10)


@pytest.mark.parametrize(
    ("replies", "owner"),
    [
        ((b"-MOVED 1 10.0.0.7:6379\r\n",), ("10.0.0.7", 6379)),
        ((b"-ASK 1 fd00::7:6379\r\n",), ("fd00::7", 6379)),
        ((b"-MOVED 1 :7000\r\n",), ("127.0.0.1", 7000)),
        ((b"-CLUSTERDOWN The cluster is down\r\n", b"-MOVED 1 a.b:1\r\n"), ("a.b", 1)),
        ((b"-MASTERDOWN Link with MASTER is down\r\n", b"-MOVED 1 a.b:1\r\n"), ("a.b", 1)),
        ((b"-LOADING Redis is loading\r\n", b"-MOVED 1 a.b:1\r\n"), ("a.b", 1)),
        ((b"", b"-MOVED 1 a.b:1\r\n"), ("a.b", 1)),
    ],
)
def test_a_node_names_the_owner_or_the_next_one_is_asked(replies: Sequence[bytes], owner: tuple[str, int]) -> None:
    with node_that_says(*replies) as port:
        address = parse_address(f"redis+cluster://127.0.0.1:1,127.0.0.1:{port},localhost:{port}")
        assert address.asked().discover_master("key") == owner


def test_the_last_node_that_answered_is_asked_first(cluster: Cluster) -> None:
    with node_that_says(b"") as port:
        address = parse_address(f"redis+cluster://127.0.0.1:{port},{host_of(cluster.second)}")
        asked = address.asked()
        for _ in range(3):
            assert asked.discover_master(NAMES.live) == ("127.0.0.1", port_of(cluster.first))


def test_a_node_that_refuses_the_user_is_not_passed_over(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="put user and password into the URL"):
        check_server(f"redis+cluster://nobody:wrong@{host_of(cluster.first)},{host_of(cluster.second)}")
