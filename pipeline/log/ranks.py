"""What the ranks of an engine need of the log besides StreamLog. The same contract suite holds for it.

Rank 0 of a group writes a formation each time that the group starts; the other ranks join it, each as a member of a
consumer group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import UndecodableEvent
from pipeline.log.protocol import Entry, Inbox, Owner, StreamLog
from pipeline.names import Names, slot_stage


def ranks_inbox(names: Names, group: str, stage: str) -> Inbox:
    """Return the stream of the formations of *group*, and the consumer group of the rank with the role *stage*."""
    return Inbox(names.ranks(group), stage)


@dataclass(frozen=True, slots=True)
class Formation:
    """One start of a group of ranks, as rank 0 says it."""

    rank_0: Owner
    """Who holds a slot of rank 0 and writes the formation."""
    nonce: str
    """Tells one start from another."""
    size: int
    """Number of ranks, rank 0 included."""
    store: str
    """Where the ranks find each other."""
    fingerprint: str
    """Of the weights that rank 0 has."""
    version: str = ""
    """Of MiniSGL on rank 0."""
    settings: str = ""
    """How rank 0 computes. It must be the same on all ranks."""

    def fields(self) -> dict[str, str]:
        """Return the fields of its entry after `nonce` and `ms`, the moment of the commit."""
        rank_0 = {"slot": self.rank_0.slot, "owner": str(self.rank_0)}
        shared = {"fingerprint": self.fingerprint, "version": self.version, "settings": self.settings}
        return rank_0 | {"size": str(self.size), "store": self.store} | shared

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Formation:
        """Return what an entry says.

        Raises:
            UndecodableEvent: The entry is no formation.
        """
        try:
            epoch, _, nonce = fields["owner"].partition(":")
            rank_0, size = Owner(fields["slot"], int(epoch), nonce), int(fields["size"])
            shared = (fields[name] for name in ("nonce", "store", "fingerprint", "version", "settings"))
            nonce_of_start, store, fingerprint, version, settings = shared
            return cls(rank_0, nonce_of_start, size, store, fingerprint, version, settings)
        except (KeyError, ValueError) as error:
            raise UndecodableEvent(f"a formation of ranks does not decode: {error!r} in {dict(fields)}") from error


class RankLog(StreamLog, Protocol):
    """The log as ranks use it."""

    def form(self, group: str, formation: Formation, *, ttl_ms: int) -> str:
        """Write the newest formation of *group*, which deletes the older ones, and return its id.

        The stream lives for *ttl_ms*. The same formation again, by its nonce, only changes that. Raises Fenced if
        rank 0 has lost its slot.
        """

    def joined(self, owner: Owner, group: str, entries: Sequence[Entry]) -> None:
        """Consume formations that the rank *owner* has joined, or will not join. Raises Fenced.

        The entries stay for the other ranks.
        """


def formation_to_join(log: RankLog, owner: Owner, group: str, *, block_ms: int) -> tuple[Entry, Formation] | None:
    """Wait up to *block_ms* for a formation that the rank *owner* may join: the newest one, if its rank 0 lives.

    It stays pending until the rank has `joined` it. If the rank dies before, its next owner gets the formation again.
    One whose rank 0 has another owner now is consumed. Raises Fenced only where it writes: `joined` is what decides.

    Raises:
        GroupLost: The group has no formation yet, or none now.
        UndecodableEvent: An entry is no formation.
    """
    inbox = ranks_inbox(log.names, group, slot_stage(owner.slot))
    log.claim(inbox, owner, 1)
    entries = log.pending(inbox, owner.slot) or log.read(inbox, owner.slot, max_entries=1, block_ms=block_ms)
    for entry in entries:
        formation = Formation.parse(entry.fields)
        holder = log.lease(formation.rank_0.slot).holder
        if holder == str(formation.rank_0):
            return entry, formation
        if holder:  # a free lease may be taken again by the same owner: then the formation comes again
            log.joined(owner, group, [entry])
    return None
