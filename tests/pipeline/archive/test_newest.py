"""The newest requests of an archive, in pages: each once, in order, with bounded work."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipeline.archive.reader
from pipeline.archive.reader import LATE_S, Archive
from pipeline.archive.writer import Writer
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.recording import Recording

NOW_S = 1_800_000_000
"""2027-01-15 08:00 UTC."""
HOUR_S = 3600
NEWEST = "~"


def request(number: int, made_s: float) -> Recording:
    uid = f"{int(made_s * 1000):012x}7abc8{number:015x}"
    first = {"kind": "submitted", "ms": str(int(made_s * 1000))}
    return Recording(uid, (Entry("0-1", first), Entry(SEAL, {"kind": "finished", "ms": str(int(made_s * 1000) + 9)})))


def write(folder: Path, at_s: float, *recordings: Recording, epoch: int = 1) -> None:
    Writer(folder, "archive-0", epoch, clock_s=lambda: at_s).write(recordings)


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    """The uids of ten hours of requests, the newest first. Every third one was archived in a later hour."""
    some = [request(number, NOW_S + HOUR_S * number / 3) for number in range(30)]
    for number, recording in enumerate(some):
        write(tmp_path, NOW_S + HOUR_S * (number // 3 + 2 * (number % 3 == 0)), recording)
    return [recording.uid for recording in reversed(some)]


@pytest.mark.parametrize("most", [1, 4, 100])
@pytest.mark.parametrize(("name", "value"), [("MOST_HOURS", 14), ("MOST_HOURS", 24), ("MOST_LINES", 2)])
def test_pages_have_each_request_once_and_the_newest_first(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, most: int, name: str, value: int
) -> None:
    monkeypatch.setattr(pipeline.archive.reader, name, value)
    found, before = list[str](), NEWEST
    while True:
        page, floor = Archive(tmp_path).newest(before, most)
        assert list(page) == sorted(page, reverse=True) and all(floor <= uid < before for uid in page)
        found += page
        if not floor:
            break
        assert floor < before, "it gets on"
        before = floor
    assert found == made


def test_many_requests_of_one_hour_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.archive.reader, "MOST_LINES", 7)
    some = [request(number, NOW_S + number // 3) for number in range(60)]
    write(tmp_path, NOW_S, *some)
    write(tmp_path, NOW_S, some[5], some[50], epoch=2)
    found, before = list[str](), NEWEST
    while before:
        page, floor = Archive(tmp_path).newest(before, 5)
        found += page
        assert page or not floor
        before = floor
    assert found == [recording.uid for recording in reversed(some)]


def test_it_says_where_they_are(tmp_path: Path, made: list[str]) -> None:
    archive = Archive(tmp_path)
    page, _ = archive.newest(made[3], 5)
    assert list(page)[:5] == made[4:9]
    assert list(archive.read(list(page), page)) == list(page)


def test_of_two_copies_the_later_end_counts(tmp_path: Path) -> None:
    (first, last) = (request(1, NOW_S) for _ in range(2))
    later = Recording(last.uid, (last.entries[0], Entry(SEAL, {"kind": "finished", "ms": str((NOW_S + 60) * 1000)})))
    write(tmp_path, NOW_S, first)
    write(tmp_path, NOW_S + HOUR_S, later, epoch=2)
    page, floor = Archive(tmp_path).newest(NEWEST, 5)
    assert {uid: place.ended_ms for uid, (_, place) in page.items()} == {last.uid: (NOW_S + 60) * 1000} and not floor


def test_what_came_long_after_it_was_made_is_left_out_of_later_pages(tmp_path: Path) -> None:
    old, new = request(1, NOW_S), request(2, NOW_S + 10)
    write(tmp_path, NOW_S + LATE_S + 2 * HOUR_S, old)
    write(tmp_path, NOW_S, new)
    assert list(Archive(tmp_path).newest(new.uid, 5)[0]) == []
    assert list(Archive(tmp_path).newest(NEWEST, 5)[0]) == [new.uid, old.uid]


def test_an_archive_without_files_has_none(tmp_path: Path) -> None:
    assert Archive(tmp_path).newest(NEWEST, 5) == ({}, "")
