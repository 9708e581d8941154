"""`minisgl bench tail`: what counts as beside a prompt, what breaks a bound, and a small run of all of it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from support.checkpoints import make_checkpoint
from support.openai_stand_in import DONE, FINISH, ROLE, Body, Frames, OpenAIStandIn, data, usage_chunk
from support.servers import ROOT

from ops.bench import tail
from ops.bench.models import Prompts
from ops.bench.tail import Gap, Run, TailConfig
from ops.bench.targets import SideFailed


class Words:
    """Writes prompts without a tokenizer."""

    def words(self, generator: random.Random, num_tokens: int) -> str:
        return "a " * num_tokens


def gaps(*moments_s: float) -> list[Gap]:
    return [Gap(began_s, ended_s, 1) for began_s, ended_s in pairwise(moments_s)]


def a_run(p99: float = 1.5, pause: float = 3.0) -> Run:
    """Return a run whose gaps without prompts take 10 ms."""
    alone, beside = gaps(*(0.01 * number for number in range(101))), 200 * [Gap(5.0, 5.0 + 0.01 * p99, 1)]
    return tail.figures([*alone, *beside, Gap(5.0, 5.0 + 0.01 * pause, 1)], [(5.0, 6.0)])


def token_chunk(*token_ids: int) -> bytes:
    return data({"choices": [{"index": 0, "delta": {}, "token_ids": token_ids}]})


def test_a_gap_is_beside_a_prompt_if_any_part_of_it_is_between_its_sending_and_its_first_token() -> None:
    run = tail.figures(gaps(0, 1, 3, 6, 10, 15, 21), [(1.5, 3.5), (12.0, 14.0)])
    assert run.beside.count == 3 and run.alone.count == 3
    assert run.beside.mean == pytest.approx((2 + 3 + 5) * 1000 / 3)
    assert run.longest_pause_ms == 5000 and run.ttft_ms == (2000, 2000)
    assert run.alone.p50 == 4000 and run.pause == 1.25


def test_streams_that_slow_down_as_they_grow_are_compared_with_what_is_usual_at_that_time() -> None:
    """From 10 ms to 30 ms, with prompts in the middle third, where a step takes twice as long."""
    all_gaps, now_s = [], 0.0
    for number in range(3000):
        ms = (10 + 20 * number / 3000) * (2 if 1000 <= number < 2000 else 1)
        all_gaps.append(Gap(now_s, now_s + ms / 1000, 1))
        now_s += ms / 1000
    run = tail.figures(all_gaps, [(all_gaps[1000].began_s, all_gaps[1999].ended_s)])
    assert run.p99 == pytest.approx(2.0, rel=0.1) and run.pause == pytest.approx(2.0, rel=0.1)


def test_tokens_that_come_together_share_their_gap_but_the_pause_is_whole() -> None:
    run = tail.figures([Gap(0, 1, 1), Gap(10, 14, 2)], [(9, 20)])
    assert (run.beside.count, run.beside.mean, run.longest_pause_ms) == (2, 2000, 4000)


@pytest.mark.parametrize("in_hand", [[], [(0.0, 9.0)]], ids=["no prompt", "always a prompt"])
def test_there_must_be_tokens_with_and_without_a_prompt(in_hand: list[tuple[float, float]]) -> None:
    with pytest.raises(SideFailed):
        tail.figures(gaps(1, 2, 3), in_hand)


def test_each_piece_with_tokens_ends_a_gap_also_if_it_has_no_text() -> None:
    frames = [ROLE, token_chunk(1), token_chunk(2, 3), FINISH, usage_chunk(1, 3), DONE]
    arrivals = [(float(number), frame) for number, frame in enumerate(frames)]
    assert list(tail.pieces_of(arrivals)) == [(1.0, 1), (2.0, 2)]
    assert tail.gaps_of(arrivals) == [Gap(1.0, 2.0, 2)]


def test_the_medians_of_the_runs_are_compared_with_the_bounds() -> None:
    good, uneven, paused = a_run(), a_run(p99=2.5, pause=2.5), a_run(pause=5.0)
    config = TailConfig()
    assert tail.broken([good, uneven, paused], config) == []
    assert tail.broken([good, uneven, uneven], config) == [
        "The p99 beside a prompt is 2.50 times the p50 without prompts; the bound is 2.2."
    ]
    assert tail.broken([paused, uneven, paused], config) == [
        "The longest pause is 5.00 times the p50 without prompts; the bound is 4."
    ]
    shown = tail.table([good, uneven], config)
    assert "times the p50 alone at that time" in shown and "2.50x" in shown and "10.0" in shown


def test_a_stream_that_ends_and_a_prompt_that_fails_end_the_run(stand_in: OpenAIStandIn) -> None:
    prompts, config = cast(Prompts, Words()), TailConfig(streams=1, alone_s=0.01)

    def run() -> None:
        asyncio.run(tail.measured(config, stand_in.url, prompts, random.Random(0)))

    stand_in.script = lambda body: [token_chunk(1), FINISH, DONE]
    with pytest.raises(SideFailed, match="--prompts"):
        run()
    asked = {"ignore_eos": True, "return_token_ids": True, "stream": True, "temperature": 0}
    assert asked.items() <= stand_in.bodies[0].items() and "max_tokens" not in stand_in.bodies[0]

    def refuse(body: Body) -> Frames | tuple[int, object]:
        return 503, {"error": {"message": "full"}}

    stand_in.script = refuse
    with pytest.raises(SideFailed, match="full"):
        run()


@pytest.mark.slow
@pytest.mark.night
def test_a_server_is_measured_and_a_large_fixed_budget_is_seen(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", max_positions=8192)
    flags = ["--streams", "2", "--every", "0.5", "--prompts", "2", "--alone", "0.5", "--runs", "1"]
    slow = "--mixed-prefill-length 2048 --threads 1 --kernels torch"
    flags += ["--p99", "1000", "--pause", "1.5", "--serve-flags", slow]
    command = [sys.executable, str(ROOT / "minisgl.py"), "bench", "tail", "--model", str(folder), *flags]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The longest pause is" in done.stdout and "The p99" not in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["numerics"].startswith("float32/none/torch-") and document["numerics"] in done.stdout
    (run,) = document["runs"]
    assert run["alone"]["count"] > 20 and run["beside"]["count"] > 2 and len(run["ttft_ms"]) == 2
    assert document["pause"] == run["pause"] > 1.5 and len(document["broken"]) == 1
