"""Repairs the append-only file that an embedded Redis refused: keeps a copy, cuts at the last whole transaction.

The file is `appendonly.aof` up to Redis 6.2. Later servers have several in a folder, with a manifest: a snapshot, and
the commands since then.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from pipeline.process.aof import Damage, find_damage, has_snapshot
from pipeline.process.parent import request_death_signal

UNASKED_BYTES: Final = 64 * 1024
"""Largest number of bytes that may be cut off without `--repair`."""
FILE: Final = "appendonly.aof"
MANIFEST: Final = Path("appendonlydir") / f"{FILE}.manifest"
MANIFEST_LINE: Final = re.compile(r"file (\S+) seq \d+ type ([bi])\b")
"""Line about a snapshot (b, at most one) or about commands (i); snapshots are read first."""
CHECKER: Final = "redis-check-rdb, valkey-check-rdb"
"""Names under which a server's binary checks a snapshot instead."""
CHECKED: Final = re.compile(r"\[offset (\d+)\] [^\n]*RDB looks OK")
ANSWER_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The part that was cut off the data of a server."""

    file: Path
    lost_bytes: int
    """Number of bytes of this file and of those that would be read after it."""
    copies: Path
    """Folder with the files as they were."""
    reason: str


def cut_damage(folder: Path, binary: str, *, has_parts: bool, is_allowed: bool) -> Cut | None:
    """Cut the data of *binary* in *folder* at the last whole transaction. None: no damage is seen, or it cannot be cut.

    *has_parts*: the server keeps a manifest. More than `UNASKED_BYTES` are cut only if that *is_allowed*.

    Raises:
        ConfigError: More would be lost than is allowed, or there is no room for a copy.
    """
    parts = _parts(folder, has_parts=has_parts)
    arities = _read_arities(binary) if parts else {}
    for number, part in enumerate(parts):
        damage = _damage_of(part, binary, arities)
        if damage is None:
            continue
        later = parts[number + 1 :]
        lost_bytes = part.stat().st_size - damage.whole + sum(path.stat().st_size for path in later)
        if lost_bytes > UNASKED_BYTES and not is_allowed:
            raise ConfigError(
                f"{part} is damaged at byte {damage.at:,}: {damage.reason}; pass --repair to start without the last "
                f"{lost_bytes:,} bytes of the data (a copy is kept), or pass another --data-dir"
            )
        copies = keep_copies(folder, [part, *later])
        for path in reversed(later):  # from the end on: if killed in between, the next start finds the same damage
            _truncate(path, 0)
        _truncate(part, damage.whole)
        return Cut(part, lost_bytes, copies, f"byte {damage.at}: {damage.reason}")
    return None


def snapshot_of(folder: Path, *, has_parts: bool) -> Path | None:
    """Return the file in *folder* that begins with a snapshot; None if there is none."""
    for path in _parts(folder, has_parts=has_parts)[:1]:
        with path.open("rb") as file:
            return path if has_snapshot(file.read(6)) else None
    return None


def keep_copies(folder: Path, files: Sequence[Path]) -> Path:
    """Copy *files* into a folder within *folder*, and return it. The same damage gets the same folder, and no new copy.

    Raises:
        ConfigError: There is no room.
    """
    changed = datetime.fromtimestamp(files[0].stat().st_mtime, UTC)
    copies = folder / f"damaged-{changed:%Y%m%dT%H%M%S.%f}"
    try:
        copies.mkdir(mode=0o700, exist_ok=True)
        for path in files:
            copy, unfinished = copies / path.name, copies / f"{path.name}.unfinished"
            if not copy.exists():
                unfinished.touch(mode=0o600)
                shutil.copyfile(path, unfinished)
                _sync(unfinished)
                unfinished.rename(copy)
        _sync(copies)
        _sync(folder)
    except OSError as error:
        raise ConfigError(
            f"{files[0]} is damaged, and there is no copy of it yet in {copies}: {error.strerror}; make room and start "
            "again, or pass another --data-dir"
        ) from error
    return copies


def _parts(folder: Path, *, has_parts: bool) -> list[Path]:
    """Return the files in the order in which the server reads them."""
    if not has_parts:
        return [folder / FILE] if (folder / FILE).exists() else []
    try:
        lines = MANIFEST_LINE.findall((folder / MANIFEST).read_text(errors="replace"))
    except OSError:
        return []
    paths = [(folder / MANIFEST).parent / name for name, _ in sorted(lines, key=lambda line: line[1])]
    return paths if all(path.exists() for path in paths) else []


def _damage_of(path: Path, binary: str, arities: Mapping[bytes, int]) -> Damage | None:
    if path.suffix == ".rdb" or path.stat().st_size == 0:
        return None  # a snapshot alone: the server has read it before it refused what follows
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = _end_of_snapshot(path, binary) if has_snapshot(data) else 0
        return None if begin is None else find_damage(data, begin, arities)


def _end_of_snapshot(path: Path, binary: str) -> int | None:
    """Return where the snapshot at the start of a file ends; None if the server's own check finds it damaged."""
    command = [CHECKER, str(path)]
    done = subprocess.run(command, executable=binary, capture_output=True, text=True, errors="replace", check=False)
    found = CHECKED.search(done.stdout)
    return int(found[1]) if done.returncode == 0 and found is not None else None


def _read_arities(binary: str) -> dict[bytes, int]:
    """Start *binary* without data, and return its commands for `find_damage`.

    Raises:
        ConfigError: The binary does not start.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        path = Path(folder) / "redis.sock"
        options = f"--port 0 --unixsocket {path} --dir {folder} --appendonly no --logfile {folder}/log".split()
        process = subprocess.Popen(
            [binary, *options, "--save", ""],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            rows = _ask_for_commands(path, process)
        finally:
            process.kill()
            process.wait()
    if rows is None:
        raise ConfigError(f"{binary} does not start, not even without data")
    # A row is name, arity, and six to eight other values; subcommands are the tenth.
    rows = [each for row in rows for each in (row[9] if len(row) > 9 and row[9] else [row])]
    return {name.lower(): arity for name, arity, *_ in rows}


def _ask_for_commands(path: Path, process: subprocess.Popen[bytes]) -> list[Any] | None:
    from redis import ConnectionError, Redis  # not above: `serve` imports this file before its workers run

    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    with Redis(unix_socket_path=str(path), protocol=2) as client:
        client.response_callbacks.clear()
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                rows: list[Any] = client.execute_command("COMMAND")
            except ConnectionError:
                time.sleep(0.005)
            else:
                return rows
    return None


def _die_with_parent() -> None:
    request_death_signal(signal.SIGKILL)


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
