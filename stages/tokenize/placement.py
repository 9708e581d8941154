"""Which engine should take a request: the one with the least to do before it, without what its cache has of the prompt.

Each engine publishes digests of its cache. They are up to two seconds old, so what this tokenizer placed since then
counts as cached, too. With fewer than two engines no request prefers one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.names import WAITING
from pipeline.prefixes import prompt_digests, unpacked
from pipeline.stage.slots import Status

LATELY_S = 2.0
"""Age of what an engine published last, at most: so long this tokenizer remembers what it placed."""
TOKENS_OF_REQUEST = 64
"""Number of prompt tokens that a request in an engine's hand counts as: its rows slow down others."""


@dataclass(frozen=True, slots=True)
class _Engine:
    slot: str
    page_size: int
    backlog: int
    cached: set[bytes]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request that this tokenizer placed."""

    at_s: float
    slot: str
    digests: Sequence[bytes]


class Placement:
    """What a tokenizer knows about the engines."""

    def __init__(
        self, namespace: str, in_hand: Callable[[], Mapping[str, int]], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """*in_hand*: returns how many requests each engine has now, by its slot, and how many are `waiting`."""
        self._namespace = namespace
        self._in_hand = in_hand
        self._clock_s = clock_s
        self._engines: list[_Engine] = []
        self._placed: list[_Placed] = []

    def learn(self, statuses: Sequence[Status]) -> None:
        """Take in what the engines published last."""
        ready = [status for status in statuses if status.phase == "ready" and status.page_size]
        self._engines = []
        if len(ready) > 1:
            self._engines = [_Engine(one.slot, one.page_size, one.backlog, unpacked(one.cached)) for one in ready]

    def prefer(self, token_ids: Sequence[int]) -> str:
        """Return the slot of the engine that should take a prompt; empty: any."""
        if not self._engines:
            return ""
        now_s, in_hand = self._clock_s(), self._in_hand()
        self._placed = [one for one in self._placed if now_s - one.at_s < LATELY_S]
        waiting = self._placed[max(len(self._placed) - in_hand.get(WAITING, 0), 0) :]
        sizes = {engine.page_size for engine in self._engines}
        digests = {size: prompt_digests(token_ids, size, self._namespace) for size in sizes}

        def cost(engine: _Engine) -> tuple[int, int]:
            placed = [one for one in self._placed if one.slot == engine.slot]
            known = engine.cached.union(*(one.digests for one in placed))
            of_prompt = digests[engine.page_size]
            num_pages = next((n for n in range(len(of_prompt), 0, -1) if of_prompt[n - 1] in known), 0)
            num_requests = in_hand.get(engine.slot, 0) + sum(one.slot == engine.slot for one in waiting)
            return engine.backlog + TOKENS_OF_REQUEST * num_requests - num_pages * engine.page_size, len(placed)

        best = min(self._engines, key=cost)
        self._placed.append(_Placed(now_s, best.slot, digests[best.page_size]))
        return best.slot
