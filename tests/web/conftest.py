"""Tests that are coroutines, and the stages behind a frontend: stand-ins on the Redis of the test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.redis_servers import RunningServer, Servers, running_server
from support.stand_in_stages import Stages, StandIn


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
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
def own_redis(redis_servers: Servers, tmp_path: Path) -> Iterator[RunningServer]:
    """A Redis of this test alone, which it may kill."""
    with running_server(redis_servers.binary("embedded"), tmp_path) as server:
        yield server
