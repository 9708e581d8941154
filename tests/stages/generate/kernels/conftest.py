"""The kernels' library for tests: one for each variant that this CPU can run."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[4] / "stages/generate/kernels"
AVX2 = "avx2 fma f16c"
FLAGS = {"avx2": AVX2, "avx512": f"{AVX2} avx512f avx512bw avx512vl avx512dq avx512bf16 avx512vnni"}


@pytest.fixture(scope="session", params=FLAGS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, str]:
    """Return a library with the functions of one variant, and the variant's name."""
    variant: str = request.param
    available = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    if missing := {
        flag.replace("avx512bf16", "avx512_bf16").replace("avx512vnni", "avx512_vnni")
        for flag in FLAGS[variant].split()
    } - set(available):
        pytest.skip(f"this CPU has no {' '.join(sorted(missing))}")
    path = tmp_path_factory.mktemp("kernels") / f"{variant}.so"
    flags = [f"-m{flag}" for flag in FLAGS[variant].split()]
    files = [SOURCES / "gemm.c", SOURCES / "pack.c"]
    options = "-O1 -std=gnu11 -fPIC -shared -ffp-contract=off -fno-math-errno"
    subprocess.run(["cc", *options.split(), f"-DVARIANT={variant}", *flags, *files, "-o", path], check=True)
    return ctypes.CDLL(str(path)), variant
