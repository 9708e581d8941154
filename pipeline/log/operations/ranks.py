"""Operations for the ranks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.log.operation import LogContext, Script, Words
from pipeline.log.operations.requests import flat
from pipeline.log.operations.workers import unless_fenced
from pipeline.log.protocol import Entry, Owner
from pipeline.log.ranks import Formation
from pipeline.log.replies import as_text, nothing
from pipeline.names import slot_stage


def form(log: LogContext, group: str, formation: Formation, *, ttl_ms: int) -> Script[str]:
    owner = formation.rank_0
    keys = [log.names.owner(owner.slot), log.names.ranks(group)]
    args: Words = [str(owner), formation.size, ttl_ms, formation.nonce, *flat(formation.fields())]
    return Script("form", keys, args, lambda reply: as_text(unless_fenced(owner, reply)))


def joined(log: LogContext, owner: Owner, group: str, entries: Sequence[Entry]) -> Script[None]:
    def parse(reply: Any) -> None:
        nothing(unless_fenced(owner, reply))

    keys = [log.names.owner(owner.slot), log.names.ranks(group)]
    return Script("joined", keys, [str(owner), slot_stage(owner.slot), *(entry.id for entry in entries)], parse)
