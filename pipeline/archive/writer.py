"""Writes requests into an archive, and removes old files. Each owner of an archiver's slot has one writer.

Several archivers share a folder. Each appends to files of its own; any of them mends and removes the files of all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import structlog

from pipeline.archive.reader import Archive, volumes
from pipeline.archive.volume import DAMAGED, SUFFIX, ArchiveDamaged, Volume, place_of
from pipeline.errors import LogError
from pipeline.process.private import UnsafeFile
from pipeline.recording import Recording

logger = structlog.get_logger()

FREE_SHARE: Final = 20
"""A twentieth of the disk stays free, because the embedded Redis writes there, too; at most MOST_FREE_BYTES."""
MOST_FREE_BYTES: Final = 4 << 30


class ArchiveFull(LogError):
    """There is no room for more files, or the disk takes none."""


class Writer:
    """Appends to the volume of this hour, for the owner of *slot* with *epoch*."""

    def __init__(
        self, folder: Path, slot: str, epoch: int, *, max_bytes: int = 0, clock_s: Callable[[], float] = time.time
    ) -> None:
        """*max_bytes*: `tidy` removes the oldest files above this size; 0: no limit."""
        self.folder = folder
        self._archive = Archive(folder)
        self._slot, self._epoch = slot, epoch
        self._max_bytes = max_bytes
        self._clock_s = clock_s

    def begin(self) -> None:
        """Take back what dead archivers have half written.

        Raises:
            ArchiveFull: The files cannot be written.
        """
        try:
            for volume in volumes(self.folder):
                volume.mend()
        except OSError as error:
            raise ArchiveFull(f"{self.folder} cannot be written: {error.strerror}") from error

    def write(self, recordings: Sequence[Recording]) -> int:
        """Write the *recordings* that are not in the archive yet; return how many. All are then on the disk.

        A request that ended again, because Redis had lost its end, is written again.

        Raises:
            ArchiveFull: There is no room. Nothing is written.
        """
        try:
            there = self._archive.find([recording.uid for recording in recordings])
            ended_ms = {uid: place.ended_ms for uid, (_, place) in there.items()}
            new = [each for each in recordings if place_of(each).ended_ms > ended_ms.get(each.uid, -1)]
            if new:
                self._check_room()
                volume = Volume.now(self.folder, self._slot, self._epoch, self._clock_s())
                try:
                    volume.append(new)
                except ArchiveDamaged:
                    volume.set_aside()
                    volume.append(new)
            return len(new)
        except OSError as error:
            raise ArchiveFull(f"{self.folder} cannot be written: {error.strerror}") from error

    def forget(self, uids: Collection[str], report_progress: Callable[[], None] = lambda: None) -> int:
        """Remove all copies of *uids* from the files of all archivers; return how many there were.

        *report_progress* is called before each file.

        Raises:
            ArchiveFull: A file cannot be rewritten.
            VolumeBusy: Another process writes to a file.
        """
        num_removed = 0
        try:
            for volume in self._archive.holding(uids, report_progress):
                # Forgetting makes room in the end. Until then it may take half of what must stay free.
                self._check_room(volume.num_bytes(), share=0.5)
                num_removed += volume.leave_out(uids)
            return num_removed
        except OSError as error:
            raise ArchiveFull(f"{self.folder} cannot be written: {error.strerror}") from error

    def tidy(self, retain_s: float) -> list[str]:
        """Remove the files that are older than *retain_s* (0: none is too old), and the oldest ones above the archive's
        largest size. Files of this hour stay. Return their names.

        Raises:
            ArchiveFull: A file cannot be removed.
        """
        now_s = self._clock_s()
        found = volumes(self.folder)
        sizes = {volume: volume.num_bytes() for volume in found}
        total, removed = sum(sizes.values()), []
        try:
            for volume in found:
                is_old = retain_s > 0 and volume.until_s + retain_s < now_s
                is_too_much = self._max_bytes > 0 and total > self._max_bytes
                if volume.until_s <= now_s and (is_old or is_too_much):
                    try:
                        volume.remove()
                    except UnsafeFile:  # files that are not ours stay
                        continue
                    total -= sizes[volume]
                    removed.append(volume.path.name)
                    reason = "retain" if is_old else "max-bytes"
                    logger.info("archive_removed", file=volume.path.name, reason=reason, bytes=sizes[volume])
            for path in self.folder.glob(f"*{SUFFIX}{DAMAGED}*"):
                if 0 < retain_s < now_s - path.lstat().st_mtime:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ArchiveFull(f"{self.folder} cannot be written: {error.strerror}") from error
        return removed

    def num_bytes(self) -> int:
        """Return the size of the archive on the disk."""
        return sum(volume.num_bytes() for volume in volumes(self.folder))

    def _check_room(self, needed: int = 0, share: float = 1.0) -> None:
        """Raise ArchiveFull unless *share* of what must stay free is free after *needed* more bytes."""
        disk = os.statvfs(self.folder)
        kept = min(disk.f_blocks * disk.f_frsize // FREE_SHARE, MOST_FREE_BYTES)
        free = disk.f_bavail * disk.f_frsize
        if free - needed < share * kept:
            need = f"{needed >> 20} MiB are needed for a moment, " if needed else ""
            raise ArchiveFull(
                f"{self.folder}: {free >> 20} MiB of the disk are free, {need}and {int(share * kept) >> 20} MiB must "
                "stay free; make room, or keep less with --retain or --max-bytes"
            )
