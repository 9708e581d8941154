"""Which tests one process of a run gets: those that share a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selection import group_of_file

END_TO_END = Path(__file__).with_name("end_to_end")


@pytest.mark.parametrize("server", ["llama3_server", "measured_server", "narrow_server", "plain_server"])
def test_files_that_share_a_server_are_of_one_group(server: str) -> None:
    users = [file for file in END_TO_END.glob("test_*.py") if re.search(rf"\b{server}: Server", file.read_text())]
    assert len(users) > 1
    assert {file.name: group_of_file(file) for file in users} == dict.fromkeys((file.name for file in users), server)


def test_a_file_of_no_group_has_none() -> None:
    assert group_of_file(END_TO_END / "test_wheel.py") == ""
