"""PrefixCache: which request owns which page, and how much of a prompt is cached already. No torch, no clock.

| | naive | a cache that shares |
|---|---|---|
| `begin` | no page | locks the pages of the longest cached prefix |
| `grow` | pages of its own | the same, and evicts unlocked pages if it must |
| `cover` | local parts of its own | those that are cached, else its own |
| `shrink` | frees the last pages | the same: they are its own |
| `fill` | nothing | full pages are shared as soon as the plan that fills them is made |
| `end` | frees all | unlocks the shared pages, frees the rest |

In a model with local layers, which see the last tokens alone, a page has several parts of equal size. The first one is
of the global layers, and a request keeps it. The others, of the local layers, it gives back once no token sees them.
`LocalLayers` has the numbers. In other models a page is its only part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class LocalLayers:
    """The layers that see the last tokens alone, in a model that has other layers, too."""

    num_parts: int = 0
    """Parts of a page that are theirs. One more is of the global layers."""
    window: int = 0
    """Number of tokens that a token sees, itself included."""
    largest_chunk: int = 0
    """Largest number of tokens of a row that are computed in a step."""

    def first_page(self, position: int, page_size: int) -> int:
        """Return the index of the first page in the window of the token at *position*."""
        return max(0, position + 1 - self.window) // page_size

    def num_at_once(self, num_pages: int, page_size: int) -> int:
        """Return of how many pages a request needs local parts at once, if it has *num_pages* from its window on."""
        most = -(-(self.window - 1 + self.largest_chunk) // page_size) + 1
        return min(num_pages, most) if self.num_parts else 0

    def whole_pages(self, num_pages: int, page_size: int) -> int:
        """Return how many whole pages have as many parts as a request of *num_pages* alone needs."""
        return -(-(num_pages + self.num_parts * self.num_at_once(num_pages, page_size)) // (1 + self.num_parts))

    def capacity(self, num_pages: int, page_size: int) -> int:
        """Return the longest request, in tokens, that a cache of *num_pages* whole pages can hold."""
        local = self.num_parts * self.num_at_once(num_pages, page_size)
        return (num_pages * (1 + self.num_parts) - local) * page_size


NO_LOCAL_LAYERS: Final = LocalLayers()


class PagePool:
    """Pages 0 .. num_pages - 1, or parts of them, each free or owned. They are allocated in the order in which they
    became free.
    """

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
    """The parts of the global layers, which are the pages where there are no others."""
    cached_tokens: int = 0
    """Number of prompt tokens that were in `pages` when it began."""
    local: deque[tuple[int, ...]] = field(default_factory=deque)
    """The local parts of the pages from `first_local` on."""
    first_local: int = 0
    num_told: int = 0
    """The caller of `cover` knows the local parts of so many first pages, or no longer needs them."""
    num_covered: int = 0
    """Number of tokens that the last plan, or the cache, has computed."""
    num_reserved: int = 0
    """Local parts of so many pages are reserved for it. It never has more."""


@dataclass(frozen=True, slots=True)
class Held:
    """An allocation in a snapshot."""

    node: int
    """Index of its last shared page, in the snapshot's order; -1: it shares none."""
    num_pages: int
    is_private: bool
    """Whether its next pages will not be shared."""
    num_covered: int = 0
    first_local: int = 0
    """See `Allocation`."""
    local: str = ""
    """A letter for each page of which it has local parts: s if the cache shares them, p if not."""


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
    uses: bytes = b""
    """With local layers, two numbers for each shared page, of 4 bytes: ordinals of the last use of the page and of its
    local parts, or -1 if they are not there.
    """


class PrefixCache(Protocol):
    """Allocates pages. The contract is tests/stages/generate/kvcache/test_prefix_cache.py."""

    page_size: int
    num_pages: int
    local: LocalLayers

    @property
    def num_available(self) -> int:
        """Number of whole pages that `grow` can allocate now."""
        ...

    def begin(self, token_ids: Sequence[int]) -> Allocation:
        """Return an allocation with the pages of the longest cached prefix of *token_ids*, short of its last token."""
        ...

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Return how many of *token_ids* `begin` would find in the cache."""
        ...

    def can_grow(self, wanted: Iterable[tuple[Allocation, int]]) -> bool:
        """Return whether `grow` succeeds for all of several allocations with their counts."""

    def grow(self, allocation: Allocation, count: int) -> list[int] | None:
        """Append *count* pages to *allocation* and return them; return None and allocate none if there are too few.

        Also reserve the local parts that `cover` will need.
        """
        ...

    def cover(self, allocation: Allocation, end: int) -> tuple[int, tuple[int, ...]]:
        """Allocate the local parts for a step that computes *allocation* to position *end*, and give back those that no
        token from the step on sees.

        Return a page, and the local parts, which are new to the caller, of it and of those behind it.
        """
        ...

    def shrink(self, allocation: Allocation, end: int, num_pages: int) -> None:
        """Give back all but the first *num_pages* of *allocation*.

        What was computed from position *end* on is void, and `fill` has recorded none of it.
        """
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

    def prefixes(self, most: int, namespace: str) -> list[bytes]:
        """Return digests of at most *most* of the prefixes that it holds; see `pipeline.prefixes`."""
        ...

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        """Return what is wrong with the page allocation if *allocations* are all that exist; empty: nothing."""
        ...

    def snapshot(self, allocations: Sequence[Allocation]) -> CacheSnapshot:
        """Return what a copy of this cache needs. *allocations* are all that exist."""
        ...
