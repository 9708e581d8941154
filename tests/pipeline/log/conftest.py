"""A log in Redis, on each version of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support.log_contract import LIMITS, NAMES, Scene

from pipeline.log.redis import RedisLog


@pytest.fixture
def log(each_redis_url: str) -> Iterator[RedisLog]:
    with closing(RedisLog(each_redis_url, NAMES, LIMITS)) as log:
        yield log


@pytest.fixture
def scene(log: RedisLog) -> Scene:
    """The log with its groups."""
    scene = Scene(log)
    scene.prepare()
    return scene
