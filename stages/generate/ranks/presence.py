"""Finds out which ranks of a group are there before it forms, by their slots and statuses in the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from pipeline.errors import ConfigError, LogError
from pipeline.log.protocol import Owner
from pipeline.log.redis import RedisLog
from pipeline.names import rank_stage, slot_index
from pipeline.stage.slots import Ends, Status, read_statuses

logger = structlog.get_logger()

LOOK_EVERY_S: Final = 0.05
AGAIN_S: Final = 0.5
"""Pause after an error of the log."""
TOLD_AFTER_S: Final = 10.0
"""Time that ranks may load before a log line names the missing ones."""
TOLD_EVERY_S: Final = 60.0


def start_of(group: str, nonce: str) -> str:
    """Return the name of one start of *group* in the statuses of the ranks that have joined it."""
    return f"{group}/{nonce}"


class RankSlotLike(Protocol):
    """The part of `RankSlot` that this module uses."""

    def owner(self, stop: Ends) -> Owner | None: ...

    def say(self, **changes: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a slot of a rank. A dead one holds it until the lease expires."""

    status: Status
    lives: bool
    """Whether it has renewed its lease since the first look."""


class Holders:
    """The processes that are ranks of a group."""

    def __init__(self, log: RedisLog, group: str) -> None:
        self._log, self._group = log, group
        self._least_ms: dict[str, int] = {}
        """Owner -> shortest remaining time of its lease that was seen."""

    def of(self, rank: int) -> list[Holder]:
        """Return the processes that are *rank*."""
        found = []
        for status in read_statuses(self._log, rank_stage(rank)):
            lease = self._log.lease(status.slot)
            if status.group.partition("/")[0] == self._group and lease.holder == status.owner:
                before_ms = self._least_ms.get(status.owner, lease.ttl_ms)
                self._least_ms[status.owner] = min(before_ms, lease.ttl_ms)
                found.append(Holder(status, lease.ttl_ms > before_ms))
        return found


def wait_until_single(log: RedisLog, slot: RankSlotLike, group: str, rank: int, node: int, stop: Ends) -> None:
    """Return when no other process is *rank* of *group*, or at *stop*. The status of this one must be `starting`.

    If two start at the same time, the one in the lower slot stays.

    Raises:
        ConfigError: Another one lives.
    """
    holders = Holders(log, group)

    def look(owner: Owner) -> bool:
        there = holders.of(rank)
        others = [holder for holder in there if holder.status.owner != str(owner)]
        if len(others) == len(there):
            return False  # others do not see this one yet
        for other in (holder.status for holder in others if holder.lives):
            if other.phase != "starting" or slot_index(other.slot) < slot_index(owner.slot):
                raise ConfigError(
                    f"--node-rank {node}: process {other.pid} of {other.host} is rank {rank} of the group {group} "
                    "already; pass another --node-rank, or another --group for another engine"
                )
        return not others

    _look_until(look, slot, stop)


def wait_for_others(
    log: RedisLog,
    slot: RankSlotLike,
    group: str,
    size: int,
    differs: Callable[[Status], bool],
    stop: Ends,
    *,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Return when all of the other *size* ranks wait for rank 0 and none of them *differs*, or at *stop*.

    The status names the others, and for how long they have been missing; now and then a log line does, too.
    """
    holders = Holders(log, group)
    since_s = dict.fromkeys(range(1, size), clock_s())
    said, tells_s = "", clock_s() + TOLD_AFTER_S

    def look(_: Owner) -> bool:
        nonlocal said, tells_s
        now_s, late = clock_s(), []
        for rank in since_s:
            waiting = [holder.status for holder in holders.of(rank) if holder.status.phase == "waiting"]
            if any(not differs(status) for status in waiting):
                since_s[rank] = now_s
            else:
                what = "differs" if waiting else "missing"
                late.append(f"rank-{rank} ({what} for {now_s - since_s[rank]:.0f} s)")
        if (detail := ", ".join(late)) != said:
            said = detail
            slot.say(phase="waiting", detail=detail)
        if late and now_s >= tells_s:
            tells_s = now_s + TOLD_EVERY_S
            logger.warning(
                "waits_for_ranks", group=group, ranks=detail, action="start them, or look into what they print"
            )
        return not late

    _look_until(look, slot, stop)


def _look_until(look: Callable[[Owner], bool], slot: RankSlotLike, stop: Ends) -> None:
    """Call *look* with the owner of *slot* until it returns True, or *stop*."""
    while (owner := slot.owner(stop)) is not None and not stop:
        try:
            if look(owner):
                return
        except LogError as error:
            logger.warning("log_unavailable", error=str(error))
            stop.wait(AGAIN_S)
        stop.wait(LOOK_EVERY_S)
