"""The free list of pages. Knows page numbers, not their content."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PagePool:
    """Pages 0 .. num_pages - 1, each free or owned; handed out in the order in which they became free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return *count* pages that now have an owner. The caller has checked that so many are free."""
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
