"""Threads share the chunks of many short jobs: each counts once, and nobody waits in vain, or for one held up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.selection import by_night

from stages.generate.kernels import build

HERE = Path(__file__).parent


def compiled(compiler: build.Compiler, file: str, folder: Path, flags: tuple[str, ...] = ()) -> Path:
    program = folder / "program"
    options = ("-O2", "-std=gnu11", "-pthread", f"-I{build.HERE}", *flags)
    files = (HERE / file, build.HERE / "pool.c")
    subprocess.run([*compiler.command, *options, *map(str, files), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("-fsanitize=thread",), marks=pytest.mark.night)], ids=["plain", "sanitized"]
)
def test_every_chunk_counts_once_whatever_the_threads_and_whichever_is_held_up(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    compiler = build.find_compiler()
    if compiler is None or (flags and compiler.command[0] != "cc"):
        pytest.skip("needs cc")
    program = compiled(compiler, "stress.c", tmp_path, flags)
    jobs = by_night(20_000, 200_000 if flags else 1_500_000)
    for pauses_every in (0, by_night(3_000, 20_000)):
        arguments = [str(program), str(jobs), "6", str(pauses_every)]
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
        assert (ran.returncode, ran.stdout) == (0, f"{jobs} jobs\n"), ran.stdout + ran.stderr


@pytest.mark.night
def test_the_share_of_a_thread_that_was_empty_for_millions_of_jobs_can_be_taken(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("needs a compiler")
    program = compiled(compiler, "unused.c", tmp_path)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "9000002 2\n"
