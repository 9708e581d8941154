"""The schedule as a fold: arrivals and tokens in, plans and rows out. No engine, no log.

What must hold in every story (order, budgets, pages, ends, who runs alone) is in `test_schedule_machine.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import schedules
from support.schedules import marked, planned, request, step, steps

from pipeline.events import Admitted, EventRow, Score, TokenRow
from stages.generate.schedule.plan import RowScores, Sample
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import MOST_TAKEN, PATIENCE, Schedule

EOS = 99


def make_schedule(cache: str = "naive", **limits: int) -> Schedule:
    return schedules.make_schedule(cache, eos_ids=[EOS], **limits)


def sampled(schedule: Schedule, token: int = 7) -> Sample:
    """Make a step and return how its first row is sampled."""
    sample = step(schedule, token)[0].rows[0].sample
    assert sample is not None
    return sample.settled()


def test_a_prompt_is_computed_whole_and_then_one_token_at_a_time() -> None:
    schedule = make_schedule()
    assert schedule.plan() is None
    assert schedule.add(request("a", length=5, max_tokens=3)) is None
    plan, marks, rows = step(schedule)
    assert [(row.start, row.token_ids, row.new_pages) for row in plan.rows] == [(0, (0, 1, 2, 3, 4), (0, 1))]
    assert marked(marks, "admitted") == ["a"]
    assert rows == [TokenRow(uid="a", n=1, token=7, chunks=1)]
    plan, marks, rows = step(schedule)
    assert plan.num_decode_rows == 1 and marks == []
    assert [(row.start, row.token_ids, row.new_pages) for row in plan.rows] == [(5, (7,), ())]
    assert rows == [TokenRow(uid="a", n=2, token=7)]
    _, _, rows = step(schedule)
    assert rows == [TokenRow(uid="a", n=3, token=7, end="length")]
    assert schedule.plan() is None and schedule.free_pages == 100


def test_prompts_of_the_same_length_share_one_budget_in_the_order_of_arrival() -> None:
    schedule = make_schedule(prefill=32)
    for uid in "abcd":
        schedule.add(request(uid, length=12))
    plan, marks, rows = step(schedule)
    assert [len(row.token_ids) for row in plan.rows] == [12, 12, 8]
    assert [row.uid for row in rows] == ["a", "b"] and marked(marks, "admitted") == ["a", "b", "c"]


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


def test_new_requests_are_taken_while_others_wait_for_the_budget() -> None:
    schedule = make_schedule(running=4, prefill=8)
    assert schedule.room == 4
    for uid in "ab":
        schedule.add(request(uid, length=20))
    assert schedule.room == 2
    step(schedule)
    assert (schedule.num_running, schedule.num_waiting, schedule.room) == (1, 1, 2)


def test_an_engine_takes_only_so_many_requests_that_others_get_some_of_a_burst() -> None:
    schedule = make_schedule(running=64, prefill=8)
    rooms = []
    for number in range(MOST_TAKEN + 1):
        rooms.append(schedule.room)
        schedule.add(request(str(number), length=20))
    assert rooms == [*range(MOST_TAKEN, 0, -1), 0]


def test_no_request_is_taken_while_one_waits_for_pages() -> None:
    schedule = make_schedule(num_pages=8, context=32)
    schedule.add(request("runs", length=20, max_tokens=3))
    schedule.add(request("waits", length=21, max_tokens=3))
    rooms = []
    while schedule.num_waiting:
        step(schedule)
        rooms.append(schedule.room)
    assert set(rooms[:-1]) == {0} and rooms[-1] == MOST_TAKEN


def test_a_step_without_prompts_does_not_forget_that_one_waits_for_pages() -> None:
    schedule = make_schedule(num_pages=8, context=32)
    for uid in ("runs", "waits"):
        schedule.add(request(uid, length=20, max_tokens=9))
    rooms = []
    for budget in (None, 0, None):
        step(schedule, mixed_prefill_length=budget)
        rooms.append(schedule.room)
    assert rooms == [0, 0, 0]


def test_no_request_is_taken_while_one_must_run_alone() -> None:
    schedule = make_schedule()
    for uid in "ab":
        schedule.add(request(uid))
    schedule.isolate("a")
    step(schedule)
    assert schedule.room == 0
    schedule.isolate(None)
    assert schedule.room > 0


def test_a_stop_token_ends_with_stop_even_when_the_end_of_sequence_is_ignored() -> None:
    schedule = make_schedule()
    schedule.add(request("a", stop_token_ids=[7], ignore_eos=True))
    schedule.add(request("b", ignore_eos=True))
    assert [row.end for row in step(schedule)[2]] == ["stop", None]
    assert step(schedule, EOS)[2][0].end is None


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, (EOS, 55)), (True, (55,))])
def test_until_min_tokens_nothing_that_would_end_it_can_come_out(ignore_eos: bool, ends: tuple[int, ...]) -> None:
    schedule = make_schedule()
    schedule.add(request("a", min_tokens=2, stop_token_ids=[55], ignore_eos=ignore_eos))
    assert [sampled(schedule).forbidden for _ in range(3)] == [ends, ends, ()]


def test_the_position_of_a_sample_counts_prompt_and_output() -> None:
    schedule = make_schedule()
    schedule.add(request("a", length=5, seed=3))
    for position in (5, 6, 7):
        sample = sampled(schedule)
        assert (sample.params.seed, sample.position) == (3, position)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"])
def test_a_penalty_sees_prompt_and_output_also_those_that_another_engine_made(penalty: str) -> None:
    is_none = penalty == "logit_bias"
    schedule = make_schedule()
    asked: dict[str, Any] = {penalty: ((3, 1.0),) if is_none else 1.5}
    schedule.add(request("a", length=3, output=(9, 8), **asked))
    for made in ([], [7], [7, 7]):
        sample = planned(schedule)[0].rows[0].sample
        assert sample is not None and sample.prompt_length == 3
        seen = sample.settled().seen
        assert (seen is None) is is_none
        if seen is not None:
            assert list(seen.prompt_ids) == [0, 1, 2]
            assert dict(zip(seen.output_ids, seen.counts, strict=True)) == Counter([9, 8, *made])
        schedule.complete([7])


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (request("a", length=20), "context_length_exceeded", "has 20 tokens"),
        (request("a", length=5, output=(7,) * 15), "context_length_exceeded", "send it again"),
        (request("a", length=2, first=999), "invalid_token", "token 1000"),
    ],
    ids=["no room for an answer", "resumed, it has outgrown the context", "a token that the model does not know"],
)
def test_what_can_never_run_is_refused_and_blocks_nobody(bad: NewRequest, code: str, words: str) -> None:
    schedule = make_schedule(context=20)
    failed = schedule.add(bad)
    assert failed is not None and failed.code == code and words in failed.message
    assert schedule.plan() is None and schedule.room > 0
    assert schedule.add(request("b", length=19)) is None
    assert [(row.uid, row.end) for _, _, rows in steps(schedule) for row in rows] == [("b", "length")]


def test_when_pages_run_out_the_newest_request_is_preempted_and_computed_again() -> None:
    schedule = make_schedule(num_pages=4, context=16)
    for uid in ("old", "new"):
        schedule.add(request(uid, length=7, max_tokens=6))
    step(schedule)
    step(schedule)  # both hold two full pages now
    _, marks, rows = step(schedule)
    assert [(mark.uid, mark.n) for mark in marks] == [("new", 2)] and marked(marks, "preempted") == ["new"]
    assert [row.uid for row in rows] == ["old"]
    later = [row for _, _, rows in steps(schedule) for row in rows if row.uid == "new"]
    assert [(row.n, row.chunks) for row in later] == [(3, 1), (4, 0), (5, 0), (6, 0)]


def test_steps_are_numbered_without_a_hole_also_when_one_has_no_rows() -> None:
    schedule = make_schedule()
    schedule.add(request("a", max_tokens=2))
    assert [step(schedule)[0].step, schedule.skip_step(), step(schedule)[0].step] == [1, 2, 3]


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    schedule = make_schedule("radix", num_pages=6, context=24)
    schedule.add(request("old", length=7, max_tokens=6))
    schedule.add(request("new", length=15, first=100, max_tokens=6))
    marks = [mark for _, marks, _ in steps(schedule) for mark in marks if isinstance(mark, EventRow)]
    found = [mark.event.cached_tokens for mark in marks if mark.uid == "new" and isinstance(mark.event, Admitted)]
    assert len(found) == 2 and found[1] > 0


def test_a_request_that_does_not_read_the_cache_is_computed_whole_also_after_a_preemption() -> None:
    def cached_tokens(schedule: Schedule) -> list[int]:
        marks = [mark for _, marks, _ in steps(schedule) for mark in marks if isinstance(mark, EventRow)]
        return [mark.event.cached_tokens for mark in marks if mark.uid == "new" and isinstance(mark.event, Admitted)]

    schedule = make_schedule("radix")
    for reads_cache, found in ((False, [0]), (True, [8]), (False, [0])):
        schedule.add(replace(request("new", length=9, max_tokens=1), reads_cache=reads_cache))
        assert cached_tokens(schedule) == found
    schedule = make_schedule("radix", num_pages=6, context=24)
    schedule.add(request("old", length=7, max_tokens=6))
    schedule.add(replace(request("new", length=15, first=100, max_tokens=6), reads_cache=False))
    assert cached_tokens(schedule) == [0, 0]


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_after_a_failed_step_everybody_starts_over_and_nothing_it_wrote_is_used(cache: str) -> None:
    schedule = make_schedule(cache)
    schedule.add(request("a", length=9, max_tokens=3))
    step(schedule)
    schedule.add(request("b", length=9, max_tokens=3))
    assert schedule.plan() is not None
    assert marked(schedule.start_over(), "preempted") == ["b", "a"]
    assert schedule.problems() == [] and schedule.free_pages == 100
    plan, _, rows = step(schedule)
    assert [row.start for row in plan.rows] == [0, 8 if cache == "radix" else 0]  # the second shares the first's
    assert [(row.uid, row.n) for row in rows] == [("a", 2), ("b", 1)]


# priority


def prefilled(schedule: Schedule) -> dict[str, int]:
    """Make a step and return how many prompt tokens of whom it had, in its order."""
    plan, _ = planned(schedule)
    lengths = {schedule.holder(row.table)[0]: len(row.token_ids) for row in plan.rows[plan.num_decode_rows :]}
    schedule.complete([7] * schedules.num_samples(plan))
    return lengths


@pytest.mark.parametrize("limits", [{"running": 1}, {"num_pages": 4, "context": 16}], ids=["no table", "no pages"])
def test_who_waits_pushes_nobody_out_however_important_it_is(limits: dict[str, Any]) -> None:
    schedule = make_schedule(**limits)
    schedule.add(request("runs", length=8, max_tokens=8, priority=9))
    step(schedule)
    schedule.add(request("waits", length=8, max_tokens=2, priority=-9))
    made = list(steps(schedule))
    assert not any(marked(marks, "preempted") for _, marks, _ in made)
    assert [row.uid for _, _, rows in made for row in rows if row.end is not None] == ["runs", "waits"]


def test_a_more_important_prompt_is_computed_before_the_rest_of_one_that_has_begun() -> None:
    schedule = make_schedule(prefill=8)
    schedule.add(request("least", length=20, priority=1))
    assert prefilled(schedule) == {"least": 8}
    schedule.add(request("most", length=11, priority=-1))
    assert prefilled(schedule) == {"most": 8}
    schedule.add(request("middle", length=2))
    assert prefilled(schedule) == {"most": 3, "middle": 2, "least": 3}
    assert prefilled(schedule) == {"least": 8}


# which prompt is next


def test_a_short_prompt_that_comes_later_is_computed_before_the_rest_of_a_long_one() -> None:
    schedule = make_schedule(prefill=8)
    schedule.add(request("long", length=40, max_tokens=1))
    assert prefilled(schedule) == {"long": 8}
    schedule.add(request("short", length=5, max_tokens=1))
    assert prefilled(schedule) == {"short": 5, "long": 3}


def test_a_long_prompt_is_not_interrupted_for_one_that_lacks_as_much() -> None:
    schedule = make_schedule(prefill=8)
    schedule.add(request("begun", length=40, max_tokens=1))
    assert prefilled(schedule) == {"begun": 8}
    schedule.add(request("new", length=32, max_tokens=1))
    assert [prefilled(schedule) for _ in range(5)] == [{"begun": 8}] * 4 + [{"new": 8}]


def test_a_stream_that_a_prompt_outlives_may_be_preempted_in_a_step_without_prompts() -> None:
    schedule = make_schedule(num_pages=8, context=32, prefill=8)
    schedule.add(request("long", length=25, max_tokens=1))
    step(schedule)
    schedule.add(request("short", length=3, max_tokens=20))
    step(schedule)
    for _ in range(2):  # its first page is full, and the prompt has all others
        step(schedule, mixed_prefill_length=0)
    assert {row.uid for _, _, rows in steps(schedule) for row in rows} == {"long", "short"}


def test_a_prompt_counts_with_the_tokens_that_the_cache_lacks() -> None:
    schedule = make_schedule("radix")
    schedule.add(request("before", length=40, max_tokens=1))
    list(steps(schedule))
    schedule.add(request("short", length=5, first=500, max_tokens=1))
    schedule.add(request("mostly cached", length=40, max_tokens=1))
    schedule.add(replace(request("read again", length=40, max_tokens=1), reads_cache=False))
    assert list(prefilled(schedule).items()) == [("mostly cached", 4), ("short", 5), ("read again", 23)]


def test_a_long_prompt_beside_an_endless_flow_of_short_ones_waits_for_so_many_times_the_tokens_that_it_lacks() -> None:
    """It may be longer than one step, and the short ones may have taken their places before it was its turn."""
    schedule, long, short = make_schedule(prefill=32), 90, 10
    schedule.add(request("long", length=long, max_tokens=1))
    num_sent = waited = 0
    while schedule.num_output("long") is not None:
        for _ in range(schedule.room):
            schedule.add(request(str(num_sent), length=short, max_tokens=1))
            num_sent += 1
        waited += sum(count for uid, count in prefilled(schedule).items() if uid != "long")
        assert waited <= PATIENCE * long
    assert waited >= PATIENCE * (long - short)


def test_while_a_more_important_prompt_finds_no_pages_those_that_have_theirs_are_computed() -> None:
    schedule = make_schedule(num_pages=8, context=32, prefill=8)
    schedule.add(request("runs", length=24, max_tokens=1, priority=1))
    assert prefilled(schedule) == {"runs": 8}
    schedule.add(request("waits", length=12, max_tokens=1))
    schedule.add(request("small", length=1, max_tokens=1, priority=1))
    assert [prefilled(schedule) for _ in range(3)] == [{"runs": 8}, {"runs": 8}, {"waits": 8}]
    assert prefilled(schedule) == {"waits": 4, "small": 1}, "the small one would have fitted, and was not let past"


def test_scores_of_a_prompt_are_told_although_its_last_chunk_has_none() -> None:
    schedule = make_schedule(prefill=4)
    schedule.add(request("a", length=5, prompt_logprobs=0))
    of_prompt = tuple(Score(logprob=-float(number), top=()) for number in range(4))
    assert schedule.plan() is not None and schedule.complete([], {0: RowScores(prompt=of_prompt)}) == []
    plan, _, (row,) = step(schedule)
    assert plan.rows[0].scoring is not None and plan.rows[0].scoring.targets == ()
    assert row.prompt_scores == of_prompt


# words that must not come out


def forbidden_after(*output: int, bad_words: Sequence[tuple[int, ...]], **sampling: Any) -> tuple[int, ...]:
    """Return what must not come out after *output*, token by token from an empty one; the prompt is 0 1 2 3 4."""
    schedule = make_schedule()
    assert schedule.add(request("a", bad_words=bad_words, **sampling)) is None
    for token in output:
        step(schedule, token)
    return sampled(schedule).forbidden


BEGUN = [(20, 22), (20, 21, 23), (20, 21, 24), (30, 30)]


@pytest.mark.parametrize(
    ("bad_words", "output", "expected"),
    [
        ([(20,), (21,)], (), (20, 21)),
        ([(20,), (21,)], (20, 8), (20, 21)),
        (BEGUN, (), ()),
        (BEGUN, (20,), (22,)),
        (BEGUN, (21,), ()),
        (BEGUN, (20, 21), (23, 24)),
        (BEGUN, (8, 20, 21), (23, 24)),
        (BEGUN, (20, 8, 21), ()),
        (BEGUN, (20, 21, 8), ()),
        (BEGUN, (30,), (30,)),
        (BEGUN, (8, 21, 20), (22,)),
        ([(4, 20), (3, 4, 20)], (), ()),  # the prompt begins no bad word
        ([(4, 20, 21), (20, 22)], (20,), (22,)),
        ([(), (8, 9)], (8,), (9,)),
        ([()], (8,), ()),
    ],
    ids=str,
)
def test_the_last_token_of_a_bad_word_does_not_come_after_the_others(
    bad_words: Sequence[tuple[int, ...]], output: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert forbidden_after(*output, bad_words=bad_words) == expected


def test_a_bad_word_is_known_to_have_begun_by_the_tokens_of_another_engine() -> None:
    schedule = make_schedule()
    schedule.add(request("a", output=(8, 20, 21), bad_words=[(20, 21, 22), (8, 23), (4, 8, 20, 21, 24)]))
    assert sampled(schedule).forbidden == (22,)


def test_bad_words_are_forbidden_beside_what_would_end_it_too_soon() -> None:
    assert forbidden_after(bad_words=[(20,)], min_tokens=1, stop_token_ids=[55]) == (EOS, 55, 20)
    assert forbidden_after(7, bad_words=[(20,), (7, 8)], min_tokens=1, stop_token_ids=[55]) == (20, 8)


# one request alone


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_an_isolated_request_runs_alone_and_all_others_go_on_afterwards(cache: str) -> None:
    schedule = make_schedule(cache, mixed=32)
    for uid in "abc":
        schedule.add(request(uid, length=6, max_tokens=5))
    rows = step(schedule)[2] + step(schedule)[2]
    assert marked(schedule.isolate("b"), "preempted") == ["c", "a"], "the newest first"
    assert (schedule.num_running, schedule.num_waiting) == (1, 2) and schedule.problems() == []
    for _ in range(2):
        plan, marks, made = step(schedule)
        assert len(plan.rows) == 1 and marks == [] and [row.uid for row in made] == ["b"]
        rows += made
    assert schedule.isolate(None) == []
    _, marks, made = step(schedule)
    assert [row.uid for row in made] == ["b", "a", "c"] and marked(marks, "admitted") == ["a", "c"]
    rows += [*made, *(row for _, _, made in steps(schedule) for row in made)]
    assert [[row.n for row in rows if row.uid == uid] for uid in "abc"] == [[1, 2, 3, 4, 5]] * 3
    assert schedule.free_pages == 100


def test_a_request_is_isolated_before_it_comes_and_gets_all_pages_and_the_whole_budget() -> None:
    schedule = make_schedule(num_pages=10, context=40, prefill=32, mixed=4)
    for uid in "ab":
        schedule.add(request(uid, length=8, max_tokens=3))
    step(schedule)
    assert marked(schedule.isolate("later"), "preempted") == ["b", "a"]
    assert schedule.free_pages == 10 and schedule.plan() is None
    schedule.add(request("c", max_tokens=3, priority=-1))
    assert schedule.plan() is None
    schedule.add(request("later", length=36, max_tokens=3))
    assert [prefilled(schedule) for _ in range(2)] == [{"later": 32}, {"later": 4}]
    schedule.isolate(None)
    assert {row.uid for _, _, rows in steps(schedule) for row in rows} == {"a", "b", "c", "later"}


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
    assert [row.uid for _, _, rows in steps(schedule) for row in rows] == ["b", "b"]


def test_an_end_of_sequence_token_ends_what_has_a_grammar_whatever_ignore_eos_says() -> None:
    """A grammar allows it only where it is complete. No matcher is needed to know the end, so steps are planned again
    from their tokens."""
    schedule = make_schedule()
    bound = replace(request("bound", ignore_eos=True), grammar="g")
    for new in (bound, request("free", ignore_eos=True)):
        assert schedule.add(new) is None
    _, _, rows = step(schedule, EOS)
    assert [(row.uid, row.end) for row in rows] == [("bound", "stop"), ("free", None)]


class Noting:
    """A matcher that notes what it takes in."""

    error = ""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def advance(self, token: int) -> None:
        self.tokens.append(token)

    def draft(self, proposed: Sequence[int], most_forced: int) -> tuple[Sequence[int], bool]:
        return (), False

    def allowed(self, ahead: int = 0) -> None:
        return None


def test_a_matcher_takes_in_each_token_once_it_is_known_but_not_the_last_one() -> None:
    schedule, matcher = make_schedule(), Noting()
    assert schedule.add(replace(request("a", max_tokens=4), grammar="g", matcher=matcher)) is None
    seen = []
    for number in range(4):
        sample = planned(schedule)[0].rows[0].sample
        assert sample is not None and sample.matcher is matcher
        seen.append(len(matcher.tokens))
        schedule.complete([10 + number])
    assert seen == [0, 1, 2, 3] and matcher.tokens == [10, 11, 12]
