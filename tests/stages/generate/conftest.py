"""The scene of tests with an engine's loop: once on the log in memory, once on Redis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_rig import Scene

from pipeline.log.protocol import StreamLog


@pytest.fixture
def scene(another_log: Callable[[], StreamLog]) -> Scene:
    """An empty log without engines."""
    return Scene(another_log)
