"""Tests that are coroutines; frontends, and the stages behind them: stand-ins on the Redis of the test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from pathlib import Path

import pytest
from support.lived_requests import LivedRequests
from support.redis_servers import RunningServer, Servers, running_server
from support.stand_in_stages import Stages, StandIn
from support.web_site import KEYS, Site, site

from pipeline.log.redis import RedisLog
from pipeline.names import Names

Opens = AbstractAsyncContextManager[Site]
"""A fixture of this type is a `Site` to its test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, and enter the contexts that it is given there."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
            for name, value in given.items():
                if isinstance(value, AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


@pytest.fixture
def stand_in(redis_url: str) -> Iterator[StandIn]:
    """Stages that answer each request by its words."""
    with closing(StandIn(redis_url)) as stand_in:
        yield stand_in


@pytest.fixture
def stages(redis_url: str) -> Iterator[Stages]:
    """Stages that do what the test says."""
    with closing(Stages(redis_url)) as stages:
        yield stages


@pytest.fixture
def here(redis_url: str, stand_in: StandIn) -> Opens:
    """A frontend before stand-in stages, which is ready."""
    return site(redis_url)


@pytest.fixture
def there(redis_url: str, stand_in: StandIn) -> Opens:
    """Another one, which is ready, too."""
    return site(redis_url, "web-1")


@pytest.fixture
def bare(redis_url: str) -> Opens:
    """A frontend that need not be ready, before the stages that the test has."""
    return site(redis_url, ready=False)


@pytest.fixture
def keyed(redis_url: str) -> Opens:
    """The same, for clients with the keys of Ann, of Bob and of the admin."""
    return site(redis_url, ready=False, keys=KEYS)


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisLog]:
    """The log of the test."""
    with closing(RedisLog(redis_url, Names())) as log:
        yield log


@pytest.fixture
def lived(log: RedisLog) -> LivedRequests:
    """Makes requests in the log as if there were stages."""
    return LivedRequests(log)


@pytest.fixture
def own_redis(redis_servers: Servers, tmp_path: Path) -> Iterator[RunningServer]:
    """A Redis of this test alone, which it may kill."""
    with running_server(redis_servers.binary("embedded"), tmp_path) as server:
        yield server
