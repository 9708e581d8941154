"""Folders that are made on the spot: once, whole, whoever else makes the same one at the same time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return *folder*; where it is not there yet, let *write* fill it first."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            write(made)
            try:
                os.replace(made, folder)  # all or nothing
            except OSError:  # a folder with something in it is not replaced: another one that started was faster
                if not folder.is_dir():
                    raise
    return folder
