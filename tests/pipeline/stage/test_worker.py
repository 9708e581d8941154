"""The consumer-group runtime: in which order entries reach a stage, and that none is lost on the way."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from support.calls import failing_once
from support.redis_servers import command, until
from support.servers import ROOT

from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import Failed, SamplingParams, Submitted, Tokenized, new_uid
from pipeline.log.protocol import Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.stage import worker
from pipeline.stage.slots import WATCHDOG_S, Announcement, GiveUp, SlotLease, acquire_slot, read_statuses
from pipeline.stage.worker import MOST_DELIVERIES, Bury, Handle, Stop, WorkerProcess, follow

LEASE_MS = 3000


def no_burial(entry: Entry, deaths: int) -> None:
    pytest.fail(f"{entry} was buried after {deaths} deaths")


def uids_of(entries: Sequence[Entry]) -> list[str]:
    return [entry.fields["uid"] for entry in entries]


class Loop:
    """The loop of a tokenizer, and the log that it reads."""

    def __init__(self, another_log: Callable[[], RedisLog]) -> None:
        self.another_log = another_log
        self.log = another_log()
        self.stop = Stop()
        self.inbox = Inbox.submitted(self.log.names)
        self.log.prepare(self.inbox)

    def submit(self, count: int) -> list[str]:
        uids = [new_uid() for _ in range(count)]
        for uid in uids:
            event = Submitted(endpoint="chat", frontend="web-0", prompt="x", sampling=SamplingParams())
            self.log.submit(uid, [event])
        return uids

    def read_by_the_dead(self, *deaths: int) -> list[str]:
        """Submit a request for each number and read it in slot tokenize-0. So many workers died of it, one after the
        other."""
        uids = self.submit(len(deaths))
        entries = self.log.read(self.inbox, "tokenize-0", max_entries=len(deaths), block_ms=100)
        owner = acquire_slot(self.log, "tokenize", LEASE_MS)
        for entry, times in zip(entries, deaths, strict=True):
            for _ in range(times - 1):
                self.log.retry(self.inbox, owner, entry)
        self.log.release(owner)
        return uids

    @contextlib.contextmanager
    def place(self) -> Iterator[SlotLease]:
        owner = acquire_slot(self.another_log(), "tokenize", LEASE_MS)
        slot_lease = SlotLease(self.another_log(), owner, LEASE_MS)
        self.owner = owner
        try:
            yield slot_lease
        finally:
            slot_lease.leave()

    def follow(
        self,
        slot_lease: SlotLease,
        handle: Handle,
        bury: Bury = no_burial,
        *,
        max_entries: int = 4,
        in_order: bool = True,
    ) -> None:
        follow(self.log, self.inbox, slot_lease, handle, bury, self.stop, max_entries=max_entries, in_order=in_order)

    def run(self, handle: Handle, bury: Bury = no_burial) -> None:
        """Follow in a slot of its own, until *handle* or *bury* stops the loop."""
        with self.place() as slot_lease:
            self.follow(slot_lease, handle, bury)


@pytest.fixture
def loop(another_log: Callable[[], RedisLog], monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A loop that waits for nothing long."""
    for name, value in (("BACKOFF_S", 0.001), ("BLOCK_MS", 50), ("CLAIM_EVERY_S", 0.05)):
        monkeypatch.setattr(worker, name, value)
    return Loop(another_log)


class Stage:
    """Commits what it is given, and stops the loop after *count* entries."""

    def __init__(self, loop: Loop, count: int) -> None:
        self.loop = loop
        self.count = count
        self.batches: list[list[str]] = []

    def __call__(self, entries: Sequence[Entry]) -> None:
        self.batches.append(uids_of(entries))
        for entry in entries:
            self.loop.log.tokenized(entry, Tokenized(token_ids=(1,), fingerprint="f", by="tokenize-0"))
        if sum(map(len, self.batches)) >= self.count:
            self.loop.stop.set()


def test_one_read_brings_a_batch(loop: Loop) -> None:
    uids = loop.submit(5)
    stage = Stage(loop, 5)
    loop.run(stage)
    assert stage.batches == [uids[:4], uids[4:]]


@pytest.mark.parametrize("in_order", [True, False])
def test_what_the_slot_had_read_before_comes_one_by_one_and_before_what_is_new_where_the_order_matters(
    loop: Loop, in_order: bool
) -> None:
    uids = loop.submit(5)
    with loop.place() as slot_lease:
        assert len(loop.log.read(loop.inbox, slot_lease.owner.slot, max_entries=3, block_ms=100)) == 3
        stage = Stage(loop, 5)
        loop.follow(slot_lease, stage, in_order=in_order)
    first, *old = [[uid] for uid in uids[:3]]
    assert stage.batches == ([first, *old, uids[3:]] if in_order else [first, uids[3:], *old])


@pytest.mark.parametrize("is_log_away", [False, True])
def test_what_is_put_off_comes_again_one_at_a_time_beside_what_is_new(loop: Loop, is_log_away: bool) -> None:
    uids = loop.submit(3)
    later: list[str] = []
    stage = Stage(loop, 5)

    def puts_off(entries: Sequence[Entry]) -> Sequence[Entry]:
        if not stage.batches and not later:
            later.extend(loop.submit(2))
            time.sleep(worker.CLAIM_EVERY_S)  # what nobody has consumed is looked up, too
            return entries
        if is_log_away and not stage.batches:
            is_away.append(True)
            if len(is_away) == 1:
                raise LogUnavailable("the reply was lost")
        stage(entries)
        return ()

    is_away: list[bool] = []
    loop.run(puts_off)
    if is_log_away:  # then each of them is looked up, and comes alone
        assert stage.batches == [[uid] for uid in (*uids, *later)]
    else:
        assert stage.batches == [[uids[0], *later], [uids[1]], [uids[2]]]


@pytest.mark.parametrize("num_deaths", [0, 1])
def test_what_is_held_is_given_once_and_comes_alone_only_if_it_may_have_killed_its_worker(
    loop: Loop, num_deaths: int
) -> None:
    old = loop.read_by_the_dead(*[num_deaths] * 2) if num_deaths else loop.submit(2)
    stage, held, given, num_idle = Stage(loop, 3), dict[str, Entry](), list[list[str]](), itertools.count()

    def handle(entries: Sequence[Entry]) -> None:
        if entries:
            given.append(uids_of(entries))
        new = [entry for entry in entries if entry.fields["uid"] not in old]
        held.update({entry.id: entry for entry in entries if entry not in new})
        if new:
            stage(new)
        if len(given) == 1 and not new and next(num_idle) == 0:
            later.extend(loop.submit(1))
            time.sleep(worker.CLAIM_EVERY_S)  # what nobody has consumed is looked up, too
        elif later and stage.batches and held:
            stage([held.pop(next(iter(held)))])

    later: list[str] = []
    with loop.place() as slot_lease:
        follow(loop.log, loop.inbox, slot_lease, handle, no_burial, loop.stop, max_entries=4, held=held.keys)
    assert given == ([[old[0]], later, [old[1]]] if num_deaths else [old, later])
    assert sorted(uid for batch in stage.batches for uid in batch) == sorted([*old, *later])


def test_an_unacknowledged_entry_of_a_dead_slot_reaches_a_living_one(loop: Loop) -> None:
    uids = loop.submit(2)
    loop.log.read(loop.inbox, "tokenize-7", max_entries=2, block_ms=100)  # nobody holds its lease
    stage = Stage(loop, 2)
    loop.run(stage)
    assert stage.batches == [[uids[0]], [uids[1]]]


def test_an_entry_whose_commit_failed_is_given_again(loop: Loop) -> None:
    uids = loop.submit(2)
    stage = Stage(loop, 2)
    seen: list[list[str]] = []

    def fails_once(entries: Sequence[Entry]) -> None:
        seen.append(uids_of(entries))
        if len(seen) == 1:
            raise LogUnavailable("the reply was lost")
        stage(entries)

    loop.run(fails_once)
    assert seen == [uids, [uids[0]], [uids[1]]]


def test_a_stream_that_vanished_is_made_again(redis_url: str) -> None:
    with contextlib.ExitStack() as stack:
        loop = Loop(lambda: stack.enter_context(contextlib.closing(RedisLog(redis_url, Names()))))
        loop.submit(1)
        stage = Stage(loop, 2)

        def then_lose_everything(entries: Sequence[Entry]) -> None:
            stage(entries)
            if len(stage.batches) == 1:
                command(redis_url, "FLUSHALL")
                loop.submit(1)

        loop.run(then_lose_everything)
        assert [len(batch) for batch in stage.batches] == [1, 1]


def test_a_worker_whose_slot_was_taken_leaves_its_loop(loop: Loop) -> None:
    with loop.place() as slot_lease:
        slot_lease.lost.set()
        loop.follow(slot_lease, lambda entries: None)
        assert slot_lease.lost.is_set()


def test_what_a_fenced_commit_raised_ends_the_loop_and_not_the_process(loop: Loop) -> None:
    loop.submit(2)
    tries: list[list[str]] = []

    def fenced(entries: Sequence[Entry]) -> None:
        tries.append(uids_of(entries))
        raise Fenced("tokenize-0 has another owner")

    with loop.place() as slot_lease:
        loop.follow(slot_lease, fenced, max_entries=1)
        assert slot_lease.lost.is_set() and len(tries) == 1


# what killed its workers


class Cemetery:
    """Ends what it is given to bury, and stops the loop after *count* entries."""

    def __init__(self, loop: Loop, count: int) -> None:
        self.loop = loop
        self.count = count
        self.buried: list[tuple[str, int]] = []

    def __call__(self, entry: Entry, deaths: int) -> None:
        uid = entry.fields["uid"]
        self.buried.append((uid, deaths))
        killed = Failed(status=500, code="poisonous", message="It killed its worker.")
        assert self.loop.log.end(uid, killed, frontend="web-0", consume=entry)
        if len(self.buried) >= self.count:
            self.loop.stop.set()


def test_an_entry_that_killed_its_workers_is_buried_once_and_the_loop_goes_on(loop: Loop) -> None:
    poison, innocent = loop.read_by_the_dead(MOST_DELIVERIES, MOST_DELIVERIES - 1)
    new = loop.submit(1)
    stage, cemetery = Stage(loop, 2), Cemetery(loop, 9)
    loop.run(stage, cemetery)
    assert cemetery.buried == [(poison, MOST_DELIVERIES)]
    assert stage.batches == [[innocent], new]
    assert loop.log.pending(loop.inbox, "tokenize-0") == []


def test_each_start_counts_and_the_fifth_buries(loop: Loop) -> None:
    (uid,) = loop.submit(1)
    cemetery, deaths = Cemetery(loop, 1), 0

    class Killed(BaseException):
        """As what ends a process."""

    def dies(entries: Sequence[Entry]) -> None:
        raise Killed

    while not cemetery.buried:
        with loop.place() as slot_lease, contextlib.suppress(Killed):
            loop.follow(slot_lease, dies, cemetery)
            deaths -= 1
        deaths += 1
    assert deaths == MOST_DELIVERIES == 4
    assert cemetery.buried == [(uid, 4)]


def test_a_burial_that_the_log_did_not_take_is_done_again_and_the_entry_is_not_tried(loop: Loop) -> None:
    (poison,) = loop.read_by_the_dead(MOST_DELIVERIES)
    cemetery, refused = Cemetery(loop, 1), list[int]()

    def bury(entry: Entry, deaths: int) -> None:
        if not refused:
            refused.append(deaths)
            raise LogUnavailable("connection refused")
        cemetery(entry, deaths)

    def never(entries: Sequence[Entry]) -> None:
        loop.stop.set()
        pytest.fail(f"{uids_of(entries)} was tried again")

    loop.run(never, bury)
    assert (refused, cemetery.buried) == ([MOST_DELIVERIES], [(poison, MOST_DELIVERIES)])


class Tries(Stage):
    """Also says how often each entry was worked on by now."""

    def __init__(self, loop: Loop, count: int) -> None:
        super().__init__(loop, count)
        self.times: list[int] = []

    def __call__(self, entries: Sequence[Entry]) -> None:
        for entry in entries:  # a retry counts itself, too
            self.times.append(self.loop.log.retry(self.loop.inbox, self.loop.owner, entry) - 1)
        super().__call__(entries)


def test_what_another_died_of_is_counted_before_it_is_tried(loop: Loop) -> None:
    loop.read_by_the_dead(1, 2)
    loop.submit(1)
    loop.log.read(loop.inbox, "tokenize-7", max_entries=1, block_ms=100)  # nobody holds its lease
    tries = Tries(loop, 3)
    loop.run(tries)
    assert tries.times == [2, 3, 2]


def test_an_entry_whose_commit_fails_again_and_again_is_not_buried(loop: Loop) -> None:
    """That the log is away is nobody's death."""
    loop.read_by_the_dead(MOST_DELIVERIES - 1)
    loop.submit(1)
    failures: list[list[str]] = []
    tries = Tries(loop, 2)

    def fails_first(entries: Sequence[Entry]) -> None:
        if len(failures) % 8 != 7:
            failures.append(uids_of(entries))
            raise LogUnavailable("connection reset")
        failures.append([])
        tries(entries)

    loop.run(fails_first)
    assert tries.times == [MOST_DELIVERIES, 1] and len(failures) == 16


def test_entries_of_a_read_whose_reply_was_lost_are_found_and_count_as_no_death(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = loop.submit(2)
    lost = failing_once(monkeypatch, loop.log, "read", LogUnavailable("connection reset"), is_done=True)
    tries = Tries(loop, 2)
    loop.run(tries)
    assert lost and tries.batches == [[uids[0]], [uids[1]]]
    assert tries.times == [1, 1]


def test_what_another_died_of_is_counted_also_when_it_was_hard_to_find(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first look the log is away; then it fails at the commit before; the reply of a claim is lost."""
    loop.read_by_the_dead(1, 1)
    loop.submit(1)
    loop.log.read(loop.inbox, "tokenize-7", max_entries=1, block_ms=100)
    reset = LogUnavailable("connection reset")
    failed = [
        failing_once(monkeypatch, loop.log, "pending", reset),
        failing_once(monkeypatch, Tries, "__call__", reset),
        failing_once(monkeypatch, loop.log, "claim", reset, is_done=True),
    ]
    tries = Tries(loop, 3)
    loop.run(tries)
    assert all(failed) and tries.times == [2, 2, 2]


def test_what_a_former_owner_of_the_slot_reads_is_found_also_when_nothing_else_comes(loop: Loop) -> None:
    """A worker that was stopped for long reads on in its slot until a commit tells it that it lost it."""
    zombie = loop.another_log()
    (first,) = loop.submit(1)
    stranded: list[str] = []
    tries = Tries(loop, 2)

    def meanwhile(entries: Sequence[Entry]) -> None:
        tries(entries)
        if not stranded:
            stranded.extend(loop.submit(1))
            assert uids_of(zombie.read(loop.inbox, loop.owner.slot, max_entries=4, block_ms=100)) == stranded

    loop.run(meanwhile)
    assert tries.batches == [[first], stranded]
    assert tries.times == [1, 1]


# the process

STUCK = """
import ctypes
from pipeline.stage.worker import EndAtOnce, Stop
stop = Stop().on_signals()
EndAtOnce(lambda: None).over()
EndAtOnce(lambda: print("it has left", flush=True))
print("stuck", flush=True)
mutex = ctypes.create_string_buffer(256)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
"""A process that waits in C, where Python calls no handler of signals."""


def test_a_stop_is_noticed_while_waiting() -> None:
    stop = Stop()
    assert not stop and not stop.wait(0.001)
    stop.set()
    until(lambda: bool(stop))
    assert stop.wait(60)


def test_a_process_whose_work_is_worth_nothing_half_done_ends_at_once_and_leaves_its_slot() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "it has left\n"
        assert process.returncode == 0


def test_what_a_worker_loads_is_announced_and_may_take_longer_than_a_round_of_its_loop(
    another_log: Callable[[], RedisLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk must not make the watchdog end the process at every start."""
    given_s = []

    class Watched(Announcement):
        def report_progress(
            self, *, patience_s: float = WATCHDOG_S, cpu_s: float = 0.0, give_up: GiveUp | None = None
        ) -> None:
            given_s.append(patience_s)

    monkeypatch.setattr(worker, "Announcement", Watched)
    monkeypatch.setattr(Stop, "on_signals", lambda stop: stop)
    process, log = WorkerProcess("tokenize", another_log, lease_ms=LEASE_MS, preferred=2), another_log()
    with process.loading("tokenizer", 10 * WATCHDOG_S):
        until(lambda: [status.detail for status in read_statuses(log, "tokenize")] == ["tokenizer"])
        (status,) = read_statuses(log, "tokenize")
        assert (status.slot, status.owner, status.phase) == ("tokenize-2", "", "loading")
    assert given_s == [10 * WATCHDOG_S]
    for slot_lease in process.slot_leases():
        assert slot_lease.owner.slot == "tokenize-2"
        process.stop.set()
