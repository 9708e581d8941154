"""When an engine dies, another one goes on with its requests and finds those that kill engines."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import LEASE_MS, LIMITS, POISON, CountingEngine, Running, running, send
from measured import count_of
from redis_servers import LossyProxy, Servers, command, until

from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    Finished,
    StepCompleted,
    StepRow,
    TakenOver,
    TokenRow,
    TokensProduced,
    decode,
)
from pipeline.flags import parse_config
from pipeline.log.operation import script_text
from pipeline.log.protocol import GUEST, Entry, Inbox, Owner, StreamLog
from pipeline.log.redis import RedisLog
from pipeline.metrics.families import BURIED, GENERATION_TOKENS, PROMPT_TOKENS, REQUEST_SUCCESS, TAKEOVERS
from pipeline.names import SEAL, Names, slot_name
from pipeline.slots import SlotLease, Status, acquire_slot, read_statuses
from pipeline.worker import Stop
from stages.detokenize.text import Decoder
from stages.detokenize.worker import serve
from stages.generate.config import GenerateConfig
from stages.generate.past import past_of
from stages.generate.resolve import Settings
from stages.generate.schedule.plan import BatchPlan, Computed, Sample
from stages.generate.worker import Loaded, run_engine

SHORT_MS = 60
"""The lease of an engine that looks for slots which nobody has held for so long."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have who waits for something new look round more often."""
    monkeypatch.setattr("stages.generate.log_thread.BLOCK_MS", 20)
    monkeypatch.setattr("pipeline.worker.BLOCK_MS", 20)


def letters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


LETTERS = Decoder(letters, letters, chr)


@contextlib.contextmanager
def detokenizing(another_log: Callable[[], StreamLog], index: int) -> Iterator[None]:
    """Run the detokenizer of engine *index*, where a token is a character."""
    log, stop = another_log(), Stop()
    slot_lease = SlotLease(another_log(), acquire_slot(log, "detokenize", LEASE_MS, preferred=index), LEASE_MS)

    thread = threading.Thread(target=serve, args=(log, slot_lease, LETTERS, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        slot_lease.leave()


def drain(another_log: Callable[[], StreamLog]) -> None:
    """Have what engine 0 said written to the histories."""
    log = another_log()
    with detokenizing(another_log, 0):
        until(lambda: log.backlog(Inbox.steps(log.names, "generate-0")) == 0)


def history(log: StreamLog, uid: str) -> list[AnyEvent]:
    return [decode(entry.fields) for entry in log.histories([uid])[0]]


def tokens(log: StreamLog, uid: str) -> list[int]:
    return [token for event in history(log, uid) if isinstance(event, TokensProduced) for token in event.tokens]


def has_ended(log: StreamLog, *uids: str) -> bool:
    return all(entries[-1].id == SEAL for entries in log.histories(uids))


def takeovers(log: StreamLog, uid: str) -> list[tuple[int, TakenOver]]:
    """Return who took a request over, and how many tokens it had then."""
    return [
        (int(entry.id.partition("-")[0]), event)
        for entry in log.histories([uid])[0]
        if isinstance(event := decode(entry.fields), TakenOver)
    ]


def in_hand(log: StreamLog, slot: str) -> list[str]:
    return [entry.fields["uid"] for entry in log.pending(Inbox.tokenized(log.names), slot)]


class DeadEngine:
    """Slot generate-0 as an engine left it that took some requests and made *num_tokens* of each before it died.

    *in_vain*: another one took them over before it, and died too.
    """

    def __init__(
        self, log: StreamLog, *uids: str, num_tokens: int = 2, in_vain: bool = False, held: bool = False
    ) -> None:
        self.log = log
        self.inbox = Inbox.tokenized(log.names)
        self.steps = Inbox.steps(log.names, "generate-0")
        log.prepare(self.inbox)
        log.prepare(self.steps)
        owner = log.acquire("generate-0", "the dead", LEASE_MS)
        assert owner is not None
        self.owner = owner
        self._numbers = itertools.count(1)
        self.entries = log.take(owner, 8, control_cursor="0-0").entries
        assert [entry.fields["uid"] for entry in self.entries] == list(uids)
        prompts = {uid: next(p for e in log.histories([uid])[0] if (p := prompt_of(e))) for uid in uids}
        admitted = Admitted(engine=owner.slot, epoch=owner.epoch, step=1, fingerprint="counting")
        taken_over = TakenOver(engine=owner.slot, epoch=owner.epoch)
        self.step(*(EventRow(uid=uid, n=0, event=taken_over if in_vain else admitted) for uid in uids))
        for n in range(1, num_tokens + 1):
            self.step(*(TokenRow(uid=uid, n=n, token=prompts[uid][-1] + n) for uid in uids))
        if not held:
            log.release(owner)

    def step(self, *rows: StepRow, ended: Sequence[str] = ()) -> None:
        number, event = next(self._numbers), StepCompleted(rows=rows)
        self.log.step(self.owner, number, event, ended=ended, control_cursor="0-0", lease_ms=LEASE_MS)


def prompt_of(entry: Entry) -> tuple[int, ...]:
    event = decode(entry.fields)
    return event.token_ids if event.kind == "tokenized" else ()


class Witness(CountingEngine):
    """Looks before each step whether the log says of all whom it computes that they were taken over."""

    def __init__(self, log: StreamLog, slot: str, uids: Mapping[int, str]) -> None:
        super().__init__()
        self.log = log
        self.steps = Inbox.steps(log.names, slot)
        self.consumer = slot.replace("generate", "detokenize")
        self.uids = uids
        self.said: set[str] = set()
        self.unsaid: set[str] = set()

    def forward(self, plan: BatchPlan) -> Computed:
        if self.said < set(self.uids.values()):  # then their detokenizer has the steps to itself
            for entry in self.log.read(self.steps, self.consumer, max_entries=100, block_ms=0):
                step = decode(entry.fields)
                assert isinstance(step, StepCompleted)
                self.said |= {
                    row.uid for row in step.rows if isinstance(row, EventRow) and row.event.kind == "taken_over"
                }
            self.unsaid |= {self.uids[start] for start in who_is_in(plan)} - self.said
        return super().forward(plan)


def who_is_in(plan: BatchPlan) -> set[int]:
    """Return whose tokens a plan computes: request 10 has the tokens from 10 to 19."""
    return {row.token_ids[0] // 10 * 10 for row in plan.rows}


def who_ran(engine: CountingEngine) -> list[set[int]]:
    return [who_is_in(plan) for plan in engine.plans]


def only_in_the_log_thread(log: StreamLog, name: str, instead: Callable[..., Any]) -> None:
    """Let the log thread alone call *instead*, with the original method *name* as its first argument."""
    work = getattr(log, name)

    def either(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name != "log thread":
            return work(*arguments, **options)
        return instead(work, *arguments, **options)

    setattr(log, name, either)  # this instance's alone


class Looks:
    """What an engine sees that looks for slots which nobody holds; *meanwhile* happens before each look."""

    def __init__(self, log: StreamLog, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.log = log
        self.seen: list[list[str]] = []
        forsaken = log.forsaken

        def looked(inbox: Inbox) -> list[str]:
            meanwhile()
            found = forsaken(inbox)
            self.seen.append(found)
            return found

        log.forsaken = looked  # type: ignore[method-assign]  # this instance's alone


# by another engine


def test_another_engine_goes_on_with_what_a_dead_one_had_in_hand(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    first, second = send(log, 10, max_tokens=6), send(log, 20, max_tokens=4)
    dead = DeadEngine(log, first, second)
    engine = CountingEngine()
    with (
        detokenizing(another_log, 0),
        detokenizing(another_log, 1),
        running(another_log, slot=1, engine=engine, heard=False, lease_ms=SHORT_MS) as peer,
    ):
        until(lambda: has_ended(log, first, second) or peer.errors)
        until(lambda: log.backlog(dead.inbox) == 0)
        until(lambda: log.lease("generate-0").holder == "")
        assert not peer.errors
    assert tokens(log, first) == [11, 12, 13, 14, 15, 16] and tokens(log, second) == [21, 22, 23, 24]
    counted = [count_of(peer.measures, family) for family in (TAKEOVERS, GENERATION_TOKENS, PROMPT_TOKENS)]
    assert counted == [2, 4 + 2, 0], "the dead one computed the prompts"
    for uid in (first, second):
        ((n, event),) = takeovers(log, uid)
        assert (n, event.engine, event.epoch, event.alone) == (2, "generate-1", peer.slot_lease.owner.epoch, False)
        assert isinstance(history(log, uid)[-1], Finished)
    assert engine.plans[0].rows[0].token_ids == (10, 11, 12)


@pytest.mark.parametrize("slot", [0, 1])
def test_nothing_is_computed_for_a_request_before_the_log_says_who_took_it_over(
    another_log: Callable[[], StreamLog], slot: int
) -> None:
    """Else a request could kill an engine and leave no mark."""
    log, thread_log = another_log(), another_log()
    first, second = send(log, 10, max_tokens=6), send(log, 20, max_tokens=4)
    DeadEngine(log, first, second)
    engine = Witness(another_log(), slot_name("generate", slot), {10: first, 20: second})

    def slowly(step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        threading.Event().wait(0.02)
        return step(*arguments, **options)

    only_in_the_log_thread(thread_log, "step", slowly)
    with contextlib.ExitStack() as stack:
        drain(another_log)
        stack.enter_context(
            running(another_log, slot=slot, engine=engine, heard=False, lease_ms=SHORT_MS, thread_log=thread_log)
        )
        until(lambda: engine.said == {first, second})
        stack.enter_context(detokenizing(another_log, slot))
        until(lambda: has_ended(log, first, second))
    assert engine.unsaid == set()
    assert [len(takeovers(log, uid)) for uid in (first, second)] == [1, 1]


def test_the_former_worker_of_a_slot_that_was_taken_over_writes_and_takes_nothing(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    uid = send(log, 10, max_tokens=6)
    dead = DeadEngine(log, uid)
    with (
        detokenizing(another_log, 0),
        detokenizing(another_log, 1),
        running(another_log, slot=1, heard=False, lease_ms=SHORT_MS),
    ):
        until(lambda: has_ended(log, uid))
    new = send(log, 30)
    with pytest.raises(Fenced):
        dead.step(TokenRow(uid=uid, n=3, token=99), ended=[dead.entries[0].id])
    with pytest.raises(Fenced):
        log.take(dead.owner, 8, control_cursor="0-0")
    assert not log.renew(dead.owner, LEASE_MS, "")
    assert log.backlog(dead.steps) == 0 and in_hand(log, "generate-0") == []
    (entry,) = log.take(acquire_slot(log, "generate", LEASE_MS), 8, control_cursor="0-0").entries
    assert entry.fields["uid"] == new


def test_an_engine_that_was_stopped_for_long_wakes_up_to_find_its_requests_elsewhere(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = another_log()
    monkeypatch.setattr("pipeline.slots.SlotLease._speak", unless_stopped(SlotLease._speak, "generate-0"))
    engine = CountingEngine()
    engine.closes_after = 3
    with (
        detokenizing(another_log, 0),
        detokenizing(another_log, 1),
        running(another_log, slot=0, engine=engine, heard=False, lease_ms=SHORT_MS) as stopped,
    ):
        uid = send(log, 10, max_tokens=30)
        until(lambda: len(tokens(log, uid)) >= 1)
        until(lambda: not stopped.slot_lease.lost.is_set() and log.lease("generate-0").holder == "")
        with running(another_log, slot=1, heard=False, lease_ms=SHORT_MS) as peer:
            until(lambda: has_ended(log, uid))
            assert not peer.errors
            stopped.engine.gate.set()
            until(lambda: bool(stopped.errors))
    assert isinstance(stopped.errors[0], Fenced)
    assert tokens(log, uid) == list(range(11, 41))
    assert [event.engine for _, event in takeovers(log, uid)] == ["generate-1"]


def unless_stopped(speak: Callable[[SlotLease, Status], None], slot: str) -> Callable[[SlotLease, Status], None]:
    """Return *speak* as if the process of *slot* stood still after it has spoken once."""
    said: list[str] = []

    def speaks(slot_lease: SlotLease, status: Status) -> None:
        if slot_lease.owner.slot == slot and not slot_lease.owner.is_guest:
            said.append(slot)
            if len(said) > 1:
                return
        speak(slot_lease, status)

    return speaks


def test_an_engine_waits_for_the_steps_of_a_dead_one_and_serves_its_own_meanwhile(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    uid = send(log, 10, max_tokens=6)
    dead = DeadEngine(log, uid)
    with (
        detokenizing(another_log, 1),
        running(another_log, slot=1, heard=False, lease_ms=SHORT_MS) as peer,
    ):
        until(lambda: f":{GUEST}" in log.lease("generate-0").holder)
        own = send(log, 30, max_tokens=3)
        until(lambda: has_ended(log, own))
        assert all(row.token_ids[0] >= 30 for plan in peer.engine.plans for row in plan.rows)
        assert in_hand(log, "generate-0") == [uid] and takeovers(log, uid) == []
        with pytest.raises(Fenced):  # from the moment on in which the steps are waited for
            dead.step(TokenRow(uid=uid, n=3, token=99))
        with detokenizing(another_log, 0):
            until(lambda: has_ended(log, uid))
        assert not peer.errors
    assert tokens(log, uid) == [11, 12, 13, 14, 15, 16]


def test_a_restarted_engine_takes_its_slot_back_from_the_one_that_looks_after_it(
    another_log: Callable[[], StreamLog],
) -> None:
    log = another_log()
    uid = send(log, 10, max_tokens=6)
    dead = DeadEngine(log, uid)
    with (
        detokenizing(another_log, 1),
        running(another_log, slot=1, heard=False, lease_ms=SHORT_MS) as peer,
    ):
        until(lambda: f":{GUEST}" in log.lease("generate-0").holder)
        with running(another_log, slot=0, heard=False) as restarted, detokenizing(another_log, 0):
            assert restarted.slot_lease.owner.slot == "generate-0"
            until(lambda: has_ended(log, uid))
            assert not restarted.errors and not restarted.slot_lease.lost.is_set()
        assert peer.engine.plans == [] and not peer.errors
    assert dead.owner.epoch < restarted.slot_lease.owner.epoch - 1  # that of the guest lies between
    assert [(event.engine, event.epoch) for _, event in takeovers(log, uid)] == [
        ("generate-0", restarted.slot_lease.owner.epoch)
    ]
    assert tokens(log, uid) == [11, 12, 13, 14, 15, 16]


def test_nothing_is_taken_over_from_a_slot_that_somebody_holds(another_log: Callable[[], StreamLog]) -> None:
    log, thread_log = another_log(), another_log()
    uid = send(log, 10)
    dead = DeadEngine(log, uid, held=True)
    looks = Looks(thread_log)
    with running(another_log, slot=1, lease_ms=SHORT_MS, thread_log=thread_log) as peer:
        until(lambda: len(looks.seen) >= 4)
        assert peer.engine.plans == []
    assert looks.seen[:4] == [[]] * 4
    assert log.lease("generate-0").holder == str(dead.owner) and in_hand(log, "generate-0") == [uid]


def test_nothing_is_taken_over_from_a_slot_that_is_free_for_less_than_a_lease(
    another_log: Callable[[], StreamLog],
) -> None:
    """Whoever holds it is late now and then, or restarts; at every second look it is there."""
    log, thread_log, mine = another_log(), another_log(), another_log()
    uid = send(log, 10)
    dead = DeadEngine(log, uid)

    def comes_and_goes() -> None:
        if mine.lease("generate-0").holder:
            mine.release(dead.owner)
        else:
            mine.renew(dead.owner, LEASE_MS, "")

    looks = Looks(thread_log, comes_and_goes)
    with running(another_log, slot=1, lease_ms=SHORT_MS, thread_log=thread_log) as peer:
        until(lambda: len(looks.seen) >= 6)
        assert peer.engine.plans == []
    assert looks.seen[:6] == [[], ["generate-0"]] * 3
    assert in_hand(log, "generate-0") == [uid]
    dead.step(TokenRow(uid=uid, n=3, token=13))  # nobody else may write for the slot


def test_a_claim_whose_reply_was_lost_loses_nothing(redis_servers: Servers, tmp_path: Path) -> None:
    url = redis_servers.url("embedded")
    command(url, "SCRIPT", "LOAD", script_text("claim"))
    proxy = LossyProxy(url, tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(proxy.close)

        def another_log(to: str = url) -> RedisLog:
            opened = RedisLog(to, Names())
            stack.callback(opened.close)
            return opened

        log, shaky = another_log(), another_log(proxy.url)
        uid = send(log, 10, max_tokens=6)
        DeadEngine(log, uid)
        claim_from, asked = shaky.claim_from, []

        def loses_the_first(inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
            asked.append(guest.slot)
            if len(asked) == 1:
                proxy.lose_a_reply()
            return claim_from(inbox, owner, guest, max_entries)

        shaky.claim_from = loses_the_first  # type: ignore[method-assign]  # this instance's alone
        with (
            detokenizing(another_log, 0),
            detokenizing(another_log, 1),
            running(another_log, slot=1, heard=False, lease_ms=SHORT_MS, thread_log=shaky) as peer,
        ):
            until(lambda: len(asked) > 1)
            until(lambda: has_ended(log, uid), timeout_s=3)
            assert not peer.errors
        assert tokens(log, uid) == [11, 12, 13, 14, 15, 16]
        assert [event.engine for _, event in takeovers(log, uid)] == ["generate-1"]


def test_a_request_that_ended_while_nobody_had_it_is_let_go(another_log: Callable[[], StreamLog]) -> None:
    log = another_log()
    uid = send(log, 10)
    dead = DeadEngine(log, uid)
    log.end(uid, Cancelled(by="client"), frontend="web-0")
    with (
        detokenizing(another_log, 0),
        running(another_log, slot=1, lease_ms=SHORT_MS) as peer,
    ):
        until(lambda: log.backlog(dead.inbox) == 0)
        assert peer.engine.plans == []


def test_an_engine_that_lost_its_slot_keeps_its_weights_and_goes_on_under_another_epoch(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log, stops, loads, standstill = another_log(), list[Stop](), list[Path](), threading.Event()
    engine, speak = CountingEngine(), SlotLease._speak

    def on_signals(stop: Stop) -> Stop:
        stops.append(stop)
        return stop

    def load(config: GenerateConfig, folder: Path, report: Callable[[float], None]) -> Loaded:
        loads.append(folder)
        cpu, kind = torch.device("cpu"), torch.float32
        settings = Settings(cpu, kind, "reference", "naive", threads=1, page_size=4, num_pages=64, limits=LIMITS)
        return Loaded(engine, settings, (), "counting")

    def unless_standing_still(slot_lease: SlotLease, status: Status) -> None:
        if not standstill.is_set() or slot_lease.owner.slot != "generate-0":
            speak(slot_lease, status)

    monkeypatch.setattr(Stop, "on_signals", on_signals)
    monkeypatch.setattr(SlotLease, "_speak", unless_standing_still)
    monkeypatch.setattr(sys, "setswitchinterval", lambda interval_s: None)
    config = parse_config("stage generate", GenerateConfig, ["--lease", "0.2", "--slot", "0"], {})
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    process = threading.Thread(target=run_engine, args=(config, another_log, tmp_path, load))
    with detokenizing(another_log, 0):
        process.start()
        until(lambda: [status.phase for status in read_statuses(log, "generate")] == ["ready"])
        engine.closes_after = 3
        uid = send(log, 10, max_tokens=40)
        until(lambda: len(tokens(log, uid)) > 1)
        standstill.set()
        until(lambda: log.lease("generate-0").holder == "")
        another = log.acquire("generate-0", "another", SHORT_MS)
        standstill.clear()
        engine.gate.set()
        until(lambda: has_ended(log, uid))
        (status,) = read_statuses(log, "generate")
        stops[0].set()
        process.join(30)
    assert another is not None and another.epoch == 2
    assert (status.slot, status.phase, status.owner.partition(":")[0]) == ("generate-0", "ready", "3")
    assert status.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert loads == [tmp_path] and tokens(log, uid) == list(range(11, 51))
    assert [event.epoch for _, event in takeovers(log, uid)] == [3]
    assert log.lease("generate-0").holder == ""


# sampling


def test_sampling_goes_on_at_the_number_of_the_next_token(another_log: Callable[[], StreamLog]) -> None:
    """Seeded sampling is a function of the position; until `min_tokens` some tokens are forbidden."""
    log = another_log()
    uid = send(log, 8, 9, 10, seed=7, temperature=1.0, min_tokens=5, stop_token_ids=(199,), max_tokens=7)
    DeadEngine(log, uid)
    with (
        detokenizing(another_log, 0),
        detokenizing(another_log, 1),
        running(another_log, slot=1, heard=False, lease_ms=SHORT_MS) as engine,
    ):
        until(lambda: has_ended(log, uid))
    samples = [row.sample for plan in engine.engine.plans for row in plan.rows if row.sample is not None]
    assert all(isinstance(sample, Sample) and sample.params.seed == 7 for sample in samples)
    assert [(sample.position, sample.forbidden) for sample in samples] == [
        (5, (199,)),
        (6, (199,)),
        (7, (199,)),
        (8, ()),
        (9, ()),
    ]
    assert tokens(log, uid) == list(range(11, 18))


# requests that kill engines


class Killed(BaseException):
    """As what ends the process of an engine: nothing in it can catch it."""


class MortalEngine(CountingEngine):
    """Dies of some tokens."""

    def __init__(self, *deadly: int) -> None:
        super().__init__()
        self.deadly = set(deadly)

    def forward(self, plan: BatchPlan) -> Computed:
        if any(self.deadly.intersection(row.token_ids) for row in plan.rows):
            self.plans.append(plan)
            raise Killed
        return super().forward(plan)


class Lives:
    """Engines in slot generate-0, one after the other, with its detokenizer.

    In each of them, who had been tried in vain by two before runs first without anybody else.
    """

    def __init__(self, another_log: Callable[[], StreamLog], *requests: int | Sequence[int], **sampling: Any) -> None:
        self.another_log = another_log
        self.log = another_log()
        prompts = [(each,) if isinstance(each, int) else each for each in requests]
        self.uids = {prompt[0]: send(self.log, *prompt, **sampling) for prompt in prompts}

    def tried_in_vain(self) -> Lives:
        """Let one engine have died of all of them in its first step, and its successor too."""
        DeadEngine(self.log, *self.uids.values(), num_tokens=0, in_vain=True)
        drain(self.another_log)
        return self

    @contextlib.contextmanager
    def one(self, engine: CountingEngine, **options: Any) -> Iterator[Running]:
        suspects = [start for start in self.uids if self.deaths(start) > 0]
        with (
            detokenizing(self.another_log, 0),
            running(self.another_log, engine=engine, heard=False, **options) as life,
        ):
            self.measures = life.measures
            yield life
            until(lambda: self.log.backlog(Inbox.steps(self.log.names, "generate-0")) == 0)
        for start in suspects:
            ran = [plan for plan in who_ran(engine) if start in plan]
            assert ran[:1] in ([], [{start}])

    def until_death(self, *deadly: int) -> set[int]:
        """Run an engine until it dies; return whom it computed then."""
        with self.one(MortalEngine(*deadly)) as life:
            until(lambda: bool(life.errors))
            assert isinstance(life.errors[0], Killed), life.errors
        return who_ran(life.engine)[-1]

    def until_ended(self, engine: CountingEngine, **options: Any) -> list[set[int]]:
        """Run an engine until all requests have ended; return whom it computed."""
        with self.one(engine, **options) as life:
            until(lambda: has_ended(self.log, *self.uids.values()) or life.errors)
            assert not life.errors, life.errors
            until(lambda: self.log.backlog(Inbox.tokenized(self.log.names)) == 0)
        return who_ran(life.engine)

    def deaths(self, start: int) -> int:
        """Return how many engines took a request over in vain since its last token."""
        past = past_of(self.uids[start], self.log.histories([self.uids[start]])[0])
        return past.num_taken_over if past is not None else 0

    def tokens(self, start: int) -> list[int]:
        return tokens(self.log, self.uids[start])

    def end(self, start: int) -> AnyEvent:
        return history(self.log, self.uids[start])[-1]


def test_a_request_that_kills_engines_runs_alone_and_is_given_up_after_three_deaths_alone(
    another_log: Callable[[], StreamLog],
) -> None:
    lives = Lives(another_log, 10, POISON, 20, 30, max_tokens=4)
    log = lives.log
    for _ in range(2):
        assert POISON in lives.until_death(POISON), "and the first time nobody is suspected"
    for _ in range(3):
        assert lives.until_death(POISON) == {POISON}
    assert not any(POISON in plan for plan in lives.until_ended(MortalEngine(POISON)))
    for start in (10, 20, 30):
        assert isinstance(lives.end(start), Finished)
        assert lives.tokens(start) == list(range(start + 1, start + 5))
    failed = lives.end(POISON)
    assert isinstance(failed, Failed) and (failed.status, failed.code, failed.n) == (500, "poisonous", 0)
    assert count_of(lives.measures, BURIED) == count_of(lives.measures, REQUEST_SUCCESS, "error") == 1
    (letter,) = log.dead_letters(9)
    uid = lives.uids[POISON]
    assert (letter.fields["uid"], letter.fields["stage"], letter.fields["deaths"]) == (uid, "generate", "5")
    assert uid in letter.fields["entry"] and "taken_over" in letter.fields["history"]
    assert [event.alone for _, event in takeovers(log, uid)] == [False, True, True, True]
    assert len({event.epoch for _, event in takeovers(log, uid)}) == 4


def test_a_request_that_kills_engines_later_on_is_found_too(another_log: Callable[[], StreamLog]) -> None:
    lives = Lives(another_log, 10, 20, max_tokens=9)
    for _ in range(2):
        assert 10 in lives.until_death(12)
        assert lives.tokens(10) == [11, 12]
    for _ in range(3):
        assert lives.until_death(12) == {10}
    lives.until_ended(MortalEngine(12))
    failed = lives.end(10)
    assert isinstance(failed, Failed) and (failed.code, failed.n) == ("poisonous", 2)
    assert lives.tokens(20) == list(range(21, 30))


def test_who_waits_behind_requests_that_kill_engines_ends_well(another_log: Callable[[], StreamLog]) -> None:
    lives = Lives(another_log, 10, 20, 30, max_tokens=3)
    deaths = 0
    while not has_ended(lives.log, *lives.uids.values()):
        with lives.one(MortalEngine(10, 20)) as life:
            until(lambda: has_ended(lives.log, *lives.uids.values()) or life.errors)
            deaths += bool(life.errors)
    assert deaths <= 2 * 5
    assert lives.tokens(30) == [31, 32, 33] and isinstance(lives.end(30), Finished)
    assert {letter.fields["uid"] for letter in lives.log.dead_letters(9)} == {lives.uids[10], lives.uids[20]}


def test_the_count_of_deaths_begins_again_when_a_request_has_come_past_where_it_can_have_been(
    another_log: Callable[[], StreamLog],
) -> None:
    lives = Lives(another_log, 10, max_tokens=9)

    def counts() -> tuple[int, int, int]:
        past = past_of(lives.uids[10], lives.log.histories([lives.uids[10]])[0])
        assert past is not None
        return len(past.request.output_ids), past.num_taken_over, past.num_alone

    said = []
    for deadly in (10, 10, 12, 13, 13, 16):
        lives.until_death(deadly)
        said.append(counts())
    assert said == [(0, 0, 0), (0, 1, 0), (2, 2, 1), (3, 1, 1), (3, 2, 2), (6, 0, 0)]
    lives.until_ended(CountingEngine())
    assert lives.tokens(10) == list(range(11, 20)) and lives.log.dead_letters(9) == []


def test_a_request_that_kills_engines_whose_last_steps_are_lost_is_found_in_as_many_deaths(
    another_log: Callable[[], StreamLog],
) -> None:
    """Each engine makes a token that the one before had made, and dies, later than the log of that one says."""
    lives = Lives(another_log, 10, 20, max_tokens=12)
    for deadly in (15, 16):
        assert 10 in lives.until_death(deadly)
    for _ in range(3):
        assert lives.until_death(17) == {10}
    lives.until_ended(MortalEngine(17))
    failed = lives.end(10)
    assert isinstance(failed, Failed) and (failed.code, failed.n) == ("poisonous", 7)
    assert lives.tokens(20) == list(range(21, 33))


def test_a_request_that_was_never_computed_is_not_suspected(another_log: Callable[[], StreamLog]) -> None:
    """It waited for room while another killed the engines."""
    lives = Lives(another_log, 10, 20, max_tokens=3)
    one_at_a_time = replace(LIMITS, max_running_requests=1)
    for _ in range(5):
        with lives.one(MortalEngine(10), limits=one_at_a_time) as life:
            until(lambda: bool(life.errors))
        assert who_ran(life.engine) == [{10}]
    assert lives.deaths(20) == 0 and takeovers(lives.log, lives.uids[20]) == []
    lives.until_ended(MortalEngine(10), limits=one_at_a_time)
    assert lives.tokens(20) == [21, 22, 23]


def test_what_comes_while_a_suspect_runs_waits_until_that_has_a_token(another_log: Callable[[], StreamLog]) -> None:
    lives = Lives(another_log, [10] * 20, max_tokens=4).tried_in_vain()
    log = lives.log

    class Recorder(CountingEngine):
        """Writes down how many wait, step by step."""

        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[int] = []
            self.life: Running | None = None

        def forward(self, plan: BatchPlan) -> Computed:
            self.gate.wait(30)
            assert self.life is not None
            self.waiting.append(self.life.schedule.num_waiting)
            return super().forward(plan)

    engine = Recorder()
    engine.gate.clear()
    with lives.one(engine, limits=replace(LIMITS, max_prefill_length=2)) as life:
        engine.life = life
        until(lambda: life.schedule.num_running == 1)
        new = send(log, 30, max_tokens=4)
        engine.gate.set()
        until(lambda: has_ended(log, lives.uids[10], new) or life.errors)
        assert not life.errors
    ran = who_ran(engine)
    assert ran[:10] == [{10}] * 10, "so many steps does its prompt take"
    assert 1 in engine.waiting[:10], "the other one is there"
    assert {10, 30} in ran or ran.count({30}) > 1
    assert lives.tokens(10) == [11, 12, 13, 14] and tokens(log, new) == [31, 32, 33, 34]


def test_what_ran_gives_its_pages_back_to_a_suspect_and_goes_on_afterwards(
    another_log: Callable[[], StreamLog],
) -> None:
    """Another engine is busy when it takes over what killed one twice."""
    lives = Lives(another_log, 10, max_tokens=4).tried_in_vain()
    log = lives.log
    held = log.acquire("generate-0", "not away yet", LEASE_MS)
    assert held is not None
    engine = CountingEngine(pace_s=0.02)
    with (
        detokenizing(another_log, 0),
        detokenizing(another_log, 1),
        running(another_log, slot=1, engine=engine, heard=False, lease_ms=SHORT_MS) as peer,
    ):
        own = send(log, 80, max_tokens=60)
        until(lambda: len(engine.plans) > 1)
        log.release(held)
        until(lambda: has_ended(log, lives.uids[10], own) or peer.errors)
        assert not peer.errors and peer.schedule.free_pages == 64
    ran = who_ran(engine)
    alone = ran.index({10})
    assert 1 < alone < len(ran) - 1 and all(10 not in plan for plan in ran[:alone])
    assert lives.tokens(10) == [11, 12, 13, 14] and tokens(log, own) == list(range(81, 141))
    kinds = [event.kind for event in history(log, own)]
    assert (kinds.count("preempted"), kinds.count("admitted")) == (1, 2)


def test_a_suspect_that_ends_before_its_turn_is_forgotten(another_log: Callable[[], StreamLog]) -> None:
    lives = Lives(another_log, 10, 20, 30, 40, max_tokens=3).tried_in_vain()
    log = lives.log
    engine = CountingEngine()
    engine.gate.clear()
    with lives.one(engine) as life:
        until(lambda: life.schedule.num_running == 1)
        log.end(lives.uids[30], Cancelled(by="client"), frontend="web-0")
        engine.gate.set()
        until(lambda: has_ended(log, *lives.uids.values()) or life.errors)
        assert not life.errors
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
    assert not any(30 in plan for plan in who_ran(engine)) and isinstance(lives.end(30), Cancelled)
    assert [lives.tokens(start) for start in (10, 20, 40)] == [[11, 12, 13], [21, 22, 23], [41, 42, 43]]


def test_a_suspect_on_which_the_engine_raises_fails_and_the_next_one_has_its_turn(
    another_log: Callable[[], StreamLog],
) -> None:
    lives = Lives(another_log, POISON, 20, max_tokens=3).tried_in_vain()
    lives.until_ended(CountingEngine())  # this one raises, and lives
    failed = lives.end(POISON)
    assert isinstance(failed, Failed) and failed.code == "engine_error"
    assert lives.tokens(20) == [21, 22, 23] and lives.log.dead_letters(9) == []


def test_a_suspect_that_does_not_fit_any_more_fails_and_the_others_go_on(
    another_log: Callable[[], StreamLog],
) -> None:
    """The next engine has a smaller context."""
    lives = Lives(another_log, [10], range(20, 30), max_tokens=4).tried_in_vain()
    lives.until_ended(CountingEngine(), limits=replace(LIMITS, context=8))
    failed = lives.end(20)
    assert isinstance(failed, Failed) and failed.code == "context_length_exceeded"
    assert lives.tokens(10) == [11, 12, 13, 14]


# a log that is away


def test_a_log_that_is_away_delays_a_takeover_and_loses_nothing(
    another_log: Callable[[], StreamLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit and each look fails once: before it is done, or after."""
    monkeypatch.setattr("stages.generate.log_thread.BACKOFF_S", 0.001)
    log, thread_log = another_log(), another_log()
    uids = [send(log, start, max_tokens=4) for start in (10, 20)]
    DeadEngine(log, *uids)
    failed: set[str] = set()

    def shaky(name: str, *, is_done: bool) -> None:
        def fails_once(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            done = work(*arguments, **options) if is_done or name in failed else None
            if name not in failed:
                failed.add(name)
                raise LogUnavailable(f"{name}: connection reset")
            return done

        only_in_the_log_thread(thread_log, name, fails_once)

    names = ("forsaken", "acquire", "backlog", "claim_from", "histories", "step", "take", "release", "alive")
    for index, name in enumerate(names):
        shaky(name, is_done=bool(index % 2))
    with (
        detokenizing(another_log, 0),
        detokenizing(another_log, 1),
        running(another_log, slot=1, heard=False, lease_ms=SHORT_MS, thread_log=thread_log) as peer,
    ):
        until(lambda: has_ended(log, *uids) or peer.errors)
        assert not peer.errors
        until(lambda: log.lease("generate-0").holder == "" and failed == set(names))
        until(lambda: log.backlog(Inbox.tokenized(log.names)) == 0)
    assert [tokens(log, uid) for uid in uids] == [[11, 12, 13, 14], [21, 22, 23, 24]]
