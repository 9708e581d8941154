"""The memory that the kernels take for a step is what was set aside for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.checkpoints import Family, make_checkpoint, make_engine
from support.gguf_files import make_gguf
from support.kernel_variants import VARIANTS
from support.plans import Request, plan, shuffled_pages
from torch import Tensor

from pipeline.events import SamplingParams
from stages.generate.collectives import sum_in_order
from stages.generate.kernels import build, library
from stages.generate.model import compiled as decoder
from stages.generate.model.config import read_spec
from stages.generate.model.folder import model_folder
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling.draws import make_draws
from stages.generate.schedule.plan import Sample
from stages.generate.setup.kernel_memory import DRAW_BYTES, step_bytes

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def taken_bytes() -> int:
    """Return the bytes of this process that malloc has given and that are not free again."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Silent:
    """Ranks of which the others add nothing. It notes how much memory is taken while all parts are there."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.taken_bytes = size, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = [x.clone(), *(torch.zeros_like(x) for _ in range(1, self.size))]
        self.taken_bytes = max(self.taken_bytes, taken_bytes())
        return sum_in_order(parts)

    def gather_to_0(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "threads", "num_ranks"),
    [
        ("qwen3", "bfloat16", "none", 1, 1),
        ("qwen3moe", "float32", "int8", 2, 1),
        ("qwen3moe", "float32", "gguf", 2, 1),
        ("odd", "float32", "none", 2, 1),
        ("odd", "float32", "none", 2, 3),
    ],
)
def test_a_step_takes_the_memory_that_was_set_aside_for_it(
    family: Family,
    dtype: str,
    quantization: str,
    threads: int,
    num_ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    path = tmp_path / build.LIBRARY  # a copy has memory of its own, and none yet
    shutil.copy(build.HERE / build.LIBRARY, path)
    monkeypatch.setattr(decoder, "library", lambda: library.load(path))
    folder = tmp_path / family
    if quantization == "gguf":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        make_gguf(tmp_path / "m.gguf", family, lambda name: "F32" if "inp" in name else "Q4_K", max_positions=4096)
        folder = model_folder(str(tmp_path / "m.gguf"))
    else:
        make_checkpoint(folder, family, max_positions=4096)
    sizes: dict[str, Any] = {"num_pages": 1100, "page_size": 4, "max_seq_len": 4096, "max_running_requests": 100}
    ranks = Silent(num_ranks)
    sizes |= {"collectives": ranks} if num_ranks > 1 else {}
    engine = make_engine(folder, dtype, kernels=VARIANTS[-1], quantization=quantization, threads=threads, **sizes)
    pool = shuffled_pages(num_pages=1100)
    rows = [Request(row, [row % 400 + 4] * (4000 if row == 0 else 2), pool).row(4000) for row in range(100)]
    tokens = sum(len(row.token_ids) for row in rows)
    before = taken_bytes()
    x_TE = engine.launch(plan(*rows), None).x_TE
    took = max(taken_bytes(), ranks.taken_bytes) - before
    expected = step_bytes(
        read_spec(folder).sharded(0, num_ranks),
        bfloat16=dtype == "bfloat16",
        quantization=quantization,
        variant=VARIANTS[-1],
        threads=threads,
        page_size=4,
        num_tokens=tokens,
        num_rows=100,
        max_seq_len=4096,
    )
    assert x_TE.shape[0] == tokens
    arguments = 4 * (tokens + 100 * 1000) if num_ranks > 1 else 0  # tokens and pages are still there while ranks add
    kept = 32 << 10  # small objects of Python: those that are free again count as long as malloc keeps them
    assert 0.9 * expected < took - arguments <= expected + kept


def test_the_memory_of_each_thread_that_draws_is_aligned(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("needs a compiler")
    source, path = tmp_path / "scratch.c", tmp_path / "scratch.so"
    source.write_text('#include "sample.c"\nfloat maximum(const float *x, int64_t count) { return x[count - 1]; }\n')
    options = ("-std=gnu11", "-fPIC", "-shared", f"-I{build.HERE}")
    subprocess.run([*compiler.command, *options, str(source), "-o", str(path)], check=True)
    draw_scratch = ctypes.CDLL(str(path)).draw_scratch
    draw_scratch.argtypes, draw_scratch.restype = [ctypes.c_int64], ctypes.c_int64
    for count in (1, 64, 65, 11 * 64, 497, 50_000, 151_936):
        took = draw_scratch(count)
        assert took % 64 == 0 and took <= DRAW_BYTES * -(-count // 64) * 64


def test_drawing_takes_the_memory_that_was_set_aside_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    path = tmp_path / build.LIBRARY
    shutil.copy(build.HERE / build.LIBRARY, path)
    monkeypatch.setattr(sampling, "library", lambda: library.load(path))
    functions = sampling.functions.__wrapped__()
    assert functions is not None
    logits_RV, tokens_R = np.zeros((2, 50_000), np.float32), np.zeros(2, np.int64)
    draws = make_draws([Sample(SamplingParams(), 0, ())] * 2)
    before = taken_bytes()
    sampling.draw(functions, tokens_R, logits_RV, np.arange(2), draws, threads=2)
    expected = 2 * DRAW_BYTES * 50_048
    assert 0.9 * expected < taken_bytes() - before <= expected
