"""A node of a Redis Cluster as the server: one that does not have the log, hands it over, or is down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
import redis
from support.log_contract import NAMES, SUBMITTED, Scene, submitted, with_front
from support.redis_servers import QUERY, Servers, command, running_server, until
from support.servers import free_port

from pipeline.errors import ConfigError, LogError, LogReadOnly, LogUnavailable
from pipeline.log.check import check_server
from pipeline.log.protocol import Owner, Submission
from pipeline.log.redis import AsyncRedisLog, RedisLog

PLACES = ("embedded", "path")
"""Valkey 9 and Redis 7: the tests need `cluster-port`, which 6.2 has not."""


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
    where = cluster.first.removeprefix("redis://").partition("/")[0]
    line = (
        r"--redis-url redis://\S+: a node of a cluster that does not have the log of --namespace test "
        rf"\(MOVED \d+ {where}\); name {where}, or a server without cluster mode"
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
        assert_all_raise(scene, LogUnavailable, "^CLUSTERDOWN ")
        command(cluster.first, "CLUSTER", "ADDSLOTS", slot)
        until(cluster.is_up)
        scene.prepare()
        assert scene.submit() is Submission.ACCEPTED
