"""What a phase reported, for its test."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Reported:
    """A `Report` that remembers."""

    items: dict[str, dict[str, object]] = field(default_factory=dict)

    def __call__(self, item: str, *, ok: bool | None = None, **figures: object) -> None:
        assert item not in self.items, f"{item} is reported twice"
        for name, value in figures.items():
            assert not isinstance(value, float) or math.isfinite(value), (
                f"{item}: {name} is {value}, which JSON has not"
            )
        self.items[item] = {"ok": ok, **figures}

    @property
    def wrong(self) -> dict[str, dict[str, object]]:
        return {item: figures for item, figures in self.items.items() if figures["ok"] is False}

    @property
    def skipped(self) -> dict[str, object]:
        return {item: figures["skipped"] for item, figures in self.items.items() if "skipped" in figures}
