"""As a script, it measures what journals and an archive cost: CPU time of all processes and Redis per output token.

    PYTHONPATH=tests:. .venv/bin/python tests/keeping_cost.py [--model FOLDER] [--pairs 5] [--tokens 128] ..

runs three servers: without journals, with them, and with an archive too. Each in turn answers the same requests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from servers import Server, serve
from streams import Stream

from ops.bench.processes import tree_cpu_s

WITHOUT, JOURNAL, ARCHIVE = "without", "journal", "archive"
PAIRS: Final[Mapping[str, str]] = {JOURNAL: WITHOUT, ARCHIVE: JOURNAL}
"""What is compared -> with what."""
SETTLED_S: Final = 2.5
"""An archiver writes what ended up to a second ago, and statuses are said each second."""


def cpu_us_per_token(server: Server, texts: Sequence[str], num_tokens: int, **fields: Any) -> float:
    """Let *server* answer *texts*, all at once, with *num_tokens* each; return microseconds of CPU per output token.

    *fields*: of each request.
    """
    before_s = tree_cpu_s(server.command.process.pid)
    streams = [Stream(server, text, max_tokens=num_tokens, **fields) for text in texts]
    assert {stream.answer[1] for stream in streams} == {"length"}
    time.sleep(SETTLED_S)
    return (tree_cpu_s(server.command.process.pid) - before_s) * 1e6 / (len(texts) * num_tokens)


def main() -> int:
    """Measure, and write a line for each round and for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    measured: dict[str, list[float]] = {WITHOUT: [], JOURNAL: [], ARCHIVE: []}
    with tempfile.TemporaryDirectory(prefix="minisgl-keeping-") as folder, ExitStack() as stack:
        flags = {WITHOUT: ["--journal-bytes", "0"], JOURNAL: [], ARCHIVE: ["--archive", f"{folder}/kept"]}
        servers = {name: stack.enter_context(serve(Path(folder) / name, *model, *flags[name])) for name in measured}
        for number in range(options.pairs + 1):
            texts = [f"Tell me story number {number * options.requests + each}." for each in range(options.requests)]
            order = list(servers) if number % 2 else list(reversed(servers))
            now = {name: cpu_us_per_token(servers[name], texts, options.tokens) for name in order}
            if number:  # the first round warms up
                for name, value in now.items():
                    measured[name].append(value)
                sys.stdout.write("  ".join(f"{name} {now[name]:.1f} us" for name in measured) + "\n")
                sys.stdout.flush()
    for name, other in PAIRS.items():
        ratios = sorted(mine / its for mine, its in zip(measured[name], measured[other], strict=True))
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        sys.stdout.write(f"{name} / {other}: median {median(ratios):.3f}, {spread}, {len(ratios)} pairs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
