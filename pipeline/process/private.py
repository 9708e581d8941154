"""Files and folders that only their owner can read, because they hold prompts and answers."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

PRIVATE_UMASK: Final = 0o077
LINK: Final = "a symbolic link; put the file itself there"
OURS: Final = (
    *("lock", "redis.sock", "redis.log", "serve.log", "shell_history"),
    *("appendonly.aof", "appendonlydir", "dump.rdb", "temp-*", "damaged-*"),
)
"""Files that we, and the servers that we start, keep in a data folder."""


def make_private(folder: Path) -> None:
    """Make *folder* and its missing parents, for their owner only. Existing ones stay as they are.

    Raises:
        OSError: The folder cannot be made.
    """
    missing = [path for path in folder.parents if not path.exists()]
    for path in (*reversed(missing), folder):
        path.mkdir(mode=0o700, exist_ok=True)


def tighten(folder: Path) -> None:
    """Remove other users' rights to our files in *folder*, which no process uses now.

    Rights to the folder itself are removed only if it has nothing else in it: `--data-dir` may name any folder.

    Raises:
        OSError: The folder cannot be read.
    """
    entries = list(folder.iterdir())
    ours = [path for path in entries if any(fnmatch(path.name, name) for name in OURS)]
    for path in ours:
        _tighten(path)
        if path.is_dir() and not path.is_symlink():
            for file in path.iterdir():
                _tighten(file)
    if len(ours) == len(entries):
        _tighten(folder)


def open_private(path: Path, flags: int, *, is_ours: bool = False) -> int:
    """Open a file that only its owner may read, and return its descriptor; an existing file loses wider rights.

    Raises:
        OSError: It cannot be opened; UnsafeFile: it *is_ours*, and `open_ours` would refuse it.
    """
    descriptor = open_ours(path, flags) if is_ours else os.open(path, flags | os.O_CLOEXEC, 0o600)
    _tighten(path)
    return descriptor


class UnsafeFile(OSError):
    """A file that we did not write: a link, a pipe or a device, or a file of another user."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor. Opening a named pipe would wait for its writer.

    Raises:
        OSError: It cannot be opened; UnsafeFile: it is a pipe, a device or the like.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeFile(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_ours(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that belongs to us, to root or to the owner of its folder. The folder may be a link.

    Raises:
        OSError: It cannot be opened; UnsafeFile: it is a symbolic link or another user's, or not a regular file.
    """
    try:
        descriptor = open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeFile(errno.ELOOP, LINK, str(path)) from error
    try:
        _check_owner(os.fstat(descriptor).st_uid, path)
    except UnsafeFile:
        os.close(descriptor)
        raise
    return descriptor


def check_ours(path: Path) -> None:
    """Check what `open_ours` checks, without opening the file.

    Raises:
        OSError: As `open_ours`.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeFile(errno.ELOOP, LINK, str(path))
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFile(errno.EINVAL, "not a regular file", str(path))
    _check_owner(status.st_uid, path)


def _check_owner(owner: int, path: Path) -> None:
    if owner not in (os.geteuid(), 0) and owner != os.stat(path.parent).st_uid:
        raise UnsafeFile(errno.EPERM, f"it belongs to user {owner}, and its folder does not", str(path))


def _tighten(path: Path) -> None:
    """Remove all rights of other users, if we are the owner."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or not status.st_mode & PRIVATE_UMASK:
        return
    with contextlib.suppress(PermissionError):  # a file system without rights
        path.chmod(stat.S_IMODE(status.st_mode) & ~PRIVATE_UMASK)
