"""GGUF files written byte by byte, so they can be broken, and the smallest model in one."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from stages.generate.model.gguf import BLOCKS

Tensors: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (type, shape as in torch)"""
PIECES: Final = ("a", "b", "c", "Ġ", "ab", "Ġab", "<|im_start|>", "<|im_end|>")
FIELDS: Final[Mapping[str, Any]] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": list(PIECES),
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.bos_token_id": 6,
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
"""Metadata of a llama with one layer."""
TENSORS: Final[Tensors] = {
    "token_embd.weight": ("Q8_0", (8, 32)),
    "output_norm.weight": ("F32", (32,)),
    "blk.0.attn_norm.weight": ("F32", (32,)),
    "blk.0.ffn_norm.weight": ("F32", (32,)),
    "blk.0.attn_q.weight": ("Q4_0", (32, 32)),
    "blk.0.attn_k.weight": ("Q4_0", (16, 32)),
    "blk.0.attn_v.weight": ("Q4_0", (16, 32)),
    "blk.0.attn_output.weight": ("Q4_0", (32, 32)),
    "blk.0.ffn_gate.weight": ("Q4_0", (64, 32)),
    "blk.0.ffn_up.weight": ("Q4_0", (64, 32)),
    "blk.0.ffn_down.weight": ("F16", (32, 64)),
}


def text(content: str | bytes) -> bytes:
    """Return a string as in a file."""
    raw = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """Return a value with its type before it; bytes are that already."""
    match content:
        case bytes():
            return content
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<II", 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + text(content)
        case _:
            values = [value(one) for one in content]
            kind = values[0][:4].replace(b"\4", b"\5") if values else struct.pack("<I", 5)  # int32, as in real files
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(values)) + b"".join(one[4:] for one in values)


def info(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return the entry of a tensor."""
    dimensions = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


def header(fields: Mapping[str, Any], infos: list[bytes], *, version: int = 3) -> bytes:
    """Return all before the data of the tensors, as long as it is; fields that are None are left out."""
    entries = [text(name) + value(content) for name, content in fields.items() if content is not None]
    return b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)


def gguf_bytes(fields: Mapping[str, Any] = FIELDS, tensors: Tensors = TENSORS, *, alignment: int = 32) -> bytes:
    """Return a file whose weights are zeros."""
    infos, offset = [], 0
    for name, (kind, shape) in tensors.items():
        infos.append(info(name, shape, BLOCKS[kind][0], offset))
        size = math.prod(shape) // BLOCKS[kind][1] * BLOCKS[kind][2]
        offset += -(-size // alignment) * alignment
    begin = header(fields, infos)
    return begin + bytes(-len(begin) % alignment + offset)
