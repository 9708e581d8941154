"""GGUF files made of small checkpoints, with the package of llama.cpp, which also says what their weights are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.checkpoints import LOCAL_AND_GLOBAL, LONGROPE, LONGROPE_FROM, Family, make_checkpoint

SMALL = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
"""Types of blocks of 32 weights."""
SUPER = {"Q4_K", "Q5_K", "Q6_K"}
"""Types of blocks of 256 weights."""
BLOCK_TYPES = sorted(SMALL | SUPER)
ARCHITECTURES: Final[Mapping[Family, str]] = {
    "llama3": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
"""Sizes that blocks of 256 divide."""


def random_blocks(kind: str, rows: int, columns: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return rows of blocks with any integers and scales of a usual size."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // weights, size), np.uint8)

    def scales(largest: float) -> NDArray[np.uint8]:
        numbers = generator.uniform(-largest, largest, (rows, columns // weights, 1))
        return numbers.astype(np.float16).view(np.uint8)

    if kind == "Q6_K":
        blocks[..., 208:210] = scales(0.0002)
        return blocks.reshape(rows, -1)
    largest = {"Q4_0": 0.05, "Q8_0": 0.004, "Q5_0": 0.03, "Q4_1": 0.03, "Q5_1": 0.015, "Q4_K": 0.001, "Q5_K": 0.0006}
    blocks[..., 0:2] = scales(largest[kind])
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[..., 2:4] = scales(0.2 if kind in SMALL else 0.005)
    return blocks.reshape(rows, -1)


def dequantized(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the weights of rows of blocks, as llama.cpp's package says."""
    weights: NDArray[np.float32] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return weights


def tokenizer_fields(folder: Path) -> dict[str, Any]:
    """Return the metadata of the tokenizer of a made checkpoint."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"] | special, key=(tokenizer["model"]["vocab"] | special).__getitem__)
    template = folder / "chat_template.jinja"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": special[config["eos_token"]],
        "tokenizer.ggml.add_bos_token": "bos_token" in config,
        **({"tokenizer.ggml.bos_token_id": special[config["bos_token"]]} if "bos_token" in config else {}),
        "tokenizer.chat_template": template.read_text() if template.exists() else config["chat_template"],
    }


def write_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Write metadata, each value with a type that fits."""
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_array(name, value)


def mixed(name: str) -> str:
    """Return types as in a file called Q4_K_M, and more of them."""
    return {
        "token_embd.weight": "Q6_K",
        "output.weight": "Q8_0",
        "blk.0.attn_v.weight": "Q6_K",
        "blk.0.attn_k.weight": "Q5_K",
        "blk.1.attn_output.weight": "Q4_0",
        "blk.1.attn_v.weight": "BF16",
        "blk.0.ffn_down.weight": "Q5_1",
        "blk.1.ffn_down.weight": "Q5_0",
        "blk.1.ffn_up.weight": "Q4_1",
        "blk.0.ffn_gate_inp.weight": "F32",
        "blk.1.ffn_gate_inp.weight": "F32",
        "blk.0.ffn_down_exps.weight": "Q4_1",
        "blk.1.ffn_down_exps.weight": "Q6_K",
    }.get(name, "Q4_K")


def _model_fields(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if architecture in ("gemma2", "gemma3"):
        fields |= {
            "attention.key_length": config["query_pre_attn_scalar"],  # llama.cpp knows no other scale
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": 2,
        }
    if architecture == "gemma2":
        fields |= {name: config[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if architecture == "gemma3":
        local, every = (rope[kind] for kind in LOCAL_AND_GLOBAL)
        fields |= {
            "rope.freq_base_swa": float(local["rope_theta"]),
            "rope.scaling.type": "linear",
            "rope.scaling.factor": float(every["factor"]),
        }
    if architecture == "phi3":
        fields |= {
            "attention.sliding_window": config["sliding_window"],
            "rope.dimension_count": 48,
            "rope.scaling.original_context_length": LONGROPE_FROM,
            "rope.scaling.attn_factor": rope["attention_factor"],
        }
    if architecture == "qwen3moe":
        fields |= {
            "expert_count": config.get("num_experts") or config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def _rope_factors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Return what divides each frequency of a Llama 3, as llama.cpp's conversion computes it."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    lengths, original = 2 * np.pi / frequencies, rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    smooth = (original / lengths - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths < high, 1.0, np.where(lengths > low, rope["factor"], between))
    return factors.astype(np.float32)


def make_gguf(
    path: Path,
    family: Family,
    kind_of: Callable[[str], str],
    *,
    fields: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a GGUF file of a made checkpoint with random blocks; return a folder of the hub with the same weights.

    *kind_of* says the type of each matrix by its name in the file; norms and biases are F32. *fields* replace metadata;
    those that are None are left out. *sizes* replace some of `WIDE`.
    """
    # In these files every layer of a mixture has experts, no token of an architecture called llama has a window, every
    # fourth layer of a SmolLM3 has no rope, and the scale of a Gemma is that of its head_dim.
    if family == "smollm3":
        more |= {"num_layers": 4}
        sizes = {"no_rope_layers": [1, 1, 1, 0], **(sizes or {})}
    if family in ("gemma2", "gemma3"):
        sizes = {"query_pre_attn_scalar": 64, **(sizes or {})}
    if family == "phi3":
        factors = [1.0 + 0.1 * number for number in range(24)]
        more |= {"rope": LONGROPE | {"short_factor": factors[::-1], "long_factor": factors}}
    more |= {"experts": {"mlp_only_layers": []}} if family == "qwen3moe" else {}
    folder = make_checkpoint(path.parent / f"{path.stem}-original", family, sizes={**WIDE, **(sizes or {})}, **more)
    config = json.loads((folder / "config.json").read_text())
    if family == "mistral":
        config["sliding_window"] = None
    (folder / "config.json").write_text(json.dumps(config))
    architecture, generator = ARCHITECTURES[family], np.random.default_rng(7)
    weights = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture)
    every = _model_fields(config, architecture) | tokenizer_fields(folder) | dict(fields or {})
    write_fields(writer, {name: value for name, value in every.items() if value is not None})
    if family == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(config["rope_parameters"], config["head_dim"]))
    if family == "phi3":
        for kind in ("short", "long"):
            divisors = np.array(config["rope_parameters"][f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", divisors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    experts: dict[str, list[NDArray[np.uint8]]] = {}
    for name, weight in weights.items():
        module, suffix = name.rsplit(".", 1)
        turned = heads.get(module.split(".")[-1], 0) if architecture in ("llama", "smollm3") else 0
        stored = f"{names.get_name(re.sub(r'experts.[0-9]+', 'experts', module))}.{suffix}"
        assert not stored.startswith("None"), name
        kind = kind_of(stored) if weight.dim() == 2 else "F32"
        if architecture.startswith("gemma") and stored == "token_embd.weight" and kind in SUPER:
            kind = "Q8_0"  # random blocks are too wide: each token would be its own successor
        if architecture.startswith("gemma") and module.endswith("norm"):
            _add(writer, stored, (weight + 1).numpy(), kind)
            continue
        quantized = _stored(_turned(weight.float().numpy(), turned), kind, generator)
        wide = _turned_back(dequantized(kind, quantized), turned)
        weights[name] = torch.from_numpy(wide.reshape(weight.shape).copy())
        if ".experts." in name:
            experts.setdefault(f"{stored} {kind}", []).append(quantized)
        else:
            _add(writer, stored, quantized, kind)
    for key, quantized_ones in experts.items():
        stored, kind = key.split()
        _add(writer, stored, np.stack(quantized_ones), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _add(writer: gguf.GGUFWriter, name: str, stored: NDArray[Any], kind: str) -> None:
    writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])


def _stored(rows: NDArray[np.float32], kind: str, generator: np.random.Generator) -> NDArray[Any]:
    if kind in SUPER:
        return random_blocks(kind, rows.shape[0], rows.shape[1], generator)
    quantized: NDArray[Any] = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])
    return quantized


def _turned(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return q or k as llama.cpp's conversion writes those of a Llama: `permute` of convert_hf_to_gguf.py."""
    if not heads:
        return rows
    return np.ascontiguousarray(
        rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def _turned_back(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    if not heads:
        return rows
    return rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
