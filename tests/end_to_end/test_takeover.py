"""Two workers of each stage, as commands of their own: one dies or stands still, and the other goes on in its place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from support.redis_servers import find_servers, running_server
from support.selection import AT_NIGHT, by_night, rest_at_night
from support.servers import Command, Server, eventually, free_port, is_alive, run_command, wait_until_ready
from support.streams import (
    BURST,
    PROMPTS,
    Stream,
    answers_of,
    assert_nothing_is_left,
    assert_whole,
    burst,
    engines_of,
    events_of,
    uids_of,
)

from ops.bench.models import nonsense
from pipeline.events import Admitted, TakenOver
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB
from pipeline.stage.slots import Status, read_statuses

pytestmark = pytest.mark.slow

LEASE_S = 1.0
PAUSE_S = 12.0
"""Longer than the lease and every time-out."""
EACH = (TOKENIZE, GENERATE, DETOKENIZE)
TWICE = by_night((GENERATE,), EACH)
"""Of these there are two commands."""


@dataclass
class Stages:
    """The commands of all stages, and who runs in them."""

    url: str
    folder: Path
    redis: psutil.Process
    redis_url: str
    commands: dict[str, list[Command]] = field(default_factory=dict)

    @property
    def server(self) -> Server:
        return Server(self.commands[WEB][0], self.url, self.redis_url)

    def start(self, stage: str, *flags: str) -> None:
        arguments = ["stage", stage, "--redis-url", self.redis_url, "--lease", str(LEASE_S), *flags]
        if stage != WEB:
            arguments += ["--model", str(nonsense(self.folder))]
        self.commands.setdefault(stage, []).append(run_command(arguments, self.folder / stage))

    def stop(self) -> None:
        for command in self.all_commands:
            command.stop()

    @property
    def all_commands(self) -> list[Command]:
        return [command for several in self.commands.values() for command in several]

    def statuses(self, stage: str) -> dict[int, Status]:
        """Return pid -> status of the workers that hold a slot."""
        with self.server.log() as log:
            return {status.pid: status for status in read_statuses(log, stage) if status.owner}

    def worker_in(self, slot: str) -> psutil.Process:
        stage = slot.partition("-")[0]
        (pid,) = (pid for pid, status in self.statuses(stage).items() if status.slot == slot)
        return psutil.Process(pid)

    def command_of(self, worker: psutil.Process) -> Command:
        return next(command for command in self.all_commands if worker in command.processes())


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    folder = tmp_path_factory.mktemp("stages")
    servers = find_servers()
    with running_server(next(iter(servers.values())), folder) as redis:
        port = free_port()
        stages = Stages(f"http://127.0.0.1:{port}", folder, psutil.Process(redis.process.pid), redis.url)
        try:
            stages.start(WEB, "--port", str(port))
            for stage in (*EACH, *TWICE):
                stages.start(stage)
            wait_until_ready(stages.url, stages.all_commands)
            eventually(lambda: all(len(stages.statuses(stage)) == 2 for stage in TWICE), "two workers of each stage")
            yield stages
        finally:
            stages.stop()


@pytest.fixture(scope="module")
def undisturbed(stages: Stages) -> dict[str, tuple[str, str]]:
    return {stream.prompt: stream.answer for stream in ask(stages)}


def ask(stages: Stages) -> list[Stream]:
    """Send greedy and seeded requests, half of each."""
    sampled = {"temperature": 1.0, "seed": 7}
    return [Stream(stages.server, prompt, **(sampled if index % 2 else {})) for index, prompt in enumerate(PROMPTS)]


def begun(stages: Stages) -> list[Stream]:
    return [stream.begun() for stream in ask(stages)]


def engines(stages: Stages, streams: list[Stream]) -> set[str]:
    """Return the engines that have taken one of *streams*."""
    with stages.server.log() as log:
        events = [event for stream in streams for event in events_of(log, stream.uid)]
    return {event.engine for event in events if isinstance(event, Admitted)}


def takeovers(log: RedisLog, stream: Stream) -> set[str]:
    return {event.engine for event in events_of(log, stream.uid) if isinstance(event, TakenOver)}


def assert_all_is_whole(stages: Stages, streams: list[Stream], undisturbed: dict[str, tuple[str, str]]) -> None:
    for stream in streams:
        assert stream.answer == undisturbed[stream.prompt]
    with stages.server.log() as log:
        assert_whole(log, streams)
        assert_nothing_is_left(log, "generate-0", "generate-1")


def test_both_engines_share_the_work(stages: Stages, undisturbed: dict[str, tuple[str, str]]) -> None:
    both, streams = {"generate-0", "generate-1"}, begun(stages)
    while engines(stages, streams) != both and len(streams) < 5 * len(PROMPTS):  # few may all meet one that is free
        streams += begun(stages)
    assert_all_is_whole(stages, streams, undisturbed)
    assert engines(stages, streams) == both


def test_both_engines_share_a_burst(stages: Stages) -> None:
    with burst(stages.server, 16) as coming, stages.server.log() as log:
        answers_of(coming)
        taken = engines_of(log, uids_of(coming))
    # How evenly is a matter of time: test_engines counts that over five bursts.
    assert sum(taken.values()) == BURST and min(taken["generate-0"], taken["generate-1"]) >= 1, taken


def test_when_redis_stands_still_nobody_takes_over_from_the_living(
    stages: Stages, undisturbed: dict[str, tuple[str, str]]
) -> None:
    """All leases run out meanwhile; who comes first afterwards must not take the others for dead."""
    before = {stage: {pid: status.owner for pid, status in stages.statuses(stage).items()} for stage in EACH}
    streams = begun(stages)
    stages.redis.suspend()
    try:
        time.sleep(PAUSE_S)  # the one thing here that is a matter of time
    finally:
        stages.redis.resume()
    assert_all_is_whole(stages, streams, undisturbed)
    with stages.server.log() as log:
        assert not any(takeovers(log, stream) for stream in streams)
    after = {stage: {pid: status.owner for pid, status in stages.statuses(stage).items()} for stage in EACH}
    assert after == before


def has_requests(stages: Stages, engine: str) -> bool:
    with stages.server.log() as log:
        return log.in_hand(Inbox.tokenized(log.names)).get(engine, 0) > 0


@pytest.mark.parametrize("stage", rest_at_night([GENERATE, DETOKENIZE]))
def test_a_worker_that_stands_still_is_replaced_and_comes_back_in_the_same_process(
    stage: str, stages: Stages, undisturbed: dict[str, tuple[str, str]]
) -> None:
    before = set(stages.statuses(stage))
    while True:
        streams = begun(stages)
        slot, other = (f"{stage}-0", f"{stage}-1")
        if stage == GENERATE and slot not in engines(stages, streams):
            slot, other = other, slot  # it has taken all of them
        worker = stages.worker_in(slot)
        worker.suspend()
        if stage != GENERATE or has_requests(stages, slot):
            break
        worker.resume()  # it was faster
        assert_all_is_whole(stages, streams, undisturbed)
    try:
        assert_all_is_whole(stages, streams, undisturbed)
    finally:
        worker.resume()
    if stage == GENERATE:
        with stages.server.log() as log:
            assert {engine for stream in streams for engine in takeovers(log, stream)} == {other}
    eventually(
        lambda: {s.slot for s in stages.statuses(stage).values()} == {f"{stage}-0", f"{stage}-1"}, "both are back"
    )
    assert set(stages.statuses(stage)) == before
    if AT_NIGHT:  # by day the next test asks
        assert_all_is_whole(stages, begun(stages), undisturbed)


@pytest.mark.night  # by day one that stands still is replaced
@pytest.mark.parametrize("stage", [GENERATE, DETOKENIZE, TOKENIZE])
def test_a_machine_that_is_gone_for_good_leaves_its_work_to_the_other(
    stage: str, stages: Stages, undisturbed: dict[str, tuple[str, str]]
) -> None:
    """Its supervisor dies with it, so nobody restarts the worker."""
    streams = begun(stages)
    worker = stages.worker_in(f"{stage}-0")
    command = stages.command_of(worker)
    command.process.kill()
    command.process.wait()
    eventually(lambda: not is_alive(worker), "the worker ends with it")
    assert_all_is_whole(stages, streams, undisturbed)
    if AT_NIGHT:
        assert_all_is_whole(stages, begun(stages), undisturbed)
    stages.commands[stage].remove(command)
    stages.start(stage)
    slots = {f"{stage}-0", f"{stage}-1"}
    eventually(lambda: {s.slot for s in stages.statuses(stage).values()} == slots, "another machine takes its place")
    assert_all_is_whole(stages, begun(stages), undisturbed)
