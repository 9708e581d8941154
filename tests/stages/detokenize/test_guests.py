"""Who serves an engine while its detokenizer is away; and what is left behind when that changes."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from structlog.testing import capture_logs
from support.calls import failing_once, noted
from support.folds import bring, prepared
from support.measured import count_of
from support.redis_servers import until

from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import (
    Admitted,
    AnyEvent,
    EventRow,
    Failed,
    Finished,
    Mark,
    StepCompleted,
    StepRow,
    TakenOver,
    TokenRow,
    TokensProduced,
    decode,
    new_uid,
)
from pipeline.log.protocol import GUEST, Entry
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import BETWEEN_TOKENS_SECONDS, BURIED, FIRST_TOKEN_SECONDS, REQUEST_SUCCESS
from pipeline.names import SEAL, slot_index, slot_name
from pipeline.serving import Serving
from pipeline.stage.slots import SlotLease, acquire_guest, acquire_slot
from pipeline.stage.worker import Stop
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.text import Decoder
from stages.detokenize.worker import ALONE, MOST_TOGETHER, DetokenizeWorker, look_after_others, serve

LEASE_MS = 60_000
SERVING = Serving(tokenizer="f")
SHORT_MS = 60
"""The lease of a detokenizer that looks after others which have been away for so long."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have who waits for something new look round more often."""
    monkeypatch.setattr("pipeline.stage.worker.BLOCK_MS", 20)


def from_bytes(token_ids: Sequence[int]) -> str:
    """A token is a byte, so that most characters need several."""
    return bytes(token_ids).decode(errors="replace")


DECODER = Decoder(from_bytes, from_bytes, lambda token: from_bytes([token]))


class Engine:
    """Engine *index*: requests in its hand, and steps that a test wants said."""

    def __init__(self, another_log: Callable[[], RedisLog], index: int = 0) -> None:
        self.log = another_log()
        self.slot = slot_name("generate", index)
        self.inbox = prepared(self.log, self.slot)
        self.start()

    def start(self) -> None:
        """Be the next owner of the slot."""
        self.owner = acquire_slot(self.log, "generate", LEASE_MS, preferred=slot_index(self.slot))
        self._numbers = itertools.count(1)

    def send(self, **sampling: object) -> str:
        uid = new_uid()
        bring(self.log, uid, [32], **sampling)
        return uid

    def step(self, *rows: StepRow) -> None:
        event, number = StepCompleted(rows=rows), next(self._numbers)
        self.log.step(self.owner, {number: event}, ended=[], control_cursor="0-0", lease_ms=LEASE_MS)

    def says(self, uid: str, text: str | bytes, *, first: int = 1, last: bool = False) -> None:
        """Say the tokens of *text* of a request, of which the first has the number *first*: a step for each."""
        token_ids = text.encode() if isinstance(text, str) else text
        for n, token in enumerate(token_ids, first):
            ends = last and n == first + len(token_ids) - 1
            self.step(TokenRow(uid=uid, n=n, token=token, end="length" if ends else None))

    def history(self, uid: str) -> list[AnyEvent]:
        return [decode(entry.fields) for entry in self.log.histories([uid])[0]]

    def text(self, uid: str) -> str:
        return "".join(event.text for event in self.history(uid) if isinstance(event, TokensProduced))

    def replies(self, uid: str) -> list[int]:
        """Return the numbers of tokens that its client heard of."""
        cursor, found = "0-0", list[int]()
        while True:
            cursor, replies = self.log.read_replies("web-0", cursor, block_ms=0)
            if not replies:
                return found
            found += [r.n for r in replies if r.uid == uid and isinstance(r.event, TokensProduced)]


class Detokenizer:
    """Holds the slot of an engine's detokenizer, and handles what a test has it read."""

    def __init__(self, another_log: Callable[[], RedisLog], engine: Engine, *, guest: bool = False) -> None:
        self.log = another_log()
        self.inbox = engine.inbox
        slot = engine.slot.replace("generate", "detokenize")
        owner = acquire_guest(self.log, slot, LEASE_MS) if guest else self.log.acquire(slot, new_uid(), LEASE_MS)
        assert owner is not None
        self.owner = owner
        self.slot_lease = SlotLease(another_log(), owner, LEASE_MS)
        self.fold = DetokenizeFold(DECODER)
        self.worker = DetokenizeWorker(self.log, self.slot_lease, self.fold, engine.slot)

    def read(self, max_entries: int = 100) -> list[Entry]:
        return self.log.read(self.inbox, self.owner.slot, max_entries=max_entries, block_ms=0)

    def handle(self, max_entries: int = 100) -> None:
        self.worker.handle(self.read(max_entries))

    def leave(self) -> None:
        """Give the slot back, or stand still for so long that it is free: what was read may still be handled."""
        self.slot_lease.leave()


class Scene:
    """Engines and detokenizers on one log."""

    def __init__(self, another_log: Callable[[], RedisLog], stack: contextlib.ExitStack) -> None:
        self.another_log = another_log
        self._stack = stack

    def engine(self, index: int = 0) -> Engine:
        return Engine(self.another_log, index)

    def request(self, index: int = 0, **sampling: object) -> tuple[Engine, str]:
        """Return an engine, and the uid of a request in its hand."""
        engine = self.engine(index)
        return engine, engine.send(**sampling)

    def detokenizer(self, engine: Engine, *, guest: bool = False) -> Detokenizer:
        """Return one that a test drives by hand; it leaves its slot when the test ends."""
        detokenizer = Detokenizer(self.another_log, engine, guest=guest)
        self._stack.callback(detokenizer.leave)
        return detokenizer

    @contextlib.contextmanager
    def serving(self, index: int, *, measures: Measures | None = None) -> Iterator[SlotLease]:
        """Run a detokenizer's worker in its slot, until the block ends."""
        log = self.another_log()
        slot_lease = SlotLease(self.another_log(), acquire_slot(log, "detokenize", LEASE_MS, preferred=index), LEASE_MS)
        with running(lambda stop: serve(log, slot_lease, DECODER, stop, measures)):
            yield slot_lease
        slot_lease.leave()

    @contextlib.contextmanager
    def looking_after_others(
        self, open_log: Callable[[], RedisLog] | None = None, *, measures: Measures | None = None
    ) -> Iterator[None]:
        """Run the part of a detokenizer that serves other engines than its own, until the block ends."""
        open_log = open_log or self.another_log
        with running(lambda stop: look_after_others(open_log, DECODER, SHORT_MS, stop, measures, SERVING)):
            yield


@contextlib.contextmanager
def running(work: Callable[[Stop], None]) -> Iterator[None]:
    """Do *work* in a thread, and have it stop when the block ends."""
    stop = Stop()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def scene(another_log: Callable[[], RedisLog]) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(another_log, stack)


def guests() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("guest "))


# guests


def test_an_engine_whose_detokenizer_is_away_gets_a_guest_until_that_is_back(scene: Scene) -> None:
    engine, uid = scene.request(1)
    with scene.looking_after_others():
        engine.says(uid, "abc")
        until(lambda: engine.text(uid) == "abc")
        assert f":{GUEST}" in engine.log.lease("detokenize-1").holder and guests() == ["guest detokenize-1"]
        assert engine.log.statuses("detokenize") == {}
        assert engine.log.serving()["detokenize"].serving == SERVING
        with scene.serving(1) as slot_lease:
            assert engine.log.lease("detokenize-1").holder == str(slot_lease.owner)
            until(lambda: guests() == [])
            engine.says(uid, "def", first=4)
            until(lambda: engine.text(uid) == "abcdef")
            assert not slot_lease.lost.is_set()
        engine.says(uid, "ghi", first=7, last=True)  # it is away again
        until(lambda: engine.text(uid) == "abcdefghi")
    assert engine.replies(uid) == list(range(1, 10)) and isinstance(engine.history(uid)[-1], Finished)
    assert guests() == [] and engine.log.lease("detokenize-1").holder == ""


def test_several_engines_have_a_guest_each_and_its_process_measures_what_they_do(scene: Scene) -> None:
    measures = Measures()
    engines = [scene.engine(index) for index in range(3)]
    uids = [engine.send() for engine in engines]
    with scene.serving(0, measures=measures), scene.looking_after_others(measures=measures):
        for engine, uid in zip(engines, uids, strict=True):
            engine.says(uid, "abc", last=True)
        until(lambda: all(engine.text(uid) == "abc" for engine, uid in zip(engines, uids, strict=True)))
        until(lambda: count_of(measures, REQUEST_SUCCESS, "length") == 3)
        assert guests() == ["guest detokenize-1", "guest detokenize-2"]
    assert count_of(measures, FIRST_TOKEN_SECONDS) == 3 and count_of(measures, BETWEEN_TOKENS_SECONDS) == 6
    assert guests() == []


def test_steps_that_a_dead_engine_left_are_written_by_a_guest(scene: Scene) -> None:
    """Who takes its requests over waits for that."""
    engine, uid = scene.request(1)
    engine.says(uid, "abc")
    engine.log.release(engine.owner)
    with scene.looking_after_others():
        until(lambda: engine.log.backlog(engine.inbox) == 0)
    assert engine.text(uid) == "abc"


def test_no_guest_comes_to_an_engine_whose_detokenizer_is_there_at_every_second_look(scene: Scene) -> None:
    """It is late now and then, or gave its slot back to ask for it again."""
    engine, log = scene.engine(), scene.another_log()
    worker = acquire_slot(engine.log, "detokenize", LEASE_MS)
    engine.log.release(worker)
    unattended, seen = log.unattended, []

    def comes_and_goes() -> list[str]:
        if engine.log.lease("detokenize-0").holder:
            engine.log.release(worker)
        else:
            engine.log.renew(worker, LEASE_MS, "")
        seen.append(unattended())
        return seen[-1]

    log.unattended = comes_and_goes  # type: ignore[method-assign]  # this instance's alone
    with scene.looking_after_others(lambda: log):
        until(lambda: len(seen) >= 6)
        assert guests() == []
    assert seen[:6] == [[], ["generate-0"]] * 3
    assert engine.log.renew(worker, LEASE_MS, ""), "nobody else has the slot"


def test_a_log_that_is_away_delays_a_guest(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = scene.engine(), scene.another_log()
    uid = engine.send()
    engine.says(uid, "abc")
    logs = [log, log]  # of the look round, then of the first guest
    away = LogUnavailable("connection refused")
    failed = [failing_once(monkeypatch, log, name, away) for name in ("unattended", "acquire")]
    with scene.looking_after_others(lambda: logs.pop() if logs else scene.another_log()):
        until(lambda: engine.text(uid) == "abc")
    assert all(failed)


def test_a_guest_that_breaks_is_logged_and_the_next_one_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = failing_once(monkeypatch, DetokenizeWorker, "handle", ZeroDivisionError())
    engine, uid = scene.request(1)
    engine.says(uid, "abc")
    with capture_logs() as lines, scene.looking_after_others():
        until(lambda: engine.text(uid) == "abc")
    assert broken and [line["slot"] for line in lines if line["event"] == "guest_broke"] == ["detokenize-1"]


def test_no_token_is_lost_or_doubled_however_often_a_detokenizer_comes_and_goes(scene: Scene) -> None:
    engine, looks = scene.engine(1), Engine.__new__(Engine)
    looks.log = scene.another_log()  # the same requests, on a connection of this thread's own
    uid = engine.send()
    text = "".join(chr(ord("a") + n % 26) for n in range(120))
    says = threading.Thread(target=engine.says, args=(uid, text), kwargs={"last": True})
    with scene.looking_after_others():
        says.start()
        for part in (1, 2, 3):
            until(lambda: looks.text(uid) and guests() == ["guest detokenize-1"])
            with scene.serving(1):
                before = len(looks.text(uid))
                until(lambda: len(looks.text(uid)) >= min(before + 10 * part, 120))  # noqa: B023  # waited for at once
        until(lambda: looks.log.histories([uid])[0][-1].id == SEAL)
    says.join()
    assert engine.text(uid) == text
    assert engine.replies(uid) == list(range(1, 121))


def test_characters_and_stop_strings_go_on_where_the_one_before_stopped(scene: Scene) -> None:
    engine, uid = scene.request(stop=["xyz"])
    first = scene.detokenizer(engine)
    engine.says(uid, "aé".encode()[:-1])  # half of the character is still to come
    first.handle()
    assert engine.text(uid) == "a"
    first.leave()

    guest = scene.detokenizer(engine, guest=True)
    engine.says(uid, "é".encode()[1:] + b"bx", first=3)  # x may be the begin of the stop string
    guest.handle()
    assert engine.text(uid) == "aéb"

    back = scene.detokenizer(engine)
    engine.says(uid, "yz!", first=6)
    back.handle()
    assert engine.text(uid) == "aéb"
    end = engine.history(uid)[-1]
    assert isinstance(end, Finished) and (end.n, end.reason) == (7, "stop")
    assert engine.replies(uid) == list(range(1, 8))


def test_a_guest_whose_worker_is_back_can_write_no_more_of_what_it_has_read(scene: Scene) -> None:
    engine, uid = scene.request()
    guest = scene.detokenizer(engine, guest=True)
    engine.says(uid, "ab")
    entries = guest.read()
    guest.worker.handle(entries[:1])
    worker = scene.detokenizer(engine)
    with pytest.raises(Fenced):
        guest.worker.handle(entries[1:])
    assert engine.text(uid) == "a"
    worker.worker.handle(worker.log.pending(engine.inbox, worker.owner.slot))
    assert engine.text(uid) == "ab" and engine.replies(uid) == [1, 2]


# what a former owner of the slot has read


@pytest.mark.parametrize("is_new", [False, True])
def test_a_step_that_a_former_owner_of_the_slot_has_read_is_folded_before_the_next(scene: Scene, is_new: bool) -> None:
    """One that was stopped for long reads on until a commit tells it that it lost the slot. Else its tokens would be
    missing when the next come."""
    engine = scene.engine()
    uid, other = engine.send(), engine.send()
    zombie = scene.detokenizer(engine)
    engine.says(uid, "a")
    zombie.handle()
    zombie.leave()
    worker = scene.detokenizer(engine)
    if not is_new:
        engine.says(uid, "b", first=2)
    else:
        engine.step(EventRow(uid=other, n=0, event=Admitted(engine=engine.slot, epoch=1, step=2, fingerprint="f")))
    worker.handle()
    n = 2 if is_new else 3
    engine.says(uid, "XY", first=n)
    stranded = zombie.read()
    engine.says(uid, "Z!", first=n + 2)
    with pytest.raises(Fenced):
        zombie.worker.handle(stranded)
    worker.handle()
    assert engine.text(uid) == ("aXYZ!" if is_new else "abXYZ!")
    assert engine.log.backlog(engine.inbox) == 0 and engine.log.alive([uid]) == {uid}


def test_what_was_read_before_is_folded_first_also_by_who_is_new(scene: Scene) -> None:
    engine, uid = scene.request()
    zombie = scene.detokenizer(engine)
    engine.says(uid, "ab")
    zombie.read()
    zombie.leave()
    worker = scene.detokenizer(engine)
    engine.says(uid, "cd", first=3)
    worker.handle()
    assert engine.text(uid) == "abcd"


def test_steps_that_follow_each_other_cost_no_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, uid = scene.request()
    worker = scene.detokenizer(engine)
    looks = noted(monkeypatch, worker.log, "pending")
    engine.says(uid, "abcdef")
    worker.handle(2)
    worker.handle()
    engine.log.release(engine.owner)
    engine.start()  # its steps are counted from 1 again
    engine.says(uid, "ghi", first=7, last=True)
    worker.handle()
    assert engine.text(uid) == "abcdefghi" and len(looks) <= 1


# what another detokenizer has written meanwhile


def test_all_marks_of_a_request_are_kept_that_went_to_another_engine_and_came_back(scene: Scene) -> None:
    """They say how many engines died of it: none may take the place of another."""
    here, there = scene.engine(0), scene.engine(1)
    mine, other = scene.detokenizer(here), scene.detokenizer(there)
    uid = here.send()

    def admitted(engine: Engine, detokenizer: Detokenizer, *, again: bool = True) -> None:
        """Let the engine die of it, too."""
        owner = engine.owner
        events: list[Mark] = [TakenOver(engine=owner.slot, epoch=owner.epoch)] if again else []
        marks: list[Mark] = [*events, Admitted(engine=owner.slot, epoch=owner.epoch, step=1, fingerprint="f")]
        engine.step(*(EventRow(uid=uid, n=0, event=mark) for mark in marks))
        detokenizer.handle()
        engine.log.release(owner)
        engine.start()

    admitted(here, mine, again=False)
    for _ in range(2):
        admitted(there, other)
        admitted(here, mine)
    kinds = [event.kind for event in here.history(uid)[2:]]
    assert kinds == ["admitted", *["taken_over", "admitted"] * 4]


def test_a_detokenizer_keeps_no_request_of_an_engine_that_is_gone(scene: Scene) -> None:
    """Another engine has ended them since, or its own successor names them again."""
    engine = scene.engine()
    uids = [engine.send() for _ in range(3)]
    worker = scene.detokenizer(engine)
    engine.step(*(TokenRow(uid=uid, n=1, token=97) for uid in uids))
    worker.handle()
    assert worker.fold.num_known == 3
    engine.log.release(engine.owner)
    engine.start()
    engine.says(uids[0], "bc", first=2)
    worker.handle()
    assert worker.fold.num_known == 1 and engine.text(uids[0]) == "abc"


# a step that kills detokenizers


def killed_by(engine: Engine, times: int) -> Entry:
    """Have the next step read, and tried in vain, by workers of slot detokenize-0, so often in all."""
    (entry,) = engine.log.read(engine.inbox, "detokenize-0", max_entries=1, block_ms=0)
    owner = acquire_slot(engine.log, "detokenize", LEASE_MS)
    for _ in range(times - 1):
        engine.log.retry(engine.inbox, owner, entry)
    engine.log.release(owner)
    return entry


def test_a_request_that_killed_its_detokenizers_alone_ends_and_no_other_of_its_steps(scene: Scene) -> None:
    engine = scene.engine()
    first, second, other = engine.send(), engine.send(), engine.send()
    engine.step(TokenRow(uid=first, n=1, token=97), TokenRow(uid=second, n=1, token=98))
    step = killed_by(engine, MOST_TOGETHER + ALONE)
    engine.says(other, "ab", last=True)
    engine.says(first, "c", first=2)  # the engine does not know yet
    engine.says(second, "d", first=2, last=True)
    measures = Measures()
    with scene.serving(0, measures=measures):
        until(lambda: engine.log.backlog(engine.inbox) == 0)
    assert count_of(measures, BURIED) == count_of(measures, REQUEST_SUCCESS, "error") == 1
    for uid, text in ((second, "bd"), (other, "ab")):
        assert engine.text(uid) == text and isinstance(engine.history(uid)[-1], Finished)
        assert engine.replies(uid) == [1, 2]
    failed = engine.history(first)[-1]
    assert isinstance(failed, Failed) and (failed.status, failed.code, failed.n) == (500, "poisonous", 0)
    assert engine.text(first) == ""
    (letter,) = engine.log.dead_letters(9)
    assert (letter.fields["uid"], letter.fields["stage"], letter.fields["deaths"]) == (first, "detokenize", "5")
    assert first in letter.fields["entry"]
    watcher = acquire_slot(engine.log, "generate", LEASE_MS)
    told = engine.log.take(watcher, 0, control_cursor="0-0").ended
    assert first in told and step.id == "1-1"


@pytest.mark.parametrize("times", [MOST_TOGETHER, MOST_TOGETHER + ALONE - 1])
def test_a_step_that_was_tried_less_often_is_told(scene: Scene, times: int) -> None:
    engine, uid = scene.request()
    engine.says(uid, "a", last=True)
    killed_by(engine, times)
    with scene.serving(0):
        until(lambda: engine.log.backlog(engine.inbox) == 0)
    assert engine.text(uid) == "a" and engine.log.dead_letters(9) == []


def test_a_burial_of_what_is_no_step_consumes_it_unless_the_slot_is_lost(scene: Scene) -> None:
    engine, uid = scene.request()
    engine.says(uid, "a")
    zombie = scene.detokenizer(engine)
    (entry,) = zombie.read()
    zombie.leave()
    worker = scene.detokenizer(engine)
    with pytest.raises(Fenced):
        zombie.worker.bury(Entry(entry.id, {"kind": "of tomorrow"}), 4)
    assert engine.log.backlog(engine.inbox) == 1
    worker.worker.bury(Entry(entry.id, {"kind": "of tomorrow"}), 4)
    assert engine.log.backlog(engine.inbox) == 0 and engine.log.alive([uid]) == {uid}
