"""Reads the header of GGUF files, the format of llama.cpp. No torch, no numpy.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The blocks of weights: `ggml-common.h` there.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError

TYPES: Final[Mapping[str, tuple[int, int, int]]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
"""Types of tensors that we read: name -> (`ggml_type`, weights of a block, bytes of a block)."""
BLOCKS: Final = {**TYPES, "INT4_32": (100, 32, 20), "INT4_64": (101, 64, 36), "INT4_128": (102, 128, 68)}
"""The same, and what the integers of quantized checkpoints become in memory: see `kernels/blocks.c`."""
_OTHERS = (
    *("Q2_K", "Q3_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"),
    *("I8", "I16", "I32", "I64", "F64", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
OTHERS: Final = dict(zip((10, 11, *range(15, 30), 34, 35, 39, 40), _OTHERS, strict=True))
"""Names of other types, for errors."""
SPLIT: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MOST_ELEMENTS: Final = 2**21
"""Elements of all arrays of a file: the largest vocabularies of today, with merges and types, have half of that."""
MOST_STRING_BYTES: Final = 2**20
MOST_HEADER_BYTES: Final = 2**26
"""Gemma has the largest vocabulary of today, and a quarter of that."""
MOST_ENTRIES: Final = 2**16
"""Fields of metadata, and tensors, of one file."""
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. The shape has the outputs first, as in torch; `begin` is an offset in the file."""

    type: str
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        _, weights, size = BLOCKS[self.type]
        return math.prod(self.shape) // weights * size


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file."""

    path: Path
    fields: Mapping[str, Any]
    """Metadata. Arrays are tuples."""
    tensors: Mapping[str, GgufTensor]
    header_bytes: int
    """Bytes before the data of the tensors."""


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model that *path* is one of: itself, or all of `NAME-00001-of-0000N.gguf`.

    Raises:
        ConfigError: One of them is missing.
    """
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count:
        raise ConfigError(f"{path}: its name says {found['number']} of {count} files; give it the name that it had")
    before, after = found["stem"], path.name[found.end("number") :]
    paths = tuple(path.with_name(f"{before}-{number:05}{after}") for number in range(1, count + 1))
    for part in paths:
        if not part.is_file():
            raise ConfigError(f"{part}: not found; {path.name} is one of {count} files, which belong together")
    return paths


def read_gguf(path: Path) -> GgufFile:
    """Read the header of one file.

    Raises:
        ConfigError: It cannot be read, or is broken, or has a tensor of a type that we do not read.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path}: not a GGUF file: it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class _Reader:
    path: Path
    data: mmap.mmap
    at: int = 4
    elements: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    def read(self) -> GgufFile:
        version = self.scalar("I")
        if version not in (2, 3):
            raise ConfigError(f"{self.path}: GGUF version {version}; supported: 2 and 3, little endian")
        num_tensors, num_fields = self.count("tensors"), self.count("fields")
        for _ in range(num_fields):
            name = self.string()
            if name in self.fields:
                raise self.broken(f"{name!r:.80} is there twice")
            self.fields[name] = self.value(self.scalar("I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**16:
            raise self.broken(f"general.alignment is {alignment!r:.80}")
        begin = reached = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in infos:
            tensor = GgufTensor(kind, shape, begin + offset)
            if name in tensors:
                raise self.broken(f"{name} is there twice")
            if tensor.begin != reached:
                raise self.broken(f"{name} has offset {offset}; expected {reached - begin}")
            reached += -(-tensor.size // alignment) * alignment
            if tensor.begin + tensor.size > len(self.data):
                raise ConfigError(
                    f"{self.path}: truncated: {name} ends at byte {tensor.begin + tensor.size}, the file has "
                    f"{len(self.data)}; download it again"
                )
            tensors[name] = tensor
        if sum(tensor.shape[0] for tensor in tensors.values() if len(tensor.shape) > 2) > MOST_EXPERTS:
            raise self.broken(f"it has more than {MOST_EXPERTS} experts")
        return GgufFile(self.path, self.fields, tensors, begin)

    def tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        name, num_dimensions = self.string(), self.scalar("I")
        if not 0 < len(name) <= 64 or not name.isprintable():
            raise self.broken(f"a tensor has the name {name!r:.80}")
        if not 0 < num_dimensions <= 4:
            raise self.broken(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self.scalar("I"), self.scalar("Q")
        kind = next((kind for kind, (known, *_) in TYPES.items() if known == number), "")
        if not kind:
            raise ConfigError(
                f"{self.path}: {name} is {OTHERS.get(number, f'of type {number}')}; supported: {', '.join(TYPES)};"
                " pass another file of this model, such as its Q4_K_M"
            )
        if not all(shape) or shape[-1] % BLOCKS[kind][1]:
            raise self.broken(f"{name} has shape {shape}; rows of {kind} have a multiple of {BLOCKS[kind][1]}")
        return name, kind, shape, offset

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.broken(f"a field has type {kind}")
        inner, length = self.scalar("I"), self.scalar("Q")
        if inner == _ARRAY:
            raise self.broken("an array has arrays in it")
        self.elements += length
        if self.elements > MOST_ELEMENTS:
            raise self.broken(f"its arrays have {self.elements} elements; at most {MOST_ELEMENTS} are read")
        if inner in _SCALARS:
            return self.unpack(f"{length}{_SCALARS[inner]}")
        if inner != _STRING:
            raise self.broken(f"an array has elements of type {inner}")
        return tuple(self.string() for _ in range(length))

    def count(self, what: str) -> int:
        count = int(self.scalar("Q"))
        if count > MOST_ENTRIES:
            raise self.broken(f"it says that it has {count} {what}; at most {MOST_ENTRIES} are read")
        return count

    def scalar(self, letter: str) -> Any:
        return self.unpack(letter)[0]

    def unpack(self, letters: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{letters}")
        begin = self.at
        self.at += layout.size
        if self.at > min(len(self.data), MOST_HEADER_BYTES):
            raise self.broken("its header ends early, or is too large")
        return layout.unpack_from(self.data, begin)

    def string(self) -> str:
        length = int(self.scalar("Q"))
        begin = self.at
        self.at += length
        if length > MOST_STRING_BYTES or self.at > len(self.data):
            raise self.broken(f"a text of {length} bytes begins at byte {begin}, the file has {len(self.data)}")
        return self.data[begin : self.at].decode(errors="replace")

    def broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: broken: {what}; download it again")


# ---- tensors by the names that they have in a checkpoint of the hub

_MODULES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
MOST_EXPERTS: Final = 2**17
"""Matrices of experts of a file: the largest models of today have a quarter of that."""
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODULES_OF: Final[Mapping[str, Mapping[str, str]]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Modules that an architecture has beside `_MODULES`, or instead."""
ROPE_FACTORS: Final = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Divisors of the frequencies of the rope. They become a part of the config."""


def named(name: str, tensor: GgufTensor, architecture: str = "") -> dict[str, GgufTensor]:
    """Return a tensor under its name on the hub; all experts of a layer are one tensor, and become one for each.

    *architecture*: `general.architecture`. Unknown names are kept.
    """
    if name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
        return {}
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None:
        return {_WHOLE.get(name, name): tensor}
    layer, module, kind = found.groups()
    prefix = f"model.layers.{layer}"
    if module in _EXPERTS and len(tensor.shape) == 3 and kind == "weight":
        count, shape = tensor.shape[0], tensor.shape[1:]
        return {
            f"{prefix}.mlp.experts.{expert}.{_EXPERTS[module]}.weight": GgufTensor(
                tensor.type, shape, tensor.begin + expert * tensor.size // count
            )
            for expert in range(count)
        }
    modules = {**_MODULES, **_MODULES_OF.get(architecture, {})}
    return {f"{prefix}.{modules[module]}.{kind}" if module in modules else name: tensor}
