"""`minisgl bench serve` as a user runs it: against a server that follows a script, and against ours."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from support.openai_stand_in import Body, Frames, OpenAIStandIn, whole
from support.servers import ROOT, serve

import minisgl
from ops.bench import serve as bench

SMALL = ("--num-requests", "6", "--concurrency", "2", "--input-len", "10-20", "--output-len", "4")


def run(*arguments: str) -> int:
    return minisgl.main(["bench", "serve", *arguments])


def test_it_prints_a_table_and_writes_everything_that_it_measured(
    stand_in: OpenAIStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "plot.png"))
    assert (
        run("--url", stand_in.url, *SMALL, *files, "--api-key", "secret", "--goodput", "ttft:60000", "e2e:0.001") == 0
    )
    printed = capsys.readouterr()
    assert "model stand-in: random, 10-20 tokens in, 4 out, 2 at a time" in printed.out
    assert "has 2.00 tokens on average" in printed.out and "24 (24 planned)" in printed.out
    assert "good (ttft:60000 e2e:0.001): 0.0% of the requests" in printed.out
    assert printed.err == ""
    written = (tmp_path / "out.json").read_text()
    document = json.loads(written)
    assert "secret" not in written
    assert document["setup"]["command"][:3] == ["minisgl", "bench", "serve"] and document["setup"]["cpu"]
    assert document["options"]["url"] == stand_in.url and document["options"]["seed"] == 0
    assert document["tokenizer"] == {"tokens_per_word": 2.0, "overhead_tokens": 5.0}
    assert document["summary"]["output_tokens"] == 24 and document["summary"]["num_failed"] == 0
    assert [row["output_tokens"] for row in document["requests"]] == [4] * 6
    assert all(abs(row["prompt_tokens"] - row["planned_input_tokens"]) <= 1 for row in document["requests"])
    assert (tmp_path / "plot.png").exists()
    assert len(stand_in.bodies) == 8  # two to warm up


def test_the_head_of_the_table_names_the_numerics_of_our_server_and_none_of_another(
    stand_in: OpenAIStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version, expected in (
        ({"version": "1", "engines": [{"numerics": "a"}, {"numerics": "b"}, {"numerics": "a"}]}, "a, b"),
        ({"version": "0.11"}, ""),
        (["0.11"], ""),
    ):
        stand_in.version = version
        assert run("--url", stand_in.url, *SMALL, "--output", str(tmp_path / "out.json")) == 0
        assert json.loads((tmp_path / "out.json").read_text())["numerics"] == expected
        assert (f"2 at a time\nnumerics: {expected}\n\n" if expected else "2 at a time\n\n") in capsys.readouterr().out


def test_another_seed_is_another_load() -> None:
    first, again, other = (bench.planned(bench.LoadConfig(seed=seed)) for seed in (0, 0, 5))
    assert first == again != other


def test_a_trace_is_sent_at_its_times(
    stand_in: OpenAIStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 40 * place, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]} for place in range(4)
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--dataset", "mooncake", "--trace", str(tmp_path / "trace"), "--trace-scale", "0.5", "--warmup", "0")
    assert run("--url", stand_in.url, *flags, "--output", str(tmp_path / "out.json")) == 0
    requests = json.loads((tmp_path / "out.json").read_text())["requests"]
    start_ms = requests[0]["sent_ms"] - requests[0]["lag_ms"]
    due_ms = [row["sent_ms"] - row["lag_ms"] - start_ms for row in requests]
    assert due_ms == pytest.approx([0, 20, 40, 60], abs=0.01)
    assert [body["max_tokens"] for body in stand_in.bodies] == [3] * 4
    assert "sent late by" in capsys.readouterr().out


def test_what_failed_is_told_after_the_figures_of_what_did_not(
    stand_in: OpenAIStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = count()

    def script(body: Body) -> Frames | tuple[int, object]:
        return (503, {"error": {"message": "full"}}) if next(numbers) % 3 == 0 else whole(body)

    stand_in.script = script
    assert run("--url", stand_in.url, *SMALL, "--warmup", "0") == 1
    printed = capsys.readouterr()
    assert printed.err == "minisgl: 2 of 6 requests failed: 2x HTTP 503: full\n"
    assert "4 of 6" in printed.out


def test_a_warm_up_that_fails_ends_it_with_what_the_server_said(
    stand_in: OpenAIStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.script = lambda body: (400, {"error": {"message": "ignore_eos: unknown"}})
    assert run("--url", stand_in.url, *SMALL) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(
        f"minisgl: {stand_in.url}: in the warm-up 2 of 2 requests failed: 2x HTTP 400: ignore"
    )
    assert printed.out == "" and len(stand_in.bodies) == 2


@pytest.mark.slow
@pytest.mark.night
def test_our_server_is_measured_from_the_command_line(tmp_path: Path) -> None:
    with serve(tmp_path, "--threads", "1") as server:
        command = [sys.executable, str(ROOT / "minisgl.py"), "bench", "serve", "--url", server.url]
        flags = ["--dataset", "multi-turn", "--num-requests", "6", "--turns", "3", "--concurrency", "2"]
        lengths = ["--input-len", "60-80", "--output-len", "8-12", "--output", str(tmp_path / "out.json")]
        done = subprocess.run([*command, *flags, *lengths], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "6 of 6" in done.stdout and done.stderr == ""
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["model"] == "minisgl-nonsense"
    assert all(row["output_tokens"] == row["planned_output_tokens"] for row in document["requests"])
    assert document["summary"]["cached_tokens"] > 0  # later turns find the earlier ones in the cache
    planned, seen = (document["summary"][name] for name in ("planned_prompt_tokens", "prompt_tokens"))
    assert (
        0.8 * planned < seen < 1.4 * planned
    )  # words are tokens to about that, and each turn has a template of its own
