"""What may explain that a request gets other tokens than it got: what the two histories say of their engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ops.replay.history import Maker

OF_KERNELS: Final = (
    *("dtype", "quantization", "kernels", "version of the kernels", "page size", "torch", "sampler", "ranks"),
)
"""The parts of numerics where the CPU kernels compute: `Settings.numerics` writes them."""
OF_TORCH: Final = ("dtype", "quantization", "torch", "attention", "sampler", "ranks")
"""The parts where torch computes."""
FIRST_SAMPLER: Final = "sampler-1"
"""Of histories that do not name it."""
ONE_RANK: Final = "ranks-1"
"""Numerics name their number where there are more."""


def explanations(recorded: Maker, now: Maker) -> list[str]:
    """Return every reason for other tokens that the histories hold; none: nothing recorded explains them."""
    found = [
        f"{name}: recorded {mine}, now {theirs}"
        for name, mine, theirs in (
            ("weights", recorded.weights, now.weights),
            ("version of MiniSGL", recorded.version, now.version),
        )
        if mine and theirs and mine != theirs
    ]
    if not (recorded.numerics and now.numerics):
        return [*found, "one of the histories does not say how its engine computed"]
    mine, theirs = parts_of(recorded.numerics), parts_of(now.numerics)
    named = [(name, part, theirs[name]) for name, part in mine.items() if name in theirs]
    found += [f"{name}: recorded {before}, now {after}" for name, before, after in named if before != after]
    if not found and not _has_kernels(recorded.numerics):
        found.append("torch computed it, and its results depend on the batch and on the number of threads")
    return found


def parts_of(numerics: str) -> Mapping[str, str]:
    """Return the parts of an engine's numerics by their names. Where torch computes, that is the part `kernels`."""
    parts = _split(numerics)
    names = OF_KERNELS if _has_kernels(numerics) else OF_TORCH
    if len(parts) != len(names):
        return {"numerics": numerics}
    return {"kernels": "torch"} | dict(zip(names, parts, strict=True))


def _has_kernels(numerics: str) -> bool:
    return len(_split(numerics)) == len(OF_KERNELS)


def _split(numerics: str) -> list[str]:
    parts = numerics.split("/")
    ranks = parts.pop() if parts[-1].startswith("ranks-") else ONE_RANK
    return [*parts, *([] if parts[-1].startswith("sampler-") else [FIRST_SAMPLER]), ranks]
