"""Loads weights from GGUF files: as floats, or as the blocks that the kernels pack."""

from __future__ import annotations

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
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.spec import ModelSpec, tensor_shapes

PIECE_WEIGHTS: Final = 2**20
"""Weights that a thread widens at a time."""

# R = rows, C = columns of a tensor, O = outputs of a matrix


class _Source:
    """The tensors of a folder of GGUF files, and which part of each a rank has.

    Raises:
        ConfigError: There is no library of kernels here.
    """

    def __init__(self, spec: ModelSpec, shard: ModelSpec, folder: Path) -> None:
        found = library()
        if not isinstance(found, Library):
            raise ConfigError(f"GGUF files need the CPU kernels, which read their blocks on every device: {found}")
        self.widen = found.functions.kernels_widen
        self.widen.argtypes, self.widen.restype = [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p], None
        self.entries, self.parts, self.shapes = read_tensors(folder), parts_of(spec, shard), tensor_shapes(shard)
        self.files = {path: np.memmap(path, np.uint8, "r") for path in {entry.file for entry in self.entries.values()}}
        self.sizes = {name: self.entries[name].end - self.entries[name].begin for name in self.shapes}
        """Bytes of the whole tensors."""
        self.total_bytes = sum(self.sizes.values())

    def rows(self, name: str) -> npt.NDArray[np.uint64]:
        """Return the addresses of the rank's rows of a tensor, each from the rank's first column on."""
        entry, part = self.entries[name], self.parts[name]
        places = np.arange(entry.shape[0], dtype=np.uint64)
        if entry.rotated_heads:  # rows that are rotated together are neighbours; on the hub they are half a head apart
            places = places.reshape(entry.rotated_heads, -1, 2).swapaxes(1, 2).ravel()
        chosen = [places[rows.start : rows.stop] for rows in part.rows]
        _, weights, block_bytes = BLOCKS[entry.dtype]
        first = self.files[entry.file].ctypes.data + entry.begin + part.columns.start // weights * block_bytes
        return np.concatenate([np.empty(0, np.uint64), *chosen]) * np.uint64(entry.row_bytes) + np.uint64(first)


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
    done_bytes = 0
    with seen(progress) as report:
        for name in sorted(places, key=lambda name: (source.entries[name].file, source.entries[name].begin)):
            _widen(source, name, places[name])
            done_bytes += source.sizes[name]
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
    done_bytes = 0
    with seen(progress) as report:
        for fused, group in groupby(source.shapes, key=fused_name):  # fused ones are neighbours
            names = list(group)
            weights |= _kept(source, fused, names)
            done_bytes += sum(source.sizes[name] for name in names)
            report(done_bytes, source.total_bytes)
    return weights


def _kept(source: _Source, fused: str, names: list[str]) -> dict[str, Tensor | BlockMatrix]:
    """Return the tensors *names* as one, or each by itself."""
    kind, *others = sorted({source.entries[name].dtype for name in names})
    of_weights = {source.entries[name.rpartition(".")[0] + ".weight"].dtype for name in names}
    if len(of_weights) > 1 and "qkv_proj" in fused:
        return {name: tensor for each in names for name, tensor in _kept(source, each, [each]).items()}
    rows, inputs = [source.shapes[name][0] for name in names], source.shapes[names[0]][1:]
    if not others and kind not in DTYPES:
        addresses = [np.pad(source.rows(name), (0, count))[:count] for name, count in zip(names, rows, strict=True)]
        return {fused: BlockMatrix(kind, np.concatenate(addresses), inputs[0], tuple(source.files.values()))}
    whole = torch.empty((sum(rows), *inputs), dtype=torch.float32 if others else DTYPES[kind])
    for name, place in zip(names, torch.split(whole, rows), strict=True):
        _widen(source, name, place)
    return {fused: whole}


def _widen(source: _Source, name: str, place: Tensor) -> None:
    """Write the rank's part of a tensor into its place, and zeros where the place is larger."""
    place_RC, rows_R = clear_rest(place, source.parts[name]), source.rows(name)
    num_columns = len(source.parts[name].columns)
    at_once = max(1, PIECE_WEIGHTS // max(num_columns, 1))
    for begin in range(0, len(rows_R), at_once):
        piece_R = rows_R[begin : begin + at_once]
        widened_RC = torch.empty(len(piece_R), num_columns)
        sizes = (*widened_RC.shape, torch.get_num_threads())
        kind = BLOCKS[source.entries[name].dtype][0]
        source.widen(kind, piece_R.ctypes.data, *sizes, widened_RC.data_ptr())
        place_RC[begin : begin + len(piece_R), :num_columns].copy_(widened_RC)
