"""GET /v1/requests: whose requests are listed, in which order, in pages, and which are found."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.lived_requests import LivedRequests
from support.log_contract import CANCELLED, put
from support.redis_servers import command
from support.web_site import ADMIN, ANN, BOB, KEYS, Site, away, bearer, code_of, site

import pipeline.archive.reader
import web.live.catalogue
from pipeline.archive.writer import Writer
from pipeline.errors import LogUnavailable
from pipeline.events import Failed, Replay, SamplingParams, Submitted, new_uid
from pipeline.log.redis import RedisLog
from pipeline.names import PROBE, Names, sibling_uids
from pipeline.recording import Recording
from web.http.keys import hash_of
from web.live.catalogue import HIDDEN_DIGITS

FAILED = Failed(status=400, code="context_length_exceeded", message="Too long.")


def uid_at(ms: int) -> str:
    """Return a uid that was made so many milliseconds after a moment."""
    return f"{1_700_000_000_000 + ms:012x}" + new_uid()[12:]


async def listed(here: Site, query: str = "", key: str = "") -> dict[str, Any]:
    response = await here.get(f"/v1/requests?{query}", **bearer(key))
    told: dict[str, Any] = await response.get_json()
    assert response.status_code == 200, told
    return told


async def uids(here: Site, query: str = "", key: str = "") -> list[str]:
    return [request["uid"] for request in (await listed(here, query, key))["requests"]]


async def all_pages(here: Site, query: str, key: str = "") -> list[str]:
    found, place = list[str](), ""
    while True:
        page = await listed(here, f"{query}&before={place}", key)
        found += [request["uid"] for request in page["requests"]]
        if page["next"] is None:
            return found
        assert not place or page["next"] < place, "it goes on"
        place = page["next"]


async def test_running_and_ended_requests_are_listed_with_their_figures(bare: Site, lived: LivedRequests) -> None:
    running = lived.running(uid_at(0))
    lived.tokens(running, "He")
    finished = lived.running(uid_at(1), labels={"user": "ann"})
    lived.tokens(finished, "Hel", "lo")
    lived.finished(finished, 2)
    failed = lived.submitted(uid_at(2))
    lived.ended(failed, FAILED)
    waiting = lived.submitted(uid_at(3))
    told = await listed(bare)
    assert [request["uid"] for request in told["requests"]] == [waiting, failed, finished, running]
    assert (told["next"], told["complete"]) == (None, True)
    by_uid = {request["uid"]: request for request in told["requests"]}
    assert {uid: (one["state"], one["reason"]) for uid, one in by_uid.items()} == {
        waiting: ("queued", ""),
        running: ("running", ""),
        finished: ("finished", "stop"),
        failed: ("failed", "context_length_exceeded"),
    }
    shown = by_uid[finished]
    assert shown.pop("submitted_ms") > 0 and shown.pop("took_ms") >= 0 and shown.pop("tokens_per_s") is not None
    assert shown == {
        "uid": finished, "state": "finished", "reason": "stop", "endpoint": "/v1/completions",
        "model": "nonsense", "prompt_tokens": 3, "cached_tokens": 2, "output_tokens": 2, "engine": "generate-0",
        "owner": "", "labels": {"user": "ann"}, "replay_of": "", "archived": False,
    }  # fmt: skip
    lived.tokens(running, "l", after=1)
    lived.finished(running, 2)
    (again,) = [one for one in (await listed(bare))["requests"] if one["uid"] == running]
    assert (again["state"], again["output_tokens"]) == ("finished", 2), "what changes is looked at again"


async def test_each_key_sees_its_own_requests_and_the_admin_all(keyed: Site, lived: LivedRequests) -> None:
    mine: dict[str, list[str]] = {ANN: [], BOB: [], "": []}
    for number, key in enumerate((ANN, BOB, "", ANN)):
        lived.owner = hash_of(key) if key else ""
        mine[key].insert(0, lived.submitted(uid_at(number)))
    for key in (ANN, BOB):
        assert await uids(keyed, key=key) == mine[key]
    assert await uids(keyed, key=ADMIN) == sorted(mine[ANN] + mine[BOB] + mine[""], reverse=True)
    (first, _) = (await listed(keyed, key=ADMIN))["requests"][:2]
    assert first["owner"] == hash_of(ANN)


async def test_pages_have_each_request_once_whatever_is_left_out(keyed: Site, lived: LivedRequests) -> None:
    mine = []
    for number in range(30):
        lived.owner = hash_of((ANN, BOB)[number % 3 == 0])
        uid = lived.submitted(uid_at(number // 2))
        if number % 4 == 0:
            lived.ended(uid, CANCELLED)
        mine += [uid] if number % 3 else []
    for limit in (1, 3, 20, 200):
        assert await all_pages(keyed, f"limit={limit}", ANN) == sorted(mine, reverse=True)
    running = await all_pages(keyed, "limit=4&state=open", ANN)
    ended = await all_pages(keyed, "limit=4&state=ended", ANN)
    assert sorted(running + ended) == sorted(mine) and running and ended
    assert await uids(keyed, f"before={mine[5]}", ANN) == sorted(mine, reverse=True)[-5:]


async def test_one_call_does_bounded_work_and_the_next_goes_on(
    keyed: Site, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("MOST_PEEKED", 4), ("TRIED_AT_ONCE", 4), ("MOST_TRIED", 8)):
        monkeypatch.setattr(web.live.catalogue, name, most)
    lived.owner = hash_of(BOB)
    others = [lived.submitted(uid_at(number)) for number in range(20)]
    lived.owner = hash_of(ANN)
    mine = lived.submitted(uid_at(0))
    page = await listed(keyed, key=ANN)
    assert page["requests"] == [] and page["next"] is not None
    assert len(page["next"]) == HIDDEN_DIGITS and others[-4].startswith(page["next"]), "it names no other request"
    assert await all_pages(keyed, "limit=5", ANN) == [mine]
    assert await all_pages(keyed, "limit=5", ADMIN) == sorted([*others, mine], reverse=True)


async def test_a_page_that_ends_among_siblings_leaves_none_of_them_out(
    bare: Site, log: RedisLog, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_PEEKED", "TRIED_AT_ONCE", "MOST_TRIED"):
        monkeypatch.setattr(web.live.catalogue, name, 4)
    older, base = lived.submitted(uid_at(0)), uid_at(1)
    event = Submitted(endpoint="/v1/completions", frontend="", prompt="Hi", sampling=SamplingParams())
    log.submit(base, [event] * 6)
    for uid in (older, f"{base}.0"):
        log.end(uid, FAILED, frontend="")
    assert await all_pages(bare, "state=failed") == [f"{base}.0", older]


async def test_a_large_log_is_searched_over_several_calls(
    bare: Site, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.catalogue, "MOST_SCANNED", 10)
    monkeypatch.setattr(web.live.catalogue, "SCANNED_AT_ONCE", 10)
    ended = [lived.submitted(uid_at(number)) for number in range(300)]
    for uid in ended:
        lived.ended(uid, CANCELLED)
    running = lived.submitted()
    page = await listed(bare, "limit=200")
    assert page["complete"] is False and page["requests"][0]["uid"] == running, "what runs is always there"
    async with asyncio.timeout(30):
        while not (page := await listed(bare, "limit=200"))["complete"]:
            assert page["requests"][0]["uid"] == running
    assert await all_pages(bare, "limit=200") == sorted([*ended, running], reverse=True)


async def test_soon_after_a_long_scan_what_runs_is_listed_without_another(
    bare: Site, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.catalogue, "MANY", 0)
    monkeypatch.setattr(web.live.catalogue, "SHARE", 1e-9)
    ended = lived.submitted(uid_at(0))
    lived.ended(ended, FAILED)
    assert await uids(bare) == [ended]
    scans, requests = [], bare.log.requests

    async def counted(*given: Any) -> Any:
        scans.append(given)
        return await requests(*given)

    monkeypatch.setattr(bare.log, "requests", counted)
    running = lived.submitted(uid_at(1))
    assert await uids(bare) == [running, ended] and not scans
    bare.frontend.catalogue._rested_s = 0
    assert await uids(bare) == [running, ended] and scans


async def test_what_is_searched_is_found_in_upper_and_lower_case(bare: Site, lived: LivedRequests) -> None:
    other = lived.running(uid_at(0), labels={"user": "bob"})
    one = lived.submitted(uid_at(1), labels={"user": "Ann", "metadata": {"batch": "x-7"}})
    lived.ended(lived.submitted(labels={"long": "n" * 3000}), FAILED)
    for text, expected in (
        ("ann", [one]),
        ("X-7", [one]),
        ("BOB", [other]),
        (other[:-4], [other]),
        ("GENERATE-0", [other]),
        ("nonsense", 3),
        ("completions", 3),
        ("exceeded", 1),
        ("nnnnnnnn", []),
        ("nothing at all", []),
        ("", 3),
    ):
        found = await uids(bare, f"search={quote(text)}")
        assert (len(found) if isinstance(expected, int) else found) == expected, text
    assert await uids(bare, "state=queued,running&search=o") == [one, other]


async def test_siblings_replays_and_what_cannot_be_read_are_listed_and_probes_are_not(
    keyed: Site, log: RedisLog
) -> None:
    numbers = itertools.count()

    def submit(count: int = 1, endpoint: str = "/v1/completions", **fields: Any) -> str:
        uid = uid_at(next(numbers))
        event = Submitted(endpoint=endpoint, frontend="", prompt="p" * 100, sampling=SamplingParams(), **fields)
        log.submit(uid, count * [event])
        return uid

    siblings, _ = submit(2), submit(endpoint=PROBE)
    replay = submit(replay=Replay(of="abc"))
    broken = uid_at(next(numbers))
    put(log, Names().request(broken), {"kind": "nonsense"}, "0-1")
    told = (await listed(keyed, key=ADMIN))["requests"]
    assert [one["uid"] for one in told] == [broken, replay, *reversed(sibling_uids(siblings, 2))]
    assert (told[0]["state"], told[1]["replay_of"]) == ("unreadable", "abc")
    assert await uids(keyed, key=ANN) == [], "nobody knows whose it is"


async def test_an_erased_or_expired_request_is_gone_at_once(
    bare: Site, redis_url: str, log: RedisLog, lived: LivedRequests
) -> None:
    uid, expired = lived.submitted(uid_at(0), labels={"user": "ann"}), lived.submitted(uid_at(1))
    for each in (uid, expired):
        lived.ended(each, CANCELLED)
    assert await uids(bare) == [expired, uid]
    assert log.erase(uid)
    command(redis_url, "DEL", Names().request(expired))
    assert await uids(bare) == []
    assert not bare.frontend.catalogue._facts.get(uid), "nothing of it is kept"


async def test_archived_requests_are_listed_with_those_of_the_log(
    redis_url: str, lived: LivedRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for number in range(12):
        lived.owner = hash_of((ANN, BOB)[number % 2])
        uid = lived.running(uid_at(number))
        lived.tokens(uid, "He")
        lived.finished(uid, 1)
        made.append(uid)
    old = made[:8]
    histories = lived.log.histories(made)
    recordings = [Recording(uid, tuple(history)) for uid, history in zip(made, histories, strict=True)]
    for hour, some in enumerate((recordings[:5], recordings[5:])):
        now_s = 1_700_000_010 + 3600 * hour
        Writer(tmp_path, "archive-0", 1, clock_s=lambda now_s=now_s: now_s).write(some)  # type: ignore[misc]
    command(redis_url, "DEL", *map(Names().request, old))
    async with site(redis_url, ready=False, keys=KEYS, archive=str(tmp_path)) as here:
        told = (await listed(here, key=ADMIN))["requests"]
        assert [one["uid"] for one in told] == [*reversed(made)]
        assert {one["uid"] for one in told if one["archived"]} == {*old}
        assert {one["state"] for one in told} == {"finished"} and {one["output_tokens"] for one in told} == {1}
        for limit in (1, 5, 50):
            assert await all_pages(here, f"limit={limit}", BOB) == [*reversed(made[1::2])]
        assert await uids(here, f"before={made[3]}", ADMIN) == [*reversed(made[:3])]
        monkeypatch.setattr(pipeline.archive.reader, "MOST_LINES", 2)
        page = await listed(here, "limit=1&state=failed", BOB)
        assert len(page["next"]) <= HIDDEN_DIGITS, "it names no other request"
        assert await all_pages(here, "limit=5", BOB) == [*reversed(made[1::2])]
    async with site(redis_url, ready=False) as without:
        assert await uids(without) == [*reversed(made[8:])]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=ten", "limit"),
        ("limit=-1", "limit"),
        ("before=x", "before"),
        ("before=019a%00", "before"),
        ("before=" + "a" * 33, "before"),
        ("state=dead", "state"),
        ("state=running,x", "state"),
    ],
)
async def test_a_query_that_is_none_is_refused_by_its_name(bare: Site, query: str, param: str) -> None:
    response = await bare.get(f"/v1/requests?{query}")
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert error["message"].startswith(f"{param}: should be ")


async def test_a_scan_that_fails_is_one_for_nobody(bare: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    living = bare.log.living

    async def slowly() -> list[str]:
        await asyncio.sleep(0.05)  # the other one comes meanwhile
        return await living()

    async def fail(*_: Any) -> Any:
        raise LogUnavailable("away")

    monkeypatch.setattr(bare.log, "living", slowly)
    monkeypatch.setattr(bare.log, "requests", fail)
    answers = await asyncio.gather(bare.get("/v1/requests"), bare.get("/v1/requests"))
    assert [answer.status_code for answer in answers] == [503, 503]


async def test_without_redis_the_list_is_an_error_that_says_so(tmp_path: Path) -> None:
    async with away(tmp_path) as without:
        assert await code_of(without.get("/v1/requests")) == (503, "overloaded")
