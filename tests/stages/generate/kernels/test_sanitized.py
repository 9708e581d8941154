"""No kernel reads or writes outside of its arrays, and none does what C leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint
from kernel_variants import VARIANTS

from stages.generate.kernels import build

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")


@pytest.mark.night  # the library computes many times slower
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_of_every_family_touch_their_own_memory_alone(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None or compiler.command[0] != "cc":
        pytest.skip("needs cc")
    library = tmp_path / build.LIBRARY
    build.build(library, compiler, flags=SANITIZERS)
    runtime = [compiler.command[0], "-print-file-name=libasan.so"]
    asan = subprocess.run(runtime, capture_output=True, text=True, check=True).stdout.strip()
    folders = [make_checkpoint(tmp_path / family, family) for family in FAMILIES]
    environment = os.environ | {
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    for variant in VARIANTS:
        script = Path(__file__).with_name("sanitized.py")
        command = [sys.executable, *map(str, (script, library, variant, *folders))]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, "computed\n"), ran.stderr[-4000:]
