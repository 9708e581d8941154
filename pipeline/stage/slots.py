"""The slot of a worker: its lease, its owner, and the status that it publishes.

The lease decides whether another worker may take over, the owner who may write. A worker asks for a slot when it is
ready to serve; before that it only announces itself. A thread renews the lease, publishes the status, and ends the
process if the worker's loop is stuck (the watchdog). A worker that loses its slot, by a pause or because Redis lost its
data, drops its work and asks for a slot again, in the same process.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import structlog
from pydantic import Field, ValidationError

from pipeline.errors import ConfigError, DoesNotFit, LogError, LogFull, LogUnavailable, UndecodableEvent
from pipeline.events import Value
from pipeline.log.protocol import GUEST, HistoryLog, Owner
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.names import slot_index, slot_name
from pipeline.process.parent import EXIT_REPLACE, RUN_VARIABLE
from pipeline.serving import Serving

logger = structlog.get_logger()

Phase = Literal["starting", "waiting", "loading", "ready", "draining"]

WATCHDOG_S = 10.0
"""Time without a sign of life after which a stuck loop's process ends. An error from Redis counts as progress."""
PAUSED_S = 8.0
"""Duration of a watchdog's round above which its process was stopped: no timeout of the log is so long."""
WATCH_EVERY_S = 1.0
"""Longest pause between two looks of the watchdog, even with a long lease."""
EXIT_STUCK = 3
"""Exit code when the watchdog ends the process."""
AGAIN_S = 0.2
"""Pause between two requests for a slot while the log cannot be reached."""
LOOK_AGAIN_S = 0.05
"""Pause between two looks at what other workers serve, while this one does not fit."""


GiveUp = Callable[[RedisLog], None]
"""Ends the request that keeps a worker's loop. The watchdog calls it with its own log, and then ends the process."""


class Ends(Protocol):
    """`worker.Stop`: true once this process should end."""

    def __bool__(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool: ...


class Status(Value):
    """A worker's report about itself. /ready, /metrics, /v1/models, the supervisor and discovery read it."""

    slot: str
    owner: str
    pid: int
    host: str
    run: str = ""
    """Run of the supervisor that started it. Host and pid are not enough: a restarted container has the same ones."""
    phase: Phase = "starting"
    detail: str = ""
    """What the worker waits for, or loads."""
    progress: float = 0.0
    """Progress of the phase `loading`, 0 to 1."""
    retention_s: float = 0.0
    """Time for which its log keeps ended requests; 0: an older worker did not publish it."""
    address: str = ""
    """Address at which a frontend listens: http://host:port."""
    models: tuple[str, ...] = ()
    """Names that an engine serves; the first is the model's id."""
    context: int = 0
    """Served context of an engine: prompt + output tokens of one request."""
    sampling_defaults: dict[str, int | float] = Field(default_factory=dict)
    """Sampling that an engine's model recommends, by the names of SamplingParams, for requests without a value of their
    own."""
    fingerprint: str = ""
    """Fingerprint of an engine's weights, or of a tokenizer."""
    bos: str = ""
    """Text of the token that a tokenizer puts before a prompt; empty: there is none."""
    has_chat_template: bool = True
    """Whether a tokenizer has one."""
    numerics: str = ""
    """Numerics of an engine, see `Admitted`."""
    batch_invariant: bool = False
    """Whether an engine computes the same tokens for a request in any batch."""
    why_torch: str = ""
    """Reason why an engine computes with torch although no flag says so."""
    page_size: int = 0
    """Number of tokens in a page of an engine's cache .."""
    cached: str = ""
    """.. and digests of prefixes in it, see `pipeline.prefixes`."""
    backlog: int = 0
    """Number of prompt tokens that an engine had to compute for a second and has not computed."""
    flushed: str = ""
    """Id of the last flush that the engine has done."""
    flushed_pages: int = 0
    """Number of pages that flushes have freed since the engine started."""
    books_wrong: int = 0
    """Number of times that the engine found an error in its page allocation, which is a bug of ours."""
    group: str = ""
    """Group of a rank; once it has formed, `<group>/<nonce>`: this start of it."""
    version: str = ""
    """Version of MiniSGL on a rank. With `settings` and `fingerprint` it must be the same on all ranks."""
    settings: str = ""
    """Settings with which a rank computes."""
    num_ranks: int = 0
    """Number of ranks in the group of a rank."""
    metrics: str = ""
    """Metrics of its process (`Measures.snapshot`), as text in the text: few readers of a status need them."""


def parse_status(text: str) -> Status:
    """Return the status that a worker published, without the fields that only a newer version has.

    Raises:
        UndecodableEvent: *text* is no status.
    """
    try:
        return Status.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise UndecodableEvent(f"a status does not decode: {error}") from error


class Offer(Value):
    """What engines say of the model that they serve. Frontends keep it where engines come on demand."""

    models: tuple[str, ...] = ()
    context: int = 0
    sampling_defaults: dict[str, int | float] = Field(default_factory=dict)
    batch_invariant: bool = False
    tokenizer: str = ""
    """Fingerprint of the tokenizer that prompts for this model were encoded with."""

    @classmethod
    def of(cls, engines: Sequence[Status]) -> Offer:
        """Return what *engines* offer together."""
        if not engines:
            return cls()
        return cls(
            models=tuple(dict.fromkeys(name for status in engines for name in status.models)),
            context=min(status.context for status in engines),
            sampling_defaults=engines[0].sampling_defaults,
            batch_invariant=all(status.batch_invariant for status in engines),
        )

    @classmethod
    def parse(cls, text: str) -> Offer:
        """Return the offer in *text* (JSON). If *text* is empty or does not decode, return an empty offer."""
        try:
            return cls.model_validate_json(text, extra="ignore") if text else cls()
        except ValidationError as error:
            logger.warning("offer_undecodable", error=str(error))
            return cls()


def read_statuses(log: HistoryLog, stage: str) -> list[Status]:
    """Return the statuses of the live workers of *stage*, by slot."""
    return known_statuses(log.statuses(stage))


def known_statuses(texts: Mapping[str, str]) -> list[Status]:
    """Return the statuses in *texts* (slot -> JSON) without those that cannot be read."""
    found = []
    for slot, text in texts.items():
        try:
            found.append(parse_status(text))
        except UndecodableEvent as error:
            logger.warning("status_undecodable", slot=slot, error=str(error))
    return found


def acquire_guest(log: RedisLog, slot: str, lease_ms: int, serving: Serving | None = None) -> Owner | None:
    """Take over *slot* while its worker is away, which can then no longer write. Return None if the slot is held."""
    return log.acquire(slot, GUEST + secrets.token_hex(4), lease_ms, serving)


def wait_until_it_fits(log: RedisLog, serving: Serving, stop: Ends) -> None:
    """Return when no living worker serves something else than *serving*, or at *stop*.

    A record of dead workers holds until their leases would have expired. A living worker renews it. A record that never
    expires counts as that of a living worker.

    Raises:
        ConfigError: A living worker serves something else. The message names both.
    """
    ttls_ms: dict[tuple[str, Serving], int] = {}
    while not stop:
        try:
            served = log.serving()
        except LogUnavailable as error:
            logger.warning("log_unavailable", error=str(error))
            stop.wait(AGAIN_S)
            continue
        others = {stage: other for stage, other in served.items() if serving.difference(other.serving)}
        if not others:
            return
        for stage, other in others.items():
            if other.ttl_ms < 0 or other.ttl_ms > ttls_ms.get((stage, other.serving), other.ttl_ms):
                raise ConfigError(serving.refusal(other.serving, stage, log.names.namespace))
            ttls_ms[stage, other.serving] = other.ttl_ms
        stop.wait(LOOK_AGAIN_S)


def slot_leases(
    log: RedisLog,
    lease_log: RedisLog,
    stage: str,
    lease_ms: int,
    *,
    preferred: int | None,
    stop: Ends,
    measures: Measures | None = None,
    serving: Serving | None = None,
) -> Generator[SlotLease, None, None]:
    """Yield a held slot, and another one after each loss, until *stop*. Each slot is given back before the next.

    While the log cannot be reached, wait and try again: a process that is ready does not end. A worker that once served
    the context of others asks for it again, so that others with less still fit beside it.

    Raises:
        ConfigError: The worker would serve *serving*, but a living one serves something else.
    """
    agreed = serving
    while not stop:
        try:
            owner = acquire_slot(log, stage, lease_ms, preferred=preferred, serving=agreed)
            agreed = _with_the_context_of_all(log, stage, agreed)
        except DoesNotFit:
            assert serving is not None
            if agreed == serving:
                wait_until_it_fits(log, serving, stop)
            agreed = serving
            continue
        except (LogUnavailable, LogFull) as error:
            logger.warning("no_slot", stage=stage, error=str(error))
            stop.wait(AGAIN_S)
            continue
        structlog.contextvars.bind_contextvars(slot=owner.slot)
        slot_lease = SlotLease(lease_log, owner, lease_ms, measures, agreed)
        try:
            yield slot_lease
        finally:
            slot_lease.leave()
        if slot_lease.lost.is_set():
            logger.warning("slot_lost", slot=owner.slot, epoch=owner.epoch)
        preferred = slot_index(owner.slot)


def _with_the_context_of_all(log: RedisLog, stage: str, serving: Serving | None) -> Serving | None:
    """Return *serving* with the context that the workers of *stage* serve, which the first of them has set."""
    try:
        served = log.serving().get(stage) if serving is not None and serving.context else None
    except LogUnavailable:  # the slot is held: frontends serve the smallest context of all
        return serving
    if serving is None or served is None:
        return serving
    return dataclasses.replace(serving, context=min(serving.context, served.serving.context))


def acquire_slot(
    log: RedisLog, stage: str, lease_ms: int, *, preferred: int | None = None, serving: Serving | None = None
) -> Owner:
    """Take the slot *preferred*, once its dead holder's lease has expired, or else the lowest free one of *stage*.

    Raises:
        DoesNotFit: Living workers serve something else than *serving*.
    """
    nonce = secrets.token_hex(4)
    if preferred is not None:
        owner = _acquire_when_dead(log, slot_name(stage, preferred), nonce, lease_ms, serving)
        if owner is not None:
            return owner
    index = 0
    while True:
        owner = log.acquire(slot_name(stage, index), nonce, lease_ms, serving)
        if owner is not None:
            return owner
        index += 1


def _acquire_when_dead(log: RedisLog, slot: str, nonce: str, lease_ms: int, serving: Serving | None) -> Owner | None:
    """Wait for the lease of *slot* to expire; return None as soon as its holder shows a sign of life."""
    before = log.lease(slot)
    while True:
        owner = log.acquire(slot, nonce, lease_ms, serving)
        if owner is not None:
            return owner
        now = log.lease(slot)
        if now.holder != before.holder or now.ttl_ms > before.ttl_ms:
            return None
        before = now
        time.sleep(min(0.1, now.ttl_ms / 1000 + 0.001))


class _Round(NamedTuple):
    """What the watchdog knows about the loop's current round. One value, because two threads use it."""

    began_s: float
    began_cpu_s: float
    patience_s: float
    cpu_s: float
    give_up: GiveUp | None


class Says(Protocol):
    """Publishes a status: a `Heartbeat`, or an object that stands for several."""

    def say(self, **changes: object) -> None: ...


class Reporter(Says, Protocol):
    """What the loop of a worker reports to: a `SlotLease`, or an object that publishes nothing."""

    lost: threading.Event
    """Set once the worker may no longer write."""

    @property
    def status(self) -> Status: ...

    def report_progress(
        self, *, patience_s: float = WATCHDOG_S, cpu_s: float = math.inf, give_up: GiveUp | None = None
    ) -> None: ...


class Heartbeat:
    """A thread with its own log that publishes a worker's status, three times within a lease and at each change."""

    def __init__(self, log: RedisLog, slot: str, owner: str, lease_ms: int) -> None:
        self._log = log
        self._lease_ms = lease_ms
        self._status = Status(
            slot=slot,
            owner=owner,
            pid=os.getpid(),
            host=socket.gethostname(),
            run=os.environ.get(RUN_VARIABLE, ""),
            retention_s=log.limits.retention_s,
        )
        self.lost = threading.Event()
        """Set once this owner has lost the slot: another one took it, Redis lost its data, or others serve something
        else since the lease expired."""
        self._changed = threading.Condition()
        self._stopped = False
        self._round = _Round(time.monotonic(), time.process_time(), WATCHDOG_S, math.inf, None)
        self._forgiven_s = 0.0
        """Time before which silence does not count."""
        self._thread = threading.Thread(target=self._keep, name=f"lease {slot}", daemon=True)
        self._thread.start()

    def _speak(self, status: Status) -> None:
        raise NotImplementedError

    @property
    def status(self) -> Status:
        return self._status

    def say(self, **changes: object) -> None:
        """Publish *changes* of the status at once."""
        with self._changed:
            self._status = self._status.model_copy(update=changes)
            self._changed.notify()

    def report_progress(
        self, *, patience_s: float = WATCHDOG_S, cpu_s: float = math.inf, give_up: GiveUp | None = None
    ) -> None:
        """Tell the watchdog that the loop is alive. The next round may take *patience_s*, and *cpu_s* of CPU time.

        If it takes longer, the process ends. With *give_up* only the request of that round is at fault: the watchdog
        calls it first, and the process is replaced at once.
        """
        began_cpu_s = time.process_time() if cpu_s < math.inf else 0.0  # it is a system call
        self._round = _Round(time.monotonic(), began_cpu_s, patience_s, cpu_s, give_up)

    def leave(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stopped:
            began_s = time.monotonic()
            published = self._status
            try:
                self._speak(published)
            except LogError as error:
                logger.warning("lease_not_renewed", slot=self._status.slot, error=str(error))
            with self._changed:
                if not self._stopped and published is self._status:
                    self._changed.wait(min(self._lease_ms / 3000, WATCH_EVERY_S))
            if time.monotonic() - began_s < PAUSED_S:
                self._watch()
            else:  # the process was stopped, or the log was slow: the loop may be well
                self._forgiven_s = time.monotonic()

    def _watch(self) -> None:
        late = self._round
        silent_s = time.monotonic() - max(late.began_s, self._forgiven_s)
        if silent_s <= late.patience_s and time.process_time() - late.began_cpu_s <= late.cpu_s:
            return
        if late.give_up is None:
            logger.error("stuck", slot=self._status.slot, silent_s=round(silent_s, 1), patience_s=late.patience_s)
            os._exit(EXIT_STUCK)
        try:
            late.give_up(self._log)
        except LogError as error:  # the next worker tries the request again
            logger.warning("not_given_up", slot=self._status.slot, error=str(error))
        os._exit(EXIT_REPLACE)


class Announcement(Heartbeat):
    """The status of a worker without a slot, published under the lowest free slot from *preferred* on."""

    def __init__(self, log: RedisLog, stage: str, lease_ms: int, *, preferred: int | None = None) -> None:
        self._stage = stage
        super().__init__(log, slot_name(stage, preferred or 0), "", lease_ms)

    def _speak(self, status: Status) -> None:
        while not self._log.announce(status.slot, status.model_dump_json()):
            status = status.model_copy(update={"slot": slot_name(self._stage, slot_index(status.slot) + 1)})
            self.say(slot=status.slot)

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class SlotLease(Heartbeat):
    """Holds a slot: renews the lease, publishes the status, watches the loop."""

    def __init__(
        self,
        log: RedisLog,
        owner: Owner,
        lease_ms: int,
        measures: Measures | None = None,
        serving: Serving | None = None,
    ) -> None:
        """Publish the *measures* of this process with the status. *serving*: what the worker got the slot for."""
        self.owner = owner
        self.serving = serving
        self._measures = measures
        super().__init__(log, owner.slot, str(owner), lease_ms)

    def leave(self) -> None:
        """Stop the thread and give the slot back."""
        super().leave()
        try:
            self._log.release(self.owner)
        except LogError as error:
            logger.warning("lease_not_released", slot=self.owner.slot, error=str(error))

    def _speak(self, status: Status) -> None:
        if self._measures is not None:
            status = status.model_copy(update={"metrics": self._measures.snapshot()})
        # A guest is not the slot's worker. It holds the lease, and has its status in its own slot.
        said = "" if self.owner.is_guest else status.model_dump_json()
        if not self._log.renew(self.owner, self._lease_ms, said, self.serving):
            self.lost.set()


def progress_reporter(slot_lease: Says, detail: str) -> Callable[[float], None]:
    """Return a function that publishes the progress of a load, in steps of 5 %."""
    said = -1.0

    def report(progress: float) -> None:
        nonlocal said
        if progress - said >= 0.05 or progress >= 1:
            said = progress
            slot_lease.say(phase="loading", detail=detail, progress=round(progress, 2))

    return report
