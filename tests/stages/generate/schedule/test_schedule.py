"""The schedule as a fold: arrivals and tokens in, plans and rows out. No engine, no log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.events import Admitted, EventRow, SamplingParams, StepRow, TokenRow
from stages.generate.kvcache import make_cache
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

EOS = 99
PAGE_SIZE = 4
IDENTITY = Identity("generate-0", 1, "f")


def make_schedule(
    num_pages: int = 100,
    context: int = 100,
    prefill: int = 32,
    mixed: int = 8,
    running: int = 16,
    cache: str = "naive",
) -> Schedule:
    limits = ScheduleLimits(
        context=context,
        max_prefill_length=prefill,
        mixed_prefill_length=mixed,
        max_running_requests=running,
        vocab_size=1000,
    )
    return Schedule(make_cache(cache, num_pages, PAGE_SIZE), limits, [EOS], IDENTITY)


def request(
    uid: str,
    length: int = 5,
    output: Sequence[int] = (),
    *,
    priority: int = 0,
    bad_words: Sequence[tuple[int, ...]] = (),
    **sampling: object,
) -> NewRequest:
    params = SamplingParams.model_validate(sampling)
    return NewRequest(uid, tuple(range(length)), tuple(output), params, priority, tuple(bad_words))


def step(schedule: Schedule, token: int = 7) -> tuple[BatchPlan, list[StepRow], list[TokenRow]]:
    """Plan and complete one step in which every sample gives *token*."""
    planned = schedule.plan()
    assert planned is not None
    plan, marks = planned
    return plan, marks, schedule.complete([token] * sum(row.sample is not None for row in plan.rows))


def run_out(schedule: Schedule, most_steps: int = 1000) -> list[TokenRow]:
    """Run until nothing is left to do; return all rows with tokens."""
    rows: list[TokenRow] = []
    for _ in range(most_steps):
        planned = schedule.plan()
        if planned is None:
            return rows
        rows += schedule.complete([7] * sum(row.sample is not None for row in planned[0].rows))
        assert schedule.problems() == []
    raise AssertionError("it does not end")


def test_an_empty_schedule_has_nothing_to_plan() -> None:
    assert make_schedule().plan() is None


def test_a_prompt_is_computed_whole_and_then_one_token_at_a_time() -> None:
    schedule = make_schedule()
    assert schedule.add(request("a", length=5, max_tokens=3)) is None
    plan, marks, rows = step(schedule)
    assert [(row.start, row.token_ids, row.new_pages) for row in plan.rows] == [(0, (0, 1, 2, 3, 4), (0, 1))]
    assert [mark.event.kind for mark in marks if isinstance(mark, EventRow)] == ["admitted"]
    assert rows == [TokenRow(uid="a", n=1, token=7, chunks=1)]
    plan, marks, rows = step(schedule)
    assert plan.num_decode_rows == 1 and marks == []
    assert [(row.start, row.token_ids, row.new_pages) for row in plan.rows] == [(5, (7,), ())]
    assert rows == [TokenRow(uid="a", n=2, token=7)]
    _, _, rows = step(schedule)
    assert rows == [TokenRow(uid="a", n=3, token=7, end="length")]
    assert schedule.plan() is None and schedule.free_pages == 100


def test_a_long_prompt_goes_in_chunks_and_only_the_last_one_samples() -> None:
    schedule = make_schedule(prefill=32, context=400)
    schedule.add(request("a", length=70))
    sizes, samples = [], []
    while True:
        plan, _, rows = step(schedule)
        sizes.append(len(plan.rows[0].token_ids))
        samples.append(plan.rows[0].sample is not None)
        if rows:
            break
    assert sizes == [32, 32, 6] and samples == [False, False, True]
    assert rows[0].chunks == 3
    assert plan.rows[0].sample is not None and plan.rows[0].sample.position == 70


def test_the_pages_of_a_chunked_prompt_are_said_once() -> None:
    schedule = make_schedule(prefill=8, context=400)
    schedule.add(request("a", length=20))
    plans = [step(schedule)[0] for _ in range(3)]
    assert [len(plan.rows[0].new_pages) for plan in plans] == [5, 0, 0]


def test_beside_a_running_stream_prompts_get_the_small_budget() -> None:
    schedule = make_schedule(prefill=32, mixed=8, context=400)
    schedule.add(request("a", length=4))
    step(schedule)
    schedule.add(request("b", length=30))
    plan, _, _ = step(schedule)
    assert plan.num_decode_rows == 1
    assert [len(row.token_ids) for row in plan.rows] == [1, 8]


def test_streams_that_stand_still_after_a_takeover_get_the_large_budget_until_they_go_on() -> None:
    schedule = make_schedule(prefill=32, mixed=8, context=400)
    schedule.add(request("running", length=4))
    step(schedule)
    for uid in "ab":
        schedule.add(request(uid, length=40, output=[7] * 10))
    schedule.add(request("new", length=100))

    def prefilled() -> int:
        plan, _, _ = step(schedule)
        assert plan.num_decode_rows
        return sum(len(row.token_ids) for row in plan.rows[plan.num_decode_rows :])

    assert [prefilled() for _ in range(5)] == [32, 32, 32, 32, 8]  # 50 + 50 of those, and what fits of the new one
    assert schedule.num_running == 4


def test_several_prompts_share_one_budget_in_the_order_of_arrival() -> None:
    schedule = make_schedule(prefill=32, context=400)
    for uid, length in (("a", 10), ("b", 15), ("c", 20)):
        schedule.add(request(uid, length=length))
    plan, marks, rows = step(schedule)
    assert [len(row.token_ids) for row in plan.rows] == [10, 15, 7]
    assert [row.uid for row in rows] == ["a", "b"]
    assert [mark.uid for mark in marks] == ["a", "b", "c"]


def test_new_requests_are_taken_only_while_none_waits() -> None:
    schedule = make_schedule(running=4)
    assert schedule.room == 4
    schedule.add(request("a"))
    assert schedule.room == 0
    step(schedule)
    assert schedule.room == 3


def test_an_end_of_sequence_token_ends_with_stop_unless_it_is_ignored() -> None:
    schedule = make_schedule()
    schedule.add(request("a"))
    schedule.add(request("b", ignore_eos=True))
    _, _, rows = step(schedule, token=EOS)
    assert [(row.uid, row.end) for row in rows] == [("a", "stop"), ("b", None)]


def test_a_stop_token_ends_with_stop_even_when_the_end_of_sequence_is_ignored() -> None:
    schedule = make_schedule()
    schedule.add(request("a", stop_token_ids=[7], ignore_eos=True))
    assert step(schedule, token=7)[2][0].end == "stop"


def test_until_min_tokens_nothing_that_would_end_it_can_come_out() -> None:
    schedule = make_schedule()
    schedule.add(request("a", min_tokens=2, stop_token_ids=[55]))
    forbidden = []
    for _ in range(3):
        plan, _, _ = step(schedule)
        sample = plan.rows[0].sample
        assert sample is not None
        forbidden.append(sample.forbidden)
    assert forbidden == [(EOS, 55), (EOS, 55), ()]


def test_the_position_of_a_sample_counts_prompt_and_output() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=5, seed=3))
    positions = []
    for _ in range(3):
        sample = step(schedule)[0].rows[0].sample
        assert sample is not None and sample.params.seed == 3
        positions.append(sample.position)
    assert positions == [5, 6, 7]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_sees_prompt_and_output_also_those_that_another_engine_made(penalty: str) -> None:
    schedule = make_schedule()
    asked: dict[str, Any] = {penalty: 1.5}
    schedule.add(request("a", length=3, output=(9, 8), **asked))
    for made in ([], [7], [7, 7]):
        planned = schedule.plan()
        assert planned is not None
        sample = planned[0].rows[0].sample
        assert sample is not None and (list(sample.token_ids), sample.prompt_length) == ([0, 1, 2, 9, 8, *made], 3)
        schedule.complete([7])


def test_who_has_no_penalty_is_not_looked_at() -> None:
    schedule = make_schedule()
    schedule.add(request("a", logit_bias=((3, 1.0),)))
    sample = step(schedule)[0].rows[0].sample
    assert sample is not None and sample.token_ids == ()


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_numbers() -> None:
    schedule = make_schedule(context=20)
    failed = schedule.add(request("a", length=20))
    assert failed is not None and failed.code == "context_length_exceeded"
    assert "20 tokens" in failed.message
    assert schedule.add(request("b", length=19)) is None


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    schedule = make_schedule()
    failed = schedule.add(NewRequest("a", (1, 1000), (), SamplingParams()))
    assert failed is not None and failed.code == "invalid_token" and "1000" in failed.message
    assert schedule.plan() is None and schedule.room > 0


def test_a_resumed_request_that_has_outgrown_the_context_is_refused_and_blocks_nobody() -> None:
    schedule = make_schedule(context=10)
    failed = schedule.add(request("a", length=5, output=(7,) * 6))
    assert failed is not None and "send it again" in failed.message
    schedule.add(request("b", length=5, max_tokens=1))
    assert [row.uid for row in run_out(schedule)] == ["b"]


def test_a_request_that_fills_the_context_ends_with_length() -> None:
    schedule = make_schedule(num_pages=5, context=20)
    schedule.add(request("a", length=15))
    rows = run_out(schedule)
    assert [row.n for row in rows] == [1, 2, 3, 4, 5] and rows[-1].end == "length"


def test_max_tokens_beyond_the_context_is_cut_to_it() -> None:
    schedule = make_schedule(context=20)
    schedule.add(request("a", length=15, max_tokens=1000))
    assert len(run_out(schedule)) == 5


def test_when_pages_run_out_the_newest_request_is_preempted_and_computed_again() -> None:
    schedule = make_schedule(num_pages=4, context=16)
    schedule.add(request("old", length=7, max_tokens=6))
    schedule.add(request("new", length=7, max_tokens=6))
    step(schedule)
    step(schedule)  # both hold two full pages now
    plan, marks, rows = step(schedule)
    assert [(mark.uid, mark.n) for mark in marks if isinstance(mark, EventRow) and mark.event.kind == "preempted"] == [
        ("new", 2)
    ]
    assert [row.uid for row in rows] == ["old"] and len(plan.rows) == 1
    later = run_out(schedule)
    again = next(row for row in later if row.uid == "new")
    assert (again.n, again.chunks) == (3, 1)
    assert [row.n for row in later if row.uid == "new"] == [3, 4, 5, 6]


def test_a_dropped_request_frees_its_pages_at_once() -> None:
    schedule = make_schedule(num_pages=4, context=16)
    schedule.add(request("a", length=13))
    step(schedule)
    assert schedule.free_pages == 0
    assert schedule.drop("a") and not schedule.drop("a")
    assert schedule.free_pages == 4 and schedule.plan() is None


def test_a_request_dropped_while_it_waits_never_runs() -> None:
    schedule = make_schedule(running=1)
    schedule.add(request("a", max_tokens=2))
    schedule.add(request("b", max_tokens=2))
    step(schedule)
    assert schedule.drop("b")
    assert {row.uid for row in run_out(schedule)} == {"a"}


def test_a_request_dropped_during_its_step_leaves_no_row() -> None:
    schedule = make_schedule()
    schedule.add(request("a"))
    schedule.add(request("b"))
    planned = schedule.plan()
    assert planned is not None
    schedule.drop("a")
    assert [row.uid for row in schedule.complete([7, 8])] == ["b"]


def test_a_resumed_request_goes_on_where_it_was() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=5, output=(7, 7, 7), max_tokens=5))
    plan, marks, rows = step(schedule)
    assert plan.rows[0].token_ids == (0, 1, 2, 3, 4, 7, 7, 7)
    assert (marks[0].n, rows[0].n) == (3, 4)
    assert [row.end for row in run_out(schedule)] == ["length"]


def test_steps_are_numbered_without_a_hole_also_when_one_has_no_rows() -> None:
    schedule = make_schedule()
    schedule.add(request("a", max_tokens=2))
    first = step(schedule)[0].step
    skipped = schedule.skip_step()
    second = step(schedule)[0].step
    assert [first, skipped, second] == [1, 2, 3]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=8))
def test_the_same_calls_give_the_same_plans(requests: list[tuple[int, int]]) -> None:
    def plans() -> list[BatchPlan]:
        schedule = make_schedule(num_pages=10, context=36, prefill=16)
        for number, (length, tokens) in enumerate(requests):
            schedule.add(request(str(number), length=length, max_tokens=tokens))
        made = []
        while (planned := schedule.plan()) is not None:
            made.append(planned[0])
            schedule.complete([7] * sum(row.sample is not None for row in planned[0].rows))
        return made

    assert plans() == plans()


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    schedule = make_schedule(num_pages=6, context=24, cache="radix")
    schedule.add(request("old", length=7, max_tokens=6))
    schedule.add(NewRequest("new", tuple(range(100, 115)), (), SamplingParams(max_tokens=6)))
    admitted: list[Admitted] = []
    while (planned := schedule.plan()) is not None:
        plan, marks = planned
        admitted += [
            m.event for m in marks if isinstance(m, EventRow) and isinstance(m.event, Admitted) and m.uid == "new"
        ]
        schedule.complete([7] * sum(row.sample is not None for row in plan.rows))
    assert len(admitted) == 2 and admitted[1].cached_tokens > 0


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_after_a_failed_step_everybody_starts_over_and_nothing_it_wrote_is_used(cache: str) -> None:
    schedule = make_schedule(cache=cache)
    schedule.add(request("a", length=9, max_tokens=3))
    step(schedule)
    schedule.add(request("b", length=9, max_tokens=3))
    planned = schedule.plan()
    assert planned is not None
    marks = schedule.start_over()
    assert sorted(mark.uid for mark in marks) == ["a", "b"]
    assert schedule.problems() == [] and schedule.free_pages == 100
    plan, marks, rows = step(schedule)
    assert [row.start for row in plan.rows] in ([0, 0], [0, 8])  # with radix the second shares what the first computes
    assert [(row.uid, row.n) for row in rows] == [("a", 2), ("b", 1)]
    assert {row.uid for row in run_out(schedule) if row.end} == {"a", "b"}


# priority


def preempted(marks: Sequence[StepRow]) -> list[str]:
    return [uid for uid, kind in kinds(marks) if kind == "preempted"]


def admitted(marks: Sequence[StepRow]) -> list[str]:
    return [uid for uid, kind in kinds(marks) if kind == "admitted"]


def prefilled(schedule: Schedule) -> dict[str, int]:
    """Make a step and return how many prompt tokens of whom it had, in its order."""
    planned = schedule.plan()
    assert planned is not None
    plan, _ = planned
    lengths = {schedule.holder(row.table)[0]: len(row.token_ids) for row in plan.rows[plan.num_decode_rows :]}
    schedule.complete([7] * sum(row.sample is not None for row in plan.rows))
    return lengths


def test_the_lowest_priority_is_admitted_first_and_of_equals_the_first_that_came() -> None:
    schedule = make_schedule(running=1)
    for uid, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0), ("e", -1), ("f", 5)):
        schedule.add(request(uid, max_tokens=1, priority=priority))
    assert [step(schedule)[2][0].uid for _ in range(6)] == ["c", "e", "b", "d", "a", "f"]


def test_who_waits_pushes_nobody_out_however_important_it_is() -> None:
    for schedule in (make_schedule(running=1), make_schedule(num_pages=4, context=16)):  # no table, no pages
        schedule.add(request("runs", length=8, max_tokens=8, priority=9))
        step(schedule)
        schedule.add(request("waits", length=8, max_tokens=2, priority=-9))
        ended: list[str] = []
        while (planned := schedule.plan()) is not None:
            assert preempted(planned[1]) == []
            rows = schedule.complete([7] * sum(row.sample is not None for row in planned[0].rows))
            ended += [row.uid for row in rows if row.end is not None]
        assert ended == ["runs", "waits"]


def test_when_pages_run_out_the_least_important_request_is_preempted_though_it_came_first() -> None:
    schedule = make_schedule(num_pages=4, context=16)
    schedule.add(request("least", length=7, max_tokens=6, priority=1))
    schedule.add(request("more", length=7, max_tokens=6))
    step(schedule)
    step(schedule)  # both hold two full pages now
    plan, marks, rows = step(schedule)
    assert preempted(marks) == ["least"]
    assert [row.uid for row in rows] == ["more"] and len(plan.rows) == 1
    assert [row.n for row in run_out(schedule) if row.uid == "least"] == [3, 4, 5, 6]


def test_a_preempted_request_returns_behind_a_more_important_one_that_came_later() -> None:
    schedule = make_schedule(num_pages=4, context=16)
    for uid, priority in (("old", 0), ("new", 1)):
        schedule.add(request(uid, length=7, max_tokens=6, priority=priority))
    step(schedule)
    step(schedule)
    assert preempted(step(schedule)[1]) == ["new"]
    schedule.add(request("last", length=7, max_tokens=1))
    returned: list[str] = []
    while (planned := schedule.plan()) is not None:
        returned += admitted(planned[1])
        schedule.complete([7] * sum(row.sample is not None for row in planned[0].rows))
    assert returned == ["last", "new"]


def test_a_more_important_prompt_is_computed_before_the_rest_of_one_that_has_begun() -> None:
    schedule = make_schedule(prefill=8)
    schedule.add(request("least", length=20, priority=1))
    assert prefilled(schedule) == {"least": 8}
    schedule.add(request("most", length=11, priority=-1))
    assert prefilled(schedule) == {"most": 8}
    schedule.add(request("middle", length=2))
    assert prefilled(schedule) == {"most": 3, "middle": 2, "least": 3}
    assert prefilled(schedule) == {"least": 8}
    assert prefilled(schedule) == {"least": 1}


def test_an_equally_important_prompt_waits_for_the_rest_of_one_that_has_begun() -> None:
    schedule = make_schedule(prefill=8)
    schedule.add(request("first", length=12, priority=-3))
    assert prefilled(schedule) == {"first": 8}
    schedule.add(request("second", length=12, priority=-3))
    assert prefilled(schedule) == {"first": 4, "second": 4}


def test_an_older_prompt_of_the_same_priority_that_was_preempted_waits_for_the_rest_of_one_that_has_begun() -> None:
    schedule = make_schedule(prefill=8)
    schedule.add(request("older", length=4))
    step(schedule)
    schedule.add(request("begun", length=20))
    schedule.isolate("begun")
    assert prefilled(schedule) == {"begun": 8}
    schedule.isolate(None)
    assert [prefilled(schedule) for _ in range(2)] == [{"begun": 8}, {"begun": 4, "older": 4}]


def test_while_a_more_important_prompt_finds_no_pages_those_that_have_theirs_are_computed() -> None:
    schedule = make_schedule(num_pages=8, context=32, prefill=8)
    schedule.add(request("runs", length=24, max_tokens=1, priority=1))
    assert prefilled(schedule) == {"runs": 8}
    schedule.add(request("waits", length=12, max_tokens=1))
    schedule.add(request("small", length=1, max_tokens=1, priority=1))
    assert [prefilled(schedule) for _ in range(3)] == [{"runs": 8}, {"runs": 8}, {"waits": 8}]
    assert prefilled(schedule) == {"waits": 4, "small": 1}, "the small one would have fitted, and was not let past"


def test_an_isolated_request_does_not_wait_behind_more_important_ones() -> None:
    schedule = make_schedule(running=2)
    for uid, priority in (("a", -1), ("b", -2), ("c", 3)):
        schedule.add(request(uid, max_tokens=3, priority=priority))
    step(schedule)
    assert kinds(schedule.isolate("c")) == [("a", "preempted"), ("b", "preempted")], "the least important first"
    planned = schedule.plan()
    assert planned is not None and uids(schedule, planned[0]) == ["c"]
    schedule.complete([7])
    schedule.isolate(None)
    planned = schedule.plan()
    assert planned is not None and admitted(planned[1]) == ["b"]


# words that must not come out


def forbidden_after(*output: int, bad_words: Sequence[tuple[int, ...]], **sampling: Any) -> tuple[int, ...]:
    """Return what must not come out after *output*, token by token from an empty one."""
    schedule = make_schedule()
    assert schedule.add(request("a", length=5, bad_words=bad_words, **sampling)) is None
    for token in output:
        step(schedule, token)
    sample = step(schedule)[0].rows[0].sample
    assert sample is not None
    return sample.forbidden


def test_a_bad_word_of_one_token_never_comes_out() -> None:
    assert forbidden_after(bad_words=[(20,), (21,)]) == (20, 21)
    assert forbidden_after(20, 8, bad_words=[(20,), (21,)]) == (20, 21)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((), ()),
        ((20,), (22,)),
        ((21,), ()),
        ((20, 21), (23, 24)),
        ((8, 20, 21), (23, 24)),
        ((20, 8, 21), ()),
        ((20, 21, 8), ()),
        ((30,), (30,)),
        ((8, 21, 20), (22,)),
    ],
    ids=str,
)
def test_the_last_token_of_a_bad_word_does_not_come_after_the_others(
    output: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    bad_words = [(20, 22), (20, 21, 23), (20, 21, 24), (30, 30)]
    assert forbidden_after(*output, bad_words=bad_words) == expected


def test_the_prompt_begins_no_bad_word() -> None:
    """The prompt is 0 1 2 3 4."""
    assert forbidden_after(bad_words=[(4, 20), (3, 4, 20)]) == ()
    assert forbidden_after(20, bad_words=[(4, 20, 21), (20, 22)]) == (22,)


def test_a_bad_word_is_known_to_have_begun_by_the_tokens_of_another_engine() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=5, output=(8, 20, 21), bad_words=[(20, 21, 22), (8, 23), (4, 8, 20, 21, 24)]))
    sample = step(schedule)[0].rows[0].sample
    assert sample is not None and sample.forbidden == (22,)


def test_bad_words_are_forbidden_beside_what_would_end_it_too_soon() -> None:
    assert forbidden_after(bad_words=[(20,)], min_tokens=1, stop_token_ids=[55]) == (EOS, 55, 20)
    assert forbidden_after(7, bad_words=[(20,), (7, 8)], min_tokens=1, stop_token_ids=[55]) == (20, 8)


def test_a_sequence_of_no_tokens_forbids_nothing() -> None:
    assert forbidden_after(8, bad_words=[(), (8, 9)]) == (9,)
    assert forbidden_after(8, bad_words=[()]) == ()


# one request alone


def kinds(marks: Sequence[StepRow]) -> list[tuple[str, str]]:
    return [(mark.uid, mark.event.kind) for mark in marks if isinstance(mark, EventRow)]


def uids(schedule: Schedule, plan: BatchPlan) -> list[str]:
    """Return whose rows a plan has that is not folded yet."""
    return [schedule.holder(row.table)[0] for row in plan.rows]


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_an_isolated_request_runs_alone_and_all_others_go_on_afterwards(cache: str) -> None:
    schedule = make_schedule(cache=cache, mixed=32)
    for uid in "abc":
        schedule.add(request(uid, length=6, max_tokens=5))
    rows = step(schedule)[2] + step(schedule)[2]
    assert kinds(schedule.isolate("b")) == [("c", "preempted"), ("a", "preempted")], "the newest first"
    assert (schedule.num_running, schedule.num_waiting) == (1, 2) and schedule.problems() == []
    for _ in range(2):
        planned = schedule.plan()
        assert planned is not None and uids(schedule, planned[0]) == ["b"] and planned[1] == []
        rows += schedule.complete([7])
    assert schedule.isolate(None) == []
    planned = schedule.plan()
    assert planned is not None and uids(schedule, planned[0]) == ["b", "a", "c"]
    assert kinds(planned[1]) == [("a", "admitted"), ("c", "admitted")]
    rows += schedule.complete([7] * 3)
    rows += run_out(schedule)
    assert [[row.n for row in rows if row.uid == uid] for uid in "abc"] == [[1, 2, 3, 4, 5]] * 3
    assert schedule.free_pages == 100


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_a_request_is_isolated_before_it_comes(cache: str) -> None:
    schedule = make_schedule(cache=cache)
    for uid in "ab":
        schedule.add(request(uid, length=6, max_tokens=3))
    step(schedule)
    assert kinds(schedule.isolate("later")) == [("b", "preempted"), ("a", "preempted")]
    assert schedule.free_pages == 100 and schedule.plan() is None
    schedule.add(request("c", max_tokens=3))
    assert schedule.plan() is None
    schedule.add(request("later", max_tokens=3))
    planned = schedule.plan()
    assert planned is not None and uids(schedule, planned[0]) == ["later"]
    schedule.complete([7])
    schedule.isolate(None)
    assert {row.uid for row in run_out(schedule)} == {"a", "b", "c", "later"}


def test_an_isolated_request_gets_the_whole_budget_and_all_pages() -> None:
    schedule = make_schedule(num_pages=10, context=40, prefill=32, mixed=4)
    schedule.add(request("a", length=20, max_tokens=10))
    step(schedule)
    schedule.add(request("b", length=36))
    step(schedule)
    assert (schedule.num_running, schedule.num_waiting) == (1, 1), "there is no room for both"
    schedule.isolate("b")
    assert [len(step(schedule)[0].rows[0].token_ids) for _ in range(2)] == [32, 4]


def test_while_an_isolated_request_is_gone_nobody_runs_until_that_is_said() -> None:
    schedule = make_schedule()
    for uid in "ab":
        schedule.add(request(uid, max_tokens=2))
    schedule.isolate("a")
    step(schedule)
    assert schedule.num_output("a") == 1 and schedule.num_output("b") == 0
    schedule.drop("a")
    assert schedule.num_output("a") is None and schedule.plan() is None
    schedule.isolate(None)
    assert [row.uid for row in run_out(schedule)] == ["b", "b"]


def test_nothing_is_taken_from_the_log_while_others_wait_for_an_isolated_request() -> None:
    schedule = make_schedule()
    schedule.isolate("a")
    schedule.add(request("a"))
    step(schedule)
    assert schedule.room == 8
    schedule.add(request("b"))
    step(schedule)
    assert schedule.room == 0


def test_a_failed_step_of_an_isolated_request_lets_nobody_else_run() -> None:
    schedule = make_schedule()
    for uid in "ab":
        schedule.add(request(uid, max_tokens=2))
    schedule.isolate("b")
    assert schedule.plan() is not None
    schedule.start_over()
    planned = schedule.plan()
    assert planned is not None and uids(schedule, planned[0]) == ["b"]
