"""Which request owns which page (without torch), and the tensor that holds the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stages.generate.kvcache.base import PrefixCache
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.kvcache.radix import RadixCache

CACHES: Mapping[str, Callable[[int, int], PrefixCache]] = {"radix": RadixCache, "naive": NaiveCache}
"""--cache -> class, called with the number of pages and their size."""


def make_cache(name: str, num_pages: int, page_size: int) -> PrefixCache:
    """Return an empty cache of the kind *name*."""
    return CACHES[name](num_pages, page_size)
