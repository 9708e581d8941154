"""Fetches models from the Hugging Face hub into that library's cache, before any process starts.

The library is imported only if the name of such a model is given. Its settings also work here: HF_HOME, HF_HUB_OFFLINE,
HF_ENDPOINT, HF_TOKEN and `hf auth login`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError

NAME: Final = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
PAGE: Final = re.compile(
    r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<id>\w[\w.-]*/\w[\w.-]*)(/tree/(?P<revision>[\w./-]+?))?/?([?#].*)?",
    re.ASCII | re.IGNORECASE,
)
"""Address of a model's page, as people copy it."""
TEXT_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "adapter_config.json",
)
WEIGHT_FILES: Final = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
"""Not every safetensors file: some models have their weights a second time, for another program."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """`owner/name` with a branch, tag or commit; "" is the main branch."""

    id: str
    revision: str

    @property
    def given(self) -> str:
        """Name of the model as a user may write it."""
        return f"{self.id}@{self.revision}" if self.revision else self.id


def hub_model(model: str) -> HubModel | None:
    """Return the model of the hub that `--model` names; None if it is a folder, or not such a name or page."""
    found = PAGE.fullmatch(model) or NAME.fullmatch(model)
    if found is None or Path(model).is_dir():
        return None
    return HubModel(found["id"], found["revision"] or "")


def fetch(model: HubModel, *, weights: bool) -> Path:
    """Return the folder of the model in the library's cache; download the files that are missing.

    Raises:
        ConfigError: The model is not available; the message says why and what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # the library would draw a progress bar even into a log file
        disable_progress_bars()
    try:
        folder = Path(
            snapshot_download(
                model.id,
                revision=model.revision or None,
                allow_patterns=[*TEXT_FILES, *(WEIGHT_FILES if weights else ())],
            )
        )
    except Exception as error:  # errors of the library, of its HTTP client (which has changed before), of the disk
        raise ConfigError(f"--model {model.given}: {_reason(model, error)}") from error
    if not any((folder / name).is_file() for name in ("config.json", "tokenizer.json", "adapter_config.json")):
        raise ConfigError(
            f"--model {model.given}: this repository has no config.json; one with GGUF files alone is not supported; "
            "pass the model that the files were made from"
        )
    return folder


def _reason(model: HubModel, error: Exception) -> str:
    """Return one line that says why *model* is not available, and what to do."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    match error:
        case errors.GatedRepoError():
            return f"its owner asks for consent; agree at {hub}/{model.id}, then log in with `hf auth login`"
        case errors.RepositoryNotFoundError():
            return (
                f"neither a folder here nor a model that {hub} shows you; check the name, and for a private model log"
                " in with `hf auth login` or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return f"{hub}/{model.id} has no revision {model.revision}; leave out @{model.revision} for the main one"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"not a folder, and not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids downloads;"
                " unset it, or pass a folder"
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"not a folder, and {hub} cannot be reached ({_first_line(error)}); check the network, or pass a folder"
            )
    return f"could not be downloaded from {hub}: {_first_line(error)}; try again, or pass a folder"


def _first_line(error: Exception) -> str:
    """Return the first line of the first error: the library wraps its errors and explains them in paragraphs."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
