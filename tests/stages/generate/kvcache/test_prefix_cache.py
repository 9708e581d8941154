"""The contract of every PrefixCache. What its pages hold is checked in `schedule/test_schedule_machine.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.prefixes import prompt_digests
from stages.generate.kvcache import CACHES, make_cache
from stages.generate.kvcache.base import Allocation, PagePool, PrefixCache
from stages.generate.kvcache.radix import RadixCache

PAGES, PAGE_SIZE = 12, 4
Make = Callable[[], PrefixCache]


@pytest.fixture(params=sorted(CACHES))
def make(request: pytest.FixtureRequest) -> Make:
    return lambda: make_cache(request.param, PAGES, PAGE_SIZE)


def started(cache: PrefixCache, tokens: list[int]) -> Allocation:
    """Begin, grow and fill, as the schedule does when it admits a request whose prompt fits one plan."""
    allocation = cache.begin(tokens)
    assert cache.grow(allocation, -(-len(tokens) // PAGE_SIZE) - len(allocation.pages)) is not None
    cache.fill(allocation, tokens, len(tokens))
    return allocation


def test_a_new_cache_can_give_all_its_pages(make: Make) -> None:
    cache = make()
    allocation = cache.begin([1, 2, 3])
    assert cache.grow(allocation, PAGES) == allocation.pages
    assert sorted(allocation.pages) == list(range(PAGES))
    assert cache.num_available == 0


def test_growing_beyond_what_is_there_changes_nothing_until_another_one_ends(make: Make) -> None:
    cache = make()
    first, second = cache.begin([1]), cache.begin([2])
    cache.grow(first, PAGES - 1)
    assert cache.grow(second, 2) is None
    assert second.pages == [] and cache.num_available == 1
    assert cache.problems([first, second]) == []
    cache.end(first)
    assert first.pages == [] and cache.num_available == PAGES
    assert cache.grow(second, PAGES) is not None


def test_what_is_cached_is_whole_pages_and_short_of_the_last_token(make: Make) -> None:
    """At least one token must be computed, or there is nothing to sample the next one from."""
    cache, tokens = make(), list(range(3 * PAGE_SIZE))
    started(cache, tokens)
    second = cache.begin(tokens)
    assert second.cached_tokens % PAGE_SIZE == 0 and second.cached_tokens < len(tokens)
    assert len(second.pages) == second.cached_tokens // PAGE_SIZE


@pytest.mark.parametrize("num_same", [0, 3, 4, 8, 11, 12])
def test_what_would_be_found_is_known_without_beginning(make: Make, num_same: int) -> None:
    cache, tokens = make(), list(range(12))
    cache.end(started(cache, tokens))
    asked = [*tokens[:num_same], *[50] * (13 - num_same)]
    assert cache.num_cached(asked) == cache.begin(asked).cached_tokens


def test_asking_what_would_be_found_locks_no_page_and_uses_none(make: Make) -> None:
    cache = make()
    for first in (1, 2):
        cache.end(started(cache, [first] * PAGE_SIZE + [0]))
    cache.num_cached([1] * PAGE_SIZE + [0])
    assert cache.num_available == PAGES and cache.problems([]) == []
    assert cache.grow(cache.begin([9]), PAGES - 1) is not None
    assert cache.num_cached([1] * PAGE_SIZE + [0]) == 0, "the first one is still the oldest"


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
    allocation = cache.begin([1])
    cache.grow(allocation, 2)
    assert cache.problems([]) != []
    assert cache.problems([allocation, Allocation(pages=list(allocation.pages))]) != []


# What the radix cache shares


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(PAGES, PAGE_SIZE)


def test_a_prompt_in_flight_is_shared_as_soon_as_its_plan_is_made(cache: RadixCache) -> None:
    tokens = list(range(10))
    first = started(cache, tokens)
    second = cache.begin(tokens)
    assert second.cached_tokens == 8 and second.pages == first.pages[:2]


def test_a_shared_prefix_is_found_after_its_request_has_ended(cache: RadixCache) -> None:
    first = started(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    pages = list(first.pages)
    cache.end(first)
    again = cache.begin([1, 2, 3, 4, 5, 6, 7, 8, 50, 51])
    assert again.pages == pages[:2]
    other = cache.begin([1, 2, 3, 4, 60, 61, 62, 63, 64])
    assert other.pages == pages[:1]


def test_a_page_of_the_same_tokens_after_others_is_another_page(cache: RadixCache) -> None:
    started(cache, [1, 2, 3, 4, 9, 9, 9, 9, 0])
    assert cache.begin([9, 9, 9, 9, 0]).cached_tokens == 0


def test_the_output_of_a_request_is_a_prefix_of_the_next_turn(cache: RadixCache) -> None:
    tokens = [1, 2, 3, 4, 5]
    allocation = started(cache, tokens)
    tokens += [6, 7, 8]
    cache.fill(allocation, tokens, 8)
    assert cache.begin([*tokens, 9]).cached_tokens == 8


def test_a_locked_page_is_never_evicted_and_what_was_used_last_goes_last() -> None:
    cache = RadixCache(6, PAGE_SIZE)
    held = started(cache, [1, 1, 1, 1, 0])
    for first in (2, 3):
        cache.end(started(cache, [first] * 4 + [0]))
    cache.end(cache.begin([2, 2, 2, 2, 0]))  # used again, so 3 is the oldest
    taker = cache.begin([7])
    assert cache.grow(taker, 3) is not None
    assert cache.begin([3, 3, 3, 3, 0]).cached_tokens == 0
    again = cache.begin([2, 2, 2, 2, 0])
    assert again.cached_tokens == 4
    assert cache.grow(taker, 2) is None  # one page is free; the rest is held
    assert cache.problems([held, taker, again]) == []


def test_a_chain_is_evicted_from_its_leaf() -> None:
    cache = RadixCache(4, PAGE_SIZE)
    cache.end(started(cache, [1] * 12 + [0]))
    taker = cache.begin([5])
    assert cache.grow(taker, 2) is not None
    assert cache.begin([1] * 12 + [0]).cached_tokens == 8


def two_at_once(cache: PrefixCache) -> tuple[Allocation, Allocation]:
    """Two requests with the same nine tokens that both began before either had filled a page."""
    tokens = list(range(9))
    first, second = cache.begin(tokens), cache.begin(tokens)
    for allocation in (first, second):
        cache.grow(allocation, 3)
    for allocation in (first, second):
        cache.fill(allocation, tokens, 9)
    return first, second


def test_two_that_computed_the_same_at_once_keep_their_own_pages_and_free_them(cache: RadixCache) -> None:
    first, second = two_at_once(cache)
    assert set(first.pages).isdisjoint(second.pages)
    assert cache.problems([first, second]) == []
    cache.end(first)
    assert cache.problems([second]) == []
    cache.end(second)
    assert cache.num_available == PAGES and cache.problems([]) == []


def test_alone_a_request_can_have_every_page_also_when_it_computed_what_another_one_did(cache: RadixCache) -> None:
    first, second = two_at_once(cache)
    cache.end(first)
    assert cache.grow(second, PAGES - 3) is not None
    assert cache.num_available == 0 and cache.problems([second]) == []


def test_flushing_forgets_what_nobody_holds(cache: RadixCache) -> None:
    held = started(cache, [1, 1, 1, 1, 0])
    cache.end(started(cache, [2, 2, 2, 2, 0]))
    assert cache.flush() == 1
    assert cache.begin([2, 2, 2, 2, 0]).cached_tokens == 0
    again = cache.begin([1, 1, 1, 1, 0])
    assert again.cached_tokens == 4
    assert cache.problems([held, again]) == []


# What the radix cache gives up after long lives, which random stories of a few dozen steps do not reach


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
    allocation = cache.begin(tokens)
    assert cache.grow(allocation, 3) is not None
    for num_filled, found in ((3, 0), (4, 4), (7, 4), (8, 8), (9, 8)):
        cache.fill(allocation, tokens, num_filled)
        other = cache.begin([*tokens, 10])
        assert other.cached_tokens == found
        cache.end(other)
    assert cache.problems([allocation]) == []


def matched(cache: RadixCache, tokens: list[int], most: int = 100) -> int:
    """Return how many pages of a prompt the published digests say are cached."""
    published = set(cache.prefixes(most, "ns"))
    of_prompt = prompt_digests(tokens, PAGE_SIZE, "ns")
    return next((n for n in range(len(of_prompt), 0, -1) if of_prompt[n - 1] in published), 0)


def test_published_digests_say_what_a_prompt_would_find() -> None:
    cache, tokens = RadixCache(40, PAGE_SIZE), list(range(20 * PAGE_SIZE))
    allocation = started(cache, tokens)
    for num_same in range(21):
        prompt = [*tokens[: num_same * PAGE_SIZE], *range(1000, 1000 + PAGE_SIZE + 1)]
        found, really = matched(cache, prompt), cache.num_cached(prompt) // PAGE_SIZE
        assert really / 2 <= found <= really == num_same
    assert matched(cache, [*tokens, 7]) == 20
    cache.end(allocation)
    assert matched(cache, [*tokens, 7]) == 20


def test_a_request_that_goes_on_is_published_as_far_as_it_is() -> None:
    cache, tokens = RadixCache(40, PAGE_SIZE), list(range(3 * PAGE_SIZE))
    allocation = started(cache, tokens)
    for page in range(3, 12):
        tokens += range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        cache.grow(allocation, 1)
        cache.fill(allocation, tokens, len(tokens))
        assert matched(cache, [*tokens, 7]) == page + 1
    assert len(cache._ends) == 1


def test_many_ends_below_one_prefix_are_published_and_each_page_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, document = RadixCache(2000, PAGE_SIZE), list(range(500 * PAGE_SIZE))
    questions = [
        [*document, *(10_000 + 100 * number + token for token in range(2 * PAGE_SIZE))] for number in range(60)
    ]
    for question in questions:
        cache.end(started(cache, question))
    monkeypatch.setattr("stages.generate.kvcache.radix.MOST_WALKED", 500 + 2 * 60)
    assert {matched(cache, [*question, 7], 1000) for question in questions} == {502}
    assert matched(cache, [*document, 9_999, 7, 7, 7, 7], 1000) == 500, "where they part"


def test_what_was_evicted_is_not_published() -> None:
    cache, tokens = RadixCache(12, PAGE_SIZE), list(range(10 * PAGE_SIZE))
    cache.end(started(cache, tokens))
    cache.end(started(cache, list(range(500, 500 + 6 * PAGE_SIZE))))
    really = cache.num_cached([*tokens, 7]) // PAGE_SIZE
    assert 0 < really < 10
    assert matched(cache, [*tokens, 7]) == really
    cache.flush()
    assert cache.prefixes(100, "ns") == [] and not cache._ends


def test_the_last_used_are_published_if_not_all_can_be() -> None:
    cache = RadixCache(400, PAGE_SIZE)
    prompts = [[number * 1000 + token for token in range(8 * PAGE_SIZE)] for number in range(10)]
    for prompt in prompts:
        cache.end(started(cache, prompt))
    cache.end(started(cache, [*prompts[0], *range(5 * PAGE_SIZE)]))
    assert len(cache.prefixes(12, "ns")) == 12
    assert matched(cache, [*prompts[0], 1], 12) == 8 and matched(cache, [*prompts[1], 1], 12) == 0
    assert make_cache("naive", 4, 4).prefixes(12, "ns") == []
