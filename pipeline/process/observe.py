"""How a process logs: structlog on stderr, as text on a terminal, else as JSON lines. No thread dies silently.

JSON lines have all levels. A terminal shows no debug lines, short times, and the slot without its stage.

Events are snake_case facts, values are fields. The frontend logs one line for each request, at its end.

Import this before anything that logs: any other first import of structlog also imports rich.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import MutableMapping
from typing import Any, BinaryIO, Final, cast

import orjson

sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
try:
    import structlog  # it would import rich, a tenth of a detokenizer's imports, for tracebacks that we do not use
finally:
    if sys.modules["rich"] is None:
        del sys.modules["rich"]


def configure_logging(to: BinaryIO | None = None, **bound: object) -> None:
    """Set up structlog for this process, on stderr or as JSON *to* a file. Every line has the fields *bound*."""
    processors: list[Any] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    level = logging.NOTSET
    if to is None and sys.stderr.isatty():
        level = logging.INFO
        processors += [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            _without_stage,
            structlog.dev.ConsoleRenderer(
                pad_event_to=16, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
        factory: Any = structlog.WriteLoggerFactory(file=sys.stderr)
    else:
        processors += [
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=lambda value, **_: orjson.dumps(value, default=str)),
        ]
        factory = structlog.BytesLoggerFactory(file=to or sys.stderr.buffer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=cast(Any, factory),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)


def _without_stage(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Leave out the stage if the slot names it."""
    if "slot" in line:
        line.pop("stage", None)
    return line


EXIT_BROKEN: Final = 1
"""Exit code of a process that an exception of one of its threads ended. The supervisor starts it again."""


def end_with_any_thread() -> None:
    """Let an exception that no thread handles end this process: without one of its threads it only seems to live."""

    def end(broke: threading.ExceptHookArgs) -> None:
        try:
            name = broke.thread.name if broke.thread is not None else ""
            structlog.get_logger().error("thread_broke", thread=name, exc_info=broke.exc_value)
        finally:
            os._exit(EXIT_BROKEN)

    threading.excepthook = end
