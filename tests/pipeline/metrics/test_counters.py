"""What a process has measured, and the text in which it says so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import orjson
import pytest
from support.measured import count_of, total_of

from pipeline.metrics import families
from pipeline.metrics.counters import Counts, Measures, read_snapshot


@pytest.fixture
def measures() -> Measures:
    return Measures()


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def changed(measures: Measures, **series: object) -> str:
    """Return a snapshot with some families as another version would say them."""
    return orjson.dumps(orjson.loads(measures.snapshot()) | series).decode()


def test_a_snapshot_comes_back_as_it_was_measured(measures: Measures) -> None:
    measures.add(families.PROMPT_TOKENS, amount=7)
    measures.add(families.PROMPT_TOKENS)
    measures.add(families.REQUEST_SUCCESS, "stop")
    measures.add(families.REQUEST_SUCCESS, "length", amount=2)
    measures.add(families.HTTP_RESPONSES, "/v1/requests/<name>", "GET", "200")
    measures.set(families.NUM_RUNNING, 5)
    measures.set(families.NUM_RUNNING, 3)
    assert read_snapshot(measures.snapshot()) == {
        families.PROMPT_TOKENS: {(): 8},
        families.REQUEST_SUCCESS: {("stop",): 1, ("length",): 2},
        families.HTTP_RESPONSES: {("/v1/requests/<name>", "GET", "200"): 1},
        families.NUM_RUNNING: {(): 3},
    }


def test_a_value_is_counted_in_the_first_bucket_that_is_not_below_it(measures: Measures) -> None:
    for value in (0.0, 0.0005, 0.00051, 0.001, 80.0, 80.1):
        measures.observe(families.STEP_SECONDS, value)
    reading = read_snapshot(measures.snapshot())[families.STEP_SECONDS][()]
    assert isinstance(reading, Counts)
    assert (reading.counts[:3], reading.counts[-2:]) == ((2, 2, 0), (1, 1))
    assert len(reading.counts) == len(families.STEP_SECONDS.buckets) + 1 and sum(reading.counts) == 6
    assert reading.total == pytest.approx(160.10201)


def test_a_value_that_was_seen_several_times_counts_as_often(measures: Measures) -> None:
    measures.observe(families.COMMIT_SECONDS, 0.002, "step", times=3)
    assert count_of(measures, families.COMMIT_SECONDS, "step") == 3
    assert total_of(measures, families.COMMIT_SECONDS, "step") == 0.006


def test_a_snapshot_has_no_zeros_and_no_counts_beyond_the_last(measures: Measures) -> None:
    before = measures.snapshot()
    measures.set(families.NUM_RUNNING, 4)
    measures.set(families.NUM_RUNNING, 0)
    measures.add(families.STREAMS_OPEN)
    measures.add(families.STREAMS_OPEN, amount=-1)
    assert measures.snapshot() == before
    measures.observe(families.STEP_SECONDS, 0.0007)
    assert orjson.loads(measures.snapshot())[families.STEP_SECONDS.name] == [[[0.0007, 0, 1]]]


def test_what_another_version_measured_is_passed_over(measures: Measures) -> None:
    measures.add(families.PROMPT_TOKENS, amount=2)
    text = changed(measures, tomorrow_total=[[1]], tomorrow_seconds=[["a", [1, 2]]], renamed={"a": 1}, other=3)
    assert read_snapshot(text) == {families.PROMPT_TOKENS: {(): 2}}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"text"'])
def test_a_text_that_is_no_snapshot_says_nothing(text: str) -> None:
    assert read_snapshot(text) == {}


@pytest.mark.parametrize(
    "series",
    [
        [["stop", "of", 1]],
        [[1]],
        [[7, 1]],
        [[None, 1]],
        [["stop", None]],
        [["stop", "1"]],
        [["stop", True]],
        [["stop", [1, 2]]],
        ["stop"],
        "stop",
        {"stop": 1},
    ],
    ids=repr,
)
def test_a_series_that_does_not_read_is_passed_over(measures: Measures, series: object) -> None:
    measures.add(families.PROMPT_TOKENS)
    assert read_snapshot(changed(measures, **{families.REQUEST_SUCCESS.name: series})) == {
        families.PROMPT_TOKENS: {(): 1}
    }


@pytest.mark.parametrize("value", [1, [], [0.1, "2"], [0.1, None], [0.1, *[1] * 30], {}, "1,2"], ids=repr)
def test_a_histogram_that_does_not_read_is_passed_over(measures: Measures, value: object) -> None:
    assert len(families.STEP_SECONDS.buckets) + 2 < 31
    assert read_snapshot(changed(measures, **{families.STEP_SECONDS.name: [[value]]})) == {}


def test_a_histogram_with_other_buckets_is_passed_over_but_no_number(measures: Measures) -> None:
    measures.observe(families.STEP_SECONDS, 0.1)
    measures.add(families.PROMPT_TOKENS)
    text = changed(measures, **{"": 1})
    assert set(read_snapshot(measures.snapshot())) == {families.STEP_SECONDS, families.PROMPT_TOKENS}
    assert set(read_snapshot(text)) == {families.PROMPT_TOKENS}


def test_labels_that_a_family_does_not_have_are_a_bug_of_ours(measures: Measures) -> None:
    with pytest.raises(AssertionError, match="request_success_total"):
        measures.add(families.REQUEST_SUCCESS)
    with pytest.raises(AssertionError, match="step_time_seconds"):
        measures.observe(families.STEP_SECONDS, 1, "generate-0")
    with pytest.raises(AssertionError, match="prompt_tokens_total"):
        measures.observe(families.PROMPT_TOKENS, 1)


@pytest.mark.usefixtures("_eager_threads")
def test_threads_lose_none_of_what_they_count_while_another_looks(measures: Measures) -> None:
    each, threads = 3000, 4
    done = threading.Event()
    texts: list[str] = []
    errors: list[Exception] = []

    def count(number: int) -> None:
        for turn in range(each):
            measures.add(families.PROMPT_TOKENS)
            measures.observe(families.STEP_SECONDS, 0.001)
            measures.add(families.HTTP_RESPONSES, f"/{number}", "GET", str(turn))  # a new series each time

    def look() -> None:
        while not done.is_set():
            try:
                texts[:] = [measures.snapshot()]
            except Exception as error:
                errors.append(error)

    looking = threading.Thread(target=look)
    counting = [threading.Thread(target=count, args=(number,)) for number in range(threads)]
    for thread in (looking, *counting):
        thread.start()
    for thread in counting:
        thread.join()
    done.set()
    looking.join()
    readings = read_snapshot(measures.snapshot())
    assert readings[families.PROMPT_TOKENS] == {(): each * threads}
    assert count_of(measures, families.STEP_SECONDS) == each * threads
    assert sum(float(str(value)) for value in readings[families.HTTP_RESPONSES].values()) == each * threads
    assert errors == [] and families.PROMPT_TOKENS in read_snapshot(texts[0])
