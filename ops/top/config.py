"""Flags of `minisgl top`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.flags import flag, seconds, yes_or_no


@dataclass(frozen=True, slots=True)
class TopConfig:
    """How often a snapshot is shown."""

    interval_s: float = flag("--interval", default=1.0, parse=seconds, help="seconds between two snapshots")
    once: bool = flag(
        "--once", default=False, parse=yes_or_no, help="print one snapshot as text and exit; it takes one interval"
    )
