"""How many pages there are, and what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import make_checkpoint

from pipeline.errors import ConfigError
from stages.generate.forward.pool import GIB, allocate, available_memory_bytes, num_pages_for, page_bytes
from stages.generate.model.config import read_spec
from stages.generate.model.spec import ModelSpec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def pages(spec: ModelSpec, **changes: Any) -> int:
    settings: dict[str, Any] = {
        "page_size": 16,
        "dtype": torch.float32,
        "max_running_requests": 8,
        "max_seq_len": 100,
        "memory_ratio": 0.9,
        "available_bytes": 8 * GIB,
        "device": CPU,
    }
    return num_pages_for(spec, **{**settings, **changes})


def test_a_page_takes_what_it_says(spec: ModelSpec) -> None:
    kv_L2PKSD = allocate(spec, 5, 16, torch.bfloat16, CPU)
    assert kv_L2PKSD.shape == (2, 2, 5, 2, 16, 24)
    assert kv_L2PKSD.nbytes == 5 * page_bytes(spec, 16, torch.bfloat16)


def test_there_are_pages_for_all_requests_at_full_length_and_no_more(spec: ModelSpec) -> None:
    assert pages(spec) == 8 * 7


def test_a_cpu_gives_four_gib_at_most(spec: ModelSpec) -> None:
    many = {"max_running_requests": 10**6, "available_bytes": 64 * GIB}
    assert pages(spec, **many) == 4 * GIB // page_bytes(spec, 16, torch.float32)
    assert pages(spec, **many, device=torch.device("cuda")) > 50 * GIB // page_bytes(spec, 16, torch.float32)


def test_little_memory_gives_few_pages(spec: ModelSpec) -> None:
    assert 0 < pages(spec, available_bytes=2**20) < 8 * 7


def test_too_little_memory_is_refused_with_the_figures(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="--memory-ratio"):
        pages(spec, available_bytes=1000)


def test_the_free_memory_of_this_machine_is_known() -> None:
    assert 2**20 < available_memory_bytes(CPU) < 2**50
