"""Be one phase: `python -m ops.bench.gpu.child MODULE DEVICE SIZE FILE`. Writes each item to FILE at once.

Its exit codes say what became of the phase; the last line of FILE says why.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import orjson

from ops.bench.gpu.phase import Scale, Skip, error_text

SKIPPED: Final = 75
RAISED: Final = 70
WHY: Final = "why"


def main(arguments: Sequence[str]) -> int:
    """Run the phase; return 0, SKIPPED or RAISED."""
    from pipeline.process.parent import request_death_signal

    if sys.platform == "linux":
        request_death_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _leave)  # so that what the phase has started is ended by its own `finally`
    module, device, size, path = arguments
    with open(path, "ab") as file:
        report = Written(file)
        try:
            importlib.import_module(module).run(Scale(device, size), report)
        except Skip as why:
            report.line({WHY: str(why)})
            return SKIPPED
        except Exception as error:
            traceback.print_exc()
            report.line({WHY: error_text(error)})
            return RAISED
    return 0


class Written:
    """A `Report` that writes to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __call__(self, item: str, *, ok: bool | None = None, **figures: object) -> None:
        """See `Report`."""
        texts: dict[str, object] = {name: str(figures.pop(name)) for name in ("error", "skipped") if name in figures}
        self.line(texts | {"item": item, "ok": ok, "figures": figures})

    def line(self, value: Mapping[str, object]) -> None:
        """Write *value*; NaN and infinity become null."""
        options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        self._file.write(orjson.dumps(value, default=_plain, option=options))
        self._file.flush()


def _plain(value: Any) -> object:
    """Return what JSON lacks as it has it: torch's numbers as numbers, what is unknown as text."""
    with contextlib.suppress(Exception):  # an array of several, or no number at all
        return value.item()
    return str(value)


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread or a library's exit handler that hangs must not hold what is already measured
