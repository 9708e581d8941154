"""What an engine says to /metrics of what it computes."""

from __future__ import annotations

import dataclasses

import pytest
from support.engine_rig import LIMITS, POISON, Running, Scene
from support.measured import count_of, total_of
from support.redis_servers import until
from support.schedules import make_schedule

from pipeline.events import Cancelled, EventRow, Preempted, StepCompleted, StepStats, TokenRow, decode
from pipeline.log.protocol import Inbox
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    ACCEPTED_TOKENS,
    COMMIT_SECONDS,
    DRAFT_TOKENS,
    GENERATION_SPEED,
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    NUM_PREEMPTIONS,
    NUM_RUNNING,
    NUM_WAITING,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    STEP_SECONDS,
    STEP_TOKENS,
    Family,
)
from stages.generate.kvcache.radix import RadixCache
from stages.generate.loop.meter import EngineMeter


def counted(engine: Running, *families: Family) -> list[float]:
    return [count_of(engine.measures, family) for family in families]


def steps_of(scene: Scene) -> list[StepCompleted]:
    """Return all steps of the engine; they are read once."""
    inbox = Inbox.steps(scene.log.names, "generate-0")
    steps = [decode(entry.fields) for entry in scene.log.read(inbox, "detokenize-0", max_entries=1000, block_ms=0)]
    return [step for step in steps if isinstance(step, StepCompleted)]


def test_drafts_are_counted_and_those_that_were_right() -> None:
    measures, schedule = Measures(), make_schedule()
    meter = EngineMeter(measures, schedule)
    rows = [TokenRow(uid="a", n=1, token=7, drafted=4, accepted=2), *(TokenRow(uid="a", n=n, token=7) for n in (2, 3))]
    meter.committed(StepCompleted(rows=(*rows, TokenRow(uid="b", n=1, token=7)), figures=StepStats(drafts=4)))
    meter.committed(StepCompleted(rows=(TokenRow(uid="b", n=2, token=7),)))
    assert [count_of(measures, family) for family in (DRAFT_TOKENS, ACCEPTED_TOKENS)] == [4, 2]


def test_every_token_and_every_step_is_counted(scene: Scene) -> None:
    with scene.running(commit_interval_s=0.0) as engine:
        scene.send(10, 11, max_tokens=3)
        scene.send(20, 21, 22, 23, 24, max_tokens=4)
        until(lambda: counted(engine, GENERATION_TOKENS) == [7] and scene.is_consumed)
    steps = steps_of(scene)
    assert counted(engine, PROMPT_TOKENS, GENERATION_TOKENS, PREFIX_QUERIES, PREFIX_HITS) == [7, 7, 7, 0]
    plans = len(engine.engine.plans)
    assert counted(engine, STEP_SECONDS, STEP_TOKENS) == [plans, plans]
    assert total_of(engine.measures, STEP_TOKENS) == 7 + 7
    assert total_of(engine.measures, STEP_SECONDS) == pytest.approx(
        sum(step.figures.forward_ms for step in steps) / 1000, abs=1e-5
    )
    assert count_of(engine.measures, COMMIT_SECONDS, "step") == len(steps) >= plans
    assert total_of(engine.measures, COMMIT_SECONDS, "step") > 0


def test_the_gauges_say_what_an_engine_holds_and_that_it_holds_nothing_any_more(scene: Scene) -> None:
    limits = dataclasses.replace(LIMITS, context=32)
    with scene.running(limits=limits, num_pages=8, pace_s=0.002) as engine:
        endless = [scene.send(start, *range(start + 1, start + 16)) for start in (10, 40)]  # 4 pages, and more
        until(lambda: counted(engine, NUM_RUNNING, NUM_WAITING) == [1, 1])
        assert 0.5 <= count_of(engine.measures, KV_CACHE_USAGE) <= 1
        for uid in endless:
            scene.log.end(uid, Cancelled(by="client"), frontend="web-0")
        until(lambda: scene.is_consumed)
        until(lambda: counted(engine, NUM_RUNNING, NUM_WAITING, KV_CACHE_USAGE) == [0, 0, 0])


@pytest.mark.parametrize(
    ("steps", "speeds"),
    [
        pytest.param([(0.0, 4, 4), (0.5, 4, 4), (1.0, 4, 4), (1.5, 4, 4)], [0, 0, 8, 8], id="a second, then the next"),
        pytest.param([(0.0, 1, 1), (0.25, 1, 1), (0.5, 1, 0)], [0, 0, 4], id="all of a shorter time"),
        pytest.param([(0.0, 2, 2), (1.0, 2, 2), (1.1, 1, 0)], [0, 2, 2], id="no rest of a longer time"),
        pytest.param([(0.0, 2, 2), (1.0, 2, 0), (99.0, 5, 5), (100.0, 7, 7)], [0, 2, 2, 7], id="no idle time"),
        pytest.param([(0.0, 1, 0), (1.0, 1, 0)], [0, 0], id="single steps, as of probes"),
    ],
)
def test_the_speed_of_an_engine_is_that_of_its_last_second_with_requests(
    steps: list[tuple[float, int, int]], speeds: list[float]
) -> None:
    measures, told = Measures(), []
    times = iter([at_s for at_s, _, _ in steps])
    meter = EngineMeter(measures, make_schedule(), clock_s=lambda: next(times))
    for _, num_tokens, running in steps:
        rows = tuple(TokenRow(uid=str(row), n=1, token=5) for row in range(num_tokens))
        meter.committed(StepCompleted(rows=rows, figures=StepStats(running=running)))
        told.append(count_of(measures, GENERATION_SPEED))
    assert told == speeds


def test_what_the_prefix_cache_saves_is_counted_once_for_each_request(scene: Scene) -> None:
    prompt = range(10, 19)
    with scene.running(cache=RadixCache(64, 4)) as engine:
        for times in (1, 2, 3):
            scene.send(*prompt, max_tokens=1)
            until(lambda times=times: counted(engine, GENERATION_TOKENS) == [times])  # type: ignore[misc]
    assert counted(engine, PREFIX_QUERIES, PREFIX_HITS, PROMPT_TOKENS) == [27, 16, 27]
    assert total_of(engine.measures, STEP_TOKENS) == 27 - 16 + 3


def test_a_preempted_request_counts_as_such_and_its_prompt_not_again(scene: Scene) -> None:
    limits = dataclasses.replace(LIMITS, context=32)
    with scene.running(limits=limits, cache=RadixCache(8, 4), commit_interval_s=0.0) as engine:
        engine.engine.gate.clear()  # both come before the first is done
        for start in (10, 60):
            scene.send(start, start + 1, start + 2, start + 3, max_tokens=20)
        engine.engine.gate.set()
        until(lambda: counted(engine, GENERATION_TOKENS) == [40] and scene.is_consumed)
    rows = [row for step in steps_of(scene) for row in step.rows if isinstance(row, EventRow)]
    preempted = sum(isinstance(row.event, Preempted) for row in rows)
    assert preempted > 0
    assert counted(engine, NUM_PREEMPTIONS, PROMPT_TOKENS, PREFIX_QUERIES, PREFIX_HITS) == [preempted, 8, 8, 0]


def test_a_step_that_failed_has_computed_no_prompt(scene: Scene) -> None:
    with scene.running() as engine:
        scene.send(POISON, 1, 2)
        until(lambda: scene.is_consumed)
        assert counted(engine, PROMPT_TOKENS, GENERATION_TOKENS) == [0, 0]
