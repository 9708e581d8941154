"""Runs in a copy of the project, as `python -m chaos.mutate REPORT`: patches it in turn and runs the tests.

A patch of a Lua text needs no module imported anew, so one session of pytest runs the tests of all of these. REPORT is
JSON: `Report`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypedDict

import pytest
from chaos.mutations import MACHINE, MUTATIONS, Mutation
from support.redis_servers import PLACES, find_servers

COPY: Final = Path.cwd()
OPTIONS: Final = "-q -p no:cacheprovider --hypothesis-profile=mutated --timeout=200"
SEED: Final = 1
"""Always the same random numbers: with these, random stories find all that they should."""

Round = tuple[Sequence[str], Callable[[], AbstractContextManager[None]]]
"""Some tests, and what is done around them."""


class Report(TypedDict):
    """What the tests said, by their name: empty where one passed."""

    unchanged: dict[str, str]
    """Without a patch."""
    mutated: dict[str, dict[str, str]]
    """By the name of the mutation."""
    elsewhere: list[str]
    """Modules that did not come from the copy."""


class Rounds:
    """Runs some tests of one session in each round, and collects what they say.

    Modules, collected tests and the Redis of the session are there once for all rounds.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._rounds = rounds
        self.messages: list[dict[str, str]] = []
        """Of each round: what its tests said, by their name."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # here, because pytest wants to be the first to import it

        # Stories that fail are not shortened.
        settings.register_profile("mutated", phases=[Phase.generate], database=None, report_multiple_bugs=False)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for tests, around in self._rounds:
            self.messages.append({})
            with around():
                for item in session.items:
                    if any(item.nodeid == test or item.nodeid.startswith(f"{test}[") for test in tests):
                        item.config.hook.pytest_runtest_protocol(item=item, nextitem=session)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (crash.message if crash else str(report.longrepr)) if report.failed else ""
        self.messages[-1][name] = self.messages[-1].get(name, "") + message


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
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # a patch may be of the same second
    for name, module in list(sys.modules.items()):
        if is_ours(getattr(module, "__file__", None)) and not name.startswith("chaos"):
            del sys.modules[name]


def is_ours(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(COPY)


def messages_of(rounds: Sequence[Round]) -> list[dict[str, str]]:
    """Run the tests of each round in one session of pytest, and return what they said in each."""
    plugin = Rounds(rounds)
    options = [*OPTIONS.split(), f"--hypothesis-seed={SEED}"]
    pytest.main([*options, *sorted({test for tests, _ in rounds for test in tests})], plugins=[plugin])
    return plugin.messages


def strangers() -> list[str]:
    """Return the modules of the project that this process has, but not from the copy."""
    return [
        f"{name} is {module.__file__}"
        for name, module in sys.modules.items()
        if name.split(".")[0] in ("pipeline", "stages") and not is_ours(module.__file__)
    ]


def main(path: str) -> None:
    place = next(place for place in PLACES if place in find_servers())
    tests = {mutation: [test.format(server=place) for test in mutation.caught_by] for mutation in MUTATIONS}
    # Stories pass or fail where they are; here they would pass slowly.
    without_stories = {test for some in tests.values() for test in some} - {MACHINE.format(server=place)}
    commits = [mutation for mutation in MUTATIONS if mutation.file.endswith(".lua")]
    unchanged, *of_commits = messages_of(
        [(sorted(without_stories), contextlib.nullcontext)]
        + [(tests[mutation], functools.partial(applied, mutation)) for mutation in commits],
    )
    mutated = {mutation.name: messages for mutation, messages in zip(commits, of_commits, strict=True)}
    elsewhere = strangers()
    for mutation in MUTATIONS:
        if mutation not in commits:
            with applied(mutation):
                [mutated[mutation.name]] = messages_of([(tests[mutation], contextlib.nullcontext)])
                elsewhere += strangers()
    Path(path).write_text(json.dumps(Report(unchanged=unchanged, mutated=mutated, elsewhere=elsewhere)))


if __name__ == "__main__":
    main(*sys.argv[1:])
