"""Flags that several tools share: how to find a running server, and how to print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.flags import flag, port_number, seconds, yes_or_no
from pipeline.log.config import DEFAULT_NAMESPACE
from pipeline.process.config import data_folder
from web.config import DEFAULT_PORT


@dataclass(frozen=True, slots=True)
class ConnectConfig:
    """Where a tool finds the log of a server that runs."""

    redis_url: str = flag(
        "--redis-url", default="", help="Redis of the server [its embedded one, on this machine]", secret=True
    )
    data_dir: str = flag(
        "--data-dir",
        default="",
        help=("data folder of the server, if it has an embedded Redis [~/.local/state/minisgl/<port>]"),
    )
    port: int = flag(
        "--port", default=DEFAULT_PORT, parse=port_number, help="port of the server; its data folder has this name"
    )
    namespace: str = flag("--namespace", default=DEFAULT_NAMESPACE, help="first part of every key in Redis")

    @property
    def folder(self) -> Path:
        """Where the server keeps its embedded Redis."""
        return data_folder(self.data_dir, self.port)


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """How long the server keeps what has ended."""

    retention_s: float | None = flag(
        "--retention", default=None, parse=seconds, help="the server's --retention [its workers tell it]"
    )


@dataclass(frozen=True, slots=True)
class ArchivedConfig:
    """Where requests are that Redis does not keep any more."""

    archive: str = flag(
        "--archive",
        default="",
        help="folder of the archive, from which requests are read that Redis no longer has [none]",
    )


@dataclass(frozen=True, slots=True)
class PrintConfig:
    """How a tool prints."""

    as_json: bool = flag("--json", default=False, parse=yes_or_no, help="print JSON, for programs")
