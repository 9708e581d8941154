"""The contract of every PrefixCache, over random lives of requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.generate.kvcache import CACHES, make_cache
from stages.generate.kvcache.base import Holding, PrefixCache
from stages.generate.kvcache.pages import PagePool

PAGES, PAGE_SIZE = 12, 4
Make = Callable[[], PrefixCache]


@pytest.fixture(params=sorted(CACHES))
def make(request: pytest.FixtureRequest) -> Make:
    return lambda: make_cache(request.param, PAGES, PAGE_SIZE)


def test_a_new_cache_can_give_all_its_pages(make: Make) -> None:
    cache = make()
    holding = cache.begin([1, 2, 3])
    assert cache.grow(holding, PAGES) == holding.pages
    assert sorted(holding.pages) == list(range(PAGES))
    assert cache.num_available == 0


def test_growing_beyond_what_is_there_changes_nothing(make: Make) -> None:
    cache = make()
    first, second = cache.begin([1]), cache.begin([2])
    cache.grow(first, PAGES - 1)
    assert cache.grow(second, 2) is None
    assert second.pages == [] and cache.num_available == 1
    assert cache.problems([first, second]) == []


def test_the_pages_of_an_ended_request_can_be_given_again(make: Make) -> None:
    cache = make()
    holding = cache.begin([1, 2, 3])
    cache.grow(holding, PAGES)
    cache.end(holding)
    assert holding.pages == [] and cache.num_available == PAGES
    again = cache.begin([4, 5, 6])
    assert cache.grow(again, PAGES) is not None


def test_what_is_cached_is_whole_pages_and_short_of_the_last_token(make: Make) -> None:
    """At least one token must be computed, or there is nothing to sample the next one from."""
    cache = make()
    tokens = list(range(3 * PAGE_SIZE))
    first = cache.begin(tokens)
    cache.grow(first, 3)
    cache.fill(first, tokens, len(tokens))
    second = cache.begin(tokens)
    assert second.cached_tokens % PAGE_SIZE == 0 and second.cached_tokens < len(tokens)
    assert len(second.pages) == second.cached_tokens // PAGE_SIZE


@pytest.mark.parametrize("name", sorted(CACHES))
@given(data=st.data())
def test_no_page_is_lost_and_none_is_written_by_two(name: str, data: st.DataObject) -> None:
    cache = make_cache(name, PAGES, PAGE_SIZE)
    running: list[tuple[Holding, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        ends = data.draw(st.booleans())
        if running and ends:
            holding, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            cache.end(holding)
        else:
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4 * PAGE_SIZE))
            holding = cache.begin(tokens)
            if cache.grow(holding, -(-len(tokens) // PAGE_SIZE) - len(holding.pages)) is None:
                cache.end(holding)
            else:
                cache.fill(holding, tokens, len(tokens))
                running.append((holding, tokens))
        assert cache.problems([holding for holding, _ in running]) == []
        written = [page for holding, _ in running for page in holding.pages[holding.cached_tokens // PAGE_SIZE :]]
        assert len(written) == len(set(written))
    for holding, _ in running:
        cache.end(holding)
    assert cache.num_available == PAGES


def test_a_page_freed_twice_is_our_bug_and_is_said() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)


def test_pages_come_back_in_the_order_in_which_they_were_freed() -> None:
    pool = PagePool(3)
    a, b, c = pool.allocate(3)
    pool.free([c, a])
    pool.free([b])
    assert pool.allocate(3) == [c, a, b]


def test_the_books_are_said_to_be_wrong_when_they_are(make: Make) -> None:
    cache = make()
    holding = cache.begin([1])
    cache.grow(holding, 2)
    assert cache.problems([]) != []
    assert cache.problems([holding, Holding(pages=list(holding.pages))]) != []
