"""Short steps are committed together: clients get the same, and nothing waits for ever."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from support.engine_rig import LONG_LIMITS, CountingEngine, Running, Scene, detokenizing
from support.memory_log.log import MemoryLog
from support.redis_servers import until

from pipeline.errors import LogUnavailable
from pipeline.events import Cancelled, Finished, StepCompleted, TokensProduced
from pipeline.log.protocol import Inbox, StepCommitted
from pipeline.names import Names
from stages.generate.loop.outbox import MOST_HANDED_OVER, MOST_TOGETHER

NEVER_S = 600.0
"""An interval that ends no test: what comes before it was committed for another reason."""


class CountedLog(MemoryLog):
    """Notes which steps were committed together."""

    def __init__(self) -> None:
        super().__init__(Names())
        self.commits: list[dict[int, StepCompleted]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closes_after = -1
        """Number of commits after which it closes its own gate; -1: never."""
        self.num_lost = 0
        """So many replies are lost from now on."""

    def step(self, owner: Any, steps: Any, **options: Any) -> StepCommitted:
        self.gate.wait(30)
        done = super().step(owner, steps, **options)
        self.commits.append(dict(steps))
        if len(self.commits) == self.closes_after:
            self.gate.clear()
        if self.num_lost:
            self.num_lost -= 1
            raise LogUnavailable("connection reset")
        return done

    @property
    def sizes(self) -> list[int]:
        return [len(steps) for steps in self.commits]


@pytest.fixture
def log() -> CountedLog:
    return CountedLog()


@pytest.fixture
def scene(log: CountedLog) -> Iterator[Scene]:
    """A log with the detokenizer of engine 0."""
    scene = Scene(lambda: log)
    with detokenizing(scene, 0):
        yield scene


def in_use(scene: Scene, engine: CountingEngine, interval_s: float = NEVER_S, **options: Any) -> Any:
    return scene.running(engine=engine, heard=False, commit_interval_s=interval_s, **options)


def test_tokens_of_short_steps_are_committed_together_and_first_and_last_ones_at_once(
    scene: Scene, log: CountedLog
) -> None:
    with in_use(scene, CountingEngine(0.001)) as engine:
        uid = scene.send(10, max_tokens=30)
        until(lambda: scene.have_ended(uid) and scene.is_consumed)
        assert not engine.errors
    assert scene.tokens(uid) == list(range(11, 41))
    assert log.sizes[0] == 1, "the first token"
    assert sum(log.sizes) == 30 and len(log.sizes) <= 30 // 2


def test_tokens_of_one_commit_have_the_times_at_which_the_engine_made_them(scene: Scene, log: CountedLog) -> None:
    with in_use(scene, CountingEngine(0.005)):
        uid = scene.send(10, max_tokens=14)
        until(lambda: scene.have_ended(uid) and scene.is_consumed)
    groups = [list(steps.values()) for steps in log.commits if len(steps) == MOST_TOGETHER]
    for steps in groups:
        apart_ms = [after.made_ms - before.made_ms for before, after in itertools.pairwise(steps)]
        assert min(apart_ms) >= 4, "a step takes 5 ms"
    assert groups
    tokens = [event for event in scene.history(uid) if isinstance(event, TokensProduced)]
    made_ms = [event.ms - event.age_ms for event in tokens if event.age_ms is not None]
    assert len(made_ms) == 14 and made_ms == sorted(made_ms)
    assert median(after - before for before, after in itertools.pairwise(made_ms)) >= 4


@pytest.mark.parametrize("what", ["stop", "cancel", "another request"])
def test_nothing_waits_for_a_step_that_does_not_come(scene: Scene, log: CountedLog, what: str) -> None:
    """Whatever the engine does instead, it does not leave the last tokens waiting."""
    engine = CountingEngine(0.001)
    engine.closes_after = 11
    with in_use(scene, engine) as running:
        uid = scene.send(10, max_tokens=50)
        until(lambda: not engine.gate.is_set())
        if what == "stop":
            running.stop.set()
        elif what == "cancel":
            assert log.end(uid, Cancelled(by="client"), frontend="web-0")
        else:
            other = scene.send(100, max_tokens=1)
        engine.closes_after = -1
        engine.gate.set()
        if what == "cancel":
            until(lambda: scene.is_consumed)
        elif what == "another request":
            until(lambda: scene.have_ended(uid, other))
    made = sum(len(plan.rows) for plan in engine.plans)
    steps = [step for commit in log.commits for step in commit.values()]
    assert sum(row.kind == "token" for step in steps for row in step.rows) == made
    until(lambda: log.backlog(Inbox.steps(log.names, "generate-0")) == 0)


def test_an_engine_computes_on_while_redis_stands_still_up_to_a_bound(scene: Scene, log: CountedLog) -> None:
    engine = CountingEngine()
    log.closes_after = 2
    with in_use(scene, engine, interval_s=0.01, limits=LONG_LIMITS):
        uid = scene.send(10, max_tokens=105)
        until(lambda: not log.gate.is_set())
        until(lambda: len(engine.plans) >= sum(log.sizes) + MOST_HANDED_OVER + 1)
        assert len(engine.plans) <= sum(log.sizes) + MOST_HANDED_OVER + 1
        num_commits = len(log.sizes)
        log.gate.set()
        until(lambda: scene.have_ended(uid))
    assert scene.tokens(uid) == list(range(11, 116))
    assert 1 < max(log.sizes[num_commits:]) <= MOST_HANDED_OVER


def test_steps_whose_reply_was_lost_are_committed_again_as_they_were(
    scene: Scene, log: CountedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.generate.loop.log_thread.BACKOFF_S", 0.001)
    with in_use(scene, CountingEngine(0.001), interval_s=0.01):
        uid = scene.send(10, max_tokens=40)
        until(lambda: any(size > 1 for size in log.sizes))
        log.num_lost = 3
        until(lambda: scene.have_ended(uid) and scene.is_consumed)
    assert log.num_lost == 0 and scene.tokens(uid) == list(range(11, 51))
    numbers = [tuple(commit) for commit in log.commits]
    assert len(numbers) == len(set(numbers)) + 3
    assert all(before == after or before[-1] < after[0] for before, after in itertools.pairwise(numbers))


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_get_the_same_as_with_a_commit_for_each_step(
    scene: Scene, log: CountedLog, overlap: bool
) -> None:
    """They come, run in turns of few rows, and end; some are cancelled on their way."""

    def served(running: Running) -> list[tuple[int, ...]]:
        sent = {scene.send(start, max_tokens=1 + start % 17): start for start in range(10, 40)}
        for uid, start in sent.items():
            if start % 7 == 0:
                log.end(uid, Cancelled(by="client"), frontend="web-0")
        until(lambda: scene.have_ended(*sent) and scene.is_consumed)
        assert not running.errors and running.schedule.free_pages == 64
        answers = []
        for uid, start in sent.items():
            ended = scene.history(uid)[-1]
            assert isinstance(ended, Cancelled if start % 7 == 0 else Finished)
            answers.append(tuple(scene.tokens(uid)) if start % 7 else ())
        return answers

    answers = []
    for interval_s in (0.0, 0.002, 0.05):
        with in_use(scene, CountingEngine(0.0005), interval_s, overlap=overlap) as running:
            answers.append(served(running))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == tuple(range(11, 12 + 10 % 17))
