"""What ranks compute together, between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support import gloo_rank
from support.checkpoints import make_checkpoint
from support.kernel_variants import VARIANTS
from support.ranks import Meeting, ThreadCollectives
from support.selection import rest_at_night

from stages.generate.collectives import ALONE, sum_in_order

ROOT = Path(__file__).parents[4]


def test_one_rank_gets_its_own_tensor_back() -> None:
    x = torch.ones(2, 3)
    assert ALONE.all_reduce(x) is x and ALONE.gather_to_0(x) is x
    assert (ALONE.rank, ALONE.size) == (0, 1)


def test_parts_are_added_in_the_order_of_the_ranks_and_rounded_once() -> None:
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert sum_in_order([big.clone(), small, small]).item() == 2.0**24
    assert sum_in_order([small.clone(), small, big]).item() == 2.0**24 + 2
    halves = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    total = sum_in_order(halves)
    assert total.item() == 258.0 and total.dtype == torch.bfloat16, "in bfloat16, 256 + 1 is 256"


@pytest.mark.slow  # another process imports torch
@pytest.mark.parametrize(
    "kernels", [*rest_at_night([*VARIANTS[-1:], "torch"]), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_two_processes_over_gloo_compute_the_logits_of_one(tmp_path: Path, kernels: str) -> None:
    """The kernels have the bits of ranks whose sums are in order."""
    device, kernels = ("cuda", "torch") if kernels == "cuda" else ("cpu", kernels)
    folder, store = make_checkpoint(tmp_path / "model", "odd"), tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    command = [sys.executable, gloo_rank.__file__, "1", str(folder), kernels, str(store), device]
    with subprocess.Popen(command, env=environment) as other:
        alone = gloo_rank.logits_of(ALONE, folder, kernels, device)
        meeting = Meeting(2)
        with ThreadPoolExecutor(2) as threads:
            both = [ThreadCollectives(rank, meeting) for rank in range(2)]
            compute = partial(gloo_rank.logits_of, folder=folder, kernels=kernels, device=device)
            of_threads, _ = threads.map(compute, both)
        together = gloo_rank.compute(0, folder, kernels, store, device)
        assert other.wait(60) == 0
    assert len(together) == 2
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    if kernels != "torch":
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(together, of_threads, strict=True))


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)])
def test_a_group_of_one_process_computes_what_none_computes(tmp_path: Path, backend: str, device: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "odd")
    alone = gloo_rank.logits_of(ALONE, folder, "torch", device)
    of_group = gloo_rank.compute(0, folder, "torch", tmp_path / "store", device, size=1, backend=backend)
    torch.testing.assert_close(of_group, alone, atol=1e-4, rtol=0)
