"""A browser before a web process, behind which stand-in stages say what they are told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from support.browser import Browser, browsing
from support.stand_in_stages import Stages, StandIn
from support.web_process import Server, Starts, serving


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser of this test alone, whose console has to be clean at the end."""
    with browsing(tmp_path) as browser:
        yield browser


@pytest.fixture
def lasting(redis_url: str) -> Iterator[StandIn]:
    """Stand-in stages for longer than a minute."""
    with closing(StandIn(redis_url, Stages(redis_url), renews=True)) as lasting:
        yield lasting


@pytest.fixture
def server(redis_url: str, lasting: StandIn, browser: Browser) -> Iterator[Server]:
    """A web process before them. The browser leaves before it ends."""
    with serving(redis_url) as server:
        yield server
        browser.leave()


@pytest.fixture
def starts(request: pytest.FixtureRequest) -> Starts:
    """Starts the stand-in stages and the server, when the log is as a test wants it."""
    return lambda: cast("Server", request.getfixturevalue("server"))
