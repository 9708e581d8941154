"""As a script, it measures what an engine loses to another program, and what idle processes cost.

    PYTHONPATH=tests:. .venv/bin/python tests/support/busy_core.py [--rounds 3] [--requests 32] [--tokens 128]

A server of the 95 M model answers the same number of requests, in turn with all cores free and with one core taken by a
busy loop. Then it looks at the CPU time of each thread of all its processes while no request is there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from support.servers import Server, serve

from ops.bench.models import SHAPES, write
from ops.bench.report import cpu_model

IDLE_S: Final = 20.0
SETTLE_S: Final = 3.0
LOOP: Final = "while True: pass"


@contextlib.contextmanager
def busy_loop(core: int) -> Iterator[None]:
    """Keep *core* busy."""
    loop = subprocess.Popen([sys.executable, "-c", LOOP])
    try:
        os.sched_setaffinity(loop.pid, {core})
        yield
    finally:
        loop.kill()
        loop.wait()


def tokens_per_s(server: Server, first: int, num_requests: int, num_tokens: int) -> float:
    """Answer greedy requests at once; none has a prompt that came before."""

    def ask(number: int) -> None:
        body: dict[str, Any] = {"prompt": f"Tell me story number {number}.", "max_tokens": num_tokens}
        response = httpx.post(
            f"{server.url}/v1/completions", json=body | {"temperature": 0, "ignore_eos": True}, timeout=600
        )
        assert response.json()["usage"]["completion_tokens"] == num_tokens

    began_s = time.monotonic()
    with ThreadPoolExecutor(num_requests) as threads:
        list(threads.map(ask, range(first, first + num_requests)))
    return num_requests * num_tokens / (time.monotonic() - began_s)


def busiest_threads(server: Server) -> list[tuple[float, str]]:
    """Return which share of a core each thread of the server and its Redis uses, largest first, and whose it is."""
    processes = [process for process in server.command.processes() if process.is_running()]

    def used() -> dict[tuple[int, int], float]:
        return {
            (process.pid, thread.id): thread.user_time + thread.system_time
            for process in processes
            for thread in process.threads()
        }

    names = {process.pid: " ".join([process.name(), *process.cmdline()[2:4]]) for process in processes}
    before = used()
    time.sleep(IDLE_S)
    spent = {thread: (after - before.get(thread, 0.0)) / IDLE_S for thread, after in used().items()}
    return sorted(((share, names[pid]) for (pid, _), share in spent.items()), reverse=True)


def main() -> int:
    """Measure, and write a line for each round, the medians, and the busiest idle threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    free, beside = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="minisgl-busy-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write(SHAPES["95m"], model)
        with serve(Path(folder) / "server", "--model", str(model)) as server:
            tokens_per_s(server, 0, options.requests, options.tokens)  # warms up
            for number in range(1, options.rounds + 1):
                first = 2 * number * options.requests
                free.append(tokens_per_s(server, first, options.requests, options.tokens))
                with busy_loop(core):
                    beside.append(tokens_per_s(server, first + options.requests, options.requests, options.tokens))
                sys.stdout.write(f"free {free[-1]:.0f} tokens/s  one core busy {beside[-1]:.0f} tokens/s\n")
                sys.stdout.flush()
            time.sleep(SETTLE_S)
            idle = busiest_threads(server)
    share = median(beside) / median(free)
    sys.stdout.write(
        f"{cpu_model()}: medians {median(free):.0f} and {median(beside):.0f} tokens/s, {100 * share:.0f} % of the "
        "speed with all cores\n"
    )
    for used, name in idle[:5]:
        sys.stdout.write(f"idle: {100 * used:.2f} % of a core, {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
