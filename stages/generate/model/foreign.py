"""Recognizes what people pass as `--model` that is no checkpoint for us. The error says what it is and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError

SUPPORTED: Final = "supported are folders, GGUF files, and models of the Hugging Face hub"
OLLAMA: Final = re.compile(r"([\w.-]+/)*[\w.-]+:[\w.-]+", re.ASCII)
WEB: Final = re.compile(r"(https?://|(www\.)?huggingface\.co/|hf\.co/).*", re.IGNORECASE)
TOKENIZERS: Final = {
    "tekken.json": "Mistral's own format",
    "tokenizer.model": "SentencePiece",
    "vocab.json": "an older format",
}
"""Files of tokenizers from which transformers makes a tokenizer.json."""


def refuse_name(model: str) -> None:
    """Raise ConfigError if *model*, which names no folder and no model of the hub, is something else that we recognize.

    Raises:
        ConfigError: It is.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return
    if path.is_file():
        raise ConfigError(f"--model {model}: this is a file; pass the folder that holds it, {path.absolute().parent}")
    if OLLAMA.fullmatch(model):
        raise ConfigError(
            f"--model {model}: this is a name for Ollama; {SUPPORTED}; pass owner/name as on https://huggingface.co, "
            "such as Qwen/Qwen3-0.6B"
        )
    if WEB.fullmatch(model):
        raise ConfigError(f"--model {model}: this is no page of a model on https://huggingface.co; pass owner/name")
    if model.lower().endswith(".gguf"):
        raise ConfigError(f"--model {model}: not found; for a file of the Hugging Face hub pass owner/name:FILE.gguf")


def refuse_other_weights(folder: Path) -> None:
    """Raise ConfigError if *folder*, which lacks a part of a checkpoint, is something else that we recognize.

    Raises:
        ConfigError: It is.
    """
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = _base_of(adapter)
        raise ConfigError(
            f"{folder}: this is a LoRA adapter{base and f' of {base}'}, not a whole model; adapters are not supported; "
            "merge it into its model (`merge_and_unload` of peft), save that, and pass its folder"
        )


def tokenizer_missing(folder: Path) -> ConfigError:
    """Return the error for a folder without tokenizer.json."""
    missing = folder / "tokenizer.json"
    for name, kind in TOKENIZERS.items():
        if (folder / name).is_file():
            return ConfigError(
                f"{missing}: not found; {name} is {kind}, which is not supported; convert it with transformers: "
                "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` writes tokenizer.json"
            )
    return ConfigError(f"{missing}: not found; save the tokenizer as a fast one (tokenizer.json)")


def _base_of(adapter: Path) -> str:
    """Return the name of the model that an adapter belongs to; empty if it has none."""
    try:
        name = json.loads(adapter.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return name if isinstance(name, str) and name.isprintable() else ""
