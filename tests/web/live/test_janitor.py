"""The janitor: what it ends, what it leaves alone, and that one process at a time is it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support.measured import count_of
from support.redis_servers import command, until

from pipeline.events import Cancelled, End, Failed, Finished, SamplingParams, Submitted, Timings, Usage, decode, new_uid
from pipeline.log.protocol import Inbox, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import REQUEST_SUCCESS
from pipeline.names import Names, sibling_uids
from web.live.janitor import SLOT, Janitor

LONG_MS = 60_000
PATIENCE_S = 60.0


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def log(another_log: Callable[[], RedisLog]) -> RedisLog:
    opened = another_log()
    opened.prepare(Inbox.submitted(opened.names))
    return opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def measures() -> Measures:
    return Measures()


@pytest.fixture
def janitor(log: RedisLog, clock: Clock, measures: Measures) -> Janitor:
    return Janitor(log, patience_s=PATIENCE_S, clock_s=clock, measures=measures)


def ended(measures: Measures) -> list[float]:
    """Return how many requests it has ended: in error, and because nobody was there."""
    return [count_of(measures, REQUEST_SUCCESS, reason) for reason in ("error", "abort")]


def submit(log: RedisLog, *, frontend: str = "web-0", timeout_ms: int = LONG_MS, count: int = 1) -> str:
    uid = new_uid()
    event = Submitted(endpoint="chat", frontend=frontend, prompt="x", sampling=SamplingParams())
    log.limits = RequestLimits(timeout_s=timeout_ms / 1000)
    log.submit(uid, count * [event])
    return uid


def end_of(log: RedisLog, uid: str) -> End | None:
    last = decode(log.histories([uid])[0][-1].fields)
    return last if isinstance(last, Finished | Failed | Cancelled) else None


def test_what_is_past_its_deadline_fails_though_no_engine_is_there(
    log: RedisLog, janitor: Janitor, measures: Measures
) -> None:
    log.acquire("web-0", "n", LONG_MS)
    late, early = submit(log, timeout_ms=1), submit(log)
    until(lambda: log.overdue(10) == [late])
    janitor.sweep()
    end = end_of(log, late)
    assert isinstance(end, Failed) and (end.status, end.code) == (504, "timeout")
    assert end_of(log, early) is None
    assert log.living() == [early] and ended(measures) == [1, 0]


def test_siblings_past_their_deadline_fail_each(log: RedisLog, janitor: Janitor) -> None:
    log.acquire("web-0", "n", LONG_MS)
    uids = sibling_uids(submit(log, timeout_ms=1, count=3), 3)
    log.end(uids[1], Cancelled(by="client"), frontend="web-0")
    until(lambda: len(log.overdue(10)) == 2)
    janitor.sweep()
    ends = [end_of(log, each) for each in uids]
    assert [end and end.kind for end in ends] == ["failed", "cancelled", "failed"]


def test_a_request_that_ended_in_time_is_left_as_it_is(log: RedisLog, janitor: Janitor, measures: Measures) -> None:
    log.acquire("web-0", "n", LONG_MS)
    uid = submit(log, timeout_ms=1)
    usage, timings = Usage(prompt_tokens=1, completion_tokens=0), Timings(admitted_ms=1, first_token_ms=1, total_ms=1)
    finished = Finished(n=0, reason="stop", usage=usage, timings=timings)
    log.end(uid, finished, frontend="web-0")
    janitor.sweep()
    assert isinstance(end_of(log, uid), Finished) and ended(measures) == [0, 0]


def test_a_request_whose_frontend_is_gone_for_a_minute_is_cancelled(
    log: RedisLog, janitor: Janitor, clock: Clock, measures: Measures
) -> None:
    owner = log.acquire("web-0", "n", LONG_MS)
    assert owner is not None
    log.acquire("web-1", "n", LONG_MS)
    abandoned, other = submit(log), submit(log, frontend="web-1")
    janitor.sweep()
    log.release(owner)
    clock.now_s = 10
    janitor.sweep()  # sees for the first time that it is gone
    clock.now_s = 10 + PATIENCE_S - 0.1
    janitor.sweep()
    assert end_of(log, abandoned) is None
    clock.now_s = 10 + PATIENCE_S
    janitor.sweep()
    assert end_of(log, abandoned) == Cancelled(by="janitor", ms=end_of(log, abandoned).ms)  # type: ignore[union-attr]
    assert end_of(log, other) is None and ended(measures) == [0, 1]


def test_a_frontend_that_came_back_in_time_keeps_its_requests(log: RedisLog, janitor: Janitor, clock: Clock) -> None:
    uid = submit(log)
    janitor.sweep()
    clock.now_s = PATIENCE_S - 1
    owner = log.acquire("web-0", "n", LONG_MS)
    assert owner is not None
    janitor.sweep()
    log.release(owner)
    clock.now_s = PATIENCE_S + 1
    janitor.sweep()
    assert end_of(log, uid) is None


def test_a_request_that_nobody_was_to_listen_for_is_not_abandoned(
    log: RedisLog, janitor: Janitor, clock: Clock
) -> None:
    uid = submit(log, frontend="")
    janitor.sweep()
    clock.now_s = 10 * PATIENCE_S
    janitor.sweep()
    assert end_of(log, uid) is None


def test_a_request_that_somebody_reads_elsewhere_is_not_abandoned(redis_url: str, clock: Clock) -> None:
    log = RedisLog(redis_url, Names())
    janitor = Janitor(log, patience_s=PATIENCE_S, clock_s=clock)
    read, unread = submit(log), submit(log)
    command(redis_url, "SET", log.names.reader(read), "1", "PX", LONG_MS)
    janitor.sweep()
    clock.now_s = PATIENCE_S
    janitor.sweep()
    assert end_of(log, read) is None
    assert isinstance(end_of(log, unread), Cancelled)
    log.close()


def test_a_request_is_abandoned_a_minute_after_its_last_reader_left_and_not_before(
    log: RedisLog, janitor: Janitor, clock: Clock
) -> None:
    uid, reader = submit(log), "web-1:nonce"
    log.reading([uid], reader)
    janitor.sweep()
    clock.now_s = 2 * PATIENCE_S
    janitor.sweep()
    log.stop_reading(uid, reader)
    clock.now_s += PATIENCE_S - 0.1
    janitor.sweep()
    assert end_of(log, uid) is None
    clock.now_s += 0.1
    janitor.sweep()
    assert isinstance(end_of(log, uid), Cancelled)


def test_a_reader_that_comes_while_it_sweeps_keeps_its_request(
    log: RedisLog, janitor: Janitor, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, read_by_others = submit(log), log.read_by_others
    janitor.sweep()
    clock.now_s = PATIENCE_S

    def slowly(uids: Sequence[str]) -> set[str]:
        read = read_by_others(uids)
        log.reading([uid], "web-1:nonce")
        return read

    monkeypatch.setattr(log, "read_by_others", slowly)
    janitor.sweep()
    assert end_of(log, uid) is None


def test_one_process_at_a_time_is_the_janitor(log: RedisLog) -> None:
    first, second = Janitor(log), Janitor(log)
    assert first.holds_slot() and first.holds_slot()
    assert not second.holds_slot()
    first.leave()
    assert second.holds_slot()
    assert not first.holds_slot()
    assert log.lease(SLOT).holder


def test_a_request_whose_key_is_no_history_leaves_the_others_to_the_janitor(redis_url: str) -> None:
    log = RedisLog(redis_url, Names())
    log.acquire("web-0", "n", LONG_MS)
    spoilt, late = submit(log, timeout_ms=1), submit(log, timeout_ms=1)
    command(redis_url, "SET", log.names.request(spoilt), "not a history")
    until(lambda: len(log.overdue(10)) == 2)
    Janitor(log, patience_s=PATIENCE_S).sweep()
    assert isinstance(end_of(log, late), Failed) and log.living() == []
    log.close()
