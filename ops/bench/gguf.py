"""Converts a Qwen3 checkpoint for llama.cpp: `python ops/bench/gguf.py CHECKPOINT OUT.gguf bf16|q8_0`.

It runs in an environment with numpy and llama.cpp's package `gguf`, and imports nothing of ours. There is no vocabulary
in the file: it is for token ids alone. llama.cpp's own convert_hf_to_gguf.py converts other models.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def write_parameters(config: Mapping[str, Any], writer: Any) -> None:
    """Write what the config says about the model."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "qwen3" or rope.get("rope_type", "default") != "default":
        sys.exit(f"gguf.py converts qwen3 with the default rope, not {config['model_type']} with {rope}")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values, float32, of each tensor of the checkpoint."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        content = np.memmap(path, np.uint8, "r", offset=8 + size)
        for name, entry in header.items():
            if name != "__metadata__":
                raw = content[slice(*entry["data_offsets"])]
                yield name, _floats(raw, entry["dtype"]).reshape(entry["shape"])


def _floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def gguf_name(name: str) -> str:
    """Return the name that llama.cpp gives to a tensor of the checkpoint."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if not found or found[2] not in IN_A_LAYER:
        sys.exit(f"gguf.py does not know the tensor {name}")
    return f"blk.{found[1]}.{IN_A_LAYER[found[2]]}.weight"


def main(arguments: Sequence[str]) -> None:
    """Convert; end with a line if that cannot be."""
    if len(arguments) != 3 or arguments[2] not in KINDS:
        sys.exit("usage: gguf.py CHECKPOINT OUT.gguf bf16|q8_0")
    folder, kind = Path(arguments[0]), KINDS[arguments[2]]
    writer = gguf.GGUFWriter(arguments[1], "qwen3")
    write_parameters(json.loads((folder / "config.json").read_text()), writer)
    for name, values in tensors(folder):
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
