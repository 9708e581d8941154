"""Operations for the ranks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.log.operation import LogContext, Script, commit
from pipeline.log.operations.requests import flat
from pipeline.log.operations.workers import unless_fenced
from pipeline.log.protocol import Entry, Owner
from pipeline.log.ranks import Formation
from pipeline.log.replies import as_text, nothing
from pipeline.names import slot_stage


def form(log: LogContext, group: str, formation: Formation, *, ttl_ms: int) -> Script[str]:
    owner = formation.rank_0
    return commit(
        "form",
        lambda reply: as_text(unless_fenced(owner, reply)),
        {"owner": log.names.owner(owner.slot), "ranks": log.names.ranks(group)},
        *flat(formation.fields()),
        owner=str(owner),
        size=formation.size,
        ttl_ms=ttl_ms,
        nonce=formation.nonce,
    )


def joined(log: LogContext, owner: Owner, group: str, entries: Sequence[Entry]) -> Script[None]:
    def parse(reply: Any) -> None:
        nothing(unless_fenced(owner, reply))

    keys, ids = {"owner": log.names.owner(owner.slot), "ranks": log.names.ranks(group)}, [entry.id for entry in entries]
    return commit("joined", parse, keys, owner=str(owner), group=slot_stage(owner.slot), entries=ids)
