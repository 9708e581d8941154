"""A grammar whose compilation ends engines ends its request, and no other one."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_rig import CountingEngine, Killed, Running, Scene, detokenizing
from support.memory_log.log import MemoryLog
from support.redis_servers import until

import stages.generate
from pipeline.events import Cancelled, EventRow, Failed, Finished, Preempted, TakenOver
from pipeline.log.protocol import Inbox, StepCommitted
from pipeline.names import Names
from stages.generate.loop.grammars import GrammarMatcher, Grammars
from stages.generate.loop.past import past_of
from stages.generate.loop.updates import Arrived

DEMO = Path(stages.generate.__file__).resolve().parent / "model" / "demo"
DEADLY, GOOD = "deadly", "good"


class Anything:
    """A matcher that allows all tokens."""

    error = ""

    def advance(self, token: int) -> None: ...

    def allowed(self) -> None:
        return None


class MortalGrammars(Grammars):
    """Ends the engine when it begins to compile DEADLY. Others wait in the compiler's thread for the gate."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(DEMO, (1,), 200, compile_s=60.0)
        self.scene = scene
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[str] = []
        self.beside: list[int] = []
        """How many others were compiled when one began."""
        self.marks: list[bool] = []
        """The marks that the log had of a request with DEADLY when it began: whether the engine had it alone."""

    def begin(self, arrived: Arrived) -> None:
        self.begun.append(arrived.request.grammar)
        self.beside.append(len(self))
        if arrived.request.grammar == DEADLY:
            assert isinstance(self.scene.log, NotedLog)
            self.marks = list(self.scene.log.taken_over[arrived.request.uid])
            raise Killed
        super().begin(arrived)

    def _compiled(self, arrived: Arrived) -> GrammarMatcher | Failed:
        self.gate.wait(30)
        return Anything()  # type: ignore[return-value]


class NotedLog(MemoryLog):
    """Notes who was taken over, once a step is committed that says so."""

    def __init__(self) -> None:
        super().__init__(Names())
        self.taken_over: defaultdict[str, list[bool]] = defaultdict(list)
        """uid -> whether the engine had it alone."""

    def step(self, owner: Any, steps: Any, **options: Any) -> StepCommitted:
        done = super().step(owner, steps, **options)
        for row in (row for event in steps.values() for row in event.rows):
            if isinstance(row, EventRow) and isinstance(row.event, TakenOver):
                self.taken_over[row.uid].append(row.event.alone)
        return done


@pytest.fixture
def scene() -> Scene:
    log = NotedLog()
    return Scene(lambda: log)


@contextlib.contextmanager
def life(scene: Scene, slot: int = 0, **options: Any) -> Iterator[tuple[Running, MortalGrammars]]:
    """Run an engine with the detokenizers of its slot and of generate-0, until the block ends."""
    grammars = MortalGrammars(scene)
    try:
        with detokenizing(scene, *sorted({0, slot})):
            with scene.running(slot=slot, heard=False, grammars=grammars, **options) as running:
                yield running, grammars
            # Only now are all its steps in the log: the thread that commits them outlives the loop.
            until(lambda: scene.log.backlog(Inbox.steps(scene.log.names, "generate-0")) == 0)
    finally:
        grammars.gate.set()
        grammars.close()


def die(scene: Scene, **options: Any) -> MortalGrammars:
    with life(scene, **options) as (running, grammars):
        until(lambda: bool(running.errors))
        assert isinstance(running.errors[0], Killed), running.errors
    return grammars


def failure(scene: Scene, uid: str) -> str:
    event = scene.history(uid)[-1]
    return event.code if isinstance(event, Failed) else ""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_whose_grammar_ends_engines_is_given_up_and_the_others_end_well(scene: Scene, overlap: bool) -> None:
    deadly = scene.send(10, max_tokens=4, grammar=DEADLY)
    plain, good = scene.send(20, max_tokens=4), scene.send(30, max_tokens=4, grammar=GOOD)
    deaths = [die(scene, overlap=overlap) for _ in range(5)]
    assert [grammars.marks for grammars in deaths] == [
        [], [False], [False, True], [False, True, True], [False, True, True, True]
    ], "the log says before each compilation, but for the first, who may die of it"  # fmt: skip
    assert [grammars.beside[-1] for grammars in deaths[2:]] == [0, 0, 0], "alone means alone"
    with life(scene, overlap=overlap) as (running, grammars):
        until(lambda: scene.have_ended(deadly, plain, good) and scene.is_consumed)
        assert not running.errors and DEADLY not in grammars.begun
    assert failure(scene, deadly) == "poisonous"
    assert scene.tokens(plain) == [21, 22, 23, 24] and scene.tokens(good) == [31, 32, 33, 34]
    assert isinstance(scene.history(plain)[-1], Finished) and isinstance(scene.history(good)[-1], Finished)
    (letter,) = scene.log.dead_letters(9)
    assert (letter.fields["uid"], letter.fields["deaths"]) == (deadly, "5")


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_says_once_that_it_took_a_request_with_a_grammar_over(scene: Scene, overlap: bool) -> None:
    """Before it compiles the grammar, and not again before it computes the first token."""
    uid = scene.send(10, max_tokens=30, grammar=GOOD)
    engine = CountingEngine(0.001)
    engine.closes_after = 5
    with life(scene, engine=engine, overlap=overlap) as (running, _):
        until(lambda: not engine.gate.is_set())
        running.stop.set()
        engine.gate.set()
    made = len(scene.tokens(uid))
    assert 0 < made < 30
    other = scene.send(50, max_tokens=30)
    with life(scene, overlap=overlap) as (running, grammars):
        grammars.gate.clear()
        until(lambda: len(scene.takeovers(uid)) == 1)
        until(lambda: len(scene.tokens(other)) > 3)
        assert len(scene.tokens(uid)) == made, "its grammar is compiled still"
        grammars.gate.set()
        until(lambda: scene.have_ended(uid, other))
        assert not running.errors
    assert scene.tokens(uid) == list(range(11, 41)) and scene.tokens(other) == list(range(51, 81))
    assert [(n, event.alone) for n, event in scene.takeovers(uid)] == [(made, False)]


def suspects(scene: Scene, *grammars: str) -> list[str]:
    """Return requests with these grammars that two engines had in hand that died while they compiled another."""
    uids = [scene.send(10 + 30 * at, max_tokens=20, grammar=grammar) for at, grammar in enumerate(grammars)]
    killer = scene.send(150, max_tokens=1, grammar=DEADLY)
    for _ in range(2):
        die(scene)
    scene.log.end(killer, Cancelled(by="client"), frontend="web-0")
    for uid in uids:
        past = past_of(uid, scene.log.histories([uid])[0])
        assert past is not None and past.num_taken_over == 1
    return uids


def test_a_suspect_whose_grammar_is_harmless_ends_well_alone(scene: Scene) -> None:
    first, second = suspects(scene, GOOD, GOOD)
    with life(scene) as (running, grammars):
        grammars.gate.clear()
        until(lambda: grammars.begun)
        new = scene.send(100, max_tokens=3, grammar=GOOD)
        until(lambda: len(scene.in_hand()) == 3)
        assert grammars.begun == [GOOD], "nothing is compiled beside the first"
        grammars.gate.set()
        until(lambda: scene.have_ended(first, second, new) and scene.is_consumed)
        assert not running.errors and running.schedule.free_pages == 64
    assert scene.tokens(first) == list(range(11, 31)) and scene.tokens(second) == list(range(41, 61))
    assert scene.tokens(new) == [101, 102, 103]
    for uid in (first, second):
        assert [event.alone for _, event in scene.takeovers(uid)] == [False, True]
    assert scene.takeovers(new) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_suspect_that_ends_before_its_grammar_is_compiled_holds_up_nobody(scene: Scene, which: int) -> None:
    uids = suspects(scene, GOOD, GOOD)
    with life(scene) as (running, grammars):
        grammars.gate.clear()
        until(lambda: grammars.begun)
        assert scene.log.end(uids[which], Cancelled(by="client"), frontend="web-0")
        until(lambda: len(scene.in_hand()) == 1)
        grammars.gate.set()
        until(lambda: scene.have_ended(*uids) and scene.is_consumed)
        assert not running.errors and running.schedule.free_pages == 64
    assert scene.tokens(uids[1 - which]) == list(range(11 + 30 * (1 - which), 31 + 30 * (1 - which)))
    assert scene.tokens(uids[which]) == []


def test_a_suspect_with_a_grammar_that_comes_while_a_step_is_in_flight_runs_alone(scene: Scene) -> None:
    """With overlap, streams have a step in flight when the requests of a dead engine arrive."""
    (uid,) = suspects(scene, GOOD)
    with life(scene, 1, engine=CountingEngine(0.02), overlap=True) as (running, _):
        stream = scene.send(80, max_tokens=60)
        until(lambda: (scene.have_ended(uid, stream) and scene.is_consumed) or running.errors)
        assert not running.errors and running.schedule.free_pages == 64
    assert scene.tokens(uid) == list(range(11, 31)) and scene.tokens(stream) == list(range(81, 141))
    assert [event.alone for _, event in scene.takeovers(uid)] == [False, True]
    assert any(isinstance(event, Preempted) for event in scene.history(stream)), "it came while the stream ran"


def test_new_grammars_do_not_hold_up_a_suspect(scene: Scene) -> None:
    """One is compiled when the suspect comes. A later one waits until the suspect has run alone."""
    (uid,) = suspects(scene, GOOD)
    with life(scene, 1) as (running, grammars):
        grammars.gate.clear()
        first = scene.send(50, max_tokens=3, grammar="first")
        until(lambda: grammars.begun and uid in scene.in_hand("generate-1"))
        second, plain = scene.send(60, max_tokens=3, grammar="second"), scene.send(70, max_tokens=3)
        until(lambda: scene.have_ended(plain))  # so the engine has heard of the second one
        assert grammars.begun == ["first"]
        grammars.gate.set()
        until(lambda: scene.have_ended(uid, first, second) and scene.is_consumed)
        assert not running.errors and grammars.begun == ["first", GOOD, "second"]
    assert [event.alone for _, event in scene.takeovers(uid)] == [False, True]
    assert scene.tokens(second) == [61, 62, 63]
