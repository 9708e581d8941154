"""Makes of a quantized weight of the hub (`model/quantized.py`) the rows that the kernels pack: blocks, or floats.

No number is rounded. What blocks cannot have becomes float32: scales that are no halves, or 8 bits with a zero.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import TensorEntry
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.quantized import SCALES, Stored

# O = outputs, I = inputs, G = groups of inputs that share a scale, B = bytes of a row

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output, of every 8, that each 4 bits of a word are of, from the lowest on."""
NUMPY: Final[dict[str, Any]] = {"I32": "<i4", "I64": "<i8", "I8": "i1", "F16": "<f2", "F32": "<f4", "BF16": "<u2"}

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Zeros = npt.NDArray[np.int16]


class Unpacked(NamedTuple):
    """A weight as rows of blocks or floats."""

    kind: str
    """A type of `gguf.BLOCKS`."""
    rows_OB: Bytes
    order_I: npt.NDArray[np.int32] | None
    """Input of each weight of a row; None: they lie in order (GPTQ's `desc_act` orders them by their weight)."""


def unpacked(entry: TensorEntry) -> Unpacked:
    """Return the weight of *entry*.

    Raises:
        ConfigError: A scale is not a number, or the groups of inputs are not of the same size.
    """
    stored, kind = entry.stored, entry.dtype
    assert stored is not None
    scales_OG = _scales(stored)
    if not np.isfinite(scales_OG).all():
        raise ConfigError(f"{entry.file}: {stored.name} has a scale that is not a finite number; download it again")
    if stored.scheme.is_float:
        return Unpacked("F32", _as_bytes(_fp8(stored) * _spread(stored, scales_OG)), None)
    packed_OB, zeros_OG, order_I = _integers(stored, scales_OG.shape)
    halves_OG = scales_OG.astype(np.float16)
    is_exact = bool((halves_OG.astype(np.float32) == scales_OG).all())
    if kind.startswith("INT4") and is_exact:
        return Unpacked(kind, _int4(kind, packed_OB, halves_OG, zeros_OG, stored.group), order_I)
    if kind == "Q8_0" and is_exact and (zeros_OG == 128).all():
        return Unpacked(kind, _q8_0(packed_OB, halves_OG, stored.group), order_I)
    wide_OI = _nibbles(packed_OB) if stored.scheme.bits == 4 else packed_OB
    floats_OI = wide_OI.astype(np.float32) - _spread(stored, zeros_OG.astype(np.float32))
    return Unpacked("F32", _as_bytes(floats_OI * _spread(stored, scales_OG)), order_I)


def _integers(stored: Stored, shape: tuple[int, ...]) -> tuple[Bytes, Zeros, Any]:
    """Return the stored integers as bytes, two of 4 bits in one, the first in the low half; zeros_OG; and an order."""
    scheme, tensors = stored.scheme, stored.tensors
    order_I: npt.NDArray[np.int32] | None = None
    zeros_OG: Zeros
    packed_OB: Any
    if scheme.layout == "awq":
        words = _read(tensors["qweight"]).view(np.uint8).reshape(stored.shape[1], -1, 4)
        even, odd = words[0::2], words[1::2]
        packed = np.empty((len(even), words.shape[1], 8), np.uint8)
        packed[..., AWQ_ORDER[0::2]] = even & 15 | odd << 4
        packed[..., AWQ_ORDER[1::2]] = even >> 4 | odd & 0xF0
        packed_OB = np.ascontiguousarray(packed.reshape(len(even), -1).T)
        zeros = _read(tensors["qzeros"]).view(np.uint8).reshape(shape[1], -1, 4)
        spread = np.empty((*zeros.shape[:2], 8), np.uint8)
        spread[..., AWQ_ORDER[0::2]], spread[..., AWQ_ORDER[1::2]] = zeros & 15, zeros >> 4
        zeros_OG = spread.reshape(shape[1], -1).T.astype(np.int16)
    elif scheme.layout == "gptq":
        words = _read(tensors["qweight"])
        packed_OB = words.view(np.uint8).reshape(*words.shape, 4).transpose(1, 0, 2).reshape(stored.shape[0], -1)
        ones = np.uint32(scheme.zero_offset * (0x11111111 if scheme.bits == 4 else 0x01010101))
        zeros = (_read(tensors["qzeros"]).view(np.uint32) + ones).view(np.uint8)  # in words, as they were subtracted
        zeros_OG = (_nibbles(zeros) if scheme.bits == 4 else zeros).T.astype(np.int16)
    elif scheme.layout == "packed":
        packed_OB = _read(tensors["weight_packed"]).view(np.uint8)
        zeros_OG = np.full(shape, 1 << (scheme.bits - 1), np.int16)
        if "weight_zero_point" in tensors:
            words = _read(tensors["weight_zero_point"])
            per_output: Any = words.view(np.uint8).reshape(*words.shape, 4).transpose(0, 2, 1)
            if scheme.bits == 4:
                per_output = np.stack((per_output & 15, per_output >> 4), axis=2)
            zeros_OG = per_output.reshape(shape).astype(np.int16)
    else:
        packed_OB = _read(tensors["weight"]).view(np.uint8) ^ 128
        zeros_OG = np.full(shape, 128, np.int16)
        if "weight_zero_point" in tensors:
            zeros = _read(tensors["weight_zero_point"])
            zeros_OG += zeros.reshape(shape if zeros.size > 1 else (1, 1))
    for name in {"g_idx", "weight_g_idx"} & tensors.keys():
        packed_OB, order_I = _ordered(stored, packed_OB, _read(tensors[name]))
    return packed_OB, zeros_OG, order_I


def _ordered(stored: Stored, packed_OB: Bytes, groups_I: npt.NDArray[Any]) -> tuple[Bytes, Any]:
    """Return the integers in the order of their groups, and that order if it is another one."""
    expected_I = np.arange(stored.shape[1]) // stored.group
    if (groups_I == expected_I).all():
        return packed_OB, None
    order_I = np.argsort(groups_I, kind="stable").astype(np.int32)
    if not (groups_I[order_I] == expected_I).all():
        raise ConfigError(
            f"{stored.name}: its g_idx does not have {stored.group} inputs for each group; download it again"
        )
    if stored.scheme.bits == 8:
        return packed_OB[:, order_I], order_I
    return _packed(_nibbles(packed_OB)[:, order_I]), order_I


def _scales(stored: Stored) -> Floats:
    """Return scales_OG, in float32, which has every number of the other dtypes. Those of blocks are [O / size, G]."""
    name = next(name for name in SCALES if name in stored.tensors)
    scales = _floats(stored.tensors[name])
    if name == "scales":
        return scales.T
    if stored.scheme.block[1]:
        return scales
    scales = scales.reshape(-1, 1) if scales.size in (1, stored.shape[0]) else scales
    return np.broadcast_to(scales, (stored.shape[0], scales.shape[1]))


def _spread(stored: Stored, numbers_OG: Floats) -> Floats:
    """Return a number for each weight."""
    outputs, inputs = stored.shape
    num_outputs, num_inputs = stored.scheme.block if stored.scheme.block[1] else (1, stored.group)
    wide: Floats = np.repeat(np.repeat(numbers_OG, num_inputs, 1), num_outputs, 0)[:outputs, :inputs]
    return wide


def _fp8(stored: Stored) -> Floats:
    entry = stored.tensors["weight"]
    raw = torch.from_numpy(np.fromfile(entry.file, np.uint8, entry.end - entry.begin, offset=entry.begin))
    floats: Floats = raw.view(torch.float8_e4m3fn).float().numpy().reshape(stored.shape)
    return floats


def _int4(kind: str, packed_OB: Bytes, halves_OG: Any, zeros_OG: Zeros, group: int) -> Bytes:
    _, weights, size = BLOCKS[kind]
    blocks = np.zeros((len(packed_OB), packed_OB.shape[1] * 2 // weights, size), np.uint8)
    times = group // weights
    blocks[..., 0:2] = _as_bytes(np.repeat(halves_OG, times, 1)).reshape(*blocks.shape[:2], 2)
    blocks[..., 2] = np.repeat(zeros_OG, times, 1)
    blocks[..., 4:] = packed_OB.reshape(*blocks.shape[:2], -1)
    return blocks.reshape(len(blocks), -1)


def _q8_0(bytes_OI: Bytes, halves_OG: Any, group: int) -> Bytes:
    _, weights, size = BLOCKS["Q8_0"]
    blocks = np.empty((len(bytes_OI), bytes_OI.shape[1] // weights, size), np.uint8)
    blocks[..., 0:2] = _as_bytes(np.repeat(halves_OG, group // weights, 1)).reshape(*blocks.shape[:2], 2)
    blocks[..., 2:] = (bytes_OI ^ 128).reshape(*blocks.shape[:2], -1)
    return blocks.reshape(len(blocks), -1)


def _nibbles(packed: Bytes) -> Bytes:
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)


def _packed(nibbles: Bytes) -> Bytes:
    packed: Bytes = np.bitwise_or(nibbles[:, 0::2], nibbles[:, 1::2] << 4, dtype=np.uint8)
    return packed


def _as_bytes(numbers: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _read(entry: TensorEntry) -> npt.NDArray[Any]:
    dtype = np.dtype(NUMPY[entry.dtype])
    return np.fromfile(entry.file, dtype, (entry.end - entry.begin) // dtype.itemsize, offset=entry.begin).reshape(
        entry.shape
    )


def _floats(entry: TensorEntry) -> Floats:
    numbers = _read(entry)
    if entry.dtype != "BF16":
        return numbers.astype(np.float32)
    floats: Floats = (numbers.astype(np.uint32) << 16).view(np.float32)
    return floats
