"""Which tests one process of a run gets: those that share a server, and what a dead process left."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.selection import group_of_file

END_TO_END = Path(__file__).with_name("end_to_end")


@pytest.mark.parametrize("server", ["llama3_server", "measured_server", "narrow_server", "plain_server"])
def test_files_that_share_a_server_are_of_one_group(server: str) -> None:
    users = [file for file in END_TO_END.glob("test_*.py") if re.search(rf"\b{server}: Server", file.read_text())]
    assert len(users) > 1
    assert {file.name: group_of_file(file) for file in users} == dict.fromkeys((file.name for file in users), server)


def test_a_file_of_no_group_has_none() -> None:
    assert group_of_file(END_TO_END / "test_wheel.py") == ""


class Worker:
    """A process of pytest-xdist, as its scheduler sees it."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.given: list[int] = []
        self.gateway = SimpleNamespace(id="gw0")

    def send_runtest_some(self, tests: list[int]) -> None:
        self.given += tests

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("num_left", [1, 2, 4])
def test_a_process_that_replaces_a_dead_one_gets_what_it_left_and_then_ends(
    pytestconfig: pytest.Config, tmp_path: Path, num_left: int
) -> None:
    """Each file has one test. The dead process was given files that were over, and the one in which it died."""
    tests = [f"{name}.py::test" for name in "abcd"]
    for name in "abcd":
        (tmp_path / f"{name}.py").touch()
    config = SimpleNamespace(
        rootpath=tmp_path, option=SimpleNamespace(loadscopereorder=False), getvalue=lambda _: ["popen"]
    )
    scheduler = pytestconfig.hook.pytest_xdist_make_scheduler(config=config, log=None)
    over, left = range(len(tests) - num_left), range(len(tests) - num_left, len(tests))

    dead = Worker()
    scheduler.add_node(dead)
    scheduler.add_node_collection(dead, tests)
    scheduler.schedule()
    for test in over:
        scheduler.mark_test_complete(dead, test)
    assert scheduler.remove_node(dead) == tests[left[0]]

    other = Worker()
    scheduler.add_node(other)
    scheduler.add_node_collection(other, tests)
    scheduler.schedule()
    for test in other.given:  # which grows
        scheduler.mark_test_complete(other, test)
    assert sorted(other.given) == [*left]
    assert other.shutting_down and scheduler.tests_finished
