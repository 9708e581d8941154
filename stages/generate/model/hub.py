"""Fetches models from the Hugging Face hub into that library's cache, before any process starts.

The library is imported only if the name of such a model is given. Its settings also work here: HF_HOME, HF_HUB_OFFLINE,
HF_ENDPOINT, HF_TOKEN and `hf auth login`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError
from stages.generate.model.gguf import SPLIT

ID: Final = r"(?P<id>\w[\w.-]*/\w[\w.-]*)"
FILE: Final = r"(:(?P<file>[^:\s]+))?"
NAME: Final = re.compile(rf"(?![^:@]*\.(?i:gguf)$){ID}(@(?P<revision>[\w./-]+))?{FILE}", re.ASCII)
"""`folder/file.gguf` is a path."""
PAGE: Final = re.compile(
    rf"(https?://)?(www\.)?(huggingface\.co|hf\.co)/{ID}(/tree/(?P<revision>[\w./-]+?))?/?([?#][^:]*)?{FILE}",
    re.ASCII | re.IGNORECASE,
)
"""Address of a model's page, as people copy it, or `hf.co/owner/name:Q4_K_M`, as for llama.cpp and Ollama."""
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
    """`owner/name` with a branch, tag or commit; "" is the main branch. *file*: name or type of a GGUF file, or ""."""

    id: str
    revision: str
    file: str = ""

    @property
    def name(self) -> str:
        """Name under which the model is served."""
        return f"{self.id}:{self.file}" if self.file else self.id

    @property
    def given(self) -> str:
        """Name of the model as a user may write it."""
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def hub_model(model: str) -> HubModel | None:
    """Return the model of the hub that `--model` names; None if it is a folder, or not such a name or page."""
    found = PAGE.fullmatch(model) or NAME.fullmatch(model)
    if found is None or Path(model).is_dir():
        return None
    return HubModel(found["id"], found["revision"] or "", found["file"] or "")


def fetch(model: HubModel, *, weights: bool) -> Path:
    """Return the folder of the model in the library's cache; download the files that are missing.

    Raises:
        ConfigError: The model is not available; the message says why and what to do.
    """
    folder = _download(model, [*TEXT_FILES, *(WEIGHT_FILES if weights else ())])
    is_whole = (folder / "tokenizer.json").is_file() and (not weights or any(folder.glob("*.safetensors")))
    if not is_whole and (models := _gguf_models(model)):
        raise ConfigError(
            f"--model {model.given}: this repository has GGUF files; pass {model.given}:TYPE; there are "
            f"{_choices(models)}"
        )
    if not any((folder / name).is_file() for name in ("config.json", "tokenizer.json", "adapter_config.json")):
        raise ConfigError(f"--model {model.given}: this repository has neither config.json nor GGUF files")
    return folder


def fetch_gguf(model: HubModel) -> Path:
    """Return the GGUF file that *model* names, or the first of its parts; download those that are missing.

    Raises:
        ConfigError: It is not available, or not exactly one file fits; the message says what can be passed.
    """
    models = _gguf_models(model)
    fitting = _fitting(models, model.file)
    if not models:
        raise ConfigError(f"--model {model.given}: this repository has no GGUF files; leave out :{model.file}")
    if not fitting:
        raise ConfigError(f"--model {model.given}: no GGUF file has this name or type; there are {_choices(models)}")
    if len(fitting) > 1:
        names = ", ".join(f"{name}.gguf" for name in fitting)
        raise ConfigError(f"--model {model.given}: {len(fitting)} GGUF files fit; pass one of {names} after the colon")
    files = models[fitting[0]]
    return _download(model, [escape(file) for file in files]) / files[0]


def _gguf_models(model: HubModel) -> dict[str, list[str]]:
    """Return the GGUF files of a repository; those in the cache if the hub cannot be reached.

    Models by their path without the ending, `-00001-of-0000N.gguf` for those in parts, which are in order.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(model.id, revision=model.revision or None)
        files = [sibling.rfilename for sibling in found.siblings or ()]
    except Exception:  # the download says why, unless the cache has the model
        folder = _download(model, [])
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and "mmproj" not in file.lower() and file.isprintable():
            part = SPLIT.fullmatch(file)
            models.setdefault(part["stem"] if part else file[: -len(".gguf")], []).append(file)
    return models


def _fitting(models: Mapping[str, Sequence[str]], wanted: str) -> list[str]:
    """Return those of *models* that are called *wanted*, or else have that type at their end or as their folder."""
    found = SPLIT.fullmatch(wanted)
    wanted = (found["stem"] if found else wanted).lower().removesuffix(".gguf")
    called = [model for model in models if f"/{model}".lower().endswith(f"/{wanted}")]
    return called or [
        model
        for model in models
        if model.lower().endswith((f"-{wanted}", f".{wanted}")) or wanted in model.lower().split("/")[:-1]
    ]


def _choices(models: Mapping[str, Sequence[str]]) -> str:
    """Return what can be passed for each of *models*: its type, if no other has it, or its file."""
    types = {model: re.split("[-./]", model)[-1] for model in models}
    return ", ".join(kind if _fitting(models, kind) == [model] else f"{model}.gguf" for model, kind in types.items())


def _download(model: HubModel, patterns: Sequence[str]) -> Path:
    """Return the folder of the model in the library's cache; download the files of *patterns* that are missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # the library would draw a progress bar even into a log file
        disable_progress_bars()
    # Nothing that it warns of is news: a repository with GGUF files alone has none of the others.
    logging.getLogger(snapshot_download.__module__).setLevel(logging.ERROR)
    try:
        return Path(snapshot_download(model.id, revision=model.revision or None, allow_patterns=list(patterns)))
    except Exception as error:  # errors of the library, of its HTTP client (which has changed before), of the disk
        raise ConfigError(f"--model {model.given}: {_reason(model, error)}") from error


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
