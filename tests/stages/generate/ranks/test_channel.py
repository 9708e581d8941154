"""Frames reach the other ranks, silence is bridged, and a rank that is gone is noticed."""

from __future__ import annotations

import queue
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.gloo_rank import connected, fail, memory_store, plan_of
from support.selection import by_night, rest_at_night

from pipeline.errors import RankLost
from stages.generate.ranks.channel import Follower, Leader, connect, file_store, least
from stages.generate.ranks.frame import LONG_LIST, NOTHING, SIZE, Kind, Reader
from stages.generate.schedule.plan import NOT_A_NUMBER, BatchPlan

ROOT = Path(__file__).parents[4]
SOON_S = 0.01
LITTLE_S = 0.3
TIMEOUT_S = by_night(2.0, 5.0)
ECHO = """
import sys
from pathlib import Path
from stages.generate.ranks.channel import Follower, Leader, connect, file_store
from stages.generate.ranks.frame import Kind
folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
follower = Follower(connect(file_store(folder / "there", 2), 1, 2), timeout_s=timeout_s)
back = connect(file_store(folder / "back", 2), 0, 2)
leader = Leader(back, print, idle_s=timeout_s / 8, timeout_s=timeout_s)
while (heard := follower.receive())[0] is not Kind.STOP:
    with leader.computing(heard[1]):
        pass
leader.leave()
"""
"""Another process, which sends every plan back."""


PLANS = (plan_of(1), plan_of(2, 2 * SIZE), plan_of(3, 1, 2 * LONG_LIST), plan_of(4, 2 * SIZE, 2 * SIZE), plan_of(5))


def send(leader: Leader, *plans: BatchPlan) -> None:
    for plan in plans:
        with leader.computing(plan):
            pass


class Ears:
    """Receives in a thread, as a follower between its steps does."""

    def __init__(self, follower: Follower) -> None:
        self.heard = queue.Queue[BatchPlan | RankLost | None]()
        threading.Thread(target=self._listen, args=(follower,), daemon=True).start()

    def _listen(self, follower: Follower) -> None:
        kind = Kind.IDLE
        while kind is not Kind.STOP:
            try:
                kind, plan = follower.receive()
            except RankLost as error:
                self.heard.put(error)
                return
            self.heard.put(None if kind is Kind.STOP else plan)

    def hear(self) -> BatchPlan | RankLost | None:
        return self.heard.get(timeout=60)


class Noted:
    """In place of a group: notes what is sent, or refuses it as gloo does."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.error: Exception | None = None
        """What a send raises that gloo does not."""
        self.kinds: list[Kind] = []
        self.changed = threading.Condition()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Noted:
        (ints,) = tensors
        if self.error is not None:
            raise self.error
        with self.changed:
            self.kinds.append(Reader().read(ints.numpy())[0])
            self.changed.notify_all()
        return self

    def wait(self) -> None:
        if self.refusal:
            raise RuntimeError(self.refusal)

    def wait_for(self, reached: Callable[[list[Kind]], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: reached(self.kinds), 20), self.kinds


def test_every_rank_gets_the_plans_in_their_order() -> None:
    first, *others = connected(3)
    ears = [Ears(Follower(group)) for group in others]
    leader = Leader(first, fail)
    send(leader, *PLANS)
    leader.leave()
    for each in ears:
        assert [each.hear() for _ in range(len(PLANS) + 1)] == [*PLANS, None]


def test_ranks_of_one_machine_listen_at_the_loopback_address_alone() -> None:
    def listening() -> set[str]:
        return {at.laddr.ip for at in psutil.Process().net_connections("tcp") if at.status == psutil.CONN_LISTEN}

    before = listening()
    groups = connected(2)
    assert listening() - before <= {"127.0.0.1"} <= listening()
    assert len(groups) == 2


def test_the_store_of_one_machine_is_for_its_owner_alone(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store", 2)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o600
    store.set("a", "1")
    assert file_store(tmp_path / "store", 2).get("a") == b"1"


def test_a_rank_that_does_not_come_is_told() -> None:
    with pytest.raises(RankLost, match="rank 0 of 2"):
        connect(memory_store(), 0, 2, patience_s=0.1)


def test_rank_0_is_never_silent_while_nothing_is_computed_and_sends_nothing_while_it_computes() -> None:
    group = Noted()
    leader = Leader(group, fail, idle_s=SOON_S)
    group.wait_for(lambda kinds: kinds.count(Kind.IDLE) >= 2)
    with leader.computing(plan_of(1)):
        assert group.kinds[-1:] == [Kind.STEP]
        before = len(group.kinds)
        threading.Event().wait(10 * SOON_S)
        assert len(group.kinds) == before
    group.wait_for(lambda kinds: kinds[before:].count(Kind.IDLE) >= 2)
    leader.leave()
    assert group.kinds[-1:] == [Kind.STOP]
    assert not any(thread.name == "ranks" and thread is leader._thread for thread in threading.enumerate())


def test_steps_need_no_frames_between_them() -> None:
    group = Noted()
    leader = Leader(group, fail, idle_s=60)
    send(leader, *(plan_of(step) for step in range(20)))
    leader.leave()
    assert group.kinds == [Kind.STEP] * 20 + [Kind.STOP]


def test_a_lost_rank_is_told_in_one_line_while_rank_0_waits_and_when_it_computes() -> None:
    group, told = Noted(), queue.Queue[RankLost]()
    leader = Leader(group, told.put, idle_s=SOON_S)
    group.refusal = (
        "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5. "
        "This is typically caused by a remote worker crashing. Check the logs of the remote worker."
    )
    line = "another rank of the engine is gone: Connection closed by peer [127.0.0.1]:5"
    assert str(told.get(timeout=20)) == line
    with pytest.raises(RankLost) as lost, leader.computing(plan_of(1)):
        pass
    assert str(lost.value) == line


def test_any_error_of_the_thread_that_keeps_the_ranks_waiting_is_told() -> None:
    group, told = Noted(), queue.Queue[RankLost]()
    group.error = MemoryError("no memory")
    Leader(group, told.put, idle_s=SOON_S)
    assert "no memory" in str(told.get(timeout=20))


def test_a_step_at_which_rank_0_fails_ends_the_ranks() -> None:
    leader = Leader(Noted(), fail, idle_s=60)
    with pytest.raises(RankLost, match=r"rank 0 .*no memory"), leader.computing(plan_of(1)):
        raise MemoryError("no memory")
    with pytest.raises(RankLost, match="rank 1"), leader.computing(plan_of(1)):
        raise RankLost("rank 1 is gone")
    leader.leave()


def test_what_replaces_placeholders_follows_a_plan_or_the_ranks_drop_it() -> None:
    first, second = connected(2)
    leader, follower, told = Leader(first, fail), Follower(second), list[object]()

    def follow() -> None:
        for num_tokens in (3, 0, 2):
            told.append((follower.receive(), follower.receive_tokens(num_tokens)))
        told.extend(follower.receive() for _ in range(2))

    thread = threading.Thread(target=follow)
    thread.start()
    for step, token_ids in ((1, [5, NOT_A_NUMBER, 7]), (2, []), (3, None)):
        with leader.computing(plan_of(step), Kind.NEXT):
            leader.tell_tokens(2 if token_ids is None else len(token_ids), token_ids)
    with leader.computing(NOTHING, Kind.LAND):
        pass
    leader.leave()
    thread.join(60)
    assert told == [
        ((Kind.NEXT, plan_of(1)), [5, NOT_A_NUMBER, 7]),
        ((Kind.NEXT, plan_of(2)), []),
        ((Kind.NEXT, plan_of(3)), None),
        (Kind.LAND, NOTHING),
        (Kind.STOP, NOTHING),
    ]


def test_ranks_wait_for_each_others_load_for_longer_than_for_anything_else() -> None:
    groups, slow = connected(2, patience_s=LITTLE_S), list[int]()

    def load() -> None:
        threading.Event().wait(2 * LITTLE_S)
        slow.append(least(groups[1], 5, 60))

    thread = threading.Thread(target=load)
    thread.start()
    assert least(groups[0], 7, 60) == 5
    thread.join(60)
    assert slow == [5]


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "stores").mkdir()
    command = [sys.executable, "-c", ECHO, str(tmp_path / "stores"), str(TIMEOUT_S)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("death", rest_at_night([signal.SIGKILL, signal.SIGSTOP, None], first=0))
def test_two_processes_stay_together_through_silence_until_one_is_gone(
    echo: subprocess.Popen[bytes], tmp_path: Path, death: signal.Signals | None
) -> None:
    stores, lost = tmp_path / "stores", queue.Queue[RankLost]()
    there = connect(file_store(stores / "there", 2), 0, 2)
    leader = Leader(there, lost.put, idle_s=TIMEOUT_S / 8, timeout_s=TIMEOUT_S)
    ears = Ears(Follower(connect(file_store(stores / "back", 2), 1, 2), timeout_s=TIMEOUT_S))
    for plan in PLANS:
        send(leader, plan)
        assert ears.hear() == plan
    threading.Event().wait(1.6 * TIMEOUT_S)
    send(leader, plan_of(6))
    assert ears.hear() == plan_of(6)
    if death is None:
        leader.leave()
        assert ears.hear() is None
        assert echo.wait(20) == 0
        return
    echo.send_signal(death)
    for told in (ears.hear(), lost.get(timeout=60)):
        assert ("Timed out waiting" if death is signal.SIGSTOP else "Connection") in str(told)
    with pytest.raises(RankLost):
        send(leader, plan_of(7))
