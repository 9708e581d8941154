"""Phases of `minisgl bench gpu` for tests: stubs of them, and what one reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

from ops.bench.gpu.phase import Scale

TOY = Scale("cpu", "toy")
STUBS = {
    "fine": "def run(scale, report): report('sum', ok=True, ms=1.25, counts=[1, 2], kernels=[{'name': 'a'}])",
    "raises": "def run(scale, report): report('begun'); raise ValueError('no  such\\nkernel')",
    "skips": "from ops.bench.gpu.phase import Skip\ndef run(scale, report): raise Skip('needs a GPU')",
    "hangs": "import time\ndef run(scale, report):\n    report('before', ok=True)\n    time.sleep(600)",
}
"""Modules of phases, by the way that they end."""


@dataclass
class Reported:
    """A `Report` that remembers."""

    items: dict[str, dict[str, object]] = field(default_factory=dict)

    def __call__(self, item: str, *, ok: bool | None = None, **figures: object) -> None:
        assert item not in self.items, f"{item} is reported twice"
        self.items[item] = {"ok": ok, **figures}

    @property
    def wrong(self) -> dict[str, dict[str, object]]:
        return {item: figures for item, figures in self.items.items() if figures["ok"] is False}

    @property
    def skipped(self) -> dict[str, object]:
        return {item: figures["skipped"] for item, figures in self.items.items() if "skipped" in figures}


def toy_run(phase: ModuleType) -> Reported:
    """Return what *phase* reports at toy size on a CPU."""
    report = Reported()
    phase.run(TOY, report)
    return report
