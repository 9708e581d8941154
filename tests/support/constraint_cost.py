"""As a script, it measures what constraints or sampling cost: CPU time of all processes and Redis per output token.

    PYTHONPATH=tests:. python tests/support/constraint_cost.py [--of sampled] [--vocabulary 152000] [--pairs 5] ..

makes a model of the shape of the 95 M benchmark with a vocabulary of that size, and lets it answer greedy requests that
are free and requests that are bound to a JSON schema, or sampled, in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from support.keeping_cost import SETTLED_S, cpu_us_per_token
from support.servers import serve

from ops.bench.models import SHAPES, write

SCHEMA: Final = {"type": "array", "items": {"type": "string"}, "minItems": 4096}
"""No answer of some hundred tokens is over, so all have the same length."""
FREE, BOUND, SAMPLED = "free", "bound", "sampled"
FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    FREE: {"ignore_eos": True},
    BOUND: {"response_format": {"type": "json_schema", "json_schema": {"name": "texts", "schema": SCHEMA}}},
    SAMPLED: {"ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50},
}


def main() -> int:
    """Measure, and write a line for each pair and for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=(BOUND, SAMPLED), default=BOUND)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    ratios, rates = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="minisgl-constraint-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write(replace(SHAPES["95m"], vocab_size=options.vocabulary), model)
        with serve(Path(folder) / "server", "--model", str(model)) as server:
            for number in range(options.pairs + 1):
                first = number * options.requests
                texts = [f"Tell me story number {first + each}." for each in range(options.requests)]
                now, per_s = dict[str, float](), dict[str, float]()
                for name in (FREE, options.of) if number % 2 else (options.of, FREE):
                    began_s = time.monotonic()
                    now[name] = cpu_us_per_token(server, texts, options.tokens, **FIELDS[name])
                    took_s = time.monotonic() - began_s - SETTLED_S
                    per_s[name] = options.requests * options.tokens / took_s
                if number:  # the first round warms up
                    ratios.append(now[options.of] / now[FREE])
                    rates.append(per_s[options.of] / per_s[FREE])
                    of_each = (f"{name} {now[name]:.1f} us, {per_s[name]:.1f} tokens/s" for name in (FREE, options.of))
                    sys.stdout.write("  ".join(of_each) + "\n")
                    sys.stdout.flush()
    for what, values in (("CPU time", ratios), ("tokens/s", rates)):
        spread = f"{min(values):.3f} to {max(values):.3f}"
        line = f"{what}, {options.of} / {FREE}: median {median(values):.3f}, {spread}, {len(values)} pairs\n"
        sys.stdout.write(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
