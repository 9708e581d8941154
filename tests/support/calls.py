"""Calls that a test notes or lets fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def noted(
    patch: pytest.MonkeyPatch, owner: object, name: str, note: Callable[..., Any] = lambda *arguments, **_: arguments
) -> list[Any]:
    """Return what *note* makes of the arguments of each call of *owner*'s *name*, which goes on as before."""
    work, notes = getattr(owner, name), list[Any]()

    def watched(*arguments: Any, **options: Any) -> Any:
        notes.append(note(*arguments, **options))
        return work(*arguments, **options)

    patch.setattr(owner, name, watched)
    return notes


def failing_once(
    patch: pytest.MonkeyPatch, owner: object, name: str, error: BaseException, *, is_done: bool = False
) -> list[str]:
    """Have the first call of *owner*'s *name* raise: before it does anything or, *is_done*, afterwards. Return the
    name, as soon as it has.
    """
    work, failed = getattr(owner, name), list[str]()

    def fails(*arguments: Any, **options: Any) -> Any:
        if failed:
            return work(*arguments, **options)
        failed.append(name)
        if is_done:
            work(*arguments, **options)
        raise error

    patch.setattr(owner, name, fails)
    return failed
