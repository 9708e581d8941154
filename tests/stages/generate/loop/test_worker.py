"""The engine's loop and its log thread, with an engine that counts instead of computing, on both logs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.calls import noted
from support.engine_rig import CONTEXT, LEASE_MS, LIMITS, POISON, CountingEngine, Scene
from support.memory_log.log import MemoryLog
from support.redis_servers import Servers, command, until

from pipeline.errors import LogUnavailable, UndecodableEvent
from pipeline.events import (
    Admitted,
    Cancelled,
    EventRow,
    Failed,
    Mark,
    Replay,
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
from pipeline.log.protocol import Entry, Inbox, Produced, StepCommitted, Taken
from pipeline.log.redis import RedisLog
from pipeline.names import Names, tokens_id
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from stages.generate.kvcache.base import Allocation
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.kvcache.radix import RadixCache
from stages.generate.loop.log_thread import Arrived, LogThread, Update
from stages.generate.loop.outbox import Outbox
from stages.generate.loop.pace import Pace
from stages.generate.loop.past import past_of
from stages.generate.loop.updates import Room
from stages.generate.loop.worker import sampling_defaults
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import MOST_TAKEN, Identity, Schedule
from stages.generate.setup.config import GenerateConfig, Targets


class Steps:
    """Reads an engine's steps like a detokenizer that leaves them where they are."""

    def __init__(self, log: RedisLog) -> None:
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

    def rows(self, uid: str) -> list[TokenRow]:
        return [row for step in self.look() for row in step.rows if isinstance(row, TokenRow) and row.uid == uid]

    def tokens(self, uid: str) -> list[tuple[int, int]]:
        """Return number and token."""
        return [(row.n, row.token) for row in self.rows(uid)]

    def marks(self, uid: str) -> list[tuple[int, Mark | Failed]]:
        rows = [row for step in self.look() for row in step.rows]
        return [(row.n, row.event) for row in rows if isinstance(row, EventRow) and row.uid == uid]

    def failures(self, uid: str) -> list[Failed]:
        return [event for _, event in self.marks(uid) if isinstance(event, Failed)]

    def released(self) -> set[str]:
        return {uid for step in self.look() for uid in step.released}

    def write_histories(self) -> int:
        """Do the detokenizer's part for all steps seen; return the last n."""
        owner = self.log.acquire("detokenize-0", "the detokenizer", LEASE_MS * 10)
        assert owner is not None
        last = 0
        for entry, step in self.seen:
            produced = []
            for row in step.rows:
                if isinstance(row, TokenRow):
                    event = TokensProduced(count=1, tokens=(row.token,), text="x", step=entry.id)
                    produced.append(Produced(row.uid, tokens_id(row.n), row.n, event, "web-0"))
                    last = row.n
            assert self.log.produced(owner, [entry], "generate-0", produced)
        return last


@pytest.fixture
def steps(scene: Scene) -> Steps:
    return Steps(scene.log)


def counted(first: int, count: int) -> list[tuple[int, int]]:
    """Return the tokens of a whole answer."""
    return [(n, first + n - 1) for n in range(1, count + 1)]


def test_a_request_becomes_steps_and_its_entry_is_consumed_with_the_last(scene: Scene, steps: Steps) -> None:
    with capture_logs() as lines, scene.running():
        uid = scene.send(10, 11, max_tokens=3)
        until(lambda: len(steps.rows(uid)) == 3)
        assert steps.tokens(uid) == counted(12, 3)
        assert [row.end for row in steps.rows(uid)] == [None, None, "length"]
        assert isinstance(steps.marks(uid)[0][1], Admitted)
        until(lambda: scene.is_consumed)
    assert scene.in_hand() == []
    # A new log has no groups yet, and the books of an engine that just started add up.
    assert not [line for line in lines if line["event"] in ("group_lost", "books_wrong")]


def test_a_cancelled_request_is_let_go_and_its_pages_are_free(scene: Scene, steps: Steps) -> None:
    with scene.running(num_pages=16) as engine:
        engine.engine.gate.clear()
        uid = scene.send(1)
        until(lambda: engine.schedule.num_running == 1)
        assert scene.log.end(uid, Cancelled(by="client"), frontend="web-0")
        engine.engine.gate.set()
        until(lambda: uid in steps.released() and scene.is_consumed)
        assert engine.schedule.free_pages == 16


def test_a_request_that_ended_before_it_was_taken_never_runs(scene: Scene, steps: Steps) -> None:
    uid = scene.send(1)
    scene.log.end(uid, Cancelled(by="client"), frontend="web-0")
    with scene.running() as engine:
        until(lambda: scene.is_consumed)
        assert uid in steps.released() and engine.engine.plans == []


def test_requests_that_arrive_together_share_steps(scene: Scene, steps: Steps) -> None:
    uids = [scene.send(number, max_tokens=4) for number in range(6)]
    with scene.running() as engine:
        until(lambda: all(len(steps.rows(uid)) == 4 for uid in uids))
        assert max(len(plan.rows) for plan in engine.engine.plans) == 6


def test_engines_share_a_burst_that_one_of_them_has_room_for(scene: Scene) -> None:
    """Each takes a few requests at a time, and computes a step before it takes more."""
    limits = replace(LIMITS, max_running_requests=64)
    options: dict[str, Any] = {"limits": limits, "num_pages": 1024}
    with scene.running(slot=0, **options) as first, scene.running(slot=1, **options) as second:
        for engine in (first, second):
            engine.engine.gate.clear()
        for _ in range(64):
            scene.send(1, max_tokens=4)
        held = [0, 0]

        def hold_some() -> bool:
            held[:] = [len(scene.in_hand(slot)) for slot in ("generate-0", "generate-1")]
            return min(held) > 0

        until(hold_some)
        assert max(held) <= MOST_TAKEN
        for engine in (first, second):
            engine.engine.gate.set()
        until(lambda: scene.is_consumed)


def test_a_request_that_comes_while_a_long_step_is_computed_is_in_the_next_one(scene: Scene, steps: Steps) -> None:
    with scene.running() as engine:
        engine.engine.gate.clear()
        uids = [scene.send(10, max_tokens=2)]
        until(lambda: engine.schedule.num_running == 1)
        uids.append(scene.send(20, max_tokens=2))
        until(lambda: engine.log_thread._num_sent == 2)
        engine.engine.gate.set()
        until(lambda: scene.is_consumed)
    assert [len(plan.rows) for plan in engine.engine.plans] == [1, 2, 1]
    assert [steps.tokens(uid) for uid in uids] == [counted(11, 2), counted(21, 2)]


def test_no_more_requests_are_taken_while_a_step_is_computed_than_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.generate.loop.log_thread.TAKE_EVERY_S", 0.001)
    log = MemoryLog(Names())
    scene = Scene(lambda: log)
    with scene.running(limits=replace(LIMITS, max_running_requests=2)) as engine:
        engine.engine.gate.clear()
        for _ in range(5):
            scene.send(1, max_tokens=2)
        until(lambda: engine.schedule.num_running > 0)
        looks = noted(monkeypatch, Outbox, "take")
        until(lambda: len(looks) > 20)
        assert len(scene.in_hand()) == 2


def test_a_step_says_what_it_was_made_of(scene: Scene, steps: Steps) -> None:
    with scene.running():
        uid = scene.send(1, 2, 3, max_tokens=2)
        until(lambda: len(steps.rows(uid)) == 2)
    first, second = (step.figures for step in steps.look() if step.rows)
    assert (first.prefill_rows, first.prefill_tokens, first.decode_rows, first.running) == (1, 3, 0, 1)
    assert (second.prefill_rows, second.decode_rows, second.running, second.free_pages) == (0, 1, 0, 64)


def test_the_log_has_what_the_plans_of_measured_budgets_can_be_made_from_again(scene: Scene, steps: Steps) -> None:
    """A request that waits behind shorter prompts has no influence on a plan before it is admitted."""
    engine, uids = CountingEngine(0.001), {}
    with scene.running(engine=engine, pace=Pace(Targets.exactly(0.001))):
        for length in (2, 3, 40, 45, 50):
            prompt = tuple(range(length))
            uids[scene.send(*prompt, max_tokens=60 if length < 40 else 3)] = prompt
            until(lambda: steps.look() and steps.seen[-1][1].figures.decode_rows)
        until(lambda: scene.is_consumed)
    made = [step for step in steps.look() if step.figures.forward_ms]
    figures = [step.figures for step in made]
    assert {each.mixed_prefill_length for each in figures} >= {None, 0}
    assert {each.target_ms for each in figures if each.mixed_prefill_length is None} == {None}
    assert {each.target_ms for each in figures if each.decode_rows and each.prefill_tokens} == {1}
    again = Schedule(NaiveCache(64, 4), LIMITS, [], Identity("generate-0", 1, "counting"))
    plans = []
    for step in made:
        for row in step.rows:
            if isinstance(row, EventRow):
                params = SamplingParams(max_tokens=60 if len(uids[row.uid]) < 40 else 3)
                again.add(NewRequest(row.uid, uids[row.uid], (), params))
        planned = again.plan(step.figures.mixed_prefill_length)
        assert planned is not None
        plans.append(planned[0])
        again.complete([row.token for row in step.rows if isinstance(row, TokenRow)])
    assert plans == engine.plans


@pytest.mark.parametrize(("overlap", "known"), [(False, 2), (True, 1)])
def test_with_overlap_a_step_is_computed_before_the_tokens_of_the_last_one_are_known(
    scene: Scene, steps: Steps, overlap: bool, known: int
) -> None:
    engine = CountingEngine()
    engine.closes_after = 2
    with scene.running(engine=engine, overlap=overlap) as running:
        uid = scene.send(10, max_tokens=4)
        until(lambda: not engine.gate.is_set())
        until(lambda: len(steps.rows(uid)) == known)
        assert running.schedule.num_output(uid) == known
        engine.gate.set()
        until(lambda: len(steps.rows(uid)) == 4 and scene.is_consumed)
    assert steps.tokens(uid) == counted(11, 4) and len(engine.plans) == 4


def test_an_engine_that_is_stopped_commits_the_step_in_flight(scene: Scene, steps: Steps) -> None:
    engine = CountingEngine()
    engine.closes_after = 3
    with scene.running(engine=engine, overlap=True) as running:
        uid = scene.send(10, max_tokens=30)
        until(lambda: not engine.gate.is_set())
        running.stop.set()
    assert len(steps.rows(uid)) == len(engine.plans) >= 4


def test_a_restarted_engine_goes_on_where_the_log_ends(scene: Scene, steps: Steps) -> None:
    with scene.running(pace_s=0.05) as engine:
        uid = scene.send(10, max_tokens=9)
        until(lambda: len(steps.rows(uid)) >= 2)
        engine.stop.set()
    assert not steps.rows(uid)[-1].end, "it was to be stopped in the middle"
    last = steps.write_histories()
    with scene.running():
        until(lambda: steps.rows(uid)[-1].end is not None)
    assert steps.tokens(uid) == counted(11, 9)
    assert [(n, event.epoch) for n, event in steps.marks(uid) if isinstance(event, TakenOver)] == [(last, 2)]


def test_an_engine_waits_for_the_steps_of_its_predecessor(scene: Scene, steps: Steps) -> None:
    with scene.running(pace_s=0.05) as engine:
        uid = scene.send(10, max_tokens=30)
        until(lambda: len(steps.rows(uid)) >= 2)
        engine.stop.set()
    waiting = len(steps.look())
    with scene.running() as engine:
        until(lambda: engine.slot_lease.status.phase == "starting")
        assert engine.engine.plans == []
        assert len(steps.look()) == waiting
        last = steps.write_histories()
        until(lambda: bool(engine.engine.plans))
        assert engine.engine.plans[0].rows[0].token_ids == tuple(range(10, 11 + last))


def test_what_control_lost_is_found_in_live(redis_servers: Servers) -> None:
    url = redis_servers.url("embedded")
    scene = Scene(lambda: RedisLog(url, Names()))
    steps = Steps(scene.log)
    with scene.running(pace_s=0.05):  # three seconds for the whole context
        uid = scene.send(1)
        until(lambda: len(steps.rows(uid)) > 0)
        command(url, "ZREM", scene.log.names.live, uid)
        until(lambda: uid in steps.released())
        assert not any(row.end for row in steps.rows(uid))


def test_requests_whose_delivery_was_lost_on_the_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log delivered them, but its reply did not come: they are pending, and nobody has seen them."""
    log = MemoryLog(Names())
    scene, steps = Scene(lambda: log), Steps(log)
    uid = scene.send(10, max_tokens=2)
    take, lost = log.take, threading.Event()

    def loses_the_first(*arguments: Any, **options: Any) -> Taken:
        taken = take(*arguments, **options)
        if taken.entries and not lost.is_set():
            lost.set()
            raise LogUnavailable("connection reset")
        return taken

    monkeypatch.setattr(log, "take", loses_the_first)
    with scene.running():
        until(lambda: len(steps.rows(uid)) == 2)
    assert lost.is_set() and steps.tokens(uid) == counted(11, 2)


def test_a_running_engine_asks_for_requests_only_when_there_may_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `take` at every step would cost a stream as much as the commit of the step itself."""
    log = MemoryLog(Names())
    scene, steps = Scene(lambda: log), Steps(log)
    with scene.running(pace_s=0.01) as engine:
        plans_at_take = noted(monkeypatch, log, "take", lambda *_, **__: len(engine.engine.plans))
        first = scene.send(10, max_tokens=40)
        until(lambda: len(steps.rows(first)) >= 10)
        second = scene.send(30, max_tokens=40)
        until(lambda: len(steps.rows(first)) == 40 and len(steps.rows(second)) == 40)
        num_plans = len(engine.engine.plans)
    while_running = [count for count in plans_at_take if 0 < count < num_plans]
    assert len(while_running) <= 4, f"of {num_plans} steps: {while_running}"


def test_a_request_on_which_the_engine_raises_fails_alone_whether_others_run_or_not(scene: Scene, steps: Steps) -> None:
    before, poison, after = (scene.send(*prompt, max_tokens=5) for prompt in ((10,), (1, POISON), (20,)))
    with scene.running() as engine:
        until(lambda: all(len(steps.rows(uid)) == 5 for uid in (before, after)) and scene.is_consumed)
        alone = scene.send(POISON)
        until(lambda: bool(steps.failures(alone)))
        good = scene.send(30, max_tokens=5)
        until(lambda: len(steps.rows(good)) == 5)
        assert not engine.errors and engine.schedule.free_pages == 64
    for uid, first in ((before, 11), (after, 21), (good, 31)):
        assert steps.tokens(uid) == counted(first, 5)
    (failed,) = steps.failures(poison)
    assert failed.code == "engine_error" and "index out of range" in failed.message
    assert steps.rows(poison) == []


def test_an_engine_that_raises_on_every_one_of_several_requests_ends_and_loses_none(scene: Scene, steps: Steps) -> None:
    uids = {scene.send(1), scene.send(2)}
    broken = CountingEngine()
    broken.broken = True
    with scene.running(engine=broken) as engine:
        until(lambda: bool(engine.errors))
    assert isinstance(engine.errors[0], IndexError)
    assert set(scene.in_hand()) == uids
    assert not any(steps.failures(uid) for uid in uids)


def test_an_engine_whose_steps_nobody_reads_takes_nothing_until_somebody_does(scene: Scene, steps: Steps) -> None:
    uid = scene.send(1, max_tokens=2)
    with scene.running(heard=False) as engine:
        assert steps.rows(uid) == [] and engine.engine.plans == [] and scene.in_hand() == []
        scene.log.acquire("detokenize-0", "the detokenizer", LEASE_MS * 10)
        until(lambda: len(steps.rows(uid)) == 2)


def waiting_for_a_detokenizer(
    monkeypatch: pytest.MonkeyPatch, *, closes_after: int = -1
) -> tuple[Scene, CountingEngine, list[int]]:
    """Return a log in which four steps may wait for the detokenizer; and a list that grows with each call of `step`."""
    monkeypatch.setattr("stages.generate.loop.log_thread.MOST_STEPS_BEHIND", 4)
    monkeypatch.setattr("stages.generate.loop.log_thread.POLL_S", 0.001)
    monkeypatch.setattr("stages.generate.loop.log_thread.BACKOFF_S", 0.001)
    log, engine = MemoryLog(Names()), CountingEngine()
    engine.closes_after = closes_after
    return Scene(lambda: log), engine, noted(monkeypatch, log, "step", lambda _, steps, **__: len(steps))


def test_an_engine_that_waits_for_its_detokenizer_hears_of_what_ended_and_computes_no_further_row_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, engine, _ = waiting_for_a_detokenizer(monkeypatch)
    inbox = Inbox.steps(scene.log.names, "generate-0")
    detokenizer = acquire_slot(scene.log, "detokenize", LEASE_MS * 10)

    def have_both_ended() -> bool:
        """Consume the steps meanwhile."""
        entries = scene.log.read(inbox, "detokenize-0", max_entries=100, block_ms=0)
        assert not entries or scene.log.produced(detokenizer, entries, "generate-0", [])
        return scene.is_consumed

    with scene.running(engine=engine, commit_interval_s=0.0) as running:
        goes, stays = scene.send(100, max_tokens=40), scene.send(10, max_tokens=40)
        until(lambda: scene.log.backlog(inbox) == 5)
        until(lambda: len(engine.plans) == 7)  # one step is on its way, and one waits for its place
        told = running.log_thread._num_sent
        assert scene.log.end(goes, Cancelled(by="client"), frontend="web-0")
        until(lambda: running.log_thread._num_sent > told)
        assert len(engine.plans) == 7
        until(have_both_ended)
        after = [row.token_ids[0] for plan in engine.plans[7:] for row in plan.rows]
    assert after and max(after) < 100 and scene.log.alive([stays]) == {stays}


@pytest.mark.parametrize("why", ["its detokenizer is slow", "the log is away"])
def test_a_forward_pass_that_hangs_gets_no_sign_of_life_from_the_thread_that_waits_for_the_log(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    scene, engine, asked = waiting_for_a_detokenizer(monkeypatch, closes_after=5)
    alive = noted(monkeypatch, SlotLease, "report_progress", lambda *_, **__: threading.current_thread().name)

    def away(*_: object, **__: object) -> StepCommitted:
        asked.append(0)
        raise LogUnavailable("connection refused")

    with scene.running(engine=engine, commit_interval_s=0.0):
        scene.send(10, max_tokens=40)
        until(lambda: not engine.gate.is_set())
        if why == "the log is away":
            monkeypatch.setattr(scene.log, "step", away)
        seen, num_asked = len(alive), len(asked)
        until(lambda: len(asked) >= num_asked + 20)
        assert len(alive) == seen and "log thread" not in alive
        monkeypatch.undo()


def test_a_history_with_a_hole_is_not_gone_on_with() -> None:
    entries = [
        Entry("0-1", encode(Submitted(endpoint="chat", frontend="web-0", sampling=SamplingParams()))),
        Entry("0-2", encode(Tokenized(token_ids=(1,), fingerprint="f", by="tokenize-0"))),
        Entry("1-0", encode(TokensProduced(count=1, tokens=(5,), text="a", step="1-1"))),
        Entry("3-0", encode(TokensProduced(count=1, tokens=(7,), text="c", step="1-3"))),
    ]
    past = past_of("a", entries[:3])
    assert past is not None and past.request.output_ids == (5,)
    with pytest.raises(UndecodableEvent, match="3-0"):
        past_of("a", entries)


def test_priority_and_bad_words_are_those_of_the_history() -> None:
    submitted = Submitted(endpoint="chat", frontend="web-0", sampling=SamplingParams(seed=3), priority=-2)
    tokenized = Tokenized(token_ids=(1, 2), fingerprint="f", by="tokenize-0", bad_words=((5,), (6, 7)))
    past = past_of("a", [Entry("0-1", encode(submitted)), Entry("0-2", encode(tokenized))])
    assert past is not None
    assert past.request == NewRequest("a", (1, 2), (), SamplingParams(seed=3), -2, ((5,), (6, 7)))


@pytest.mark.parametrize("replay", [None, Replay(of="b"), Replay(of="b", cached=True)])
def test_a_replay_reads_the_prefix_cache_only_where_it_was_asked_to(replay: Replay | None) -> None:
    submitted = Submitted(endpoint="chat", frontend="", sampling=SamplingParams(), replay=replay)
    tokenized = Tokenized(token_ids=(1, 2), fingerprint="f", by="tokenize-0")
    past = past_of("a", [Entry("0-1", encode(submitted)), Entry("0-2", encode(tokenized))])
    assert past is not None and past.request.reads_cache is (replay is None or replay.cached)


# the cache


def test_a_flush_forgets_the_prefixes_and_the_status_says_so(scene: Scene, steps: Steps) -> None:
    prompt = range(10, 22)  # three pages, of which the last is never found: its last token is computed in any case

    def cached_tokens() -> int:
        uid = scene.send(*prompt, max_tokens=1)
        until(lambda: len(steps.rows(uid)) == 1)
        return next(event.cached_tokens for _, event in steps.marks(uid) if isinstance(event, Admitted))

    with scene.running(cache=RadixCache(64, 4)) as engine:
        for num_pages in (3, 6):
            assert [cached_tokens(), cached_tokens()] == [0, 8]
            flush = scene.log.flush("web-0")
            until(lambda: engine.slot_lease.status.flushed == flush)  # noqa: B023  # waited for at once
            assert engine.slot_lease.status.flushed_pages == num_pages
        until(lambda: read_statuses(scene.log, "generate")[0].flushed == flush)


def test_a_flush_while_requests_run_harms_none_of_them(scene: Scene, steps: Steps) -> None:
    with scene.running(pace_s=0.01, cache=RadixCache(64, 4)) as engine:
        uid = scene.send(*range(10, 30), max_tokens=30)
        until(lambda: len(steps.rows(uid)) > 1)
        flush = scene.log.flush("web-0")
        until(lambda: engine.slot_lease.status.flushed == flush)
        assert engine.slot_lease.status.flushed_pages == 0
        until(lambda: steps.rows(uid)[-1].end is not None)
        assert steps.tokens(uid) == counted(30, 30)
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
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 3, "top_k": 20}')
    config = parse_config("stage generate", GenerateConfig, flags, {})
    with capture_logs() as lines:
        assert sampling_defaults(config.defaults, tmp_path) == expected
    assert lines == [
        {"log_level": "warning", "event": "recommendation_ignored", "reason": reason, "file": str(file)}
        for reason in reasons
    ]


def test_requests_with_the_same_prompt_share_its_tokens(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of a long prompt take little more memory than one."""
    told: list[Update] = []
    monkeypatch.setattr(LogThread, "_tell", lambda _, update: told.append(update))
    owner = acquire_slot(scene.log, "generate", LEASE_MS)
    for prompt in ((1000, 1001), (1000, 1001), (1000,)):
        scene.send(*prompt)
    scene.log.prepare(scene.tokenized)
    entries = scene.log.take(owner, 8, control_cursor="0-0").entries
    LogThread(scene.log, owner, lease_ms=LEASE_MS, report_progress=lambda: None)._bring(entries, resumed=False)
    first, second, third = (update.request for update in told if isinstance(update, Arrived))
    assert first.prompt_ids == (1000, 1001) and first.prompt_ids is second.prompt_ids
    assert third.prompt_ids == (1000,) and first.uid != second.uid


def test_a_step_is_committed_before_the_log_is_asked_for_anything_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients wait for the tokens, and nobody for news of other engines."""
    monkeypatch.setattr("stages.generate.loop.log_thread.LOOK_EVERY_S", 0.0)
    log = scene.another_log()
    owner = acquire_slot(log, "generate", LEASE_MS)
    log_thread = LogThread(log, owner, lease_ms=LEASE_MS, report_progress=lambda: None)
    looks = noted(monkeypatch, log, "forsaken")
    looks_before_steps = noted(monkeypatch, log, "step", lambda *_, **__: len(looks))
    log_thread.start()
    log_thread.commit(1, StepCompleted(rows=()), [], Room(8))
    log_thread.stop()
    assert looks_before_steps == [0] and looks


def test_an_engine_does_not_wait_for_a_thread_that_has_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were computed together come one after the other, and the engine must soon read why it ended."""
    owner = acquire_slot(scene.log, "generate", LEASE_MS)
    log_thread = LogThread(scene.another_log(), owner, lease_ms=LEASE_MS, report_progress=lambda: None)
    waits_s = noted(monkeypatch, log_thread._outbox, "has_place", lambda timeout_s: timeout_s)
    for number in range(8):
        log_thread.commit(number, StepCompleted(rows=()), [], Room(8))
    assert set(waits_s) == {0.0} and len(waits_s) == 8


def test_other_owners_than_those_that_wait_are_looked_for_once_for_each_request_that_comes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scene.another_log()
    log.prepare(scene.tokenized)
    log_thread = LogThread(
        log, acquire_slot(log, "generate", LEASE_MS), lease_ms=LEASE_MS, report_progress=lambda: None
    )
    monkeypatch.setattr(log_thread, "_look_for_detokenizer", lambda: None)
    log_thread._detokenizer = "present"
    takes = noted(monkeypatch, log, "take", lambda *_, **how: how["but"])

    def looks(room: Room, newest: str) -> bool:
        before, log_thread._told_room = len(takes), (room, 0)
        log_thread._take_what_fits(newest)
        return len(takes) > before

    assert looks(Room(0, ("a",)), "1-1"), "to tell the others that there is no room"
    assert not looks(Room(0, ("a",)), "1-1"), "there is no room"
    assert looks(Room(8, ("a",)), "1-1")
    assert not looks(Room(8, ("a",)), "1-1"), "nothing came"
    assert looks(Room(8, ("a",)), "1-2")
    assert looks(Room(8, ("a", "b")), "1-2"), "others have to wait"
    assert looks(Room(8), "1-2") and looks(Room(8), "1-2"), "nobody has to wait"


# the books


class WrongBooks(NaiveCache):
    """A cache that has lost a page; *unreadable*, it has lost its books altogether."""

    def __init__(self, *, unreadable: bool = False) -> None:
        super().__init__(64, 4)
        self._pool.allocate(1)
        self._unreadable = unreadable

    def problems(self, allocations: Sequence[Allocation]) -> list[str]:
        if self._unreadable:
            raise KeyError("page 7")
        return super().problems(allocations)


@pytest.mark.parametrize(("unreadable", "words"), [(False, "0 pages owned and 63 free of 64"), (True, "page 7")])
def test_books_that_do_not_add_up_are_reported_and_the_engine_goes_on(
    scene: Scene, steps: Steps, unreadable: bool, words: str
) -> None:
    with capture_logs() as lines, scene.running(cache=WrongBooks(unreadable=unreadable)) as engine:
        until(lambda: engine.slot_lease.status.books_wrong == 1)  # an engine looks when it has nothing to do yet
        for times in (1, 2, 3):
            uid = scene.send(1, max_tokens=CONTEXT - 1)
            until(lambda uid=uid: len(steps.rows(uid)) == CONTEXT - 1)  # type: ignore[misc]  # bound at once
            assert engine.slot_lease.status.books_wrong <= times
        until(lambda: engine.slot_lease.status.books_wrong == 2)  # once more: a hundred steps later
        until(lambda: read_statuses(scene.log, "generate")[0].books_wrong == 2)
        assert not engine.errors
    reports = [line for line in lines if line["event"] == "books_wrong"]
    assert [(line["log_level"], line["times"]) for line in reports] == [("error", 1), ("error", 2)]
    assert all(words in str(line["problems"]) for line in reports)
