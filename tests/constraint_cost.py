"""As a script, it measures what constraints cost: CPU time of all processes and Redis per output token.

    PYTHONPATH=tests:. .venv/bin/python tests/constraint_cost.py [--vocabulary 152000] [--pairs 5] [--tokens 128] ..

makes a model of the shape of the 95 M benchmark with a vocabulary of that size, and lets it answer requests that are
bound to a JSON schema and requests that are not, in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from keeping_cost import cpu_us_per_token
from servers import serve

from ops.bench.models import SHAPES, write

SCHEMA: Final = {"type": "array", "items": {"type": "string"}, "minItems": 4096}
"""No answer of some hundred tokens is over, so all have the same length."""
FREE, BOUND = "free", "bound"
FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    FREE: {"ignore_eos": True},
    BOUND: {"response_format": {"type": "json_schema", "json_schema": {"name": "texts", "schema": SCHEMA}}},
}


def main() -> int:
    """Measure, and write a line for each pair and for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="minisgl-constraint-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write(replace(SHAPES["95m"], vocab_size=options.vocabulary), model)
        with serve(Path(folder) / "server", "--model", str(model)) as server:
            for number in range(options.pairs + 1):
                first = number * options.requests
                texts = [f"Tell me story number {first + each}." for each in range(options.requests)]
                order = (FREE, BOUND) if number % 2 else (BOUND, FREE)
                now = {name: cpu_us_per_token(server, texts, options.tokens, **FIELDS[name]) for name in order}
                if number:  # the first round warms up
                    ratios.append(now[BOUND] / now[FREE])
                    sys.stdout.write(f"{FREE} {now[FREE]:.1f} us  {BOUND} {now[BOUND]:.1f} us\n")
                    sys.stdout.flush()
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    sys.stdout.write(f"{BOUND} / {FREE}: median {median(ratios):.3f}, {spread}, {len(ratios)} pairs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
