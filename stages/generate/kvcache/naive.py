"""The cache that shares nothing: every request computes its whole prompt in pages of its own."""

from __future__ import annotations

from collections.abc import Sequence

from stages.generate.kvcache.base import Allocation, CacheSnapshot, Held, PagePool


class NaiveCache:
    """PrefixCache without prefixes."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._pool = PagePool(num_pages)

    @property
    def num_available(self) -> int:
        return self._pool.num_free

    def begin(self, token_ids: Sequence[int]) -> Allocation:
        return Allocation()

    def num_cached(self, token_ids: Sequence[int]) -> int:
        return 0

    def grow(self, allocation: Allocation, count: int) -> list[int] | None:
        if count > self._pool.num_free:
            return None
        pages = self._pool.allocate(count)
        allocation.pages += pages
        return pages

    def fill(self, allocation: Allocation, token_ids: Sequence[int], num_filled: int) -> None:
        """Nothing to remember."""

    def end(self, allocation: Allocation) -> None:
        self._pool.free(allocation.pages)
        allocation.pages.clear()

    def flush(self) -> int:
        return 0

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        held = [page for allocation in allocations for page in allocation.pages]
        found = []
        if len(set(held)) != len(held):
            found.append("a page is held twice")
        if len(held) + self._pool.num_free != self.num_pages:
            found.append(f"{len(held)} pages held and {self._pool.num_free} free of {self.num_pages}")
        return found

    def snapshot(self, allocations: Sequence[Allocation]) -> CacheSnapshot:
        return CacheSnapshot(tuple(Held(-1, len(allocation.pages), is_private=False) for allocation in allocations))
