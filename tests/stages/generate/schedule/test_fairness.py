"""Who waits for whom: streams for no prompt, nobody for ever, and the same prompt is computed once."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from support import schedules
from support.schedules import marked, request, step

from pipeline.events import EventRow
from stages.generate.kvcache import CACHES
from stages.generate.schedule.plan import Work
from stages.generate.schedule.schedule import Schedule, ScheduleLimits

LONG = 2000
MIXED, PREFILL = 16, 2048
STREAMS = 8


def make_schedule(cache: str, *, num_pages: int = 1000, page_size: int = 64, running: int = 32) -> Schedule:
    context = min(4096, num_pages * page_size)
    return schedules.make_schedule(
        cache,
        num_pages=num_pages,
        page_size=page_size,
        context=context,
        prefill=PREFILL,
        mixed=MIXED,
        running=running,
        vocab_size=1_000_000,
    )


def add(schedule: Schedule, uid: str, length: int, *, max_tokens: int = 1000, **more: Any) -> None:
    assert schedule.add(request(uid, length, max_tokens=max_tokens, **more)) is None


def start_streams(schedule: Schedule) -> list[str]:
    """Let eight requests of different prompts decode."""
    streams = [f"stream {number}" for number in range(STREAMS)]
    for number, uid in enumerate(streams):
        add(schedule, uid, 40, first=1000 * number)
    while len(step(schedule)[2]) < STREAMS:
        pass
    return streams


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_prompts_of_two_thousand_tokens_never_keep_a_stream_waiting_for_a_step(cache: str) -> None:
    schedule = make_schedule(cache)
    streams = start_streams(schedule)
    arrivals = {5: "a", 60: "b", 61: "c"}
    first_tokens: dict[str, int] = {}
    for number in range(600):
        if number in arrivals:
            add(schedule, arrivals[number], LONG, first=50_000 + 3000 * number, max_tokens=700)
        plan, _, rows = step(schedule)
        said = [row.uid for row in rows]
        assert [uid for uid in said if uid in streams] == streams, "each stream says one token in each step"
        assert sum(len(row.token_ids) for row in plan.rows[plan.num_decode_rows :]) <= MIXED
        first_tokens |= {uid: number for uid in said if uid in arrivals.values() and uid not in first_tokens}
    # Each prompt takes 2000 / 16 steps, one prompt after the other.
    assert first_tokens == {"a": 129, "b": 254, "c": 379}


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_an_important_prompt_is_through_before_a_long_one_that_came_first_and_streams_go_on(cache: str) -> None:
    schedule = make_schedule(cache)
    streams = start_streams(schedule)  # of priority 0
    first_tokens: dict[str, int] = {}
    for number in range(200):
        if number == 0:
            add(schedule, "long", LONG, first=50_000, priority=5)
        if number == 10:
            add(schedule, "important", 160, first=60_000, priority=1)
        _, marks, rows = step(schedule)
        said = [row.uid for row in rows]
        assert [uid for uid in said if uid in streams] == streams, "each stream says one token in each step"
        assert marked(marks, "preempted") == []
        first_tokens |= {uid: number for uid in said if uid not in streams and uid not in first_tokens}
    assert first_tokens == {"important": 19, "long": 134}  # 160 / 16 steps from 10 on; 2000 / 16 without those


@pytest.mark.parametrize(
    ("streams", "requests", "budget"),
    [(0, 3, 100), (1, 1, 16), (8, 8, 16), (8, 9, 18), (1, 24, 48), (32, 32, 64), (60, 61, 100)],
)
def test_the_budget_beside_streams_grows_with_the_requests_where_that_is_wanted(
    streams: int, requests: int, budget: int
) -> None:
    limits = ScheduleLimits(4096, 100, MIXED, 64, 10, mixed_prefill_per_request=2)
    assert limits.prefill_budget(streams, requests) == budget
    assert ScheduleLimits(4096, 100, MIXED, 64, 10).prefill_budget(streams, requests) == (MIXED if streams else 100)


def prompt_tokens(schedule: Schedule, mixed_prefill_length: int | None) -> int:
    """Make a step under a budget; return how many prompt tokens it has beside the streams."""
    plan, _, _ = step(schedule, mixed_prefill_length=mixed_prefill_length)
    assert plan.num_decode_rows in (0, STREAMS)
    return sum(len(row.token_ids) for row in plan.rows[plan.num_decode_rows :])


def test_a_budget_that_is_given_to_a_plan_takes_the_place_of_the_limits() -> None:
    schedule = make_schedule("naive")
    add(schedule, "alone", LONG, first=50_000, max_tokens=1)
    assert [prompt_tokens(schedule, budget) for budget in (3, None)] == [3, LONG - 3], "nothing decodes"
    start_streams(schedule)
    for uid, first in (("a", 60_000), ("b", 70_000)):
        add(schedule, uid, LONG, first=first, max_tokens=1)
    budgets = [5, 0, None, 40, 1, 100_000]
    assert [prompt_tokens(schedule, budget) for budget in budgets] == [5, 0, MIXED, 40, 1, PREFILL]
    assert schedule.add(request("goes on", LONG, output=[1, 2], first=80_000)) is None
    assert prompt_tokens(schedule, 5) == PREFILL, "a stream stands still"


def test_what_there_is_to_compute_is_known_before_the_plan() -> None:
    schedule = make_schedule("radix")
    assert schedule.work == Work(0, 0, [])
    streams = start_streams(schedule)
    length = sum(schedule.num_tokens(uid) for uid in streams)
    assert schedule.work == Work(STREAMS, length, []) and not schedule.has_prompts
    add(schedule, "first", LONG, first=50_000)
    add(schedule, "second", LONG, first=60_000)
    assert schedule.work == Work(STREAMS, length, [(0, LONG), (0, LONG)]) and schedule.has_prompts
    step(schedule)
    assert schedule.work == Work(STREAMS, length + STREAMS, [(MIXED, LONG - MIXED), (0, LONG)])
    for _ in range(LONG // MIXED - 1):
        step(schedule)
    assert schedule.work == Work(STREAMS + 1, length + STREAMS * LONG // MIXED + LONG + 1, [(0, LONG)])
    add(schedule, "cached", LONG, first=50_000)
    assert schedule.work.prompts == [(LONG // 64 * 64, LONG % 64), (0, LONG)]
    schedule.drop("cached")
    for _ in range(LONG // MIXED):
        assert schedule.has_prompts, "it waits, or has begun"
        step(schedule)
    assert not schedule.has_prompts


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_when_pages_run_out_it_is_the_long_prompt_that_gives_way_and_no_stream(cache: str) -> None:
    schedule = make_schedule(cache, num_pages=8 * 3 + 24)  # streams of up to 3 pages each, and 2000 tokens take 32
    streams = start_streams(schedule)
    add(schedule, "long", LONG, first=50_000, max_tokens=10)
    preempted: list[str] = []
    for _ in range(120):
        _, marks, rows = step(schedule)
        preempted += marked(marks, "preempted")
        assert [row.uid for row in rows if row.uid in streams] == streams
    assert set(preempted) == {"long"}
    for uid in streams:
        schedule.drop(uid)
    assert any(row.uid == "long" for _ in range(3) for row in step(schedule)[2])


@pytest.mark.parametrize(("page_size", "beside_streams"), [(16, False), (64, False), (64, True)])
def test_sixteen_identical_prompts_cost_one_prefill_and_fifteen_last_pages(
    page_size: int, beside_streams: bool
) -> None:
    """2,000 tokens end 16 tokens after a border of 64 and on a border of 16; the last token is computed in any case.
    So with both page sizes 16 tokens are left to each that comes second: 2000 + 15 * 16 in all. Beside streams the
    prompt goes in chunks of 16: a second one is admitted when the first is through, and finds it.
    """
    schedule = make_schedule("radix", page_size=page_size)
    streams = start_streams(schedule) if beside_streams else []
    for number in range(16):
        add(schedule, str(number), LONG, first=50_000, max_tokens=1)
    computed, ended = 0, 0
    while ended < 16:
        plan, _, rows = step(schedule)
        computed += sum(len(row.token_ids) for row in plan.rows[plan.num_decode_rows :])
        ended += sum(row.uid not in streams for row in rows)
    assert computed == LONG + 15 * 16


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize(("large", "small"), [(0, 0), (-1, 0), (1, 1), (0, 7)])
def test_a_request_that_needs_every_page_gets_in_although_small_ones_of_no_lower_priority_keep_coming(
    cache: str, large: int, small: int
) -> None:
    schedule = make_schedule(cache, num_pages=32, running=4)
    uids = (str(number) for number in itertools.count())
    for _ in range(4):
        add(schedule, next(uids), 64, max_tokens=200, priority=small)
    step(schedule)
    add(schedule, "large", LONG, first=50_000, max_tokens=4, priority=large)
    for _ in range(400):
        if schedule.room:
            add(schedule, next(uids), 64, max_tokens=200, priority=small)
        if any(row.uid == "large" and row.end is not None for row in step(schedule)[2]):
            return
    pytest.fail("it starves")


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_an_unimportant_request_waits_while_important_ones_keep_coming_and_ends_when_they_stop(cache: str) -> None:
    schedule = make_schedule(cache, num_pages=32, running=4)
    uids = (str(number) for number in itertools.count())
    for _ in range(4):
        add(schedule, next(uids), 64, max_tokens=20)
    add(schedule, "unimportant", 64, first=50_000, max_tokens=20, priority=1)
    ended: list[str] = []
    for number in range(400):
        if number % 4 == 0 and number < 200:
            add(schedule, next(uids), 64, max_tokens=20)
        if schedule.num_running or schedule.num_waiting:
            ended += [row.uid for row in step(schedule)[2] if row.end is not None]
    assert ended[-1] == "unimportant" and len(ended) == 4 + 50 + 1


def test_a_flush_forgets_what_nobody_computes_with_and_leaves_the_rest() -> None:
    schedule = make_schedule("radix")
    add(schedule, "gone", 640, max_tokens=1)
    step(schedule)
    add(schedule, "here", 640, first=50_000)
    step(schedule)
    assert schedule.flush() == 10
    for uid, first in (("gone again", 0), ("here again", 50_000)):
        add(schedule, uid, 640, first=first)
    cached: dict[str, int] = {}
    for _ in range(100):
        cached |= {
            mark.uid: mark.event.cached_tokens
            for mark in step(schedule)[1]
            if isinstance(mark, EventRow) and mark.event.kind == "admitted"
        }
    assert cached == {"gone again": 0, "here again": 576}


def tokens_of_owners(schedule: Schedule, owners: dict[int, str]) -> dict[str, int]:
    """Make a step with eight tokens of prompts and return how many of each owner it has. *owners*: by first token."""
    plan, _, _ = step(schedule, mixed_prefill_length=8)
    counts: dict[str, int] = {}
    for row in plan.rows[plan.num_decode_rows :]:
        owner = owners[row.token_ids[0] // 10_000]
        counts[owner] = counts.get(owner, 0) + len(row.token_ids)
    return counts


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_two_owners_share_prompt_tokens_by_their_weights(cache: str) -> None:
    schedule = make_schedule(cache)
    start_streams(schedule)
    for number in range(3):
        add(schedule, f"a{number}", LONG, first=10_000 + 2500 * number, owner="ann", weight=1)
        add(schedule, f"b{number}", LONG, first=20_000 + 2500 * number, owner="bob", weight=3)
    total = dict.fromkeys(("ann", "bob"), 0)
    for _ in range(300):
        for owner, count in tokens_of_owners(schedule, {1: "ann", 2: "bob"}).items():
            total[owner] += count
    assert total["ann"] / sum(total.values()) == pytest.approx(0.25, rel=0.05)


def test_the_prompt_of_another_owner_is_next_however_many_tokens_of_an_owner_wait() -> None:
    schedule = make_schedule("radix")
    start_streams(schedule)
    for number in range(8):
        add(schedule, f"a{number}", LONG, first=10_000 + 2500 * number, owner="ann")
    for _ in range(5):
        assert tokens_of_owners(schedule, {1: "ann"}) == {"ann": 8}
    add(schedule, "b", 30, first=40_000, owner="bob")
    assert [tokens_of_owners(schedule, {1: "ann", 4: "bob"}) for _ in range(8)] == [
        {"bob": 8},
        {"ann": 8},
        {"bob": 8},
        {"ann": 8},
        {"bob": 8},
        {"ann": 8},
        {"bob": 6, "ann": 2},
        {"ann": 8},
    ]


def test_the_owner_with_the_most_pages_gives_some_back() -> None:
    schedule = make_schedule("naive", num_pages=8, page_size=16, running=8)
    for uid, owner in (("b", "bob"), ("a0", "ann"), ("a1", "ann"), ("a2", "ann")):
        add(schedule, uid, 31, first=1000 * len(uid), owner=owner, max_tokens=60)
    preempted: list[str] = []
    while len(preempted) < 2:
        preempted += marked(step(schedule)[1], "preempted")
    assert preempted == ["a2", "a1"], "although they came last of two owners with equal priorities"
    later = make_schedule("naive", num_pages=8, page_size=16, running=8)
    for uid, owner in (("a0", "ann"), ("a1", "ann"), ("a2", "ann"), ("b", "bob")):
        add(later, uid, 31, first=1000 * len(uid), owner=owner, max_tokens=60)
    preempted = []
    while not preempted:
        preempted += marked(step(later)[1], "preempted")
    assert preempted == ["a2", "a1"], "not the one that came last"


def test_who_waits_for_pages_does_not_keep_other_owners_out_of_the_engine() -> None:
    schedule = make_schedule("naive", num_pages=10, page_size=16, running=8)
    add(schedule, "a0", 100, owner="ann", max_tokens=20)
    add(schedule, "a1", 100, first=500, owner="ann", max_tokens=20)
    step(schedule)
    assert schedule.room == 0 and schedule.num_waiting == 1
    count, but = schedule.room_for_others
    assert count > 0 and but == ("ann",)
    add(schedule, "b", 20, first=900, owner="bob", max_tokens=5)
    assert marked(step(schedule)[1], "admitted") == ["b"], "it is its turn, and there are pages for it"
    assert schedule.room_for_others[1] == ("ann",)


def test_owners_that_come_again_and_again_starve_none_that_waits() -> None:
    schedule = make_schedule("naive")
    start_streams(schedule)
    add(schedule, "v", 200, first=10_000, owner="v")
    first_token = None
    for number in range(300):
        add(schedule, f"n{number}", 16, first=20_000 + 20 * number, owner=f"n{number}", max_tokens=1)
        _, _, rows = step(schedule)
        if any(row.uid == "v" for row in rows):
            first_token = first_token or number
    assert first_token is not None and first_token < 150, "although more come than can be computed"
    assert len(schedule._turns.given) < 50, "owners that were served are forgotten"


def test_an_owner_saves_no_turns_while_others_have_theirs_or_its_least_urgent_request_waits() -> None:
    schedule = make_schedule("naive")
    start_streams(schedule)
    late = request("later", 16, first=90_000, owner="c", max_tokens=1, priority=2**31)
    assert schedule.add(dataclasses.replace(late, overtakes=True)) is None
    for number in range(100):
        for owner in "ab":
            add(schedule, f"{owner}{number}", 16, first=20_000 + 20 * number, owner=owner, max_tokens=1)
    shares: dict[str, int] = {}
    for number in range(120):
        if number == 60:
            for other in range(60):
                add(schedule, f"c{other}", 16, first=50_000 + 20 * other, owner="c", max_tokens=1)
        for row in step(schedule)[2]:
            if row.end and number >= 60:
                shares[row.uid[0]] = shares.get(row.uid[0], 0) + 1
    assert shares["c"] <= 21, shares
