"""Which steps wait for others, by a clock that the test sets, and that none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.events import Admitted, EventRow, StepCompleted, StepStats, TokenRow
from stages.generate.loop.outbox import (
    FEWEST_HANDED_OVER,
    MOST_HANDED_OVER,
    MOST_TOGETHER,
    Group,
    Idle,
    Outbox,
    PendingStep,
)
from stages.generate.loop.updates import Room

TOKEN = TokenRow(uid="a", n=7, token=5)
IDLE = Idle(Room(1), 0, brief=False)


class Rig:
    """An engine's loop that makes steps, and the clock."""

    def __init__(self, interval_s: float = 0.010) -> None:
        self.now_s = 100.0
        self.outbox = Outbox(interval_s, lambda: self.now_s)
        self.number = 0

    def step(self, after_s: float = 0.0, *, at_once: bool = False, ended: Sequence[str] = (), **event: Any) -> Group:
        """Hand over the next step, *after_s* after the last."""
        self.now_s += after_s
        self.number += 1
        assert self.outbox.has_place(0.0)
        said = StepCompleted(**{"rows": (TOKEN,)} | event)
        return self.outbox.put(PendingStep(self.number, said, tuple(ended)), at_once=at_once)

    def begin(self) -> None:
        """Commit the first steps, so that it is known how long a step takes: 4 ms."""
        self.step()
        self.step(0.004)
        self.outbox.close()
        self.commit()

    def commit(self) -> list[int]:
        """Take what is there as the log thread does; return the numbers of its steps."""
        job = self.outbox.take(0.0)
        assert not isinstance(job, Idle)
        if job is None:
            return []
        self.outbox.committed(job[0])
        return [step.number for step in job[1]]


def test_a_step_takes_as_many_places_as_a_request_may_have_tokens_in_it() -> None:
    rows = [TOKEN, TOKEN.model_copy(update={"n": 8, "drafted": 6})]
    event = StepCompleted(rows=tuple(rows), figures=StepStats(drafts=6))
    assert [Outbox(interval_s).places_for(event) for interval_s in (0.01, 0.0)] == [7, 1]
    assert Outbox(0.01).places_for(StepCompleted(rows=(TOKEN,))) == 1
    outbox = Outbox(0.01)
    assert all(outbox.has_place(0.0) for _ in range(7))
    group = outbox.put(PendingStep(1, event, (), places=7), at_once=True)
    assert sum(outbox.has_place(0.0) for _ in range(99)) == MOST_HANDED_OVER - 7
    outbox.committed([group])
    assert sum(outbox.has_place(0.0) for _ in range(99)) == 7


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.begin()
    return rig


def test_short_steps_wait_for_the_last_one_that_comes_within_the_interval(rig: Rig) -> None:
    first = rig.step(0.004)
    assert first.is_open and rig.step(0.004) is first and first.is_open
    assert rig.step(0.004) is first and not first.is_open, "the next one would come 12 ms after the first"
    assert rig.commit() == [3, 4, 5]
    assert rig.step(0.004).is_open


def test_a_step_that_takes_longer_than_the_interval_does_not_wait(rig: Rig) -> None:
    rig.step(0.011)
    assert rig.commit() == [3]


def test_a_step_waits_no_longer_than_the_interval_when_the_next_one_takes_long(rig: Rig) -> None:
    group = rig.step(0.004)
    assert group.until_s == pytest.approx(rig.now_s + 0.010)
    rig.now_s = group.until_s
    assert rig.commit() == [3]  # the thread waits until then
    assert rig.step() is not group


@pytest.mark.parametrize(
    "what",
    [
        {"ended": ("a",)},
        {"at_once": True},
        {"released": ("a",)},
        {"schedule": "{}"},
        {"figures": StepStats(prefill_rows=1)},
        {"rows": (TOKEN, EventRow(uid="b", n=0, event=Admitted(engine="e", epoch=1, step=1, fingerprint="f")))},
    ],
    ids=["an end", "settled", "let go", "a snapshot", "a first token", "a mark"],
)
def test_what_does_not_wait_takes_along_what_does(rig: Rig, what: dict[str, Any]) -> None:
    group = rig.step(0.001)
    assert rig.step(0.001, **what) is group and not group.is_open
    assert rig.commit() == [3, 4]
    assert not rig.step(0.001, **what).is_open


def test_an_idle_engine_leaves_no_step_waiting(rig: Rig) -> None:
    group = rig.step(0.001)
    assert rig.outbox.idle(IDLE, 0.0) and not group.is_open
    assert rig.commit() == [3]
    assert rig.outbox.take(0.0) == IDLE


def test_an_engine_that_waits_for_a_place_leaves_no_step_waiting(rig: Rig) -> None:
    groups = [rig.step(0.001) for _ in range(MOST_HANDED_OVER)]
    assert not rig.outbox.has_place(0.0)
    assert not any(group.is_open for group in groups)
    assert rig.commit() == list(range(3, 3 + MOST_HANDED_OVER))


def test_groups_that_waited_for_the_same_commit_are_committed_together(rig: Rig) -> None:
    groups = [rig.step(0.0001) for _ in range(MOST_TOGETHER + 1)]
    assert groups[0] is groups[MOST_TOGETHER - 1] and groups[-1] is not groups[0] and groups[-1].is_open
    second = 3 + MOST_TOGETHER
    assert rig.commit() == list(range(3, second)), "the second one is open still"
    rig.outbox.close()
    rig.step(0.020)
    assert rig.commit() == [second, second + 1]


def test_without_an_interval_each_step_is_a_commit_of_its_own() -> None:
    rig = Rig(0.0)
    for _ in range(FEWEST_HANDED_OVER):
        assert not rig.step(0.001).is_open
    assert not rig.outbox.has_place(0.0), "one is on its way, and one waits behind it"
    assert rig.commit() == [1] and rig.commit() == [2]


def test_a_step_that_is_added_while_the_time_is_over_is_in_one_commit(rig: Rig) -> None:
    """The thread takes a group while the engine adds to it: the step is in this commit or in the next."""
    taken: list[int] = []
    done = threading.Event()
    outbox = Outbox(0.0005)

    def commit() -> None:
        while not done.is_set() or len(taken) < 3000:
            job = outbox.take(0.001)
            if job is not None and not isinstance(job, Idle):
                taken.extend(step.number for step in job[1])
                outbox.committed(job[0])

    thread = threading.Thread(target=commit)
    thread.start()
    for number in range(3000):
        assert outbox.has_place(10.0)
        outbox.put(PendingStep(number, StepCompleted(rows=(TOKEN,)), ()))
    outbox.close()
    done.set()
    thread.join(30)
    assert taken == list(range(3000))
