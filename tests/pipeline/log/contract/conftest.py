"""The logs that keep the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from log_contract import LIMITS, NAMES, STEPS, SUBMITTED, TOKENIZED, Detokenizer
from redis_servers import PLACES, Servers

from pipeline.log.memory import MemoryLog
from pipeline.log.protocol import StreamLog
from pipeline.log.redis import RedisLog


@pytest.fixture(params=["memory", *PLACES])
def log(request: pytest.FixtureRequest) -> Iterator[StreamLog]:
    """An empty log with the groups that a server makes at its start."""
    log: StreamLog
    if request.param == "memory":
        log = MemoryLog(NAMES, LIMITS)
    else:
        servers: Servers = request.getfixturevalue("redis_servers")
        log = RedisLog(servers.url(request.param), NAMES, LIMITS)
    for inbox in (SUBMITTED, TOKENIZED, STEPS):
        log.prepare(inbox)
    yield log
    if isinstance(log, RedisLog):
        log.close()


@pytest.fixture
def detokenizer(log: StreamLog) -> Detokenizer:
    return Detokenizer(log)
