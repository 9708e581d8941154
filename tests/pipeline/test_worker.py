"""The consumer-group runtime: in which order entries reach a stage, and that none is lost on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from redis_servers import Servers, command, until

from pipeline import worker
from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import Failed, SamplingParams, Submitted, Tokenized, new_uid
from pipeline.log.protocol import Entry, Inbox, Owner, StreamLog
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.slots import WATCHDOG_S, Announcement, SlotLease, acquire_slot, read_statuses
from pipeline.worker import MOST_DELIVERIES, Stop, WorkerProcess, follow

LEASE_MS = 3000


@contextlib.contextmanager
def place_in(another_log: Callable[[], StreamLog], lease_ms: int = LEASE_MS) -> Iterator[SlotLease]:
    slot_lease = SlotLease(another_log(), acquire_slot(another_log(), "tokenize", lease_ms), lease_ms)
    try:
        yield slot_lease
    finally:
        slot_lease.leave()


def submit(log: StreamLog, count: int) -> list[str]:
    uids = [new_uid() for _ in range(count)]
    for uid in uids:
        event = Submitted(endpoint="chat", frontend="web-0", prompt="x", sampling=SamplingParams())
        log.submit(uid, [event])
    return uids


def no_burial(entry: Entry, deaths: int) -> None:
    pytest.fail(f"{entry} was buried after {deaths} deaths")


def uids_of(entries: Sequence[Entry]) -> list[str]:
    return [entry.fields["uid"] for entry in entries]


class Stage:
    """Commits what it is given, and stops the loop after *count* entries."""

    def __init__(self, log: StreamLog, stop: Stop, count: int) -> None:
        self.log = log
        self.stop = stop
        self.count = count
        self.batches: list[list[str]] = []

    def __call__(self, entries: Sequence[Entry]) -> None:
        self.batches.append(uids_of(entries))
        for entry in entries:
            self.log.tokenized(entry, Tokenized(token_ids=(1,), fingerprint="f", by="tokenize-0"))
        if sum(map(len, self.batches)) >= self.count:
            self.stop.set()


def test_one_read_brings_a_batch(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 5)
    stage = Stage(log, stop, 5)
    with place_in(another_log) as slot_lease:
        follow(log, inbox, slot_lease, stage, no_burial, stop, max_entries=4)
    assert stage.batches == [uids[:4], uids[4:]]


def test_what_the_slot_had_read_before_comes_first_and_one_by_one(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 5)
    with place_in(another_log) as slot_lease:
        assert len(log.read(inbox, slot_lease.owner.slot, max_entries=3, block_ms=100)) == 3
        stage = Stage(log, stop, 5)
        follow(log, inbox, slot_lease, stage, no_burial, stop, max_entries=4)
    assert stage.batches == [[uids[0]], [uids[1]], [uids[2]], uids[3:]]


def test_an_unacknowledged_entry_of_a_dead_slot_reaches_a_living_one(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 2)
    log.read(inbox, "tokenize-7", max_entries=2, block_ms=100)  # nobody holds its lease
    stage = Stage(log, stop, 2)
    with place_in(another_log) as slot_lease:
        follow(log, inbox, slot_lease, stage, no_burial, stop, max_entries=4)
    assert stage.batches == [[uids[0]], [uids[1]]]


def test_an_entry_whose_commit_failed_is_given_again(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 2)
    stage = Stage(log, stop, 2)
    seen: list[list[str]] = []

    def fails_once(entries: Sequence[Entry]) -> None:
        seen.append(uids_of(entries))
        if len(seen) == 1:
            raise LogUnavailable("the reply was lost")
        stage(entries)

    with place_in(another_log) as slot_lease:
        follow(log, inbox, slot_lease, fails_once, no_burial, stop, max_entries=4)
    assert seen == [uids, [uids[0]], [uids[1]]]


def test_a_stream_that_vanished_is_made_again(redis_servers: Servers) -> None:
    url = redis_servers.url("embedded")
    log, stop = RedisLog(url, Names()), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    submit(log, 1)
    stage = Stage(log, stop, 2)

    def then_lose_everything(entries: Sequence[Entry]) -> None:
        stage(entries)
        if len(stage.batches) == 1:
            command(url, "FLUSHALL")
            submit(log, 1)

    with place_in(lambda: RedisLog(url, Names())) as slot_lease:
        follow(log, inbox, slot_lease, then_lose_everything, no_burial, stop, max_entries=4)
    assert [len(batch) for batch in stage.batches] == [1, 1]
    log.close()


def test_a_worker_whose_slot_was_taken_leaves_its_loop(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    with place_in(another_log) as slot_lease:
        slot_lease.lost.set()
        follow(log, inbox, slot_lease, lambda entries: None, no_burial, Stop(), max_entries=4)
        assert slot_lease.lost.is_set()


def test_what_a_fenced_commit_raised_ends_the_loop_and_not_the_process(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    submit(log, 2)
    tries: list[list[str]] = []

    def fenced(entries: Sequence[Entry]) -> None:
        tries.append(uids_of(entries))
        raise Fenced("tokenize-0 has another owner")

    with place_in(another_log) as slot_lease:
        follow(log, inbox, slot_lease, fenced, no_burial, Stop(), max_entries=1)
        assert slot_lease.lost.is_set() and len(tries) == 1


# what killed its workers


class Cemetery:
    """Ends what it is given to bury, and stops the loop after *count* entries."""

    def __init__(self, log: StreamLog, stop: Stop, count: int) -> None:
        self.log = log
        self.stop = stop
        self.count = count
        self.buried: list[tuple[str, int]] = []

    def __call__(self, entry: Entry, deaths: int) -> None:
        uid = entry.fields["uid"]
        self.buried.append((uid, deaths))
        killed = Failed(status=500, code="poisonous", message="It killed its worker.")
        assert self.log.end(uid, killed, frontend="web-0", consume=entry)
        if len(self.buried) >= self.count:
            self.stop.set()


def read_by_the_dead(log: StreamLog, inbox: Inbox, *deaths: int) -> list[str]:
    """Have an entry read in slot tokenize-0 for each number, by a worker that died and whose successors died of it, so
    many in all."""
    uids = submit(log, len(deaths))
    entries = log.read(inbox, "tokenize-0", max_entries=len(deaths), block_ms=100)
    owner = acquire_slot(log, "tokenize", LEASE_MS)
    for entry, times in zip(entries, deaths, strict=True):
        for _ in range(times - 1):
            log.retry(inbox, owner, entry)
    log.release(owner)
    return uids


def test_an_entry_that_killed_its_workers_is_buried_once_and_the_loop_goes_on(
    another_log: Callable[[], StreamLog],
) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    poison, innocent = read_by_the_dead(log, inbox, MOST_DELIVERIES, MOST_DELIVERIES - 1)
    new = submit(log, 1)
    stage, cemetery = Stage(log, stop, 2), Cemetery(log, stop, 9)
    with place_in(another_log) as slot_lease:
        follow(log, inbox, slot_lease, stage, cemetery, stop, max_entries=4)
    assert cemetery.buried == [(poison, MOST_DELIVERIES)]
    assert stage.batches == [[innocent], new]
    assert log.pending(inbox, "tokenize-0") == []


def test_each_start_counts_and_the_fifth_buries(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    (uid,) = submit(log, 1)
    cemetery, deaths = Cemetery(log, stop, 1), 0

    class Killed(BaseException):
        """As what ends a process."""

    def dies(entries: Sequence[Entry]) -> None:
        raise Killed

    while not cemetery.buried:
        with place_in(another_log) as slot_lease, contextlib.suppress(Killed):
            follow(log, inbox, slot_lease, dies, cemetery, stop, max_entries=4)
            deaths -= 1
        deaths += 1
    assert deaths == MOST_DELIVERIES == 4
    assert cemetery.buried == [(uid, 4)]


def test_a_burial_that_the_log_did_not_take_is_done_again_and_the_entry_is_not_tried(
    another_log: Callable[[], StreamLog],
) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    (poison,) = read_by_the_dead(log, inbox, MOST_DELIVERIES)
    cemetery, refused = Cemetery(log, stop, 1), list[int]()

    def bury(entry: Entry, deaths: int) -> None:
        if not refused:
            refused.append(deaths)
            raise LogUnavailable("connection refused")
        cemetery(entry, deaths)

    def never(entries: Sequence[Entry]) -> None:
        stop.set()
        pytest.fail(f"{uids_of(entries)} was tried again")

    with place_in(another_log) as slot_lease:
        follow(log, inbox, slot_lease, never, bury, stop, max_entries=4)
    assert (refused, cemetery.buried) == ([MOST_DELIVERIES], [(poison, MOST_DELIVERIES)])


class Tries(Stage):
    """Also says how often each entry was worked on by now."""

    def __init__(self, log: StreamLog, inbox: Inbox, slot_lease: SlotLease, stop: Stop, count: int) -> None:
        super().__init__(log, stop, count)
        self.inbox = inbox
        self.slot_lease = slot_lease
        self.times: list[int] = []

    def __call__(self, entries: Sequence[Entry]) -> None:
        for entry in entries:  # a retry counts itself, too
            self.times.append(self.log.retry(self.inbox, self.slot_lease.owner, entry) - 1)
        super().__call__(entries)


def test_what_another_died_of_is_counted_before_it_is_tried(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    read_by_the_dead(log, inbox, 1, 2)
    submit(log, 1)
    log.read(inbox, "tokenize-7", max_entries=1, block_ms=100)  # nobody holds its lease
    with place_in(another_log) as slot_lease:
        tries = Tries(log, inbox, slot_lease, stop, 3)
        follow(log, inbox, slot_lease, tries, no_burial, stop, max_entries=4)
    assert tries.times == [2, 3, 2]


def test_an_entry_whose_commit_fails_again_and_again_is_not_buried(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the log is away is nobody's death."""
    monkeypatch.setattr(worker, "BACKOFF_S", 0.001)
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    read_by_the_dead(log, inbox, MOST_DELIVERIES - 1)
    submit(log, 1)
    failures: list[list[str]] = []
    with place_in(another_log) as slot_lease:
        tries = Tries(log, inbox, slot_lease, stop, 2)

        def fails_first(entries: Sequence[Entry]) -> None:
            if len(failures) % 8 != 7:
                failures.append(uids_of(entries))
                raise LogUnavailable("connection reset")
            failures.append([])
            tries(entries)

        follow(log, inbox, slot_lease, fails_first, no_burial, stop, max_entries=4)
    assert tries.times == [MOST_DELIVERIES, 1] and len(failures) == 16


def test_entries_of_a_read_whose_reply_was_lost_are_found_and_count_as_no_death(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 2)
    read, lost = log.read, list[str]()

    def loses_the_first(inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        entries = read(inbox, consumer, max_entries=max_entries, block_ms=block_ms)
        if not lost:
            lost.extend(uids_of(entries))
            raise LogUnavailable("connection reset")
        return entries

    monkeypatch.setattr(log, "read", loses_the_first)
    with place_in(another_log) as slot_lease:
        tries = Tries(log, inbox, slot_lease, stop, 2)
        follow(log, inbox, slot_lease, tries, no_burial, stop, max_entries=4)
    assert lost == uids and tries.batches == [[uids[0]], [uids[1]]]
    assert tries.times == [1, 1]


def test_what_another_died_of_is_counted_also_when_it_was_hard_to_find(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first look the log is away; then it fails at the commit before; the reply of a claim is lost."""
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    read_by_the_dead(log, inbox, 1, 1)
    submit(log, 1)
    log.read(inbox, "tokenize-7", max_entries=1, block_ms=100)
    pending, claim, failed = log.pending, log.claim, set()

    def fail_once(what: str) -> None:
        if what not in failed:
            failed.add(what)
            raise LogUnavailable("connection reset")

    def shaky_pending(inbox: Inbox, consumer: str) -> list[Entry]:
        fail_once("pending")
        return pending(inbox, consumer)

    def shaky_claim(inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        entries = claim(inbox, owner, max_entries)
        fail_once("claim")
        return entries

    monkeypatch.setattr(log, "pending", shaky_pending)
    monkeypatch.setattr(log, "claim", shaky_claim)
    with place_in(another_log) as slot_lease:
        tries = Tries(log, inbox, slot_lease, stop, 3)

        def shaky(entries: Sequence[Entry]) -> None:
            fail_once("commit")
            tries(entries)

        follow(log, inbox, slot_lease, shaky, no_burial, stop, max_entries=4)
    assert failed == {"pending", "claim", "commit"}
    assert tries.times == [2, 2, 2]


def test_what_a_former_owner_of_the_slot_reads_is_found_also_when_nothing_else_comes(
    another_log: Callable[[], StreamLog],
) -> None:
    """A worker that was stopped for long reads on in its slot until a commit tells it that it lost it."""
    log, zombie, stop = another_log(), another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    (first,) = submit(log, 1)
    stranded: list[str] = []
    with place_in(another_log) as slot_lease:
        tries = Tries(log, inbox, slot_lease, stop, 2)

        def meanwhile(entries: Sequence[Entry]) -> None:
            tries(entries)
            if not stranded:
                stranded.extend(submit(log, 1))
                assert uids_of(zombie.read(inbox, slot_lease.owner.slot, max_entries=4, block_ms=100)) == stranded

        follow(log, inbox, slot_lease, meanwhile, no_burial, stop, max_entries=4)
    assert tries.batches == [[first], stranded]
    assert tries.times == [1, 1]


# the process


def test_a_stop_is_noticed_while_waiting() -> None:
    stop = Stop()
    assert not stop and not stop.wait(0.001)
    stop.set()
    until(lambda: bool(stop))
    assert stop.wait(60)


def test_what_a_worker_loads_is_announced_and_may_take_longer_than_a_round_of_its_loop(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk must not make the watchdog end the process at every start."""
    given_s = []

    class Watched(Announcement):
        def came_round(self, *, patience_s: float = WATCHDOG_S) -> None:
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
