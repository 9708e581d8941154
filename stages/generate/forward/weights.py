"""Loads weights from the files: piece by piece, cast on the way, with q|k|v and gate|up each in one matrix."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from stages.generate.model.checkpoint import EMBEDDING, HEAD, TensorEntry, read_tensors
from stages.generate.model.spec import ModelSpec, tensor_shapes

FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PIECE_BYTES: Final = 2**24
DUMMY_SEED: Final = 0

Progress = Callable[[int, int], None]
"""(bytes in place, bytes in all)"""


def load_weights(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    map_tied: bool = False,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return the weights by their names in the checkpoint; the fused ones are `qkv_proj` and `gate_up_proj`.

    Needs memory for the result and one piece of `PIECE_BYTES`. The files are read, not mapped, so their pages do not
    count as memory of this process. The folder must have been checked before.

    *map_tied* is for callers that pack the head. If the embeddings are tied to it and need no cast, the file is mapped
    under both names: rows are looked up in the file, and the head's pages are freed once it is packed.
    """
    entries = read_tensors(folder)
    weights, places = _places(spec, dtype, device)
    if map_tied and spec.tie_embeddings and _is_as_wanted(entries[EMBEDDING], places[EMBEDDING]):
        del places[EMBEDDING]
        weights |= {name: _mapped(entries[EMBEDDING]) for name in (EMBEDDING, HEAD)}
    wanted = sorted(places, key=lambda name: (entries[name].file, entries[name].begin))  # as they lie on the disk
    total_bytes, done_bytes = sum(entries[name].end - entries[name].begin for name in wanted), 0
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with _seen(progress) as report:
        for path, names in groupby(wanted, key=lambda name: entries[name].file):
            with path.open("rb", buffering=0) as file:
                for name in names:
                    for num_bytes in _fill(places[name].flatten(), file, entries[name], piece):
                        done_bytes += num_bytes
                        report(done_bytes, total_bytes)
    return weights


def dummy_weights(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return random weights of the same shapes as `load_weights`, always the same ones on one kind of device.

    Each matrix keeps the scale of its input, so that every layer matters and no token is certain. Embeddings are small:
    where the head is tied to them, large ones would make each token its own successor.
    """
    weights, _ = _places(spec, dtype, device)
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    total_bytes, done_bytes = sum(weight.nbytes for weight in weights.values()), 0
    with _seen(progress) as report:
        for name, weight in weights.items():
            if weight.dim() == 2:
                bound = (3 / weight.shape[1]) ** 0.5  # a uniform distribution of variance 1 / inputs
                bound *= 0.1 if name == EMBEDDING else 1.0
                weight.uniform_(-bound, bound, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith(".bias") else 1.0)
            done_bytes += weight.nbytes
            report(done_bytes, total_bytes)
    return weights


@contextmanager
def _seen(progress: Progress) -> Iterator[Progress]:
    """Return *progress*; on a terminal it also draws a bar on stderr."""
    if not sys.stderr.isatty():
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = ("weights", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights")

        def report(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)
            progress(done_bytes, total_bytes)

        yield report


def _places(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the uninitialised weights, and for each tensor of the checkpoint its place in them."""
    shapes = tensor_shapes(spec)
    weights: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}
    for fused, parts in groupby(shapes, key=_fused_name):  # fused ones are neighbours
        names = list(parts)
        rows = [shapes[name][0] for name in names]
        weights[fused] = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype, device=device)
        places |= zip(names, torch.split(weights[fused], rows), strict=True)
    return weights, places


def _fill(place_N: Tensor, file: FileIO, entry: TensorEntry, piece: Tensor) -> Iterator[int]:
    """Copy a tensor of the file to its place; yield the number of bytes of each step.

    It is read straight into its place if it needs no cast and no move to a device, and through *piece* otherwise.
    """
    file.seek(entry.begin)
    source_dtype = DTYPES[entry.dtype]
    direct = _is_as_wanted(entry, place_N)
    num_elements = PIECE_BYTES // source_dtype.itemsize
    for part_N in torch.split(place_N, num_elements):  # N = numbers of the tensor, in the order of the file
        source_N = part_N if direct else piece.view(source_dtype)[: len(part_N)]
        num_bytes = _read_into(source_N, file)
        if not direct:
            part_N.copy_(source_N)
        yield num_bytes


def _is_as_wanted(entry: TensorEntry, place: Tensor) -> bool:
    """Return whether the bytes can be copied from the file as they are."""
    return DTYPES[entry.dtype] == place.dtype and place.device.type == "cpu"


def _mapped(entry: TensorEntry) -> Tensor:
    """Return a tensor whose memory is the file: the kernel reads pages on first use and may drop them at any time."""
    page = mmap.ALLOCATIONGRANULARITY
    begin = entry.begin // page * page
    with entry.file.open("rb") as file:
        content = mmap.mmap(file.fileno(), entry.end - begin, offset=begin, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(content, dtype=DTYPES[entry.dtype], offset=entry.begin - begin)
    return flat.view(entry.shape)


def _read_into(tensor_N: Tensor, file: FileIO) -> int:
    """Fill a tensor with the next bytes of *file*; return their number."""
    room = tensor_N.view(torch.uint8).numpy().data
    done = 0
    while done < len(room):
        count = file.readinto(room[done:])
        if not count:
            raise OSError(f"{file.name!r} ended {len(room) - done} bytes early: it was changed while it was read")
        done += count
    return done


def _fused_name(name: str) -> str:
    *prefix, module, kind = name.split(".")
    return ".".join((*prefix, FUSED.get(module, module), kind))
