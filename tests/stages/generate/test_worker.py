"""The engine's loop and its log thread, with an engine that counts instead of computing, on both logs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_rig import CONTEXT, LEASE_MS, POISON, running, send
from redis_servers import Servers, until
from structlog.testing import capture_logs

from pipeline.errors import Fenced, LogUnavailable, UndecodableEvent
from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    SamplingParams,
    StepCompleted,
    Submitted,
    TakenOver,
    Tokenized,
    TokenRow,
    TokensProduced,
    decode,
    encode,
)
from pipeline.flags import parse_config
from pipeline.log.memory import MemoryLog
from pipeline.log.protocol import Entry, Inbox, Produced, StreamLog, Taken
from pipeline.log.redis import RedisLog
from pipeline.names import Names, tokens_id
from pipeline.slots import read_statuses
from stages.generate.config import GenerateConfig
from stages.generate.kvcache.base import Holding
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.kvcache.radix import RadixCache
from stages.generate.past import past_of
from stages.generate.schedule.request import NewRequest
from stages.generate.worker import sampling_defaults


class Steps:
    """Reads an engine's steps like a detokenizer that leaves them where they are."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.inbox = Inbox.steps(log.names, "generate-0")
        self.seen: list[tuple[Entry, StepCompleted]] = []
        log.prepare(self.inbox)

    def look(self) -> list[StepCompleted]:
        for entry in self.log.read(self.inbox, "detokenize-0", max_entries=100, block_ms=10):
            step = decode(entry.fields)
            assert isinstance(step, StepCompleted)
            self.seen.append((entry, step))
        return [step for _, step in self.seen]

    def tokens(self, uid: str) -> list[TokenRow]:
        return [row for step in self.look() for row in step.rows if isinstance(row, TokenRow) and row.uid == uid]

    def marks(self, uid: str) -> list[EventRow]:
        return [row for step in self.look() for row in step.rows if isinstance(row, EventRow) and row.uid == uid]

    def let_go(self) -> set[str]:
        return {uid for step in self.look() for uid in step.let_go}


def test_a_request_becomes_steps_and_its_entry_is_consumed_with_the_last(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    steps = Steps(log)
    with capture_logs() as lines, running(another_log):
        uid = send(log, 10, 11, max_tokens=3)
        until(lambda: len(steps.tokens(uid)) == 3)
        assert [(row.n, row.token, row.end) for row in steps.tokens(uid)] == [
            (1, 12, None),
            (2, 13, None),
            (3, 14, "length"),
        ]
        assert isinstance(steps.marks(uid)[0].event, Admitted)
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
    assert log.pending(Inbox.tokenized(log.names), "generate-0") == []
    assert not [line for line in lines if line["event"] == "group_lost"]  # a new log has no groups yet


def test_the_entry_of_a_running_request_stays_pending(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log) as engine:
        engine.engine.gate.clear()
        uid = send(log, 1)
        until(lambda: bool(log.pending(Inbox.tokenized(log.names), "generate-0")))
        engine.engine.gate.set()
        until(lambda: len(steps.tokens(uid)) > 2)
        assert [entry.fields["uid"] for entry in log.pending(Inbox.tokenized(log.names), "generate-0")] == [uid]


def test_a_cancelled_request_is_let_go_and_its_pages_are_free(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log, num_pages=16) as engine:
        engine.engine.gate.clear()
        uid = send(log, 1)
        until(lambda: engine.schedule.num_running == 1)
        assert log.end(uid, Cancelled(by="client"), frontend="web-0")
        engine.engine.gate.set()
        until(lambda: uid in steps.let_go())
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
        assert engine.schedule.free_pages == 16


def test_a_request_that_ended_before_it_was_taken_never_runs(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    uid = send(log, 1)
    log.end(uid, Cancelled(by="client"), frontend="web-0")
    with running(another_log) as engine:
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
        assert uid in steps.let_go() and engine.engine.plans == []


def test_a_prompt_that_fits_no_engine_fails_with_a_row(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log):
        uid = send(log, *range(CONTEXT))
        until(lambda: bool(steps.marks(uid)))
        (row,) = steps.marks(uid)
        assert isinstance(row.event, Failed) and row.event.code == "context_length_exceeded"
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)


def test_requests_that_arrive_together_share_steps(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    uids = [send(log, number, max_tokens=4) for number in range(6)]
    with running(another_log) as engine:
        until(lambda: all(len(steps.tokens(uid)) == 4 for uid in uids))
        assert max(len(plan.rows) for plan in engine.engine.plans) == 6


def test_a_step_says_what_it_was_made_of(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log):
        uid = send(log, 1, 2, 3, max_tokens=2)
        until(lambda: len(steps.tokens(uid)) == 2)
        first, second = (step.figures for step in steps.look() if step.rows)
        assert (first.prefill_rows, first.prefill_tokens, first.decode_rows, first.running) == (1, 3, 0, 1)
        assert (second.prefill_rows, second.decode_rows, second.running, second.free_pages) == (0, 1, 0, 64)


def test_a_restarted_engine_goes_on_where_the_log_ends(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log, pace_s=0.05) as engine:
        uid = send(log, 10, max_tokens=9)
        until(lambda: len(steps.tokens(uid)) >= 2)
        engine.stop.set()
    if steps.tokens(uid)[-1].end:
        pytest.fail("it was to be stopped in the middle")
    last = write_histories(log, steps)
    with running(another_log):
        until(lambda: steps.tokens(uid)[-1].end is not None)
    rows = steps.tokens(uid)
    assert [(row.n, row.token) for row in rows] == [(n, 10 + n) for n in range(1, 10)]
    marks = [mark for mark in steps.marks(uid) if isinstance(mark.event, TakenOver)]
    assert [(mark.n, mark.event.epoch) for mark in marks if isinstance(mark.event, TakenOver)] == [(last, 2)]


def write_histories(log: StreamLog, steps: Steps) -> int:
    """Do the detokenizer's part for all steps seen; return the last n."""
    owner = log.acquire("detokenize-0", "the detokenizer", LEASE_MS * 10)
    assert owner is not None
    last = 0
    for entry, step in steps.seen:
        produced = []
        for row in step.rows:
            if isinstance(row, TokenRow):
                event = TokensProduced(count=1, tokens=(row.token,), text="x", step=entry.id)
                produced.append(Produced(row.uid, tokens_id(row.n), row.n, event, "web-0"))
                last = row.n
        assert log.produced(owner, entry, "generate-0", produced)
    return last


def test_an_engine_waits_for_the_steps_of_its_predecessor(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log, pace_s=0.05) as engine:
        uid = send(log, 10, max_tokens=30)
        until(lambda: len(steps.tokens(uid)) >= 2)
        engine.stop.set()
    steps.look()
    waiting = len(steps.seen)
    with running(another_log) as engine:
        until(lambda: engine.slot_lease.status.phase == "starting")
        assert engine.engine.plans == []
        assert len(steps.look()) == waiting
        last = write_histories(log, steps)
        until(lambda: bool(engine.engine.plans))
        assert engine.engine.plans[0].rows[0].token_ids == tuple(range(10, 11 + last))


def test_an_engine_that_lost_its_slot_stops_and_writes_nothing_more(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log) as engine:
        uid = send(log, 1, max_tokens=40)
        until(lambda: len(steps.tokens(uid)) >= 1)
        engine.engine.gate.clear()
        log.release(engine.slot_lease.owner)
        successor = log.acquire("generate-0", "other", LEASE_MS)
        engine.engine.gate.set()
        if successor is None:  # its lease thread was faster; then it must be stopped by hand
            pytest.fail("the lease was renewed between release and acquire")
        until(lambda: bool(engine.errors) or engine.slot_lease.lost.is_set())
        until(lambda: not engine.errors or isinstance(engine.errors[0], Fenced))
    epochs = {entry.id.split("-")[0] for entry, _ in steps.seen}
    assert epochs == {"1"}


def test_a_history_that_does_not_decode_fails_that_request_alone(redis_servers: Servers) -> None:
    from redis_servers import command

    url = redis_servers.url("embedded")
    log = RedisLog(url, Names())
    steps = Steps(log)
    bad, good = send(log, 1, max_tokens=2), send(log, 1, max_tokens=2)
    command(url, "XADD", log.names.request(bad), "0-3", "kind", "nonsense")
    with running(lambda: RedisLog(url, Names())):
        until(lambda: len(steps.tokens(good)) == 2)
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
    *_, last = log.histories([bad])[0]
    event: AnyEvent = decode(last.fields)
    assert isinstance(event, Failed) and event.code == "log_damaged"
    log.close()


def test_what_control_lost_is_found_in_live(redis_servers: Servers) -> None:
    from redis_servers import command

    url = redis_servers.url("embedded")
    log = RedisLog(url, Names())
    steps = Steps(log)
    with running(lambda: RedisLog(url, Names()), pace_s=0.05):  # three seconds for the whole context
        uid = send(log, 1)
        until(lambda: len(steps.tokens(uid)) > 0)
        command(url, "ZREM", log.names.live, uid)
        until(lambda: uid in steps.let_go())
        assert not any(row.end for row in steps.tokens(uid))
    log.close()


def test_requests_whose_delivery_was_lost_on_the_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log delivered them, but its reply did not come: they are pending, and nobody has seen them."""
    log = MemoryLog(Names())
    steps = Steps(log)
    uid = send(log, 10, max_tokens=2)
    take, lost = log.take, threading.Event()

    def loses_the_first(*arguments: Any, **options: Any) -> Taken:
        taken = take(*arguments, **options)
        if taken.entries and not lost.is_set():
            lost.set()
            raise LogUnavailable("connection reset")
        return taken

    monkeypatch.setattr(log, "take", loses_the_first)
    with running(lambda: log):
        until(lambda: len(steps.tokens(uid)) == 2)
    assert lost.is_set()
    assert [(row.n, row.token) for row in steps.tokens(uid)] == [(1, 11), (2, 12)]


def test_a_running_engine_asks_for_requests_only_when_there_may_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `take` at every step would cost a stream as much as the commit of the step itself."""
    log = MemoryLog(Names())
    steps = Steps(log)
    take, plans_at_take = log.take, []

    def counted(*arguments: Any, **options: Any) -> Taken:
        plans_at_take.append(len(running_engine.engine.plans))
        return take(*arguments, **options)

    with running(lambda: log, pace_s=0.01) as running_engine:
        monkeypatch.setattr(log, "take", counted)
        first = send(log, 10, max_tokens=40)
        until(lambda: len(steps.tokens(first)) >= 10)
        second = send(log, 30, max_tokens=40)
        until(lambda: len(steps.tokens(first)) == 40 and len(steps.tokens(second)) == 40)
        num_plans = len(running_engine.engine.plans)
    while_running = [count for count in plans_at_take if 0 < count < num_plans]
    assert len(while_running) <= 4, f"of {num_plans} steps: {while_running}"


def test_a_request_on_which_the_engine_raises_fails_alone(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    before, poison, after = send(log, 10, max_tokens=5), send(log, 1, POISON, max_tokens=5), send(log, 20, max_tokens=5)
    with running(another_log) as engine:
        until(lambda: all(len(steps.tokens(uid)) == 5 for uid in (before, after)))
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
        assert not engine.errors and engine.schedule.free_pages == 64
    for uid, first in ((before, 11), (after, 21)):
        assert [(row.n, row.token) for row in steps.tokens(uid)] == [(n, first + n - 1) for n in range(1, 6)]
    failed = [mark.event for mark in steps.marks(poison) if isinstance(mark.event, Failed)]
    assert [event.code for event in failed] == ["engine_error"] and "index out of range" in failed[0].message
    assert steps.tokens(poison) == []


def test_a_request_on_which_the_engine_raises_while_it_is_alone_fails_and_the_engine_goes_on(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log):
        poison = send(log, POISON)
        until(lambda: any(isinstance(mark.event, Failed) for mark in steps.marks(poison)))
        good = send(log, 1, max_tokens=2)
        until(lambda: len(steps.tokens(good)) == 2)


def test_an_engine_that_raises_on_every_one_of_several_requests_ends_and_loses_none(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    steps = Steps(log)
    uids = {send(log, 1), send(log, 2)}
    with running(another_log, broken=True) as engine:
        until(lambda: bool(engine.errors))
    assert isinstance(engine.errors[0], IndexError)
    assert {entry.fields["uid"] for entry in log.pending(Inbox.tokenized(log.names), "generate-0")} == uids
    assert not any(isinstance(mark.event, Failed) for uid in uids for mark in steps.marks(uid))


def test_an_engine_whose_steps_nobody_reads_takes_nothing_until_somebody_does(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    steps = Steps(log)
    uid = send(log, 1, max_tokens=2)
    with running(another_log, heard=False) as engine:
        assert steps.tokens(uid) == [] and engine.engine.plans == []
        assert log.pending(Inbox.tokenized(log.names), "generate-0") == []
        log.acquire("detokenize-0", "the detokenizer", LEASE_MS * 10)
        until(lambda: len(steps.tokens(uid)) == 2)


def test_a_history_with_a_hole_is_not_gone_on_with() -> None:
    entries = [
        Entry("0-1", encode(Submitted(endpoint="chat", frontend="web-0", sampling=SamplingParams()))),
        Entry("0-2", encode(Tokenized(token_ids=(1,), fingerprint="f", by="tokenize-0"))),
        Entry("1-0", encode(TokensProduced(count=1, tokens=(5,), text="a", step="1-1"))),
        Entry("3-0", encode(TokensProduced(count=1, tokens=(7,), text="c", step="1-3"))),
    ]
    past = past_of("a", entries[:3])
    assert past is not None and past.request.output_ids == (5,)
    with pytest.raises(UndecodableEvent, match="after token 1 comes the event 3-0"):
        past_of("a", entries)


def test_priority_and_bad_words_are_those_of_the_history() -> None:
    submitted = Submitted(endpoint="chat", frontend="web-0", sampling=SamplingParams(seed=3), priority=-2)
    tokenized = Tokenized(token_ids=(1, 2), fingerprint="f", by="tokenize-0", bad_words=((5,), (6, 7)))
    past = past_of("a", [Entry("0-1", encode(submitted)), Entry("0-2", encode(tokenized))])
    assert past is not None
    assert past.request == NewRequest("a", (1, 2), (), SamplingParams(seed=3), -2, ((5,), (6, 7)))


# the cache


def test_a_flush_forgets_the_prefixes_and_the_status_says_so(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    prompt = range(10, 22)  # three pages, of which the last is never found: its last token is computed in any case

    def cached_tokens() -> int:
        uid = send(log, *prompt, max_tokens=1)
        until(lambda: len(steps.tokens(uid)) == 1)
        (event,) = [mark.event for mark in steps.marks(uid) if isinstance(mark.event, Admitted)]
        return event.cached_tokens

    with running(another_log, cache=RadixCache(64, 4)) as engine:
        assert [cached_tokens(), cached_tokens()] == [0, 8]
        flush = log.flush("web-0")
        until(lambda: engine.slot_lease.status.flushed == flush)
        assert engine.slot_lease.status.flushed_pages == 3
        until(lambda: read_statuses(log, "generate")[0].flushed == flush)
        assert [cached_tokens(), cached_tokens()] == [0, 8]
        flush = log.flush("web-0")
        until(lambda: engine.slot_lease.status.flushed == flush)
        assert engine.slot_lease.status.flushed_pages == 6


def test_a_flush_while_requests_run_harms_none_of_them(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with running(another_log, pace_s=0.01, cache=RadixCache(64, 4)) as engine:
        uid = send(log, *range(10, 30), max_tokens=30)
        until(lambda: len(steps.tokens(uid)) > 1)
        flush = log.flush("web-0")
        until(lambda: engine.slot_lease.status.flushed == flush)
        assert engine.slot_lease.status.flushed_pages == 0
        until(lambda: steps.tokens(uid)[-1].end is not None)
        assert [row.token for row in steps.tokens(uid)] == list(range(30, 60))
        assert not engine.errors and engine.schedule.problems() == []


# what the model recommends


@pytest.mark.parametrize(
    ("flags", "expected", "reasons"),
    [
        ([], {"top_k": 20}, ["temperature is 3: Input should be less than or equal to 2"]),
        (["--generation-config", "none"], {}, []),
    ],
    ids=["auto", "none"],
)
def test_what_the_model_recommends_is_a_default_unless_it_is_switched_off(
    tmp_path: Path, flags: list[str], expected: dict[str, float], reasons: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 3, "top_k": 20}')
    config = parse_config("stage generate", GenerateConfig, flags, {})
    with capture_logs() as lines:
        assert sampling_defaults(config.defaults, tmp_path) == expected
    assert [(line["log_level"], line["event"], line["reason"]) for line in lines] == [
        ("warning", "recommendation_ignored", reason) for reason in reasons
    ]
    assert all(line["file"] == str(tmp_path / "generation_config.json") for line in lines)


# the books


class WrongBooks(NaiveCache):
    """A cache that has lost a page; *unreadable*, it has lost its books altogether."""

    def __init__(self, *, unreadable: bool = False) -> None:
        super().__init__(64, 4)
        self._pool.allocate(1)
        self._unreadable = unreadable

    def problems(self, holdings: Sequence[Holding]) -> list[str]:
        if self._unreadable:
            raise KeyError("page 7")
        return super().problems(holdings)


@pytest.mark.parametrize(("unreadable", "words"), [(False, "0 pages held and 63 free of 64"), (True, "page 7")])
def test_books_that_do_not_add_up_are_reported_and_the_engine_goes_on(
    another_log: Callable[[], StreamLog], unreadable: bool, words: str
) -> None:
    log = another_log()
    steps = Steps(log)
    with capture_logs() as lines, running(another_log, cache=WrongBooks(unreadable=unreadable)) as engine:
        until(lambda: engine.slot_lease.status.books_wrong == 1)  # an engine looks when it has nothing to do yet
        for times in (1, 2, 3):
            uid = send(log, 1, max_tokens=CONTEXT - 1)
            until(lambda uid=uid: len(steps.tokens(uid)) == CONTEXT - 1)  # type: ignore[misc]  # bound at once
            assert engine.slot_lease.status.books_wrong <= times
        until(lambda: engine.slot_lease.status.books_wrong == 2)  # once more: a hundred steps later
        until(lambda: read_statuses(log, "generate")[0].books_wrong == 2)
        assert not engine.errors
    reports = [line for line in lines if line["event"] == "books_wrong"]
    assert [(line["log_level"], line["times"]) for line in reports] == [("error", 1), ("error", 2)]
    assert all(words in str(line["problems"]) for line in reports)


def test_books_that_add_up_are_not_spoken_of(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    steps = Steps(log)
    with capture_logs() as lines, running(another_log, cache=RadixCache(64, 4)) as engine:
        for number in range(4):
            uid = send(log, number, max_tokens=CONTEXT - 1)
            until(lambda uid=uid: len(steps.tokens(uid)) == CONTEXT - 1)  # type: ignore[misc]  # bound at once
        assert engine.slot_lease.status.books_wrong == 0 and not engine.errors
    assert not [line for line in lines if line["event"] == "books_wrong"]
