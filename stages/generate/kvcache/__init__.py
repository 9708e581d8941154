"""Who owns which page (torch-free bookkeeping), and the tensors that the pages are."""

from __future__ import annotations

from collections.abc import Mapping

from stages.generate.kvcache.base import PrefixCache
from stages.generate.kvcache.naive import NaiveCache

CACHES: Mapping[str, type[NaiveCache]] = {"naive": NaiveCache}
"""--cache -> class; every one is a PrefixCache."""


def make_cache(name: str, num_pages: int, page_size: int) -> PrefixCache:
    """Return an empty cache of the kind *name*."""
    return CACHES[name](num_pages, page_size)
