"""How the ranks of an engine find each other through the log.

Rank 0 of a group writes a formation each time the group starts. The other ranks join it, each as a member of a consumer
group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import UndecodableEvent
from pipeline.log.protocol import Entry, Inbox, Owner
from pipeline.names import Names, slot_stage

if TYPE_CHECKING:
    from pipeline.log.redis import RedisLog


def ranks_inbox(names: Names, group: str, stage: str) -> Inbox:
    """Return the stream of the formations of *group*, and the consumer group of the rank with the role *stage*."""
    return Inbox(names.ranks(group), stage)


@dataclass(frozen=True, slots=True)
class Formation:
    """One start of a group of ranks, written by rank 0."""

    rank_0: Owner
    """Owner of rank 0's slot, who writes the formation."""
    nonce: str
    """Text that distinguishes one start from another."""
    size: int
    """Number of ranks, rank 0 included."""
    store: str
    """Place where the ranks find each other."""
    fingerprint: str
    """Fingerprint of the weights of rank 0."""
    version: str = ""
    """Version of MiniSGL on rank 0."""
    settings: str = ""
    """Settings with which rank 0 computes. They must be the same on all ranks."""

    def fields(self) -> dict[str, str]:
        """Return the fields of its entry after `nonce` and `ms`, the time of the commit."""
        rank_0 = {"slot": self.rank_0.slot, "owner": str(self.rank_0)}
        shared = {"fingerprint": self.fingerprint, "version": self.version, "settings": self.settings}
        return rank_0 | {"size": str(self.size), "store": self.store} | shared

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Formation:
        """Return the formation in an entry.

        Raises:
            UndecodableEvent: The entry is not a formation.
        """
        try:
            epoch, _, nonce = fields["owner"].partition(":")
            rank_0, size = Owner(fields["slot"], int(epoch), nonce), int(fields["size"])
            shared = (fields[name] for name in ("nonce", "store", "fingerprint", "version", "settings"))
            nonce_of_start, store, fingerprint, version, settings = shared
            return cls(rank_0, nonce_of_start, size, store, fingerprint, version, settings)
        except (KeyError, ValueError) as error:
            raise UndecodableEvent(f"a formation of ranks does not decode: {error!r} in {dict(fields)}") from error


def formation_to_join(log: RedisLog, owner: Owner, group: str, *, block_ms: int) -> tuple[Entry, Formation] | None:
    """Wait up to *block_ms* for a formation that the rank *owner* may join: the newest one, if its rank 0 lives.

    The entry stays pending until the rank has `joined` it. If the rank dies before, its next owner gets the formation
    again. If its rank 0 has another owner now, it is consumed. Only writes raise Fenced: `joined` decides.

    Raises:
        GroupLost: The group has no formation yet, or none now.
        UndecodableEvent: An entry is not a formation.
    """
    inbox = ranks_inbox(log.names, group, slot_stage(owner.slot))
    log.claim(inbox, owner, 1)
    entries = log.pending(inbox, owner.slot) or log.read(inbox, owner.slot, max_entries=1, block_ms=block_ms)
    for entry in entries:
        formation = Formation.parse(entry.fields)
        holder = log.lease(formation.rank_0.slot).holder
        if holder == str(formation.rank_0):
            return entry, formation
        if holder:  # the same owner may take a free lease again: then the formation comes again
            log.joined(owner, group, [entry])
    return None
