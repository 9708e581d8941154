"""Redis as users run it: TLS, client certificates, password files, Sentinels; what is said when it cannot be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme
from support.log_contract import NAMES, SUBMITTED, with_front
from support.redis_servers import RunningServer, Servers, command, running_server, until, watched
from support.selection import rest_at_night
from support.servers import free_port

from pipeline.errors import ConfigError, LogReadOnly, LogUnavailable
from pipeline.log.address import connect
from pipeline.log.check import check_server
from pipeline.log.protocol import Reply
from pipeline.log.redis import AsyncRedisLog, RedisLog


def use(url: str) -> None:
    """Use the Redis at *url* as the stages and as a frontend do."""
    check_server(url)
    with closing(RedisLog(url, NAMES)) as log:
        log.prepare(SUBMITTED)
        assert log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=1) == []

    async def as_frontend(front: AsyncRedisLog) -> None:
        cursor = await front.open_replies("web-0")
        assert await front.read_replies("web-0", cursor, block_ms=1) == (cursor, [])
        told: list[str] = []

        def take(cursor: str, _: list[Reply]) -> bool:
            told.append(cursor)
            return len(told) < 2

        await front.follow_replies("web-0", cursor, take, block_ms=1)
        assert told == [cursor, cursor]
        assert (await front.occupancy()).submitted.length == 0

    with_front(url, as_frontend)


# TLS


@dataclass(frozen=True)
class Certificates:
    folder: Path

    def __post_init__(self) -> None:
        ours, others = trustme.CA(), trustme.CA()
        ours.cert_pem.write_to_path(str(self.ca))
        others.cert_pem.write_to_path(str(self.other_ca))
        for name, issued in (
            ("server", ours.issue_cert("localhost")),
            ("client", ours.issue_cert("client")),
            ("stranger", others.issue_cert("client")),
        ):
            issued.cert_chain_pems[0].write_to_path(str(self.folder / f"{name}.crt"))
            issued.private_key_pem.write_to_path(str(self.folder / f"{name}.key"))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def other_ca(self) -> Path:
        return self.folder / "other-ca.crt"

    def as_client(self, name: str) -> str:
        return f"ssl_certfile={self.folder / name}.crt&ssl_keyfile={self.folder / name}.key"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.contextmanager
def tls_server(
    redis_servers: Servers, certificates: Certificates, folder: Path, *, clients: str = "no"
) -> Iterator[tuple[RunningServer, int]]:
    """Run a server that speaks TLS at the port that is given; *clients* need a certificate, `yes` or `no`."""
    binary, port, here = redis_servers.binary("path"), free_port(), certificates.folder
    folder.mkdir(exist_ok=True)
    files: list[str | Path] = ["--tls-cert-file", here / "server.crt", "--tls-key-file", here / "server.key"]
    trusts: list[str | Path] = ["--tls-ca-cert-file", certificates.ca, "--tls-auth-clients", clients]
    with running_server(binary, folder, "--tls-port", port, *files, *trusts) as server:
        yield server, port


@pytest.fixture
def tls_port(redis_servers: Servers, certificates: Certificates, tmp_path: Path) -> Iterator[int]:
    with tls_server(redis_servers, certificates, tmp_path / "redis") as (_, port):
        yield port


def test_a_certificate_of_a_ca_that_is_named_is_good(certificates: Certificates, tls_port: int) -> None:
    use(f"rediss://localhost:{tls_port}/0?ssl_ca_certs={quote(str(certificates.ca))}")


def test_a_certificate_of_another_ca_is_refused(certificates: Certificates, tls_port: int) -> None:
    url = f"rediss://localhost:{tls_port}?ssl_ca_certs={quote(str(certificates.other_ca))}"
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        check_server(url)
    with closing(RedisLog(url, NAMES)) as log, pytest.raises(LogUnavailable, match="certificate verify failed"):
        log.backlog(SUBMITTED)

    async def as_frontend(front: AsyncRedisLog) -> None:
        with pytest.raises(LogUnavailable, match="certificate verify failed"):
            await front.occupancy()

    with_front(url, as_frontend)


def test_a_certificate_for_another_name_is_refused(certificates: Certificates, tls_port: int) -> None:
    url = f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={quote(str(certificates.ca))}"
    with pytest.raises(ConfigError, match="certificate"):
        check_server(url)
    use(f"{url}&ssl_check_hostname=no")


def test_a_ca_that_the_machine_does_not_know_is_asked_for(tls_port: int) -> None:
    with pytest.raises(ConfigError, match="CA"):
        check_server(f"rediss://localhost:{tls_port}")
    use(f"rediss://localhost:{tls_port}?ssl_cert_reqs=none")


def test_a_server_without_tls_is_named_as_one(redis_servers: Servers, tmp_path: Path) -> None:
    port = free_port()
    with running_server(redis_servers.binary("path"), tmp_path, "--port", port):
        with pytest.raises(ConfigError):
            check_server(f"rediss://localhost:{port}")
        use(f"redis://localhost:{port}")


def test_redis_to_a_port_with_tls_says_what_could_be_wrong(tls_port: int) -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        check_server(f"redis://localhost:{tls_port}")


def test_a_client_proves_who_it_is(redis_servers: Servers, certificates: Certificates, tmp_path: Path) -> None:
    with tls_server(redis_servers, certificates, tmp_path / "redis", clients="yes") as (_, port):
        url = f"rediss://localhost:{port}?ssl_ca_certs={quote(str(certificates.ca))}"
        use(f"{url}&{certificates.as_client('client')}")
        with pytest.raises(ConfigError, match=r"ssl_certfile=.*ssl_keyfile="):
            check_server(url)
        with pytest.raises(ConfigError, match="CA"):
            check_server(f"{url}&{certificates.as_client('stranger')}")


# Users and passwords


def test_a_password_comes_from_a_file_and_may_change(redis_servers: Servers, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    (tmp_path / "redis").mkdir()
    with running_server(redis_servers.binary("embedded"), tmp_path / "redis", "--requirepass", "first") as server:
        url = f"{server.url}?password_file={file}"
        use(url)
        with closing(RedisLog(url, NAMES)) as log:
            assert log.backlog(SUBMITTED) == 0
            with connect(url) as client:
                client.execute_command("CONFIG", "SET", "requirepass", "second")
                file.write_text("second\n")
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert log.backlog(SUBMITTED) == 0
            file.unlink()
            with connect(f"{server.url.replace('unix://', 'unix://:second@')}") as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            with pytest.raises(LogUnavailable, match=str(file)):
                log.backlog(SUBMITTED)
            file.write_text("second\n")
            assert log.backlog(SUBMITTED) == 0


@pytest.mark.parametrize("user", ["", ":wrong@", "nobody:wrong@"])
def test_who_is_not_let_in_is_told_how(redis_servers: Servers, tmp_path: Path, user: str) -> None:
    with (
        running_server(redis_servers.binary("embedded"), tmp_path, "--requirepass", "right") as server,
        pytest.raises(ConfigError, match="password_file=") as raised,
    ):
        check_server(server.url.replace("unix://", f"unix://{user}"))
    assert "wrong" not in str(raised.value).replace("wrong number", "").replace("WRONGPASS", "")


# Failovers


def test_a_master_that_was_a_replica_in_between_is_another_incarnation(redis_url: str) -> None:
    with closing(RedisLog(redis_url, NAMES)) as log:
        before = log.incarnation()
        assert log.incarnation() == before
        command(redis_url, "REPLICAOF", "127.0.0.1", 1)
        command(redis_url, "REPLICAOF", "NO", "ONE")
        after = log.incarnation()
        assert after != before and after.partition(" ")[0] == before.partition(" ")[0]


def test_a_reader_that_waits_is_told_that_its_server_became_a_replica(redis_url: str) -> None:
    with closing(RedisLog(redis_url, NAMES)) as log, ThreadPoolExecutor() as threads:
        log.prepare(SUBMITTED)
        waiting = threads.submit(log.read, SUBMITTED, "tokenize-0", max_entries=1, block_ms=2000)
        until(lambda: b"blocked_clients:1" in command(redis_url, "INFO", "clients"))
        command(redis_url, "REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(LogReadOnly, match="UNBLOCKED "):
            waiting.result(10)
        command(redis_url, "REPLICAOF", "NO", "ONE")


# Sentinels


@pytest.mark.slow
@pytest.mark.parametrize("place", rest_at_night(["embedded", "oldest"]))
def test_after_a_failover_the_sentinels_name_the_new_server(redis_servers: Servers, place: str, tmp_path: Path) -> None:
    with watched(redis_servers.binary(place), tmp_path) as group, closing(RedisLog(group.url, NAMES)) as log:
        use(group.url)
        before = log.incarnation()
        assert log.acquire("tokenize-0", "nonce", 60_000) is not None
        until(lambda: all(command(node.url, "EXISTS", NAMES.owner("tokenize-0")) for node in group.nodes.values()))

        async def scenario() -> None:
            front = AsyncRedisLog(group.url, NAMES)
            try:
                await front.open_replies("web-0")
                group.nodes[group.owner()].process.kill()
                await asyncio.to_thread(until, lambda: _answers(log), timeout_s=30)
                async with asyncio.timeout(30):
                    while True:
                        with contextlib.suppress(LogUnavailable):
                            await front.open_replies("web-0")
                            break
                        await asyncio.sleep(0.05)
            finally:
                await front.close()

        def _answers(log: RedisLog) -> bool:
            try:
                log.prepare(SUBMITTED)
            except LogUnavailable:
                return False
            return True

        asyncio.run(scenario())
        assert log.incarnation() != before
        assert log.acquire("tokenize-0", "nonce", 60_000) is not None  # it has what the first one had


def test_a_service_that_no_sentinel_knows_is_named(redis_servers: Servers, tmp_path: Path) -> None:
    with watched(redis_servers.binary("embedded"), tmp_path) as group:
        url = group.url
        with pytest.raises(ConfigError, match="other"):
            check_server(url.replace("/main/", "/other/"))
    with pytest.raises(ConfigError):
        check_server(url)


def test_a_stage_may_wait_for_a_server_that_comes_later_but_not_for_another_password(
    redis_servers: Servers, tmp_path: Path
) -> None:
    url = f"unix://{tmp_path}/redis.sock"
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_server(url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(check_server, url, patience_s=30.0)
        binary = redis_servers.binary("embedded")
        with running_server(binary, tmp_path, "--requirepass", "a") as server:
            with pytest.raises(ConfigError, match="user and password"):
                waiting.result()
            check_server(url.replace("unix://", "unix://:a@"), patience_s=30.0)
            server.process.kill()
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_server(f"redis://127.0.0.1:{free_port()}/0", patience_s=0.2)
