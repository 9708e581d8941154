"""The kernels for aarch64 compute the same bits as those for AVX2. They run on an emulated CPU."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.kernel_variants import VARIANTS

from stages.generate.kernels import build

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(1200)]  # compiles C of two kinds of machines

PROGRAM = Path(__file__).with_name("every_bit.c")
OLD_CPU = "cortex-a53"
"""It has what every aarch64 CPU has, and no more: neither bfloat16 nor arithmetic in float16."""


def for_aarch64(zig: build.Compiler, libc: str) -> build.Compiler:
    return replace(zig, command=(*zig.command[:-1], f"aarch64-linux-{libc}"))


def printed(compiler: build.Compiler, variant: str, flags: Sequence[str], folder: Path, runner: Sequence[str]) -> str:
    """Compile every_bit.c with all kernels, and return what it prints for *variant*."""
    defines = (f"-DVARIANT={variant}", f"-DHAS_{variant.upper()}=1", '-DSOURCES="0"', '-DCOMPILER="a test"')
    files = (PROGRAM, *sorted(build.HERE.glob("*.c")))
    program = folder / variant
    options = (*build.FLAGS, *flags, *defines, f"-I{build.HERE}", *map(str, files), "-o", str(program))
    said = compiler.run(options, folder)
    assert not said, said
    ran = subprocess.run([*runner, str(program), variant], capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif("avx2" not in VARIANTS, reason="needs AVX2, whose results are those to expect")
def test_neon_computes_the_bits_of_avx2(zig: build.Compiler, tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("needs qemu: apt-get install qemu-user")
    here = build.find_compiler() or zig
    expected = printed(here, "avx2", build.VARIANTS["x86_64"]["avx2"].flags, tmp_path, [])
    assert len(set(expected.splitlines())) > 800
    assert not re.sub(r"^.*: [0-9a-f]{16}\n", "", expected, flags=re.MULTILINE), "it complains"
    neon = printed(for_aarch64(zig, "musl"), "neon", ["-static"], tmp_path, [emulator, "-cpu", OLD_CPU])
    assert neon.splitlines() == expected.splitlines()


def test_a_library_for_aarch64_can_be_built(
    zig: build.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    library = tmp_path / build.LIBRARY
    assert build.build(library, for_aarch64(zig, "gnu.2.17")) == ["neon"]
    assert build.origin_of(library) == (build.hash_of(), zig.name)
