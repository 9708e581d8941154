"""What a step must at least read and compute, counted by hand for small models."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.models import NONSENSE, SHAPE_8B, SHAPES, Shape, nonsense, write_config
from ops.bench.offline import Cost, TimedStep, cost_of, decode_share, prefill_share
from stages.generate.model.spec import read_spec

COST = Cost(dense=1000, head=100, experts=0, chosen_share=0.0, weight_bytes=2, kv_bytes=10)
EXPERTS = Cost(dense=1000, head=100, experts=8000, chosen_share=0.25, weight_bytes=2, kv_bytes=10)
DECODE = TimedStep(seconds=2.0, decode_rows=2, decode_context=30, prefill_tokens=0, prefill_samples=0)
PREFILL = TimedStep(seconds=4.0, decode_rows=0, decode_context=0, prefill_tokens=50, prefill_samples=1)
MIXED = TimedStep(seconds=1.0, decode_rows=2, decode_context=30, prefill_tokens=8, prefill_samples=0)


def test_a_decode_step_reads_the_weights_once_and_the_keys_and_values_of_its_rows() -> None:
    assert COST.bytes_read(DECODE) == 1100 * 2 + 30 * 10


def test_of_experts_it_reads_those_that_its_rows_reach() -> None:
    one = TimedStep(seconds=1.0, decode_rows=1, decode_context=0, prefill_tokens=0, prefill_samples=0)
    assert EXPERTS.bytes_read(one) == (1100 + 8000 / 4) * 2
    assert EXPERTS.bytes_read(DECODE) == (1100 + 8000 * (1 - 0.75**2)) * 2 + 300


def test_a_step_computes_its_tokens_and_the_head_where_it_samples() -> None:
    assert COST.operations(PREFILL) == 2 * (1000 * 50 + 100)
    assert COST.operations(MIXED) == 2 * (1000 * 10 + 100 * 2)
    assert EXPERTS.operations(PREFILL) == 2 * (3000 * 50 + 100)


def test_shares_are_of_the_time_of_their_own_steps() -> None:
    steps = [DECODE, PREFILL, MIXED]
    assert decode_share(steps, COST, bytes_per_s=2500.0) == pytest.approx(1.0 / 2.0)
    assert prefill_share(steps, COST, operations_per_s=1000.0) == pytest.approx((100.2 + 20.4) / 5.0)
    assert decode_share([PREFILL], COST, 1.0) == prefill_share([DECODE], COST, 1.0) == 0.0


def test_a_model_is_counted_tensor_by_tensor(tmp_path: Path) -> None:
    shape = NONSENSE
    hidden, layers, kv, q = shape.hidden_size, shape.num_layers, shape.num_kv_heads, shape.num_heads
    head_dim, intermediate = shape.head_dim, shape.intermediate_size
    spec = read_spec(nonsense(tmp_path))
    matrices = hidden * head_dim * (2 * q + 2 * kv) + 3 * hidden * intermediate
    norms = 2 * hidden + 2 * head_dim
    assert cost_of(spec, 4) == Cost(
        dense=layers * (matrices + norms) + hidden,
        head=spec.vocab_size * hidden,
        experts=0,
        chosen_share=0.0,
        weight_bytes=4,
        kv_bytes=2 * layers * kv * head_dim * 4,
    )


@pytest.mark.parametrize(
    ("shape", "num_multiplied"),
    [(SHAPES["95m"], 94_884_096), (SHAPES["0.6b"], 596_049_920), (SHAPE_8B, 8_190_735_360 - 151_936 * 4096)],
)
def test_embeddings_count_only_where_they_are_the_head_too(tmp_path: Path, shape: Shape, num_multiplied: int) -> None:
    write_config(shape, tmp_path)
    cost = cost_of(read_spec(tmp_path), 2)
    assert cost.dense + cost.head == num_multiplied
