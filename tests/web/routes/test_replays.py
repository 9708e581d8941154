"""POST /v1/requests/<uid>/replay: a request is computed again by the stages that are there, for the key that asks."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs
from support.lived_requests import LivedRequests
from support.log_contract import CANCELLED
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import ADMIN, ANN, BOB, KEYS, Site, bearer, chat, code_of, request_lines, site

from pipeline.archive.writer import Writer
from pipeline.events import Failed, Submitted, Tokenized, decode, encode, new_uid
from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, Names
from pipeline.recording import Recording
from pipeline.replaying import LOWEST
from web.http.keys import Caller, Keys, hash_of


async def asked(here: Site, uid: str, body: Any = None, key: str = "") -> Any:
    more = {} if body is None else {"json": body}
    return await here.client.post(f"/v1/requests/{uid}/replay", headers=bearer(key), **more)


async def events_of(here: Site, uid: str, key: str = "") -> list[dict[str, Any]]:
    """Follow a request to its end; return its events."""
    async with asyncio.timeout(20):
        response = await here.get(f"/v1/requests/{uid}/events?format=events", **bearer(key))
        text = await response.get_data(as_text=True)
    frames = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(frame) for frame in frames]


def tokens_in(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events if event.get("kind") == "tokens" for token in event["tokens"]]


def first_of(log: RedisLog, uid: str) -> Submitted:
    event = decode(log.histories([uid])[0][0].fields)
    assert isinstance(event, Submitted)
    return event


async def test_a_replay_is_a_request_of_its_own_that_brings_the_same_tokens(
    redis_url: str, stand_in: StandIn, log: RedisLog
) -> None:
    async with site(redis_url, keys=KEYS) as here:
        sent = chat(seed=11, user="u1", response_format={"type": "json_object"})
        response = await here.post(sent, headers=bearer(ANN))
        uid = response.headers["x-minisgl-uid"]
        before = await events_of(here, uid, ANN)
        answer = await asked(here, uid, key=ANN)
        told = await answer.get_json()
        assert answer.status_code == 200 and told == {"uid": told["uid"], "of": uid}
        assert answer.headers["x-minisgl-uid"] == told["uid"] != uid
        again = await events_of(here, told["uid"], ANN)
        assert tokens_in(again) == tokens_in(before) != [] and again[-1]["kind"] == "finished"
        recorded, event = first_of(log, uid), first_of(log, told["uid"])
        (tokenized,) = [each for each in map(decode, _fields(log, uid)) if isinstance(each, Tokenized)]
        assert event.replay is not None and (event.replay.of, event.replay.cached) == (uid, False)
        assert (event.prompt_ids, event.sampling.seed) == (tokenized.token_ids, 11)
        assert (event.owner, event.priority, event.frontend) == (hash_of(ANN), LOWEST, "")
        assert event.labels == recorded.labels
        listed = (await (await here.get("/v1/requests", **bearer(ANN))).get_json())["requests"]
        assert {one["uid"]: one["replay_of"] for one in listed} == {uid: "", told["uid"]: uid}


def _fields(log: RedisLog, uid: str) -> list[Any]:
    return [entry.fields for entry in log.histories([uid])[0]]


async def test_a_body_may_let_it_read_the_cache_and_nothing_else(here: Site, log: RedisLog) -> None:
    uid = (await here.post(chat())).headers["x-minisgl-uid"]
    told = await (await asked(here, uid, {"cached": True, "odd": 1})).get_json()
    replay = first_of(log, told["uid"]).replay
    assert replay is not None and replay.cached
    assert (await asked(here, uid, {"odd": 1})).headers["x-minisgl-unknown-fields"] == "odd"
    assert await code_of(asked(here, uid, {"cached": "yes"})) == (400, "invalid_value")
    assert await code_of(asked(here, uid, [])) == (400, "invalid_json")


async def test_it_counts_as_a_request_of_the_key_that_asks_and_is_of_its_first_owner(
    redis_url: str, stand_in: StandIn, log: RedisLog
) -> None:
    ann = Caller.of(hash_of(ANN), "team", requests_per_minute=2)
    keys = Keys([ann, Caller.of(hash_of(BOB)), Caller(hash_of(ADMIN), is_admin=True)])
    async with site(redis_url, keys=keys) as here:
        uid = (await here.post(chat(), headers=bearer(ANN))).headers["x-minisgl-uid"]
        statuses = [(await asked(here, uid, key=ANN)).status_code for _ in range(4)]
        assert 429 in statuses and statuses == sorted(statuses), "the minute may have changed once"
        response = await asked(here, uid, key=ADMIN)
        assert response.status_code == 200, "the admin key has no limit"
        assert first_of(log, (await response.get_json())["uid"]).owner == "team"
        assert await code_of(asked(here, uid, key=BOB)) == (404, "request_not_found")


async def test_what_cannot_be_computed_again_says_why(here: Site, redis_url: str, log: RedisLog) -> None:
    refused = (await here.post(chat("refuse"))).headers["x-minisgl-uid"]
    told = (await here.client.post("/tokenize", json={"prompt": "a"})).headers["x-minisgl-uid"]
    several = (await here.post(chat(n=2))).headers["x-minisgl-uid"]
    deadly = (await here.post(chat())).headers["x-minisgl-uid"]
    history = log.histories([deadly])[0]
    command(redis_url, "DEL", Names().request(deadly))
    killed = Failed(status=500, code="poisonous", message="It killed its engine.", n=1)
    _write(redis_url, deadly, [*history[:-1]], killed)
    for uid, code, words in (
        (refused, "not_replayable", "ended before its prompt was tokenized"),
        (told, "not_replayable", "the tokenizer alone answered it"),
        (deadly, "not_replayable", "killed its engine"),
        (several, "several_requests", "stands for 2 requests"),
    ):
        response = await asked(here, uid)
        error = (await response.get_json())["error"]
        assert (response.status_code, error["code"]) == (400, code) and words in error["message"]
    assert await code_of(asked(here, new_uid())) == (404, "request_not_found")
    assert await code_of(asked(here, "nobody")) == (404, "request_not_found")


def _write(url: str, uid: str, entries: list[Any], end: Failed) -> None:
    for entry in entries:
        words = [word for pair in entry.fields.items() for word in pair]
        command(url, "XADD", Names().request(uid), entry.id, *words)
    command(url, "XADD", Names().request(uid), SEAL, *[word for pair in encode(end).items() for word in pair])


async def test_without_an_engine_or_room_it_is_refused_for_now(bare: Site, redis_url: str) -> None:
    with closing(RedisLog(redis_url, Names())) as log:
        lived = LivedRequests(log)
        uid = lived.running()
        lived.tokens(uid, "He")
        lived.ended(uid, CANCELLED)
    with capture_logs() as lines:
        response = await asked(bare, uid)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert (await response.get_json())["error"]["code"] == "loading"
    assert [line["error"] for line in request_lines(lines)] == ["loading"]


async def test_above_the_queue_it_is_refused_with_a_time_to_come_back(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, limits=RequestLimits(max_queued=1)) as here:
        uid = (await here.post(chat())).headers["x-minisgl-uid"]
        async with here.waiting():
            while (response := await asked(here, uid)).status_code == 200:
                await asyncio.sleep(0)
            assert response.status_code == 503 and int(response.headers["Retry-After"]) >= 1
            assert (await response.get_json())["error"]["code"] == "overloaded"


async def test_an_archived_request_is_computed_again(
    redis_url: str, stand_in: StandIn, log: RedisLog, tmp_path: Path
) -> None:
    async with site(redis_url, archive=str(tmp_path)) as here:
        uid = (await here.post(chat())).headers["x-minisgl-uid"]
        before = await events_of(here, uid)
        Writer(tmp_path, "archive-0", 1).write([Recording(uid, tuple(log.histories([uid])[0]))])
        command(redis_url, "DEL", Names().request(uid))
        told = await (await asked(here, uid)).get_json()
        assert tokens_in(await events_of(here, told["uid"])) == tokens_in(before)
