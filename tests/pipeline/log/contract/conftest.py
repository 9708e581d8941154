"""The logs that keep the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support.log_contract import LIMITS, NAMES, Detokenizer, Scene
from support.memory_log.log import MemoryLog
from support.redis_servers import PLACES, Servers

from pipeline.log.redis import RedisLog


@pytest.fixture(params=["memory", *PLACES])
def log(request: pytest.FixtureRequest) -> Iterator[RedisLog]:
    if request.param == "memory":
        yield MemoryLog(NAMES, LIMITS)
        return
    servers: Servers = request.getfixturevalue("redis_servers")
    with closing(RedisLog(servers.url(request.param), NAMES, LIMITS)) as log:
        yield log


@pytest.fixture
def detokenizer(scene: Scene) -> Detokenizer:
    return Detokenizer(scene)
