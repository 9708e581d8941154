"""Threads share the chunks of many short jobs: each counts once, and nobody waits in vain, or for one held up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.selection import by_night

from stages.generate.kernels import build

STRESS = Path(__file__).with_name("stress.c")


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("-fsanitize=thread",), marks=pytest.mark.night)], ids=["plain", "sanitized"]
)
def test_every_chunk_counts_once_whatever_the_threads_and_whichever_is_held_up(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    compiler = build.find_compiler()
    if compiler is None or (flags and compiler.command[0] != "cc"):
        pytest.skip("needs cc")
    program = tmp_path / "stress"
    options = ("-O2", "-std=gnu11", "-pthread", f"-I{build.HERE}", *flags)
    files = (STRESS, build.HERE / "pool.c")
    subprocess.run([*compiler.command, *options, *map(str, files), "-o", str(program)], check=True)
    jobs = by_night(20_000, 200_000 if flags else 1_500_000)
    for pauses_every in (0, by_night(3_000, 20_000)):
        arguments = [str(program), str(jobs), "6", str(pauses_every)]
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
        assert (ran.returncode, ran.stdout) == (0, f"{jobs} jobs\n"), ran.stdout + ran.stderr
