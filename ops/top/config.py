"""Flags of `minisgl top`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.flags import flag, seconds, yes_or_no


@dataclass(frozen=True, slots=True)
class TopConfig:
    """How often a picture is made."""

    interval_s: float = flag("--interval", default=1.0, parse=seconds, help="seconds from one picture to the next")
    once: bool = flag(
        "--once", default=False, parse=yes_or_no, help="print one picture, an interval long, as text and end"
    )
