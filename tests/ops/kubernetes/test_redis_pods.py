"""The script of Redis' pods: who is the master after which death. Each pod is an address of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
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
USERS = (
    *("web", "tokenize", "generate", "detokenize", "archive", "operator", "scaler", "minisgl"),
    *("replica", "sentinel", "lookup", "admin"),
)
PATIENCE_S = 60.0
"""A failover that did not succeed is tried again after 20 s."""
LATE_S = 3.0
"""How much later than the first pod the others start, where that may matter."""
KEY = "{minisgl:0}:live"
TWO_WRITES = "redis.call('ZADD', KEYS[1], 0, 'uid') redis.call('ZADD', KEYS[1], ARGV[1], 'uid')"
"""A transaction in Redis' file, as every commit of the log is one."""


class Pods:
    """Three pods, each with a Redis and a Sentinel. Killing a pod kills both; its disk stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.passwords = folder / "passwords"
        self.passwords.mkdir()
        self.change_passwords()
        getent = folder / "getent"  # which asks DNS for the address of a Service
        getent.write_text(f'#!/bin/sh\nsed -n "s/^$2 //p" {folder}/addresses\n')
        getent.chmod(0o755)
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.move()

    def move(self) -> None:
        """Give each pod another address."""
        net = f"127.{random.randrange(1, 250)}.{random.randrange(250)}"
        before = getattr(self, "hosts", [f"pod-{number}" for number in range(3)])
        self.hosts = [f"{net}.{number}" for number in (1, 2, 3)]
        for old, new in zip(before, self.hosts, strict=True):
            if (self._folder / old).exists():
                (self._folder / old).rename(self._folder / new)
        lines = (f"pod-{number} {host}\n" for number, host in enumerate(self.hosts))
        (self._folder / "addresses").write_text("".join(lines))
        sentinels = ",".join(f"{host}:26379" for host in self.hosts)
        files = f"password_file={self.passwords}/minisgl&sentinel_password_file={self.passwords}/lookup"
        self.url = f"redis+sentinel://minisgl@{sentinels}/minisgl/0?sentinel_username=lookup&{files}"

    def change_passwords(self) -> None:
        for user in USERS:
            (self.passwords / user).write_text(f"{random.getrandbits(128):032x}")

    def run(self, host: str, *words: str) -> subprocess.Popen[bytes]:
        """Start the script with *words*, as a container or a probe of the pod does."""
        data, own = self._folder / host / "data", self._folder / host / words[0]
        for folder in (data, own):
            folder.mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "HOSTS": "pod-0 pod-1 pod-2",
            "ME": f"pod-{self.hosts.index(host)}",
            "BIND": host,
            "DATA": str(data),
            "RUN": str(own),
            "PASSWORDS": str(self.passwords),
            "USERS": str(SCRIPT.parent / "users.acl"),
            "CONFIG": str(SCRIPT.parent / "redis.conf"),
            "MORE": "appendfsync always",
        }
        with (self._folder / f"{host}.{words[0]}.log").open("ab") as output:
            return subprocess.Popen(["sh", SCRIPT, *words], env=environment, stdout=output, stderr=output)

    def is_ready(self, host: str) -> bool:
        return all(self.run(host, "ready", role).wait(10) == 0 for role in ("redis", "sentinel"))

    def start(self, *hosts: str, late_s: float = 0.0) -> None:
        """Start these pods, or all; those after the first *late_s* later."""
        for number, host in enumerate(hosts or self.hosts):
            if number == 1:
                time.sleep(late_s)
            self._processes[host] = [self.run(host, role) for role in ("redis", "sentinel")]

    def kill(self, *hosts: str) -> None:
        for host in hosts or self.hosts:
            for process in self._processes.get(host, ()):
                process.kill()
                process.wait()

    def lose_disk(self, host: str) -> None:
        shutil.rmtree(self._folder / host / "data")

    def info(self, host: str) -> dict[str, str]:
        """Return what the Redis there says of its replication; {} if it does not answer."""
        url = f"redis://minisgl@{host}:6379/0?password_file={self.passwords}/minisgl"
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
        # The probes run: they make a pod that has copied the data a candidate for the master.
        return self.masters() == [master] and links == ["up", "up"] and all(map(self.is_ready, self.hosts))

    def may_fail_over(self) -> bool:
        """Return whether every Sentinel has heard of both replicas: they ask the master for them every 10 s."""
        password = (self.passwords / "sentinel").read_text()
        for host in self.hosts:
            with redis.Redis(host, 26379, password=password, decode_responses=True) as client:
                replicas = client.sentinel_slaves("minisgl")
            if sum(each.get("master-link-status") == "ok" and each["slave-priority"] > 0 for each in replicas) != 2:
                return False
        return True

    def keeps(self, value: int) -> bool:
        """Return whether the master that Sentinels name has *value*, and takes writes."""
        with contextlib.suppress(redis.RedisError, OSError), connect(self.url) as client:
            return bool(client.zscore(KEY, "uid") == value and client.zadd(KEY, {"uid": value}) == 0)
        return False

    def write(self, value: int, num_replicas: int = 2) -> None:
        """Write as soon as the master knows of a replica, and wait until all have it."""

        def is_written() -> bool:
            with contextlib.suppress(redis.RedisError, OSError), connect(self.url) as client:
                client.eval(TWO_WRITES, 1, KEY, value)
                return bool(client.wait(num_replicas, 1000) == num_replicas)
            return False

        eventually(is_written, "the replicas have it", PATIENCE_S)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    if shutil.which("redis-cli") is None or "path" not in find_servers():
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs redis-server and redis-cli on PATH: apt-get install redis-server")
        pytest.skip("no redis-server and redis-cli on PATH: apt-get install redis-server")
    group = Pods(tmp_path)
    group.start()
    try:
        eventually(lambda: group.has_synced(group.hosts[0]), "the first is the master", PATIENCE_S)
        eventually(group.may_fail_over, "the Sentinels know the replicas")
        yield group
    finally:
        group.kill()


def pods_with_another_master(pods: Pods) -> str:
    """Let another pod than the first become the master; return its host."""
    first = pods.hosts[0]
    pods.kill(first)
    eventually(lambda: len(pods.masters()) == 1, "another one is the master", PATIENCE_S)
    pods.start(first)
    (second,) = pods.masters()
    eventually(lambda: pods.has_synced(second) and pods.may_fail_over(), "both others are replicas", PATIENCE_S)
    return second


def test_a_user_without_a_password_is_said_and_nobody_gets_in_without_one(tmp_path: Path) -> None:
    group = Pods(tmp_path)
    (tmp_path / "passwords" / "scaler").write_text("")
    assert group.run(group.hosts[0], "redis").wait(10) == 2
    said = (tmp_path / f"{group.hosts[0]}.redis.log").read_text()
    assert said == "redis.sh: the Secret has no password for the user scaler; add it\n"


def test_a_replica_goes_on_when_the_master_dies_and_the_dead_one_comes_back_as_a_replica(pods: Pods) -> None:
    first, second, _ = pods.hosts
    assert pods.is_ready(first) and pods.is_ready(second)
    pods.write(1)
    pods.kill(first)
    assert pods.run(first, "ready", "redis").wait(10) == pods.run(first, "ready", "sentinel").wait(10) == 1
    eventually(lambda: pods.keeps(1), "another one is the master", PATIENCE_S)
    pods.start(first)
    eventually(lambda: pods.info(first).get("role") == "slave", "it is a replica")
    eventually(lambda: pods.keeps(1) and pods.is_ready(first), "its Sentinel knows the master, too")
    assert pods.run(first, "cli", "config", "set", "maxmemory", "1gb").wait(10) == 0
    assert pods.info(first).get("role") == "slave"


def test_after_the_death_of_all_the_last_master_goes_on_whichever_it_was(pods: Pods) -> None:
    second = pods_with_another_master(pods)
    pods.write(2)
    pods.kill()
    pods.start()
    eventually(lambda: pods.has_synced(second) and pods.keeps(2), "the second is the master again", PATIENCE_S)


def test_after_the_death_of_all_one_that_was_away_before_does_not_win_by_coming_first(pods: Pods) -> None:
    first = pods.hosts[0]
    pods.write(1)
    pods.kill(first)
    eventually(lambda: pods.keeps(1), "another one is the master", PATIENCE_S)
    pods.write(2, num_replicas=1)
    pods.kill()
    pods.start(first, *pods.hosts[1:], late_s=LATE_S)
    eventually(lambda: pods.keeps(2), "the newer data", PATIENCE_S)
    assert first not in pods.masters()


def test_a_master_that_lost_its_disk_does_not_empty_its_replicas(pods: Pods) -> None:
    first = pods.hosts[0]
    pods.write(3)
    pods.kill(first)
    pods.lose_disk(first)
    pods.start(first)  # before the Sentinels have missed it
    eventually(lambda: pods.keeps(3), "another one is the master", PATIENCE_S)
    eventually(
        lambda: pods.has_synced(pods.masters()[0]) and first not in pods.masters(), "it is a replica", PATIENCE_S
    )
    assert pods.keeps(3)


@pytest.mark.parametrize("led", [True, False], ids=["the master", "a replica"])
def test_a_disk_that_is_lost_while_all_are_dead_is_filled_from_the_others(pods: Pods, led: bool) -> None:
    first = pods.hosts[0]
    if not led:
        pods_with_another_master(pods)
    pods.write(4)
    pods.kill()
    pods.lose_disk(first)
    pods.start(first, *pods.hosts[1:], late_s=LATE_S)
    eventually(lambda: pods.keeps(4), "the data", PATIENCE_S)
    eventually(lambda: pods.has_synced(pods.masters()[0]), "all have it", PATIENCE_S)
    assert first not in pods.masters() and pods.keeps(4)


def test_a_replica_that_lost_its_disk_is_no_candidate_before_it_has_copied_all(pods: Pods) -> None:
    first, second, third = pods.hosts
    pods.write(7)
    pods.kill(third)
    pods.lose_disk(third)
    pods.start(third)
    until_s = time.monotonic() + 30
    while not pods.info(third):  # it copies for a second, because others may come to copy, too
        assert time.monotonic() < until_s
    pods.kill(first, second)
    pods.start(second)  # one Sentinel more: they may elect
    time.sleep(8)
    assert pods.info(third).get("role") != "master" or pods.keeps(7)
    pods.start(first)
    eventually(lambda: pods.keeps(7), "one that has the data is the master", PATIENCE_S)


def test_a_sentinel_that_is_killed_at_its_first_start_starts_again(tmp_path: Path) -> None:
    group = Pods(tmp_path)
    host = group.hosts[0]
    killed = group.run(host, "sentinel")
    eventually((tmp_path / host / "data" / "hosts").exists, "it has begun")
    killed.kill()
    killed.wait()
    again = group.run(host, "sentinel")
    try:
        eventually(lambda: group.run(host, "ready", "sentinel").wait(10) == 0, "it answers")
    finally:
        again.kill()
        again.wait()


def test_after_a_change_of_all_passwords_the_last_master_goes_on(pods: Pods) -> None:
    second = pods_with_another_master(pods)
    pods.write(5)
    pods.kill()
    pods.change_passwords()
    pods.start()
    eventually(lambda: pods.has_synced(second) and pods.keeps(5), "the second is the master again", PATIENCE_S)


def test_after_a_new_install_with_other_addresses_the_last_master_goes_on(pods: Pods) -> None:
    second = pods.hosts.index(pods_with_another_master(pods))
    pods.write(6)
    pods.kill()
    pods.move()
    pods.start()
    master = pods.hosts[second]
    eventually(lambda: pods.has_synced(master) and pods.keeps(6), "the second is the master again", PATIENCE_S)


def test_what_a_stage_knows_of_the_sentinels_does_not_let_it_change_them(pods: Pods) -> None:
    password = (pods.passwords / "lookup").read_text()
    with redis.Redis(pods.hosts[0], 26379, username="lookup", password=password) as client:
        for words in (("SENTINEL", "REMOVE", "minisgl"), ("SENTINEL", "FAILOVER", "minisgl"), ("ACL", "LIST")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
    client = redis.Redis(pods.hosts[0], 6379, username="sentinel", password=password)
    with client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()
