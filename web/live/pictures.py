"""Pictures of the pipeline for all viewers of this process. One thread reads the log while there are viewers.

It is a thread because a picture takes milliseconds, in which the loop could not send tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Final

import orjson
import structlog

from pipeline.errors import LogError
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.views.pipeline import Observed, view_of, without_addresses
from pipeline.views.reader import Reader, as_json
from pipeline.views.requests import Sees
from web.http.turns import RoundRobin

logger = structlog.get_logger()

APART_S: Final = 0.5
"""Least time between two pictures."""
SHARE: Final = 0.005
"""Most of a core that reading takes: where a picture is much work, they come less often."""
LONGEST_S: Final = 2.0
"""But at least so often."""
SILENT_S: Final = 5.0
"""Viewers are told if nothing came for this long, which is more than LONGEST_S."""
BUG: Final = "The picture failed; that is our bug."
HIDDEN: Final = "the admin key shows why"
"""Other viewers get this text instead of the message of Redis, which may name its address and its users."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """A viewer. Viewers of one *name* get the same pictures."""

    name: str
    sees: Sees
    """Whether it may see the requests of an owner."""
    is_admin: bool = False
    """Whether it also sees where the workers run, and the messages of Redis."""


class Picture:
    """The pipeline at one moment. *error*: why there is no newer one; *told*: the same for all but admins."""

    def __init__(self, reading: Observed | None, error: str = "", told: str = "") -> None:
        self.reading = reading
        self.error = error
        self._told = told or error
        self._texts: dict[str, bytes] = {}

    def text(self, viewer: Viewer) -> bytes:
        """Return its JSON; it is made once for each *viewer*."""
        if viewer.name not in self._texts:
            error = self.error if viewer.is_admin else self._told
            if self.reading is None:
                self._texts[viewer.name] = orjson.dumps({"error": error})
            else:
                view = replace(view_of(self.reading, viewer.sees), error=error)
                shown = view if viewer.is_admin else without_addresses(view)
                self._texts[viewer.name] = as_json(shown).rstrip()
        return self._texts[viewer.name]

    def without_news(self, error: str, told: str = "") -> Picture:
        """Return the same picture, which is not the newest any more."""
        return Picture(self.reading, error, told)


class Pictures:
    """The pictures of one log."""

    def __init__(self, log: AsyncRedisLog) -> None:
        self._log = log
        self._viewers = 0
        self._reading: _Reading | None = None
        self._latest: Picture | None = None
        self._number = 0
        self._changed = asyncio.Event()
        self._turns = RoundRobin(asyncio.get_running_loop())
        """Turns of the viewers: hundreds may wait for the same picture."""
        self._closed = False

    @property
    def is_reading(self) -> bool:
        """Return whether the log is read now."""
        return self._reading is not None

    async def watch(self, viewer: Viewer) -> AsyncGenerator[bytes, None]:
        """Yield pictures as JSON, the latest one first, until `close`. A slow viewer misses some."""
        self._enter()
        try:
            seen, since_s = 0, time.monotonic()
            while not self._closed:
                if (latest := self._latest) is not None and self._number != seen:
                    if (turn := self._turns.ask(viewer.name)) is not None:
                        await turn
                    seen, since_s = self._number, time.monotonic()
                    yield (self._latest or latest).text(viewer)
                elif not await self._has_changed():
                    silent = f"Redis has not answered for {time.monotonic() - since_s:.0f} s"
                    yield (self._latest or Picture(None)).without_news(silent).text(viewer)
        finally:
            self._leave()

    def close(self) -> None:
        """End all streams: this process stops."""
        self._closed = True
        self._changed.set()

    async def _has_changed(self) -> bool:
        """Wait for a picture. Return whether one came; False: there are no more."""
        try:
            async with asyncio.timeout(SILENT_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _enter(self) -> None:
        self._viewers += 1
        if self._reading is None:
            self._reading = _Reading(self._log.for_a_thread(), self, asyncio.get_running_loop())
            self._reading.start()

    def _leave(self) -> None:
        self._viewers -= 1
        if not self._viewers and self._reading is not None:
            self._reading.over.set()
            self._reading = self._latest = None

    def show(self, reading: _Reading, picture: Picture) -> None:
        """Take a new picture, unless *reading* is over. The loop calls it."""
        if reading is self._reading:
            self._latest = picture
            self._number += 1
            self._changed.set()
            if not self._closed:
                self._changed = asyncio.Event()


class _Reading(threading.Thread):
    """Reads the log again and again, from the first viewer that comes until the last one has left."""

    def __init__(self, log: RedisLog, pictures: Pictures, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="pictures", daemon=True)
        self._log = log
        self._pictures = pictures
        self._loop = loop
        self.over = threading.Event()

    def run(self) -> None:
        reader, latest = Reader(self._log), Picture(None)
        try:
            while not self.over.is_set():
                began_s, worked_s = time.monotonic(), time.thread_time()
                latest = _next_picture(reader, latest)
                try:
                    self._loop.call_soon_threadsafe(self._pictures.show, self, latest)
                except RuntimeError:  # the loop is closed: the process ends
                    return
                took_s, worked_s = time.monotonic() - began_s, time.thread_time() - worked_s
                self.over.wait(max(APART_S - took_s, min(worked_s / SHARE, LONGEST_S)))
        finally:
            self._log.close()


def _next_picture(reader: Reader, latest: Picture) -> Picture:
    try:
        return Picture(reader.read())
    except LogError as error:
        return latest.without_news(str(error) or type(error).__name__, HIDDEN)
    except Exception:  # a bug of ours with the data of one worker or request; the next picture may be fine
        logger.exception("picture_broke")
        return latest.without_news(BUG)
