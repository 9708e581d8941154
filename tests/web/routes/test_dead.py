"""GET /v1/dead and POST /v1/dead/<id>/requeue: as `minisgl dead ls` and `minisgl dead requeue`."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.lived_requests import LivedRequests
from support.log_contract import put
from support.redis_servers import command
from support.web_site import Site, code_of

import web.routes.dead
from ops.dead import letters_in
from pipeline.errors import LogUnavailable
from pipeline.events import Submitted, decode, new_uid
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.views.history import plain_letter


@pytest.fixture
def lived(lived: LivedRequests) -> LivedRequests:
    lived.owner = "team-a"
    return lived


async def letters(here: Site, query: str = "") -> dict[str, Any]:
    response = await here.get(f"/v1/dead?{query}")
    told: dict[str, Any] = await response.get_json()
    assert response.status_code == 200, told
    return told


async def requeue(here: Site, name: str) -> Any:
    return await here.client.post(f"/v1/dead/{name}/requeue")


async def test_letters_are_listed_as_dead_ls_prints_them(bare: Site, log: RedisLog, lived: LivedRequests) -> None:
    uids = [lived.dead(), lived.dead(error="SIGKILL")]
    put(log, Names().dead, {"stream": "submitted", "error": "no JSON", "ms": "7", "entry": "[1]"})
    told = await letters(bare)
    assert told["dead"] == orjson.loads(orjson.dumps([plain_letter(letter) for letter in letters_in(log)]))
    assert [one.get("uid") for one in told["dead"]] == [None, *reversed(uids)] and told["next"] is None
    assert (told["dead"][1]["error"], told["dead"][1]["deaths"]) == ("SIGKILL", 3)


async def test_they_come_in_pages(bare: Site, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.routes.dead, "READ_AT_ONCE", 2)
    uids = [lived.dead() for _ in range(7)]
    for limit in (1, 2, 3, 7, 100):
        found, before = list[str](), ""
        while True:
            page = await letters(bare, f"limit={limit}&before={before}")
            found += [one["uid"] for one in page["dead"]]
            before = page["next"]
            if before is None:
                break
        assert found == uids[::-1], limit
    assert (await letters(bare, "before=0-0")) == {"dead": [], "next": None}
    for query in ("limit=0", "limit=101", "before=x", "before=1", "before=99999999999999999999-0"):
        assert await code_of(bare.get(f"/v1/dead?{query}")) == (400, "invalid_value")


async def test_the_letter_of_a_request_is_found_among_many(bare: Site, lived: LivedRequests) -> None:
    uid = lived.dead()
    for _ in range(3 * web.routes.dead.READ_AT_ONCE):
        lived.dead()
    for name in (uid, f"chatcmpl-{uid}"):
        told = await letters(bare, f"uid={name}")
        assert ([one["uid"] for one in told["dead"]], told["next"]) == ([uid], None)
    assert await letters(bare, f"uid={new_uid()}") == {"dead": [], "next": None}
    assert await code_of(bare.get("/v1/dead?uid=x")) == (400, "invalid_value")


@pytest.mark.parametrize("by", ["id", "uid"])
async def test_a_requeued_request_asks_the_same_again_and_its_letter_is_gone(
    bare: Site, log: RedisLog, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(web.routes.dead, "READ_AT_ONCE", 1)
    uid, other = lived.dead(prompt="once more"), lived.dead()
    (letter,) = [letter for letter in letters_in(log) if letter.fields["uid"] == uid]
    response = await requeue(bare, letter.id if by == "id" else uid)
    told = await response.get_json()
    assert response.status_code == 200 and told == {"uid": told["uid"], "requeued_from": uid}
    assert [left.fields["uid"] for left in letters_in(log)] == [other]
    event, before = (decode(log.histories([each])[0][0].fields) for each in (told["uid"], uid))
    assert isinstance(event, Submitted) and isinstance(before, Submitted)
    assert (event.prompt, event.sampling, event.owner) == ("once more", before.sampling, "team-a")
    assert (event.frontend, event.labels) == ("", {"user": "u1", "requeued_from": uid})
    assert log.alive([told["uid"]]) == {told["uid"]}
    assert await code_of(requeue(bare, letter.id)) == (404, "dead_letter_not_found")


async def test_a_letter_that_is_requeued_twice_at_once_is_sent_once(
    bare: Site, log: RedisLog, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = lived.dead()
    both, found = asyncio.Barrier(2), web.routes.dead._letter

    async def found_by_both(*args: Any) -> Entry:
        letter = await found(*args)
        await both.wait()
        return letter

    monkeypatch.setattr(web.routes.dead, "_letter", found_by_both)
    answers = await asyncio.gather(requeue(bare, uid), requeue(bare, uid))
    told = sorted([(answer.status_code, await answer.get_json()) for answer in answers], key=lambda each: each[0])
    assert [status for status, _ in told] == [200, 404]
    assert told[1][1]["error"]["code"] == "dead_letter_not_found"
    assert log.living() == [told[0][1]["uid"]] and not log.dead_letters(9)


async def test_a_requeue_whose_answer_is_lost_is_not_taken_back(
    bare: Site, log: RedisLog, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = lived.dead()
    submit = bare.log.submit

    async def lose(*args: Any, **more: Any) -> None:
        await submit(*args, **more)
        raise LogUnavailable("away")

    monkeypatch.setattr(bare.log, "submit", lose)
    assert await code_of(requeue(bare, uid)) == (503, "overloaded")
    assert await code_of(requeue(bare, uid)) == (404, "dead_letter_not_found")
    (sent,) = log.living()
    event = decode(log.histories([sent])[0][0].fields)
    assert isinstance(event, Submitted) and event.labels["requeued_from"] == uid


async def test_what_is_not_there_is_not_sent(bare: Site, redis_url: str, log: RedisLog, lived: LivedRequests) -> None:
    uid = lived.dead()
    about_nothing = put(log, Names().dead, {"stream": "submitted", "error": "no JSON"})
    for name in (new_uid(), "1-1", "nothing", "99999999999999999999-99999999999999999999"):
        assert await code_of(requeue(bare, name)) == (404, "dead_letter_not_found")
    assert await code_of(requeue(bare, about_nothing)) == (409, "history_gone")
    command(redis_url, "DEL", Names().request(uid))
    assert await code_of(requeue(bare, uid)) == (409, "history_gone")
    assert len((await letters(bare))["dead"]) == 2 and not log.living()
