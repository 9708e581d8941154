"""How a process logs is set up once; the tests here do it like programs of their own, and undo it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(scope="module", autouse=True)
def logs_as_in_a_new_process() -> Iterator[None]:
    """Begin without any, as a program that imports `LLM` does, and give back what there was."""
    before, was_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(**before)
