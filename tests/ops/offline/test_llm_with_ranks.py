"""`LLM` with several ranks: it starts the other processes, and they end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.checkpoints import make_checkpoint, reference_tokens
from support.servers import ROOT, eventually, is_alive

from minisgl import LLM, SamplingParams
from ops.offline import GenerationFailed
from pipeline.errors import ConfigError, RankLost

pytestmark = pytest.mark.slow  # another rank is a process that imports torch

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 300, 17, 17, 60], [9, 8, 7], [44] * 70]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama3"), "llama3")


def two_ranks(folder: Path) -> LLM:
    return LLM(folder, tp=2, threads=1, num_pages=64, page_size=16)


def others() -> list[psutil.Process]:
    """Return the other ranks that live."""
    children = psutil.Process().children()
    return [child for child in children if is_alive(child) and "stages.generate.ranks.children" in child.cmdline()]


@pytest.mark.night  # by day test_ranks has two ranks over HTTP
def test_two_ranks_answer_as_transformers_does_and_the_other_process_ends_with_the_model(folder: Path) -> None:
    with two_ranks(folder) as llm:
        completions = llm.generate(PROMPTS, GREEDY)
        assert len(others()) == 1
        assert llm.settings.numerics.endswith("/ranks-2")
    assert others() == []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected, gap = reference_tokens(folder, prompt, 8)
        assert gap > 1e-3
        assert list(completion.token_ids) == expected


def test_ranks_that_cannot_divide_the_model_are_refused_before_any_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank is started"))
    with pytest.raises(ConfigError, match="--tp 3"):
        LLM(folder, tp=3)


def test_a_rank_that_ends_at_its_start_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.generate.ranks.children.PROGRAM", (sys.executable, "-c", "raise SystemExit(9)"))
    with pytest.raises(RankLost, match="rank 1 ended with 9"):
        two_ranks(folder)


@pytest.mark.night
@pytest.mark.parametrize("end", [psutil.Process.kill, psutil.Process.terminate])
def test_when_a_rank_is_killed_calls_fail_and_nothing_waits(
    folder: Path, end: Callable[[psutil.Process], None]
) -> None:
    with two_ranks(folder) as llm:
        llm.generate(PROMPTS, GREEDY)
        (other,) = others()
        end(other)
        with pytest.raises(GenerationFailed):
            llm.generate(PROMPTS, GREEDY)
        with pytest.raises(GenerationFailed):
            llm.generate(PROMPTS, GREEDY)
    assert others() == []


PROGRAM = """
import sys, time
from minisgl import LLM
llm = LLM(sys.argv[1], tp=2, threads=1, num_pages=64)
llm.generate("Hello!")
print("ready", flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


@pytest.mark.night
@pytest.mark.parametrize("end", ["by itself", "SIGKILL", "SIGINT"])
def test_the_other_rank_ends_with_the_program_however_that_ends(folder: Path, end: str) -> None:
    line = [sys.executable, "-c", PROGRAM, str(folder), "leave" if end == "by itself" else "stay"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"ready\n"
        children = [] if end == "by itself" else psutil.Process(program.pid).children()
        if end != "by itself":
            assert len(children) == 1
            program.send_signal(signal.Signals[end])
        _, said = program.communicate(timeout=60)
        assert (program.returncode == 0) is (end == "by itself")
        if end != "SIGINT":
            assert said == b""
    eventually(lambda: not any(map(is_alive, children)), "the other rank has ended")
