"""MemoryLog's methods for erasing requests."""

from __future__ import annotations

from collections.abc import Collection

from support.memory_log.archivers import MemoryArchivers
from support.memory_log.streams import id_text

from pipeline.events import encode
from pipeline.log.forgetting import Chooser, Purged, Unconsumed, of_journals, of_letters, of_replies, tombstone
from pipeline.names import GENERATE, SEAL, parse_id, slot_stage


class MemoryForgetting(MemoryArchivers):
    """RedisLog's methods beside RedisLog, on the streams and the lock of a MemoryLog."""

    _readers: dict[str, dict[str, int]]

    def archive_id(self) -> str:
        with self._changed:
            return self._archive_id

    def at_work(self, uids: Collection[str]) -> list[str]:
        inboxes = {"submitted": self.names.submitted, "tokenized": self.names.tokenized}
        return [name for name, stream in inboxes.items() if self._told(stream, uids).num_entries]

    def unread_steps(self) -> dict[str, tuple[str, str]]:
        with self._changed:
            engines = sorted(slot for slot in self._leases.owners if slot_stage(slot) == GENERATE)
            streams = {slot: self._streams.get(self.names.steps(slot)) for slot in engines}
            ids = {slot: [*map(id_text, stream.entries)] for slot, stream in streams.items() if stream is not None}
            return {slot: (found[0], found[-1]) for slot, found in ids.items() if found}

    def told(self, uids: Collection[str]) -> Unconsumed:
        return self._told(self.names.ended, uids)

    def _told(self, key: str, uids: Collection[str]) -> Unconsumed:
        with self._changed:
            stream = self._streams.get(key)
            entries = stream.entries if stream is not None else {}
            num_named = sum(fields.get("uid") in uids for fields in entries.values())
            return Unconsumed(id_text(next(iter(entries))) if entries else "", num_named)

    def erase(self, uid: str, *, finished: bool = False) -> bool:
        key = self.names.request(uid)
        with self._changed:
            history = self._streams.get(key)
            if history is not None and history.last != parse_id(SEAL):
                return False
            self._streams.drop(key)
            fields = {"ms": str(self._now_ms())} | encode(tombstone(finished=finished)) | {"n": "0"}
            stone = self._streams.append(key, SEAL, fields, make=True)
            assert stone is not None
            stone.expires_ms = self._now_ms() + self.limits.retention_ms
            self._readers.pop(uid, None)
            if not finished:
                self._streams.append(self.names.ended, None, {"uid": uid})
            return True

    def purge(self, uids: Collection[str]) -> Purged:
        with self._changed:
            keys = list(self._streams.by_key)
            self._leave_out(self.names.control, of_replies(uids))
            replies, journals = self.names.replies(""), self.names.journal("")
            return Purged(
                self._leave_out(self.names.dead, of_letters(uids)),
                sum(self._leave_out(key, of_replies(uids)) for key in keys if key.startswith(replies)),
                sum(self._leave_out(key, of_journals(uids)) for key in keys if key.startswith(journals)),
            )

    def rewrite_files(self) -> bool:
        """Return True: there are no files."""
        return True

    def are_rewritten(self) -> bool:
        return True

    def _leave_out(self, key: str, choose: Chooser) -> int:
        stream = self._streams.get(key)
        chosen = choose(stream.read(stream.entries)) if stream is not None else []
        for entry_id in chosen:
            assert stream is not None
            del stream.entries[parse_id(entry_id)]
        return len(chosen)
