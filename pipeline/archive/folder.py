"""The id of an archive: all archivers of a namespace write to one folder, which has an id."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

import orjson

from pipeline.errors import ConfigError
from pipeline.process.private import make_private, open_ours, open_private

ID_FILE: Final = "archive.json"
ID_BYTES: Final = 1 << 16
"""Number of bytes of that file that are read."""
ARCHIVE_VERSION: Final = 1
"""Newest version of a folder that this code reads and writes."""


def archive_id(folder: Path) -> str:
    """Return the id of the archive in *folder*; "" if there is none.

    Raises:
        ConfigError: The folder, or its content, is not an archive that this version reads.
    """
    try:
        with open(open_ours(folder / ID_FILE), "rb") as file:
            said = orjson.loads(file.read(ID_BYTES))
    except FileNotFoundError:
        return ""
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{folder / ID_FILE}: cannot be read ({error}); expected an archive of MiniSGL") from error
    version, found = (said.get("v"), said.get("id")) if isinstance(said, dict) else (None, None)
    if type(version) is not int or not isinstance(found, str) or not found:
        raise ConfigError(f"{folder / ID_FILE}: expected the id of an archive of MiniSGL; name another folder")
    if version > ARCHIVE_VERSION:
        raise ConfigError(
            f"{folder}: an archive of version {version}, and this MiniSGL reads up to {ARCHIVE_VERSION}; "
            "use a newer one, or another folder"
        )
    return found


def make_archive(folder: Path, namespace: str) -> str:
    """Make *folder* an archive, unless it is one, and return its id.

    Raises:
        ConfigError: The folder cannot be an archive.
    """
    try:
        make_private(folder)
        _check_locks(folder)
        if not archive_id(folder):
            told = {"minisgl": "archive", "v": ARCHIVE_VERSION, "id": secrets.token_hex(16), "namespace": namespace}
            new = folder / f".{ID_FILE}.{secrets.token_hex(4)}"
            with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # the first one wins
                os.link(new, folder / ID_FILE)
            new.unlink()
            _sync(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be an archive: {error.strerror}; name a folder to write to") from error
    return archive_id(folder)


def _check_locks(folder: Path) -> None:
    """Raise ConfigError if files in *folder* cannot be locked, as on some network file systems."""
    path = folder / f".locks.{secrets.token_hex(4)}"
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"{folder}: its file system locks no files ({error.strerror}), and archivers would spoil each other's; "
            "name a folder on a local disk"
        ) from error
    finally:
        os.close(descriptor)
        path.unlink()


def _sync(folder: Path) -> None:
    """Write the names of new files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
