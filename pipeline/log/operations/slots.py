"""Operations of slots: owners, leases, statuses, and what the workers serve."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import count
from typing import Any

from pipeline.errors import DoesNotFit
from pipeline.log.entries import (
    STATUS_TTL_MS,
)
from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, commit
from pipeline.log.protocol import Lease, Owner
from pipeline.log.replies import (
    lease_of,
    texts_there,
)
from pipeline.names import (
    DETOKENIZE,
    GENERATE,
    SERVING_STAGES,
    Names,
    slot_index,
    slot_name,
    slot_stage,
)
from pipeline.serving import Served, Serving

SLOTS_PER_LOOK = 16
"""Number of slots of a stage that are read together. The next ones are read if one of these exists."""
EXPIRED = -2
"""PTTL of a key that is gone: it existed for the command before."""


def acquire(
    log: LogContext, slot: str, nonce: str, lease_ms: int, serving: Serving | None = None
) -> Script[Owner | None]:
    """Take a free slot under a new epoch; return None if its lease is held.

    A slot that a guest holds is free for a worker. The nonce of a guest begins with GUEST. *serving*: what the
    worker serves. Its stage serves that from now on, if no other worker of it lives. Raise DoesNotFit if the living
    workers of any stage serve something else.
    """

    def parse(epoch: int) -> Owner | None:
        if epoch < 0:
            raise DoesNotFit(f"{slot}: other workers serve something else")
        return Owner(slot, epoch, nonce) if epoch else None

    names = log.names
    keys = {"lease": names.lease(slot), "owner": names.owner(slot), "serving": _serving_keys(names, slot, serving)}
    return commit("acquire", parse, keys, nonce=nonce, lease_ms=lease_ms, serves=serving.text() if serving else None)


def _serving_keys(names: Names, slot: str, serving: Serving | None) -> list[str]:
    """Return the key of what the slot's stage serves, then those of the other stages; [] without *serving*."""
    own = slot_stage(slot)
    stages = [own, *(stage for stage in SERVING_STAGES if stage != own)] if serving else []
    return [names.serving(stage) for stage in stages]


def serving(log: LogContext) -> Batch[dict[str, Served]]:
    """Return what each stage with a living worker serves."""

    def parse(replies: list[Any]) -> dict[str, Served]:
        found = zip(SERVING_STAGES, replies[::2], replies[1::2], strict=True)
        there = ((stage, text, ttl_ms) for stage, text, ttl_ms in found if text is not None and ttl_ms != EXPIRED)
        return {stage: Served(Serving.parse(text), ttl_ms) for stage, text, ttl_ms in there}

    keys = [log.names.serving(stage) for stage in SERVING_STAGES]
    return Batch([[word, key] for key in keys for word in ("GET", "PTTL")], parse, any_type=True)


def announce(log: LogContext, slot: str, status: str) -> Script[bool]:
    """Publish the *status* (JSON) of a worker that will ask for *slot*; return False if the slot is held."""
    keys = {"lease": log.names.lease(slot), "status": log.names.status(slot)}
    return commit("announce", bool, keys, status=status, status_ms=STATUS_TTL_MS)


def renew(log: LogContext, owner: Owner, lease_ms: int, status: str, serving: Serving | None = None) -> Script[bool]:
    """Keep the lease, or take it again if it expired, and publish *status* (JSON) unless that is empty.

    Return False if the slot has another owner, or if others serve something else since the lease expired.
    """
    slot, names = owner.slot, log.names
    return commit(
        "renew",
        bool,
        {
            "lease": names.lease(slot),
            "owner": names.owner(slot),
            "status": names.status(slot),
            "serving": _serving_keys(names, slot, serving),
        },
        owner=str(owner),
        lease_ms=lease_ms,
        status=status or None,
        status_ms=STATUS_TTL_MS,
        serves=serving.text() if serving else None,
    )


def release(log: LogContext, owner: Owner) -> Script[bool]:
    """Give the lease back and drop the status; return False if another owner has the lease."""
    keys = {"lease": log.names.lease(owner.slot), "status": log.names.status(owner.slot)}
    return commit("release", bool, keys, owner=str(owner))


def lease(log: LogContext, slot: str) -> Batch[Lease]:
    """Return the holder of a slot's lease, and its remaining time."""
    key = log.names.lease(slot)
    return Batch([["GET", key], ["PTTL", key]], lambda replies: lease_of(*replies))


def remember_engine(log: LogContext, offer: str) -> Command[None]:
    """Keep what engines *offer* (JSON) for the time when none is there."""
    return Command(["SET", log.names.last_engine, offer], lambda _: None)


def last_engine(log: LogContext) -> Command[str]:
    """Return the offer that `remember_engine` has kept; empty: none."""
    return Command(["GET", log.names.last_engine], lambda text: text or "")


@functools.cache
def _looked_at(names: Names, first: int) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the engines' slots from number *first* on, the keys of their leases and of those of their detokenizers,
    and the keys of their steps. Detokenizers read these several times a second, so they are cached."""
    engines = slots_of(GENERATE, first)
    detokenizers = [slot_name(DETOKENIZE, slot_index(engine)) for engine in engines]
    return engines, [names.lease(slot) for slot in (*engines, *detokenizers)], [names.steps(slot) for slot in engines]


def unattended(log: LogContext) -> Steps[list[str]]:
    """Return the engines that live or have steps waiting, and whose detokenizer is away."""
    found: list[str] = []
    for first in count(0, SLOTS_PER_LOOK):
        engines, leases, streams = _looked_at(log.names, first)
        holders = yield from Command(["MGET", *leases], list, once=True)
        living, attending = holders[: len(engines)], holders[len(engines) :]
        free = [at for at, holder in enumerate(attending) if holder is None or lease_of(holder, 0).is_free]
        steps = [streams[number] for number in free]
        num_streams = (yield from Command(["EXISTS", *steps], int, once=True)) if steps else 0
        lengths = (yield from Batch([["XLEN", key] for key in steps], list)) if num_streams else [0] * len(steps)
        found += [engines[number] for number, length in zip(free, lengths, strict=True) if length or living[number]]
        if not num_streams and not any(holders):
            break
    return found


def statuses(log: LogContext, stage: str) -> Steps[dict[str, str]]:
    found: dict[str, str] = {}
    for first in count(0, SLOTS_PER_LOOK):
        there = yield from _statuses(log.names, stage, first)
        found |= there
        if not there:
            break
    return found


def _statuses(names: Names, stage: str, first: int) -> Command[dict[str, str]]:
    keys = {slot: names.status(slot) for slot in slots_of(stage, first)}
    return Command(["MGET", *keys.values()], lambda values: texts_there(keys, values))


def slots_of(stage: str, first: int) -> list[str]:
    """Return the slots of *stage* that are read together, from number *first* on."""
    return [slot_name(stage, index) for index in range(first, first + SLOTS_PER_LOOK)]
