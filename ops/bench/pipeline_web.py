"""The CPU time of the web process per streamed token and per request, over real HTTP.

The web process is the one that `minisgl serve` starts, with the real stages of `pipeline_way` behind it. Its clients
are another process. Its CPU time at rest is measured first, and subtracted.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ops.bench import pipeline_clients
from ops.bench.pipeline_clients import DONE, Order
from ops.bench.pipeline_way import PROMPT, PipelineStuck, Way
from ops.bench.processes import started
from pipeline.names import WEB
from web.http.listener import open_listener

REST_S: Final = 2.0
"""How long it is measured at rest."""
WARM_UP: Final = 50


@dataclass(frozen=True, slots=True)
class WebTimes:
    """CPU time of the web process in one run, in microseconds."""

    token_us: float
    """Per streamed token after the first one."""
    stream_us: float
    """Per streamed request of one token."""
    whole_us: float
    """Per request of one token that is not streamed."""


def cpu_s(pid: int) -> float:
    """Return the user and system CPU time of a process with all its threads; /proc has it only in steps of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), as Linux numbers these clocks


class WebProcess:
    """A running web process and its CPU time."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self._port = port
        self.rest_us_per_s = 0.0

    def watch_at_rest(self) -> None:
        """Measure the CPU time without requests."""
        began_s, before_s = time.monotonic(), cpu_s(self._pid)
        time.sleep(REST_S)
        self.rest_us_per_s = (cpu_s(self._pid) - before_s) * 1e6 / (time.monotonic() - began_s)

    def run(self, num_rows: int, num_tokens: int, all_tokens: int, num_requests: int) -> WebTimes:
        """Send *num_requests* of one token, as many streamed, and long streams of *all_tokens* together.

        Raises:
            PipelineStuck: An answer is missing or wrong.
        """
        each = -(-num_requests // num_rows)
        long_ones = -(-all_tokens // (num_rows * num_tokens))
        with _clients(self._port, num_rows) as clients:
            for stream in (False, True):
                self._took_us(clients, num_rows, Order(PROMPT, 8, stream=stream, requests=-(-WARM_UP // num_rows)))
            whole_us = self._took_us(clients, num_rows, Order(PROMPT, 1, stream=False, requests=each))
            stream_us = self._took_us(clients, num_rows, Order(PROMPT, 1, stream=True, requests=each))
            long_us = self._took_us(clients, num_rows, Order(PROMPT, num_tokens, stream=True, requests=long_ones))
        return WebTimes((long_us - stream_us) / (num_tokens - 1), stream_us, whole_us)

    def _took_us(self, clients: subprocess.Popen[bytes], num_rows: int, order: Order) -> float:
        """Return the CPU time per request of *order*."""
        assert clients.stdin is not None and clients.stdout is not None
        began_s, before_s = time.monotonic(), cpu_s(self._pid)
        with contextlib.suppress(BrokenPipeError):  # their last line is read below
            clients.stdin.write(order.line)
            clients.stdin.flush()
        said = clients.stdout.readline().decode(errors="replace").strip()
        if said != DONE:
            raise PipelineStuck(f"the web process did not answer: {said or 'the clients have ended'}")
        rest_us = self.rest_us_per_s * (time.monotonic() - began_s)
        return ((cpu_s(self._pid) - before_s) * 1e6 - rest_us) / (num_rows * order.requests)


@contextlib.contextmanager
def web_process(way: Way) -> Iterator[WebProcess]:
    """Run a web process before the stages of *way* until the block ends; the engine must run."""
    with contextlib.ExitStack() as stack:
        with open_listener("127.0.0.1", 0) as listener:
            port, fd = listener.getsockname()[1], listener.fileno()
            process = stack.enter_context(way.worker(WEB, "--listen-fd", str(fd), fds=(fd,)))
        web = WebProcess(process.pid, port)
        web.watch_at_rest()
        yield web


def _clients(port: int, num_connections: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return started([sys.executable, "-P", pipeline_clients.__file__, str(port), str(num_connections)], None)
