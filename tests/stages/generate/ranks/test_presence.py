"""Before a group forms, its ranks see by the log who is there, who is not, and who is there twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from support.memory_log.log import MemoryLog
from support.redis_servers import until

from pipeline.errors import ConfigError, LogUnavailable
from pipeline.names import Names
from pipeline.stage.slots import Status, read_statuses
from pipeline.stage.worker import Stop
from stages.generate.ranks.group import RankSlot, Terms, formation_of
from stages.generate.ranks.presence import Holders, start_of, wait_for_others, wait_until_single

LEASE_MS = 2000
TERMS = Terms("f1", "1.0", "float32")
SAID = {"fingerprint": "f1", "version": "1.0", "settings": "float32"}


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(Names())


@contextlib.contextmanager
def slot_of(log: MemoryLog, rank: int, *, group: str = "g", phase: str = "waiting", **more: str) -> Iterator[RankSlot]:
    slot = RankSlot(lambda: log, rank, LEASE_MS, None)
    slot.say(group=group, num_ranks=3, phase=phase, **more)
    said = (str(slot.owner(Stop())), group, phase)
    until(lambda: said in [(each.owner, each.group, each.phase) for each in read_statuses(log, f"rank-{rank}")])
    try:
        yield slot
    finally:
        slot.leave()


def dead(log: MemoryLog, slot: str, lease_ms: int, *, phase: str = "waiting") -> None:
    """Leave a lease that nobody renews."""
    owner = log.acquire(slot, "dead", lease_ms)
    assert owner is not None
    text = Status(slot=slot, owner=str(owner), pid=1, host="h", group="g", phase=phase).model_dump_json()  # type: ignore[arg-type]
    assert log.renew(owner, lease_ms, text)


def detail_of(log: MemoryLog) -> str:
    return next((status.detail for status in read_statuses(log, "rank-0")), "")


def test_who_holds_a_slot_is_there_and_who_renews_it_lives(log: MemoryLog) -> None:
    holders = Holders(log, "g")
    dead(log, "rank-1-0", 60_000)
    with slot_of(log, 1, group=start_of("g", "n")), slot_of(log, 1, group="g2"):
        seen = dict[str, bool]()

        def look() -> bool:
            seen.update({holder.status.slot: holder.lives for holder in holders.of(1)})
            return any(seen.values())

        until(look)
        assert seen == {"rank-1-0": False, "rank-1-1": True}
    assert [holder.status.slot for holder in holders.of(1)] == ["rank-1-0"], "the other one gave its slot back"


def test_rank_0_waits_for_all_and_says_who_is_missing_for_how_long(log: MemoryLog) -> None:
    now_s = [100.0]
    with slot_of(log, 0, phase="starting") as slot, slot_of(log, 1, phase="loading"), capture_logs() as told:
        args = (log, slot, "g", 4, TERMS.differ, Stop())
        waiting = threading.Thread(target=wait_for_others, args=args, kwargs={"clock_s": lambda: now_s[0]})
        waiting.start()
        until(lambda: "missing for 0 s" in detail_of(log))
        now_s[0] = 112.5
        until(lambda: detail_of(log) == ", ".join(f"rank-{rank} (missing for 12 s)" for rank in (1, 2, 3)))
        with slot_of(log, 1, **SAID), slot_of(log, 2, **SAID | {"fingerprint": "f2"}):
            until(lambda: detail_of(log) == "rank-2 (differs for 12 s), rank-3 (missing for 12 s)")
            now_s[0] = 120.0
            until(lambda: detail_of(log) == "rank-2 (differs for 20 s), rank-3 (missing for 20 s)")
            until(lambda: bool(told))
            assert [line["event"] for line in told] == ["waits_for_ranks"], "once in a minute"
            assert told[0]["ranks"] == ", ".join(f"rank-{rank} (missing for 12 s)" for rank in (1, 2, 3))
            assert waiting.is_alive()
            with slot_of(log, 2, **SAID), slot_of(log, 3, **SAID):
                waiting.join(20)
                assert not waiting.is_alive()
                until(lambda: detail_of(log) == "")


def test_rank_0_waits_for_the_log_and_leaves_at_a_stop(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def away(_: object, stage: str) -> list[Status]:
        looks.append(stage)
        raise LogUnavailable("it is away")

    stop = Stop()
    with slot_of(log, 0) as slot:
        monkeypatch.setattr("stages.generate.ranks.presence.read_statuses", away)
        monkeypatch.setattr("stages.generate.ranks.presence.AGAIN_S", 0.01)
        waiting = threading.Thread(target=wait_for_others, args=(log, slot, "g", 2, TERMS.differ, stop))
        waiting.start()
        until(lambda: len(looks) > 2)
        stop.set()
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_rank_that_differs_from_a_living_rank_0_ends_before_anything_forms(log: MemoryLog) -> None:
    with (
        slot_of(log, 1) as slot,
        slot_of(log, 0, **SAID | {"fingerprint": "f2"}),
        pytest.raises(ConfigError, match=r"rank 1 .*f1.* rank 0 .*f2"),
    ):
        formation_of(log, slot, "g", 1, TERMS, Stop())


@pytest.mark.parametrize("phase", ["starting", "waiting", "ready"])
def test_a_second_process_of_the_same_rank_is_refused_while_the_first_lives(log: MemoryLog, phase: str) -> None:
    refusal = "--node-rank 1: process .* is rank 2 of the group g already; pass another --node-rank, or another --group"
    with (
        slot_of(log, 2, phase=phase, group="g" if phase != "ready" else start_of("g", "n")),
        slot_of(log, 2, phase="starting") as slot,
        pytest.raises(ConfigError, match=refusal),
    ):
        wait_until_single(log, slot, "g", 2, 1, Stop())


def test_of_two_that_start_at_once_the_one_in_the_lower_slot_stays(log: MemoryLog) -> None:
    with slot_of(log, 2, phase="starting") as first:
        with slot_of(log, 2, phase="starting") as second:
            alone = threading.Thread(target=wait_until_single, args=(log, first, "g", 2, 1, Stop()))
            alone.start()
            with pytest.raises(ConfigError, match="rank 2 of the group g"):
                wait_until_single(log, second, "g", 2, 1, Stop())
            assert alone.is_alive(), "it waits for the other one to end"
        alone.join(20)
        assert not alone.is_alive()


def test_the_lease_of_a_dead_process_refuses_nobody(log: MemoryLog) -> None:
    dead(log, "rank-2-0", 400)
    with slot_of(log, 2, phase="starting") as slot, slot_of(log, 2, group="another"):
        wait_until_single(log, slot, "g", 2, 1, Stop())
        assert log.lease("rank-2-0").is_free
