"""Which engine should take a request: the one with the least to do before it, without what its cache has of the prompt.

Each engine publishes digests of its cache. They are up to two seconds old, so what this tokenizer placed since then
counts as cached, too. With fewer than two engines no request prefers one.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pipeline.names import WAITING
from pipeline.prefixes import prompt_digests, unpacked
from pipeline.stage.slots import Status

LATELY_S = 2.0
"""A status is at most this old. The tokenizer remembers for the same time what it placed."""
MOST_WAITING = 256
"""Number of placed requests of which it matters that no engine has taken them yet."""
TOKENS_OF_REQUEST = 64
"""Number of prompt tokens that a request in an engine's hand counts as: its rows slow down others."""


@dataclass(frozen=True, slots=True)
class _Engine:
    slot: str
    page_size: int
    backlog: int
    cached: set[bytes]


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
        self._placed: deque[tuple[float, str]] = deque()
        """When this tokenizer placed the last requests, and where."""
        self._num_placed: Counter[str] = Counter()
        self._digests_s: dict[tuple[str, bytes], float] = {}
        """Slot and digest of a prompt -> when it was placed."""
        self._last: tuple[Sequence[int], dict[int, list[bytes]]] = (), {}
        """The last prompt, and its digests by size of a page: siblings have the same."""

    def learn(self, statuses: Sequence[Status]) -> None:
        """Take in what the engines published last."""
        ready = [status for status in statuses if status.phase == "ready" and status.page_size]
        self._engines = []
        since_s = self._clock_s() - LATELY_S
        self._digests_s = {known: at_s for known, at_s in self._digests_s.items() if at_s > since_s}
        if len(ready) > 1:
            self._engines = [_Engine(one.slot, one.page_size, one.backlog, unpacked(one.cached)) for one in ready]

    def prefer(self, token_ids: Sequence[int]) -> str:
        """Return the slot of the engine that should take a prompt; empty: any."""
        if not self._engines:
            return ""
        now_s, in_hand = self._clock_s(), self._in_hand()
        while self._placed and now_s - self._placed[0][0] >= LATELY_S:
            self._num_placed[self._placed.popleft()[1]] -= 1
        last = islice(reversed(self._placed), min(in_hand.get(WAITING, 0), MOST_WAITING))
        waiting = Counter(slot for _, slot in last)
        digests = self._digests(token_ids)

        def num_pages(engine: _Engine) -> int:
            of_prompt = digests[engine.page_size]
            for n in range(len(of_prompt), 0, -1):
                placed_s = self._digests_s.get((engine.slot, of_prompt[n - 1]), -math.inf)
                if of_prompt[n - 1] in engine.cached or now_s - placed_s < LATELY_S:
                    return n
            return 0

        def cost(engine: _Engine) -> tuple[int, int]:
            num_requests = in_hand.get(engine.slot, 0) + waiting[engine.slot]
            tokens = engine.backlog + TOKENS_OF_REQUEST * num_requests - num_pages(engine) * engine.page_size
            return tokens, self._num_placed[engine.slot]

        best = min(self._engines, key=cost)
        self._placed.append((now_s, best.slot))
        self._num_placed[best.slot] += 1
        self._digests_s.update(dict.fromkeys(((best.slot, one) for one in digests[best.page_size]), now_s))
        return best.slot

    def _digests(self, token_ids: Sequence[int]) -> dict[int, list[bytes]]:
        """Return the digests of a prompt, by size of a page."""
        if self._last[0] != token_ids:
            self._last = token_ids, {}
        for size in {engine.page_size for engine in self._engines} - self._last[1].keys():
            self._last[1][size] = prompt_digests(token_ids, size, self._namespace)
        return self._last[1]
