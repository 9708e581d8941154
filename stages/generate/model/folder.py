"""Finds the folder of the model of `--model` and checks it, before any process starts. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import DEMO_FOLDER, USUAL, check_folder, check_tokenizer, has_weights
from stages.generate.model.foreign import refuse_name
from stages.generate.model.gguf import SPLIT
from stages.generate.model.gguf_folder import gguf_folder
from stages.generate.model.hub import fetch, fetch_gguf, hub_model
from stages.generate.model.named import fetch_named, is_named
from stages.generate.model.spec import Loading


def model_folder(model: str, *, tokenizer: str = "", text_alone: bool = False, loading: Loading = USUAL) -> Path:
    """Return the checked folder of *model*: a folder, a GGUF file or a folder with one, a model or such a file of the
    hub, or smollm2, which are fetched, or "" for the demo model.

    *tokenizer*: a folder or a model of the hub whose tokenizer a GGUF file gets in place of its own. *text_alone*: only
    the tokenizer is needed.

    Raises:
        ConfigError: The folder lacks what is needed; the message names the file or tensor.
    """
    if file := _gguf_file(model):
        folder = gguf_folder(file, _tokenizer_folder(tokenizer) if tokenizer else None)
    elif tokenizer:
        raise ConfigError(f"--tokenizer {tokenizer}: is for GGUF files; a folder has its own tokenizer; leave it out")
    elif not model:
        folder = DEMO_FOLDER
    elif (on_hub := hub_model(model)) is not None:
        folder = fetch(on_hub, weights=not text_alone and not loading.dummy)
    else:
        refuse_name(model)
        folder = Path(model).expanduser().absolute()
    if text_alone:
        check_tokenizer(folder)
    else:
        check_folder(folder, loading)
    return folder


def served_name(model: str) -> str:
    """Return the default name of *model*, as in `--model`; "" if its folder has the name."""
    on_hub = hub_model(model)
    return on_hub.name if on_hub is not None else model if is_named(model) else ""


def _tokenizer_folder(tokenizer: str) -> Path:
    try:
        return model_folder(tokenizer, text_alone=True)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--model", "--tokenizer")) from error


def _gguf_file(model: str) -> Path | None:
    """Return the GGUF file that *model* is, or that it has as its weights; None: it has others. Those of the hub
    and smollm2 are fetched.

    Raises:
        ConfigError: It is a folder with several, or cannot be fetched.
    """
    path = Path(model).expanduser().absolute()
    if model.lower().endswith(".gguf") and path.is_file():
        return path
    if (on_hub := hub_model(model)) is not None and on_hub.file:
        return fetch_gguf(on_hub)
    if is_named(model):
        return fetch_named()
    if not model or has_weights(path):
        return None
    files = sorted(file for file in path.glob("*.gguf") if not file.name.lower().startswith("mmproj"))
    models = [file for file in files if (found := SPLIT.fullmatch(file.name)) is None or int(found["number"]) == 1]
    if len(models) > 1:
        raise ConfigError(
            f"{path}: has {len(models)} GGUF files; pass one of them: {', '.join(f.name for f in models)}"
        )
    return next(iter(models or files), None)
