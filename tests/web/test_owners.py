"""Who may see and do what: a request belongs to the key that sent it, and the admin key may do everything."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any, Final

import pytest
from quart import Quart
from structlog.testing import capture_logs
from support.log_contract import CANCELLED, FINISHED
from support.redis_servers import command
from support.selection import rest_at_night
from support.stand_in_stages import MODELS, StandIn
from support.web_site import CHAT, IDS, Site, chat, code_of, error_of, one_request, request_lines, site, until

import web.routes.cache
from pipeline.events import SamplingParams, Submitted, new_uid
from pipeline.log.redis import RedisLog
from pipeline.names import Names, sibling_uids
from web.http.keys import Caller, Keys, hash_of, read_keys
from web.routes.openapi import METHODS, PATHS

ANN, BOB, ADMIN = "sk-ann", "sk-bob", "sk-root"
ANN_LATER = "sk-ann-2"
"""Another key with Ann's name."""
TEAM: Final = "team-a"
RESPONSES: Final = "/v1/responses"
HEADERS: Mapping[str, dict[str, str]] = {
    "no key": {},
    **{key: {"authorization": f"Bearer {key}"} for key in ("sk-wrong", ANN, BOB, ADMIN, ANN_LATER)},
}
CALLERS = ("no key", "sk-wrong", ANN, BOB, ADMIN)
KEYS: Mapping[str, Keys] = {
    "keys alone": read_keys([ANN, BOB], ""),
    "keys and the admin key": read_keys([ANN, BOB], "", ADMIN),
    "the admin key alone": read_keys((), "", ADMIN),
    "no keys": Keys(),
}

OPEN = {f"GET {path}" for path in ("/health", "/ping", "/ready", "/health_generate", "/metrics", "/docs")}
OPEN |= {"GET /openapi.json", "GET /", "GET /pipeline", "GET /requests/<path:name>", "GET /pages/<path:name>"}
"""Routes that need no key."""
WITH_A_KEY = {
    *(f"POST {base}/{path}" for base in ("", "/v1") for path in ("chat/completions", "completions")),
    *(f"POST {base}/{path}" for base in ("", "/v1") for path in ("tokenize", "detokenize")),
    *(f"GET {base}/{path}" for base in ("", "/v1") for path in ("models", "models/<path:name>")),
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses"),
    *("POST /generate", "GET /tokenizer_info", "GET /v1", "GET /version"),
    *("GET /get_model_info", "GET /get_server_info", "GET /server_info", "GET /props", "GET /v1/caller"),
    *(f"{method} {path}" for path in PATHS for method in METHODS),
}
"""Routes that show nothing of the requests of others."""
OF_ITS_OWN = {"GET /v1/requests", "GET /v1/pipeline/events", "GET /v1/chat/completions", "GET /v1/usage"}
"""Routes that show the requests of the caller, or of all if it is the admin."""
OF_A_REQUEST = {
    "GET /v1/requests/<name>",
    "GET /v1/requests/<name>/events",
    "GET /v1/requests/<name>/steps",
    "POST /v1/requests/<name>/replay",
    "DELETE /v1/requests/<name>",
    "POST /abort_request",
    *(
        "GET /v1/chat/completions/<name>",
        "GET /v1/chat/completions/<name>/messages",
        "DELETE /v1/chat/completions/<name>",
    ),
    *(f"{method} /v1/responses/<name>" for method in ("GET", "DELETE")),
    *("POST /v1/responses/<name>/cancel", "GET /v1/responses/<name>/input_items"),
}
ENDING = {"DELETE /v1/requests/<name>", "POST /abort_request"}
ENDING |= {"DELETE /v1/chat/completions/<name>", "DELETE /v1/responses/<name>", "POST /v1/responses/<name>/cancel"}
FOR_ALL = {"POST /flush_cache", "POST /abort_request", "GET /v1/dead", "POST /v1/dead/<name>/requeue"}
"""Routes that touch the requests of all; `/abort_request` does with `abort_all`."""
EXPECTED = {"POST /v1/requests/<name>/replay": 400, "POST /v1/dead/<name>/requeue": 404}
EXPECTED |= {"GET /v1/chat/completions/<name>": 404}
"""The status for a caller who may use a route: there are no tokens, no such letter, no answer of the chat."""

MATRIX: Mapping[str, Mapping[str, str]] = {
    # on which routes           no key  wrong   Ann     Bob     admin
    "keys alone": {
        "open":                 "in      in      in      in      in",
        "with a key":           "401     401     in      in      401",
        "its own requests":     "401     401     in      in      401",
        "a request of Ann":     "401     401     in      absent  401",
        "a request of nobody":  "401     401     absent  absent  401",
        "all requests":         "401     401     403     403     401",
    },
    "keys and the admin key": {
        "open":                 "in      in      in      in      in",
        "with a key":           "401     401     in      in      in",
        "its own requests":     "401     401     in      in      in",
        "a request of Ann":     "401     401     in      absent  in",
        "a request of nobody":  "401     401     absent  absent  in",
        "all requests":         "401     401     403     403     in",
    },
    "the admin key alone": {
        "open":                 "in      in      in      in      in",
        "with a key":           "in      in      in      in      in",
        "its own requests":     "401     401     401     401     in",
        "a request of Ann":     "401     401     401     401     in",
        "a request of nobody":  "401     401     401     401     in",
        "all requests":         "401     401     401     401     in",
    },
    "no keys": {
        "open":                 "in      in      in      in      in",
        "with a key":           "in      in      in      in      in",
        "its own requests":     "in      in      in      in      in",
        "a request of Ann":     "in      in      in      in      in",
        "a request of nobody":  "in      in      in      in      in",
        "all requests":         "in      in      in      in      in",
    },
}  # fmt: skip
"""absent: as a request that is not there."""
ROUTES: Mapping[str, set[str]] = {
    "open": OPEN,
    "with a key": WITH_A_KEY,
    "its own requests": OF_ITS_OWN,
    "a request of Ann": OF_A_REQUEST,
    "a request of nobody": OF_A_REQUEST,
    "all requests": FOR_ALL,
}


def some_pages(folder: Path) -> Path:
    """Return *folder* with the pages that have a path, and one file more."""
    for name in ("index.html", "pipeline.html", "request.html", MODELS[0]):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("a page")
    return folder


@pytest.fixture
def log(stand_in: StandIn) -> Iterator[RedisLog]:
    with closing(stand_in.stages.log.another()) as log:
        yield log


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.routes.cache, "PATIENCE_S", 0.0)  # no engine of the stand-in flushes


def submit(log: RedisLog, owner: str = "", *, uid: str = "", count: int = 1, endpoint: str = CHAT) -> str:
    """Submit a request, or siblings, of which nothing is said; return the uid."""
    uid = uid or new_uid()
    event = Submitted(
        endpoint=endpoint,
        frontend="web-9",
        prompt="silent",
        sampling=SamplingParams(),
        owner=owner,
        background=endpoint == RESPONSES,
        stored=True,
    )
    log.submit(uid, count * [event])
    return uid


def twin_of(uid: str) -> str:
    """Return a uid of the same moment that names no request."""
    return uid[:-15] + new_uid()[-15:]


async def asked(app: Quart, route: str, name: str, who: str) -> tuple[int, bytes]:
    """Return status and body of what *who* is answered on a *route*, with *name* where it takes one."""
    method, _, path = route.partition(" ")
    for pattern, value in (("<name>", name or "0-1"), ("<path:name>", MODELS[0]), ("<path:rest>", "x")):
        path = path.replace(pattern, value)
    path += "?pictures=1" if path == "/v1/pipeline/events" else ""
    client: Any = app.test_client()
    body = {} if path != "/abort_request" else {"json": {"rid": name} if name else {"abort_all": True}}
    response = await client.open(path, method=method, headers=HEADERS[who], **body)
    assert response.headers.get("WWW-Authenticate") == ("Bearer" if response.status_code == 401 else None)
    return response.status_code, await response.get_data(as_text=False)


async def outcome(app: Quart, route: str, name: str, who: str) -> str:
    """Return what the matrix says of an answer."""
    status, body = await asked(app, route, name, who)
    if status in (401, 403):
        return str(status)
    if name:
        twin = twin_of(name)
        if (status, body.replace(name.encode(), twin.encode())) == await asked(app, route, twin, who):
            return "absent"
    usual = (200,) if name else (200, 400, 404, 503)
    assert status in ((EXPECTED[route],) if route in EXPECTED else usual), (route, who, status, body)
    return "in"


@pytest.mark.parametrize("mode", rest_at_night(MATRIX, first=2))
async def test_who_may_do_what_on_every_route(
    redis_url: str, stand_in: StandIn, log: RedisLog, tmp_path: Path, mode: str
) -> None:
    owners = {"a request of Ann": hash_of(ANN), "a request of nobody": ""}
    async with site(redis_url, keys=KEYS[mode], pages=some_pages(tmp_path)) as here:
        rows = [(about, route) for about in MATRIX[mode] for route in sorted(ROUTES[about])]
        found = {}
        for about, route in rows:
            outcomes = []
            for who in CALLERS:
                endpoint = RESPONSES if RESPONSES in route else CHAT
                uid = submit(log, owners[about], endpoint=endpoint) if about in owners else ""
                ends_it = about in owners and route in ENDING
                if about in owners and not ends_it:
                    log.end(uid, CANCELLED, frontend="web-9")
                name = f"resp_{uid}" if uid and endpoint == RESPONSES else uid
                outcomes.append(await outcome(here.app, route, name, who))
                if ends_it:
                    assert (log.alive([uid]) == set()) == (outcomes[-1] == "in"), (about, route, who)
            found[about, route] = outcomes
    assert found == {(about, route): MATRIX[mode][about].split() for about, route in rows}


async def test_every_route_is_in_the_matrix(redis_url: str, tmp_path: Path) -> None:
    async with site(redis_url, ready=False, pages=some_pages(tmp_path)) as here:
        rules = here.app.url_map.iter_rules()
        automatic = {"HEAD", "OPTIONS"}
        routes = {f"{method} {rule.rule}" for rule in rules for method in (rule.methods or set()) - automatic}
    assert routes == set().union(*ROUTES.values())


async def test_head_and_options_tell_no_more_than_get(redis_url: str, stand_in: StandIn, log: RedisLog) -> None:
    uid = submit(log, hash_of(ANN))
    async with site(redis_url, keys=KEYS["keys and the admin key"]) as here:
        for who, expected in (("no key", 401), (BOB, 404), (ANN, 200), (ADMIN, 200)):
            assert (await asked(here.app, "HEAD /v1/requests/<name>", uid, who))[0] == expected
        for name in (uid, twin_of(uid)):
            assert (await asked(here.app, "OPTIONS /v1/requests/<name>", name, BOB))[0] == 200


# whose a request is


def team() -> Keys:
    """Return the keys of Ann, who has two with one name, of Bob and of the admin."""
    ann, later = (Caller.of(hash_of(key), TEAM) for key in (ANN, ANN_LATER))
    return Keys([ann, later, Caller.of(hash_of(BOB)), Caller(hash_of(ADMIN), is_admin=True)])


@pytest.fixture
def here(redis_url: str, stand_in: StandIn) -> AbstractAsyncContextManager[Site]:
    return site(redis_url, keys=team())


BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: chat(n=2),
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/messages": {"max_tokens": 5, "messages": chat()["messages"]},
    "/v1/messages/count_tokens": {"messages": chat()["messages"]},
    "/v1/responses": {"input": "a"},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}


async def test_whatever_a_key_sends_is_its_own(here: Site, stand_in: StandIn) -> None:
    for who, owner in ((ANN, TEAM), (ANN_LATER, TEAM), (BOB, hash_of(BOB)), (ADMIN, "")):
        before = len(stand_in.requests())
        for path, body in BODIES.items():
            response = await here.client.post(path, json=body, headers=HEADERS[who])
            assert response.status_code == 200, path
        assert (await here.get("/tokenizer_info", **HEADERS[who])).status_code == 200
        owners = [event.owner for _, event in stand_in.requests()[before:]]
        assert owners == [owner] * 11


@pytest.mark.parametrize("mode", ["no keys", "the admin key alone"])
async def test_without_api_keys_no_owner_is_written(
    redis_url: str, stand_in: StandIn, log: RedisLog, mode: str
) -> None:
    async with site(redis_url, keys=KEYS[mode]) as here:
        assert (await here.post(chat(), headers=HEADERS[ANN])).status_code == 200
        uid = await one_request(stand_in)
        assert "owner" not in log.histories([uid])[0][0].fields


async def test_siblings_are_of_their_sender_each_and_together(here: Site, log: RedisLog) -> None:
    uid = submit(log, TEAM, count=2)
    for route in ("GET /v1/requests/<name>", "DELETE /v1/requests/<name>", "POST /abort_request"):
        for name in (uid, *sibling_uids(uid, 2)):
            assert await outcome(here.app, route, name, BOB) == "absent"
            assert log.alive(sibling_uids(uid, 2)) == {*sibling_uids(uid, 2)}
    for who in (ANN_LATER, ADMIN):
        assert await outcome(here.app, "GET /v1/requests/<name>", uid, who) == "in"
    assert await outcome(here.app, "POST /abort_request", uid, ANN) == "in"
    assert log.alive(sibling_uids(uid, 2)) == set()


async def test_the_events_of_others_are_as_those_of_a_request_that_is_not_there(here: Site, log: RedisLog) -> None:
    for age_s, code in ((0, "request_not_found"), (5000, "request_expired")):
        uid = submit(log, TEAM, uid=f"{int((time.time() - age_s) * 1000):012x}" + new_uid()[12:])
        for query in (
            "",
            "?format=events",
            "?format=story",
            "?starting_after=0-1",
            "?starting_after=9-0",
            "?format=x",
        ):
            paths = [f"/v1/requests/{name}/events{query}" for name in (uid, twin_of(uid))]
            of_another, of_nobody = [await error_of(here.get(path, **HEADERS[BOB])) for path in paths]
            assert of_another == of_nobody
            assert of_another[1]["code"] == ("invalid_value" if query == "?format=x" else code)
        assert not log.read_by_others([uid])


async def test_a_new_key_of_the_same_name_goes_on_with_a_stream(here: Site) -> None:
    response = await here.post(chat(stream=True), headers={**HEADERS[ANN], **IDS})
    uid, full = response.headers["x-minisgl-uid"], await response.get_data(as_text=False)
    path = f"/v1/requests/{uid}/events"
    assert await code_of(here.get(path, **HEADERS[BOB], **{"Last-Event-ID": "1-0"})) == (404, "request_not_found")
    again = await here.get(path, **HEADERS[ANN_LATER], **{"Last-Event-ID": "1-0"})
    rest = await again.get_data(as_text=False)
    assert again.status_code == 200 and rest and full.endswith(rest) and rest != full


async def test_of_a_request_of_others_only_the_beginning_is_read(
    here: Site, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = submit(log, TEAM)

    async def histories(*_: object, **__: object) -> None:
        raise AssertionError("a whole history is read")

    monkeypatch.setattr(here.log, "histories", histories)
    assert await outcome(here.app, "GET /v1/requests/<name>", uid, BOB) == "absent"


async def test_a_key_that_gets_a_name_still_owns_what_it_sent_before(here: Site, log: RedisLog) -> None:
    uid = submit(log, hash_of(ANN))
    for who, expected in ((ANN, "in"), (ANN_LATER, "absent"), (BOB, "absent")):
        assert await outcome(here.app, "GET /v1/requests/<name>", uid, who) == expected


# idempotency and limits


async def test_idempotency_keys_are_shared_within_a_name_and_with_nobody_else(here: Site, stand_in: StandIn) -> None:
    uids = {}
    for who in (ANN, ANN_LATER, BOB, ADMIN):
        response = await here.post(chat(), headers=HEADERS[who] | {"Idempotency-Key": "same"})
        uids[who] = response.headers["x-minisgl-uid"]
    assert uids[ANN] == uids[ANN_LATER]
    assert len({*uids.values()}) == len(stand_in.requests()) == 3


async def test_the_admin_and_a_client_without_a_key_do_not_share_idempotency_keys(
    redis_url: str, stand_in: StandIn
) -> None:
    async with site(redis_url, keys=KEYS["the admin key alone"]) as here:
        responses = [await here.post(chat(), headers=HEADERS[who] | {"Idempotency-Key": "x"}) for who in CALLERS]
        uids = [response.headers["x-minisgl-uid"] for response in responses]
    assert len({*uids[:-1]}) == 1 and uids[-1] not in uids[:-1]


async def test_nobody_is_answered_from_a_request_of_others_whatever_has_the_idempotency_key(
    here: Site, redis_url: str, log: RedisLog
) -> None:
    headers = HEADERS[ANN] | {"Idempotency-Key": "x"}
    first = await here.post(chat(), headers=headers)
    uid = first.headers["x-minisgl-uid"]
    other = submit(log, hash_of(BOB))
    log.end(other, FINISHED, frontend="web-9")
    (key,) = command(redis_url, "KEYS", Names().idempotency("*"))
    held = command(redis_url, "GET", key)
    command(redis_url, "SET", key, held.replace(uid.encode(), other.encode()), "PX", 60_000)
    again = await here.post(chat(), headers=headers)
    assert again.status_code == 200
    assert again.headers["x-minisgl-uid"] not in (uid, other)


async def test_keys_of_one_name_are_counted_together(redis_url: str, stand_in: StandIn) -> None:
    ann, later = (Caller.of(hash_of(key), TEAM, concurrent_requests=1) for key in (ANN, ANN_LATER))
    keys = Keys([ann, later, Caller.of(hash_of(BOB), concurrent_requests=1)])
    async with site(redis_url, keys=keys) as here, here.connection(chat("silent", stream=True), HEADERS[ANN]):
        await until(stand_in.requests)
        assert (await here.post(chat(), headers=HEADERS[ANN_LATER])).status_code == 429
        assert (await here.post(chat(), headers=HEADERS[BOB])).status_code == 200


# what is said


async def test_whoever_is_refused_is_told_what_to_set_and_has_a_log_line(redis_url: str, log: RedisLog) -> None:
    with capture_logs() as lines:
        for mode, who, expected in (
            ("keys alone", ANN, (403, "permission_error", "admin_key_needed")),
            ("the admin key alone", ANN, (401, "authentication_error", "invalid_api_key")),
        ):
            async with site(redis_url, ready=False, keys=KEYS[mode]) as here:
                for path, body in (("/flush_cache", {}), ("/abort_request", {"abort_all": True})):
                    status, error = await error_of(here.client.post(path, json=body, headers=HEADERS[who]))
                    assert (status, error["type"], error["code"]) == expected
                    assert "admin key" in error["message"] and "--admin-key" in error["message"]
        async with site(redis_url, ready=False, keys=KEYS["the admin key alone"]) as here:
            for method in ("GET", "DELETE"):
                assert (await asked(here.app, f"{method} /v1/requests/<name>", new_uid(), "no key"))[0] == 401
    assert [line["status"] for line in request_lines(lines)] == [403, 403, 401, 401, 401, 401]


async def test_a_log_line_has_the_name_of_the_key_or_the_first_digits_of_its_hash(
    redis_url: str, stand_in: StandIn
) -> None:
    with capture_logs() as lines:
        async with site(redis_url, keys=team()) as here:
            for who in (ANN, BOB, ADMIN):
                await here.post(chat(), headers=HEADERS[who])
    assert [line.get("key") for line in request_lines(lines)] == [TEAM, hash_of(BOB)[:8], None]
