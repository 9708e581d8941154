"""What `serve` decides before it starts anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import command

from ops.serve import command as serve
from ops.serve.config import ServerConfig, parse_command
from pipeline.errors import ConfigError
from pipeline.log.check import check_server
from pipeline.process import redis_server
from pipeline.process.redis_server import machine_memory_bytes
from web.config import LEAST_LOG_BYTES

GIB = 1 << 30


def budget(*flags: str) -> int | None:
    config = parse_command(["serve", *flags], {})
    assert isinstance(config, ServerConfig)
    return serve._with_budget(config).clients.max_log_bytes


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a container's limit is, for a machine with 32 GiB."""
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(redis_server, "MEMORY_LIMITS", (tmp_path / "missing", limit))
    pages = {"SC_PHYS_PAGES": 32 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    return limit


def test_the_log_of_an_embedded_redis_may_take_a_tenth_of_the_memory(memory: Path) -> None:
    assert budget() == 32 * GIB // 10
    memory.write_text(f"{8 * GIB}\n")  # of this container
    assert budget() == 8 * GIB // 10
    memory.write_text(f"{GIB // 8}\n")
    assert budget() == LEAST_LOG_BYTES


def test_a_size_that_is_given_counts_and_the_log_in_a_redis_of_the_users_has_none_by_itself() -> None:
    assert budget("--max-log-bytes", "64M") == 64 << 20
    assert budget("--max-log-bytes", "0") == 0
    assert budget("--redis-url", "redis://h") is None
    assert budget("--redis-url", "redis://h", "--max-log-bytes", "64M") == 64 << 20


def test_the_limit_of_a_container_counts_only_where_it_is_lower(memory: Path) -> None:
    memory.write_text("9223372036854771712")  # how cgroup v1 says that there is none
    assert machine_memory_bytes() == 32 * GIB


def test_an_embedded_redis_refuses_requests_only_above_the_size_of_the_log(tmp_path: Path) -> None:
    config = parse_command(["serve", "--data-dir", str(tmp_path), "--max-log-bytes", "30M"], {})
    assert isinstance(config, ServerConfig)
    with serve._with_redis(config) as processes:
        told = command(processes._url, "CONFIG", "GET", "maxmemory")
        policy = command(processes._url, "CONFIG", "GET", "maxmemory-policy")
    assert (told, policy) == ([b"maxmemory", b"%d" % (40 << 20)], [b"maxmemory-policy", b"noeviction"])


@pytest.fixture
def full_at_20_mib(redis_url: str) -> Iterator[str]:
    command(redis_url, "CONFIG", "SET", "maxmemory", 20 << 20)
    yield redis_url
    command(redis_url, "CONFIG", "SET", "maxmemory", 0)


def test_a_log_that_may_be_as_large_as_its_redis_is_refused(full_at_20_mib: str) -> None:
    config = parse_command(["serve", "--redis-url", full_at_20_mib, "--max-log-bytes", "20M"], {})
    assert isinstance(config, ServerConfig)
    refused = (
        r"--max-log-bytes 20971520: Redis at .* at its maxmemory 20971520; pass less, or run: redis-cli CONFIG SET"
    )
    with pytest.raises(ConfigError, match=refused), serve._with_redis(config):
        pass
    check_server(full_at_20_mib, (20 << 20) - 1)
    check_server(full_at_20_mib)
