"""Loads weights from the files: piece by piece, cast on the way, with q|k|v and gate|up each in one matrix."""

from __future__ import annotations

import importlib
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from stages.generate.model.checkpoint import EMBEDDING, HEAD, TensorEntry, read_tensors
from stages.generate.model.layers.experts import can_group
from stages.generate.model.spec import DUMMY_SEED, ModelSpec, tensor_shapes

BY_ROWS: Final = frozenset({"embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj"})
"""Modules whose outputs the ranks divide. They also divide those of k_proj and v_proj, by heads."""
BY_COLUMNS: Final = frozenset({"o_proj", "down_proj"})
"""Modules whose inputs the ranks divide. The output is the sum of what all ranks compute. Rank 0 has the bias."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one tensor that a rank has. A tensor of one dimension counts as one of a single column.

    The rank's tensor has these rows, one range after the other. If it is larger, the rest is zeros.
    """

    rows: tuple[range, ...]
    """Rows of the whole tensor. The same range may come twice, and there may be none."""
    columns: range


def parts_of(whole: ModelSpec, shard: ModelSpec) -> dict[str, Part]:
    """Return the part of each tensor of *whole* that the rank of *shard* has, by the tensor's name."""
    shapes = tensor_shapes(whole)
    kv_rows = tuple(range(head * whole.head_dim, (head + 1) * whole.head_dim) for head in kv_heads(whole, shard))
    parts: dict[str, Part] = {}
    for name, size in tensor_shapes(shard).items():
        *_, module, kind = name.split(".")
        rows: tuple[range, ...] = (range(shapes[name][0]),)
        columns = range(shapes[name][1] if len(size) == 2 else 1)
        if module in ("k_proj", "v_proj"):
            rows = kv_rows
        elif module in BY_ROWS:
            rows = (_share(rows[0], size[0], shard.rank),)
        elif module in BY_COLUMNS and kind == "weight":
            columns = _share(columns, size[1], shard.rank)
        parts[name] = Part(tuple(each for each in rows if each and columns), columns)
    return parts


def kv_heads(whole: ModelSpec, shard: ModelSpec) -> list[int]:
    """Return, for each KV head of *shard*, which KV head of *whole* it is."""
    served = shard.num_heads // shard.num_kv_heads  # query heads of a KV head in the shard
    queries = (shard.rank * shard.num_heads + head * served for head in range(shard.num_kv_heads))
    return [query // (whole.num_heads // whole.num_kv_heads) for query in queries]


def _share(whole: range, size: int, rank: int) -> range:
    """Return a rank's part of *whole* if each rank has *size* numbers, and the last ranks fewer."""
    return whole[rank * size : (rank + 1) * size]


# R = rows, C = columns: of a tensor of a checkpoint; one of a single dimension has one column

FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PIECE_BYTES: Final = 2**22

Progress = Callable[[int, int], None]
"""(bytes in place, bytes in all)"""


def load_weights(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelSpec | None = None,
    map_tied: bool = False,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return the weights by their names in the checkpoint; the fused ones are `qkv_proj` and `gate_up_proj`.

    Experts that are multiplied together (`can_group`) are one weight, `experts.gate_up_proj` and `experts.down_proj`.

    Needs memory for the result and one piece of `PIECE_BYTES`. The files are read, not mapped, so their pages do not
    count as memory of this process. The folder must have been checked before.

    *shard*: the part of the model to load (`ModelSpec.sharded`); None: all. Where the ranks divide the rows of a
    matrix, only the rank's rows are read. Where they divide its columns, it is read in pieces of whole rows.

    *map_tied*: for callers that pack the head. If the embeddings are tied to it and need no cast, the file is mapped
    under both names: rows are looked up in the file, and the head's pages are freed once it is packed.
    """
    entries = read_tensors(folder)
    shard = shard or spec
    parts = parts_of(spec, shard)
    weights, places = places_of(shard, dtype, device)
    embedding, rows = entries[EMBEDDING], parts[EMBEDDING].rows
    can_map = _is_as_wanted(embedding, places[EMBEDDING]) and sum(map(len, rows)) == shard.vocab_rows
    if map_tied and spec.tie_embeddings and can_map:
        del places[EMBEDDING]
        weights |= {name: _mapped(embedding, rows[0]) for name in (EMBEDDING, HEAD)}
    wanted = sorted(places, key=lambda name: (entries[name].file, entries[name].begin))  # as they lie on the disk
    total_bytes = sum(len(rows) * entries[name].row_bytes for name in wanted for rows in parts[name].rows)
    piece = torch.empty(max(PIECE_BYTES, *(entries[name].row_bytes for name in wanted)), dtype=torch.uint8)
    done_bytes = 0
    with seen(progress) as report:
        for path, names in groupby(wanted, key=lambda name: entries[name].file):
            with path.open("rb", buffering=0) as file:
                for name in names:
                    for num_bytes in _fill(places[name], file, entries[name], parts[name], piece):
                        done_bytes += num_bytes
                        report(done_bytes, total_bytes)
    return weights


def dummy_weights(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelSpec | None = None,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return random weights of the same shapes as `load_weights`, always the same ones on one kind of device.

    Each matrix keeps the scale of its input, so that every layer matters and no token is certain. Embeddings are small:
    if the head is tied to them, large ones would make each token its own successor.

    A *shard* gets its part of the whole model's weights: every rank draws all of them, a piece at a time.
    """
    shard = shard or spec
    weights, places = places_of(shard, dtype, device)
    parts = parts_of(spec, shard)
    importlib.import_module("torch._prims.rng_prims")  # torch's generators need it, and an engine imports less of torch
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    total_bytes, done_bytes = sum(weight.nbytes for weight in weights.values()), 0
    with seen(progress) as report:
        for name, shape in tensor_shapes(spec).items():
            if len(shape) == 2:
                bound = (3 / shape[1]) ** 0.5  # a uniform distribution of variance 1 / inputs
                _draw(places[name], shape, parts[name], bound * (0.1 if name == EMBEDDING else 1.0), generator)
            elif name in places:
                places[name].fill_(0.0 if name.endswith(".bias") else 1.0)
            done_bytes += places[name].nbytes if name in places else 0
            report(done_bytes, total_bytes)
    return weights


@contextmanager
def seen(progress: Progress) -> Iterator[Progress]:
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


def places_of(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the uninitialised weights, and for each tensor of the checkpoint its place in them.

    If torch can multiply all experts of a layer in one operation, each kind of their matrices is one weight.
    """
    shapes, experts = tensor_shapes(spec), spec.experts
    grouped = experts.num_experts > 0 and can_group(dtype, device, spec.hidden_size, experts.intermediate_size)
    weights: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}
    for fused, parts in groupby(shapes, key=fused_name):  # fused ones are neighbours
        names = list(parts)
        rows = [shapes[name][0] for name in names]
        shape, expert = (sum(rows), *shapes[names[0]][1:]), EXPERT.fullmatch(fused) if grouped else None
        if expert is None:
            whole = weights[fused] = torch.empty(shape, dtype=dtype, device=device)
        else:
            name = f"{expert[1]}.{expert[3]}"
            if name not in weights:
                weights[name] = torch.empty((experts.num_experts, *shape), dtype=dtype, device=device)
            whole = weights[name][int(expert[2])]
        places |= zip(names, torch.split(whole, rows), strict=True)
    return weights, places


def _fill(place: Tensor, file: FileIO, entry: TensorEntry, part: Part, piece: Tensor) -> Iterator[int]:
    """Copy a part of a tensor of the file to its place; yield the number of bytes of each step.

    If no cast, no move to a device and no choice of columns is needed, the bytes are read straight into their place,
    else through *piece*.
    """
    place_RC, columns = clear_rest(place, part), slice(part.columns.start, part.columns.stop)
    source_dtype = DTYPES[entry.dtype]
    direct = _is_as_wanted(entry, place)
    done = 0
    for rows in part.rows:
        file.seek(entry.begin + rows.start * entry.row_bytes)
        for part_RC in torch.split(place_RC[done : done + len(rows)], max(1, PIECE_BYTES // entry.row_bytes)):
            room = piece[: len(part_RC) * entry.row_bytes].view(source_dtype)
            source_RC = part_RC if direct else room.view(len(part_RC), -1)
            num_bytes = _read_into(source_RC.flatten(), file)
            if not direct:
                part_RC[:, : len(part.columns)].copy_(source_RC[:, columns])
            yield num_bytes
        done += len(rows)


def _draw(place: Tensor, shape: tuple[int, ...], part: Part, bound: float, generator: torch.Generator) -> None:
    """Draw a matrix of *shape*, uniformly from -bound to bound, and keep a part of it."""
    place_RC, columns = clear_rest(place, part), slice(part.columns.start, part.columns.stop)
    num_rows, num_columns = shape
    at_once = max(1, PIECE_BYTES // (num_columns * place.itemsize))
    for begin in range(0, num_rows, at_once):
        end = min(begin + at_once, num_rows)
        piece_RC = place.new_empty(end - begin, num_columns).uniform_(-bound, bound, generator=generator)
        done = 0
        for rows in part.rows:
            first, last = max(rows.start, begin), min(rows.stop, end)
            if first < last:
                wanted_RC = place_RC[done + first - rows.start : done + last - rows.start, : len(part.columns)]
                wanted_RC.copy_(piece_RC[first - begin : last - begin, columns])
            done += len(rows)


def clear_rest(place: Tensor, part: Part) -> Tensor:
    """Return place_RC, with zeros where no part of the tensor comes."""
    place_RC = place.view(len(place), -1)
    place_RC[sum(map(len, part.rows)) :].zero_()
    place_RC[:, len(part.columns) :].zero_()
    return place_RC


def _is_as_wanted(entry: TensorEntry, place: Tensor) -> bool:
    """Return whether the bytes of rows can be copied from the file as they are."""
    return (
        DTYPES[entry.dtype] == place.dtype and place.device.type == "cpu" and entry.shape[1:] == tuple(place.shape[1:])
    )


def _mapped(entry: TensorEntry, rows: range) -> Tensor:
    """Return rows whose memory is the file: the kernel reads pages on first use and may drop them at any time."""
    page = mmap.ALLOCATIONGRANULARITY
    first, end = (entry.begin + row * entry.row_bytes for row in (rows.start, rows.stop))
    begin = first // page * page
    with entry.file.open("rb") as file:
        content = mmap.mmap(file.fileno(), end - begin, offset=begin, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(content, dtype=DTYPES[entry.dtype], offset=first - begin)
    return flat.view(len(rows), -1)


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


def fused_name(name: str) -> str:
    *prefix, module, kind = name.split(".")
    return ".".join((*prefix, FUSED.get(module, module), kind))
