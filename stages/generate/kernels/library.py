"""Which of the kernels run on this machine."""

from __future__ import annotations


def available() -> tuple[str, ...]:
    """Return the variants that this CPU and this build have, the fastest first; empty: `reason` says why."""
    return ()


def reason() -> str:
    """Return why no variant runs here; "" if one does."""
    return "this build has no kernels"
