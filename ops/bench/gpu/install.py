"""Unpacks a folder of wheels for this process and those that it starts. The machine's own packages stay as they are.

A wheel is a zip file, so this needs nothing but Python: no pip, no network, no virtual environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError

FLAG: Final = "--wheels"
NEEDED: Final = ("torch", "numpy", "pydantic", "rich", "structlog", "orjson", "redis", "aiohttp", "tokenizers")
"""What the command itself imports; a phase that needs more says so itself."""


def wheels_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the folder that --wheels names, or "". The real parser of the flags is not here yet."""
    for index, argument in enumerate(arguments):
        if argument == FLAG:
            return "".join(arguments[index + 1 : index + 2])
        if argument.startswith(f"{FLAG}="):
            return argument.partition("=")[2]
    return environment.get("MINISGL_WHEELS", "")


def install(wheels: Path, folder: Path) -> None:
    """Unpack every wheel of *wheels* into *folder*, and let this process and its children import from there first.

    Raises:
        ConfigError: The folder has no wheels, or one of them is for another Python or machine.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ConfigError(f"{FLAG} {wheels}: no wheels there; `make gpu-wheels DIR={wheels}` writes some")
    for wheel in found:
        if not fits(wheel.name):
            here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sys.platform}"
            raise ConfigError(f"{FLAG} {wheels}: {wheel.name} is not for {here}")
        _unpack(wheel, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    sys.path.insert(1, str(folder))  # after the checkout, before the machine's own packages
    importlib.invalidate_caches()


def fits(wheel: str) -> bool:
    """Return whether the tags in the name of a wheel are for the Python that runs, on this kind of system."""
    *_, pythons, abis, platforms = wheel.removesuffix(".whl").split("-")
    here = sys.version_info[:2]
    for python in pythons.split("."):
        number = re.fullmatch(r"(cp|py)(\d)(\d*)", python)
        if number is None:
            continue
        wanted = (int(number[2]), int(number[3] or 0))
        later = number[1] == "py" or "abi3" in abis
        if wanted == here or (later and wanted[0] == here[0] and wanted <= here):
            return "any" in platforms or sys.platform in platforms
    return False


def _unpack(wheel: Path, folder: Path) -> None:
    """Unpack what can be imported, and programs, which keep their right to be run: bin/ninja is one. Scripts that an
    installer would have to fit to this Python, and headers, are left out.
    """
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            if (inside := re.fullmatch(r"[^/]+\.data/([^/]+)/(.+)", name)) is not None:
                is_program = inside[1] == "scripts" and not archive.read(info).startswith(b"#!python")
                if inside[1] not in ("purelib", "platlib") and not is_program:
                    continue
                info.filename = f"bin/{inside[2]}" if is_program else inside[2]
            made = Path(archive.extract(info, folder))
            if (mode := info.external_attr >> 16) & 0o111 and made.is_file():
                made.chmod(0o755 & (mode | 0o700))


def check() -> None:
    """See that what the command itself needs is there.

    Raises:
        ConfigError: The message names all that is missing.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"missing packages: {', '.join(missing)}; pass {FLAG} with the folder that `make gpu-wheels` wrote, or run "
            "`make venv`"
        )
