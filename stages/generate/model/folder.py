"""Finds the folder of the model of `--model` and checks it, before any process starts. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from stages.generate.model.checkpoint import DEMO_FOLDER, check_folder, check_tokenizer
from stages.generate.model.foreign import refuse_name
from stages.generate.model.hub import fetch, hub_model


def model_folder(model: str, *, text_alone: bool = False, dummy: bool = False) -> Path:
    """Return the checked folder of *model*: a folder, a model of the hub, which is fetched, or "" for the demo model.

    *text_alone*: only the tokenizer is needed. *dummy*: no weights are needed.

    Raises:
        ConfigError: The folder lacks what is needed; the message names the file or tensor.
    """
    if not model:
        folder = DEMO_FOLDER
    elif (on_hub := hub_model(model)) is not None:
        folder = fetch(on_hub, weights=not text_alone and not dummy)
    else:
        refuse_name(model)
        folder = Path(model).expanduser().absolute()
    if text_alone:
        check_tokenizer(folder)
    else:
        check_folder(folder, dummy=dummy)
    return folder
