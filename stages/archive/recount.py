"""Counts usage again, from the archive: Redis may have lost it, or a server of an older version did not count.

`used_by` has the rules of `count_usage` in commits/lib.lua. Requests may end meanwhile, and the work may be done twice:
`recount` only raises figures.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import add
from pathlib import Path
from typing import Final

import structlog

from pipeline.archive.reader import AnyVolume, volumes
from pipeline.archive.volume import ArchiveDamaged
from pipeline.errors import LogError, UndecodableEvent
from pipeline.events import End, Failed, Finished, Submitted, decode
from pipeline.log.operations.usage import DAY_MS, KEPT_DAYS, counts_prompt, is_counted, today
from pipeline.log.protocol import Owner, Used
from pipeline.log.redis import RedisLog
from pipeline.names import slot_index
from pipeline.recording import Recording
from pipeline.walk import NOT_COMPUTED

logger = structlog.get_logger()

AGAIN_S: Final = 600.0
"""Pause after an error."""
LEAVE_S: Final = 2.0
"""Longest time that an archiver which ends waits for the thread."""


def used_by(recording: Recording) -> tuple[str, int, str, Used] | None:
    """Return what a request has used, as (owner, day of its end, model, usage); None if it has not ended, is not
    counted or does not decode."""
    if not recording.is_sealed:
        return None
    first = {entry.fields.get("kind"): entry.fields for entry in reversed(recording.entries)}
    admitted, prompt, cached = first.get("admitted"), 0, 0
    try:
        submitted, end = decode(first.get("submitted", {}), without=NOT_COMPUTED), decode(recording.entries[-1].fields)
        if not isinstance(submitted, Submitted) or not is_counted(submitted) or not isinstance(end, End):
            return None
        if not counts_prompt(submitted, int(recording.uid.partition(".")[2] or 0)):
            pass
        elif isinstance(end, Finished):
            prompt, cached = end.usage.prompt_tokens, end.usage.cached_tokens
        elif admitted is not None:  # older versions do not say how long the prompt is
            prompt = int(admitted.get("prompt_tokens", 0)) or first["tokenized"]["token_ids"].count(",") + 1
            cached = int(admitted.get("cached_tokens", 0))
    except (UndecodableEvent, KeyError, ValueError):
        return None
    used = Used(1, int(isinstance(end, Failed)), prompt, cached, end.n)
    return submitted.owner, end.ms // DAY_MS, submitted.model, used


def recount(log: RedisLog, folder: Path, is_over: Callable[[], bool]) -> int:
    """Raise usage to what the archive in *folder* has, the newest day first; return the number of requests. It stops
    where *is_over*.

    Raises:
        LogError, OSError: The log or the archive cannot be reached.
    """
    since, num_requests = today() - KEPT_DAYS + 1, 0
    totals = defaultdict[tuple[str, int], dict[str, Used]](dict)
    for day, some in groupby(reversed(volumes(folder)), lambda volume: int(volume.until_s * 1000 - 1) // DAY_MS):
        if day < since:
            break
        changed = set[tuple[str, int]]()
        for counted in map(used_by, _of_a_day([*some][::-1])):
            if is_over():
                return num_requests
            if counted is not None and counted[1] >= since:
                owner, of_day, model, used = counted
                models = totals[owner, of_day]
                models[model] = Used(*map(add, models.get(model, Used()), used))
                changed.add((owner, of_day))
                num_requests += 1
        for owner, of_day in changed:
            if is_over():
                return num_requests
            log.recount(owner, of_day, totals[owner, of_day])
        for key in [key for key in totals if key[1] > day]:  # older files have no more of them
            del totals[key]
    return num_requests


def _of_a_day(some: Sequence[AnyVolume]) -> Iterator[Recording]:
    """Yield the requests of the files of one day. The newest file is last: what ends after it was read, and before its
    figures are in the log, is missing in them."""
    here, before = set[str](), set[str]()  # uids of an hour; a request ends again if Redis had lost its end
    for _, of_hour in groupby(some, lambda volume: volume.hour):
        here, before = set(), here
        for volume in of_hour:
            try:
                for recording in volume.recordings():
                    if recording.uid not in here and recording.uid not in before:
                        here.add(recording.uid)
                        yield recording
            except ArchiveDamaged as error:
                logger.warning("archive_file_refused", file=str(volume.path), reason=str(error))


@contextlib.contextmanager
def recounting(log: RedisLog, owner: Owner, folder: Path) -> Iterator[None]:
    """Recount in a thread while the block runs, if that was not done since the log lost its data. *log* is for the
    thread, which closes it. The archiver in the first slot does it for all."""
    over = threading.Event()
    thread = threading.Thread(target=_recount_once, args=(log, owner, folder, over), name="recount", daemon=True)
    if slot_index(owner.slot) == 0:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join(LEAVE_S)


def _recount_once(log: RedisLog, owner: Owner, folder: Path, over: threading.Event) -> None:
    with contextlib.closing(log):
        while not over.is_set():
            try:
                if log.is_recounted():
                    return
                num_requests = recount(log, folder, over.is_set)
                if not over.is_set():
                    log.recounted(owner)
                    logger.info("usage_recounted", requests=num_requests)
                    return
            except (LogError, OSError) as error:
                logger.warning("usage_not_recounted", error=str(error), again_s=AGAIN_S)
                over.wait(AGAIN_S)
