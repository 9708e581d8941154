"""The file of limits is read again while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.stand_in_stages import StandIn
from support.web_site import ADMIN, ANN, BOB, Site, bearer, chat, one_request, received, seal_of, site, until

from pipeline.errors import LogUnavailable
from web.http import key_watch
from web.http.key_watch import KeyWatch, OnRevoked
from web.http.key_watch import _mark as mark
from web.http.keys import hash_of, read_keys
from web.live.revoked import end_revoked


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.http.key_watch.LOOK_EVERY_S", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "limits.toml").write_text(text_of(ANN, BOB))
    return tmp_path / "limits.toml"


@pytest.fixture
def lines() -> Iterator[list[MutableMapping[str, Any]]]:
    with capture_logs() as found:
        yield found


def text_of(*keys: str) -> str:
    return "".join(f'[[key]]\nhash = "{hash_of(key)}"\n' for key in keys)


def watch_of(file: Path) -> KeyWatch:
    return KeyWatch(str(file), partial(read_keys, (), str(file), ADMIN, may_lack_keys=True))


@asynccontextmanager
async def watching(watch: KeyWatch, on_revoked: OnRevoked) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run(on_revoked))
    try:
        async with asyncio.timeout(20):
            yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def ignore(_: frozenset[str]) -> None: ...


def num(lines: list[MutableMapping[str, Any]], event: str) -> int:
    return sum(line["event"] == event for line in lines)


def has(lines: list[MutableMapping[str, Any]], event: str, times: int) -> bool:
    return num(lines, event) == times


async def statuses(here: Site) -> list[int]:
    """Return what those with Ann's key, Bob's, the admin key, none and a wrong one get."""
    keys = (ANN, BOB, ADMIN, "", "sk-wrong")
    return [(await here.client.get("/v1/models", headers=bearer(key))).status_code for key in keys]


async def test_a_changed_file_counts_without_a_restart(
    redis_url: str, file: Path, lines: list[MutableMapping[str, Any]]
) -> None:
    watch = watch_of(file)
    async with site(redis_url, ready=False, keys=watch.keys) as here, watching(watch, ignore):
        assert await statuses(here) == [200, 200, 200, 401, 401]
        for keys, expected in (((BOB,), [401, 200]), ((BOB, ANN), [200, 200]), ((), [401, 401])):
            before = num(lines, "limits_read")
            (file.parent / "new").write_text(text_of(*keys))
            (file.parent / "new").replace(file)
            await until(partial(has, lines, "limits_read", before + 1))
            assert await statuses(here) == [*expected, 200, 401, 401]
    assert [line["keys"] for line in lines if line["event"] == "limits_read"] == [1, 2, 0]
    assert all(key not in str(lines) for key in (ANN, BOB, ADMIN))


async def test_a_file_with_an_error_changes_nothing_and_is_told_once(
    file: Path, lines: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, looks = watch_of(file), list[Path]()

    def look(path: Path) -> object:
        looks.append(path)
        return mark(path)

    spoils: tuple[Callable[[], object], ...] = (partial(file.write_text, "[[key]]\nkey = 5\n"), file.unlink)
    monkeypatch.setattr("web.http.key_watch._mark", look)
    async with watching(watch, ignore):
        for number, spoil in enumerate(spoils, 1):
            spoil()
            await until(partial(has, lines, "limits_not_read", number))
            looks.clear()
            await until(lambda: len(looks) > 3)
            assert num(lines, "limits_not_read") == number
            assert watch.keys.find([ANN]) is not None
        file.write_text(text_of(BOB))
        await until(lambda: num(lines, "limits_read") == 1)
    told = [line["reason"] for line in lines if line["event"] == "limits_not_read"]
    assert told[0].startswith(f"--limits {file}: [[key]] 1: has a bad key") and "No such file" in told[1]
    assert watch.keys.find([ANN]) is None and watch.keys.find([BOB]) is not None


async def test_a_file_that_is_being_written_is_not_read(
    file: Path, lines: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, looks = watch_of(file), iter([(1, 1, 1), (2, 1, 2), (3, 1, 3)])
    last = (4, 1, 4)
    monkeypatch.setattr("web.http.key_watch._mark", lambda path: next(looks, last))
    async with watching(watch, ignore):
        await until(lambda: num(lines, "limits_read"))
    assert next(looks, None) is None and num(lines, "limits_read") == 1


async def test_owners_without_a_key_are_told_for_a_while_because_a_request_may_be_on_its_way(file: Path) -> None:
    told: list[frozenset[str]] = []

    async def on_revoked(owners: frozenset[str]) -> None:
        told.append(owners)

    watch = watch_of(file)
    async with watching(watch, on_revoked):
        file.write_text(text_of(BOB))
        await until(lambda: len(told) == 2)
        file.write_text(text_of(ANN, BOB))
        await until(lambda: not watch._revoked)
    assert set(told) == {frozenset({hash_of(ANN)})}, "until they have a key again"


async def test_owners_without_a_key_are_told_again_while_the_log_is_away(
    file: Path, lines: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_watch, "REVOKED_S", 0.0)
    told: list[frozenset[str]] = []

    async def on_revoked(owners: frozenset[str]) -> None:
        told.append(owners)
        if len(told) < 3:
            raise LogUnavailable("away")

    watch = watch_of(file)
    async with watching(watch, on_revoked):
        file.write_text(text_of(BOB))
        await until(lambda: len(told) == 3)
        file.write_text(text_of(BOB, "sk-third"))
        await until(lambda: num(lines, "limits_read") == 2)
    assert told == 3 * [frozenset({hash_of(ANN)})] and num(lines, "requests_not_revoked") == 2


async def test_running_requests_of_a_revoked_key_end_and_those_of_others_go_on(
    redis_url: str, stand_in: StandIn, file: Path, lines: list[MutableMapping[str, Any]]
) -> None:
    watch = watch_of(file)
    async with (
        site(redis_url, keys=watch.keys) as here,
        watching(watch, partial(end_revoked, here.frontend)),
        here.connection(chat("endless", stream=True), bearer(ANN)) as ann,
    ):
        uid = await one_request(stand_in)
        async with here.connection(chat("silent", stream=True), bearer(BOB)):
            await until(lambda: len(stand_in.requests()) == 2)
            (bobs,) = {each for each, _ in stand_in.requests()} - {uid}
            file.write_text(text_of(BOB))
            await received(ann, b"The API key of this request was revoked.")
            assert seal_of(stand_in.stages.log, uid)["by"] == "revoked" and not seal_of(stand_in.stages.log, bobs)
        await until(lambda: any(line["event"] == "owners_revoked" for line in lines))
    (line,) = [line for line in lines if line["event"] == "owners_revoked"]
    assert (line["owners"], line["requests"]) == ([hash_of(ANN)[:8]], 1)
