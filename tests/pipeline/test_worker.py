"""The consumer-group runtime: in which order entries reach a stage, and that none is lost on the way."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from redis_servers import Servers, command, until

from pipeline import worker
from pipeline.errors import LogUnavailable
from pipeline.events import SamplingParams, Submitted, Tokenized, new_uid
from pipeline.log import Entry, Inbox, StreamLog
from pipeline.names import Names
from pipeline.redis_log import RedisLog
from pipeline.slots import Place, acquire_slot
from pipeline.worker import Stop, follow

LEASE_MS = 3000


@contextlib.contextmanager
def place_in(another_log: Callable[[], StreamLog], lease_ms: int = LEASE_MS) -> Iterator[Place]:
    place = Place(another_log(), acquire_slot(another_log(), "tokenize", lease_ms), lease_ms)
    try:
        yield place
    finally:
        place.leave()


def submit(log: StreamLog, count: int) -> list[str]:
    uids = [new_uid() for _ in range(count)]
    for uid in uids:
        event = Submitted(endpoint="chat", frontend="web-0", prompt="x", sampling=SamplingParams())
        log.submit(uid, event, timeout_ms=60_000, retention_ms=60_000, max_queued=100)
    return uids


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
    with place_in(another_log) as place:
        follow(log, inbox, place, stage, stop, max_entries=4)
    assert stage.batches == [uids[:4], uids[4:]]


def test_what_the_slot_had_read_before_comes_first_and_one_by_one(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 5)
    with place_in(another_log) as place:
        assert len(log.read(inbox, place.owner.slot, max_entries=3, block_ms=100)) == 3
        stage = Stage(log, stop, 5)
        follow(log, inbox, place, stage, stop, max_entries=4)
    assert stage.batches == [[uids[0]], [uids[1]], [uids[2]], uids[3:]]


def test_an_unacknowledged_entry_of_a_dead_slot_reaches_a_living_one(another_log: Callable[[], StreamLog]) -> None:
    log, stop = another_log(), Stop()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    uids = submit(log, 2)
    log.read(inbox, "tokenize-7", max_entries=2, block_ms=100)  # nobody holds its lease
    stage = Stage(log, stop, 2)
    with place_in(another_log) as place:
        follow(log, inbox, place, stage, stop, max_entries=4)
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

    with place_in(another_log) as place:
        follow(log, inbox, place, fails_once, stop, max_entries=4)
    assert seen == [uids, [uids[0]], [uids[1]]]


def test_a_stream_that_vanished_is_made_again(redis_servers: Servers) -> None:
    url = redis_servers.url("wheel")
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

    with place_in(lambda: RedisLog(url, Names())) as place:
        follow(log, inbox, place, then_lose_everything, stop, max_entries=4)
    assert [len(batch) for batch in stage.batches] == [1, 1]
    log.close()


def test_a_worker_whose_slot_was_taken_leaves_its_loop(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    inbox = Inbox.submitted(log.names)
    log.prepare(inbox)
    with place_in(another_log) as place:
        place.lost.set()
        follow(log, inbox, place, lambda entries: None, Stop(), max_entries=4)
        assert place.lost.is_set()


def test_a_worker_dies_with_its_supervisor() -> None:
    """The supervisor here is a process that starts a worker and is killed; the worker's pipe then ends."""
    worker_code = (
        "import os, threading; from pipeline.worker import die_with_supervisor as d; d(os.environ); "
        "print('up', flush=True); threading.Event().wait(30); print('still here', flush=True)"
    )
    supervisor_code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {worker_code!r}],\n"
        f"    env=os.environ | {{{worker.SUPERVISOR_VARIABLE!r}: str(os.getpid())}})\n"
        "time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", supervisor_code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "up\n"
    supervisor.kill()
    assert supervisor.stdout.read() == ""  # the worker held the pipe open; it ended without another word
    supervisor.stdout.close()
    supervisor.wait()


def test_a_worker_whose_supervisor_is_gone_already_ends_at_once() -> None:
    code = "import os; from pipeline.worker import die_with_supervisor as d; d(os.environ); print('still here')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={worker.SUPERVISOR_VARIABLE: "1"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_stop_is_noticed_while_waiting() -> None:
    stop = Stop()
    assert not stop and not stop.wait(0.001)
    stop.set()
    until(lambda: bool(stop))
    assert stop.wait(60)
