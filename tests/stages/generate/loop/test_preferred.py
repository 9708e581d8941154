"""Engines that requests prefer: what an engine publishes for that, and when another one takes its requests."""

from __future__ import annotations

import dataclasses

import pytest
from support.engine_rig import LIMITS, LONG_LIMITS, CountingEngine, Scene, detokenizing
from support.redis_servers import until

from pipeline.events import Admitted
from pipeline.prefixes import prompt_digests, unpacked
from pipeline.stage.slots import read_statuses
from stages.generate.kvcache.radix import RadixCache

pytestmark = pytest.mark.parametrize("another_log", ["redis"], indirect=True)


def engine_of(scene: Scene, uid: str) -> str:
    return next(event.engine for event in scene.history(uid) if isinstance(event, Admitted))


def test_an_engine_publishes_its_prefixes_and_what_it_does_not_compute_soon(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.generate.loop.worker.PUBLISH_EVERY_S", 0.01)
    prompt = tuple(range(50))
    with scene.running(cache=RadixCache(64, 4), limits=LONG_LIMITS) as running:
        scene.send(*prompt, max_tokens=4)
        until(lambda: prompt_digests((*prompt, 50), 4, "rig")[-1] in unpacked(running.slot_lease.status.cached))
        until(lambda: read_statuses(scene.log, "generate")[0].page_size == 4)
        assert running.slot_lease.status.backlog == 0
        running.engine.gate.clear()
        scene.send(*range(100, 10, -1), max_tokens=1)
        left = 90 - LONG_LIMITS.max_prefill_length
        until(lambda: sum(left for _, left in running.schedule.work.prompts) == left)
        running.worker._num_left = 0
        for backlog in (0, left):
            running.worker._published_s = 0.0
            running.worker._publish_cache()
            assert running.slot_lease.status.backlog == backlog


def test_an_idle_engine_takes_what_prefers_another_while_that_has_no_room(scene: Scene) -> None:
    limits = dataclasses.replace(LIMITS, max_running_requests=1)
    busy = CountingEngine()
    busy.gate.clear()
    with (
        detokenizing(scene, 0, 1),
        scene.running(engine=busy, limits=limits, heard=False),
        scene.running(slot=1, heard=False),
    ):
        first = scene.send(1, max_tokens=2, prefer="generate-0")
        until(lambda: scene.in_hand() == [first])
        second = scene.send(1, max_tokens=2, prefer="generate-0")
        until(lambda: scene.have_ended(second))
        busy.gate.set()
        until(lambda: scene.have_ended(first))
        third = scene.send(1, max_tokens=2, prefer="generate-0")
        until(lambda: scene.have_ended(third))
        assert [engine_of(scene, uid) for uid in (first, second, third)] == ["generate-0", "generate-1", "generate-0"]


def test_an_engine_without_a_detokenizer_has_no_room(scene: Scene) -> None:
    with detokenizing(scene, 1), scene.running(heard=False), scene.running(slot=1, heard=False):
        uid = scene.send(1, max_tokens=2, prefer="generate-0")
        until(lambda: scene.have_ended(uid))
        assert engine_of(scene, uid) == "generate-1"


def test_no_request_waits_longer_for_its_engine_than_it_may(scene: Scene) -> None:
    """The engine has its slot, and takes nothing."""
    scene.log.acquire("generate-0", "it stands still", 60_000)
    with detokenizing(scene, 1), scene.running(slot=1, heard=False, steal_after_s=0.3):
        uid = scene.send(1, max_tokens=2, prefer="generate-0")
        until(lambda: scene.have_ended(uid))
        assert engine_of(scene, uid) == "generate-1"
