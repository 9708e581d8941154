"""Many clients of several engines: who computes which request, and what they are answered."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
from support.servers import Server
from support.streams import events_of

from pipeline.events import Admitted
from pipeline.log.redis import RedisLog

BURST = 64
WORDS = 150
"""Of a long prompt. Each engine computes some ms for those that it takes, so that the others have the time to come."""
NUM_CLIENTS = 16
"""Of those that ask one thing after the other."""


class Clients:
    """Clients of a server. What they ask has a number, and equal numbers get equal answers."""

    def __init__(self, server: Server, max_tokens: int, more: str = "") -> None:
        self._url, self._max_tokens, self._more = f"{server.url}/v1/completions", max_tokens, more
        self._http = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=BURST))

    def ask(self, number: int) -> httpx.Response:
        fields = {"max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
        return self._http.post(self._url, json={"prompt": f"Request {number}.{self._more}", **fields})

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def burst(server: Server, max_tokens: int, *, num_words: int = 0) -> Iterator[list[Future[httpx.Response]]]:
    """Send the requests of as many clients at once, with *num_words* more each; give their answers to be.

    No engine has cached anything of the prompts.
    """
    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    with (
        contextlib.closing(Clients(server, max_tokens, " more" * num_words)) as clients,
        ThreadPoolExecutor(BURST) as threads,
    ):
        yield [threads.submit(clients.ask, number) for number in range(BURST)]


@contextlib.contextmanager
def steady_load(server: Server, max_tokens: int) -> Iterator[dict[int, list[httpx.Response]]]:
    """Have some clients ask one thing after the other; give the answers by what was asked. The block waits for all."""
    numbers, stopped = itertools.count(), threading.Event()
    answers: dict[int, list[httpx.Response]] = {number: [] for number in range(BURST)}

    def go_on() -> None:
        while not stopped.is_set():
            number = next(numbers) % BURST
            answers[number].append(clients.ask(number))

    with contextlib.closing(Clients(server, max_tokens)) as clients, ThreadPoolExecutor(NUM_CLIENTS) as threads:
        going = [threads.submit(go_on) for _ in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            stopped.set()
        for each in going:
            each.result()


def answer_of(response: httpx.Response) -> tuple[str, str]:
    """Return the text, and why it ended."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


def answers_of(coming: Sequence[Future[httpx.Response]]) -> list[tuple[str, str]]:
    """Wait for all answers of a burst."""
    return [answer_of(each.result()) for each in coming]


def uids_of(coming: Sequence[Future[httpx.Response]]) -> list[str]:
    """Return the uids of answers that have come."""
    return [each.result().headers["x-minisgl-uid"] for each in coming]


def engines_of(log: RedisLog, uids: Sequence[str]) -> Counter[str]:
    """Return how many of the requests each engine has taken first."""
    events = (next(event for event in events_of(log, uid) if isinstance(event, Admitted)) for uid in uids)
    return Counter(event.engine for event in events)
