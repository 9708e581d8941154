"""`minisgl bench offline`: what it draws, what it counts, what it prints and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import noted
from support.devices import need_triton
from support.selection import AT_NIGHT

from ops.bench import offline
from ops.bench.datasets import Span
from ops.bench.models import NONSENSE, NONSENSE_ID, SHAPE_8B, SHAPES, Shape, nonsense, write_config
from ops.bench.offline import (
    PRESETS,
    Cost,
    OfflineConfig,
    Preset,
    Rate,
    StepClock,
    TimedStep,
    bytes_per_weight,
    chosen,
    cost_of,
    decode_share,
    draw,
    prefill_share,
)
from pipeline.errors import ConfigError
from pipeline.events import SamplingParams
from stages.generate.model.config import read_spec
from stages.generate.sampling import sampler
from stages.generate.schedule.plan import BatchPlan, Computed, PlanRow, Sample

RUNS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Done:
    """A finished benchmark of a few short prompts."""

    code: int
    printed: str
    document: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("bench")
    file, screen = folder / "out.json", io.StringIO()
    arguments = ["--model", str(nonsense(folder)), "--output", str(file), "--runs", str(RUNS)]
    arguments += ["--num-prompts", "3", "--input-len", "4-8", "--output-len", "2-4", "--seed", "7"]
    with contextlib.redirect_stdout(screen), pytest.MonkeyPatch.context() as patch:
        if not AT_NIGHT:  # how fast the machine is takes seconds to find out
            patch.setattr(offline, "LEAST_BYTES", offline.MIB)
            patch.setattr(offline, "largest_cache_bytes", lambda: 0)
            patch.setattr(offline, "gemm_rate", partial(offline.gemm_rate, size=64))
        code = offline.main([*arguments, "--threads", "1", "--num-pages", "64", "--page-size", "2"], {})
    return Done(code, screen.getvalue(), json.loads(file.read_text()))


# what it draws


def test_the_nano_preset_is_nano_vllms_protocol_to_the_token() -> None:
    """Its README says 133,966 output tokens; the rest is what its bench.py draws after `seed(0)`."""
    workload = draw(PRESETS["nano"], 0, vocab_size=151_936)
    assert workload.output_tokens == 133_966
    assert workload.input_tokens == 142_827
    assert [len(prompt) for prompt in workload.prompts[:4]] == [964, 724, 484, 508]
    assert workload.prompts[0][:4] == [6311, 6890, 663, 4242]
    assert workload.prompts[-1][-2:] == [9046, 1958]
    assert (len(workload.output_lengths), workload.output_lengths[:4]) == (256, [845, 312, 607, 843])


def test_a_smaller_vocabulary_changes_the_tokens_and_not_the_lengths() -> None:
    large, small = (draw(PRESETS["small"], 0, size) for size in (151_936, 259))
    assert small.output_lengths == large.output_lengths
    assert small.prompts == [[token % 259 for token in prompt] for prompt in large.prompts]


def test_another_seed_is_another_workload_and_the_same_one_is_the_same() -> None:
    assert draw(PRESETS["small"], 3, 259) == draw(PRESETS["small"], 3, 259)
    assert draw(PRESETS["small"], 3, 259) != draw(PRESETS["small"], 4, 259)


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        (OfflineConfig(), "cpu", PRESETS["small"]),
        (OfflineConfig(), "cuda", PRESETS["nano"]),
        (OfflineConfig(preset="nano"), "cpu", PRESETS["nano"]),
        (OfflineConfig(num_prompts=4, outputs=Span(1, 2)), "cpu", Preset(4, Span(32, 256), Span(1, 2))),
    ],
)
def test_a_flag_replaces_its_part_of_the_preset(config: OfflineConfig, device: str, expected: Preset) -> None:
    assert chosen(config, device) == expected


# what it counts


def row(start: int, num_tokens: int, samples: bool) -> PlanRow:
    sample = Sample(SamplingParams(), start + num_tokens, ()) if samples else None
    return PlanRow(0, start, tuple(range(num_tokens)), (), 0, sample)


class Echo:
    def forward(self, plan: BatchPlan) -> Computed:
        return Computed([1 for row in plan.rows if row.sample is not None])


@pytest.mark.parametrize(
    ("rows", "num_decode_rows", "phase", "counts"),
    [
        ([row(9, 1, True), row(4, 1, True)], 2, "decode", (2, 15, 0, 0)),
        ([row(0, 7, True), row(5, 3, False)], 0, "prefill", (0, 0, 10, 1)),
        ([row(9, 1, True), row(0, 7, False)], 1, "mixed", (1, 10, 7, 0)),
    ],
)
def test_a_step_is_clocked_as_what_it_was(
    rows: Sequence[PlanRow], num_decode_rows: int, phase: str, counts: tuple[int, int, int, int]
) -> None:
    clock = StepClock(Echo())
    plan = BatchPlan(1, tuple(rows), num_decode_rows)
    assert clock.forward(plan) == Echo().forward(plan)
    (step,) = clock.steps
    assert step == TimedStep(step.seconds, *counts, step.launch_s)
    assert step.phase == phase and step.seconds > step.launch_s > 0


# what comes out


def test_every_run_adds_up(done: Done) -> None:
    document, workload = done.document, draw(Preset(3, Span(4, 8), Span(2, 4)), 7, 259)
    assert done.code == 0
    assert document["workload"] == {
        "num_prompts": 3,
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
        "seed": 7,
    }
    assert len(document["runs"]) == RUNS
    for run in document["runs"]:
        phases = run["phases"].values()
        assert run["cached_tokens"] == 0, "the cache was not flushed"
        assert sum(phase["prefill_tokens"] for phase in phases) == workload.input_tokens
        assert sum(phase["decode_rows"] for phase in phases) == workload.output_tokens - 3
        clocked_s = sum(phase["seconds"] for phase in phases)
        assert clocked_s + run["outside_s"] == pytest.approx(run["seconds"])
        assert run["output_tokens_per_s"] == pytest.approx(workload.output_tokens / run["seconds"])
    rates = sorted(run["output_tokens_per_s"] for run in document["runs"])
    assert document["output_tokens_per_s"] == pytest.approx(sum(rates) / 2)


def test_the_json_says_with_what_and_how_it_was_measured(done: Done) -> None:
    document = done.document
    assert document["command"][:5] == ["minisgl", "bench", "offline", "--model", document["command"][4]]
    assert {"minisgl", "torch"} <= set(document["versions"])
    assert document["model"]["name"] == NONSENSE_ID
    assert len(document["model"]["config_sha256"]) == 64 and len(document["model"]["fingerprint"]) == 16
    engine = document["engine"]
    assert (engine["device"], engine["dtype"], engine["threads"], engine["page_size"]) == ("cpu", "float32", 1, 2)
    assert engine["limits"]["mixed_prefill_length"] == engine["limits"]["max_prefill_length"]
    assert document["cpu"] and document["date"] and document["peak_rss_bytes"] > 50_000_000
    assert {rate["method"] for rate in document["read_bandwidth"]} > {"torch sum", "memcpy"}
    assert "F.linear float32" in {rate["method"] for rate in document["gemm_rate"]}
    assert document["decode_share"] > 0 and document["prefill_share"] > 0


def test_the_table_shows_each_run_the_median_and_both_shares(done: Done) -> None:
    lines = done.printed.splitlines()
    assert lines[0].startswith(f"{NONSENSE_ID}, float32 on cpu, 1 threads")
    titles = "run seconds output tok/s total tok/s decode s prefill s mixed s outside s"
    assert " ".join(lines[3].split()) == titles
    assert [line.split()[0] for line in lines[4 : 4 + RUNS]] == ["1", "2"]
    assert f"median: {done.document['output_tokens_per_s']:,.1f} output tokens/s" in done.printed
    assert "% of the read bandwidth" in done.printed and "% of the rate of a linear layer" in done.printed
    for rate in done.document["read_bandwidth"] + done.document["gemm_rate"]:
        assert rate["method"] in done.printed


# what it refuses


def test_lengths_beyond_the_context_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    folder = nonsense(tmp_path)
    with pytest.raises(ConfigError, match=r"\d+ tokens.* 64"):
        offline.main(["--model", str(folder), "--max-seq-len", "64", "--num-pages", "8", "--threads", "1"], {})


# the limits of the machine


@pytest.mark.parametrize("threads", [1, 2])
def test_every_method_reads_at_some_rate(threads: int) -> None:
    rates = offline.read_bandwidth(CPU, threads, total_bytes=offline.MIB)
    assert [rate.method for rate in rates] == ["torch sum", "torch max", "torch copy", "numpy sum", "memcpy"]
    assert all(rate.per_s > 0 for rate in rates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_is_tried_in_the_dtype_of_the_engine_and_in_float32(dtype: torch.dtype) -> None:
    methods = [rate.method for rate in offline.gemm_rate(CPU, dtype, 1, size=64, tokens=8)]
    name = str(dtype).removeprefix("torch.")
    assert len(set(methods)) == len(methods)
    assert {f"F.linear {name}", "F.linear float32"} <= set(methods)
    assert set(methods) <= {"F.linear float32", "packed float32", f"F.linear {name}", f"packed {name}"}


def test_the_fastest_method_is_the_limit() -> None:
    assert offline.best([Rate("a", 1.0), Rate("b", 3.0), Rate("c", 2.0)]) == 3.0


def test_each_round_goes_over_all_buffers_and_the_first_only_warms_up() -> None:
    seen: list[int] = []
    assert offline.seconds_each(seen.append, CPU) > 0
    assert seen == list(range(offline.NUM_BUFFERS)) * (1 + offline.ROUNDS)


@pytest.mark.parametrize("is_new", [False, True])
def test_drawing_is_timed_as_the_engine_draws(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton(CPU, monkeypatch)
    ways = {
        name: noted(monkeypatch, sampler, name, lambda logits, *_: tuple(logits.shape)) for name in ("best", "choose")
    }
    took_s = offline.drawing_s(CPU, torch.bfloat16, 300, is_new=is_new, num_rows=2)
    assert took_s > 0 and {name: set(seen) for name, seen in ways.items()} == {
        "best": set() if is_new else {(2, 300)},
        "choose": {(2, 300)} if is_new else set(),
    }


def test_the_number_of_threads_is_given_back() -> None:
    before = torch.get_num_threads()
    with offline.using_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# what a step must at least read and compute, counted by hand for small models

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


@pytest.mark.parametrize(
    ("quantization", "blocks", "least", "most"),
    [
        ("none", {}, 2, 2),
        ("int8", {}, 1.0625, 1.6),
        ("int4", {}, 0.625, 1.4),
        ("int4_128", {"INT4_128": 68 * 1000, "BF16": 2 * 128_000}, (0.53125 + 2) / 2, (0.53125 + 2) / 2),
    ],
    ids=["none", "int8", "int4", "awq"],
)
def test_quantized_weights_have_fewer_bytes(
    tmp_path: Path, quantization: str, blocks: dict[str, int], least: float, most: float
) -> None:
    write_config(SHAPES["95m"], tmp_path)
    spec = replace(read_spec(tmp_path), blocks=blocks)
    assert least <= bytes_per_weight(spec, torch.bfloat16, quantization) <= most
