"""The script of Redis' pods: who is the master after which death. Each pod is an address of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.redis_servers import find_servers
from support.servers import ROOT, eventually

from pipeline.log.address import connect

# Sentinels hear of replicas every ten seconds, so each test takes twenty.
pytestmark = [pytest.mark.slow, pytest.mark.night]

SCRIPT = ROOT / "ops" / "kubernetes" / "files" / "redis.sh"
USERS = ("web", "tokenize", "generate", "detokenize", "archive", "operator", "scaler", "minisgl", "replica", "sentinel")
KEY = "{minisgl:0}:live"
TWO_WRITES = "redis.call('ZADD', KEYS[1], 0, 'uid') redis.call('ZADD', KEYS[1], ARGV[1], 'uid')"
"""A transaction in Redis' file, as every commit of the log is one."""


class Pods:
    """Three pods, each with a Redis and a Sentinel. Killing a pod kills both; its disk stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        net = f"127.{random.randrange(1, 250)}.{random.randrange(250)}"
        self.hosts = [f"{net}.{number}" for number in (1, 2, 3)]
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {host: [] for host in self.hosts}
        self._passwords = folder / "passwords"
        self._passwords.mkdir()
        for user in USERS:
            (self._passwords / user).write_text(f"{random.getrandbits(128):032x}")
        sentinels = ",".join(f"{host}:26379" for host in self.hosts)
        files = f"password_file={self._passwords}/minisgl&sentinel_password_file={self._passwords}/sentinel"
        self.url = f"redis+sentinel://minisgl@{sentinels}/minisgl/0?{files}"

    def run(self, host: str, role: str, user: str = "minisgl") -> subprocess.Popen[bytes]:
        """Start the script as the container *role* does."""
        data, own = self._folder / host / "data", self._folder / host / role
        for folder in (data, own):
            folder.mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOSTS": " ".join(self.hosts),
            "ME": host,
            "BIND": host,
            "DATA": str(data),
            "RUN": str(own),
            "PASSWORDS": str(self._passwords),
            "USERS": str(SCRIPT.parent / "users.acl"),
            "CONFIG": str(SCRIPT.parent / "redis.conf"),
            "MORE": "appendfsync always",
            "REDIS_USER": user,
        }
        with (self._folder / f"{host}.{role}.log").open("ab") as output:
            return subprocess.Popen(["sh", SCRIPT, role], env=environment, stdout=output, stderr=output)

    def start(self, *hosts: str) -> None:
        for host in hosts or self.hosts:
            self._processes[host] = [self.run(host, role) for role in ("redis", "sentinel")]

    def kill(self, *hosts: str) -> None:
        for host in hosts or self.hosts:
            for process in self._processes[host]:
                process.kill()
                process.wait()

    def lose_disk(self, host: str) -> None:
        shutil.rmtree(self._folder / host / "data")

    def info(self, host: str) -> dict[str, str]:
        """Return what the Redis there says of its replication; {} if it does not answer."""
        url = f"redis://minisgl@{host}:6379/0?password_file={self._passwords}/minisgl"
        try:
            with connect(url) as client:
                return {name: str(value) for name, value in client.info("replication").items()}
        except redis.RedisError:
            return {}

    def masters(self) -> list[str]:
        return [host for host in self.hosts if self.info(host).get("role") == "master"]

    def has_synced(self, master: str) -> bool:
        """Return whether *master* is the only one, and both others have what it has."""
        links = [self.info(host).get("master_link_status") for host in self.hosts if host != master]
        return self.masters() == [master] and links == ["up", "up"]

    def may_fail_over(self) -> bool:
        """Return whether every Sentinel has heard of both replicas: they ask the master for them every 10 s."""
        password = (self._passwords / "sentinel").read_text()
        for host in self.hosts:
            with redis.Redis(host, 26379, password=password, decode_responses=True) as client:
                replicas = client.sentinel_slaves("minisgl")
            if sum(each.get("master-link-status") == "ok" for each in replicas) != 2:
                return False
        return True

    def keeps(self, value: int) -> bool:
        """Return whether the master that Sentinels name has *value*, and takes writes."""
        with contextlib.suppress(redis.RedisError, OSError), connect(self.url) as client:
            return bool(client.zscore(KEY, "uid") == value and client.zadd(KEY, {"uid": value}) == 0)
        return False

    def write(self, value: int) -> None:
        """Write as soon as the master knows of a replica, and wait until both have it."""

        def is_written() -> bool:
            with contextlib.suppress(redis.RedisError, OSError), connect(self.url) as client:
                client.eval(TWO_WRITES, 1, KEY, value)
                return bool(client.wait(2, 1000) == 2)
            return False

        eventually(is_written, "both replicas have it")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    if shutil.which("redis-cli") is None or "path" not in find_servers():
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs redis-server and redis-cli on PATH: apt-get install redis-server")
        pytest.skip("no redis-server and redis-cli on PATH: apt-get install redis-server")
    group = Pods(tmp_path)
    group.start()
    try:
        eventually(lambda: group.has_synced(group.hosts[0]), "the first is the master")
        eventually(group.may_fail_over, "the Sentinels know the replicas")
        yield group
    finally:
        group.kill()


def test_a_user_without_a_password_is_said_and_nobody_gets_in_without_one(tmp_path: Path) -> None:
    group = Pods(tmp_path)
    (tmp_path / "passwords" / "scaler").write_text("")
    assert group.run(group.hosts[0], "redis").wait(10) == 2
    said = (tmp_path / f"{group.hosts[0]}.redis.log").read_text()
    assert said == "redis.sh: the Secret has no password for the user scaler; add it\n"


def test_a_replica_goes_on_when_the_master_dies_and_the_dead_one_comes_back_as_a_replica(pods: Pods) -> None:
    first = pods.hosts[0]
    assert pods.run(pods.hosts[1], "wait", "web").wait(10) == 0
    assert pods.run(first, "ping").wait(10) == 0
    pods.write(1)
    pods.kill(first)
    assert pods.run(first, "ping").wait(10) == 1
    eventually(lambda: pods.keeps(1), "another one is the master")
    pods.start(first)
    eventually(lambda: pods.info(first).get("role") == "slave", "it is a replica")
    eventually(lambda: pods.keeps(1), "its Sentinel knows the master, too")


def test_after_the_death_of_all_the_last_master_goes_on_whichever_it_was(pods: Pods) -> None:
    first = pods.hosts[0]
    pods.kill(first)
    eventually(lambda: pods.keeps(0) or len(pods.masters()) == 1, "another one is the master")
    (second,) = pods.masters()
    pods.start(first)
    eventually(lambda: pods.has_synced(second), "both others are replicas")
    pods.write(2)
    pods.kill()
    pods.start()
    eventually(lambda: pods.has_synced(second) and pods.keeps(2), "the second is the master again")


def test_a_master_that_lost_its_disk_does_not_empty_its_replicas(pods: Pods) -> None:
    first = pods.hosts[0]
    pods.write(3)
    pods.kill(first)
    pods.lose_disk(first)
    pods.start(first)  # before the Sentinels have missed it
    eventually(lambda: pods.keeps(3), "another one is the master")
    eventually(lambda: pods.has_synced(pods.masters()[0]) and first not in pods.masters(), "the first is a replica")
    assert pods.keeps(3)
