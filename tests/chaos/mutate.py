"""Runs in a copy of the project, as `python -m chaos.mutate REPORT first|all`: patches it in turn and runs the tests.

One process does it all, because a patch of a Lua text needs no module imported anew. REPORT is JSON: `Report`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypedDict

import pytest
from chaos.mutations import MACHINE, MUTATIONS, Mutation
from redis_servers import PLACES, find_servers

COPY: Final = Path.cwd()
OPTIONS: Final = "-q -p no:cacheprovider --hypothesis-profile=mutated --hypothesis-seed=1 --timeout=200"
"""Always the same random numbers."""


class Report(TypedDict):
    """What the tests said, by their name: empty where one passed."""

    unchanged: dict[str, str]
    """Without a patch."""
    mutated: dict[str, dict[str, str]]
    """By the name of the mutation."""
    elsewhere: list[str]
    """Modules that did not come from the copy."""


class Messages:
    """Collects what tests say."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # here, because pytest wants to be the first to import it

        # Stories that fail are not shortened.
        settings.register_profile("mutated", phases=[Phase.generate], database=None, report_multiple_bugs=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        crash = getattr(report.longrepr, "reprcrash", None)
        said = (crash.message if crash else str(report.longrepr)) if report.failed else ""
        self.by_test[name] = self.by_test.get(name, "") + said


def apply(mutation: Mutation, folder: Path) -> None:
    """Patch the copy in *folder*."""
    path = folder / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has not exactly once: {mutation.old}"
    path.write_text(text.replace(mutation.old, mutation.new))


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Patch this copy, and have what was read of it read again."""
    path = COPY / mutation.file
    before = path.read_text()
    apply(mutation, COPY)
    forget(path)
    try:
        yield
    finally:
        path.write_text(before)
        forget(path)


def forget(path: Path) -> None:
    """Drop what this process has of *path*: a commit's text, or all of our modules."""
    if path.suffix == ".lua":
        operation = importlib.import_module("pipeline.log.operation")
        operation.script_text.cache_clear()
        operation.script_sha.cache_clear()
        return
    for name, module in list(sys.modules.items()):
        if is_ours(getattr(module, "__file__", None)) and not name.startswith("chaos"):
            del sys.modules[name]


def is_ours(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(COPY)


def messages_of(tests: Sequence[str]) -> dict[str, str]:
    """Run *tests* on one server, and return what they said."""
    place = next(place for place in PLACES if place in find_servers())
    messages = Messages()
    pytest.main([*OPTIONS.split(), *(test.format(server=place) for test in tests)], plugins=[messages])
    return messages.by_test


def main(path: str, how_many: str) -> None:
    tests = {mutation: mutation.caught_by[: None if how_many == "all" else 1] for mutation in MUTATIONS}
    # Stories pass or fail where they are; here they would pass slowly.
    unchanged = messages_of(sorted({test for some in tests.values() for test in some} - {MACHINE}))
    report = Report(unchanged=unchanged, mutated={}, elsewhere=[])
    for mutation in MUTATIONS:
        with applied(mutation):
            report["mutated"][mutation.name] = messages_of(tests[mutation])
            report["elsewhere"] += [
                f"{mutation.name}: {name} is {module.__file__}"
                for name, module in sys.modules.items()
                if name.split(".")[0] in ("pipeline", "stages") and not is_ours(module.__file__)
            ]
    Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
