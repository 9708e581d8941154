"""The record of a request's tokens against a plain count, through steps, rewinds and preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import make_schedule, request

from pipeline.events import SamplingParams
from stages.generate.schedule.plan import NOT_A_NUMBER, Sample
from stages.generate.schedule.seen import Seen

TOKENS = st.integers(0, 6) | st.integers(0, 2**31 - 1)


def is_count_of(seen: Seen, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether a record is what a plain count gives, and has each token once."""
    counts = dict(zip(seen.output_ids, seen.counts, strict=True))
    assert len(counts) == len(seen.output_ids) and len(set(seen.prompt_ids)) == len(seen.prompt_ids)
    return set(seen.prompt_ids) == set(prompt) and counts == Counter(output)


@given(
    prompt=st.lists(TOKENS, max_size=12),
    moves=st.lists(st.tuples(st.lists(TOKENS, max_size=5), st.integers(0, 8), st.lists(TOKENS, max_size=3))),
)
def test_a_record_that_follows_a_list_is_a_plain_count_of_it(
    prompt: list[int], moves: list[tuple[list[int], int, list[int]]]
) -> None:
    """The list has placeholders at its end, as in a plan that is made ahead, and may go on from an earlier place."""
    seen, output = Seen(len(prompt)), list[int]()
    for made, dropped, others in moves:
        output += made
        assert is_count_of(seen.follow([*prompt, *output, -1, -2], len(prompt) + len(output)), prompt, output)
        if dropped:  # a rewind says so: it comes before the tokens that replace those it drops
            del output[len(output) - min(dropped, len(output)) :]
            assert is_count_of(seen.follow([*prompt, *output], len(prompt) + len(output)), prompt, output)
        output += others
    assert is_count_of(seen.follow([*prompt, *output], len(prompt) + len(output)), prompt, output)


STEPS = st.lists(st.tuples(st.sampled_from(["land", "land", "land", "ahead", "fail"]), st.integers(0, 5)), max_size=30)


@given(
    steps=STEPS,
    requests=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=4),
    num_pages=st.integers(8, 14),
)
def test_a_sample_that_is_settled_has_a_plain_count_of_the_tokens_before_it(
    steps: list[tuple[str, int]], requests: list[tuple[int, list[int]]], num_pages: int
) -> None:
    """Steps are drawn when those before them have landed, once or twice; some fail after that. Pages run out, so
    requests are preempted; others come with tokens of another engine.
    """
    schedule = make_schedule("radix", num_pages=num_pages, context=4 * num_pages, prefill=5, vocab_size=10)
    known: dict[str, tuple[list[int], list[int]]] = {}
    for at, (length, output) in enumerate(requests):
        new = replace(request(str(at), length, output), sampling=SamplingParams(repetition_penalty=1.1))
        assert schedule.add(new) is None
        known[str(at)] = list(new.prompt_ids), list(output)
    flights: list[list[tuple[str, Sample]]] = []

    def launch() -> None:
        if (planned := schedule.plan()) is not None:
            rows = [(schedule.holder(row.table)[0], row.sample) for row in planned[0].rows]
            flights.append([(uid, sample) for uid, sample in rows if sample is not None])

    for kind, token in steps:
        if not flights:
            launch()
        if not flights:
            return  # all have ended
        if kind == "ahead" and len(flights) < 2:
            launch()
        for _ in range(2):
            for uid, sample in flights[0]:
                prompt, output = known[uid]
                seen = sample.settled().seen
                assert sample.position == len(prompt) + len(output)
                assert seen is not None and is_count_of(seen, prompt, output)
        if kind == "fail":
            schedule.start_over()
            flights.clear()
            continue
        for row in schedule.complete([(token + at) % 6 for at in range(len(flights.pop(0)))]):
            known[row.uid][1].append(row.token)


@pytest.mark.parametrize("output", [[NOT_A_NUMBER], [3, NOT_A_NUMBER, 3]])
def test_what_is_no_token_is_not_counted(output: list[int]) -> None:
    """A request that has left gets it, and may have a row in the step in flight: the place is that of another row."""
    seen = Seen(1).follow([2, *output], 1 + len(output))
    assert is_count_of(seen, [2], [token for token in output if token != NOT_A_NUMBER])
