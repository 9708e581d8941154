"""GET /v1/usage: what owners have used, by day and model, and who sees whose."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.lived_requests import LivedRequests
from support.log_contract import CANCELLED
from support.web_site import ADMIN, ANN, BOB, Site, bearer, code_of, site

import web.routes.usage
from pipeline.events import Failed
from pipeline.log.operations.usage import DAY_MS, KEPT_DAYS
from pipeline.log.protocol import Used
from pipeline.log.redis import RedisLog
from web.http.keys import Caller, Keys, hash_of, read_keys

ONE = Used(requests=3, failed=1, prompt_tokens=50, cached_tokens=20, output_tokens=70)


def today() -> int:
    return int(time.time() * 1000) // DAY_MS


async def told(here: Site, query: str = "", key: str = "") -> dict[str, Any]:
    response = await here.get(f"/v1/usage?{query}", **bearer(key))
    body: dict[str, Any] = await response.get_json()
    assert response.status_code == 200, body
    return body


async def owners(here: Site, query: str = "", key: str = "") -> list[str]:
    return [each["owner"] for each in (await told(here, query, key))["data"]]


async def test_what_requests_used_is_shown_with_their_day_and_model(bare: Site, lived: LivedRequests) -> None:
    lived.answered("Hel", "lo")
    failed, cancelled = lived.submitted(), lived.submitted()
    lived.ended(failed, Failed(status=400, code="context_length_exceeded", message="Too long."))
    lived.ended(cancelled, CANCELLED)
    body = await told(bare)
    (one,) = body["data"]
    date = datetime.now(UTC).date().isoformat()
    assert [one.pop(name) for name in Used._fields] == [3, 1, 3, 2, 2]
    assert one == {"object": "usage", "date": date, "owner": "", "model": "nonsense"}
    assert (body["object"], body["has_more"]) == ("list", False)


async def test_a_key_sees_what_its_owner_used_and_the_admin_key_what_all_did(redis_url: str, log: RedisLog) -> None:
    ann = hash_of(ANN)
    for owner in ("team-a", "team-b", ann, ""):
        log.recount(owner, today(), {"m": ONE})
    keys = Keys([Caller.of(ann, "team-a"), Caller.of(hash_of(BOB), "team-b"), Caller(hash_of(ADMIN), is_admin=True)])
    async with site(redis_url, ready=False, keys=keys) as here:
        assert await owners(here, key=ANN) == sorted([ann, "team-a"]), "also from before it had a name"
        assert await owners(here, key=BOB) == ["team-b"]
        assert await owners(here, key=ADMIN) == sorted(["", ann, "team-a", "team-b"])
        assert await owners(here, "owner=team-b", ADMIN) == ["team-b"] == await owners(here, "owner=team-b", BOB)
        assert await owners(here, "owner=", ADMIN) == [""]
        for key, other in ((ANN, "team-b"), (ANN, ""), (BOB, "team-a"), (ADMIN, "nobody")):
            assert await owners(here, f"owner={other}", key) == []
        assert await code_of(here.get("/v1/usage")) == (401, "invalid_api_key")


async def test_without_a_key_all_is_seen_if_there_are_no_keys_and_nothing_beside_the_admin_key(
    redis_url: str, log: RedisLog
) -> None:
    log.recount("team-a", today(), {"m": ONE})
    async with site(redis_url, ready=False) as here:
        assert await owners(here) == ["team-a"]
    async with site(redis_url, ready=False, keys=read_keys((), "", ADMIN)) as here:
        assert await code_of(here.get("/v1/usage")) == (401, "invalid_api_key")
        assert await owners(here, key=ADMIN) == ["team-a"]


async def test_days_are_shown_the_newest_first_and_then_owners_and_models(bare: Site, log: RedisLog) -> None:
    now = today()
    for owner, day, model in (
        ("b", 0, "m"),
        ("a", 0, "n"),
        ("a", 0, "m"),
        ("b", 6, "m"),
        ("a", 7, "m"),
        ("a", 39, "m"),
    ):
        log.recount(owner, now - day, {model: ONE})
    expected = [(0, "a", "m"), (0, "a", "n"), (0, "b", "m"), (6, "b", "m"), (7, "a", "m"), (39, "a", "m")]
    for query, most in (("days=1", 1), ("", 7), ("days=8", 8), (f"days={KEPT_DAYS}", KEPT_DAYS)):
        found = [(each["date"], each["owner"], each["model"]) for each in (await told(bare, query))["data"]]
        dates = [(datetime.fromtimestamp(0, UTC).date() + timedelta(now - ago)).isoformat() for ago, _, _ in expected]
        assert found == [(date, *of[1:]) for date, of in zip(dates, expected, strict=True) if of[0] < most], query


async def test_an_answer_has_a_bounded_number_of_owners_and_reads_them_in_parts(
    keyed: Site, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.routes.usage, "MOST_OWNERS", 4)
    now, reads, usage = today(), list[int](), keyed.log.usage
    for number in range(3):
        for day in (now - 2, now):
            log.recount(f"team-{number}", day, {"m": ONE})

    async def counted(asked: Any, days: Any) -> Any:
        reads.append(len(asked) * len(days))
        return await usage(asked, days)

    monkeypatch.setattr(keyed.log, "usage", counted)
    body = await told(keyed, "days=3", ADMIN)
    assert len(body["data"]) == 6 and body["has_more"] is False
    for number in range(3, 6):
        log.recount(f"team-{number}", now, {"m": ONE})
    body = await told(keyed, "days=3", ADMIN)
    assert len({each["owner"] for each in body["data"]}) == 4 and body["has_more"] is True
    assert reads and max(reads) <= 4
    reads.clear()
    await told(keyed, f"days={KEPT_DAYS}", ANN)
    assert max(reads) <= 4


@pytest.mark.parametrize("query", ["days=0", "days=41", "days=-1", "days=ten", "days=", "days=1.5", "days=%D9%A1"])
async def test_a_number_of_days_that_is_none_is_refused_by_its_name(bare: Site, query: str) -> None:
    response = await bare.get(f"/v1/usage?{query}")
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "days", "invalid_value")
    assert error["message"] == "days: should be a whole number from 1 to 40"


async def test_a_key_that_has_used_nothing_gets_an_empty_list(keyed: Site) -> None:
    for key in (ANN, ADMIN):
        assert await told(keyed, key=key) == {"object": "list", "data": [], "has_more": False}
