"""The probes: every method gives a rate, and torch has as many threads afterwards as before."""

from __future__ import annotations

import pytest
import torch

from ops.bench import probes
from ops.bench.probes import Rate, best, gemm_rate, read_bandwidth, using_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_every_method_reads_at_some_rate(threads: int) -> None:
    rates = read_bandwidth(CPU, threads, total_bytes=probes.MIB)
    assert [rate.method for rate in rates] == ["torch sum", "torch max", "torch copy", "numpy sum", "memcpy"]
    assert all(rate.per_s > 0 for rate in rates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_is_tried_in_the_dtype_of_the_engine_and_in_float32(dtype: torch.dtype) -> None:
    methods = [rate.method for rate in gemm_rate(CPU, dtype, 1, size=64, tokens=8)]
    name = str(dtype).removeprefix("torch.")
    assert len(set(methods)) == len(methods)
    assert {f"F.linear {name}", "F.linear float32"} <= set(methods)
    assert set(methods) <= {"F.linear float32", "packed float32", f"F.linear {name}", f"packed {name}"}


def test_the_fastest_method_is_the_limit() -> None:
    assert best([Rate("a", 1.0), Rate("b", 3.0), Rate("c", 2.0)]) == Rate("b", 3.0)


def test_each_round_goes_over_all_buffers_and_the_first_only_warms_up() -> None:
    seen: list[int] = []
    assert probes._seconds(seen.append, CPU) > 0
    assert seen == list(range(probes.NUM_BUFFERS)) * (1 + probes.ROUNDS)


def test_the_number_of_threads_is_given_back() -> None:
    before = torch.get_num_threads()
    with using_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
