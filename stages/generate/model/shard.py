"""Which part of each tensor of a checkpoint a rank has. Knows shapes, neither files nor numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stages.generate.model.spec import ModelSpec, tensor_shapes

BY_ROWS: Final = frozenset({"embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj"})
"""Modules whose outputs the ranks divide. So are those of k_proj and v_proj, by heads."""
BY_COLUMNS: Final = frozenset({"o_proj", "down_proj"})
"""Modules whose inputs the ranks divide. The sum of what all ranks compute is the output. Rank 0 has the bias."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one tensor. A tensor of one dimension counts as one of a single column.

    In the rank's tensor these rows lie one range after the other. If it is larger than they are, the rest is zeros.
    """

    rows: tuple[range, ...]
    """Of the whole tensor. The same range may come twice, and there may be none."""
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
    """Return the KV head of *whole* that each KV head of *shard* is."""
    served = shard.num_heads // shard.num_kv_heads  # query heads of a KV head in the shard
    queries = (shard.rank * shard.num_heads + head * served for head in range(shard.num_kv_heads))
    return [query // (whole.num_heads // whole.num_kv_heads) for query in queries]


def _share(whole: range, size: int, rank: int) -> range:
    """Return the numbers of *whole* that a rank has where each has *size* of them, and the last ones fewer."""
    return whole[rank * size : (rank + 1) * size]
