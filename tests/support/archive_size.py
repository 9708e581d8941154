"""Large archives. As a script, it measures how long it takes to open a request by its uid, and to list an hour.

PYTHONPATH=tests:. .venv/bin/python tests/support/archive_size.py [--requests 100000] [--days 1]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from support.histories import answered

from pipeline.archive.folder import make_archive
from pipeline.archive.reader import Archive, volumes
from pipeline.archive.writer import Writer
from pipeline.events import encode
from pipeline.log.protocol import Entry
from pipeline.recording import Recording

BATCH: Final = 32
"""Requests that an archiver writes together."""
DAY_S: Final = 86400
FROM_S: Final = 1_800_000_000 // DAY_S * DAY_S
PROMPT_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 100


def entries(made_ms: int) -> tuple[Entry, ...]:
    """Return the history of a request as a stage would have written it."""
    words, numbers = "word " * PROMPT_TOKENS, range(1, OUTPUT_TOKENS + 1)
    events = answered(*numbers, ids=range(PROMPT_TOKENS), text=lambda _: " word", prompt=words, model="m")
    return tuple(Entry(at, {"ms": str(made_ms + place)} | encode(event)) for place, (at, event) in enumerate(events))


def fill(folder: Path, num_requests: int, num_days: int) -> list[str]:
    """Make an archive of *num_requests* that came evenly in as many days; return their uids, the oldest first."""
    make_archive(folder, "minisgl")
    draw, now_s, uids = random.Random(0), float(FROM_S), list[str]()
    writer = Writer(folder, "archive-0", 1, clock_s=lambda: now_s)
    pattern = entries(0)
    for first in range(0, num_requests, BATCH):
        some = []
        for number in range(first, min(first + BATCH, num_requests)):
            made_ms = FROM_S * 1000 + num_days * DAY_S * 1000 * number // num_requests
            uid = f"{made_ms:012x}7{draw.randrange(16**3):03x}8{draw.randrange(16**15):015x}"
            times = (str(made_ms + int(entry.fields["ms"])) for entry in pattern)
            moved = (Entry(entry.id, {**entry.fields, "ms": ms}) for entry, ms in zip(pattern, times, strict=True))
            some.append(Recording(uid, tuple(moved)))
        now_s = made_ms / 1000
        uids += [recording.uid for recording in some]
        writer.write(some)
    return uids


def opened_ms(folder: Path, uids: Sequence[str], clock_s: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return how long it takes to open each of *uids*."""
    found = []
    for uid in uids:
        began_s = clock_s()
        assert Archive(folder).read([uid])[uid].is_sealed
        found.append((clock_s() - began_s) * 1000)
    return found


def listed_s(
    folder: Path, first_s: float, length_s: float, clock_s: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """Return how many requests came from *first_s* on within *length_s*, and how long it takes to list them."""
    since_ms, began_s = int(first_s * 1000), clock_s()
    num_found = len(Archive(folder).listed(since_ms, since_ms + int(length_s * 1000)))
    return num_found, clock_s() - began_s


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Make an archive, measure, print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--days", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="minisgl-archive-") as name:
        folder = Path(name) / "archive"
        began_s = time.perf_counter()
        uids = fill(folder, options.requests, options.days)
        took_s, found = time.perf_counter() - began_s, volumes(folder)
        size = sum(volume.num_bytes() for volume in found)
        _say(f"{len(uids):,} requests of {options.days} days, {len(found)} files, {size / 1e6:,.0f} MB, {took_s:.0f} s")
        draw = random.Random(1)
        for what, some in (
            ("the oldest", uids[:50]),
            ("the newest", uids[-50:]),
            ("any", [draw.choice(uids) for _ in range(200)]),
        ):
            times = opened_ms(folder, some)
            _say(f"open {what}: median {median(times):.1f} ms, longest {max(times):.1f} ms, of {len(times)}")
        for what, length_s in (("an hour", 3600), ("a day", DAY_S)):
            since_s = FROM_S + (options.days * DAY_S - length_s) // 2
            counts, times_s = zip(*(listed_s(folder, since_s, length_s) for _ in range(5)), strict=True)
            _say(f"list {what}: {counts[0]:,} requests, median of 5 {median(times_s):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
