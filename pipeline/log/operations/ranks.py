"""Operations for the ranks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.log.operation import LogContext, Script, commit
from pipeline.log.operations.requests import flat
from pipeline.log.protocol import Entry, Owner
from pipeline.log.ranks import Formation
from pipeline.log.replies import as_text, nothing, unless_fenced
from pipeline.names import slot_stage


def form(log: LogContext, group: str, formation: Formation, *, ttl_ms: int) -> Script[str]:
    """Write the newest formation of *group*, which deletes the older ones, and return its id.

    The stream lives for *ttl_ms*. The same formation again, by its nonce, only extends that. Raise Fenced if rank 0
    has lost its slot.
    """
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
    """Consume formations that the rank *owner* has joined, or will not join. Raise Fenced.

    The entries stay for the other ranks.
    """

    def parse(reply: Any) -> None:
        nothing(unless_fenced(owner, reply))

    keys, ids = {"owner": log.names.owner(owner.slot), "ranks": log.names.ranks(group)}, [entry.id for entry in entries]
    return commit("joined", parse, keys, owner=str(owner), group=slot_stage(owner.slot), entries=ids)
