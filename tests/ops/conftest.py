"""A log to look into; and how a process logs, which the tests here set up like programs of their own, and undo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from lived_requests import LivedRequests

from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import Names


@pytest.fixture(scope="module", autouse=True)
def logs_as_in_a_new_process() -> Iterator[None]:
    """Begin without any, as a program that imports `LLM` does, and give back what there was."""
    before, was_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(**before)


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisLog]:
    log = RedisLog(redis_url, Names(), RequestLimits(timeout_s=60))
    yield log
    log.close()


@pytest.fixture
def lived(log: RedisLog) -> LivedRequests:
    """A log in which requests can be made."""
    return LivedRequests(log)
