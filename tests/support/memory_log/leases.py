"""Slots in this process: owners, leases and statuses of MemoryLog. The caller holds the lock."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.errors import DoesNotFit, Fenced
from pipeline.log.entries import STATUS_TTL_MS
from pipeline.log.protocol import GUEST, Lease, Owner
from pipeline.names import slot_index, slot_name, slot_stage
from pipeline.serving import Served, Serving


class Leases:
    """Every slot that was ever held."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._now_ms = clock_ms
        self.owners: dict[str, Owner] = {}
        """Slot -> owner, who may write for it."""
        self.held: dict[str, tuple[Owner, int]] = {}
        """Slot -> owner who took its lease, and when the lease expires."""
        self.said: dict[str, tuple[str, int]] = {}
        """Slot -> status, and when it expires."""
        self.served: dict[str, tuple[Serving, int]] = {}
        """Stage -> what it serves, and when that expires."""

    def fence(self, owner: Owner) -> None:
        if self.owners.get(owner.slot) != owner:
            raise Fenced(f"{owner.slot} has another owner than {owner}")

    def holder(self, slot: str) -> Owner | None:
        """Return the holder of the lease of *slot*."""
        holder, expires_ms = self.held.get(slot, (None, 0))
        return holder if self._now_ms() < expires_ms else None

    def lease(self, slot: str) -> Lease:
        holder = self.holder(slot)
        return Lease(str(holder), self.held[slot][1] - self._now_ms()) if holder is not None else Lease("", 0)

    def hold(self, owner: Owner, lease_ms: int) -> None:
        self.held[owner.slot] = owner, self._now_ms() + lease_ms

    def say(self, slot: str, status: str) -> None:
        self.said[slot] = status, self._now_ms() + STATUS_TTL_MS

    def acquire(self, slot: str, nonce: str, lease_ms: int, serving: Serving | None) -> Owner | None:
        holder, before = self.holder(slot), self.owners.get(slot)
        if holder is not None and holder.nonce == nonce:
            return holder
        if holder is not None and (nonce.startswith(GUEST) or not holder.is_guest):
            return None
        if not self._fits(serving):
            raise DoesNotFit(f"{slot}: other workers serve something else")
        owner = self.owners[slot] = Owner(slot, before.epoch + 1 if before is not None else 1, nonce)
        self.hold(owner, lease_ms)
        self._keep_serving(slot, serving, lease_ms)
        return owner

    def renew(self, owner: Owner, lease_ms: int, status: str, serving: Serving | None) -> bool:
        if self.owners.get(owner.slot) != owner or not self._fits(serving):
            return False
        self.hold(owner, lease_ms)
        self._keep_serving(owner.slot, serving, lease_ms)
        if status:
            self.say(owner.slot, status)
        return True

    def serving(self) -> dict[str, Served]:
        now_ms = self._now_ms()
        return {stage: Served(it, at_ms - now_ms) for stage, (it, at_ms) in self.served.items() if now_ms < at_ms}

    def _fits(self, serving: Serving | None) -> bool:
        return serving is None or not any(serving.difference(other.serving) for other in self.serving().values())

    def _keep_serving(self, slot: str, serving: Serving | None, lease_ms: int) -> None:
        if serving is None:
            return
        stage = slot_stage(slot)
        there = self.serving().get(stage, Served(serving, 0))
        self.served[stage] = there.serving, self._now_ms() + max(there.ttl_ms, lease_ms)

    def release(self, owner: Owner) -> bool:
        if self.holder(owner.slot) != owner:
            return False
        del self.held[owner.slot]
        self.said.pop(owner.slot, None)
        return True

    def statuses(self, stage: str) -> dict[str, str]:
        now_ms = self._now_ms()
        found = {slot: text for slot, (text, expires_ms) in self.said.items() if now_ms < expires_ms}
        indices = sorted(slot_index(slot) for slot in found if slot_stage(slot) == stage)
        return {slot_name(stage, index): found[slot_name(stage, index)] for index in indices}
