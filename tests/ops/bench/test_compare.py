"""Comparing: the same exact prompts for both sides, runs in turn, and what is said of them."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from support.checkpoints import make_checkpoint
from support.openai_stand_in import OpenAIStandIn, whole
from support.servers import ROOT, eventually
from tokenizers import Tokenizer

from ops.bench import compare, targets
from ops.bench.compare import CompareConfig, Side, Task
from ops.bench.datasets import Span
from ops.bench.load import COMPLETIONS, Form
from ops.bench.models import Prompt, Prompts
from ops.bench.targets import Served, SideFailed
from pipeline.errors import ConfigError

COMPARE = (sys.executable, str(ROOT / "minisgl.py"), "bench", "compare")


@pytest.fixture(scope="module", params=["qwen3", "llama3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; the second one's tokenizer begins every text with a token of its own."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)


def test_a_prompt_has_exactly_the_tokens_that_were_asked(folder: Path) -> None:
    prompts = Prompts(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_special = len(tokenizer.encode("").ids)
    assert num_special == (1 if folder.name == "llama3" else 0)
    for prompt in prompts.drawn(random.Random(0), [(1, 3), (17, 1), (200, 2)]):
        assert tuple(tokenizer.encode(prompt.text).ids) == prompt.ids
    lengths = [len(prompt.ids) - num_special for prompt in prompts.drawn(random.Random(0), [(1, 3), (17, 1), (200, 2)])]
    assert lengths == [1, 17, 200]


def test_a_text_that_is_another_number_of_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 words"):
        Prompts(folder).of("zqxj zqxj", 2, 1)


def test_every_run_has_the_same_lengths_and_other_words(folder: Path) -> None:
    prompts = Prompts(folder)
    many, single = compare.tasks(CompareConfig(num_requests=5, inputs=Span(4, 9), outputs=Span(2, 3)))
    assert many.concurrency == 5 and single.concurrency == 1
    first, again, other = (many.drawn(prompts, 0, run) for run in (0, 0, 1))
    assert first == again
    assert [len(prompt.ids) for prompt in first] == [len(prompt.ids) for prompt in other]
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in other}


def test_sides_run_in_turn_on_the_same_and_the_median_leaves_out_the_warm_up(folder: Path) -> None:
    log: list[tuple[str, Sequence[Prompt]]] = []

    def noted(name: str, durations_s: Iterator[float]) -> Side:
        def run(prompts: Sequence[Prompt], concurrency: int) -> dict[str, Any]:
            log.append((name, prompts))
            return {"duration_s": next(durations_s)}

        return Side(name, run, count(0, 0.5).__next__)

    ours, peer = noted("ours", iter([99.0, 1.0, 2.0, 10.0])), noted("peer", iter([99.0, 4.0, 5.0, 1.0]))
    task = Task("some", ((3, 10), (4, 10)), 2)
    with Console().status("") as status:
        result = compare._compared(task, Prompts(folder), CompareConfig(runs=3), (ours, peer), status)
    assert [name for name, _ in log] == ["ours", "peer"] * 4
    assert all(log[place][1] == log[place + 1][1] for place in range(0, 8, 2))
    assert result["output_tokens_per_s"] == {"ours": 10.0, "peer": 5.0}
    assert result["ratio"] == 2.0
    assert [(row["run"], row["side"]) for row in result["runs"]] == [
        (run, side) for run in (1, 2, 3) for side in ("ours", "peer")
    ]
    assert result["runs"][0]["cores_of_the_other_side"] == 0.5


def test_a_side_that_was_not_idle_is_told() -> None:
    row = {"cores_of_the_other_side": 0.4}
    prefix = {"prefix_tokens": 2048, "first_ms": 1000.0, "again_ms": 50.0, "share": 0.05}
    result = {"name": "many", "output_tokens_per_s": {"ours": 30.0, "peer": 20.0}, "ratio": 1.5, "runs": [row]}
    text = compare.table([result], prefix, "ours", "peer")
    assert "1.50x" in text and "first token after 1,000 ms, repeated after 50 ms (5.0%)" in text
    assert "was not idle: it used up to 0.40 cores" in text
    row["cores_of_the_other_side"] = 0.01
    assert "not idle" not in compare.table([result], prefix, "ours", "peer")


def test_a_server_that_counts_otherwise_is_refused(stand_in: OpenAIStandIn) -> None:
    side = Served("peer", stand_in.url, Form(COMPLETIONS, "m"))
    prompt = Prompt("one two", (1,) * 9, 4)  # the stand-in: 5 and 2 a word
    assert side.measure([prompt], 1)[0].answer.output_tokens == 4
    assert side.cpu_s() is None
    with pytest.raises(SideFailed, match=r"9 .* 4 .* 8 .* 4 "):
        side.measure([Prompt("one two", (1,) * 8, 4)], 1)
    stand_in.script = lambda body: whole({**body, "max_tokens": 2})
    with pytest.raises(SideFailed, match=r"9 .* 2 .* 9 .* 4 "):
        side.measure([prompt], 1)
    stand_in.script = lambda body: (500, {"error": "broken"})
    with pytest.raises(SideFailed, match="HTTP 500: broken"):
        side.measure([prompt], 1)


def test_a_peer_by_its_url_says_which_model_it_has(stand_in: OpenAIStandIn) -> None:
    targets.served_at("peer", stand_in.url, COMPLETIONS).measure([Prompt("one", (1,) * 7, 1)], 1)
    assert stand_in.bodies[0]["model"] == "stand-in" and stand_in.paths == ["/v1/completions"]


def test_the_processor_time_of_a_process_holds_that_of_its_children() -> None:
    spin = "x = sum(range(10_000_000)); print(x, flush=True); input()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline()
        used_s, its_own_s = targets.tree_cpu_s(process.pid), targets.cpu_s(process.pid)
        process.stdin.write(b"\n")
    assert used_s > its_own_s >= 0
    assert targets.tree_cpu_s(process.pid) == 0.0  # it has ended


def test_an_interrupt_while_a_process_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), targets.started([sys.executable, "-c", "input()"], None):
        pytest.fail("the block ran")
    assert begun[0].returncode is not None


@pytest.mark.slow
@pytest.mark.night
def test_ours_is_compared_with_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama3", "llama3")  # its prompts begin with a token of their own
    flags = ["--model", str(folder), "--threads", "1", "--runs", "2", "--num-requests", "3", "--input-len", "8-20"]
    flags += ["--output-len", "3-6", "--num-singles", "2", "--single-len", "4", "--prefix-len", "128"]
    flags += ["--num-prefixes", "2", "--output", str(tmp_path / "out.json")]
    command = [*COMPARE, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "minisgl  transformers  ratio" in done.stdout and "A prefix of 128 tokens" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["peer"]["name"] == "transformers" and document["peer"]["dtype"] == "torch.float32"
    for task in document["tasks"]:
        assert [(row["run"], row["side"]) for row in task["runs"]] == [
            (run, side) for run in (1, 2) for side in ("minisgl", "transformers")
        ]
        asked = sum(output_tokens for _, output_tokens in task["lengths"])
        assert all(row["output_tokens"] == asked and row["duration_s"] > 0 for row in task["runs"])
        ours = [request for row in task["runs"] for request in row["requests"]]
        assert len(ours) == 2 * len(task["lengths"])
        assert all(request["cached_tokens"] == 0 for request in ours)  # no run helps the next
        rates = task["output_tokens_per_s"]
        assert task["ratio"] == pytest.approx(rates["minisgl"] / rates["transformers"])
    assert [row["first"]["cached_tokens"] for row in document["prefix"]["prefixes"]] == [0, 0]
    assert [row["again"]["cached_tokens"] for row in document["prefix"]["prefixes"]] == [128, 128]


@pytest.mark.slow
@pytest.mark.night
def test_nothing_is_left_of_a_comparison_that_is_ended(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3")
    command = [*COMPARE, "--model", str(folder), "--threads", "1", "--runs", "1000"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
    top = psutil.Process(process.pid)
    family = [top]
    try:
        eventually(lambda: any("transformers" in str(one.cmdline()) for one in top.children()), "the peer", 120)
        family += top.children(recursive=True)
        assert len(family) >= 7  # with the server, its Redis, its four workers, and the peer
        process.terminate()
        assert process.wait(120) == 130
        assert not [one for one in family[1:] if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()


def test_llama_cpp_gets_the_first_part_of_a_model_in_gguf_files(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(b"")
    first = str(tmp_path / "m-00001-of-00002.gguf")
    assert compare.gguf_file(CompareConfig(), "python", tmp_path, tmp_path) == first
    assert compare.gguf_file(CompareConfig(gguf="/x.gguf"), "python", tmp_path, tmp_path) == "/x.gguf"
    with pytest.raises(ConfigError, match="--gguf q4_0: --model is a GGUF file"):
        compare.gguf_file(CompareConfig(gguf="q4_0"), "python", tmp_path, tmp_path)
