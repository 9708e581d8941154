"""PrefixCache: which request owns which page, and how much of a prompt is cached already. No torch, no clock.

| | naive | a cache that shares |
|---|---|---|
| `begin` | no page | locks the pages of the longest cached prefix |
| `grow` | pages of its own | the same, and evicts unlocked pages if it must |
| `fill` | nothing | full pages are shared as soon as the plan that fills them is made |
| `end` | frees all | unlocks the shared pages, frees the rest |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class PagePool:
    """Pages 0 .. num_pages - 1, each free or owned. They are allocated in the order in which they became free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return *count* pages that now have an owner. The caller has checked that enough are free."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back from their owner."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = 1
            self._free.append(page)


@dataclass(slots=True)
class Allocation:
    """The pages of one running request, in the order of its positions."""

    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Number of prompt tokens that were in `pages` when it began."""


@dataclass(frozen=True, slots=True)
class Held:
    """An allocation in a snapshot."""

    node: int
    """Index of its last shared page, in the snapshot's order; -1: it shares none."""
    num_pages: int
    is_private: bool
    """Whether its next pages will not be shared."""


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Which tokens the shared pages hold and who holds the pages: enough to allocate as many pages again.

    Page numbers are left out. Shared pages come in the order of their last use, the earliest first.
    """

    held: tuple[Held, ...]
    parents: bytes = b""
    """Index of the page before each shared page, or -1: 4 bytes, little-endian."""
    digests: bytes = b""
    """Digest of each shared page's tokens, 8 bytes."""


class PrefixCache(Protocol):
    """Allocates pages. The contract is tests/stages/generate/kvcache/test_prefix_cache.py."""

    page_size: int
    num_pages: int

    @property
    def num_available(self) -> int:
        """Number of pages that `grow` can allocate now."""
        ...

    def begin(self, token_ids: Sequence[int]) -> Allocation:
        """Return an allocation with the pages of the longest cached prefix of *token_ids*, short of its last token."""
        ...

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Return how many of *token_ids* `begin` would find in the cache."""
        ...

    def grow(self, allocation: Allocation, count: int) -> list[int] | None:
        """Append *count* pages to *allocation* and return them; return None and change nothing if there are too few."""
        ...

    def fill(self, allocation: Allocation, token_ids: Sequence[int], num_filled: int) -> None:
        """Record that the plan now being made fills the pages with the first *num_filled* of *token_ids*."""
        ...

    def end(self, allocation: Allocation) -> None:
        """Give back all pages of *allocation* and empty it."""
        ...

    def flush(self) -> int:
        """Remove every prefix that no request holds; return the number of freed pages."""
        ...

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        """Return what is wrong with the page allocation if *allocations* are all that exist; empty: nothing."""
        ...

    def snapshot(self, allocations: Sequence[Allocation]) -> CacheSnapshot:
        """Return what a copy of this cache needs. *allocations* are all that exist."""
        ...
