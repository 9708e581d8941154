"""The janitor ends requests that no other process ends. It runs in the web process that holds the slot `janitor-0`.

A request past its deadline fails, even when every engine is down. A request is cancelled when its frontend is gone, and
no client has read it elsewhere, for a minute. Requests end only once, so two janitors at once do no harm.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from pipeline.errors import LogError
from pipeline.events import Cancelled, Failed
from pipeline.log.protocol import Owner
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import EXPIRED_EARLY, REQUEST_SUCCESS
from pipeline.names import JANITOR, slot_name
from pipeline.process.failpoints import failpoint

logger = structlog.get_logger()

SLOT: Final = slot_name(JANITOR, 0)
LEASE_MS: Final = 5000
SWEEP_EVERY_S: Final = 1.0
MOST_ENDED: Final = 100
"""Most requests that one sweep ends; the next sweep goes on."""
PATIENCE_S: Final = 60.0
"""How long a frontend is gone before its requests are cancelled: it, and its clients, may come back."""


class Janitor:
    """Sweeps while it holds the slot. It has a thread and a log of its own."""

    def __init__(
        self,
        log: RedisLog,
        *,
        patience_s: float = PATIENCE_S,
        clock_s: Callable[[], float] = time.monotonic,
        measures: Measures | None = None,
        most_stored_bytes: int = 0,
    ) -> None:
        """*most_stored_bytes*: what all stored responses may take; 0: any number."""
        self._log = log
        self._patience_s = patience_s
        self._clock_s = clock_s
        self._measures = measures or Measures()
        self._most_stored_bytes = most_stored_bytes
        self._nonce = secrets.token_hex(4)
        self._owner: Owner | None = None
        self._gone_since_s: dict[str, float] = {}
        """Frontends without a lease, and when each was first seen without one."""
        self._frontends: dict[str, str] = {}
        """uid -> frontend, of living requests."""
        self._read_s: dict[str, float] = {}
        """uid of a living request whose frontend is gone -> when a client last read it."""

    def run(self, stop: threading.Event) -> None:
        """Sweep once a second until *stop* is set."""
        while not stop.wait(SWEEP_EVERY_S):
            try:
                if self.holds_slot():
                    self.sweep()
            except LogError as error:
                logger.warning("not_swept", error=str(error))
            except Exception:  # a bug of ours with one request; the others still have to be ended
                logger.exception("sweep_broke")
        self.leave()

    def holds_slot(self) -> bool:
        """Take or keep the slot. Return whether this process holds it."""
        if self._owner is not None and not self._log.renew(self._owner, LEASE_MS, ""):
            self._owner = None
        if self._owner is None:
            self._owner = self._log.acquire(SLOT, self._nonce, LEASE_MS)
            self._gone_since_s.clear()
        return self._owner is not None

    def leave(self) -> None:
        """Give the slot back."""
        if self._owner is not None:
            try:
                self._log.release(self._owner)
            except LogError as error:
                logger.warning("lease_not_released", slot=SLOT, error=str(error))

    def sweep(self) -> None:
        """End requests that are past their deadline, and those that no client reads any more. Remove stored responses
        that have expired."""
        overdue = self._log.overdue(MOST_ENDED)
        for uid, frontend in self._log.frontends_of(overdue).items():
            message = "The request was not done by its deadline (--request-timeout, or --background-timeout)."
            event = Failed(status=504, code="timeout", message=message)
            if self._log.end(uid, event, frontend=frontend):
                logger.warning("overdue", uid=uid)
                self._measures.add(REQUEST_SUCCESS, "error")
            failpoint("janitor.mid_sweep")
        for uid, frontend in self._abandoned():
            if self._log.abandon(uid, Cancelled(by=JANITOR), frontend=frontend):  # unless a client reads it since then
                logger.warning("abandoned", uid=uid, frontend=frontend)
                self._measures.add(REQUEST_SUCCESS, "abort")

        if early := self._log.retire(self._most_stored_bytes):
            logger.warning("responses_expired_early", responses=early)
            self._measures.add(EXPIRED_EARLY, amount=early)

    def _abandoned(self) -> list[tuple[str, str]]:
        """Return (uid, frontend) of running requests whose frontend is gone for too long, and that no client has
        read for as long."""
        living = self._log.living()
        self._frontends = {uid: self._frontends[uid] for uid in living if uid in self._frontends}
        self._frontends |= self._log.frontends_of([uid for uid in living if uid not in self._frontends])
        now_s = self._clock_s()
        frontends = {frontend for frontend in self._frontends.values() if frontend}
        gone = {frontend for frontend in frontends if not self._log.lease(frontend).holder}
        self._gone_since_s = {frontend: self._gone_since_s.get(frontend, now_s) for frontend in gone}
        left = {uid: frontend for uid, frontend in self._frontends.items() if frontend in gone}
        read = self._log.read_by_others([*left])
        self._read_s = {uid: now_s if uid in read else self._read_s.get(uid, -math.inf) for uid in left}
        since_s = {uid: max(self._gone_since_s[frontend], self._read_s[uid]) for uid, frontend in left.items()}
        too_long = [uid for uid in left if now_s - since_s[uid] >= self._patience_s and uid not in read]
        return [(uid, left[uid]) for uid in too_long[:MOST_ENDED]]
