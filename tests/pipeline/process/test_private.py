"""Files for their owner alone, and folders of other people, which stay as they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.process.private import make_private, open_private, tighten


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    umask = os.umask(0o022)
    yield
    os.umask(umask)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_and_its_new_parents_are_private_and_older_parents_stay(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    make_private(old / "new" / "newer")
    assert [mode(path) for path in (old, old / "new", old / "new" / "newer")] == [0o755, 0o700, 0o700]


def test_a_folder_with_our_files_alone_loses_wider_rights_and_so_do_they(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "damaged-20261122T000000.000000").mkdir()
    files = ["lock", "redis.log", "serve.log", "appendonly.aof", "appendonlydir/appendonly.aof.1.incr.aof"]
    for name in files:
        (folder / name).write_text("")
    tighten(folder)
    assert {mode(folder / name) for name in files} == {0o600}
    assert {mode(path) for path in (folder, *folder.iterdir()) if path.is_dir()} == {0o700}


def test_a_folder_with_files_of_others_stays_open_and_ours_in_it_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("letter.txt", "appendonly.aof"):
        (folder / name).write_text("")
    tighten(folder)
    assert [mode(path) for path in (folder, folder / "letter.txt", folder / "appendonly.aof")] == [0o755, 0o644, 0o600]


def test_a_link_and_what_it_leads_to_stay(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
    (elsewhere / "file").write_text("")
    (folder / "appendonlydir").symlink_to(elsewhere)
    (folder / "redis.log").symlink_to(elsewhere / "file")
    tighten(folder)
    assert [mode(path) for path in (elsewhere, elsewhere / "file", folder)] == [0o755, 0o644, 0o700]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_somebody_else_owns_stays(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "redis.log").write_text("")
    for path in (folder, folder / "redis.log"):
        os.chown(path, 12345, 12345)
    tighten(folder)
    assert [mode(folder), mode(folder / "redis.log")] == [0o755, 0o644]


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in ((tmp_path / "file", FileExistsError), (tmp_path / "file" / "folder", NotADirectoryError)):
        with pytest.raises(error):
            make_private(path)


@pytest.mark.parametrize("was_there", [False, True])
def test_an_opened_file_is_private_whether_new_or_old(tmp_path: Path, was_there: bool) -> None:
    path = tmp_path / "file"
    if was_there:
        path.write_text("old")
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    assert mode(path) == 0o600
