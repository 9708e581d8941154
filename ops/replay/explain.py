"""What may explain that a request gets other tokens than it got: what the two histories say of their engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.views.recorded import Maker

OF_KERNELS: Final = ("dtype", "quantization", "kernels", "version of the kernels", "page size", "torch")
"""The parts of numerics where the CPU kernels compute: `Settings.numerics` writes them."""
OF_TORCH: Final = ("dtype", "quantization", "torch", "attention")
"""The parts where torch computes."""
NAMED: Final[Mapping[str, str]] = {
    "sampler": "sampler-1",
    "llguidance": "",
    "deterministic": "deterministic-no",
    "fused": "fused-no",
    "ranks": "ranks-1",
}
"""The parts that begin with their name, and what the numerics mean that lack one; nothing: that is not known."""


def explanations(recorded: Maker, now: Maker) -> list[str]:
    """Return every reason for other tokens that the histories hold; none: nothing recorded explains them."""
    found = changes(recorded, now)
    if not (recorded.numerics and now.numerics):
        return [*found, "one of the histories does not say how its engine computed"]
    mine = parts_of(recorded.numerics)
    if not found and "attention" in mine and mine["deterministic"] == NAMED["deterministic"]:
        found.append("torch computed it, and its results depend on the batch and on the number of threads")
    return found


def changes(recorded: Maker, now: Maker) -> list[str]:
    """Return what the two histories say differently of their engines. That may change a token, and need not."""
    mine, theirs = (parts_of(each.numerics) if each.numerics else {} for each in (recorded, now))
    pairs = [
        ("weights", recorded.weights, now.weights),
        ("version of MiniSGL", recorded.version, now.version),
        *((name, part, theirs[name]) for name, part in mine.items() if name in theirs),
    ]
    return [
        f"{name}: recorded {before}, now {after}"
        for name, before, after in pairs
        if before and after and before != after
    ]


def parts_of(numerics: str) -> Mapping[str, str]:
    """Return the parts of an engine's numerics by their names. Where torch computes, that is the part `kernels`."""
    parts = [part for part in numerics.split("/") if part.partition("-")[0] not in NAMED]
    named = {name: part for part in numerics.split("/") if (name := part.partition("-")[0]) in NAMED}
    names = next((names for names in (OF_KERNELS, OF_TORCH) if len(names) == len(parts)), ())
    if not names:
        return {"numerics": numerics}
    known = {name: part for name, part in {**NAMED, **named}.items() if part}
    return {"kernels": "torch"} | dict(zip(names, parts, strict=True)) | known
