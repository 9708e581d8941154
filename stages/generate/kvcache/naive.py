"""The cache that shares nothing: every request computes its whole prompt in pages of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from stages.generate.kvcache.base import NO_LOCAL_LAYERS, Allocation, CacheSnapshot, Held, LocalLayers, PagePool


class NaiveCache:
    """PrefixCache without prefixes.

    Local parts are reserved for each request, as many as it needs at once. So `cover` always finds some: all that
    requests have, even if none were shared, are never more than are reserved.
    """

    def __init__(self, num_pages: int, page_size: int, local: LocalLayers = NO_LOCAL_LAYERS) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.local = local
        self._pool = PagePool(num_pages * (1 + local.num_parts))
        self._num_unlocked = 0
        """Number of pages that no allocation has and that may be evicted."""
        self._num_local = 0
        """Number of pages that have local parts now, of a request or of the cache."""
        self._num_reserved = 0

    @property
    def num_available(self) -> int:
        return self._parts_available // (1 + self.local.num_parts)

    @property
    def _parts_available(self) -> int:
        spare = self._num_local - self._num_reserved
        return self._pool.num_free + self._num_unlocked + self.local.num_parts * spare

    def begin(self, token_ids: Sequence[int]) -> Allocation:
        return Allocation()

    def num_cached(self, token_ids: Sequence[int]) -> int:
        return 0

    def can_grow(self, wanted: Iterable[tuple[Allocation, int]]) -> bool:
        parts = [self._parts_for(allocation, count)[0] for allocation, count in wanted]
        return sum(max(num_parts, 0) for num_parts in parts) <= self._parts_available  # some give back, but may be last

    def _parts_for(self, allocation: Allocation, count: int) -> tuple[int, int]:
        """Return how many parts so many more pages take, and how many local parts are reserved then."""
        self._slide(allocation)
        num_local = self._needed_at_once(allocation, len(allocation.pages) + count)
        return count + self.local.num_parts * (num_local - allocation.num_reserved), num_local

    def grow(self, allocation: Allocation, count: int) -> list[int] | None:
        num_parts, num_local = self._parts_for(allocation, count)
        if num_parts > self._parts_available:
            return None
        self._reserve(allocation, num_local)
        pages = self._take(count)
        allocation.pages += pages
        return pages

    def cover(self, allocation: Allocation, end: int) -> tuple[int, tuple[int, ...]]:
        if not self.local.num_parts:
            return 0, ()
        self._slide(allocation)
        self._reserve(allocation, self._needed_at_once(allocation, len(allocation.pages)))
        told, behind = allocation.num_told, -(-end // self.page_size)
        for index in range(allocation.first_local + len(allocation.local), behind):
            allocation.local.append(self._local_parts(allocation, index))
        allocation.num_covered, allocation.num_told = end, behind
        return told, tuple(chain.from_iterable(islice(allocation.local, told - allocation.first_local, None)))

    def shrink(self, allocation: Allocation, end: int, num_pages: int) -> None:
        self._pool.free(allocation.pages[num_pages:])
        del allocation.pages[num_pages:]
        if not self.local.num_parts:
            return
        while allocation.first_local + len(allocation.local) > num_pages:
            self._free_local_parts(allocation.local.pop())
        allocation.num_told = min(allocation.num_told, num_pages)
        allocation.num_covered = min(allocation.num_covered, end)
        self._reserve(allocation, self._needed_at_once(allocation, num_pages))

    def fill(self, allocation: Allocation, token_ids: Sequence[int], num_filled: int) -> None:
        """Nothing to remember."""

    def end(self, allocation: Allocation) -> None:
        self._end_local(allocation)
        self._pool.free(allocation.pages)
        allocation.pages.clear()

    def flush(self) -> int:
        return 0

    def prefixes(self, most: int, namespace: str) -> list[bytes]:
        return []

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        held = [page for allocation in allocations for page in allocation.pages]
        local = [parts for allocation in allocations for parts in allocation.local]
        return self._wrong_parts(held, local) + self._wrong_reserves(allocations)

    def _wrong_parts(self, pages: Sequence[int], local: Sequence[tuple[int, ...]]) -> list[str]:
        """Return what is wrong if *pages* and *local* are all that have an owner."""
        found = []
        owned = [*pages, *chain.from_iterable(local)]
        if len(set(owned)) != len(owned):
            found.append("a page has two owners")
        if len(owned) + self._pool.num_free != self._pool.num_pages:
            found.append(f"{len(owned)} pages owned and {self._pool.num_free} free of {self._pool.num_pages}")
        if len(local) != self._num_local:
            found.append(f"local parts of {len(local)} pages are there, {self._num_local} are counted")
        return found

    def _wrong_reserves(self, allocations: Sequence[Allocation]) -> list[str]:
        found = []
        if sum(allocation.num_reserved for allocation in allocations) != self._num_reserved:
            found.append("the count of reserved pages is wrong")
        if any(len(allocation.local) > allocation.num_reserved for allocation in allocations):
            found.append("an allocation has more local parts than it has reserved")
        return found

    def snapshot(self, allocations: Sequence[Allocation]) -> CacheSnapshot:
        return CacheSnapshot(tuple(map(self._held, allocations)))

    def _held(self, allocation: Allocation, node: int = -1) -> Held:
        local = "".join(
            "s" if self._is_shared(allocation, index, parts) else "p"
            for index, parts in enumerate(allocation.local, allocation.first_local)
        )
        told = (allocation.num_covered, allocation.first_local, local) if self.local.num_parts else ()
        return Held(node, len(allocation.pages), False, *told)

    def restore(self, allocation: Allocation, held: Held) -> None:
        """Give *allocation*, which has its shared pages, the others that it had in a snapshot, and the local parts."""
        allocation.pages += self._pool.allocate(held.num_pages - len(allocation.pages))
        allocation.num_covered, allocation.first_local = held.num_covered, held.first_local
        allocation.num_told = held.first_local + len(held.local)
        for index, kind in enumerate(held.local, held.first_local):
            allocation.local.append(self._local_parts(allocation, index) if kind == "s" else self._new_local_parts())
        self._reserve(allocation, self._needed_at_once(allocation, held.num_pages))

    # local parts

    def _slide(self, allocation: Allocation) -> None:
        """Give back the local parts that the next tokens do not see."""
        if allocation.local:
            first = self.local.first_page(allocation.num_covered, self.page_size)
            while allocation.first_local < first:
                self._give_back(allocation, allocation.first_local, allocation.local.popleft())
                allocation.first_local += 1

    def _needed_at_once(self, allocation: Allocation, num_pages: int) -> int:
        return self.local.num_at_once(num_pages - allocation.first_local, self.page_size)

    def _reserve(self, allocation: Allocation, count: int) -> None:
        self._num_reserved += count - allocation.num_reserved
        allocation.num_reserved = count

    def _take(self, count: int) -> list[int]:
        """Return *count* parts. The caller has checked that so many are available or reserved."""
        return self._pool.allocate(count)

    def _new_local_parts(self) -> tuple[int, ...]:
        self._num_local += 1
        return tuple(self._take(self.local.num_parts))

    def _free_local_parts(self, parts: tuple[int, ...]) -> None:
        self._num_local -= 1
        self._pool.free(parts)

    def _local_parts(self, allocation: Allocation, index: int) -> tuple[int, ...]:
        """Return local parts for the page *index* of *allocation*."""
        return self._new_local_parts()

    def _is_shared(self, allocation: Allocation, index: int, parts: tuple[int, ...]) -> bool:
        """Return whether the local parts *parts* of the page *index* of *allocation* are those of the cache."""
        return False

    def _give_back(self, allocation: Allocation, index: int, parts: tuple[int, ...]) -> None:
        """Take back what `_local_parts` returned."""
        self._free_local_parts(parts)

    def _end_local(self, allocation: Allocation) -> None:
        """Give back all local parts of *allocation*."""
        for index, parts in enumerate(allocation.local, allocation.first_local):
            self._give_back(allocation, index, parts)
        allocation.local.clear()
        self._reserve(allocation, 0)
