"""A plan is made while the step before is in flight: before its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.schedules import make_schedule, marked, num_samples, planned, request, step

from pipeline.events import Admitted, EventRow, TokenRow
from stages.generate.schedule.plan import BatchPlan, RowScores, filled
from stages.generate.schedule.schedule import Schedule


def ahead(schedule: Schedule) -> BatchPlan:
    """Return the next plan."""
    return planned(schedule)[0]


def landed(schedule: Schedule, *token_ids: int) -> list[tuple[str, int, int]]:
    """Let the oldest step land; return uid, number and token of its rows."""
    rows: list[TokenRow] = schedule.complete(token_ids)
    assert schedule.problems() == []
    return [(row.uid, row.n, row.token) for row in rows]


def tokens_of(plan: BatchPlan) -> list[tuple[int, ...]]:
    return [row.token_ids for row in plan.rows]


def test_a_placeholder_names_the_row_of_the_step_before() -> None:
    schedule = make_schedule(mixed=32)
    for uid in "abc":
        schedule.add(request(uid, length=2))
    ahead(schedule)
    second = ahead(schedule)
    assert tokens_of(second) == [(-1,), (-2,), (-3,)]
    assert [row.start for row in second.rows] == [2, 2, 2] and second.num_decode_rows == 3
    assert landed(schedule, 7, 8, 9) == [("a", 1, 7), ("b", 1, 8), ("c", 1, 9)]
    schedule.drop("a")
    third = ahead(schedule)
    assert tokens_of(third) == [(-2,), (-3,)], "of those that the second one samples"
    assert tokens_of(filled(second, [7, 8, 9])) == [(7,), (8,), (9,)]
    assert landed(schedule, 10, 11, 12) == [("b", 2, 11), ("c", 2, 12)]
    assert landed(schedule, 13, 14) == [("b", 3, 13), ("c", 3, 14)]
    assert tokens_of(ahead(schedule)) == [(13,), (14,)], "nothing is in flight"


def test_the_samples_of_two_steps_in_flight_do_not_change_each_other() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=4, seed=3))

    def positions(*plans: BatchPlan) -> list[int]:
        samples = [plan.rows[0].sample for plan in plans]
        return [sample.position for sample in samples if sample is not None]

    first, second = ahead(schedule), ahead(schedule)
    assert positions(first, second) == [4, 5]
    landed(schedule, 7)
    assert positions(second, ahead(schedule)) == [5, 6]


def test_no_row_is_planned_for_a_request_that_ends_by_length_with_the_step_in_flight() -> None:
    schedule = make_schedule()
    schedule.add(request("a", max_tokens=1))
    schedule.add(request("b", max_tokens=2))
    ahead(schedule)
    assert len(ahead(schedule).rows) == 1
    assert landed(schedule, 7, 7) == [("a", 1, 7), ("b", 1, 7)]
    assert schedule.plan() is None and schedule.num_running == 1, "it ends with what is in flight"
    assert landed(schedule, 7) == [("b", 2, 7)]
    assert (schedule.num_running, schedule.free_pages) == (0, 100)


def test_what_follows_the_end_of_a_request_is_forgotten() -> None:
    schedule = make_schedule(eos_ids=[3])
    schedule.add(request("a"))
    ahead(schedule)
    ahead(schedule)
    assert landed(schedule, 3) == [("a", 1, 3)]
    assert schedule.num_running == 0 and schedule.free_pages < 100, "its pages are still written to"
    assert landed(schedule, 8) == []
    assert schedule.free_pages == 100


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_a_cancelled_request_keeps_pages_and_table_until_its_step_has_landed(cache: str) -> None:
    schedule = make_schedule(cache, running=2)
    schedule.add(request("a", length=8))
    table = ahead(schedule).rows[0].table
    free = schedule.free_pages
    assert schedule.drop("a")
    schedule.flush()
    schedule.add(request("b", length=8, first=50))
    second = ahead(schedule)
    assert second.rows[0].table != table and schedule.free_pages == free - 2
    assert schedule.problems() == []
    assert landed(schedule, 7) == []
    assert schedule.free_pages == 98
    schedule.add(request("c", length=8, first=70))
    assert table in [row.table for row in ahead(schedule).rows]


def test_a_chunk_in_flight_keeps_the_pages_of_a_request_that_was_cancelled() -> None:
    schedule = make_schedule(prefill=4)
    schedule.add(request("a", length=20))
    assert num_samples(ahead(schedule)) == 0
    schedule.drop("a")
    assert schedule.free_pages == 95 and schedule.problems() == []
    assert landed(schedule) == []
    assert schedule.free_pages == 100


def test_a_uid_that_left_and_came_back_does_not_get_the_old_token() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=3))
    ahead(schedule)
    schedule.drop("a")
    schedule.add(request("a", length=3, output=(5, 6)))
    second = ahead(schedule)
    assert landed(schedule, 7) == []
    assert schedule.num_output("a") == 2
    assert tokens_of(second) == [(0, 1, 2, 5, 6)]
    assert landed(schedule, 8) == [("a", 3, 8)]


def test_with_too_few_pages_the_step_lands_before_anybody_is_preempted() -> None:
    schedule = make_schedule(num_pages=4, context=16, mixed=32)
    for uid in "ab":
        schedule.add(request(uid, length=7))
    ahead(schedule)
    assert len(ahead(schedule).rows) == 2
    landed(schedule, 7, 7)
    assert schedule.plan() is None, "both need a page, and none is free"
    landed(schedule, 8, 8)
    plan, marks = planned(schedule)
    assert marked(marks, "preempted") == ["b"] and [mark.n for mark in marks] == [2]
    assert tokens_of(plan) == [(8,)]


@pytest.mark.parametrize(("comes", "cached"), [("before its last token is known", 0), ("after that", 4)])
def test_a_page_is_shared_once_all_its_tokens_are_known(comes: str, cached: int) -> None:
    schedule = make_schedule("radix", mixed=32)
    schedule.add(request("a", length=3))
    ahead(schedule)
    if comes == "after that":
        ahead(schedule)  # fills the first page
        landed(schedule, 3)
    schedule.add(request("b", length=5))  # 0 1 2 3 4
    _, (mark,) = planned(schedule)
    assert isinstance(mark, EventRow) and isinstance(mark.event, Admitted) and mark.event.cached_tokens == cached


def test_marks_count_the_tokens_that_are_known() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=3))
    ahead(schedule)
    ahead(schedule)
    assert schedule.num_output("a") == 0 and schedule.num_tokens("a") == 3
    landed(schedule, 7)
    assert schedule.num_output("a") == 1
    landed(schedule, 7)
    assert [mark.n for mark in schedule.isolate("b")] == [2]


def test_after_a_failure_the_step_after_it_is_undone_too() -> None:
    schedule = make_schedule("radix", mixed=32)
    schedule.add(request("a", length=3))
    assert landed_at_once(schedule, 7) == [("a", 1, 7)]
    first = ahead(schedule)
    schedule.add(request("b", length=3))
    ahead(schedule)
    schedule.add(request("c", length=3))
    marks = schedule.start_over()
    assert marked(marks, "preempted") == ["b", "a"] and [mark.n for mark in marks] == [0, 1]
    assert schedule.free_pages == 100 and schedule.problems() == []
    again = ahead(schedule)
    assert again.step == first.step + 1
    assert tokens_of(again) == [(0, 1, 2, 7), (0, 1, 2), (0, 1, 2)], "the stream that pauses comes first"
    assert landed(schedule, 8, 8, 8) == [("a", 2, 8), ("b", 1, 8), ("c", 1, 8)]


def landed_at_once(schedule: Schedule, token: int) -> list[tuple[str, int, int]]:
    return [(row.uid, row.n, row.token) for row in step(schedule, token)[2]]


@pytest.mark.parametrize(
    ("asked", "forbidden", "output_ids"),
    [
        ({"repetition_penalty": 1.5}, (), [20]),
        ({"bad_words": [(20, 21), (22,)]}, (22, 21), []),
        ({"min_tokens": 2, "stop_token_ids": [55]}, (55,), []),
    ],
    ids=str,
)
def test_what_a_sample_reads_of_the_tokens_before_it_settles_when_they_are_known(
    asked: dict[str, object], forbidden: Sequence[int], output_ids: Sequence[int]
) -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=3, **asked))  # type: ignore[arg-type]
    ahead(schedule)
    sample = ahead(schedule).rows[0].sample
    landed(schedule, 20)
    ahead(schedule)
    assert sample is not None
    settled = sample.settled()
    assert (settled.position, settled.forbidden) == (4, forbidden)
    assert (list(settled.seen.output_ids) if settled.seen else []) == output_ids


def test_scores_of_the_prompt_are_told_with_the_first_token_and_asked_for_once() -> None:
    schedule = make_schedule(prefill=4)
    schedule.add(request("a", length=8, prompt_logprobs=0))
    plans = [ahead(schedule), ahead(schedule)]
    landed(schedule)
    plans.append(ahead(schedule))
    assert [row.scoring.targets if row.scoring else None for plan in plans for row in plan.rows] == [
        (1, 2, 3, 4),
        (5, 6, 7),
        None,
    ]
    assert [row.prompt_scores for row in schedule.complete([7], {0: RowScores()})] == [None]
