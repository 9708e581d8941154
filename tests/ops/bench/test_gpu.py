"""`minisgl bench gpu`: what it needs, and what becomes of tests that pass, fail, hang and die, on stubs of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.servers import ROOT

from ops.bench import gpu
from pipeline.errors import ConfigError

HEAD = "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
STUBS: Mapping[str, str] = {
    "fine": "def test_a(): pass\ndef test_b(): pytest.skip('no nvcc')",
    "wrong": "def test_a(): assert 1 == 2\ndef test_b(): pass",
    "broken": "import no_such_module",
    "dies": "def test_a(): os.kill(os.getpid(), 9)",
    "slow": "def test_a(): time.sleep(3)\ndef test_b(): pass",
    "hangs": "def test_a(): pass\ndef test_b(): time.sleep(600)",
}
PHASES = {"decode": {"steps": 4, "seconds": 0.012, "launch_s": 0.002}, "prefill": {"steps": 0}}
RATES = {
    "output_tokens_per_s": 12_521.0,
    "decode_share": 0.5,
    "prefill_share": None,
    "drawing_s": 0.0003,
    "runs": [{"phases": PHASES}],
}
TIMING = f"import json, sys; open(sys.argv[sys.argv.index('--output') + 1], 'w').write(json.dumps({RATES}))"


@pytest.fixture(autouse=True)
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a GPU, and groups of one file each."""
    for name, body in STUBS.items():
        (tmp_path / f"test_{name}.py").write_text(HEAD + body)
    monkeypatch.setattr(gpu, "GROUPS", {name: (str(tmp_path / f"test_{name}.py"),) for name in STUBS})
    monkeypatch.setattr(gpu, "NAMES", (*STUBS, gpu.TIMINGS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p pytest_timeout")
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda: {"GPU": "H100"})


def checked(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON."""
    file = tmp_path / "out.json"
    code = gpu.main(["--json", str(file), *flags], {})
    found: dict[str, Any] = json.loads(file.read_text())
    return code, found


def test_what_passes_and_what_is_skipped_is_no_failure(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "--only", "fine")
    (group,) = found["groups"]
    assert (code, found["finished"], found["machine"]) == (0, True, {"GPU": "H100"})
    assert [group[key] for key in ("status", "passed", "failed", "skipped")] == ["ok", 1, 0, 1]
    assert [(test["outcome"], test["why"]) for test in group["tests"]] == [("passed", ""), ("skipped", "no nvcc")]


def test_tests_that_fail_or_die_and_files_that_cannot_be_imported_are_failures_and_the_next_group_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checked(tmp_path, "--only", "wrong,broken,dies,fine")
    groups = {group["name"]: group for group in found["groups"]}
    assert (code, list(groups)) == (1, ["fine", "wrong", "broken", "dies"])
    assert {name: group["status"] for name, group in groups.items()} == {"fine": "ok"} | dict.fromkeys(
        ("wrong", "broken", "dies"), "failed"
    )
    assert (groups["wrong"]["failed"], groups["wrong"]["passed"], groups["broken"]["failed"]) == (1, 1, 1)
    assert "1 == 2" in groups["wrong"]["tests"][0]["why"]
    assert "-9" in groups["dies"]["reason"] and "test_a" in groups["dies"]["reason"]
    assert "3 failed" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "passed"), [("slow", 1), pytest.param("hangs", 0, marks=pytest.mark.night)])
def test_the_budget_ends_a_group_between_its_tests_or_in_one_that_hangs_and_what_comes_after_it(
    name: str, passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 1.0)
    monkeypatch.setattr(gpu, "GRACE_S", 1.0 if name == "hangs" else 60.0)
    code, found = checked(tmp_path, "--only", f"{name},timings", "--budget", "3")
    assert (code, [(group["status"], group["passed"]) for group in found["groups"]]) == (0, [("cut", passed)])
    assert [timing["status"] for timing in found["timings"]] == ["cut"] * len(gpu.TIMED[gpu.TIMINGS])


def test_the_engine_is_timed_with_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "minisgl.py").write_text(TIMING)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").touch()
    (tmp_path / "pyproject.toml").write_text("project.dependencies = []")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr("ops.bench.models.write_all_but_weights", lambda shape, folder: {})
    code, found = checked(tmp_path, "--only", "timings")
    assert (code, [timing["name"] for timing in found["timings"]]) == (0, list(gpu.TIMED[gpu.TIMINGS]))
    assert all(timing["figures"] == RATES for timing in found["timings"])
    table = capsys.readouterr().out
    assert "12,521" in table and re.search(r"50% +- +0\.30 +3\.00 +0\.50 +- +-", table)


@pytest.mark.parametrize("lacks", ["GPU", "checkout", "package"])
def test_what_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "GPU":
        monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    elif lacks == "checkout":
        monkeypatch.setattr(gpu, "ROOT", tmp_path)
    else:
        monkeypatch.setattr(gpu, "TESTS_NEED", ("no-such-package",))
    with pytest.raises(ConfigError, match=r"no-such-package|checkout|GPU"):
        gpu.main([], {})


@pytest.mark.parametrize("flags", [("--only", "fine,absent"), ("--json", "/nowhere/a.json"), ("--wheels", "/nowhere")])
def test_flags_that_cannot_work_are_refused_by_name(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        gpu.main(flags, {})


def test_every_file_with_tests_for_a_gpu_is_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    marked = re.compile(r"pytest\.mark\.gpu\b|\bDEVICES\)|usefixtures\(\"kernels\"\)")
    files = {file for file in (ROOT / "tests").rglob("test_*.py") if marked.search(file.read_text())}
    given = [part for parts in gpu.GROUPS.values() for part in parts]
    paths = [ROOT / part for part in given if part.startswith("tests/")]
    grouped = {file for path in paths for file in ([path] if path.is_file() else path.glob("test_*.py"))}
    assert files - grouped == {Path(__file__)}
    assert all(path.exists() for path in paths)
