"""`--only peers`: nano-vllm's benchmark on other engines, with stand-ins that take what the real ones take.

`tests/signatures/peers.json` has the parameters of the real ones, in these versions: nano-vllm's from its repository,
those of vLLM and SGLang from the wheels that `pip download --no-deps vllm==0.33.0 sglang==0.5.23` brings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.servers import ROOT

from ops.bench import gpu, models
from ops.bench.offline import PRESETS, TEMPERATURE, draw

SIGNATURES = ROOT / "tests" / "signatures" / "peers.json"
OURS = """
import json, sys
file, rate = sys.argv[sys.argv.index("--output") + 1], 2000.0 if "--gpu-new" in sys.argv else 1000.0
open(file, "w").write(json.dumps({"output_tokens_per_s": rate, "arguments": sys.argv[1:]}))
"""
STAND_IN = """
import inspect, json, types
from pathlib import Path

HERE = Path(__file__).parent
SIGNATURES = json.loads(Path({signatures!r}).read_text())[HERE.name]

def known(function, *arguments, **named):
    return inspect.signature(eval(f"lambda {{SIGNATURES[function]}}: None")).bind(*arguments, **named).arguments

def asked(prompts, lengths, sampled):
    assert set(sampled) == {{({temperature}, True)}}
    with (HERE / "asked.jsonl").open("a") as file:
        print(json.dumps([prompts, lengths]), file=file)
"""
LIKE_VLLM = """
class SamplingParams(types.SimpleNamespace):
    def __init__(self, *arguments, **named):
        super().__init__(**known("SamplingParams", *arguments, **named))

class LLM:
    def __init__(self, *arguments, **named):
        known("LLM", *arguments, **named)

    def generate(self, *arguments, **named):
        given = known("generate", *arguments, **named)
        prompts, parameters = given["prompts"], given["sampling_params"]
        lengths = [one.max_tokens for one in parameters]
        asked([PROMPT for one in prompts], lengths, [(one.temperature, one.ignore_eos) for one in parameters])
        return [ANSWER for length in lengths]
"""
STAND_INS = {
    "nanovllm": LIKE_VLLM.replace("PROMPT", "one").replace("ANSWER", '{"text": "", "token_ids": [7] * length}'),
    "vllm": LIKE_VLLM.replace("PROMPT", 'one["prompt_token_ids"]').replace(
        "ANSWER", "types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[7] * length)])"
    ),
    "sglang": """
class Engine:
    def __init__(self, *arguments, **named):
        known("Engine", *arguments, **named)

    def generate(self, *arguments, **named):
        given = known("generate", *arguments, **named)
        parameters = [known("SamplingParams", **one) for one in given["sampling_params"]]
        lengths = [one["max_new_tokens"] for one in parameters]
        asked(given["input_ids"], lengths, [(one["temperature"], one["ignore_eos"]) for one in parameters])
        return [{"text": "", "output_ids": [], "meta_info": {"completion_tokens": length}} for length in lengths]
""",
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a GPU, an engine of ours that needs none, and a checkpoint without weights."""
    (tmp_path / "minisgl.py").write_text(OURS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").touch()
    (tmp_path / "pyproject.toml").write_text("project.dependencies = []")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda: {"GPU": "H100"})
    monkeypatch.setattr(models, "write", models.write_config)
    (tmp_path / "installed").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "installed")


def install(tmp_path: Path, name: str, body: str = "") -> Path:
    """Write the stand-in of a peer; return where it notes what it was asked."""
    folder = tmp_path / "installed" / name
    folder.mkdir()
    head = STAND_IN.format(signatures=str(SIGNATURES), temperature=TEMPERATURE)
    (folder / "__init__.py").write_text(head + STAND_INS[name] + body)
    return folder / "asked.jsonl"


def checked(tmp_path: Path, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code, and what the JSON says of each engine."""
    file = tmp_path / "out.json"
    code = gpu.main(["--only", "peers", "--json", str(file), *flags], {})
    return code, {one["name"]: one for one in json.loads(file.read_text())["peers"]}


def test_all_engines_get_the_prompts_of_nano_vllms_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [install(tmp_path, name) for name in STAND_INS]
    code, found = checked(tmp_path)
    assert (code, {one["status"] for one in found.values()}) == (0, {"ok"}), found
    assert list(found) == ["MiniSGL", "MiniSGL --gpu-new yes", "nano-vllm", "vLLM", "SGLang"]
    workloads = [draw(PRESETS["nano"], seed, 151_936) for seed in (1, 0)]
    assert workloads[1].output_tokens == 133_966, "as nano-vllm's README says"
    runs = [[workload.prompts, workload.output_lengths] for workload in workloads]
    assert [[json.loads(line) for line in file.read_text().splitlines()] for file in asked] == [runs] * 3
    arguments = found["MiniSGL"]["figures"]["arguments"]
    assert arguments[:6] == ["bench", "offline", "--device", "cuda", "--preset", "nano"]
    assert found["MiniSGL --gpu-new yes"]["figures"]["arguments"].count("--gpu-new") == 1
    assert "--dummy-weight" not in arguments, "it reads the weights that the others read"
    table = capsys.readouterr().out
    rate = found["vLLM"]["figures"]["output_tokens_per_s"]
    assert f"{rate:,.0f}" in table and f"{rate / 1000:.2f}" in table and "2.00" in table


def test_a_peer_that_is_missing_or_fails_is_named_and_does_not_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "vllm", "raise RuntimeError('no kernel\\nfor this GPU')")
    code, found = checked(tmp_path)
    assert code == 0
    assert {name: one["status"] for name, one in found.items()} == {
        "MiniSGL": "ok",
        "MiniSGL --gpu-new yes": "ok",
        "nano-vllm": "skipped",
        "vLLM": "failed",
        "SGLang": "skipped",
    }
    assert "RuntimeError: no kernel\nfor this GPU" in found["vLLM"]["reason"]
    said = capsys.readouterr().out
    assert "Nothing failed" in said and "SGLang, skipped: it is not installed" in said and "no kernel" in said


def test_a_peer_that_writes_too_few_tokens_has_no_rate(tmp_path: Path) -> None:
    install(tmp_path, "sglang", "Engine.generate = lambda *_, **__: []")
    _, found = checked(tmp_path)
    assert found["SGLang"]["figures"] == {} and "SGLang wrote 0 tokens, expected" in found["SGLang"]["reason"]


def test_an_engine_of_ours_that_fails_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "minisgl.py").write_text("raise SystemExit('no memory')")
    install(tmp_path, "nanovllm")
    code, found = checked(tmp_path)
    assert (code, found["MiniSGL"]["status"], found["nano-vllm"]["status"]) == (1, "failed", "ok")
    assert "2 failed" in capsys.readouterr().out


def test_without_time_nothing_is_written_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "write", lambda shape, folder: pytest.fail("it wrote weights"))
    install(tmp_path, "nanovllm")
    code, found = checked(tmp_path, "--budget", "1")
    assert (code, found["MiniSGL"]["status"], found["nano-vllm"]["status"]) == (0, "cut", "cut")


def test_peers_run_by_name_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        gpu, "tested", lambda name, ends_s, scratch: {"name": name, "status": "cut", "reason": "", "tests": []}
    )
    monkeypatch.setattr(
        gpu, "timed", lambda name, flags, ends_s, scratch: {"name": name, "status": "cut", "reason": "", "figures": {}}
    )
    monkeypatch.setattr(gpu, "table", lambda found: "")
    file = tmp_path / "out.json"
    assert gpu.main(["--json", str(file)], {}) == 0
    assert json.loads(file.read_text())["peers"] == []
