"""The workflows of a public forge: what .ci/run and .ci/night demand is in them, and what they call is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RUN, NIGHT = ((ROOT / ".ci" / name).read_text() for name in ("run", "night"))
ON_CHANGE, AT_NIGHT = (
    yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()) for name in ("ci", "night")
)
JOBS: dict[str, Any] = ON_CHANGE["jobs"]
SCHEDULE: dict[Any, Any] = AT_NIGHT[True]  # YAML's reading of `on`


def lines(workflow: dict[Any, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_fast_tests_run_with_each_python_and_each_redis() -> None:
    matrix = JOBS["tests"]["strategy"]["matrix"]
    assert matrix == {"python": ["3.11", "3.12", "3.13", "3.14"], "redis": ["6.2", "7", "8"]}
    assert JOBS["tests"]["services"]["redis"]["image"] == "redis:${{ matrix.redis }}"
    assert JOBS["tests"]["env"]["MINISGL_TEST_REDIS_URL"] == "redis://127.0.0.1:6379"


def test_every_test_of_a_change_is_in_some_job() -> None:
    assert [line for line in lines(ON_CHANGE) if "make test" in line] == [
        """make test ARGS="-m 'not slow'\"""",
        'make test ARGS="-m slow"',
    ]


def test_a_schedule_runs_what_the_night_runs() -> None:
    assert [entry["cron"] for entry in SCHEDULE["schedule"]]
    assert "make night" in lines(AT_NIGHT)
    assert 'MINISGL_NIGHT=1 exec "$(dirname "$0")/run"' in NIGHT


def test_a_change_must_pass_lint_types_and_make_test() -> None:
    assert re.findall(r"^(?:if ! )?(make [-A-Za-z_= ]+?)(?: [|>&#].*)?$", RUN, re.MULTILINE) == [
        "make venv PIP_FLAGS=--no-compile",
        "make lint types",
        "make test",
    ]


@pytest.mark.parametrize("line", [line for line in lines(ON_CHANGE) + lines(AT_NIGHT) if line.startswith("make ")])
def test_a_target_that_is_called_is_there(line: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = line.removeprefix("make ").partition(" ARGS=")[0].split()
    assert called and set(called) <= set(targets)


@pytest.mark.parametrize("workflow", [ON_CHANGE, AT_NIGHT], ids=["ci", "night"])
def test_it_can_write_nothing_and_every_job_ends(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 180 for job in workflow["jobs"].values())
