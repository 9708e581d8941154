"""/flush_cache, with engines that hear `control` from a real Redis and hold no pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.redis_servers import command
from support.web_site import Site, away, code_of, error_of

import web.routes.cache
from pipeline.log.redis import RedisLog
from pipeline.names import GENERATE, Names, slot_name
from pipeline.stage.slots import Phase, Status

LEASE_MS = 60_000
PAGES = 7
"""What a flush frees in each engine."""


class Engine:
    """A thread that speaks as an engine does and heeds what `control` says, but for the first *deaf_to* flushes."""

    def __init__(self, url: str, index: int, *, phase: Phase = "ready", deaf_to: int = 0) -> None:
        self._log = RedisLog(url, Names())
        owner = self._log.acquire(slot_name(GENERATE, index), "test", LEASE_MS)
        assert owner is not None
        self._owner = owner
        self._deaf_to = deaf_to
        self._status = Status(slot=owner.slot, owner=str(owner), pid=1, host="here", phase=phase, flushed_pages=100)
        self._stopped = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._log.close()

    def _publish(self) -> None:
        assert self._log.renew(self._owner, LEASE_MS, self._status.model_dump_json())

    def _run(self) -> None:
        cursor = "0-0"
        while not self._stopped.wait(0.002):
            taken = self._log.take(self._owner, 0, control_cursor=cursor)
            cursor = taken.control_cursor
            if taken.flush and self._deaf_to:
                self._deaf_to -= 1
            elif taken.flush:
                pages = self._status.flushed_pages + PAGES
                self._status = self._status.model_copy(update={"flushed": taken.flush, "flushed_pages": pages})
                self._publish()


@pytest.fixture
def engine(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Start an engine; the log knows the group that engines take from."""
    monkeypatch.setattr(web.routes.cache, "PATIENCE_S", 5.0)
    command(redis_url, "XGROUP", "CREATE", Names().tokenized, GENERATE, "0", "MKSTREAM")
    with ExitStack() as stack:

        def started(index: int, **options: Any) -> Engine:
            engine = Engine(redis_url, index, **options)
            stack.callback(engine.close)
            return engine

        yield started


async def test_it_answers_when_every_engine_has_done_it_and_says_what_that_freed(
    bare: Site, engine: Callable[..., Engine]
) -> None:
    engine(0)
    engine(1)
    response = await bare.client.post("/flush_cache")
    assert response.status_code == 200
    assert await response.get_json() == {"flushed_pages": 2 * PAGES, "engines": ["generate-0", "generate-1"]}


async def test_a_link_flushes_nothing(bare: Site) -> None:
    response = await bare.client.get("/flush_cache")
    assert (response.status_code, response.headers["Allow"]) == (405, "OPTIONS, POST")


async def test_an_engine_that_has_not_done_it_in_time_is_named(
    bare: Site, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.routes.cache, "PATIENCE_S", 0.5)
    engine(0)
    engine(1, deaf_to=1000)
    response = await bare.client.post("/flush_cache")
    status, error = await error_of(response)
    assert (status, error["code"], response.headers["Retry-After"]) == (503, "flush_incomplete", "1")
    assert "generate-1" in error["message"] and "generate-0" not in error["message"]


async def test_what_control_lost_is_asked_again_and_an_engine_that_loads_is_not_waited_for(
    bare: Site, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.routes.cache, "ASK_AGAIN_S", 0.05)
    engine(0, deaf_to=2)
    engine(1, phase="loading", deaf_to=1000)
    response = await bare.client.post("/flush_cache")
    assert (response.status_code, (await response.get_json())["engines"]) == (200, ["generate-0"])


async def test_without_a_ready_engine_it_is_refused_at_once(
    bare: Site, redis_url: str, engine: Callable[..., Engine]
) -> None:
    engine(0, phase="loading")
    assert await code_of(bare.client.post("/flush_cache")) == (503, "loading")
    assert command(redis_url, "EXISTS", Names().control) == 0


async def test_without_a_log_it_is_refused(tmp_path: Path) -> None:
    async with away(tmp_path) as without:
        assert await code_of(without.client.post("/flush_cache")) == (503, "overloaded")
