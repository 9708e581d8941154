"""Which request owns which page (without torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stages.generate.kvcache.base import NO_LOCAL_LAYERS, Allocation, CacheSnapshot, LocalLayers, PrefixCache
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.kvcache.radix import DigestCache, RadixCache

CACHES: Mapping[str, Callable[[int, int, LocalLayers], NaiveCache]] = {"radix": RadixCache, "naive": NaiveCache}
"""--cache -> class, called with the number of pages, their size, and the layers that have parts of their own."""


def make_cache(name: str, num_pages: int, page_size: int, local: LocalLayers = NO_LOCAL_LAYERS) -> NaiveCache:
    """Return an empty cache of the kind *name*."""
    return CACHES[name](num_pages, page_size, local)


def cache_name(cache: PrefixCache) -> str:
    """Return the kind of *cache*."""
    return next(name for name, kind in CACHES.items() if isinstance(kind, type) and isinstance(cache, kind))


def remade(
    name: str, num_pages: int, page_size: int, snapshot: CacheSnapshot, local: LocalLayers = NO_LOCAL_LAYERS
) -> tuple[PrefixCache, Sequence[Allocation]]:
    """Return a copy of a cache of the kind *name*, and its allocations, from a snapshot. Page numbers may differ."""
    if name == "radix":
        copy = DigestCache(num_pages, page_size, snapshot, local)
        return copy, copy.allocations
    cache = make_cache(name, num_pages, page_size, local)
    allocations = [cache.begin(()) for _ in snapshot.held]
    for allocation, held in zip(allocations, snapshot.held, strict=True):
        cache.restore(allocation, held)
    return cache, allocations
