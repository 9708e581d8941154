"""Flags of processes: the model of a worker, the number of workers, and the folder for a server's files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.flags import at_least, flag, seconds_or_0, yes_or_no


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that is served."""

    model: str = flag(
        "--model",
        "--model-path",
        default="",
        help=(
            "folder or GGUF file of the model; owner/name[@revision] on the Hugging Face hub, for a GGUF file there "
            "with :FILE.gguf or a type as in :Q4_K_M; or smollm2, which is downloaded [the demo model]"
        ),
    )
    tokenizer: str = flag(
        "--tokenizer",
        default="",
        help=(
            "folder, or owner/name[@revision] on the Hugging Face hub, with the tokenizer to use for a GGUF file [the "
            "file's own]"
        ),
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How many workers `stage` starts, or the slot of a single one."""

    replicas: int = flag(
        "--replicas", default=1, parse=at_least(1), help="number of workers of this stage to start here"
    )
    slot: int | None = flag(
        "--slot",
        default=None,
        parse=at_least(0),
        help="run as a single worker in this process, in this slot if it is free",
    )
    wait_for_redis_s: float = flag(
        "--wait-for-redis",
        default=0.0,
        parse=seconds_or_0,
        help="seconds for which a stage waits at its start while Redis cannot be reached [0: it ends with exit code 2]",
    )
    ready_file: str = flag(
        "--ready-file",
        default="",
        help="file that is there while all workers that were started here are ready, for probes of containers",
    )


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where files are kept, and what may be lost of them."""

    data_dir: str = flag(
        "--data-dir", default="", help="folder for the data of the embedded server [~/.local/state/minisgl/<port>]"
    )
    repair: bool = flag(
        "--repair",
        default=False,
        parse=yes_or_no,
        help="start even if damage costs more than the last 64 KB of the embedded server's data; a copy is kept",
    )


def data_folder(data_dir: str, port: int) -> Path:
    """Return the folder of --data-dir, or the default folder of the server at *port*."""
    return Path(data_dir).expanduser().absolute() if data_dir else state_folder() / str(port)


def state_folder() -> Path:
    """Return our folder in the user's folder for the state of programs (XDG_STATE_HOME)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "minisgl"
