"""Flags of the log: where it is, and how long it keeps what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.flags import flag, seconds

DEFAULT_NAMESPACE: Final = "minisgl"
DEFAULT_RETENTION_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where the log is, and what every stage does to it."""

    redis_url: str = flag(
        "--redis-url",
        default="",
        help="redis://, rediss://, unix:// or redis+sentinel:// URL; without it `serve` starts a Valkey of its own",
        secret=True,
    )
    namespace: str = flag("--namespace", default=DEFAULT_NAMESPACE, help="first part of every key in Redis")
    retention_s: float = flag(
        "--retention",
        default=DEFAULT_RETENTION_S,
        parse=seconds,
        help="seconds for which a finished request can still be opened",
    )
    lease_s: float = flag(
        "--lease", default=3.0, parse=seconds, help="seconds of silence after which a worker's slot may be taken over"
    )
