"""The ranks of one start of an engine, in the log: each holds a slot, rank 0 writes the formation, the others join it.

Knows gloo by `channel.py`, the stores where ranks find each other by `stores.py`, and no model.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import structlog

from pipeline import VERSION
from pipeline.errors import ConfigError, Fenced, GroupLost, LogError, LogUnavailable, RankLost, UndecodableEvent
from pipeline.log.protocol import Owner
from pipeline.log.ranks import Formation, formation_to_join
from pipeline.log.redis import RedisLog
from pipeline.names import rank_stage
from pipeline.stage.slots import Ends, SlotLease, read_statuses, slot_leases
from pipeline.stage.worker import Stop
from stages.generate.ranks.links import RankLinks
from stages.generate.ranks.presence import Holders
from stages.generate.ranks.stores import opened_store, reached_store

logger = structlog.get_logger()

FORMATION_MS: Final = 120_000
"""Time that a formation stays in the log. The ranks that should join it come within half of that, or never."""
BLOCK_MS: Final = 200
AGAIN_S: Final = 0.1
LOOK_EVERY_S: Final = 0.25
AWAY_S: Final = 1.5
"""Time without a holder after which a rank is gone. A rank that only lost its lease asks for it again before."""
LOADING_AWAY_S: Final = 30.0
"""The same while ranks load, which may delay their other threads."""
RECOVERY_S: Final = 5.0
"""Time after rank 0 could not look in which no rank counts as gone: what delayed it may delay them for longer."""
EXIT_RANK_LOST: Final = 1


class RankSlot:
    """The slot of a rank. A thread holds it, and asks for another after each loss. The rank computes on meanwhile."""

    def __init__(self, open_log: Callable[[], RedisLog], rank: int, lease_ms: int, preferred: int | None) -> None:
        self._open_log, self._stage, self._lease_ms, self._preferred = open_log, rank_stage(rank), lease_ms, preferred
        self._stop = Stop()
        self._changed = threading.Condition()
        self._lease: SlotLease | None = None
        self._said: dict[str, object] = {}
        self._patience_s = float("inf")
        self._thread = threading.Thread(target=self._hold, name=f"slot {self._stage}", daemon=True)
        self._thread.start()

    def owner(self, stop: Ends) -> Owner | None:
        """Wait for the slot and return its owner; None: *stop*."""
        with self._changed:
            while self._lease is None and not stop:
                self._changed.wait(AGAIN_S)
            return self._lease.owner if self._lease is not None else None

    def say(self, **changes: object) -> None:
        """Publish *changes* of the status."""
        with self._changed:
            self._said |= changes
            if self._lease is not None:
                self._lease.say(**changes)

    def report_progress(self, patience_s: float) -> None:
        """Tell the watchdog that the rank is alive. Its next round may take *patience_s*."""
        self._patience_s = patience_s
        lease = self._lease  # the other thread may change it
        if lease is not None:
            lease.report_progress(patience_s=patience_s)

    def leave(self) -> None:
        """Give the slot back."""
        self._stop.set()
        self._thread.join()

    def _hold(self) -> None:
        try:
            self._hold_slots()
        except Exception as error:
            logger.exception("slot_not_held", stage=self._stage)
            end_process(RankLost(f"this rank cannot hold its slot: {error!r}"))

    def _hold_slots(self) -> None:
        log, lease_log = self._open_log(), self._open_log()
        leases = slot_leases(log, lease_log, self._stage, self._lease_ms, preferred=self._preferred, stop=self._stop)
        for lease in leases:
            with self._changed:
                lease.report_progress(patience_s=self._patience_s)
                lease.say(**self._said)
                self._lease = lease
                self._changed.notify_all()
            while not self._stop and not lease.lost.wait(AGAIN_S):
                pass
            with self._changed:
                self._lease = None


class HasTerms(Protocol):
    """A rank's status, or a formation."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def settings(self) -> str: ...


TERMS: Final = ("fingerprint", "version", "settings")


@dataclass(frozen=True, slots=True)
class Terms:
    """Values that must be the same on all ranks of a group."""

    fingerprint: str
    version: str
    settings: str

    def check(self, rank_0: HasTerms, rank: int) -> None:
        """Compare the terms of *rank* with those of rank 0.

        Raises:
            ConfigError: A value differs. The message names both.
        """
        for what in TERMS:
            mine, its = differing(getattr(self, what), getattr(rank_0, what))
            if mine:
                raise ConfigError(
                    f"rank {rank} has the {what} {mine}, but rank 0 has {its}; start all ranks with the same model, "
                    "flags and version of MiniSGL"
                )

    def differ(self, its: HasTerms) -> bool:
        """Return whether another rank's terms differ."""
        return any(getattr(self, what) != getattr(its, what) for what in TERMS)


def differing(mine: str, its: str) -> tuple[str, str]:
    """Return the words in which two texts differ, or all of both if one has more words; empty if they are equal.

    A slash ends a word, as in the numerics of an engine.
    """
    words = [re.split(r"[ /]", text) for text in (mine, its)]
    if len(words[0]) != len(words[1]):
        return mine, its
    pairs = [pair for pair in zip(*words, strict=True) if pair[0] != pair[1]]
    return ", ".join(pair[0] for pair in pairs), ", ".join(pair[1] for pair in pairs)


def terms_of(fingerprint: str, settings: str) -> Terms:
    """Return the terms of a rank that runs this code."""
    return Terms(fingerprint, VERSION, settings)


Connect: TypeAlias = Callable[[Any, int, int], RankLinks]
"""Connects a rank with the others: arguments are the store, the rank and the number of ranks."""


@contextlib.contextmanager
def formed(
    log: RedisLog,
    owner: Owner,
    group: str,
    size: int,
    terms: Terms,
    connect: Connect,
    *,
    nonce: str,
    address: str = "",
) -> Iterator[RankLinks]:
    """Commit a formation as rank 0 and wait until all ranks have come. The store must not be used after the block.

    *address*: address of this machine, if there are ranks on others.

    Raises:
        RankLost: Not all ranks came, or rank 0 has lost its slot.
    """
    with opened_store(size, address) as (name, store):
        formation = Formation(owner, nonce, size, name, terms.fingerprint, terms.version, terms.settings)
        try:
            _keep_trying(lambda: log.form(group, formation, ttl_ms=FORMATION_MS))
        except Fenced as error:
            raise RankLost(f"rank 0 lost its slot before the ranks came, and all start again: {error}") from error
        yield connect(store, 0, size)


def joined(formation: Formation, rank: int, connect: Connect) -> RankLinks:
    """Join a formation as another rank, once all ranks have come.

    Raises:
        RankLost: The ranks did not come, or the store is gone.
    """
    return connect(reached_store(formation.store, formation.size), rank, formation.size)


def formation_of(
    log: RedisLog, slot: RankSlot, group: str, rank: int, terms: Terms, stop: Stop
) -> tuple[Owner, Any, Formation] | None:
    """Wait for a formation that *rank* in *slot* may join; return the owner, the entry and the formation. None: *stop*.

    Raises:
        ConfigError: Rank 0 is there and differs.
    """
    holders = Holders(log, group)
    while (owner := slot.owner(stop)) is not None and not stop:
        try:
            for rank_0 in (holder.status for holder in holders.of(0) if holder.lives and holder.status.settings):
                terms.check(rank_0, rank)
            found = formation_to_join(log, owner, group, block_ms=BLOCK_MS)
        except GroupLost:  # rank 0 has not come yet
            found = None
            stop.wait(AGAIN_S)
        except (LogError, UndecodableEvent) as error:
            logger.warning("no_formation", group=group, error=str(error))
            found = None
            stop.wait(AGAIN_S)
        if found is not None:
            terms.check(found[1], rank)
            return owner, *found
    return None


def ack(log: RedisLog, owner: Owner, group: str, entry: Any) -> None:
    """Write to the log that a rank has joined. If that fails, nothing changes."""
    try:
        log.joined(owner, group, [entry])
    except LogError as error:
        logger.warning("not_joined", group=group, error=str(error))


class RankWatch:
    """Watches the slots of other ranks. A stopped process keeps its connections, so gloo does not notice it.

    Rank 0 watches all others, and ranks on other machines watch rank 0: a network that is cut breaks no connection.
    """

    def __init__(
        self,
        open_log: Callable[[], RedisLog],
        start: str,
        ranks: Iterable[int],
        on_lost: Callable[[RankLost], object],
        *,
        loading: bool = False,
    ) -> None:
        """*start*: name of this start of the group in the statuses (`start_of`).

        *on_lost* is called once, in a thread of this object. Ranks that are *loading* may be away for longer.
        """
        self._open_log, self._start, self._on_lost, self._is_loading = open_log, start, on_lost, loading
        self._seen_s = dict.fromkeys(ranks, time.monotonic())
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()

    def all_have_loaded(self) -> None:
        """Treat the ranks as computing from now on."""
        self._is_loading = False

    def leave(self) -> None:
        """Stop looking."""
        self._left.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            lost = self._first_lost(self._open_log())
        except Exception as error:
            logger.exception("ranks_not_watched", group=self._start)
            lost = RankLost(f"the other ranks cannot be watched: {error!r}")
        if lost is not None:
            self._on_lost(lost)

    def _first_lost(self, log: RedisLog) -> RankLost | None:
        """Look until a rank is gone, and return the error; None: the watch was ended."""
        looked_s = time.monotonic()
        patient_until_s = 0.0
        while not self._left.wait(LOOK_EVERY_S):
            before_s, looked_s = looked_s, time.monotonic()
            try:
                for rank in self._seen_s:
                    if self._is_there(log, rank):
                        self._seen_s[rank] = time.monotonic()
                had_trouble = looked_s - before_s > LOOK_EVERY_S + AWAY_S  # perhaps the machine stood still
            except LogError:  # then no rank can renew its lease
                had_trouble = True
            now_s = time.monotonic()
            if had_trouble:  # the others may need longer to notice, and to renew their leases
                patient_until_s = now_s + RECOVERY_S
            if now_s < patient_until_s:
                self._seen_s = dict.fromkeys(self._seen_s, now_s)
            away_s = LOADING_AWAY_S if self._is_loading else AWAY_S
            for rank, seen_s in self._seen_s.items():
                if now_s - seen_s > away_s and not self._left.is_set():
                    return RankLost(f"rank {rank} has not renewed its lease: it stands still, or has ended")
        return None

    def _is_there(self, log: RedisLog, rank: int) -> bool:
        mine = (status for status in read_statuses(log, rank_stage(rank)) if status.group == self._start)
        return any(log.lease(status.slot).holder == status.owner for status in mine)


def end_process(error: RankLost) -> None:
    """End this process, whatever its threads wait for. The supervisor ends the other ranks and starts all again."""
    logger.error("rank_lost", error=str(error))
    os._exit(EXIT_RANK_LOST)


def _keep_trying(work: Callable[[], object]) -> None:
    while True:
        try:
            work()
            return
        except LogUnavailable as error:
            logger.warning("log_unavailable", error=str(error))
            time.sleep(AGAIN_S)
