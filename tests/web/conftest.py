"""The stages behind a frontend: stand-ins on the Redis of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from stand_in_stages import Stages, StandIn


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
