"""A log to look into; a server that follows a script; and how a process logs, which the tests here set up like programs
of their own, and undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.lived_requests import LivedRequests
from support.openai_stand_in import OpenAIStandIn, listening
from support.tool import Tool, fresh_logs

from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import Names


@pytest.fixture(scope="module", autouse=True)
def logs_as_in_a_new_process() -> Iterator[None]:
    with fresh_logs():
        yield


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisLog]:
    log = RedisLog(redis_url, Names(), RequestLimits(timeout_s=60))
    yield log
    log.close()


@pytest.fixture
def lived(log: RedisLog) -> LivedRequests:
    """A log in which requests can be made."""
    return LivedRequests(log)


@pytest.fixture
def stand_in() -> Iterator[OpenAIStandIn]:
    """Any OpenAI server."""
    with listening() as server:
        yield server


def _tool(command: str) -> Any:
    @pytest.fixture
    def tool(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Tool:
        return Tool(command, redis_url, capsys)

    return tool


trace, dead = _tool("trace"), _tool("dead")
show, dump, bring_in = _tool("replay show"), _tool("replay dump"), _tool("replay import")
"""Commands that look into the log."""
