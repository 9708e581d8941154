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
from support.engine_rig import (
    CONTEXT,
    LEASE_MS,
    LIMITS,
    LONG_LIMITS,
    POISON,
    CountingEngine,
    Killed,
    Running,
    Scene,
    detokenizing,
)
from support.measured import count_of
from support.redis_servers import LossyProxy, Servers, command, until

from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    Finished,
    Presentation,
    SamplingParams,
    StepCompleted,
    StepRow,
    Submitted,
    TakenOver,
    Tokenized,
    TokenRow,
    TokensProduced,
    decode,
    new_uid,
)
from pipeline.flags import parse_config
from pipeline.log.operation import script_text
from pipeline.log.protocol import GUEST, Entry, Inbox, Owner
from pipeline.log.redis import RedisLog
from pipeline.metrics.families import BURIED, GENERATION_TOKENS, PROMPT_TOKENS, REQUEST_SUCCESS, TAKEOVERS
from pipeline.names import Names, sibling_uids, slot_name
from pipeline.serving import Serving
from pipeline.stage.slots import SlotLease, Status, acquire_slot, read_statuses
from pipeline.stage.worker import Stop
from stages.generate.kernels import VERSION
from stages.generate.loop.past import TOKENS_IN_DOUBT, Past, past_of
from stages.generate.loop.worker import Loaded, run_engine
from stages.generate.schedule.plan import BatchPlan, Computed, Sample
from stages.generate.setup.config import GenerateConfig
from stages.generate.setup.resolve import Settings

SHORT_MS = 60
"""The lease of an engine that looks for slots which nobody has held for so long."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have who waits for something new look round more often."""
    monkeypatch.setattr("stages.generate.loop.log_thread.BLOCK_MS", 20)
    monkeypatch.setattr("pipeline.stage.worker.BLOCK_MS", 20)


@contextlib.contextmanager
def taking_over(scene: Scene, detokenizers: Sequence[int] = (0, 1), slot: int = 1, **options: Any) -> Iterator[Running]:
    """Run an engine that looks after the slots of others, and these detokenizers."""
    with (
        detokenizing(scene, *detokenizers),
        scene.running(slot=slot, heard=False, lease_ms=SHORT_MS, **options) as peer,
    ):
        yield peer
        assert not peer.errors


def drain(scene: Scene) -> None:
    """Have what engine 0 said written to the histories."""
    with detokenizing(scene, 0):
        until(lambda: scene.log.backlog(Inbox.steps(scene.log.names, "generate-0")) == 0)


class DeadEngine:
    """Slot generate-0 as an engine left it that took some requests and made *num_tokens* of each before it died.

    *in_vain*: another one took them over before it, and died too.
    """

    def __init__(
        self,
        scene: Scene,
        *uids: str,
        num_tokens: int = 2,
        in_vain: bool = False,
        held: bool = False,
        numerics: str = "float32/cpu",
    ) -> None:
        self.log = scene.log
        self.log.prepare(scene.tokenized)
        self.log.prepare(Inbox.steps(self.log.names, "generate-0"))
        self.owner = owner = acquire_slot(self.log, "generate", LEASE_MS, preferred=0)
        self._numbers = itertools.count(1)
        entries = self.log.take(owner, 8, control_cursor="0-0").entries
        assert [entry.fields["uid"] for entry in entries] == list(uids)
        admitted = Admitted(engine=owner.slot, epoch=owner.epoch, step=1, fingerprint="counting", numerics=numerics)
        taken_over = TakenOver(engine=owner.slot, epoch=owner.epoch)
        self.step(*(EventRow(uid=uid, n=0, event=taken_over if in_vain else admitted) for uid in uids))
        last = {uid: next(e.token_ids[-1] for e in scene.history(uid) if isinstance(e, Tokenized)) for uid in uids}
        for n in range(1, num_tokens + 1):
            self.step(*(TokenRow(uid=uid, n=n, token=last[uid] + n) for uid in uids))
        if not held:
            self.log.release(owner)

    def step(self, *rows: StepRow) -> None:
        number, event = next(self._numbers), StepCompleted(rows=rows)
        self.log.step(self.owner, {number: event}, ended=(), control_cursor="0-0", lease_ms=LEASE_MS)


class Witness(CountingEngine):
    """Looks before each step whether the log says of all whom it computes that they were taken over."""

    def __init__(self, log: RedisLog, slot: str, uids: Mapping[int, str]) -> None:
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
                rows = (row for row in step.rows if isinstance(row, EventRow))
                self.said |= {row.uid for row in rows if row.event.kind == "taken_over"}
            self.unsaid |= {self.uids[start] for start in who_is_in(plan)} - self.said
        return super().forward(plan)


def who_is_in(plan: BatchPlan) -> set[int]:
    """Return whose tokens a plan computes: request 10 has the tokens from 10 to 19."""
    return {row.token_ids[0] // 10 * 10 for row in plan.rows}


def who_ran(engine: CountingEngine) -> list[set[int]]:
    return [who_is_in(plan) for plan in engine.plans]


def only_in_the_log_thread(log: RedisLog, name: str, instead: Callable[..., Any]) -> None:
    """Let the log thread alone call *instead*, with the original method *name* as its first argument."""
    work = getattr(log, name)

    def either(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name != "log thread":
            return work(*arguments, **options)
        return instead(work, *arguments, **options)

    setattr(log, name, either)  # this instance's alone


# by another engine


def test_another_engine_goes_on_with_what_a_dead_one_had_in_hand(scene: Scene) -> None:
    first, second = scene.send(10, max_tokens=6), scene.send(20, max_tokens=4)
    DeadEngine(scene, first, second)
    with taking_over(scene) as peer:
        until(lambda: scene.have_ended(first, second) and scene.is_consumed)
        until(lambda: scene.log.lease("generate-0").holder == "")
    assert scene.tokens(first) == [11, 12, 13, 14, 15, 16] and scene.tokens(second) == [21, 22, 23, 24]
    counted = [count_of(peer.measures, family) for family in (TAKEOVERS, GENERATION_TOKENS, PROMPT_TOKENS)]
    assert counted == [2, 4 + 2, 0], "the dead one computed the prompts"
    for uid in (first, second):
        ((n, event),) = scene.takeovers(uid)
        assert (n, event.engine, event.epoch, event.alone) == (2, "generate-1", peer.slot_lease.owner.epoch, False)
        assert isinstance(scene.history(uid)[-1], Finished)
    assert peer.engine.plans[0].rows[0].token_ids == (10, 11, 12)


def test_another_engine_goes_on_with_siblings_and_with_what_they_share(scene: Scene) -> None:
    """A stop string, the tokens of the prompt, and the prompt that is told."""
    long, uid = "all work and no play " * 10, new_uid()
    sampling = SamplingParams(max_tokens=9, stop=(long, chr(36)), include_stop_str_in_output=True)
    event = Submitted(endpoint="e", frontend="", prompt=long, sampling=sampling, presentation=Presentation(echo=True))
    seeded = [event.model_copy(update={"sampling": sampling.model_copy(update={"seed": i})}) for i in range(3)]
    uids = sibling_uids(uid, 3)
    scene.log.prepare(scene.submitted)
    scene.log.submit(uid, seeded)
    ids = tuple(range(1, 34))
    for entry in scene.log.read(scene.submitted, "tokenize-0", max_entries=9, block_ms=0):
        assert scene.log.tokenized(entry, Tokenized(token_ids=ids, fingerprint="f", by="tokenize-0"))
    DeadEngine(scene, *uids, num_tokens=1)
    with taking_over(scene):
        until(lambda: scene.have_ended(*uids) and scene.is_consumed)
    for each in uids:
        assert scene.tokens(each) == [34, 35, 36]
        submitted, _, _, first, *_, end = scene.history(each)
        assert isinstance(submitted, Submitted) and submitted.sampling.seed == int(each[-1])
        assert isinstance(first, TokensProduced) and first.prompt is not None and first.prompt.text == long
        assert isinstance(end, Finished) and end.stop_string == chr(36)


@pytest.mark.parametrize("slot", [0, 1])
def test_an_engine_with_other_numerics_goes_on_and_the_history_says_so(scene: Scene, slot: int) -> None:
    uid = scene.send(10, max_tokens=6)
    DeadEngine(scene, uid, numerics="bfloat16/cpu")
    with taking_over(scene, slot=slot, serving=Serving("m", "counting", "f"), numerics="float32/cpu"):
        until(lambda: scene.have_ended(uid))
    assert scene.tokens(uid) == [11, 12, 13, 14, 15, 16]
    admitted = [event for event in scene.history(uid) if isinstance(event, Admitted)]
    assert [(event.fingerprint, event.numerics) for event in admitted] == [
        ("counting", "bfloat16/cpu"),
        ("counting", "float32/cpu"),
    ]
    assert [event.numerics for _, event in scene.takeovers(uid)] == ["float32/cpu"]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_request_is_never_continued_with_other_weights(scene: Scene, slot: int) -> None:
    uid = scene.send(10, max_tokens=6)
    DeadEngine(scene, uid)
    with taking_over(scene, slot=slot, serving=Serving("m", "other weights", "f")) as peer:
        until(lambda: scene.have_ended(uid) and scene.is_consumed)
    failed = scene.history(uid)[-1]
    assert isinstance(failed, Failed) and (failed.status, failed.code) == (500, "other_model")
    assert "weights counting" in failed.message
    assert scene.tokens(uid) == [11, 12] and peer.engine.plans == [] and not scene.takeovers(uid)


def test_a_request_of_an_older_version_whose_fingerprint_has_the_dtype_in_it_goes_on(scene: Scene) -> None:
    uid = scene.send(10, max_tokens=6)
    DeadEngine(scene, uid, numerics="")
    with taking_over(scene, serving=Serving("m", "another fingerprint", "f"), numerics="float32/cpu"):
        until(lambda: scene.have_ended(uid))
    assert isinstance(scene.history(uid)[-1], Finished)


def test_a_prompt_of_another_tokenizer_is_not_computed(scene: Scene) -> None:
    uid = scene.send(10, max_tokens=6)
    with taking_over(scene, serving=Serving("m", "counting", "other tokens")) as peer:
        until(lambda: scene.have_ended(uid) and scene.is_consumed)
    failed = scene.history(uid)[-1]
    assert isinstance(failed, Failed) and failed.code == "other_model" and peer.engine.plans == []


@pytest.mark.parametrize("slot", [0, 1])
def test_nothing_is_computed_for_a_request_before_the_log_says_who_took_it_over(scene: Scene, slot: int) -> None:
    """Else a request could kill an engine and leave no mark."""
    thread_log = scene.another_log()
    first, second = scene.send(10, max_tokens=6), scene.send(20, max_tokens=4)
    DeadEngine(scene, first, second)
    engine = Witness(scene.another_log(), slot_name("generate", slot), {10: first, 20: second})

    def slowly(step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        threading.Event().wait(0.02)
        return step(*arguments, **options)

    only_in_the_log_thread(thread_log, "step", slowly)
    drain(scene)
    with taking_over(scene, (), slot, engine=engine, thread_log=thread_log):
        until(lambda: engine.said == {first, second})
        with detokenizing(scene, slot):
            until(lambda: scene.have_ended(first, second))
    assert engine.unsaid == set()
    assert [len(scene.takeovers(uid)) for uid in (first, second)] == [1, 1]


def test_an_engine_that_was_stopped_for_long_wakes_up_to_find_its_requests_elsewhere(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak, spoke = SlotLease._speak, threading.Event()

    def unless_stopped(slot_lease: SlotLease, status: Status) -> None:
        """As if the process of generate-0 stood still after it has spoken once."""
        if slot_lease.owner.slot == "generate-0" and not slot_lease.owner.is_guest:
            if spoke.is_set():
                return
            spoke.set()
        speak(slot_lease, status)

    monkeypatch.setattr("pipeline.stage.slots.SlotLease._speak", unless_stopped)
    engine = CountingEngine()
    engine.closes_after = 3
    with detokenizing(scene, 0), scene.running(slot=0, engine=engine, heard=False, lease_ms=SHORT_MS) as stopped:
        uid = scene.send(10, max_tokens=30)
        until(lambda: len(scene.tokens(uid)) >= 1)
        until(lambda: not stopped.slot_lease.lost.is_set() and scene.log.lease("generate-0").holder == "")
        with taking_over(scene, (1,)):
            until(lambda: scene.have_ended(uid))
            engine.gate.set()
            until(lambda: bool(stopped.errors))
    assert isinstance(stopped.errors[0], Fenced)
    assert scene.tokens(uid) == list(range(11, 41))
    assert [event.engine for _, event in scene.takeovers(uid)] == ["generate-1"]


def test_an_engine_waits_for_the_steps_of_a_dead_one_and_serves_its_own_meanwhile(scene: Scene) -> None:
    uid = scene.send(10, max_tokens=6)
    dead = DeadEngine(scene, uid)
    with taking_over(scene, (1,)) as peer:
        until(lambda: f":{GUEST}" in scene.log.lease("generate-0").holder)
        own = scene.send(30, max_tokens=3)
        until(lambda: scene.have_ended(own))
        assert all(row.token_ids[0] >= 30 for plan in peer.engine.plans for row in plan.rows)
        assert scene.in_hand("generate-0") == [uid] and scene.takeovers(uid) == []
        with pytest.raises(Fenced):  # from the moment on in which the steps are waited for
            dead.step(TokenRow(uid=uid, n=3, token=99))
        with detokenizing(scene, 0):
            until(lambda: scene.have_ended(uid))
    assert scene.tokens(uid) == [11, 12, 13, 14, 15, 16]


def test_a_restarted_engine_takes_its_slot_back_from_the_one_that_looks_after_it(scene: Scene) -> None:
    uid = scene.send(10, max_tokens=6)
    dead = DeadEngine(scene, uid)
    with taking_over(scene, (1,)) as peer:
        until(lambda: f":{GUEST}" in scene.log.lease("generate-0").holder)
        with scene.running(slot=0, heard=False) as restarted, detokenizing(scene, 0):
            owner = restarted.slot_lease.owner
            until(lambda: scene.have_ended(uid))
            assert not restarted.errors and not restarted.slot_lease.lost.is_set()
        assert peer.engine.plans == []
    assert dead.owner.epoch < owner.epoch - 1  # that of the guest lies between
    assert [(event.engine, event.epoch) for _, event in scene.takeovers(uid)] == [("generate-0", owner.epoch)]
    assert scene.tokens(uid) == [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_nothing_is_taken_over_from_a_slot_that_is_held_or_free_for_less_than_a_lease(
    scene: Scene, comes_and_goes: bool
) -> None:
    """Whoever holds it is late now and then, or restarts; at every second look it is there."""
    thread_log, mine = scene.another_log(), scene.another_log()
    uid = scene.send(10)
    dead = DeadEngine(scene, uid, held=True)
    forsaken, seen = thread_log.forsaken, list[list[str]]()

    def looked(inbox: Inbox, **options: str) -> list[str]:
        if comes_and_goes and not mine.lease("generate-0").holder:
            mine.renew(dead.owner, LEASE_MS, "")
        elif comes_and_goes:
            mine.release(dead.owner)
        seen.append(forsaken(inbox, **options))
        return seen[-1]

    thread_log.forsaken = looked  # type: ignore[method-assign]  # this instance's alone
    with scene.running(slot=1, lease_ms=SHORT_MS, thread_log=thread_log) as peer:
        until(lambda: len(seen) >= 6)
        assert peer.engine.plans == []
    assert seen[:6] == ([["generate-0"], []] * 3 if comes_and_goes else [[]] * 6)
    assert scene.in_hand("generate-0") == [uid]
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

        scene, shaky = Scene(another_log), another_log(proxy.url)
        uid = scene.send(10, max_tokens=6)
        DeadEngine(scene, uid)
        claim_from, asked = shaky.claim_from, []

        def loses_the_first(inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
            asked.append(guest.slot)
            if len(asked) == 1:
                proxy.lose_a_reply()
            return claim_from(inbox, owner, guest, max_entries)

        shaky.claim_from = loses_the_first  # type: ignore[method-assign]  # this instance's alone
        with taking_over(scene, thread_log=shaky):
            until(lambda: len(asked) > 1)
            until(lambda: scene.have_ended(uid), timeout_s=3)
        assert scene.tokens(uid) == [11, 12, 13, 14, 15, 16]
        assert [event.engine for _, event in scene.takeovers(uid)] == ["generate-1"]


def test_an_engine_that_lost_its_slot_keeps_its_weights_and_goes_on_under_another_epoch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log, stops, loads, standstill = scene.log, list[Stop](), list[Path](), threading.Event()
    engine, speak = CountingEngine(), SlotLease._speak

    def on_signals(stop: Stop) -> Stop:
        stops.append(stop)
        return stop

    def load(config: GenerateConfig, folder: Path, report: Callable[[float], None]) -> Loaded:
        loads.append(folder)
        cpu, kind = torch.device("cpu"), torch.float32
        how: dict[str, Any] = {"limits": LIMITS, "kernels": "avx2", "quantization": "none"}
        settings = Settings(cpu, kind, "reference", "naive", threads=1, page_size=4, num_pages=64, **how)
        return Loaded(engine, settings, ())

    def unless_standing_still(slot_lease: SlotLease, status: Status) -> None:
        if not standstill.is_set() or slot_lease.owner.slot != "generate-0":
            speak(slot_lease, status)

    monkeypatch.setattr(Stop, "on_signals", on_signals)
    monkeypatch.setattr(SlotLease, "_speak", unless_standing_still)
    monkeypatch.setattr(sys, "setswitchinterval", lambda interval_s: None)
    monkeypatch.setattr(
        "stages.generate.loop.worker.serving_of", lambda folder, model, dummy: Serving(model, "counting")
    )
    config = parse_config("stage generate", GenerateConfig, ["--lease", "0.2", "--slot", "0"], {})
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    process = threading.Thread(target=run_engine, args=(config, scene.another_log, tmp_path, load))
    assert log.acquire("generate-7", "with less context", LEASE_MS * 10, Serving("m", "counting", context=CONTEXT - 8))
    with detokenizing(scene, 0):
        process.start()
        until(lambda: [status.phase for status in read_statuses(log, "generate")] == ["ready"])
        engine.closes_after = 3
        uid = scene.send(10, max_tokens=40)
        until(lambda: len(scene.tokens(uid)) > 1)
        standstill.set()
        until(lambda: log.lease("generate-0").holder == "")
        another = log.acquire("generate-0", "another", SHORT_MS)
        standstill.clear()
        engine.gate.set()
        until(lambda: scene.have_ended(uid))
        (status,) = read_statuses(log, "generate")
        stops[0].set()
        process.join(30)
    assert another is not None and another.epoch == 2
    assert (status.slot, status.phase, status.owner.partition(":")[0]) == ("generate-0", "ready", "3")
    assert status.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert (status.context, status.fingerprint) == (CONTEXT - 8, "counting")
    assert status.batch_invariant and status.numerics.startswith(f"float32/none/avx2/{VERSION}/4/torch-")
    assert loads == [tmp_path] and scene.tokens(uid) == list(range(11, 51))
    assert [event.epoch for _, event in scene.takeovers(uid)] == [3]
    assert log.lease("generate-0").holder == ""


# sampling


def test_sampling_goes_on_at_the_number_of_the_next_token(scene: Scene) -> None:
    """Seeded sampling is a function of the position; until `min_tokens` some tokens are forbidden."""
    uid = scene.send(8, 9, 10, seed=7, temperature=1.0, min_tokens=5, stop_token_ids=(199,), max_tokens=7)
    DeadEngine(scene, uid)
    with taking_over(scene) as peer:
        until(lambda: scene.have_ended(uid))
    samples = [row.sample for plan in peer.engine.plans for row in plan.rows if row.sample is not None]
    assert all(isinstance(sample, Sample) and sample.params.seed == 7 for sample in samples)
    assert [(each.position, each.forbidden) for each in samples] == [
        *((position, (199,)) for position in (5, 6, 7)),
        *((position, ()) for position in (8, 9)),
    ]
    assert scene.tokens(uid) == list(range(11, 18))


# requests that kill engines


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

    def __init__(self, scene: Scene, *requests: int | Sequence[int], **sampling: Any) -> None:
        self.scene, self.log = scene, scene.log
        prompts = [(each,) if isinstance(each, int) else each for each in requests]
        self.uids = {prompt[0]: scene.send(*prompt, **sampling) for prompt in prompts}

    def tried_in_vain(self) -> Lives:
        """Let one engine have died of all of them in its first step, and its successor too."""
        DeadEngine(self.scene, *self.uids.values(), num_tokens=0, in_vain=True)
        drain(self.scene)
        return self

    @contextlib.contextmanager
    def one(self, engine: CountingEngine, **options: Any) -> Iterator[Running]:
        suspects = [start for start in self.uids if (past := self.past(start)) and past.num_taken_over]
        with detokenizing(self.scene, 0):
            with self.scene.running(engine=engine, heard=False, **options) as life:
                self.measures = life.measures
                yield life
            # Only now are all its steps in the log: the thread that commits them outlives the loop.
            until(lambda: self.log.backlog(Inbox.steps(self.log.names, "generate-0")) == 0)
        for start in suspects:
            ran = [plan for plan in who_ran(engine) if start in plan]
            assert ran[:1] in ([], [{start}])

    def until_death(self, *deadly: int, **options: Any) -> set[int]:
        """Run an engine until it dies; return whom it computed then."""
        with self.one(MortalEngine(*deadly), **options) as life:
            until(lambda: bool(life.errors))
            assert isinstance(life.errors[0], Killed), life.errors
        return who_ran(life.engine)[-1]

    def until_ended(self, engine: CountingEngine, **options: Any) -> list[set[int]]:
        """Run an engine until all requests have ended; return whom it computed."""
        with self.one(engine, **options) as life:
            until(lambda: self.have_ended() or life.errors)
            assert not life.errors, life.errors
            until(lambda: self.scene.is_consumed)
        return who_ran(life.engine)

    def have_ended(self) -> bool:
        return self.scene.have_ended(*self.uids.values())

    def past(self, start: int) -> Past | None:
        """Return what the history of a request says to its next engine."""
        return past_of(self.uids[start], self.log.histories([self.uids[start]])[0])

    def tokens(self, start: int) -> list[int]:
        return self.scene.tokens(self.uids[start])

    def end(self, start: int) -> AnyEvent:
        return self.scene.history(self.uids[start])[-1]

    def failure(self, start: int) -> tuple[str, int]:
        """Return the code with which a request failed, and how many tokens it had."""
        event = self.end(start)
        assert isinstance(event, Failed)
        return event.code, event.n


def test_a_request_that_kills_engines_runs_alone_and_is_given_up_after_three_deaths_alone(scene: Scene) -> None:
    lives = Lives(scene, 10, POISON, 20, 30, max_tokens=4)
    for _ in range(2):
        assert POISON in lives.until_death(POISON), "and the first time nobody is suspected"
    for _ in range(3):
        assert lives.until_death(POISON) == {POISON}
    assert not any(POISON in plan for plan in lives.until_ended(MortalEngine(POISON)))
    for start in (10, 20, 30):
        assert isinstance(lives.end(start), Finished)
        assert lives.tokens(start) == list(range(start + 1, start + 5))
    assert lives.failure(POISON) == ("poisonous", 0)
    assert count_of(lives.measures, BURIED) == count_of(lives.measures, REQUEST_SUCCESS, "error") == 1
    (letter,) = scene.log.dead_letters(9)
    uid = lives.uids[POISON]
    assert (letter.fields["uid"], letter.fields["stage"], letter.fields["deaths"]) == (uid, "generate", "5")
    assert uid in letter.fields["entry"] and "taken_over" in letter.fields["history"]
    takeovers = [event for _, event in scene.takeovers(uid)]
    assert [event.alone for event in takeovers] == [False, True, True, True]
    assert len({event.epoch for event in takeovers}) == 4


def test_who_waits_behind_requests_that_kill_engines_ends_well(scene: Scene) -> None:
    lives = Lives(scene, 10, 20, 30, max_tokens=3)
    deaths = 0
    while not lives.have_ended():
        with lives.one(MortalEngine(10, 20)) as life:
            until(lambda: lives.have_ended() or life.errors)
            deaths += bool(life.errors)
    assert deaths <= 2 * 5
    assert lives.tokens(30) == [31, 32, 33] and isinstance(lives.end(30), Finished)
    assert {letter.fields["uid"] for letter in scene.log.dead_letters(9)} == {lives.uids[10], lives.uids[20]}


def test_the_count_of_deaths_begins_again_when_a_request_has_come_past_where_it_can_have_been(scene: Scene) -> None:
    doubt = TOKENS_IN_DOUBT
    lives = Lives(scene, 10, max_tokens=2 * doubt + 1)
    said = []
    for deadly in (10, 10, 12, 10 + doubt, 10 + doubt, 10 + 2 * doubt):
        lives.until_death(deadly, limits=LONG_LIMITS)
        past = lives.past(10)
        assert past is not None
        said.append((len(past.request.output_ids), past.num_taken_over, past.num_alone))
    assert said == [(0, 0, 0), (0, 1, 0), (2, 2, 1), (doubt, 1, 1), (doubt, 2, 2), (2 * doubt, 0, 0)]
    lives.until_ended(CountingEngine(), limits=LONG_LIMITS)
    assert lives.tokens(10) == list(range(11, 12 + 2 * doubt)) and scene.log.dead_letters(9) == []


def test_a_request_that_kills_engines_whose_last_steps_are_lost_is_found_in_as_many_deaths(scene: Scene) -> None:
    """Each engine makes a token that the one before had made, and dies, later than the log of that one says."""
    lives = Lives(scene, 10, 20, max_tokens=12)
    for deadly in (15, 16):
        assert 10 in lives.until_death(deadly)
    for _ in range(3):
        assert lives.until_death(17) == {10}
    lives.until_ended(MortalEngine(17))
    assert lives.failure(10) == ("poisonous", 7)
    assert lives.tokens(20) == list(range(21, 33))


def test_a_request_that_was_never_computed_is_not_suspected(scene: Scene) -> None:
    """It waited for room while another killed the engines."""
    lives = Lives(scene, 10, 20, max_tokens=3)
    one_at_a_time = replace(LIMITS, max_running_requests=1)
    for _ in range(5):
        assert lives.until_death(10, limits=one_at_a_time) == {10}
    assert scene.takeovers(lives.uids[20]) == []
    lives.until_ended(MortalEngine(10), limits=one_at_a_time)
    assert lives.tokens(20) == [21, 22, 23]


def test_what_comes_while_a_suspect_runs_waits_until_that_has_a_token(scene: Scene) -> None:
    lives = Lives(scene, [10] * 20, max_tokens=4).tried_in_vain()
    waiting: list[int] = []

    class Recorder(CountingEngine):
        """Writes down how many wait, step by step."""

        def forward(self, plan: BatchPlan) -> Computed:
            self.gate.wait(30)
            waiting.append(life.schedule.num_waiting)
            return super().forward(plan)

    engine = Recorder()
    engine.gate.clear()
    with lives.one(engine, limits=replace(LIMITS, max_prefill_length=2), commit_interval_s=0.0) as life:
        until(lambda: life.schedule.num_running == 1)
        new = scene.send(30, max_tokens=4)
        engine.gate.set()
        until(lambda: scene.have_ended(lives.uids[10], new) or life.errors)
        assert not life.errors
    ran = who_ran(engine)
    assert ran[:10] == [{10}] * 10, "so many steps does its prompt take"
    assert 1 in waiting[:10], "the other one is there"
    assert {10, 30} in ran or ran.count({30}) > 1
    assert lives.tokens(10) == [11, 12, 13, 14] and scene.tokens(new) == [31, 32, 33, 34]


def test_what_ran_gives_its_pages_back_to_a_suspect_and_goes_on_afterwards(scene: Scene) -> None:
    """Another engine is busy when it takes over what killed one twice."""
    lives = Lives(scene, 10, max_tokens=4).tried_in_vain()
    held = acquire_slot(scene.log, "generate", LEASE_MS)
    with taking_over(scene, pace_s=0.02) as peer:
        own = scene.send(80, max_tokens=60)
        until(lambda: len(peer.engine.plans) > 1)
        scene.log.release(held)
        until(lambda: scene.have_ended(lives.uids[10], own))
        assert peer.schedule.free_pages == 64
    ran = who_ran(peer.engine)
    alone = ran.index({10})
    assert 1 < alone < len(ran) - 1 and all(10 not in plan for plan in ran[:alone])
    assert lives.tokens(10) == [11, 12, 13, 14] and scene.tokens(own) == list(range(81, 141))
    kinds = [event.kind for event in scene.history(own)]
    assert (kinds.count("preempted"), kinds.count("admitted")) == (1, 2)


def test_a_suspect_that_ends_before_its_turn_is_forgotten(scene: Scene) -> None:
    lives = Lives(scene, 10, 20, 30, 40, max_tokens=3).tried_in_vain()
    engine = CountingEngine()
    engine.gate.clear()
    with lives.one(engine) as life:
        until(lambda: life.schedule.num_running == 1)
        scene.log.end(lives.uids[30], Cancelled(by="client"), frontend="web-0")
        engine.gate.set()
        until(lambda: (lives.have_ended() and scene.is_consumed) or life.errors)
        assert not life.errors
    assert not any(30 in plan for plan in who_ran(engine)) and isinstance(lives.end(30), Cancelled)
    assert [lives.tokens(start) for start in (10, 20, 40)] == [[11, 12, 13], [21, 22, 23], [41, 42, 43]]


@pytest.mark.parametrize(
    ("bad", "context", "code"),
    [([POISON], 64, "engine_error"), ([150, *range(9)], 8, "context_length_exceeded")],
    ids=["the engine raises on it, and lives", "the next engine has a smaller context"],
)
def test_after_a_suspect_that_fails_the_next_one_has_its_turn(
    scene: Scene, bad: list[int], context: int, code: str
) -> None:
    lives = Lives(scene, bad, [20], max_tokens=3).tried_in_vain()
    lives.until_ended(CountingEngine(), limits=replace(LIMITS, context=context))
    assert lives.failure(bad[0]) == (code, 0)
    assert lives.tokens(20) == [21, 22, 23] and scene.log.dead_letters(9) == []


# a log that is away


def test_a_log_that_is_away_delays_a_takeover_and_loses_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit and each look fails once: before it is done, or after."""
    monkeypatch.setattr("stages.generate.loop.log_thread.BACKOFF_S", 0.001)
    thread_log = scene.another_log()
    uids = [scene.send(start, max_tokens=4) for start in (10, 20)]
    DeadEngine(scene, *uids)
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
    with taking_over(scene, thread_log=thread_log):
        until(lambda: scene.have_ended(*uids))
        until(lambda: scene.log.lease("generate-0").holder == "" and failed == set(names))
        until(lambda: scene.is_consumed)
    assert [scene.tokens(uid) for uid in uids] == [[11, 12, 13, 14], [21, 22, 23, 24]]
