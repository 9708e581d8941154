"""Operations of engines."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import LogUnavailable
from pipeline.events import StepCompleted
from pipeline.log.config import DEFAULT_STEAL_AFTER_S
from pipeline.log.operation import Command, LogContext, Script, blocking, commit
from pipeline.log.operations.requests import written
from pipeline.log.protocol import Owner, StepCommitted, Taken
from pipeline.log.replies import (
    as_text,
    entries_of,
    nothing,
    texts,
    unless_fenced,
)
from pipeline.names import (
    Names,
)


def take(
    log: LogContext,
    owner: Owner,
    max_entries: int,
    *,
    control_cursor: str,
    but: Sequence[str] = (),
    spare: int | None = None,
    steal_after_s: float = DEFAULT_STEAL_AFTER_S,
) -> Script[Taken]:
    """Take up to *max_entries* requests that wait, each owner its share. They are pending until `step` ends them.

    *but*: owners of whom none is taken. *spare*: number of requests that the engine could run; by default more than
    *max_entries*. While it has no room, other engines take those that prefer it. *steal_after_s*: they also take what
    it leaves for so long. Raise Fenced.
    """

    def parse(reply: Any) -> Taken:
        entries, cursor, num_left, ended, control, flush = unless_fenced(owner, reply)
        found, cursors = tuple(entries_of(entries)), (as_text(control), as_text(flush))
        return Taken(found, as_text(cursor), num_left, texts(ended), *cursors)

    return commit(
        "take",
        parse,
        {
            "owner": log.names.owner(owner.slot),
            "tokenized": log.names.tokenized,
            "waiting": log.names.waiting,
            "full": log.names.full,
            "control": log.names.control,
        },
        owner=str(owner),
        slot=owner.slot,
        max_entries=max_entries,
        control_cursor=control_cursor,
        but=but or None,
        spare=max_entries + 1 if spare is None else spare,
        steal_ms=int(steal_after_s * 1000),
        once=True,
    )


def wait(log: LogContext, cursor: str, control_cursor: str, *, block_ms: int) -> Command[None]:
    """Wait up to *block_ms* until `tokenized` or `control` has something after the cursors."""
    streams = [log.names.tokenized, log.names.control, cursor, control_cursor]
    return Command(["XREAD", "COUNT", 1, *blocking(block_ms), "STREAMS", *streams], nothing, once=True)


@functools.cache
def _keys_of_step(names: Names, slot: str) -> tuple[str, ...]:
    """Return the keys of every commit of an engine. They are cached, as below."""
    return (names.owner(slot), names.lease(slot), names.steps(slot), names.tokenized, names.control)


def step(
    log: LogContext,
    owner: Owner,
    steps: Mapping[int, StepCompleted],
    *,
    ended: Sequence[str],
    control_cursor: str,
    lease_ms: int,
) -> Script[StepCommitted]:
    """Append *steps* of an engine, all or none, and consume the `tokenized` entries *ended*. Raise Fenced.

    Without steps, only return what is new. A step has the id `<epoch>-<number>`. The numbers ascend. A caller that
    did not get the reply commits the same steps again. Raise LogUnavailable while the stream holds a later entry
    that is not the engine's.
    """

    def parse(reply: Any) -> StepCommitted:
        if reply == b"BEHIND":
            first = f"{owner.epoch}-{min(steps)}"
            raise LogUnavailable(f"{names.steps(slot)} has an entry after {first} that no engine wrote; waiting for it")
        length, newest, ms, uids, cursor, flush = unless_fenced(owner, reply)
        return StepCommitted(length, as_text(newest), texts(uids), as_text(cursor), as_text(flush), int(ms))

    slot, names = owner.slot, log.names
    keys = _keys_of_step(names, slot)
    args: list[str | int | bytes] = [str(owner), lease_ms, control_cursor, len(ended), *ended]
    for number, event in steps.items():
        fields = written(event)
        args += [f"{owner.epoch}-{number}", len(fields), *fields]
    return Script("step", keys, args, parse, once=True)


def flush(log: LogContext, by: str) -> Script[str]:
    """Ask all engines to remove the prefixes that no request uses; return an id, which `take` and `step` deliver.

    The message may be lost, so a caller that waits for the engines' answer asks again.
    """
    return commit("flush", as_text, {"control": log.names.control}, by=by)
