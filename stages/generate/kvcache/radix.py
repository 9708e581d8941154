"""The cache that shares: a tree of full pages. The path to a page is the tokens of all pages before it and its own.

A page is shared as soon as the plan that fills it is made. A step writes keys and values before it reads any, so
requests with the same prompt in one plan compute it once. (RadixAttention: Zheng et al., SGLang, 2024.)

| pages of an allocation | owner | at the end |
|---|---|---|
| 0 .. len(path) | the tree; this allocation has locked them | unlocked; may be evicted once no allocation locks them |
| len(path) .. end | this allocation: not full yet, or another allocation filled the same tokens first | freed |

An allocation locks only pages that it uses. So an allocation alone can always grow to the size of the cache.

With local layers a page has its local parts as long as an allocation needs them, and then until they are the least
recently used. A prefix is cached as far as the pages before its end have them. Tokens of pages without them are
computed again, and write the same bits to the parts of the global layers, which other allocations may read meanwhile.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from pipeline.prefixes import PUBLISHED_BYTES, int32_bytes, little, next_digest
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, Allocation, CacheSnapshot, LocalLayers
from stages.generate.kvcache.naive import NaiveCache

DIGEST_BYTES: Final = 8
MOST_WALKED: Final = 16_384
"""Pages that are looked at to publish prefixes: this takes some milliseconds."""


@dataclass(slots=True, eq=False)
class _Node:
    """One full page. `used` is a counter, not a clock, so the same calls evict the same pages."""

    tokens: tuple[int, ...]
    page: int
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    num_locks: int = 0
    used: int = 0
    local: tuple[int, ...] = ()
    """Its local parts; empty: they are not there."""
    num_local_locks: int = 0
    local_used: int = 0
    digest: bytes = b""
    """Digest of its tokens; empty until a snapshot needs it."""
    depth: int = 0
    """Number of pages up to this one."""
    prefix: bytes = b""
    """Digest of the tokens of all these pages; empty until it is published."""


@dataclass(slots=True)
class RadixAllocation(Allocation):
    """An allocation and its path in the tree: `path[i]` owns `pages[i]`."""

    path: list[_Node] = field(default_factory=list)
    is_private: bool = False
    """Whether another allocation put the same tokens into the tree first. Then the next pages stay outside of it."""
    num_filled: int = 0
    """Number of full pages, cached or computed, that the tree has heard of."""


class RadixCache(NaiveCache):
    """PrefixCache with a page-aligned radix tree. It evicts the least recently used page first, in O(log n)."""

    def __init__(self, num_pages: int, page_size: int, local: LocalLayers = NO_LOCAL_LAYERS) -> None:
        super().__init__(num_pages, page_size, local)
        self._root = _Node((), -1, None)
        self._counter = 0
        # Unlocked leaves as (used, order, node, False), unlocked local parts as (local_used, order, node, True). An
        # entry is void once they are locked or were used again, or the node has children. `_evict` skips void entries.
        self._evictable: list[tuple[int, int, _Node, bool]] = []
        self._num_pushed = 0
        self._ends: set[_Node] = set()
        """Last pages of the prefixes that are published."""

    def begin(self, token_ids: Sequence[int]) -> Allocation:
        allocation = RadixAllocation(path=list(self._prefix(token_ids)))
        path, page_size = allocation.path, self.page_size
        num_cached = self._num_usable(path)
        for node in path:
            self._lock(node)
            allocation.pages.append(node.page)
        allocation.cached_tokens = allocation.num_covered = num_cached * page_size
        allocation.num_filled = num_cached
        if self.local.num_parts:
            first = self.local.first_page(num_cached * page_size, page_size)
            allocation.first_local = allocation.num_told = first
            allocation.local += [self._local_parts(allocation, index) for index in range(first, num_cached)]
        return allocation

    def num_cached(self, token_ids: Sequence[int]) -> int:
        return self._num_usable(self._prefix(token_ids)) * self.page_size

    def _num_usable(self, path: Iterable[_Node]) -> int:
        """Return of how many pages of *path* no token needs to be computed."""
        num_usable = num_local = number = 0
        for number, node in enumerate(path, 1):
            if self.local.num_parts:
                num_local = num_local + 1 if node.local else 0
                if number - self.local.first_page(number * self.page_size, self.page_size) <= num_local:
                    num_usable = number
        return num_usable if self.local.num_parts else number

    def fill(self, allocation: Allocation, token_ids: Sequence[int], num_filled: int) -> None:
        assert isinstance(allocation, RadixAllocation)
        path, num_pages = allocation.path, num_filled // self.page_size
        num_before = len(path)
        for index in range(allocation.num_filled, num_pages):
            if index == len(path) and not allocation.is_private:
                parent = path[-1] if path else self._root
                tokens = self._page_tokens(token_ids, index)
                allocation.is_private = tokens in parent.children
                if not allocation.is_private:
                    node = _Node(tokens, allocation.pages[index], parent, depth=parent.depth + 1)
                    parent.children[tokens] = node
                    self._num_unlocked += 1  # until the next line
                    self._lock(node)
                    path.append(node)
            if index < len(path) and 0 <= (at := index - allocation.first_local) < len(allocation.local):
                node = path[index]
                if not node.local:
                    node.local = allocation.local[at]
                    self._lock_local(node)
        allocation.num_filled = max(allocation.num_filled, num_pages)
        if len(path) > num_before:
            self._ends.difference_update(path[num_before - 1 : num_before])
            self._ends.add(path[-1])

    def end(self, allocation: Allocation) -> None:
        assert isinstance(allocation, RadixAllocation)
        self._end_local(allocation)
        self._pool.free(allocation.pages[len(allocation.path) :])
        for node in reversed(allocation.path):
            self._unlock(node)
        allocation.pages.clear()
        allocation.path.clear()
        allocation.is_private, allocation.num_filled = False, 0

    def flush(self) -> int:
        num_free = self._pool.num_free
        while self._num_unlocked:
            self._evict()
        return (self._pool.num_free - num_free) // (1 + self.local.num_parts)

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        found = []
        locks: dict[int, int] = {}
        local_locks: dict[int, int] = {}
        private: list[int] = []
        private_local: list[tuple[int, ...]] = []
        for allocation in allocations:
            path = allocation.path if isinstance(allocation, RadixAllocation) else []
            for node in path:
                locks[id(node)] = locks.get(id(node), 0) + 1
            private += allocation.pages[len(path) :]
            if [node.page for node in path] != allocation.pages[: len(path)]:
                found.append("an allocation's pages are not those of its way down the tree")
            for index, parts in enumerate(allocation.local, allocation.first_local):
                if self._is_shared(allocation, index, parts):
                    local_locks[id(path[index])] = local_locks.get(id(path[index]), 0) + 1
                else:
                    private_local.append(parts)
        nodes = self._nodes()
        pages = [node.page for node in nodes] + private
        found += self._wrong_parts(pages, [node.local for node in nodes if node.local] + private_local)
        found += self._wrong_reserves(allocations)
        if any(node.num_locks != locks.pop(id(node), 0) for node in nodes) or locks:
            found.append("the locks in the tree are not those of the allocations")
        if any(node.num_local_locks != local_locks.pop(id(node), 0) for node in nodes) or local_locks:
            found.append("the locks of local parts are not those of the allocations")
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
            held.append(replace(self._held(allocation, last), is_private=allocation.is_private))
        parents = array("i", [index[id(node.parent)] for node in nodes])
        uses = array("i")
        if self.local.num_parts:
            every = [node.used for node in nodes] + [node.local_used for node in nodes if node.local]
            ordinals = {used: at for at, used in enumerate(sorted(every))}
            for node in nodes:
                uses.extend((ordinals[node.used], ordinals[node.local_used] if node.local else -1))
        digests = b"".join([node.digest for node in nodes])
        return CacheSnapshot(tuple(held), little(parents).tobytes(), digests, little(uses).tobytes())

    def prefixes(self, most: int, namespace: str) -> list[bytes]:
        """Return published digests of at most *most* cached prefixes, those of the last used pages first.

        Of each path they are those whose distance from its end, or number of pages, is a power of two. So of what a
        prompt shares with the path, a digest says at least half, or all but as many pages as the path goes on. Local
        parts may be gone, so a prompt may find less.
        """
        found: dict[bytes, None] = {}
        ends = sorted(self._ends, key=attrgetter("used"), reverse=True)
        self._ends.difference_update(ends[most:])
        walked: set[_Node] = set()
        for end in ends:
            node: _Node | None = end
            while node is not None and node.depth and len(found) < most and len(walked) < MOST_WALKED:
                away, is_fork = end.depth - node.depth, node in walked
                if is_fork or away & (away - 1) == 0 or node.depth & (node.depth - 1) == 0:
                    found[self._prefix_digest(node, namespace)[:PUBLISHED_BYTES]] = None
                if is_fork:  # what is above it was published with another end
                    break
                walked.add(node)
                node = node.parent
        return list(found)

    def _prefix_digest(self, node: _Node, namespace: str) -> bytes:
        missing: list[_Node] = []
        above: _Node | None = node
        while above is not None and above.depth and not above.prefix:
            missing.append(above)
            above = above.parent
        before = above.prefix if above is not None else b""
        for one in reversed(missing):
            before = one.prefix = next_digest(before, int32_bytes(one.tokens), namespace)
        return before

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

    def _lock_local(self, node: _Node) -> None:
        self._counter += 1
        node.local_used = self._counter
        node.num_local_locks += 1

    def _local_parts(self, allocation: Allocation, index: int) -> tuple[int, ...]:
        assert isinstance(allocation, RadixAllocation)
        if index >= len(allocation.path) or not (node := allocation.path[index]).local:
            return self._new_local_parts()
        self._lock_local(node)
        return node.local

    def _is_shared(self, allocation: Allocation, index: int, parts: tuple[int, ...]) -> bool:
        assert isinstance(allocation, RadixAllocation)
        return index < len(allocation.path) and allocation.path[index].local is parts

    def _give_back(self, allocation: Allocation, index: int, parts: tuple[int, ...]) -> None:
        assert isinstance(allocation, RadixAllocation)
        if not self._is_shared(allocation, index, parts):
            self._free_local_parts(parts)
            return
        node = allocation.path[index]
        node.num_local_locks -= 1
        if node.num_local_locks == 0:
            self._push(node.local_used, node, is_local=True)

    def _offer(self, node: _Node) -> None:
        if not node.children:
            self._push(node.used, node, is_local=False)

    def _push(self, used: int, node: _Node, *, is_local: bool) -> None:
        self._num_pushed += 1
        heapq.heappush(self._evictable, (used, self._num_pushed, node, is_local))
        if len(self._evictable) > 2 * self._pool.num_pages:  # most entries are void, and nothing was evicted for long
            self._evictable = [entry for entry in self._evictable if self._is_valid(entry)]
            heapq.heapify(self._evictable)

    def _take(self, count: int) -> list[int]:
        while self._pool.num_free < count:
            self._evict()
        return super()._take(count)

    def _evict(self) -> None:
        """Free the least recently used unlocked leaf, or local parts. The caller has checked that there is one."""
        while True:
            entry = heapq.heappop(self._evictable)
            if self._is_valid(entry):
                break
        _, _, node, is_local = entry
        if node.local and not node.num_local_locks:
            self._free_local_parts(node.local)
            node.local = ()
        if is_local:
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if node in self._ends:
            self._ends.remove(node)
            if parent is not self._root:
                self._ends.add(parent)
        node.parent = None  # makes a second entry of the node in the heap void
        self._num_unlocked -= 1
        self._pool.free([node.page])
        if parent is not self._root and parent.num_locks == 0:
            self._offer(parent)

    @staticmethod
    def _is_valid(entry: tuple[int, int, _Node, bool]) -> bool:
        used, _, node, is_local = entry
        if is_local:
            return bool(node.local) and node.num_local_locks == 0 and node.local_used == used
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

    def __init__(
        self, num_pages: int, page_size: int, snapshot: CacheSnapshot, local: LocalLayers = NO_LOCAL_LAYERS
    ) -> None:
        super().__init__(num_pages, page_size, local)
        self.allocations: list[Allocation] = []
        """Allocations of the snapshot, in its order."""
        parents = little(array("i", snapshot.parents))
        uses = little(array("i", snapshot.uses))
        nodes = [_Node((), page, None) for page in self._pool.allocate(len(parents))]
        for at, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
            digest = snapshot.digests[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)]
            node.tokens = (int.from_bytes(digest),)
            node.parent = nodes[parent] if parent >= 0 else self._root
            node.parent.children[node.tokens] = node
            if uses and uses[2 * at + 1] >= 0:
                node.local = self._new_local_parts()
        self._num_unlocked = len(nodes)
        for held in snapshot.held:
            allocation = RadixAllocation(is_private=held.is_private, num_filled=held.num_covered // page_size)
            node = nodes[held.node] if held.node >= 0 else self._root
            while node.parent is not None:
                allocation.path.insert(0, node)
                self._num_unlocked -= node.num_locks == 0
                node.num_locks += 1
                node = node.parent
            allocation.pages = [node.page for node in allocation.path]
            self.restore(allocation, held)
            self.allocations.append(allocation)
        for at, node in enumerate(nodes):
            node.used, node.local_used = uses[2 * at : 2 * at + 2] if uses else (at + 1, 0)
            if node.num_locks == 0:
                self._offer(node)
            if node.local and not node.num_local_locks:
                self._push(node.local_used, node, is_local=True)
        self._counter = 2 * len(nodes)

    def _page_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return (int.from_bytes(digest_of(super()._page_tokens(token_ids, index))),)

    def _digest(self, tokens: tuple[int, ...]) -> bytes:
        return tokens[0].to_bytes(DIGEST_BYTES)

    def prefixes(self, most: int, namespace: str) -> list[bytes]:
        return []  # it does not know the tokens


def digest_of(tokens: Sequence[int]) -> bytes:
    """Return 8 bytes that stand for the tokens of a page. Different tokens practically never have the same digest."""
    return hashlib.blake2b(int32_bytes(tokens), digest_size=DIGEST_BYTES).digest()
