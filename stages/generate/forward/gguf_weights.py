"""Loads weights from GGUF files: as floats, or as the blocks that the kernels pack."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from ctypes import c_int, c_int64, c_void_p
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.forward.weights import DTYPES, Progress, clear_rest, fused_name, parts_of, places_of, seen
from stages.generate.kernels.library import Library, library
from stages.generate.model.checkpoint import read_tensors
from stages.generate.model.compiled import BlockMatrix
from stages.generate.model.gguf import BLOCKS, rotary_order
from stages.generate.model.spec import ModelSpec, tensor_shapes

PIECE_WEIGHTS: Final = 2**20
"""Weights that a thread widens at a time."""

# R = rows, C = columns of a tensor, O = outputs of a matrix


class _Source:
    """The tensors of a folder of GGUF files, and which part of each a rank has."""

    def __init__(self, spec: ModelSpec, shard: ModelSpec, folder: Path) -> None:
        self.entries, self.parts, self.shapes = read_tensors(folder), parts_of(spec, shard), tensor_shapes(shard)
        self.files = {path: np.memmap(path, np.uint8, "r") for path in {entry.file for entry in self.entries.values()}}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(self.bytes_of, self.shapes))

    def bytes_of(self, name: str) -> int:
        """Bytes of a whole tensor."""
        return self.entries[name].end - self.entries[name].begin

    def in_turn(self, names: Collection[str]) -> Iterator[tuple[int, str]]:
        """Yield the names as they lie in the files, each with the bytes up to its end."""
        done_bytes = 0
        for name in sorted(names, key=lambda name: (self.entries[name].file, self.entries[name].begin)):
            done_bytes += self.bytes_of(name)
            yield done_bytes, name

    def rows(self, name: str) -> npt.NDArray[np.uint64]:
        """Return the addresses of the rank's rows of a tensor, each from the rank's first column on."""
        entry, part = self.entries[name], self.parts[name]
        num_rows = entry.shape[0]
        size = (entry.end - entry.begin) // num_rows
        places = np.arange(num_rows, dtype=np.uint64)
        if entry.rotated_heads:
            places = np.array(rotary_order(entry.rotated_heads, num_rows // entry.rotated_heads), np.uint64)
        chosen = [places[rows.start : rows.stop] for rows in part.rows]
        weights, block_bytes = BLOCKS[entry.dtype][1:]
        first = entry.begin + part.columns.start // weights * block_bytes
        base = self.files[entry.file].ctypes.data + first
        return np.concatenate(chosen) * np.uint64(size) + np.uint64(base) if chosen else np.empty(0, np.uint64)


def load_gguf(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelSpec | None = None,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return the weights of GGUF files as floats: see `load_weights`."""
    source = _Source(spec, shard or spec, folder)
    weights, places = places_of(shard or spec, dtype, device)
    with seen(progress) as report:
        for done_bytes, name in source.in_turn(places):
            _widen(source, name, places[name])
            report(done_bytes, source.total_bytes)
    return weights


def load_blocks(
    spec: ModelSpec,
    folder: Path,
    *,
    shard: ModelSpec | None = None,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor | BlockMatrix]:
    """Return the weights of GGUF files for the kernels, by the fused names.

    q, k and v of different formats stay apart. Matrices of blocks stay in the files. Other tensors have the dtype of
    the file, and gate and up of different formats are float32.
    """
    source = _Source(spec, shard or spec, folder)
    weights: dict[str, Tensor | BlockMatrix] = {}
    with seen(progress) as report:
        done_bytes = 0
        for fused, group in groupby(source.shapes, key=fused_name):  # fused ones are neighbours
            names = list(group)
            weights |= _kept(source, fused, names)
            done_bytes += sum(source.bytes_of(name) for name in names)
            report(done_bytes, source.total_bytes)
    return weights


def _kept(source: _Source, fused: str, names: list[str]) -> dict[str, Tensor | BlockMatrix]:
    """Return the tensors *names* as one, or each by itself."""
    types = {source.entries[name].dtype for name in names}
    of_weights = {source.entries[name.removesuffix("bias") + "weight"].dtype for name in names if name.endswith("bias")}
    if len(names) > 1 and "qkv_proj" in fused and len(of_weights or types) > 1:
        return {name: tensor for each in names for name, tensor in _kept(source, each, [each]).items()}
    first, rows = names[0], [source.shapes[name][0] for name in names]
    if len(types) == 1 and BLOCKS[first_type := min(types)][1] > 1:
        addresses = [np.pad(source.rows(name), (0, count))[:count] for name, count in zip(names, rows, strict=True)]
        return {
            fused: BlockMatrix(
                first_type, np.concatenate(addresses), source.shapes[first][1], tuple(source.files.values())
            )
        }
    dtype = DTYPES.get(min(types), torch.float32) if len(types) == 1 else torch.float32
    whole = torch.empty((sum(rows), *source.shapes[first][1:]), dtype=dtype)
    for name, place in zip(names, torch.split(whole, rows), strict=True):
        _widen(source, name, place)
    return {fused: whole}


def _widen(source: _Source, name: str, place: Tensor) -> None:
    """Write the rank's part of a tensor into its place, and zeros where the place is larger."""
    place_RC, rows_R, num_columns = (
        clear_rest(place, source.parts[name]),
        source.rows(name),
        len(source.parts[name].columns),
    )
    at_once = max(1, PIECE_WEIGHTS // max(num_columns, 1))
    for begin in range(0, len(rows_R), at_once):
        piece_R = rows_R[begin : begin + at_once]
        widened_RC = torch.empty(len(piece_R), num_columns)
        _functions().kernels_widen(
            BLOCKS[source.entries[name].dtype][0],
            piece_R.ctypes.data,
            len(piece_R),
            num_columns,
            torch.get_num_threads(),
            widened_RC.data_ptr(),
        )
        place_RC[begin : begin + len(piece_R), :num_columns].copy_(widened_RC)


def _functions() -> ctypes.CDLL:
    """Return the library that knows the blocks.

    Raises:
        ConfigError: There is none here.
    """
    found = library()
    if not isinstance(found, Library):
        raise ConfigError(f"GGUF files need the CPU kernels, which read their blocks on every device: {found}")
    found.functions.kernels_widen.argtypes = [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p]
    found.functions.kernels_widen.restype = None
    return found.functions
