"""Sampling that a model's author recommends in generation_config.json, for requests that do not set it.

Reads five numbers, as vLLM and SGLang do, and ignores `do_sample`: a request is greedy if its temperature is 0. Needs
neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from pipeline.events import SamplingParams
from stages.generate.model.config import GENERATION_CONFIG, read_json

NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOO_LARGE: Final = 2**31


@dataclass(frozen=True, slots=True)
class Recommended:
    """The usable values. Unusable ones are ignored, because the user did not write the file."""

    sampling: Mapping[str, int | float]
    """Values by the names of SamplingParams."""
    ignored: tuple[str, ...] = ()
    """One line for each ignored value, with the reason."""


def read_recommended(folder: Path) -> Recommended:
    """Read the file of *folder*; without a file nothing is recommended.

    Raises:
        ConfigError: The file cannot be read or is not a JSON object.
    """
    path = folder / GENERATION_CONFIG
    fields = read_json(path) if path.exists() else {}
    sampling: dict[str, int | float] = {}
    ignored: list[str] = []
    for name in NAMES:
        value = fields.get(name)
        if value is None:
            continue
        try:
            sampling[name] = _checked(name, value)
        except ValueError as error:
            ignored.append(f"{name} is {value!r:.50}: {error}")
    return Recommended(sampling, tuple(ignored))


def _checked(name: str, value: Any) -> int | float:
    """Return *value* as a request might have it.

    Raises:
        ValueError: No request could have it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not -TOO_LARGE < value < TOO_LARGE:
        raise ValueError("expected a number")
    if name == "top_k" and value == -1:
        return 0  # -1 means all, too
    try:
        checked: int | float = getattr(SamplingParams.model_validate({name: value}), name)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    return checked
