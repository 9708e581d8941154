"""As a script, it measures what journals and an archive cost: CPU time of all processes and Redis per output token.

    PYTHONPATH=tests:. .venv/bin/python tests/support/keeping_cost.py [--model FOLDER] [--pairs 5] [--tokens 128] ..

runs three servers: without journals, with them, and with an archive too. Each in turn answers the same requests,
seconds after the other. All but the engine is also told alone: the engine's forward passes vary more than journals and
archive cost. Engines have one thread (--threads): several wait for each other in loops, whose CPU time varies.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from support.servers import Server, serve
from support.streams import Stream

from ops.bench.processes import tree_of
from pipeline.names import GENERATE

WITHOUT, JOURNAL, ARCHIVE = "without", "journal", "archive"
PAIRS: Final[Mapping[str, str]] = {JOURNAL: WITHOUT, ARCHIVE: JOURNAL}
"""What is compared -> with what."""
SCHEDULED: Final = 2
"""Last bits of the clock of a process: the time for which its threads ran (`CPUCLOCK_SCHED`; the rest is ~pid)."""
SETTLED_S: Final = 2.5
"""An archiver writes what ended up to a second ago, and statuses are said each second."""


def cpu_us_per_token(server: Server, texts: Sequence[str], num_tokens: int, **fields: Any) -> float:
    """Let *server* answer *texts*, all at once, with *num_tokens* each; return microseconds of CPU per output token.

    *fields*: of each request.
    """
    before_s = cpu_s(tree_of(server.command.process.pid))
    streams = [Stream(server, text, max_tokens=num_tokens, **fields) for text in texts]
    assert {stream.answer[1] for stream in streams} == {"length"}
    time.sleep(SETTLED_S)
    return (cpu_s(tree_of(server.command.process.pid)) - before_s) * 1e6 / (len(texts) * num_tokens)


def beside_engines_s(server: Server) -> float:
    """Return the CPU time of all processes but the engines, and of Redis, so far."""
    engines = {process.pid for process in server.command.workers(GENERATE)}
    return cpu_s(pid for pid in tree_of(server.command.process.pid) if pid not in engines)


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes. Linux counts it in nanoseconds; /proc tells whole hundredths of a second."""
    return sum(time.clock_gettime(~pid << 3 | SCHEDULED) for pid in pids)


def main() -> int:
    """Measure, and write a line for each round and for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    model = ["--threads", str(options.threads), *(["--model", options.model] if options.model else [])]
    measured: dict[str, list[float]] = {WITHOUT: [], JOURNAL: [], ARCHIVE: []}
    beside: dict[str, list[float]] = {name: [] for name in measured}
    with tempfile.TemporaryDirectory(prefix="minisgl-keeping-") as folder, ExitStack() as stack:
        flags = {WITHOUT: ["--journal-bytes", "0"], JOURNAL: [], ARCHIVE: ["--archive", f"{folder}/kept"]}
        servers = {name: stack.enter_context(serve(Path(folder) / name, *model, *flags[name])) for name in measured}
        for number in range(options.pairs + 1):
            texts = [f"Tell me story number {number * options.requests + each}." for each in range(options.requests)]
            order = list(servers) if number % 2 else list(reversed(servers))
            now, others = dict[str, float](), dict[str, float]()
            for name in order:
                before_s = beside_engines_s(servers[name])
                now[name] = cpu_us_per_token(servers[name], texts, options.tokens)
                others[name] = (beside_engines_s(servers[name]) - before_s) * 1e6 / (len(texts) * options.tokens)
            if number:  # the first round warms up
                for name in measured:
                    measured[name].append(now[name])
                    beside[name].append(others[name])
                said = (f"{name} {now[name]:.1f} us, beside the engine {others[name]:.1f} us" for name in measured)
                sys.stdout.write("  ".join(said) + "\n")
                sys.stdout.flush()
    for name, other in PAIRS.items():
        ratios = sorted(mine / its for mine, its in zip(measured[name], measured[other], strict=True))
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        sys.stdout.write(f"{name} / {other}: median {median(ratios):.3f}, {spread}, {len(ratios)} pairs\n")
        of_all = median(measured[other])
        more = sorted((mine - its) / of_all for mine, its in zip(beside[name], beside[other], strict=True))
        spread = f"{more[0]:+.2%} to {more[-1]:+.2%}"
        sys.stdout.write(f"beside the engine: median {median(more):+.2%} of all, {spread}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
