"""The kernels' library for tests: one for each variant that this CPU can run."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[4] / "stages/generate/kernels"
AVX2 = ("avx2", "fma", "f16c")
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "avx512vnni")
FLAGS = {"avx2": AVX2, "avx512": AVX2 + AVX512}
IN_CPUINFO = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni"}


@pytest.fixture(scope="session", params=FLAGS)
def variant(request: pytest.FixtureRequest) -> str:
    """Return the name of a variant that this CPU has."""
    name: str = request.param
    available = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    missing = {IN_CPUINFO.get(flag, flag) for flag in FLAGS[name]} - set(available)
    if missing:
        pytest.skip(f"this CPU lacks {' '.join(sorted(missing))}")
    return name


@pytest.fixture(scope="session")
def function(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return what finds a function of the variant's table by its name there."""
    path = tmp_path_factory.mktemp("kernels") / f"{variant}.so"
    options = ["-O1", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]
    files = [SOURCES / name for name in ("gemm.c", "pack.c")]
    flags = [f"-m{flag}" for flag in FLAGS[variant]]
    subprocess.run(["cc", *options, f"-DVARIANT={variant}", *flags, *files, "-o", path], check=True)
    library = ctypes.CDLL(str(path))
    return lambda name: getattr(library, f"{name}_{variant}")
