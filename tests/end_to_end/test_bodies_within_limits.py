"""Whatever a body within the limits asks for: it is answered, takes little memory, ends no worker, and the streams
beside it say what they say alone.

Nothing is measured by the clock: what counts are bytes, statuses, processes, tokens and CPU time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.bodies_within_limits import ALONE, Drawn, any_body, body
from support.selection import by_night, rest_at_night
from support.servers import Server
from support.streams import Stream, ask_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(by_night(300, 3600)), pytest.mark.xdist_group("plain_server")]

STAGES = ("web", "tokenize")
"""Whose memory is looked at."""
MOST_TIMES = 10
MOST_MORE_BYTES = 40 << 20
MOST_CPU_S = {"web": 5.0, "tokenize": 21.0, "detokenize": 3.0}
"""The tokenizer may take 10 s for a template and 10 s for an encoding (`--tokenize-timeout`)."""
MOST_CPU_S_A_TOKEN = {"web": 100e-6, "tokenize": 0.0, "detokenize": 100e-6}
"""More for each token of the answers."""
SHARE = by_night(0.25, 1.0)
DRAWN = by_night(4, 300)
SEED = 34
TOKENS = by_night(150, 600)
"""Of each stream."""
REFUSED = (400, 413)
BUSY = (429, 503)
TOO_SLOW = "tokenizer_timeout"
"""The code of the one error with which a tokenizer may be replaced."""


class Work:
    """The processes of a server, and what they take."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before: dict[str, int] = {}
        self._cpu_s: dict[str, float] = {}
        self.pids = self._pids()

    def _pids(self) -> dict[str, list[int]]:
        stages = ("web", "tokenize", "generate", "detokenize")
        return {stage: [process.pid for process in self._server.command.workers(stage)] for stage in stages}

    def begin(self) -> None:
        """Forget the largest sizes so far."""
        for stage in STAGES:
            (pid,) = self.pids[stage]
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            self._before[stage] = psutil.Process(pid).memory_info().rss
        self._cpu_s = self._cpu()

    def _cpu(self) -> dict[str, float]:
        times = {stage: psutil.Process(self.pids[stage][0]).cpu_times() for stage in MOST_CPU_S}
        return {stage: time.user + time.system for stage, time in times.items()}

    def cpu_s(self) -> Mapping[str, float]:
        """Return how much CPU time each stage has taken since then, with what the streams beside it took."""
        now = self._cpu()
        return {stage: now[stage] - self._cpu_s[stage] for stage in now}

    def grown(self) -> Mapping[str, int]:
        """Return how much memory each stage has taken since then, at most."""
        grown = {}
        for stage in STAGES:
            (pid,) = self.pids[stage]
            status = Path(f"/proc/{pid}/status").read_text()
            largest = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            grown[stage] = largest - self._before[stage]
        return grown

    def died(self) -> list[str]:
        """Return the stages whose worker is another one than before."""
        now = self._pids()
        return [stage for stage, pids in self.pids.items() if now[stage] != pids]


Answers = Mapping[str, tuple[str, str]]
"""Prompt -> what a stream says."""


@pytest.fixture(scope="module")
def quiet(plain_server: Server) -> Answers:
    """What the streams say alone."""
    return {stream.prompt: stream.answer for stream in ask_all(plain_server, max_tokens=TOKENS)}


@contextmanager
def innocents(server: Server, quiet: Answers) -> Iterator[list[Stream]]:
    """Streams that run meanwhile. All of them end whole, and are what they are alone."""
    streams = ask_all(server, max_tokens=TOKENS)
    yield streams
    assert {stream.prompt: stream.answer for stream in streams} == quiet


def wrong_with(server: Server, work: Work, drawn: Drawn) -> list[str]:
    """Send a body; return what is wrong with what came of it."""
    work.begin()
    headers = {"Content-Type": "application/json", **drawn.headers}
    found, num_tokens = [], 0
    for _ in range(2 if drawn.headers else 1):  # one that can be repeated is
        try:
            answer = httpx.post(f"{server.url}{drawn.path}", content=drawn.body, headers=headers, timeout=300)
        except httpx.TransportError as error:
            return [f"no answer: {error!r}; died: {work.died()}"]
        code = answer.json()["error"]["code"] if answer.status_code != 200 else ""
        num_tokens += tokens_in(answer)
        is_busy = answer.status_code in BUSY and "retry-after" in answer.headers
        if answer.status_code not in (200, *REFUSED) and not is_busy:
            found.append(f"status {answer.status_code} {code}")
    if died := work.died():
        if (died, code) != (["tokenize"], TOO_SLOW):
            found.append(f"died: {died}, after {answer.status_code} {code}")
        return found
    most = MOST_TIMES * len(drawn.body) + MOST_MORE_BYTES
    for stage, num_bytes in work.grown().items():
        if num_bytes > most:
            found.append(f"{stage} took {num_bytes >> 20} MiB for a body of {len(drawn.body):,} bytes")
    for stage, cpu_s in work.cpu_s().items():
        if cpu_s > MOST_CPU_S[stage] + MOST_CPU_S_A_TOKEN[stage] * num_tokens:
            found.append(f"{stage} took {cpu_s:.1f} s of CPU time for {num_tokens:,} tokens")
    return found


def tokens_in(answer: httpx.Response) -> int:
    """Return how many tokens were generated for an answer, or in how many frames they came."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.text.count("data: ")
    told = answer.json()
    usages = [each.get("usage") or each.get("meta_info") or {} for each in (told if isinstance(told, list) else [told])]
    return sum(usage.get("completion_tokens", 0) for usage in usages)


def check(server: Server, quiet: Answers, *some: Drawn) -> None:
    with innocents(server, quiet):
        for drawn in some:
            assert not (wrong := wrong_with(server, Work(server), drawn)), (drawn.name, wrong)


def test_any_bodies_within_the_limits_disturb_no_stream_and_take_little_memory(
    plain_server: Server, quiet: Answers
) -> None:
    draw = random.Random(SEED)
    bodies = [any_body(draw, draw.choice((SHARE / 10, SHARE))) for _ in range(DRAWN)]
    for first in range(0, DRAWN, 10):
        check(plain_server, quiet, *bodies[first : first + 10])


@pytest.mark.parametrize("names", rest_at_night(ALONE, first=0), ids=" + ".join)
def test_each_extreme_alone_disturbs_no_stream_and_takes_little_memory(
    plain_server: Server, quiet: Answers, names: tuple[str, ...]
) -> None:
    check(plain_server, quiet, body(random.Random(SEED), *names))
