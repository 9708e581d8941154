"""Archived requests, for asyncio: files are read in threads, so that only the client who asks waits for a disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from pipeline.archive.reader import NOTHING_KNOWN, Archive, Where
from pipeline.errors import LogUnavailable
from pipeline.log.protocol import Entry
from pipeline.recording import Recording
from web.live.listener import Listener, Wake

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE: Final = 2
"""Clients whose requests are looked up at a time; each can read every index."""


class Archived:
    """The archive in *folder*; none if that is empty."""

    def __init__(self, folder: str = "") -> None:
        self._archive = Archive(Path(folder)) if folder else None
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def read(self, uids: Sequence[str], known: Mapping[str, Where] = NOTHING_KNOWN) -> dict[str, Recording]:
        """Return those of *uids* that the archive has. Those that are *known* need no search.

        Raises:
            LogUnavailable: It cannot be read.
            ArchiveDamaged: One of them cannot.
        """
        if self._archive is None or not uids:
            return {}
        return await self._asked(self._archive.read, uids, known)

    async def newest(self, before: str, most: int) -> tuple[dict[str, Where], str]:
        """As Archive.newest. Raises LogUnavailable if it cannot be read."""
        if self._archive is None:
            return {}, ""
        return await self._asked(self._archive.newest, before, most)

    async def _asked(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turns:
            try:
                return await asyncio.to_thread(question, *args, **kwargs)
            except OSError as error:
                raise LogUnavailable(f"the archive cannot be read: {error}") from error


def told(uid: str, history: Sequence[Entry], *, whole: bool, index: int, wake: Wake) -> Listener:
    """Return a listener that has all that it will ever hear: a *history* that is over. As `Tail.follow`."""
    listener = Listener(uid, _Nobody(), room=len(history) + 1, follows=True, whole=whole, index=index, wake=wake)
    listener.begin_read(time.monotonic())
    listener.apply_history(history)
    return listener


class _Nobody:
    """The Feed of listeners that need none."""

    def look(self) -> None: ...

    def drop(self, listener: Listener) -> None: ...

    def soon(self, do: Callable[[], None]) -> None:
        do()

    def count_gap_fill(self, reason: str) -> None: ...
