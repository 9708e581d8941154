"""Quantized checkpoints of the hub: which tensors of a file make up a weight, as the headers tell. No torch, no numpy.

| layout | tensors of a weight with O outputs and I inputs, and G groups of inputs that share a scale |
|---|---|
| awq | qweight [I, O / 8], qzeros [G, O / 8], scales [G, O] |
| gptq | qweight [I * bits / 32, O], qzeros [G, O * bits / 32], scales [G, O], and perhaps g_idx [I] |
| packed | weight_packed [O, I * bits / 32], weight_scale [O, G]; perhaps weight_zero_point [O * bits / 32, G], g_idx |
| plain | weight [O, I] in int8 or FP8, weight_scale [], [O], [O, G] or one for each block, perhaps weight_zero_point |

Sources: the `qlinear` modules of AutoAWQ and AutoGPTQ, https://github.com/vllm-project/compressed-tensors, and
`fp8_cast_bf16.py` of DeepSeek-V3. The tensors themselves tell which modules are quantized; a list of them is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pipeline.errors import ConfigError
from stages.generate.model.gguf import BLOCKS

if TYPE_CHECKING:
    from stages.generate.model.checkpoint import TensorEntry

METHODS: Final = "awq, gptq, compressed-tensors and fp8"
UNUSED: Final = frozenset(
    {"weight_shape", "activation_scale", "kv_scale"}
    | {f"{name}_{kind}" for name in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")}
)
"""Tensors that are not needed: a shape that the others have, too, and scales of activations."""
READ: Final = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
"""What of the weights of a config group decides how they lie."""
INT4: Final = {size: kind for kind, (_, size, _) in BLOCKS.items() if kind.startswith("INT4")}
"""Weights that share a scale in memory -> kind of their blocks."""
MOST: Final = 2**20
"""Largest group or block: more inputs than any model has."""
SCALES: Final = ("scales", "weight_scale", "weight_scale_inv")
"""Names of the scales of a weight: the first one that is there."""
WORD: Final = 32
"""Bits of the integers in which small ones are packed."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """What quantization_config says."""

    method: str
    layout: Literal["awq", "gptq", "packed", "plain"]
    bits: int
    group: int = 0
    """Inputs that share a scale; 0: all. For plain weights the shapes say it."""
    zero_offset: int = 0
    """What is added to a stored zero."""
    block: tuple[int, int] = (0, 0)
    """Outputs and inputs that share a scale of FP8; 0: all."""
    is_float: bool = False
    """Whether the numbers are FP8."""
    needs_zeros: bool = False
    """Whether each weight must have zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A quantized weight in the file."""

    name: str
    scheme: Scheme
    tensors: Mapping[str, TensorEntry]
    """By the last part of their names."""
    shape: tuple[int, int]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.scheme.group or self.shape[1]


def read_scheme(path: Path, given: object) -> Scheme | None:
    """Return what a `quantization_config` says, or None if there is none.

    Raises:
        ConfigError: We do not know it.
    """
    if given is None:
        return None
    config: dict[str, Any] = given if isinstance(given, dict) else {}
    method = config.get("quant_method")
    try:
        if method == "awq":
            return _awq(config)
        if method == "gptq":
            return _gptq(config)
        if method == "compressed-tensors":
            return _compressed(config)
        if method == "fp8":
            sizes = config.get("weight_block_size")
            return Scheme("fp8", "plain", 8, block=_pair(sizes) if sizes else (0, 0), is_float=True)
    except _UnknownError as unknown:
        raise ConfigError(
            f"{path}: quantization_config of {method}: {unknown}; pass another file of this model, such as its GGUF in "
            "Q4_K_M, or its weights that are not quantized"
        ) from None
    raise ConfigError(
        f"{path}: quantization_config has quant_method {json.dumps(method):.50}; supported are {METHODS}, and GGUF "
        "files; or pass the model that is not quantized, with --quantization int8 to save memory on a CPU"
    )


class _UnknownError(Exception):
    """What is not known, and what is."""


def _awq(config: Mapping[str, Any]) -> Scheme:
    version = config.get("version") or "gemm"
    _among("version", version.lower() if isinstance(version, str) else version, ("gemm",))
    bits = _among("bits", config.get("bits", config.get("w_bit")), (4,))
    return Scheme("awq", "awq", bits, _group(config.get("group_size", config.get("q_group_size"))))


def _gptq(config: Mapping[str, Any]) -> Scheme:
    rules = config.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-") for rule in rules):  # those leave modules out
        raise _UnknownError("dynamic is given: modules of different kinds are not supported")
    form = _among("checkpoint_format", config.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
    bits = _among("bits", config.get("bits"), (4, 8))
    return Scheme("gptq", "gptq", bits, _group(config.get("group_size")), zero_offset=int(form == "gptq"))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    every = [one for one in groups.values() if isinstance(one, dict) and isinstance(one.get("weights"), dict)]
    of_weights = [{name: one["weights"].get(name) for name in READ} for one in every]
    forms = [config.get("format") or one.get("format") for one in every]
    if not every or any(one != of_weights[0] for one in of_weights) or any(form != forms[0] for form in forms):
        raise _UnknownError("config_groups must say how weights are quantized, and the same for all")
    if config.get("transform_config"):
        raise _UnknownError("transform_config is given: rotated activations are not supported")
    weights = of_weights[0]
    form = _among("format", forms[0], ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    is_packed, is_float = form == "pack-quantized", form in ("float-quantized", "naive-quantized")
    bits = _among("num_bits", weights["num_bits"], (4, 8) if is_packed else (8,))
    _among("type", weights["type"] or "int", ("float" if is_float else "int",))
    strategies = ("tensor", "channel", "group", *(("block",) if is_float else ()))
    strategy = _among("strategy", weights["strategy"] or "tensor", strategies)
    group = _group(weights["group_size"]) if strategy == "group" else 0
    block = _pair(weights["block_structure"]) if strategy == "block" else (0, 0)
    needs_zeros = weights["symmetric"] is False and not is_float
    return Scheme(
        "compressed-tensors", "packed" if is_packed else "plain", bits, group, 0, block, is_float, needs_zeros
    )


def _among(name: str, value: object, known: tuple[Any, ...]) -> Any:
    """Return *value* if it is one of those that are known."""
    if type(value) not in (int, str) or value not in known:
        raise _UnknownError(f"{name} is {json.dumps(value):.50}; supported: {', '.join(map(str, known))}")
    return value


def _group(size: object) -> int:
    """Return a group's size; -1 or none at all: a whole row."""
    if size in (None, -1):
        return 0
    if type(size) is not int or not 0 < size <= MOST:
        raise _UnknownError(f"group_size is {json.dumps(size):.50}; expected a number of inputs, or -1")
    return size


def _pair(given: object) -> tuple[int, int]:
    sizes = given if isinstance(given, (list, tuple)) else ()
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size <= MOST for size in sizes):
        raise _UnknownError(f"the shape of a block is {json.dumps(given):.50}; expected two numbers")
    return sizes[0], sizes[1]


def gathered(tensors: Mapping[str, TensorEntry], scheme: Scheme) -> dict[str, TensorEntry]:
    """Return *tensors* with one entry for each quantized weight, in place of all that make it up.

    Its dtype is what the weight becomes in memory: blocks of INT4 or Q8_0, or floats. `begin` and `end` count the bytes
    of that.

    Raises:
        ConfigError: A part is missing, or the shapes do not fit together.
    """
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        module, _, kind = name.rpartition(".")
        modules.setdefault(module, {})[kind] = entry
    found: dict[str, TensorEntry] = {}
    for module, parts in modules.items():
        used = _parts_of(parts, scheme)
        found |= {f"{module}.{kind}": entry for kind, entry in parts.items() if kind not in used and kind not in UNUSED}
        if used and "weight" in parts.keys() - used:
            raise ConfigError(
                f"{parts['weight'].file}: {module}.weight is there beside its quantized form; one must go"
            )
        if used:
            found[f"{module}.weight"] = _entry(module, {kind: parts[kind] for kind in used}, scheme)
    return found


def _parts_of(parts: Mapping[str, TensorEntry], scheme: Scheme) -> set[str]:
    """Return which of a module's tensors make up a quantized weight; none: it has no such weight."""
    if scheme.layout in ("awq", "gptq"):
        main, others = "qweight", {"qzeros", "scales", "g_idx"}
    elif scheme.layout == "packed":
        main, others = "weight_packed", {"weight_scale", "weight_zero_point", "weight_g_idx"}
    else:
        main, others = "weight", {"weight_scale", "weight_scale_inv", "weight_zero_point"}
        if main in parts and parts[main].dtype not in ("I8", "F8_E4M3"):
            return set()
    return {main, *others} & parts.keys() if main in parts else set()


def _entry(module: str, parts: Mapping[str, TensorEntry], scheme: Scheme) -> TensorEntry:
    """Return the entry of a quantized weight."""
    kind = next(kind for kind in ("qweight", "weight_packed", "weight") if kind in parts)
    main = parts[kind]

    def refused(what: str) -> ConfigError:
        return ConfigError(f"{main.file}: {module}.{what}; it does not fit {scheme.method} in config.json")

    def check(name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        if name not in parts:
            raise refused(f"{name} is missing beside {kind}")
        entry = parts[name]
        if entry.dtype not in dtypes or (shapes and entry.shape not in shapes):
            expected = " or ".join(f"{'/'.join(dtypes)} {shape}" for shape in shapes or ("of two dimensions",))
            raise refused(f"{name} is {entry.dtype} {entry.shape}, expected {expected}")

    floats, per_word = ("F16", "BF16", "F32"), WORD // scheme.bits
    if len(main.shape) != 2 or not all(main.shape):
        raise refused(f"{kind} has shape {main.shape}, expected two dimensions")
    if scheme.needs_zeros and "weight_zero_point" not in parts:
        raise refused(f"weight_zero_point is missing beside {kind}")
    if scheme.is_float and "weight_zero_point" in parts:
        raise refused("weight_zero_point is there, which FP8 does not have")
    rows, columns = main.shape
    scale = next((name for name in SCALES if name in parts), "weight_scale")
    shape = {
        "awq": (columns * per_word, rows),
        "gptq": (columns, rows * per_word),
        "packed": (rows, columns * per_word),
        "plain": (rows, columns),
    }[scheme.layout]
    if shape[1] % (scheme.group or shape[1]):
        raise refused(f"{kind} has {shape[1]} inputs, which groups of {scheme.group} do not divide")
    groups = shape[1] // (scheme.group or shape[1])
    if scheme.layout == "plain":
        every = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if scheme.block[1]:
            every = [(-(-rows // scheme.block[0]), -(-columns // scheme.block[1]))]
        elif scheme.group:
            every = [(rows, groups)]
        check(kind, ("F8_E4M3",) if scheme.is_float else ("I8",))
        check(scale, floats, *every)
        if "weight_zero_point" in parts:
            check("weight_zero_point", ("I8",), parts[scale].shape)
    else:
        check(kind, ("I32",))
        words = shape[0] // per_word
        if scheme.layout == "packed":
            check(scale, floats, (shape[0], groups))
            if "weight_zero_point" in parts:
                check("weight_zero_point", ("I32",), (words, groups))
        else:
            check(scale, floats, (groups, shape[0]))
            check("qzeros", ("I32",), (groups, words))
        for name in {"g_idx", "weight_g_idx"} & parts.keys():
            check(name, ("I32", "I64"), (shape[1],))
    stored = Stored(f"{module}.weight", scheme, parts, shape)
    in_memory = _kind(stored)
    _, weights, size = BLOCKS[in_memory]
    end = shape[0] * (shape[1] // weights * size)
    return replace(main, dtype=in_memory, shape=shape, begin=0, end=end, stored=stored)


def _kind(stored: Stored) -> str:
    """Return what a weight becomes in memory, unless its numbers say that it cannot: then floats."""
    group = math.gcd(stored.group, 128)
    if stored.scheme.is_float:
        return "F32"
    if stored.scheme.bits == 4:
        return INT4.get(group, "F32")
    return "Q8_0" if group >= BLOCKS["Q8_0"][1] and stored.shape[1] % BLOCKS["Q8_0"][1] == 0 else "F32"
