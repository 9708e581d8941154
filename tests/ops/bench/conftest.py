"""A server that follows a script, for the benchmarks that measure one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_stand_in import OpenAIStandIn, listening


@pytest.fixture
def stand_in() -> Iterator[OpenAIStandIn]:
    with listening() as server:
        yield server
