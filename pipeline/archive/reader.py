"""Finds requests in an archive by uid and by time. Any number of readers, on any machine with the folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, TypeAlias

from pipeline.archive.folder import archive_id
from pipeline.archive.old_volume import FRAMES, OldVolume
from pipeline.archive.volume import (
    HOUR_S,
    MOST_MS,
    READ_AT_ONCE,
    SUFFIX,
    ArchiveDamaged,
    Place,
    Volume,
    hour_of,
    parts_of,
)
from pipeline.errors import ConfigError
from pipeline.recording import Recording

SKEW_S: Final = HOUR_S
"""Largest time by which the clock that made a uid is ahead of an archiver's."""
LATE_S: Final = 12 * HOUR_S
"""Age at archiving above which a request, such as an imported one, is missing in a list of the newest ones. A copy that
was archived so long after another one is not found."""
MOST_HOURS: Final = 24
"""Number of hours whose files a list of the newest requests reads. More than LATE_S, so that it gets on."""
MOST_LINES: Final = 2000
"""Number of requests of one file in such a list."""
_DRAWN: Final = re.compile("[0-9a-f]{12}")

AnyVolume: TypeAlias = Volume | OldVolume
Where: TypeAlias = tuple[AnyVolume, Place]
"""Volume and place of a request."""
NOTHING_KNOWN: Final[Mapping[str, Where]] = {}


class Archive:
    """The requests in *folder*."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, uids: Sequence[str]) -> dict[str, Where]:
        """Return where the archive has requests of *uids*. Of several copies the one that ended last is used.

        Raises:
            OSError: The folder cannot be read.
        """
        found: dict[str, Where] = {}
        first, last = min(map(_first_hour, uids), default=""), "~"
        for volume in volumes(self.folder):
            if not first <= volume.hour <= last:
                continue
            for place in volume.find(uids):
                _keep(found, volume, place)
            if len(found) == len(uids):
                last = min(last, hour_of(volume.until_s * 1000 + LATE_S * 1000))
        return found

    def read(self, uids: Sequence[str], known: Mapping[str, Where] = NOTHING_KNOWN) -> dict[str, Recording]:
        """Return the requests of *uids* that the archive has. Those in *known* need no search.

        Raises:
            ArchiveDamaged: A request cannot be read.
            OSError: The folder cannot be read.
        """
        try:
            return self._read(uids, known)
        except (ArchiveDamaged, FileNotFoundError):  # perhaps the file was rewritten or removed meanwhile
            return self._read(uids, NOTHING_KNOWN)

    def listed(self, since_ms: int, until_ms: int) -> list[Place]:
        """Return the requests that were submitted from *since_ms* on and before *until_ms*, in order; each once.

        Raises:
            OSError: The folder cannot be read.
        """
        return [place for _, place in self.located(since_ms, until_ms).values()]

    def holding(self, uids: Collection[str], report_progress: Callable[[], None]) -> Iterator[AnyVolume]:
        """Yield the files that have some of *uids*, each copy of them. *report_progress* is called before each file.

        Raises:
            OSError: The folder cannot be read.
        """
        first = min(map(_first_hour, uids), default="")
        for volume in volumes(self.folder):
            report_progress()
            if volume.hour >= first and volume.find(uids):
                yield volume

    def copies(self, uids: Sequence[str] = ()) -> Iterator[Recording]:
        """Yield every copy of each request; with *uids*, without files from before the oldest of these was made.

        Raises:
            OSError: The folder cannot be read.
        """
        first = min(map(_first_hour, uids), default="")
        for volume in volumes(self.folder):
            if volume.hour >= first:
                yield from volume.recordings()

    def located(self, since_ms: int, until_ms: int) -> dict[str, Where]:
        """Return the same as `listed`, with the place of each request."""
        first = hour_of(max(0, since_ms - SKEW_S * 1000))
        found: dict[str, Where] = {}
        for volume in volumes(self.folder):
            for place in volume.places(since_ms, until_ms) if volume.hour >= first else ():
                _keep(found, volume, place)
        return dict(sorted(found.items(), key=lambda item: (item[1][1].made_ms, item[0])))

    def newest(self, before: str, most: int) -> tuple[dict[str, Where], str]:
        """Return the newest requests with smaller uids than *before*, the newest first, and a uid.

        From that uid on, the result is complete; below it there may be more requests. It is "" if there are none. The
        work is bounded: there may be more than *most* requests, or fewer, or none. Requests archived late are missing.

        Raises:
            OSError: The folder cannot be read.
        """
        drawn = _DRAWN.match(before)
        last = hour_of(int(drawn[0], 16) + LATE_S * 1000) if drawn else "~"
        hours = groupby((each for each in reversed(volumes(self.folder)) if each.hour <= last), lambda each: each.hour)
        found: dict[str, Where] = {}
        floor = cut = ""
        for number, (_, some) in enumerate(hours):
            of_hour = list(some)
            floor = f"{int(of_hour[0].until_s + SKEW_S) * 1000:012x}"
            if number == MOST_HOURS or sum(uid >= floor for uid in found) >= most:
                break
            for volume in of_hour:
                places = volume.newest(before, MOST_LINES)
                for place in places:
                    _keep(found, volume, place)
                if len(places) == MOST_LINES:  # another copy of the last one may be among those that are left out
                    cut = max(cut, min((each.uid for each in places if each.uid > places[-1].uid), default=""))
        else:
            floor = ""
        floor = max(floor, cut)
        return {uid: found[uid] for uid in sorted(found, reverse=True) if uid >= floor}, floor

    def recordings(self) -> Iterator[Recording]:
        """Yield every request, in the order of their submits. Raise the errors of `read`."""
        known = self.located(0, MOST_MS)
        uids = list(known)
        for first in range(0, len(uids), READ_AT_ONCE):
            yield from self.read(uids[first : first + READ_AT_ONCE], known).values()

    def since_ms(self) -> int | None:
        """Return when the oldest file begins, in ms since 1970; None if there is no file."""
        oldest = next(iter(volumes(self.folder)), None)
        return int(oldest.until_s - HOUR_S) * 1000 if oldest is not None else None

    def _read(self, uids: Sequence[str], known: Mapping[str, Where]) -> dict[str, Recording]:
        found = {uid: known[uid] for uid in uids if uid in known}
        if unknown := [uid for uid in uids if uid not in found]:
            found |= self.find(unknown)
        inside: dict[AnyVolume, list[str]] = {}
        for uid, (volume, _) in found.items():
            inside.setdefault(volume, []).append(uid)
        read: dict[str, Recording] = {}
        for volume, some in inside.items():
            read |= volume.read(some)
        if missing := next((uid for uid in found if uid not in read), ""):
            raise ArchiveDamaged(f"{found[missing][0].path}: {missing} is not there any more")
        return {uid: read[uid] for uid in found}


def volumes(folder: Path) -> list[AnyVolume]:
    """Return the volumes in *folder*, by hour; [] if there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found: list[AnyVolume] = []
    for suffix, volume in ((SUFFIX, Volume), (FRAMES, OldVolume)):
        parts = (parts_of(name.removesuffix(suffix)) for name in names if name.endswith(suffix))
        found += [volume(*each, folder) for each in parts if each]
    return sorted(found, key=lambda volume: (volume.hour, volume.slot, volume.epoch))


def open_archive(folder: str) -> Archive:
    """Return the archive in *folder*.

    Raises:
        ConfigError: There is none.
    """
    path = Path(folder).expanduser().absolute()
    if not archive_id(path):
        raise ConfigError(f"--archive: {path} is no archive; name the folder that minisgl stage archive --to has")
    return Archive(path)


def _first_hour(uid: str) -> str:
    """Return the first hour in which *uid* may have been archived: a uid begins with the time when it was made."""
    drawn = _DRAWN.match(uid)
    return hour_of(max(0, int(drawn[0], 16) - SKEW_S * 1000)) if drawn else ""


def _keep(found: dict[str, Where], volume: AnyVolume, place: Place) -> None:
    """Add a request, or a copy of it that ended later."""
    before = found.get(place.uid)
    if before is None or before[1].ended_ms <= place.ended_ms:
        found[place.uid] = volume, place
