"""A shard is a smaller model, and its parts of the tensors make the whole again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from support.checkpoints import FAMILIES, make_checkpoint

from pipeline.errors import ConfigError
from stages.generate.forward.weights import kv_heads, parts_of
from stages.generate.model.config import read_spec
from stages.generate.model.spec import ModelSpec, tensor_shapes


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    """The models of all families."""
    folder = tmp_path_factory.mktemp("families")
    return {family: read_spec(make_checkpoint(folder / family, family, bias=True)) for family in FAMILIES}


@pytest.fixture(scope="module")
def odd(specs: dict[str, ModelSpec]) -> ModelSpec:
    """A model with 6 query and 3 KV heads."""
    return specs["odd"]


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [[0, 1, 2]]),
        (2, [[0, 0, 1], [1, 2, 2]]),  # 3 query heads a rank: each has a KV head of its own
        (3, [[0], [1], [2]]),
        (6, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_a_rank_has_the_kv_heads_of_its_query_heads(odd: ModelSpec, num_ranks: int, expected: list[list[int]]) -> None:
    assert [kv_heads(odd, odd.sharded(rank, num_ranks)) for rank in range(num_ranks)] == expected


def test_each_query_head_finds_its_kv_head_whatever_the_numbers_of_heads(odd: ModelSpec) -> None:
    for num_kv_heads in range(1, 9):
        for group in range(1, 9):
            num_heads = num_kv_heads * group
            whole = replace(odd, num_heads=num_heads, num_kv_heads=num_kv_heads)
            for num_ranks in (size for size in range(1, num_heads + 1) if num_heads % size == 0):
                found = []
                for shard in (whole.sharded(rank, num_ranks) for rank in range(num_ranks)):
                    served, rest = divmod(shard.num_heads, shard.num_kv_heads)
                    assert rest == 0, "groups are uniform"
                    found += [head for head in kv_heads(whole, shard) for _ in range(served)]
                assert found == [query // group for query in range(num_heads)]


def test_heads_that_cannot_be_divided_are_refused(odd: ModelSpec) -> None:
    with pytest.raises(ConfigError) as refused:
        odd.sharded(0, 4)
    assert str(refused.value) == (
        "--tp 4: the model has 6 query heads, which 4 ranks cannot divide; pass one of 1, 2, 3, 6"
    )


def test_a_shard_is_a_smaller_model_of_the_same_vocabulary(odd: ModelSpec) -> None:
    shard = odd.sharded(1, 2)
    assert (odd.num_heads, odd.num_kv_heads, odd.intermediate_size, odd.vocab_rows) == (6, 3, 117, 497)
    assert (shard.num_heads, shard.num_kv_heads, shard.intermediate_size, shard.vocab_rows) == (3, 3, 59, 249)
    assert (shard.vocab_size, shard.hidden_size, shard.head_dim) == (497, 90, 24)
    assert odd.sharded(0, 1) == odd == odd.sharded(0, 1, "int8")


def test_with_int8_the_inputs_that_share_a_scale_stay_together(odd: ModelSpec, specs: dict[str, ModelSpec]) -> None:
    assert odd.sharded(1, 2, "int8").intermediate_size == 64
    assert odd.sharded(1, 3, "int8").intermediate_size == 64
    assert odd.sharded(1, 2, "int8").experts.intermediate_size == 0
    assert specs["qwen3moe"].sharded(1, 2, "int8").experts.intermediate_size == 64


def test_one_rank_is_possible_even_if_the_largest_blocks_are_those_of_other_matrices(odd: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"--tp 2: .* blocks of 256 weights, .*; pass one of 1$"):
        replace(odd, blocks={"Q6_K": 210, "Q8_0": 34}).sharded(0, 2)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_parts_of_all_ranks_cover_every_number_of_the_checkpoint(
    specs: dict[str, ModelSpec], quantization: str
) -> None:
    """Each number once, but for copies of KV heads and of what every rank has."""
    for family, whole in specs.items():
        for num_ranks in (2, 3, 4, 6):
            if whole.num_heads % num_ranks:
                continue
            shards = [whole.sharded(rank, num_ranks, quantization) for rank in range(num_ranks)]
            parts = [parts_of(whole, shard) for shard in shards]
            for name, shape in tensor_shapes(whole).items():
                have = [ranks[name] for ranks in parts if name in ranks]
                rows = Counter(row for part in have for each in part.rows for row in each)
                columns = Counter(column for part in have for column in part.columns)
                assert set(rows) == set(range(shape[0])), (family, name)
                assert set(columns) == set(range(math.prod(shape[1:]))), (family, name)
                *_, module, kind = name.split(".")
                if module in ("o_proj", "down_proj"):
                    assert set(columns.values()) == {1} if kind == "weight" else len(have) == 1
                elif module in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
                    assert set(rows.values()) == {1}
            for shard, ranks in zip(shards, parts, strict=True):
                for name, shape in tensor_shapes(shard).items():
                    assert sum(map(len, ranks[name].rows)) <= shape[0], "a part fits into its place"
                    assert len(ranks[name].columns) <= math.prod(shape[1:])
