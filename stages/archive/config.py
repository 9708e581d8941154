"""Flags of the archive stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.flags import age_or_0, flag, size_or_0, yes_or_no
from pipeline.log.config import LogConfig
from pipeline.process.config import WorkerConfig

DEFAULT_RETAIN_S: Final = 30 * 86400.0
DEFAULT_BYTES: Final = 50 << 30


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """Where the archive is, and how much of it is kept."""

    to: str = flag(
        "--to",
        default="",
        help="folder of the archive, the same for all archivers of a namespace; required, except with --leave",
    )
    retain_s: float = flag(
        "--retain",
        default=DEFAULT_RETAIN_S,
        parse=age_or_0,
        help="age at which files are removed, such as 12h or 30d; 0: never [30d]",
    )
    max_bytes: int = flag(
        "--max-bytes",
        default=DEFAULT_BYTES,
        parse=size_or_0(1 << 20),
        help="size above which the oldest files are removed, such as 50G; 0: no limit [50G]",
    )
    leave: bool = flag(
        "--leave",
        default=False,
        parse=yes_or_no,
        help="end the archiving of the namespace instead; the files stay",
    )

    @property
    def folder(self) -> Path:
        return Path(self.to).expanduser().absolute()


@dataclass(frozen=True, slots=True)
class ArchiveConfig:
    """The flags of `minisgl stage archive`."""

    worker: WorkerConfig
    log: LogConfig
    files: FilesConfig
