"""How the engines that one command starts divide their machine: threads and memory of the CPU, or its GPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.errors import ConfigError
from stages.generate.machine import free_memory_bytes
from stages.generate.setup.config import EngineConfig, ShareConfig

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs which a process sees."""
COUNT: Final = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True, slots=True)
class Share:
    """What one engine gets."""

    config: ShareConfig = field(default_factory=ShareConfig)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""


def shares_of(engine: EngineConfig, num_engines: int, flag: str) -> list[Share]:
    """Return the shares of *num_engines* engines, which *flag* asks for. A single one has all.

    On GPUs each rank of each engine gets its own.

    Raises:
        ConfigError: There are fewer GPUs than ranks of all engines.
    """
    if num_engines == 1:
        return [Share()]
    gpus, num_ranks = visible_gpus(engine.device), engine.tp
    if not gpus and engine.device != "cuda":
        free_bytes = free_memory_bytes()
        return [Share(ShareConfig(index, num_engines, free_bytes)) for index in range(num_engines)]
    if len(gpus) < num_engines * num_ranks:
        ranks = f" with {num_ranks} ranks each" if num_ranks > 1 else ""
        raise ConfigError(
            f"{flag} {num_engines}: {num_engines} engines{ranks} need {num_engines * num_ranks} GPUs, but torch sees "
            f"{len(gpus)} here; pass a smaller number, or --device cpu"
        )
    parts = (gpus[first : first + num_ranks] for first in range(0, num_engines * num_ranks, num_ranks))
    return [Share(variables={VISIBLE: ",".join(part)}) for part in parts]


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs that an engine with `--device` *device* may use, by their names in CUDA_VISIBLE_DEVICES.

    torch counts them, in a process of its own: it takes seconds and memory. Without a driver there are none.
    """
    if device == "cpu" or not _has_driver():
        return []
    told = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    count = int(told.stdout or 0)
    given = os.environ.get(VISIBLE, "")
    names = [name.strip() for name in given.split(",")] if given else [str(number) for number in range(count)]
    return names[:count]


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
