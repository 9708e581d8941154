"""An archive of many requests is still searched fast: a night makes 100,000 of them."""

from __future__ import annotations

from pathlib import Path

from archive_size import fill, listed_s, opened_ms
from selection import by_night


def test_a_request_is_opened_within_100_ms_and_a_day_is_listed_within_2_s(tmp_path: Path) -> None:
    num_requests = by_night(2_000, 100_000)
    uids = fill(tmp_path / "archive", num_requests, 1)
    some = [uids[0], uids[num_requests // 2], uids[-1]]
    assert max(min(opened_ms(tmp_path / "archive", [uid] * 3)) for uid in some) < 100
    num_found, took_s = min((listed_s(tmp_path / "archive", 0) for _ in range(3)), key=lambda one: one[1])
    assert num_found == num_requests and took_s < 2
