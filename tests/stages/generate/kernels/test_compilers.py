"""Another compiler makes the same bits, and one that watches memory finds nothing to complain of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.checkpoints import FAMILIES, make_checkpoint
from support.kernel_variants import VARIANTS

from stages.generate.kernels import build

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(1200)]  # they compute thousands of steps

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
Hashes = Callable[[Path, Mapping[str, str]], list[str]]


@pytest.fixture(scope="module")
def cc() -> build.Compiler:
    compiler = build.find_compiler()
    if compiler is None or compiler.command[0] != "cc":
        pytest.skip("needs cc")
    return compiler


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> Hashes:
    """Return a function from a library to the hash of all that each variant computes."""
    folders = [make_checkpoint(tmp_path_factory.mktemp("families") / family, family) for family in FAMILIES]
    script = Path(__file__).with_name("all_steps.py")

    def computed(library: Path, more: Mapping[str, str]) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
        found = []
        for variant in VARIANTS:
            command = [sys.executable, *map(str, (script, library, variant, *folders))]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert ran.returncode == 0 and len(ran.stdout) == 64, ran.stderr[-4000:]
            found.append(ran.stdout)
        return found

    return computed


@pytest.fixture(scope="module")
def expected(cc: build.Compiler, hashes: Hashes, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    library = tmp_path_factory.mktemp("cc") / build.LIBRARY
    build.build(library, cc)
    found = hashes(library, {})
    assert len(set(found)) == len(VARIANTS), "variants round differently, or the hash says nothing"
    return found


def test_zig_makes_the_same_bits_as_cc(
    zig: build.Compiler, expected: list[str], hashes: Hashes, tmp_path: Path
) -> None:
    library = tmp_path / build.LIBRARY
    build.build(library, zig)
    assert hashes(library, {}) == expected


def test_no_kernel_leaves_its_memory_or_what_c_defines(
    cc: build.Compiler, expected: list[str], hashes: Hashes, tmp_path: Path
) -> None:
    library = tmp_path / build.LIBRARY
    build.build(library, cc, flags=SANITIZERS)
    runtime = [*cc.command, "-print-file-name=libasan.so"]
    asan = subprocess.run(runtime, capture_output=True, text=True, check=True).stdout.strip()
    assert hashes(library, {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"}) == expected
