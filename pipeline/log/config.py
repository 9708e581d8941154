"""Flags of the log: where it is, and how long it keeps what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.flags import flag, seconds, size_or_0

DEFAULT_NAMESPACE: Final = "minisgl"
DEFAULT_RETENTION_S: Final = 900.0
DEFAULT_RESPONSE_RETENTION_S: Final = 86_400.0
DEFAULT_JOURNAL_BYTES: Final = 32 << 20
LEAST_JOURNAL_BYTES: Final = 1 << 20
DEFAULT_STEAL_AFTER_S: Final = 2.0
"""See `take`."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where the log is, and what every stage does to it."""

    redis_url: str = flag(
        "--redis-url",
        default="",
        help=(
            "Redis of the log: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// [`serve` starts an "
            "embedded Valkey]"
        ),
        secret=True,
    )
    namespace: str = flag("--namespace", default=DEFAULT_NAMESPACE, help="prefix of every key in Redis")
    retention_s: float = flag(
        "--retention",
        default=DEFAULT_RETENTION_S,
        parse=seconds,
        help="seconds for which a finished request stays readable",
    )
    response_retention_s: float = flag(
        "--response-retention",
        default=DEFAULT_RESPONSE_RETENTION_S,
        parse=seconds,
        help="seconds for which a finished response of /v1/responses stays readable, unless it has `store: false`",
    )
    journal_bytes: int = flag(
        "--journal-bytes",
        default=DEFAULT_JOURNAL_BYTES,
        parse=size_or_0(LEAST_JOURNAL_BYTES),
        help="most bytes of each engine's last steps that Redis keeps, such as 32M; 0: it keeps none",
    )
    lease_s: float = flag(
        "--lease",
        default=3.0,
        parse=seconds,
        help="seconds without a sign of life after which another worker may take over",
    )
