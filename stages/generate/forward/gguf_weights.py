"""Loads weights from GGUF files and quantized checkpoints: as floats, or as the blocks that the kernels pack."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.forward.unpacked import Unpacked, unpacked
from stages.generate.forward.weights import DTYPES, EXPERT, Progress, clear_rest, fused_name, parts_of, places_of, seen
from stages.generate.kernels.library import Library, library
from stages.generate.model.checkpoint import HEAD, read_tensors
from stages.generate.model.compiled import BlockMatrix
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.quantized import Stored
from stages.generate.model.spec import ModelSpec, tensor_shapes

logger = structlog.get_logger()
PIECE_WEIGHTS: Final = 2**20
"""Weights that a thread widens at a time."""
KEPT: Final = 3
"""Quantized weights that are kept while others are read: q, k and v."""

# R = rows, C = columns of a tensor, O = outputs of a matrix


class _Source:
    """The tensors of a folder, and which part of each a rank has.

    Raises:
        ConfigError: There is no library of kernels here.
    """

    def __init__(self, spec: ModelSpec, shard: ModelSpec, folder: Path) -> None:
        found = library()
        if not isinstance(found, Library):
            raise ConfigError(f"blocks of weights need the CPU kernels, which read them on every device: {found}")
        self.widen = found.functions.kernels_widen
        self.widen.argtypes, self.widen.restype = [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p], None
        self.entries, self.parts, self.shapes = read_tensors(folder), parts_of(spec, shard), tensor_shapes(shard)
        self.files = {path: np.memmap(path, np.uint8, "r") for path in {entry.file for entry in self.entries.values()}}
        self.sizes = {name: self.entries[name].end - self.entries[name].begin for name in self.shapes}
        """Bytes of the whole tensors."""
        self.total_bytes = sum(self.sizes.values())
        self._unpacked: dict[Stored, Unpacked] = {}
        self.widened: set[Stored] = set()
        """Weights that became floats because of their numbers."""
        self._likeness: dict[str, tuple[str, bytes]] = {}

    def unpacked(self, name: str) -> Unpacked | None:
        """Return the rows of a weight, or None if it is not quantized. The last ones stay in memory.

        Raises:
            ConfigError: Its numbers cannot be, or ranks would divide inputs that are not in order.
        """
        entry = self.entries[name]
        if entry.stored is None:
            return None
        if entry.stored not in self._unpacked:
            if len(self._unpacked) == KEPT:
                del self._unpacked[next(iter(self._unpacked))]
            self._unpacked[entry.stored] = made = unpacked(entry)
            if made.kind != entry.dtype:
                self.widened.add(entry.stored)
        found, part = self._unpacked[entry.stored], self.parts[name]
        if found.order_I is not None and len(part.columns) < entry.shape[1]:
            raise ConfigError(
                f"{entry.file}: the inputs of {name} have an order (desc_act), which ranks cannot divide; pass --tp 1"
            )
        return found

    def place(self, name: str) -> tuple[Path, int, int]:
        """Return the file of a tensor, where it or its first part begins there, and its own begin."""
        entry = self.entries[name]
        first = entry.begin if entry.stored is None else min(part.begin for part in entry.stored.tensors.values())
        return entry.file, first, entry.begin

    def kind(self, name: str) -> str:
        """Return the type of a tensor."""
        found = self.unpacked(name)
        return self.entries[name].dtype if found is None else found.kind

    def likeness(self, name: str) -> tuple[str, bytes]:
        """Return what the parts of one matrix must have in common. It is asked again for their biases."""
        if name not in self._likeness:
            found = self.unpacked(name)
            order_I = None if found is None else found.order_I
            self._likeness[name] = self.kind(name), b"" if order_I is None else order_I.tobytes()
        return self._likeness[name]

    def rows(self, name: str) -> npt.NDArray[np.uint64]:
        """Return the addresses of the rank's rows of a tensor, each from the rank's first column on."""
        entry, part, found = self.entries[name], self.parts[name], self.unpacked(name)
        places = np.arange(entry.shape[0], dtype=np.uint64)
        if entry.rotated_heads:  # rows that are rotated together are neighbours; on the hub they are half a head apart
            places = places.reshape(entry.rotated_heads, -1, 2).swapaxes(1, 2).ravel()
        chosen = [places[rows.start : rows.stop] for rows in part.rows]
        _, weights, block_bytes = BLOCKS[self.kind(name)]
        if found is None:
            first, row_bytes = self.files[entry.file].ctypes.data + entry.begin, entry.row_bytes
        else:
            row_bytes = found.rows_OB.shape[1]
            first = found.rows_OB.ctypes.data + entry.begin // entry.row_bytes * row_bytes
        first += part.columns.start // weights * block_bytes
        return np.concatenate([np.empty(0, np.uint64), *chosen]) * np.uint64(row_bytes) + np.uint64(first)


def load_gguf(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelSpec | None = None,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return the weights of GGUF files or of a quantized checkpoint as floats: see `load_weights`."""
    source = _Source(spec, shard or spec, folder)
    weights, places = places_of(shard or spec, dtype, device)
    done_bytes = 0
    with seen(progress) as report:
        for name in sorted(places, key=source.place):
            _widen(source, name, places[name])
            done_bytes += source.sizes[name]
            report(done_bytes, source.total_bytes)
    if any(entry.stored is not None and entry.stored.scheme.is_float for entry in source.entries.values()):
        reason = "nothing here computes with FP8; int8 is less exact"
        logger.info("weights_are_widened", dtype=str(dtype).removeprefix("torch."), reason=reason)
    return weights


def load_blocks(
    spec: ModelSpec,
    folder: Path,
    *,
    shard: ModelSpec | None = None,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor | BlockMatrix]:
    """Return the weights of GGUF files or of a quantized checkpoint for the kernels, by the fused names.

    q, k and v of different formats stay apart. Matrices of blocks stay in the GGUF files. Other tensors have the dtype
    of the file, and gate and up of different formats are float32.
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
    _check_experts(folder, weights)
    if source.widened:
        reason = "their scales are not float16, or they have 8 bits and a zero"
        logger.info("weights_are_widened", dtype="float32", matrices=len(source.widened), reason=reason)
    return weights


def _check_experts(folder: Path, weights: Mapping[str, Tensor | BlockMatrix]) -> None:
    """Raise ConfigError if the experts of a layer are of several kinds: the kernels prepare the rows of all at once."""
    kinds: dict[str, set[str]] = {}
    for name, weight in weights.items():
        if (expert := EXPERT.fullmatch(name)) is not None:
            kind = weight.type if isinstance(weight, BlockMatrix) else str(weight.dtype).removeprefix("torch.")
            kinds.setdefault(f"{expert[1]}.*.{expert[3]}", set()).add(kind)
    for name, found in kinds.items():
        if len(found) > 1:
            raise ConfigError(
                f"{folder}: {name} has weights of several kinds ({', '.join(sorted(found))}), which the kernels do not "
                "mix; pass --dtype float32"
            )


def _kept(source: _Source, fused: str, names: list[str]) -> dict[str, Tensor | BlockMatrix]:
    """Return the tensors *names* as one, or each by itself."""
    of_weights = {source.likeness(name.rpartition(".")[0] + ".weight") for name in names}
    if len(of_weights) > 1 and "qkv_proj" in fused:
        return {name: tensor for each in names for name, tensor in _kept(source, each, [each]).items()}
    kind, *others = sorted({source.kind(name) for name in names})
    rows, inputs = [source.shapes[name][0] for name in names], source.shapes[names[0]][1:]
    if not others and kind not in DTYPES:
        addresses, memory, order_I = [], [*map(np.asarray, source.files.values())], None
        for name, count in zip(names, rows, strict=True):
            addresses.append(np.pad(source.rows(name), (0, count))[:count])
            if (found := source.unpacked(name)) is not None:
                memory.append(found.rows_OB)
                order_I = found.order_I
        if len(of_weights) > 1 or (order_I is not None and (".experts." in fused or fused == HEAD)):
            raise ConfigError(f"{fused}: its inputs have an order (desc_act), which only --dtype float32 follows here")
        return {fused: BlockMatrix(kind, np.concatenate(addresses), inputs[0], tuple(memory), order_I)}
    whole = torch.empty((sum(rows), *inputs), dtype=torch.float32 if others else DTYPES[kind])
    for name, place in zip(names, torch.split(whole, rows), strict=True):
        _widen(source, name, place)
    return {fused: whole}


def _widen(source: _Source, name: str, place: Tensor) -> None:
    """Write the rank's part of a tensor into its place, and zeros where the place is larger."""
    place_RC, rows_R = clear_rest(place, source.parts[name]), source.rows(name)
    found = source.unpacked(name)
    num_columns = len(source.parts[name].columns)
    at_once = max(1, PIECE_WEIGHTS // max(num_columns, 1))
    for begin in range(0, len(rows_R), at_once):
        piece_R = rows_R[begin : begin + at_once]
        widened_RC = torch.empty(len(piece_R), num_columns)
        sizes = (*widened_RC.shape, torch.get_num_threads())
        kind = BLOCKS[source.kind(name)][0]
        source.widen(kind, piece_R.ctypes.data, *sizes, widened_RC.data_ptr())
        if found is not None and found.order_I is not None:
            widened_RC = torch.empty_like(widened_RC).index_copy_(1, torch.from_numpy(found.order_I).long(), widened_RC)
        place_RC[begin : begin + len(piece_R), :num_columns].copy_(widened_RC)
