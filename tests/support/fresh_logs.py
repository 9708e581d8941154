"""Logging as a new process has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog


@contextlib.contextmanager
def fresh_logs() -> Iterator[None]:
    """Begin without any set-up, as a program that imports `LLM` does, and give back what there was."""
    before, was_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(**before)
