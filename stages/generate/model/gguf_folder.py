"""Makes a model folder of GGUF files: config and tokenizer from their metadata, and links to the files as the weights.

All other code reads it like any folder. It lies in the user's cache, under a hash of its sources. When they change,
another one is made.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from stages.generate.model.config import FULL, GENERATION_CONFIG, LOCAL, ORIGINAL_REACH
from stages.generate.model.gguf import (
    LONG_FACTORS,
    MOST_EXPERTS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GgufFile,
    GgufTensor,
    parts_of,
    read_gguf,
)
from stages.generate.model.gguf_tokenizer import write_tokenizer

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""`general.architecture`, and what it is on the hub."""
MADE_BY: Final = 3
"""Changes when a folder is made in another way: older ones are not used then."""
SAMPLING: Final = {
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
    **{name: name for name in ("top_k", "top_p", "min_p")},
}
"""What the author recommends: names in generation_config.json, and those of the metadata behind `general.sampling.`"""
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def gguf_folder(path: Path, tokenizer: Path | None = None) -> Path:
    """Return the model folder of a GGUF file, or of the first one of several; it is made if it is missing.

    *tokenizer*: a folder with the tokenizer to use in place of the file's own. A `generation_config.json` beside the
    file is used, too.

    Raises:
        ConfigError: A file is broken, or its model or tokenizer is not supported.
    """
    paths = parts_of(path)
    files = [read_gguf(one) for one in paths]
    given = {} if tokenizer is None else {name: tokenizer / name for name in TOKENIZER_FILES}
    given[GENERATION_CONFIG] = path.with_name(GENERATION_CONFIG)
    given = {name: file for name, file in given.items() if file.is_file()}
    digest = sha256(f"{MADE_BY} {[(one.stat().st_size, one.stat().st_mtime_ns) for one in paths]} {[*given]}".encode())
    for file in files:
        with file.path.open("rb") as opened:
            digest.update(opened.read(file.header_bytes))
    for text in given.values():
        digest.update(text.read_bytes())
    name = path.stem if len(paths) == 1 else path.stem.rpartition("-of-")[0].rpartition("-")[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "minisgl" / "gguf"
    folder = cache / digest.hexdigest()[:16] / name
    try:
        if not folder.is_dir():
            _make(folder, files, given)
        for one in paths:
            _link(folder / f"{one.stem}.gguf", one.absolute())
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _make(folder: Path, files: list[GgufFile], given: Mapping[str, Path]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config_of(files), indent=1))
        sampling = {name: files[0].fields.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
        (made / GENERATION_CONFIG).write_text(
            json.dumps({name: value for name, value in sampling.items() if value is not None})
        )
        for name, file in given.items():
            (made / name).write_bytes(file.read_bytes())
        if TOKENIZER_FILES[0] not in given:
            write_tokenizer(files[0].path, files[0].fields, made)
        try:
            made.replace(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink() or link.readlink() != target:
        new = link.with_name(f".{link.name}.{os.getpid()}")  # another process may read the folder meanwhile
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(link)


# ---- the config


def config_of(files: list[GgufFile]) -> dict[str, Any]:
    """Return the `config.json` of the model in *files*.

    Raises:
        ConfigError: It is not supported, or something is missing.
    """
    path, fields = files[0].path, files[0].fields
    name = fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(f"{path}: general.architecture is {name!r:.80}; supported: {', '.join(ARCHITECTURES)}")
    metadata = _Metadata(path, fields, name)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{path}: token_embd.weight is missing; this file has no whole model")
    num_rows, tokens = tensors["token_embd.weight"].shape[0], _array(fields, "tokens")
    if len(tokens) > num_rows:
        raise ConfigError(
            f"{path}: broken: {len(tokens)} tokens, {num_rows} rows of token_embd.weight; download it again"
        )
    num_layers = metadata.integer("block_count")
    if num_layers > len(tensors):
        raise metadata.wrong("block_count", f"at most {len(tensors)}, since there are no more tensors")
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // heads if heads else 0)
    metadata.refuse_unless("attention.value_length", head_dim)
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    if name != "phi3":
        metadata.refuse_unless("rope.dimension_count", head_dim)
    types = sorted({tensor.type for tensor in tensors.values() if len(tensor.shape) > 1})
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "vocab_size": num_rows,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": name == "llama" and "blk.0.attn_output.bias" in tensors,
        "rope_parameters": _rope(metadata, files, rotary_dim),
        "eos_token_id": _ends(fields, num_rows),
        "dtype": next((kind for key, kind in _DTYPES.items() if types == [key]), "bfloat16"),
        "gguf": _bytes_of_types(tensors),
        "gguf_architecture": name,
    }
    if name == "phi3":
        config["partial_rotary_factor"] = rotary_dim / head_dim
        config["sliding_window"] = metadata.get("attention.sliding_window")  # 0 and none: there is no window
        if (original := config["rope_parameters"].get(ORIGINAL_REACH)) is not None:
            config[ORIGINAL_REACH] = original
    if name in ("gemma2", "gemma3"):
        config |= _of_gemma(metadata, name, hidden // heads, head_dim)
    if name == "qwen3moe":
        if metadata.integer("expert_count") * num_layers > MOST_EXPERTS:
            raise metadata.wrong("expert_count", f"at most {MOST_EXPERTS} in {num_layers} layers")
        config |= {
            "num_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,  # as llama.cpp does for this architecture
        }
    return config


def _of_gemma(metadata: _Metadata, name: str, hidden_of_head: int, head_dim: int) -> dict[str, Any]:
    """Return what only Gemma's config has. As in llama.cpp, the number of layers says which scale the scores have."""
    is_27b = metadata.integer("block_count") == {"gemma2": 46, "gemma3": 62}[name]
    window = metadata.get("attention.sliding_window")
    config: dict[str, Any] = {
        "sliding_window": window,
        "query_pre_attn_scalar": hidden_of_head if is_27b else head_dim,
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    if name == "gemma2":  # the first files lack what all of these models have
        config = {field: value for field, value in config.items() if value is not None}
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        config["layer_types"] = [LOCAL if is_local else FULL for is_local in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    if name == "gemma3":
        config["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10_000.0)
    return config


def _bytes_of_types(tensors: Mapping[str, GgufTensor]) -> dict[str, int]:
    """Return the bytes of each type in memory: the head has a copy of tied embeddings, unless they are blocks."""
    every, embeddings = list(tensors.values()), tensors["token_embd.weight"]
    if "output.weight" not in tensors and embeddings.type in _DTYPES:
        every.append(embeddings)
    types = sorted({tensor.type for tensor in every})
    return {kind: sum(tensor.size for tensor in every if tensor.type == kind) for kind in types}


_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Metadata:
    """The fields of one architecture."""

    def __init__(self, path: Path, fields: Mapping[str, Any], architecture: str) -> None:
        self.path, self.fields, self.architecture = path, fields, architecture

    def get(self, name: str) -> Any:
        return self.fields.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: int = 0) -> int:
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise self.wrong(name, "a positive number")
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(name, "a positive number")
        return float(value)

    def refuse_unless(self, name: str, supported: object) -> None:
        if self.get(name) not in (None, supported):
            raise self.wrong(name, f"{supported}")

    def wrong(self, name: str, expected: str) -> ConfigError:
        seen = self.get(name)
        seen = "missing" if seen is None else f"{seen!r:.80}"
        return ConfigError(f"{self.path}: {self.architecture}.{name} is {seen}; expected {expected}")


def _factors(files: Iterable[GgufFile], name: str, rotary_dim: int) -> list[float]:
    """Return the divisors of a rope's frequencies, which are in the tensor *name*; empty: there is no such tensor."""
    for file in files:
        if (tensor := file.tensors.get(name)) is not None:
            if tensor.type != "F32" or tensor.shape != (rotary_dim // 2,):
                raise ConfigError(f"{file.path}: {name} is {tensor.type} {tensor.shape}; expected one F32 row")
            with file.path.open("rb") as opened:
                opened.seek(tensor.begin)
                return list(map(float, memoryview(opened.read(tensor.size)).cast("f")))
    return []


def _rope(metadata: _Metadata, files: Sequence[GgufFile], rotary_dim: int) -> dict[str, Any]:
    """Return `rope_parameters`. Llama 3 and Phi-3 have divisors of the frequencies in tensors, which are read here."""
    theta = metadata.number("rope.freq_base", 10_000.0)
    if factors := _factors(files, ROPE_FACTORS, rotary_dim):
        return {"rope_type": "factors", "rope_theta": theta, "factors": factors}
    short, long = (_factors(files, name, rotary_dim) for name in (SHORT_FACTORS, LONG_FACTORS))
    if short or long:
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        }
    metadata.refuse_unless("rope.scale_linear", 1.0)  # what old files call the factor
    kind = metadata.get("rope.scaling.type") or ("none" if metadata.get("rope.scaling.factor") is None else "linear")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise metadata.wrong("rope.scaling.type", "none, linear or yarn")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
        usual = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
        for name, supported in usual.items():
            metadata.refuse_unless(f"rope.scaling.{name}", supported)
    return rope


ENDS: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"),
    *("<EOT>", "_<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end an answer for llama.cpp, too, if a model has them."""


def _ends(fields: Mapping[str, Any], num_rows: int) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    ids = {fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    pairs = zip(_array(fields, "tokens"), _array(fields, "token_type"), strict=False)
    ids |= {index for index, (token, kind) in enumerate(pairs) if kind == 3 and token in ENDS}
    return sorted(index for index in ids if type(index) is int and 0 <= index < num_rows)


def _array(fields: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """Return an array of the tokenizer's metadata; empty: the file has none."""
    found = fields.get(f"tokenizer.ggml.{name}")
    return found if isinstance(found, tuple) else ()
