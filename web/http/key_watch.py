"""Reads the file of `--limits` again when it changes. A file with an error changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

import structlog

from pipeline.errors import ConfigError, LogError
from web.http.keys import Keys

logger = structlog.get_logger()

REVOKED_S: Final = 10.0
"""How long requests of owners without a key are ended: some may be on their way into the log."""
LOOK_EVERY_S: Final = 0.5
"""The file is read when two looks in a row have found the same: an editor may be in the middle of writing it."""

OnRevoked: TypeAlias = Callable[[frozenset[str]], Awaitable[object]]


class KeyWatch:
    """The keys of a server, as the file at *path* has them."""

    def __init__(self, path: str, read: Callable[[], Keys]) -> None:
        """Read the keys with *read*, and raise as it does."""
        self._path, self._read = Path(path).expanduser(), read
        self._mark = self._seen = _mark(self._path)
        self._revoked: dict[str, float] = {}
        """Owners that have lost their last key, and until when their requests are looked for."""
        self.keys = read()
        """The same object for as long as the process runs."""

    async def run(self, on_revoked: OnRevoked) -> NoReturn:
        """Look at the file until cancelled. *on_revoked* ends the requests of owners that have lost their last key."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look(on_revoked)

    async def _look(self, on_revoked: OnRevoked) -> None:
        before, self._seen = self._seen, await asyncio.to_thread(_mark, self._path)
        if self._seen == before != self._mark:
            self._mark = self._seen
            try:
                found = await asyncio.to_thread(self._read)
            except ConfigError as error:
                logger.error("limits_not_read", reason=str(error))
            else:
                until_s = time.monotonic() + REVOKED_S
                revoked = self._revoked | dict.fromkeys(self.keys.replace(found), until_s)
                self._revoked = {owner: until for owner, until in revoked.items() if owner not in found.owners}
                logger.info("limits_read", keys=found.num)
        if self._revoked:
            try:
                await on_revoked(frozenset(self._revoked))
            except LogError as error:
                logger.warning("requests_not_revoked", error=str(error))
            else:
                now_s = time.monotonic()
                self._revoked = {owner: until_s for owner, until_s in self._revoked.items() if until_s > now_s}


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the file; None: it cannot be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
