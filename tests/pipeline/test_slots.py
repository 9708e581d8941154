"""The place of a worker: which slot it gets, how it keeps it, and how it loses it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import until

from pipeline.errors import LogUnavailable, UndecodableEvent
from pipeline.log import Owner
from pipeline.memory_log import MemoryLog
from pipeline.names import Names
from pipeline.slots import (
    EXIT_STUCK,
    Place,
    Status,
    acquire_slot,
    known_statuses,
    parse_status,
    progress_reporter,
    read_statuses,
)

REPOSITORY = Path(__file__).parents[2]
LONG_MS = 60_000
SHORT_MS = 60


class CountingLog(MemoryLog):
    """Counts the renewals, and can be cut off."""

    def __init__(self) -> None:
        super().__init__(Names("test"))
        self.renewals = 0
        self.cut_off = False
        self.published: list[str] = []

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        self.renewals += 1
        if self.cut_off:
            raise LogUnavailable("cut off")
        self.published.append(status)
        return super().renew(owner, lease_ms, status)

    def release(self, owner: Owner) -> bool:
        if self.cut_off:
            raise LogUnavailable("cut off")
        return super().release(owner)


@pytest.fixture
def log() -> CountingLog:
    return CountingLog()


@pytest.fixture
def place(log: CountingLog) -> Iterator[Place]:
    held = Place(log, acquire_slot(log, "generate", SHORT_MS), SHORT_MS)
    yield held
    held.leave()


def renewed(log: CountingLog, *, times: int = 1) -> None:
    """Wait until the lease has been renewed so many times more."""
    before = log.renewals
    until(lambda: log.renewals >= before + times)


def test_a_worker_gets_the_lowest_free_slot(log: CountingLog) -> None:
    owners = [acquire_slot(log, "generate", LONG_MS) for _ in range(3)]
    assert [owner.slot for owner in owners] == ["generate-0", "generate-1", "generate-2"]
    log.release(owners[1])
    assert acquire_slot(log, "generate", LONG_MS).slot == "generate-1"
    assert acquire_slot(log, "tokenize", LONG_MS).slot == "tokenize-0"


def test_a_preferred_slot_is_taken_at_once_when_it_is_free(log: CountingLog) -> None:
    assert acquire_slot(log, "generate", LONG_MS, preferred=2).slot == "generate-2"


def test_a_preferred_slot_is_waited_for_when_its_holder_is_dead(log: CountingLog) -> None:
    assert log.acquire("generate-1", "dead", SHORT_MS) is not None
    owner = acquire_slot(log, "generate", LONG_MS, preferred=1)
    assert (owner.slot, owner.epoch) == ("generate-1", 2)


def test_a_preferred_slot_is_not_waited_for_when_its_holder_lives(log: CountingLog, place: Place) -> None:
    owner = acquire_slot(log, "generate", SHORT_MS, preferred=0)
    assert owner.slot == "generate-1"
    assert log.lease("generate-0").holder == str(place.owner)


def test_a_place_keeps_its_lease(log: CountingLog, place: Place) -> None:
    renewed(log, times=8)  # a third of the lease apart
    assert log.lease("generate-0").holder == str(place.owner)
    assert place.owner.epoch == 1
    assert not place.lost.is_set()


def test_a_place_publishes_what_its_worker_says(log: CountingLog, place: Place) -> None:
    place.say(phase="ready", models=("a", "b"), context=4096)
    until(lambda: read_statuses(log, "generate")[0].phase == "ready")
    (status,) = read_statuses(log, "generate")
    assert status == place.status
    assert (status.slot, status.owner) == ("generate-0", str(place.owner))
    assert (status.models, status.context) == (("a", "b"), 4096)


def test_a_place_says_that_it_is_lost_after_the_acquire_of_another(log: CountingLog, place: Place) -> None:
    log.cut_off = True
    until(lambda: log.lease("generate-0").holder == "")
    owner = log.acquire("generate-0", "another", LONG_MS)
    assert owner is not None
    assert not place.lost.is_set()
    log.cut_off = False
    assert place.lost.wait(10)
    place.leave()
    assert log.lease("generate-0").holder == str(owner)


def test_a_place_takes_its_lease_again_when_nobody_else_did(log: CountingLog, place: Place) -> None:
    log.cut_off = True
    until(lambda: log.lease("generate-0").holder == "")
    log.cut_off = False
    until(lambda: log.lease("generate-0").holder == str(place.owner))
    assert not place.lost.is_set()


def test_a_place_that_is_left_is_free_and_silent(log: CountingLog, place: Place) -> None:
    renewed(log)
    place.leave()
    assert log.lease("generate-0").holder == ""
    assert log.statuses("generate") == {}
    assert acquire_slot(log, "generate", LONG_MS).slot == "generate-0"


def test_a_place_can_be_left_without_a_log(log: CountingLog, place: Place) -> None:
    log.cut_off = True
    place.leave()
    assert log.lease("generate-0").holder == str(place.owner)


def test_a_status_that_cannot_be_read_says_so() -> None:
    with pytest.raises(UndecodableEvent, match="phase"):
        parse_status('{"slot": "a", "owner": "b", "pid": 1, "host": "h", "phase": "asleep"}')


def test_a_status_comes_back_as_it_was() -> None:
    status = Status(slot="web-0", owner="1:n", pid=7, host="h", phase="ready", address="http://h:1", models=("m",))
    assert parse_status(status.model_dump_json()) == status


def test_progress_is_published_in_steps(log: CountingLog, place: Place) -> None:
    said: list[float] = []
    place.say = lambda **changes: said.append(float(str(changes["progress"])))  # type: ignore[method-assign]
    report = progress_reporter(place, "weights")
    for percent in range(101):
        report(percent / 100)
    assert said[0] == 0
    assert said[-1] == 1
    assert 15 <= len(said) <= 22


def run_worker(body: str) -> subprocess.CompletedProcess[str]:
    """Run a worker of which the watchdog expects a sign of life every 0.2 s."""
    program = """
        import sys, threading, time
        from pipeline import slots
        from pipeline.memory_log import MemoryLog
        from pipeline.names import Names

        slots.WATCHDOG_S = 0.2
        log = MemoryLog(Names("test"))
        place = slots.Place(log, slots.acquire_slot(log, "generate", 60), 60)
    """
    text = textwrap.dedent(program) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", text], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_watchdog_ends_a_process_whose_loop_is_stuck() -> None:
    done = run_worker("threading.Event().wait(30)")
    assert done.returncode == EXIT_STUCK == 3
    assert "stuck" in done.stdout + done.stderr


def test_the_watchdog_leaves_a_process_alone_whose_loop_comes_round() -> None:
    done = run_worker("""
        until_s = time.monotonic() + 0.6
        while time.monotonic() < until_s:
            place.came_round(patience_s=0.2)
            time.sleep(0.01)
        sys.exit(7)
    """)
    assert done.returncode == 7, done.stderr


def test_the_watchdog_has_the_patience_that_it_was_asked_for() -> None:
    done = run_worker("""
        place.came_round(patience_s=30)
        time.sleep(0.6)
        sys.exit(7)
    """)
    assert done.returncode == 7, done.stderr


def test_a_status_of_another_version_is_left_out_and_breaks_no_reader() -> None:
    good = Status(slot="generate-0", owner="1:x", pid=1, host="h").model_dump_json()
    newer = '{"slot": "generate-1", "owner": "1:y", "pid": 2, "host": "h", "something": "new"}'
    assert [status.slot for status in known_statuses({"generate-0": good, "generate-1": newer})] == ["generate-0"]
