"""How a process logs: structlog on stderr, for people on a terminal, as JSON lines otherwise.

Events are snake_case facts and values are fields; a request gets one canonical line, at its end, by the frontend.

A process imports this before anything else that logs: elsewhere the first import of structlog brings rich with it.
"""

from __future__ import annotations

import sys
from typing import Any, BinaryIO, cast

import orjson

sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
try:
    import structlog  # takes rich along, for tracebacks that we do not use: a tenth of what a detokenizer imports
finally:
    if sys.modules["rich"] is None:
        del sys.modules["rich"]


def configure_logging(to: BinaryIO | None = None, **bound: object) -> None:
    """Set structlog up for this process, on stderr or as JSON *to* a file; *bound* is in every line."""
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=False),
    ]
    if to is None and sys.stderr.isatty():
        processors.append(
            structlog.dev.ConsoleRenderer(pad_event_to=24, exception_formatter=structlog.dev.plain_traceback)
        )
        factory: Any = structlog.WriteLoggerFactory(file=sys.stderr)
    else:
        processors += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=lambda value, **_: orjson.dumps(value, default=str)),
        ]
        factory = structlog.BytesLoggerFactory(file=to or sys.stderr.buffer)
    structlog.configure(processors=processors, logger_factory=cast(Any, factory), cache_logger_on_first_use=True)
    structlog.contextvars.bind_contextvars(**bound)
