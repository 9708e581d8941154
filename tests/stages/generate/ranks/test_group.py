"""The ranks of one start of an engine find each other by the log, and rank 0 sees who is gone."""

from __future__ import annotations

import contextlib
import queue
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from support.memory_log.log import MemoryLog
from support.redis_servers import until

from pipeline.errors import ConfigError, LogUnavailable, RankLost
from pipeline.flags import parse_config
from pipeline.log.protocol import Owner
from pipeline.log.ranks import Formation
from pipeline.names import Names
from pipeline.stage.slots import Status, acquire_slot, read_statuses
from pipeline.stage.worker import Stop
from stages.generate.ranks import group as group_module
from stages.generate.ranks import worker
from stages.generate.ranks.channel import LOOPBACK, least
from stages.generate.ranks.group import RankSlot, RankWatch, Terms, ack, formation_of, formed, joined
from stages.generate.ranks.links import connect_links
from stages.generate.ranks.stores import reached_store
from stages.generate.setup.config import GenerateConfig

TERMS = Terms("f1", "1.0", "float32")
LEASE_MS = 90


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(Names())


@contextlib.contextmanager
def slot_of(log: MemoryLog, rank: int, *, group: str = "g", lease_ms: int = LEASE_MS) -> Iterator[RankSlot]:
    slot = RankSlot(lambda: log, rank, lease_ms, 0)
    slot.say(group=group, num_ranks=2)
    try:
        yield slot
    finally:
        slot.leave()


def owner_of(slot: RankSlot) -> Owner:
    owner = slot.owner(Stop())
    assert owner is not None
    return owner


def take_from(log: MemoryLog, owner: Owner) -> None:
    """Let another process have a slot for a moment."""
    log.release(owner)
    assert log.acquire(owner.slot, "somebody", 1) is not None


@pytest.mark.parametrize("address", ["", "127.0.0.3"])
def test_ranks_find_each_other_and_leave_no_file_and_no_port(log: MemoryLog, address: str) -> None:
    stores = list[str]()
    least_of: list[int] = []

    def follow() -> None:
        with slot_of(log, 1) as slot:
            found = formation_of(log, slot, "g", 1, TERMS, Stop())
            assert found is not None
            owner, entry, formation = found
            stores.append(formation.store)
            links = joined(formation, 1, connect)
            least_of.append(least(links.frames, 7, 20))
            ack(log, owner, "g", entry)
            assert formation_of(log, slot, "g", 1, TERMS, _soon()) is None, "it joins once"

    connect = partial(connect_links, device=torch.device("cpu"), address=address or LOOPBACK)
    before = set(listens())
    thread = threading.Thread(target=follow)
    thread.start()
    with (
        slot_of(log, 0) as slot,
        formed(log, owner_of(slot), "g", 2, TERMS, connect, nonce="n", address=address) as links,
    ):
        least_of.append(least(links.frames, 9, 20))
        opened = set(listens()) - before
        assert {ip for ip, _ in opened} == {address or "127.0.0.1"}
    thread.join(30)
    assert least_of == [7, 7]
    (store,) = stores
    if address:
        assert store.startswith(f"tcp://{address}:")
        assert (address, int(store.rpartition(":")[2])) in opened - set(listens()), "the port is closed"
    else:
        assert Path(store).readlink().name.startswith("memfd:minisgl-ranks"), "it ends with this process"
        assert not Path(store).parent.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), "it is for this user alone"
        store += "0000"
    with pytest.raises(RankLost, match="rank 0"):
        reached_store(store, 2)


def listens() -> list[tuple[str, int]]:
    """Return where this process listens, as /proc/net/tcp has it."""
    found = psutil.Process().net_connections("inet")
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


def test_a_rank_0_that_lost_its_slot_forms_no_group_and_says_so(log: MemoryLog) -> None:
    owner = acquire_slot(log, "rank-0", LEASE_MS)
    take_from(log, owner)
    connect = partial(connect_links, device=torch.device("cpu"))
    with (
        pytest.raises(RankLost, match="rank-0"),
        formed(log, owner, "g", 2, TERMS, connect, nonce="n"),
    ):
        pass


def _soon() -> Stop:
    """Return a stop that comes at the first wait."""
    stop = Stop()
    threading.Timer(0.3, stop.set).start()
    return stop


@pytest.mark.parametrize("flags", [["--tp", "2"], ["--tp", "2", "--group", "g", "--rank", "2"]])
def test_a_rank_that_somebody_starts_by_hand_is_refused(log: MemoryLog, flags: list[str]) -> None:
    config = parse_config("stage generate", GenerateConfig, ["--slot", "0", *flags], {})
    with pytest.raises(ConfigError, match=r"--slot.*--tp 2"):
        worker.run(config, lambda: log, Path())


@pytest.mark.parametrize("what", ["fingerprint", "version", "settings"])
def test_a_rank_that_differs_from_rank_0_says_both(what: str) -> None:
    formation = Formation(Owner("rank-0-0", 1, "x"), "n", 2, "s", "f1", "1.0", "float32")
    TERMS.check(formation, 1)
    with pytest.raises(ConfigError, match=rf"mine.*{getattr(formation, what)}"):
        replace(TERMS, **{what: "mine"}).check(formation, 1)


def test_of_long_settings_only_what_differs_is_named() -> None:
    settings = "bfloat16/none/avx512/1/64/torch-2.13.0 page size 64 requests 256"
    mine = settings.replace("bfloat16", "float32").replace("requests 256", "requests 8")
    formation = Formation(Owner("rank-0-0", 1, "x"), "n", 2, "s", "f1", "1.0", settings)
    with pytest.raises(ConfigError, match=r"float32, 8,.*bfloat16, 256"):
        replace(TERMS, settings=mine).check(formation, 1)
    with pytest.raises(ConfigError, match=f"{settings}/more.*{settings}"):
        replace(TERMS, settings=f"{settings}/more").check(formation, 1)


def test_a_rank_that_lost_its_slot_takes_another_and_says_the_same(log: MemoryLog) -> None:
    with slot_of(log, 1) as slot:
        before = owner_of(slot)
        slot.say(phase="ready")
        take_from(log, before)
        until(lambda: owner_of(slot) != before)
        until(lambda: read_statuses(log, "rank-1")[0].owner == str(owner_of(slot)))
        until(lambda: read_statuses(log, "rank-1")[0].phase == "ready")
        (status,) = read_statuses(log, "rank-1")
        assert (status.slot, status.group, status.num_ranks) == ("rank-1-0", "g", 2)
    assert log.lease("rank-1-0").is_free


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[RankLost]:
    """What rank 0 is told, soon after a rank is gone."""
    monkeypatch.setattr(group_module, "AWAY_S", 0.5)
    monkeypatch.setattr(group_module, "LOOK_EVERY_S", 0.01)
    return queue.SimpleQueue()


def test_rank_0_sees_that_a_rank_stands_still(log: MemoryLog, lost: queue.SimpleQueue[RankLost]) -> None:
    owner = acquire_slot(log, "rank-1", LEASE_MS)
    with slot_of(log, 2), slot_of(log, 1, group="another"):
        log.renew(owner, LEASE_MS, _status(owner))
        watch = RankWatch(lambda: log, "g", [1, 2], lost.put)
        assert "rank 1" in str(lost.get(timeout=20))
        watch.leave()
    assert lost.empty()


def test_rank_0_waits_for_a_rank_that_asks_for_its_slot_again_and_for_the_log(
    log: MemoryLog, lost: queue.SimpleQueue[RankLost], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    lease = log.lease

    def look(slot: str) -> object:
        looks.append(silent.is_set())
        if silent.is_set():
            raise LogUnavailable("it is away")
        return lease(slot)

    silent = threading.Event()
    with slot_of(log, 1) as slot:
        before = owner_of(slot)
        monkeypatch.setattr(log, "lease", look)
        watch = RankWatch(lambda: log, "g", [1], lost.put)
        take_from(log, before)
        until(lambda: owner_of(slot) != before)
        silent.set()
        until(lambda: looks.count(True) > 70)  # longer than AWAY_S
        silent.clear()
        until(lambda: looks[-10:] == [False] * 10)
        watch.leave()
    assert lost.empty()


@pytest.mark.parametrize("why", ["the log was away", "the ranks load"])
def test_rank_0_is_patient(
    log: MemoryLog, lost: queue.SimpleQueue[RankLost], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    looks: list[str] = []

    def statuses(_: object, stage: str) -> list[Status]:
        looks.append(stage)
        if why == "the log was away" and len(looks) == 1:
            raise LogUnavailable("it is away")
        return []

    monkeypatch.setattr(group_module, "read_statuses", statuses)
    for name in ("RECOVERY_S", "LOADING_AWAY_S"):
        monkeypatch.setattr(group_module, name, float("inf"))
    watch = RankWatch(lambda: log, "g", [1], lost.put, loading=why == "the ranks load")
    until(lambda: len(looks) > 100)  # longer than AWAY_S
    assert lost.empty()
    if why == "the ranks load":
        watch.all_have_loaded()
        assert "rank 1" in str(lost.get(timeout=20))
    watch.leave()


def test_rank_0_does_not_go_on_without_its_watch(
    log: MemoryLog, lost: queue.SimpleQueue[RankLost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "read_statuses", lambda *_: 1 / 0)
    watch = RankWatch(lambda: log, "g", [1], lost.put)
    assert "ZeroDivisionError" in str(lost.get(timeout=20))
    watch.leave()


def _status(owner: Owner) -> str:
    return Status(slot=owner.slot, owner=str(owner), pid=1, host="h", group="g", num_ranks=3).model_dump_json()
