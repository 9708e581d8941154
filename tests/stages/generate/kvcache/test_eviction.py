"""Which pages the tree gives up, after long lives: what random stories of a few dozen steps do not reach."""

from __future__ import annotations

from stages.generate.kvcache.base import Holding
from stages.generate.kvcache.radix import RadixCache

PAGE_SIZE = 4


def started(cache: RadixCache, tokens: list[int]) -> Holding:
    """Begin, grow and fill, as the schedule does when it admits a request whose prompt fits one plan."""
    holding = cache.begin(tokens)
    assert cache.grow(holding, -(-len(tokens) // PAGE_SIZE) - len(holding.pages)) is not None
    cache.fill(holding, tokens, len(tokens))
    return holding


def page_of(first: int) -> list[int]:
    """Return a prompt of one full page and one token."""
    return [first] * PAGE_SIZE + [0]


def test_when_one_page_is_used_again_and_again_the_others_can_still_be_evicted() -> None:
    """Each use leaves an entry among those that may be evicted; now and then the void ones are cleared away."""
    num_pages = 8
    cache = RadixCache(num_pages, PAGE_SIZE)
    for first in range(6):
        cache.end(started(cache, page_of(first)))
    for _ in range(20 * num_pages):
        cache.end(cache.begin(page_of(0)))
    assert cache.problems([]) == []
    taker = cache.begin([9])
    assert cache.grow(taker, num_pages) is not None
    assert cache.problems([taker]) == []


def test_after_many_uses_it_is_still_the_least_recently_used_that_goes() -> None:
    num_pages, order = 8, [3, 1, 4, 0, 5, 2]
    for num_evicted in range(1, 6):
        cache = RadixCache(num_pages, PAGE_SIZE)
        for first in range(6):
            cache.end(started(cache, page_of(first)))
        for _ in range(10 * num_pages):
            cache.end(cache.begin(page_of(0)))
        for first in order:
            cache.end(cache.begin(page_of(first)))
        taker = cache.begin([9])
        assert cache.grow(taker, 2 + num_evicted) is not None  # two pages were free
        assert [first for first in order if cache.begin(page_of(first)).cached_tokens] == order[num_evicted:]


def test_of_two_chains_the_one_used_longer_ago_is_evicted_whole_before_the_other_is_touched() -> None:
    cache = RadixCache(8, PAGE_SIZE)
    older, newer = [1] * 12 + [0], [2] * 12 + [0]
    cache.end(started(cache, older))
    cache.end(started(cache, newer))
    taker = cache.begin([9])
    assert cache.grow(taker, 2 + 3) is not None
    assert cache.begin(older).cached_tokens == 0
    again = cache.begin(newer)
    assert again.cached_tokens == 12
    assert cache.grow(taker, 1) is None and cache.problems([taker, again]) == []


def test_a_page_that_is_not_full_is_nobody_elses() -> None:
    cache = RadixCache(8, PAGE_SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    holding = cache.begin(tokens)
    assert cache.grow(holding, 3) is not None
    for num_filled, found in ((3, 0), (4, 4), (7, 4), (8, 8), (9, 8)):
        cache.fill(holding, tokens, num_filled)
        other = cache.begin([*tokens, 10])
        assert other.cached_tokens == found
        cache.end(other)
    assert cache.problems([holding]) == []
