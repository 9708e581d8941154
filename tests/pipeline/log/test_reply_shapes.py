"""Replies of Redis have other shapes in RESP3, and other parsers read them where hiredis is missing: it is one log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.night]

HERE = Path(__file__).parent
CONTRACT = sorted(HERE.glob("test_redis_log*.py"))
WITHOUT_HIREDIS = "import sys; sys.modules['hiredis'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
WITH_HIREDIS = "import sys; import hiredis, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("program", "query"),
    [
        pytest.param(WITHOUT_HIREDIS, "?protocol=3", id="RESP3 without hiredis"),
        pytest.param(WITHOUT_HIREDIS, "?protocol=2", id="RESP2 without hiredis"),
        pytest.param(WITH_HIREDIS, "?protocol=3", id="RESP3"),
    ],
)
def test_the_log_is_the_same_in_every_shape_of_replies(program: str, query: str) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *map(str, CONTRACT)]
    environment = os.environ | {"MINISGL_TEST_REDIS_QUERY": query}
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
