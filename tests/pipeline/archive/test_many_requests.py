"""An archive of many requests is still searched fast: a night makes 100,000 of them.

Times are those of this process on a CPU, because other programs may run. `archive_size.py` measures by the clock.
"""

from __future__ import annotations

import time
from pathlib import Path

from support.archive_size import DAY_S, FROM_S, fill, listed_s, opened_ms
from support.selection import by_night


def test_a_request_is_opened_within_100_ms_and_a_day_is_listed_within_2_s(tmp_path: Path) -> None:
    num_requests = by_night(2_000, 100_000)
    archive, clock_s = tmp_path / "archive", time.process_time
    uids = fill(archive, num_requests, 1)
    some = [uids[0], uids[num_requests // 2], uids[-1]]
    assert max(min(opened_ms(archive, [uid] * 3, clock_s)) for uid in some) < 100
    num_found, took_s = min((listed_s(archive, FROM_S, DAY_S, clock_s) for _ in range(3)), key=lambda one: one[1])
    assert num_found == num_requests and took_s < 2
