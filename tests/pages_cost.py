"""As a script, it measures what open tabs of /pipeline cost: CPU time of all processes and Redis per output token.

    PYTHONPATH=tests:. .venv/bin/python tests/pages_cost.py [--model FOLDER] [--pairs 5] [--tabs 5] [--requests 16] ..

lets one server answer the same number of requests with the tabs and without them, in turn. A tab is what the page asks
for: the list of requests once, and the stream of pictures. Without a browser: its CPU time is not ours. The web
process and Redis serve the tabs. They are also told alone, because the engine varies more than the tabs cost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import httpx
from keeping_cost import cpu_us_per_token
from servers import Server, eventually, serve

from ops.bench.models import SHAPES, write
from pipeline.events import Cancelled, SamplingParams, Submitted, new_uid
from pipeline.names import WEB

ALONE, WATCHED = "alone", "watched"
LIST: Final = "/v1/requests?limit=200"
PICTURES: Final = "/v1/pipeline/events"


class Tab:
    """One open tab. It reads pictures until it is closed, and counts them."""

    def __init__(self, server: Server) -> None:
        self.num_pictures = self.num_bytes = 0
        self._url = server.url
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="tab", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        httpx.get(self._url + LIST, timeout=60).raise_for_status()
        with httpx.stream("GET", self._url + PICTURES, timeout=60) as response:
            for piece in response.iter_raw():  # lines would take longer, and a reader that is busy slows the engine
                self.num_pictures += piece.count(b"data: ")
                self.num_bytes += len(piece)
                if self._closed.is_set():
                    return

    def close(self) -> None:
        """Leave at the next line."""
        self._closed.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "no picture comes"


@contextmanager
def opened(server: Server, number: int) -> Iterator[list[Tab]]:
    """Give so many tabs that have their first picture."""
    tabs = [Tab(server) for _ in range(number)]
    try:
        eventually(lambda: all(tab.num_pictures for tab in tabs), "all tabs have a picture")
        yield tabs
    finally:
        for tab in tabs:
            tab.close()


def main() -> int:
    """Measure, and write a line for each pair and for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="without one: random weights of the shape of 95 M")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tabs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ended", type=int, default=0, help="so many requests are in the log from the start")
    options = parser.parse_args()
    ratios, more = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="minisgl-pages-") as folder, ExitStack() as stack:
        model = Path(options.model) if options.model else Path(folder) / "model"
        if not options.model:
            model.mkdir()
            write(SHAPES["95m"], model)
        server = stack.enter_context(serve(Path(folder) / "server", "--model", str(model)))
        fill(server, options.ended)
        for number in range(options.pairs + 1):
            texts = [f"Tell me story number {number * options.requests + each}." for each in range(options.requests)]
            now, served, said = dict[str, float](), dict[str, float](), ""
            for name in (ALONE, WATCHED) if number % 2 else (WATCHED, ALONE):
                with opened(server, options.tabs if name == WATCHED else 0) as tabs:
                    before_s = serving_cpu_s(server)
                    now[name] = cpu_us_per_token(server, texts, options.tokens)
                    served[name] = (serving_cpu_s(server) - before_s) * 1e6 / (options.requests * options.tokens)
                    said += "".join(f"  {tab.num_pictures} pictures, {tab.num_bytes} bytes" for tab in tabs[:1])
            if number:  # the first round warms up
                ratios.append(now[WATCHED] / now[ALONE])
                more.append((served[WATCHED] - served[ALONE]) / now[ALONE])
                of_each = (f"{name} {now[name]:.1f} us, of web and Redis {served[name]:.1f} us" for name in now)
                sys.stdout.write("  ".join(of_each) + f"{said}\n")
                sys.stdout.flush()
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    sys.stdout.write(f"{WATCHED} / {ALONE}: median {median(ratios):.3f}, {spread}, {len(ratios)} pairs\n")
    spread = f"{min(more):.2%} to {max(more):.2%}"
    sys.stdout.write(f"of that, web and Redis: median {median(more):+.2%} of all, {spread}\n")
    return 0


def serving_cpu_s(server: Server) -> float:
    """Return the CPU time of the web process and of Redis so far."""
    redis = [process for process in server.command.processes() if process.name().endswith("-server")]
    times = [process.cpu_times() for process in (*server.command.workers(WEB), *redis)]
    return float(sum(each.user + each.system for each in times))


def fill(server: Server, number: int) -> None:
    """Put requests into the log that ended before anybody looks."""
    with server.log() as log:
        for _ in range(number):
            uid, sampling = new_uid(), SamplingParams(max_tokens=1)
            log.submit(uid, [Submitted(endpoint="/v1/completions", frontend="", prompt="Hi", sampling=sampling)])
            log.end(uid, Cancelled(by="client"), frontend="")


if __name__ == "__main__":
    sys.exit(main())
