"""Which tokens are drafted, how many, and what is learned of it. That they change no answer: forward/test_drafts.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import make_schedule, num_samples, request

from pipeline.events import TokenRow
from stages.generate.schedule import drafts
from stages.generate.schedule.drafts import Drafts
from stages.generate.schedule.plan import NOT_A_NUMBER
from stages.generate.schedule.request import MANY_STREAMS, WHOLE, Request
from stages.generate.schedule.schedule import Schedule

FEW = st.lists(st.integers(0, 3), max_size=40)


def proposed(
    prompt: Sequence[int], output: Sequence[int] = (), most: int = 3, prediction: Sequence[int] = ()
) -> list[int]:
    found = Drafts(prompt, prediction)
    found.follow([*prompt, *output])
    return list(found.propose(most)[0])


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [], [3, 4, 9]),
        ([1, 2, 3, 4, 9], [1, 2], [3, 4, 9]),
        ([1, 2, 3, 4, 5, 6], [9, 9, 1], []),  # a run has two tokens at least
        ([1, 2, 7, 8, 1, 2, 5, 6], [1, 2], [5, 6, 1]),  # the latest
        ([0, 1, 2, 7, 8, 9, 1, 2, 5, 6], [0, 1, 2], [7, 8, 9]),  # but the longest first
        ([5], [6, 7, 6, 7, 6], [7, 6, 7]),  # what repeats itself goes on
        ([5], [6, 6, 6], [6, 6, 6]),
    ],
)
def test_what_followed_the_last_tokens_before_is_proposed(
    prompt: list[int], output: list[int], expected: list[int]
) -> None:
    assert proposed(prompt, output) == expected
    assert proposed([*prompt, *output]) == expected


def test_a_copy_goes_on_where_it_is_although_the_same_run_came_later() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9, 9]
    assert proposed(text, text[:6]) == [7, 8, 5]


def test_a_token_that_was_replaced_does_not_end_a_copy() -> None:
    text = list(range(10, 30))
    assert proposed(text, [*text[:8], 99]) == text[9:12]
    assert proposed(text, [*text[:8], 99, 98]) == [], "two tokens are another text"
    assert proposed(text, [text[0], text[1], 99]) == [], "nor is it known before that this is a copy"


def test_a_prediction_is_proposed_from_its_beginning() -> None:
    prediction = list(range(10, 30))
    found = Drafts([1, 2], prediction)
    assert found.propose(3) == (array("i", [10, 11, 12]), True)
    found.follow([1, 2, *range(10, 29)])
    assert found.propose(3) == (array("i", [29]), True)
    found.follow([1, 2, *range(10, 31)])
    assert found.propose(3) == ((), False), "it is over"
    assert proposed([1, 2], [10, 11, 12, 13, 77, 15, 16], prediction=prediction) == [17, 18, 19]


@given(prompt=FEW, output=FEW, prediction=FEW, pieces=st.lists(st.integers(1, 9), min_size=40))
def test_proposals_are_a_function_of_the_tokens(
    prompt: list[int], output: list[int], prediction: list[int], pieces: list[int]
) -> None:
    at_once, one_by_one, tokens = Drafts(prompt, prediction), Drafts(prompt, prediction), list(prompt)
    at_once.follow([*prompt, *output])
    while output:
        count = pieces.pop()
        tokens += output[:count]
        del output[:count]
        one_by_one.follow(tokens)
    assert at_once.propose(8) == one_by_one.propose(8)
    assert all(token >= 0 for token in at_once.propose(8)[0]), "no separator is a token"


def test_old_runs_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "FEWEST_SLOTS", 16)
    monkeypatch.setattr(drafts, "MOST_SLOTS", 64)
    text = list(range(1000))
    found = Drafts(text[:10])
    found.follow(text)
    assert {len(ends) for ends in found._ends} == {64}
    found.follow([*text, *text[900:904]])
    found.follow([*text, *text[900:904], *text[990:994]])
    assert list(found.propose(2)[0]) == text[994:996]


def drafting(most: int = 4, **more: Any) -> Schedule:
    schedule = make_schedule(**more)
    schedule._limits = replace(schedule._limits, most_drafts=most)
    return schedule


def begin_to_copy(schedule: Schedule) -> None:
    """Let the only request, whose prompt counts up from 0, draw 0 and 1."""
    for token in (0, 1):
        assert schedule.plan(None, 0) is not None
        schedule.complete([token])


def only(schedule: Schedule) -> Request:
    (found,) = schedule._running
    return found


def test_drafts_are_kept_while_they_are_what_is_drawn() -> None:
    schedule = drafting()
    schedule.add(request("a", 8))  # the tokens 0 to 7
    begin_to_copy(schedule)
    planned = schedule.plan(None, 0)
    assert planned is not None
    rows = planned[0].rows
    assert [(row.token_ids, row.start, row.is_draft) for row in rows] == [
        *(((token,), 8 + token, token > 1) for token in range(1, 6)),
    ]
    assert (planned[0].num_decode_rows, planned[0].num_drafts) == (5, 4)
    assert schedule.plan(None, 0) is None, "how many tokens it will have is not known"
    told = schedule.complete([2, 3, 77, 5, 6])
    assert [(row.n, row.token, row.drafted, row.accepted) for row in told] == [
        *((3, 2, 4, 2), (4, 3, None, None), (5, 77, None, None)),
    ]
    assert (only(schedule).token_ids[8:], only(schedule).num_computed) == ([0, 1, 2, 3, 77], 12)
    assert schedule.problems() == []


def test_a_draft_after_which_no_token_can_be_drawn_is_left_to_the_next_step() -> None:
    schedule = drafting()
    schedule.add(request("a", 8))
    for tokens in ([0], [1], [2, NOT_A_NUMBER, 4, 5, 6]):
        assert schedule.plan(None, 0) is not None
        told = schedule.complete(tokens)
    assert [row.token for row in told] == [2]
    planned = schedule.plan(None, None)
    assert planned is not None and [row.token_ids for row in planned[0].rows] == [(2,)]


def test_an_end_among_drafts_is_the_end() -> None:
    schedule = drafting(eos_ids=[3])
    schedule.add(request("a", 8))
    for tokens in ([0], [1], [2, 3, 4, 5, 6]):
        assert schedule.plan(None, 0) is not None
        told = schedule.complete(tokens)
    assert [(row.token, row.end, row.accepted) for row in told] == [(2, None, 2), (3, "stop", None)]
    assert schedule.num_running == 0 and schedule.problems() == []


def test_pages_of_drafts_that_were_wrong_are_given_back_and_drafts_displace_nobody() -> None:
    schedule = drafting(8, num_pages=5, page_size=4, context=20)
    schedule.add(request("a", 8))
    begin_to_copy(schedule)
    assert schedule.free_pages == 2
    planned = schedule.plan(None, 0)
    assert planned is not None and planned[0].num_drafts == 6 and schedule.free_pages == 1, "one may be needed"
    schedule.complete([99] * 7)
    assert schedule.free_pages == 2 and schedule.problems() == []
    schedule.add(request("b", 3, first=50))
    assert schedule.plan(None, 0) is not None
    assert [row.token for row in schedule.complete([0, 51])] == [0, 51]
    planned = schedule.plan(None, 0)
    assert planned is not None and planned[1] == [], "nobody is preempted for a draft"
    told = schedule.complete([99] * num_samples(planned[0]))
    assert {row.uid for row in told} == {"a", "b"}


def test_a_step_with_drafts_is_computed_alone_also_beside_a_prompt() -> None:
    schedule = drafting(1)
    schedule.add(request("a", 8))
    begin_to_copy(schedule)
    schedule.add(request("b", 40, first=50))
    planned = schedule.plan(None, 0)
    assert planned is not None and planned[0].num_drafts == 1 and len(planned[0].rows) == 3
    assert schedule.alike(8) == (1, []), "as many tokens are sampled as requests run"


def test_drafts_take_no_page_while_a_request_waits() -> None:
    schedule = drafting(8, num_pages=6, page_size=4, context=24)
    schedule.add(request("a", 8))
    begin_to_copy(schedule)
    schedule.add(request("b", 11, first=50))
    planned = schedule.plan(None, 0)
    assert planned is not None and planned[0].num_drafts == 2, "in the page that it has"
    assert schedule.num_waiting == 0


def test_a_prediction_ends_before_a_token_that_the_model_does_not_have() -> None:
    schedule = drafting()
    schedule.add(replace(request("a", 4), prediction=(5, 6, 1000, 7)))
    assert schedule._waiting[0].prediction == (5, 6)


def test_a_long_output_of_another_engine_is_taken_in_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = drafting(prefill=100)
    schedule.add(request("a", 8, output=[50, 51, *range(8)] * 4))
    one = schedule._waiting[0]
    assert [len(one.drafts(4, at_most=15)) for _ in range(3)] == [0, 0, 4]


@pytest.mark.parametrize("streams", [MANY_STREAMS - 1, MANY_STREAMS])
def test_beside_many_streams_nothing_is_drafted(streams: int) -> None:
    schedule = drafting(prefill=1000)
    for uid in range(streams):
        schedule.add(request(f"{uid}", 8))
    for token in (0, 1):
        assert schedule.plan(None, 0) is not None
        schedule.complete([token] * streams)
    planned = schedule.plan(None, 0)
    assert planned is not None and (planned[0].num_drafts > 0) == (streams < MANY_STREAMS)


def test_as_many_drafts_pay_as_their_chance_and_their_cost_say() -> None:
    schedule = drafting()
    schedule.add(request("a", 8))
    one = schedule._waiting[0]
    table = {}
    for acceptance in (0, WHOLE // 10, WHOLE // 2, WHOLE):
        one.acceptance = acceptance
        table[acceptance] = [
            one.most_drafts(8, streams, cost) for streams, cost in ((1, 0), (1, 50), (1, 300), (6, 100))
        ]
    assert table == {
        0: [8, 0, 0, 0],
        WHOLE // 10: [8, 1, 0, 0],
        WHOLE // 2: [8, 4, 1, 0],
        WHOLE: [8, 8, 8, 8],
    }


def test_what_is_never_right_is_drafted_less_and_less_and_now_and_then_again() -> None:
    schedule = drafting(context=2000, num_pages=1000)
    schedule.add(request("a", 8))
    counts = []
    for number in range(1200):
        planned = schedule.plan(None, 60)
        assert planned is not None
        counts.append(planned[0].num_drafts)
        # Two tokens of the prompt come again and again, and what followed them there never does.
        tokens = [(0, 1, 100 + number)[number % 3]] * num_samples(planned[0])
        told: list[TokenRow] = schedule.complete(tokens)
        assert len(told) == 1
    assert sum(counts[:60]) > 20 and 0 < sum(counts[600:]) < 100 and only(schedule).acceptance < WHOLE // 10
