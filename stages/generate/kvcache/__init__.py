"""Which request owns which page (without torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stages.generate.kvcache.base import Allocation, CacheSnapshot, PrefixCache
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.kvcache.radix import DigestCache, RadixCache

CACHES: Mapping[str, Callable[[int, int], PrefixCache]] = {"radix": RadixCache, "naive": NaiveCache}
"""--cache -> class, called with the number of pages and their size."""


def make_cache(name: str, num_pages: int, page_size: int) -> PrefixCache:
    """Return an empty cache of the kind *name*."""
    return CACHES[name](num_pages, page_size)


def cache_name(cache: PrefixCache) -> str:
    """Return the kind of *cache*."""
    return next(name for name, kind in CACHES.items() if isinstance(kind, type) and isinstance(cache, kind))


def remade(
    name: str, num_pages: int, page_size: int, snapshot: CacheSnapshot
) -> tuple[PrefixCache, Sequence[Allocation]]:
    """Return a copy of a cache of the kind *name*, and its allocations, from a snapshot. Page numbers may differ."""
    if name == "radix":
        copy = DigestCache(num_pages, page_size, snapshot)
        return copy, copy.allocations
    cache = make_cache(name, num_pages, page_size)
    allocations = [cache.begin(()) for _ in snapshot.held]
    for allocation, held in zip(allocations, snapshot.held, strict=True):
        cache.grow(allocation, held.num_pages)
    return cache, allocations
