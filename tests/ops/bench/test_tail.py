"""`minisgl bench tail`: what a token's time is, what breaks a bound, and a small run of all of it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from support.checkpoints import make_checkpoint
from support.openai_stand_in import DONE, FINISH, ROLE, Body, Frames, OpenAIStandIn, data, usage_chunk
from support.servers import ROOT

from ops.bench import tail
from ops.bench.models import Prompts
from ops.bench.tail import FIGURES, TailConfig
from ops.bench.targets import SideFailed


class Words:
    """Writes prompts without a tokenizer."""

    def words(self, generator: random.Random, num_tokens: int) -> str:
        return "a " * num_tokens


def token_chunk(*token_ids: int) -> bytes:
    return data({"choices": [{"index": 0, "delta": {}, "token_ids": token_ids}]})


def test_a_piece_with_tokens_counts_also_if_it_has_no_text() -> None:
    frames = [ROLE, token_chunk(1), token_chunk(2, 3), FINISH, usage_chunk(1, 3), DONE]
    arrivals = [(float(number), frame) for number, frame in enumerate(frames)]
    assert list(tail.pieces_of(arrivals)) == [(1.0, 1), (2.0, 2)]


def test_the_medians_of_the_runs_are_compared_with_the_bounds() -> None:
    good = {figure.name: figure.bound for figure in FIGURES}
    slow = good | {"question_s": 0.75, "throughput": 0.9}
    assert tail.broken([good, good, slow]) == []
    assert tail.broken([good, slow, slow]) == [
        "many at once: output tokens per second, times those of prompts first: 0.90; the bound is 0.98.",
        "a question beside two documents: its first token, s: 0.75; the bound is 0.5.",
    ]
    last = tail.table([good, slow, slow]).splitlines()[-1].split()
    assert last[-6:] == ["0.50", "0.75", "0.75", "0.75", "<=", "0.5"]


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "SETTLE_S", 0.0)


def run(stand_in: OpenAIStandIn) -> dict[str, float]:
    prompts, config = cast(Prompts, Words()), TailConfig(streams=1, requests=2)
    made = tail.measured(config, stand_in.url, stand_in.url, prompts, random.Random(0), ours_first=True)
    return asyncio.run(made)


def test_a_stream_that_ends_while_it_is_measured_ends_the_run(stand_in: OpenAIStandIn) -> None:
    stand_in.script = lambda body: [token_chunk(1), token_chunk(2), FINISH, usage_chunk(1, 2), DONE]
    with pytest.raises(SideFailed, match="--prompt-len"):
        run(stand_in)
    asked = {"ignore_eos": True, "return_token_ids": True, "stream": True, "temperature": 0}
    assert all(asked.items() <= body.items() for body in stand_in.bodies)


def test_a_request_that_fails_ends_the_run_with_the_servers_reason(stand_in: OpenAIStandIn) -> None:
    def refuse(body: Body) -> Frames | tuple[int, object]:
        return 503, {"error": {"message": "full"}}

    stand_in.script = refuse
    with pytest.raises(SideFailed, match="full"):
        run(stand_in)


@pytest.mark.slow
@pytest.mark.night
def test_servers_are_measured_and_a_step_that_nothing_interrupts_is_seen(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", max_positions=8192)
    flags = ["--streams", "2", "--requests", "4", "--runs", "1", "--serve-flags", "--threads 1 --kernels torch"]
    command = [sys.executable, str(ROOT / "minisgl.py"), "bench", "tail", "--model", str(folder), *flags]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["numerics"].startswith("float32/none/torch-") and document["numerics"] in done.stdout
    assert document["runs"][0].keys() == {figure.name for figure in FIGURES}
    assert all(value > 0 for value in document["runs"][0].values())
