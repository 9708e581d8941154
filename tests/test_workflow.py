"""The workflow of a public forge: what .ci/run demands is in it, and what it calls is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
LINES = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def test_the_fast_tests_run_with_each_python_and_each_redis() -> None:
    matrix = JOBS["tests"]["strategy"]["matrix"]
    assert matrix == {"python": ["3.11", "3.12", "3.13", "3.14"], "redis": ["6.2", "7", "8"]}
    assert JOBS["tests"]["services"]["redis"]["image"] == "redis:${{ matrix.redis }}"
    assert JOBS["tests"]["env"]["MINISGL_TEST_REDIS_URL"] == "redis://127.0.0.1:6379"


def test_every_test_is_in_some_job() -> None:
    selections = [line for line in LINES if "make test" in line]
    parts = JOBS["servers"]["strategy"]["matrix"]["part"]
    assert any("-m 'not slow'" in line for line in selections)
    left_out = {part for line in selections for part in re.findall(r"--ignore=(\S+?)\"?(?:\s|$)", line)}
    assert left_out == {part for part in parts if part != "rest"}
    assert all((ROOT / part).exists() for part in left_out)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_a_target_that_is_called_is_there(line: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = line.removeprefix("make ").partition(" ARGS=")[0].split()
    assert called and set(called) <= set(targets)


def test_it_can_write_nothing_and_every_job_ends() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in JOBS.values())
