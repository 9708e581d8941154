"""As a script, it measures what open tabs of /pipeline cost: CPU time of all processes and Redis per output token.

    PYTHONPATH=tests:. python tests/support/pages_cost.py [--model FOLDER] [--pairs 20] [--tabs 5] [--streams 16] ..

lets one server stream all the time, opens and closes the tabs in turn, and compares each stretch of some seconds with
the one beside it: what a machine does in an hour changes more than the tabs cost. A tab is what the page asks for: the
list of requests once, which is not measured, and the stream of pictures. Without a browser: its CPU time is not ours.
The web process and Redis serve the tabs. They are also told alone, because the engine varies more than the tabs cost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import httpx
from support.servers import Server, eventually, serve

from ops.bench.models import SHAPES, write
from pipeline.events import Cancelled, SamplingParams, Submitted, new_uid
from pipeline.names import WEB

ALONE, WATCHED = "alone", "watched"
ROUND: Final = (ALONE, WATCHED, WATCHED, ALONE)
"""The order of two pairs: what changes steadily falls out."""
LIST: Final = "/v1/requests?limit=200"
PICTURES: Final = "/v1/pipeline/events"
CERTAINTY: Final = 0.95


class Reader:
    """A client in a thread that reads one answer after the other, and counts events and bytes, until it is closed."""

    def __init__(self) -> None:
        self.num_events = self.num_bytes = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def _read(self, response: httpx.Response) -> None:
        for piece in response.iter_raw():  # lines would take longer, and a reader that is busy slows the engine
            self.num_events += piece.count(b"data: ")
            self.num_bytes += len(piece)
            if self._closed.is_set():
                return

    def close(self) -> None:
        """Leave at the next piece."""
        self._closed.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "nothing comes"


class Tab(Reader):
    """One open tab."""

    def __init__(self, server: Server) -> None:
        self._url = server.url
        super().__init__()

    def _run(self) -> None:
        httpx.get(self._url + LIST, timeout=60).raise_for_status()
        with httpx.stream("GET", self._url + PICTURES, timeout=60) as response:
            self._read(response)


class Asker(Reader):
    """A client that always has one stream open. Each event but the last two of a stream brings a token."""

    def __init__(self, server: Server, number: int, num_tokens: int) -> None:
        self._url, self._number, self._num_tokens = server.url, number, num_tokens
        super().__init__()

    def _run(self) -> None:
        first = self._num_tokens * (1 + self._number % 8) // 8  # so that they do not all end and begin at once
        body = {"prompt": f"Tell me story number {self._number}.", "stream": True, "ignore_eos": True}
        while not self._closed.is_set():
            asked = body | {"max_tokens": first}
            with httpx.stream("POST", f"{self._url}/v1/completions", json=asked, timeout=120) as response:
                response.raise_for_status()
                self._read(response)
            first = self._num_tokens


@contextmanager
def closing_all(readers: Iterable[Reader]) -> Iterator[list[Reader]]:
    """Give readers that have begun, and close them."""
    running = list(readers)
    try:
        eventually(lambda: all(reader.num_events for reader in running), "all have begun", 120)
        yield running
    finally:
        for reader in running:
            reader.close()


@dataclass(frozen=True)
class Costs:
    """The processes of a server, and what they have computed."""

    everything: tuple[int, ...]
    """Process ids of all, Redis too."""
    serving: tuple[int, ...]
    """Those of the web process and of Redis."""

    @classmethod
    def of(cls, server: Server) -> Costs:
        family = server.command.processes()
        serving = [*server.command.workers(WEB), *(each for each in family if each.name().endswith("-server"))]
        return cls(tuple(each.pid for each in family), tuple(each.pid for each in serving))

    def read_us(self) -> tuple[float, float]:
        """Return the CPU time of all processes so far, and of those that serve."""
        each = {pid: cpu_ns(pid) / 1000 for pid in self.everything}
        return sum(each.values()), sum(each[pid] for pid in self.serving)


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process so far, to the nanosecond; /proc counts hundredths of a second."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def stretch(costs: Costs, askers: Sequence[Reader], seconds: float) -> tuple[float, float]:
    """Return the CPU time of an output token in the next *seconds*, and that of what serves, in microseconds."""
    tokens, (all_us, serving_us) = sum(asker.num_events for asker in askers), costs.read_us()
    time.sleep(seconds)
    tokens, (all_after, serving_after) = sum(asker.num_events for asker in askers) - tokens, costs.read_us()
    return (all_after - all_us) / tokens, (serving_after - serving_us) / tokens


def told(values: Sequence[float]) -> str:
    """Return the median, the middle half, and between which values the true median is with `CERTAINTY`."""
    ordered = sorted(values)
    low, _, high = quantiles(ordered, n=4)
    outside, rank = 0.0, 0  # how probable it is that the true median is below the value of this rank
    while 2 * (outside + comb(len(ordered), rank) / 2 ** len(ordered)) <= 1 - CERTAINTY:
        outside += comb(len(ordered), rank) / 2 ** len(ordered)
        rank += 1
    sure = f"{ordered[rank - 1]:+.2%} to {ordered[-rank]:+.2%}" if rank else "unknown: too few pairs"
    return f"median {median(ordered):+.2%}, half {low:+.2%} to {high:+.2%}; {CERTAINTY:.0%} sure: {sure}"


def main() -> int:
    """Measure, and write a line for each pair and for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="without one: random weights of the shape of 95 M")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tabs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=320, help="of each answer")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a stretch")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before each stretch that are not measured")
    parser.add_argument("--ended", type=int, default=0, help="so many requests are in the log from the start")
    options = parser.parse_args()
    more, served = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="minisgl-pages-") as folder, ExitStack() as stack:
        model = Path(options.model) if options.model else Path(folder) / "model"
        if not options.model:
            model.mkdir()
            write(SHAPES["95m"], model)
        server = stack.enter_context(serve(Path(folder) / "server", "--model", str(model)))
        fill(server, options.ended)
        costs = Costs.of(server)
        askers = stack.enter_context(
            closing_all(Asker(server, number, options.tokens) for number in range(options.streams))
        )
        stretch(costs, askers, options.seconds)  # warms up
        for number in range(0, 2 * options.pairs, 2):
            now, said = {}, ""
            for name in ROUND[number % 4 : number % 4 + 2]:
                with closing_all(Tab(server) for _ in range(options.tabs if name == WATCHED else 0)) as tabs:
                    time.sleep(options.settle)
                    now[name] = stretch(costs, askers, options.seconds)
                    said = "".join(f"  {tab.num_events} pictures, {tab.num_bytes} bytes" for tab in tabs[:1]) or said
            (alone, alone_serving), (watched, watched_serving) = now[ALONE], now[WATCHED]
            more.append(watched / alone - 1)
            served.append((watched_serving - alone_serving) / alone)
            of_each = (f"{name} {both[0]:.0f} us, of web and Redis {both[1]:.1f} us" for name, both in now.items())
            sys.stdout.write("  ".join(of_each) + f"{said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{options.pairs} pairs. CPU time of an output token, {WATCHED} against {ALONE}: {told(more)}\n")
    sys.stdout.write(f"web and Redis, of all CPU time: {told(served)}\n")
    return 0


def fill(server: Server, number: int) -> None:
    """Put requests into the log that ended before anybody looks."""
    with server.log() as log:
        for _ in range(number):
            uid, sampling = new_uid(), SamplingParams(max_tokens=1)
            log.submit(uid, [Submitted(endpoint="/v1/completions", frontend="", prompt="Hi", sampling=sampling)])
            log.end(uid, Cancelled(by="client"), frontend="")


if __name__ == "__main__":
    sys.exit(main())
