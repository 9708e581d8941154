"""Steps that the journal holds are planned again, and come out the same; or the first difference is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.journalled import POISON, Life, live, run
from support.schedules import TOKEN, request
from support.schedules import steps as plans
from support.selection import by_night

from pipeline.errors import UndecodableEvent
from pipeline.events import SamplingParams
from pipeline.log.journal import JournalStep, steps
from stages.generate.kvcache import make_cache
from stages.generate.kvcache.base import LocalLayers
from stages.generate.loop.log_thread import Arrived, Ended, Update
from stages.generate.schedule.again import Again, StepsMissing, differences
from stages.generate.schedule.recorded import SNAPSHOT_VERSION, RecordedSchedule
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, ScheduleLimits

NUM_STEPS = by_night(500, 5000)
EVERY = by_night(100, 500)
"""Steps from one snapshot to the next."""


CACHES = ["radix", "naive", "radix with local layers", "naive with local layers"]


@pytest.fixture(scope="module", params=CACHES)
def life(request: pytest.FixtureRequest) -> Life:
    return live(request.param, NUM_STEPS, EVERY)


@pytest.fixture
def journal(life: Life) -> list[JournalStep]:
    return list(steps(life.journal()))


def test_the_steps_of_a_life_are_planned_again_from_every_snapshot(life: Life, journal: list[JournalStep]) -> None:
    assert [step.number for step in journal] == [number for number, _ in life.steps]
    assert {row.event.kind for step in journal for row in step.events} == {
        "admitted",
        "preempted",
        "taken_over",
        "failed",
    }
    words = {word.split()[0] for step in journal for word in step.inputs}
    assert words == {"add", "drop", "flush", "alone", "all", "draft", "plan", "complete", "skip", "start"}
    assert any(len({row.uid for row in step.rows}) < len(step.rows) for step in journal), "drafts were right"
    assert any(step.released for step in journal)
    firsts = [at for at, step in enumerate(journal) if step.schedule]
    assert len(firsts) >= NUM_STEPS // EVERY - 2
    for first in firsts:
        for step, different in differences(journal[first:], life.request_of):
            assert not different, f"step {step.id}: {different}"


@pytest.mark.parametrize("cache", CACHES)
def test_steps_that_overlap_are_planned_again(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.generate.schedule.schedule.MANY_STREAMS", 3)  # so that others have no drafts
    life = live(cache, NUM_STEPS, EVERY, overlap=True, seed=4)
    journal = list(steps(life.journal()))
    words = {word.split()[0] for step in journal for word in step.inputs}
    assert words == {"add", "drop", "flush", "alone", "all", "draft", "plan", "no", "complete", "skip", "start"}
    assert any(len(word.split()) == 2 for step in journal for word in step.inputs if word.startswith("plan "))
    for first in (at for at, step in enumerate(journal) if step.schedule):
        for step, different in differences(journal[first:], life.request_of):
            assert not different, f"step {step.id}: {different}"


def changed(journal: list[JournalStep], at: int, **fields: Any) -> list[JournalStep]:
    return [*journal[:at], dataclasses.replace(journal[at], **fields), *journal[at + 1 :]]


def first_difference(journal: list[JournalStep], life: Life) -> tuple[str, str]:
    *_, (step, different) = differences(journal, life.request_of)
    return step.id, different


def test_the_first_step_that_is_planned_differently_is_told(life: Life, journal: list[JournalStep]) -> None:
    at = next(
        at
        for at, step in enumerate(journal)
        if at > 50 and len(step.rows) > 2 and not step.rows[0].end and step.rows[0].uid != step.rows[1].uid
        if all(word.startswith("draft ") for word in step.inputs)
    )
    step, rows = journal[at], journal[at].rows
    figures = step.figures
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rows": rows[1:]}, "the rows: ("),
        ({"rows": (rows[0]._replace(n=99), *rows[1:])}, "the tokens: (("),
        ({"rows": (rows[0]._replace(end="stop"), *rows[1:])}, "the tokens: (("),
        ({"inputs": ("flush", "drop nobody", f"drop {rows[0].uid}")}, "the rows: ("),
        ({"figures": figures.model_copy(update={"free_pages": 99})}, "running, waiting and free pages: ("),
        ({"figures": figures.model_copy(update={"prefill_tokens": 77})}, "decode rows, drafts, prefill rows and pre"),
    )
    for fields, said in cases:
        found, different = first_difference(changed(journal, at, **fields), life)
        assert (found, different[: len(said)]) == (step.id, said)
    chunked = next(at for at, step in enumerate(journal) if step.chunks and step.rows)
    assert first_difference(changed(journal, chunked, chunks=()), life)[1].startswith("the chunks of prompts: (")


def test_a_lost_step_is_told(life: Life, journal: list[JournalStep]) -> None:
    gone = journal.pop(60)
    with pytest.raises(StepsMissing, match=gone.id):
        list(differences(journal, life.request_of))


def test_a_state_that_differs_is_found_at_the_next_snapshot(life: Life, journal: list[JournalStep]) -> None:
    at = next(at for at, step in enumerate(journal) if at and step.schedule)
    other = journal[at].schedule.replace('"arrived":', '"arrived":1')
    assert first_difference(changed(journal, at, schedule=other), life)[1].startswith("the arrived of the snapshot: ")


@pytest.mark.parametrize("snapshot", ["", "{}", "[1]", f'{{"v": {SNAPSHOT_VERSION}}}', "nothing"])
def test_a_snapshot_that_does_not_decode_is_an_error(life: Life, journal: list[JournalStep], snapshot: str) -> None:
    with pytest.raises(UndecodableEvent):
        Again(dataclasses.replace(journal[0], schedule=snapshot), life.request_of)


def test_a_snapshot_of_an_engine_that_planned_by_other_rules_is_refused(life: Life, journal: list[JournalStep]) -> None:
    older = journal[0].schedule.replace(f'"v":{SNAPSHOT_VERSION}', '"v":1')
    assert older != journal[0].schedule
    with pytest.raises(UndecodableEvent, match=f"version 1, here {SNAPSHOT_VERSION}"):
        Again(dataclasses.replace(journal[0], schedule=older), life.request_of)


@pytest.mark.parametrize("name", ["radix", "naive"])
def test_a_snapshot_lives_on_with_longer_chunks(name: str) -> None:
    """Local parts are reserved for the longest chunk, so fewer requests may have pages at once than before."""
    local = LocalLayers(2, 8, 16)
    limits = ScheduleLimits(local.capacity(20, 4), 16, 4, max_running_requests=4, vocab_size=1000)
    schedule = RecordedSchedule(make_cache(name, 20, 4, local), limits, [], Identity("generate-0", 1, "w"))
    made = {uid: request(uid, 30, first=100 * int(uid), max_tokens=60, ignore_eos=True) for uid in "0123"}
    for new in made.values():
        schedule.add(new)
    list(plans(schedule, most=8))
    assert schedule.num_running > 1
    again = RecordedSchedule.restored(
        schedule.snapshot(),
        9,
        lambda uid, n: dataclasses.replace(made[uid], output_ids=(TOKEN,) * n),
        max_prefill_length=64,
    )
    assert again.problems() == [] and again.free_pages >= 0
    assert len(list(plans(again))) > 60
    assert again.num_running == again.num_waiting == 0


class Leaves(Life):
    """A request that breaks the engine comes, and leaves while the step that took it over is on its way."""

    def next_update(self, timeout_s: float = 0.0) -> Update | None:
        if not self.came:
            self.came["a"] = NewRequest("a", (5, POISON), (4,), SamplingParams())
            self.made["a"] = [4]
            return Arrived(self.came["a"], resumed=True)
        if len(self.steps) == 1 and self.here != ["left"]:
            self.here = ["left"]
            return Ended("a")
        return None


def test_a_request_that_leaves_before_its_step_fails_is_no_error() -> None:
    life = Leaves(0, num_steps=2)
    assert run(life).num_running == 0
    journal = list(steps(life.journal()))
    assert [step.inputs for step in journal] == [("add 1 2 a", "plan"), ("drop a", "skip", "start over")]
    assert [different for _, different in differences(journal, life.request_of)] == ["", ""]
