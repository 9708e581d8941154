"""The cache that shares: a tree of full pages. The path to a page is the tokens of all pages before it and its own.

A page is shared as soon as the plan that fills it is made. A step writes keys and values before it reads any, so
requests with the same prompt in one plan compute it once. (RadixAttention: Zheng et al., SGLang, 2024.)

| pages of an allocation | owner | at the end |
|---|---|---|
| 0 .. len(path) | the tree; this allocation has locked them | unlocked; may be evicted once no allocation locks them |
| len(path) .. end | this allocation: not full yet, or another allocation filled the same tokens first | freed |

An allocation locks only pages that it uses. So an allocation alone can always grow to the size of the cache.
"""

from __future__ import annotations

import hashlib
import heapq
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from stages.generate.kvcache.base import Allocation, CacheSnapshot, Held, PagePool

DIGEST_BYTES: Final = 8


@dataclass(slots=True, eq=False)
class _Node:
    """One full page. `used` is a counter, not a clock, so the same calls evict the same pages."""

    tokens: tuple[int, ...]
    page: int
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    num_locks: int = 0
    used: int = 0
    digest: bytes = b""
    """Digest of its tokens; empty until a snapshot needs it."""


@dataclass(slots=True)
class RadixAllocation(Allocation):
    """An allocation and its path in the tree: `path[i]` owns `pages[i]`."""

    path: list[_Node] = field(default_factory=list)
    is_private: bool = False
    """Whether another allocation put the same tokens into the tree first. Then the next pages stay outside of it."""


class RadixCache:
    """PrefixCache with a page-aligned radix tree. It evicts the least recently used page first, in O(log n)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._root = _Node((), -1, None)
        self._num_unlocked = 0
        self._counter = 0
        # Unlocked leaves as (used, order, node). An entry is void once its node is locked, has children or was used
        # again. `_evict` skips void entries.
        self._evictable: list[tuple[int, int, _Node]] = []
        self._num_pushed = 0

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._num_unlocked

    def begin(self, token_ids: Sequence[int]) -> Allocation:
        allocation = RadixAllocation(path=list(self._prefix(token_ids)))
        for node in allocation.path:
            self._lock(node)
            allocation.pages.append(node.page)
        allocation.cached_tokens = len(allocation.pages) * self.page_size
        return allocation

    def num_cached(self, token_ids: Sequence[int]) -> int:
        return sum(1 for _ in self._prefix(token_ids)) * self.page_size

    def grow(self, allocation: Allocation, count: int) -> list[int] | None:
        if count > self.num_available:
            return None
        while self._pool.num_free < count:
            self._evict()
        pages = self._pool.allocate(count)
        allocation.pages += pages
        return pages

    def fill(self, allocation: Allocation, token_ids: Sequence[int], num_filled: int) -> None:
        assert isinstance(allocation, RadixAllocation)
        path = allocation.path
        for index in range(len(path), num_filled // self.page_size):
            parent = path[-1] if path else self._root
            tokens = self._page_tokens(token_ids, index)
            allocation.is_private |= tokens in parent.children
            if allocation.is_private:
                return
            node = parent.children[tokens] = _Node(tokens, allocation.pages[index], parent)
            self._num_unlocked += 1  # until the next line
            self._lock(node)
            path.append(node)

    def end(self, allocation: Allocation) -> None:
        assert isinstance(allocation, RadixAllocation)
        self._pool.free(allocation.pages[len(allocation.path) :])
        for node in reversed(allocation.path):
            self._unlock(node)
        allocation.pages.clear()
        allocation.path.clear()
        allocation.is_private = False

    def flush(self) -> int:
        num_pages = self._num_unlocked
        while self._num_unlocked:
            self._evict()
        return num_pages

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        found = []
        locks: dict[int, int] = {}
        private: list[int] = []
        for allocation in allocations:
            path = allocation.path if isinstance(allocation, RadixAllocation) else []
            for node in path:
                locks[id(node)] = locks.get(id(node), 0) + 1
            private += allocation.pages[len(path) :]
            if [node.page for node in path] != allocation.pages[: len(path)]:
                found.append("an allocation's pages are not those of its way down the tree")
        nodes = self._nodes()
        pages = [node.page for node in nodes] + private
        if len(set(pages)) != len(pages):
            found.append("a page has two owners")
        if len(pages) + self._pool.num_free != self.num_pages:
            found.append(f"{len(pages)} pages owned and {self._pool.num_free} free of {self.num_pages}")
        if any(node.num_locks != locks.pop(id(node), 0) for node in nodes) or locks:
            found.append("the locks in the tree are not those of the allocations")
        if self._num_unlocked != sum(node.num_locks == 0 for node in nodes):
            found.append("the count of pages that may be evicted is wrong")
        return found

    def snapshot(self, allocations: Sequence[Allocation]) -> CacheSnapshot:
        nodes = sorted(self._nodes(), key=attrgetter("used"))
        index = {id(node): at for at, node in enumerate(nodes)}
        index[id(self._root)] = -1
        for node in nodes:
            node.digest = node.digest or self._digest(node.tokens)
        held = []
        for allocation in allocations:
            assert isinstance(allocation, RadixAllocation)
            last = index[id(allocation.path[-1])] if allocation.path else -1
            held.append(Held(last, len(allocation.pages), allocation.is_private))
        parents = array("i", [index[id(node.parent)] for node in nodes])
        return CacheSnapshot(tuple(held), _little(parents).tobytes(), b"".join([node.digest for node in nodes]))

    def _prefix(self, token_ids: Sequence[int]) -> Iterator[_Node]:
        """Yield the pages of the longest cached prefix. The last token is computed in any case."""
        node = self._root
        for index in range((len(token_ids) - 1) // self.page_size):
            found = node.children.get(self._page_tokens(token_ids, index))
            if found is None:
                return
            node = found
            yield node

    def _page_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])

    def _digest(self, tokens: tuple[int, ...]) -> bytes:
        return digest_of(tokens)

    def _lock(self, node: _Node) -> None:
        self._counter += 1
        node.used = self._counter
        self._num_unlocked -= node.num_locks == 0
        node.num_locks += 1

    def _unlock(self, node: _Node) -> None:
        node.num_locks -= 1
        if node.num_locks == 0:
            self._num_unlocked += 1
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        if not node.children:
            self._num_pushed += 1
            heapq.heappush(self._evictable, (node.used, self._num_pushed, node))
            if len(self._evictable) > 2 * self.num_pages:  # most entries are void, and nothing was evicted for long
                self._evictable = [entry for entry in self._evictable if self._is_valid(entry)]
                heapq.heapify(self._evictable)

    def _evict(self) -> None:
        """Free the page of the least recently used unlocked leaf. The caller has checked that there is one."""
        while True:
            entry = heapq.heappop(self._evictable)
            if self._is_valid(entry):
                break
        node = entry[2]
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        node.parent = None  # makes a second entry of the node in the heap void
        self._num_unlocked -= 1
        self._pool.free([node.page])
        if parent is not self._root and parent.num_locks == 0:
            self._offer(parent)

    @staticmethod
    def _is_valid(entry: tuple[int, int, _Node]) -> bool:
        used, _, node = entry
        return node.num_locks == 0 and not node.children and node.used == used and node.parent is not None

    def _nodes(self) -> list[_Node]:
        nodes: list[_Node] = []
        todo = [self._root]
        while todo:
            children = todo.pop().children.values()
            nodes += children
            todo += children
        return nodes


class DigestCache(RadixCache):
    """A copy of a RadixCache, made from its snapshot. Digests of tokens stand for the tokens."""

    def __init__(self, num_pages: int, page_size: int, snapshot: CacheSnapshot) -> None:
        super().__init__(num_pages, page_size)
        self.allocations: list[Allocation] = []
        """Allocations of the snapshot, in its order."""
        parents = array("i", snapshot.parents)
        nodes = [_Node((), page, None) for page in self._pool.allocate(len(parents))]
        for at, (node, parent) in enumerate(zip(nodes, _little(parents), strict=True)):
            digest = snapshot.digests[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)]
            node.tokens = (int.from_bytes(digest),)
            node.parent = nodes[parent] if parent >= 0 else self._root
            node.parent.children[node.tokens] = node
            node.used = at + 1
        self._counter = len(nodes)
        self._num_unlocked = len(nodes)
        for held in snapshot.held:
            allocation = RadixAllocation(is_private=held.is_private)
            node = nodes[held.node] if held.node >= 0 else self._root
            while node.parent is not None:
                allocation.path.insert(0, node)
                self._num_unlocked -= node.num_locks == 0
                node.num_locks += 1
                node = node.parent
            allocation.pages = [node.page for node in allocation.path]
            allocation.pages += self._pool.allocate(held.num_pages - len(allocation.pages))
            self.allocations.append(allocation)
        for node in nodes:
            if node.num_locks == 0:
                self._offer(node)

    def _page_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return (int.from_bytes(digest_of(super()._page_tokens(token_ids, index))),)

    def _digest(self, tokens: tuple[int, ...]) -> bytes:
        return tokens[0].to_bytes(DIGEST_BYTES)


def digest_of(tokens: Sequence[int]) -> bytes:
    """Return 8 bytes that stand for the tokens of a page. Different tokens practically never have the same digest."""
    return hashlib.blake2b(_little(array("i", tokens)).tobytes(), digest_size=DIGEST_BYTES).digest()


def _little(numbers: array[int]) -> array[int]:
    """Return this machine's numbers as little-endian ones, or the other way round."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
