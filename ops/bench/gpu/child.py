"""Be one phase: `python -m ops.bench.gpu.child MODULE DEVICE SIZE FILE`. Writes each item to FILE at once.

Its exit codes say what became of the phase; the last line of FILE says why.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Final

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
    with open(path, "a", encoding="utf-8") as file:
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

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __call__(self, item: str, *, ok: bool | None = None, **figures: object) -> None:
        """See `Report`."""
        texts: dict[str, object] = {name: str(figures.pop(name)) for name in ("error", "skipped") if name in figures}
        self.line(texts | {"item": item, "ok": ok, "figures": plain(figures)})

    def line(self, value: Mapping[str, object]) -> None:
        self._file.write(json.dumps(value, allow_nan=False) + "\n")
        self._file.flush()


def plain(value: object) -> object:
    """Return *value* as JSON has it: numpy's and torch's numbers as numbers, what is no number or unknown as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    with contextlib.suppress(Exception):  # an array of several, or no number at all
        return plain(value.item())  # type: ignore[attr-defined]
    return str(value)


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread or a library's exit handler that hangs must not hold what is already measured
