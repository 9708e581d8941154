"""The id of an archive: all archivers of a namespace write to one folder, which has an id."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

import orjson

from pipeline.archive.volume import replace, sync_folder
from pipeline.errors import ConfigError
from pipeline.process.private import make_private, open_ours

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
        if not archive_id(folder):
            told = {"minisgl": "archive", "v": ARCHIVE_VERSION, "id": secrets.token_hex(16), "namespace": namespace}
            new = folder / f".{ID_FILE}.{secrets.token_hex(4)}"
            replace(new, orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
            with contextlib.suppress(FileExistsError):  # the first one wins
                os.link(new, folder / ID_FILE)
            new.unlink()
            sync_folder(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be an archive: {error.strerror}; name a folder to write to") from error
    return archive_id(folder)
