"""API keys and what each may send: the flags, the file of limits, the answers, the official client."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from quart import Response
from structlog.testing import capture_logs
from support.redis_servers import command
from support.selection import by_night
from support.stand_in_stages import MODELS, StandIn
from support.web_site import CHAT, Site, chat, error_of, received, request_lines, site, until

import web.routes.cache
from pipeline.errors import ConfigError
from pipeline.log.protocol import Quota
from pipeline.names import Names
from web.config import DEFAULT_BODY_BYTES
from web.http.asgi import HttpConfig
from web.http.connections import serve
from web.http.keys import Caller, Keys, hash_of, read_keys
from web.http.listener import open_listener
from web.http.log_limiter import LogLimiter

ANN, BOB, ADMIN = "sk-ann-0123456789", "sk-bob/+~!", "sk-root"


def bearer(key: str = ANN) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def keys_of(tmp_path: Path, text: str, *api_keys: str) -> Keys:
    """Return the keys of a file that says *text*."""
    file = tmp_path / "limits.toml"
    file.write_text(text)
    return read_keys(api_keys, str(file))


def quota_of(keys: Keys, *texts: str) -> Quota | None:
    found = keys.find(texts)
    return found.quota if found else None


def quotas(keys: Keys, *texts: str) -> list[Quota | None]:
    return [quota_of(keys, text) for text in texts]


def with_limit(**limits: int) -> Keys:
    """Return the keys of Ann, with limits, and of Bob, without."""
    return Keys([Caller.of(hash_of(ANN), **limits), Caller.of(hash_of(BOB))])


# keys


def test_a_key_is_known_and_nothing_else_is() -> None:
    keys = read_keys([ANN, BOB, ANN], "")
    assert quotas(keys, ANN, BOB) == [Quota(hash_of(ANN)), Quota(hash_of(BOB))]
    for other in ("", " ", ANN[:-1], ANN + "0", ANN.upper(), "ä", "\udcff".encode("utf-8", "replace").decode()):
        assert keys.find([other]) is None
    assert keys.find([]) is None
    assert quota_of(keys, "", "x", BOB, ANN) == Quota(hash_of(BOB))


def test_without_keys_any_client_may_do_everything() -> None:
    for keys in (Keys(), read_keys((), "")):
        assert keys.find([]) == keys.find([ANN]) == Caller(is_admin=True)


def test_the_admin_key_has_no_limits_and_does_not_shut_out_others() -> None:
    assert read_keys((), "", ADMIN).find([]) == Caller()
    for keys in (read_keys((), "", ADMIN), read_keys([ANN], "", ADMIN), read_keys([ANN, ADMIN], "", ADMIN)):
        assert keys.find([ADMIN]) == keys.find([ADMIN, ANN]) == Caller(hash_of(ADMIN), is_admin=True)
    assert read_keys([ADMIN], "", ADMIN).find([ANN]) is None


def test_a_hash_is_the_same_for_every_frontend_and_says_nothing_of_the_key() -> None:
    assert hash_of("sk-ann-0123456789") == "a8f3b8e917263221e2f59ce195767ee4"
    assert hash_of(ANN) != hash_of(BOB)
    assert ANN not in repr(read_keys([ANN], "").find([ANN]))


def test_a_key_is_compared_with_all_and_never_letter_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    compare_digest = hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    keys = read_keys([ANN, BOB, "third"], "")
    monkeypatch.setattr("web.http.keys.hmac.compare_digest", compare)
    for given in (ANN, "nobody"):
        compared.clear()
        keys.find([given])
        assert compared == [(hash_of(key), hash_of(given)) for key in (ANN, BOB, "third")]


@pytest.mark.parametrize("bad", ["", "two words", "tab\t", "ümlaut", "x" * 256, "line\n"])
def test_a_key_that_is_none_is_refused_and_not_shown(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys([ANN, bad], "")
    with pytest.raises(ConfigError, match="--admin-key") as of_admin:
        read_keys([ANN], "", bad)
    assert str(caught.value).startswith("--api-key: key 2 of 2 must be 1 to 255 visible ASCII")
    for message in (str(caught.value), str(of_admin.value)):
        assert ANN not in message and (not bad.strip() or bad not in message)


# the file


def test_a_file_gives_limits_to_its_keys_and_to_those_of_the_flag(tmp_path: Path) -> None:
    text = f"""
        [default]
        requests_per_minute = 60
        concurrent_requests = 4
        [[key]]
        key = "{ANN}"
        requests_per_minute = 600
        [[key]]
        key = "third"
    """
    keys = keys_of(tmp_path, text, BOB, ANN)
    assert quotas(keys, ANN, BOB, "third", "fourth") == [
        Quota(hash_of(ANN), requests_per_minute=600, concurrent_requests=4),
        Quota(hash_of(BOB), requests_per_minute=60, concurrent_requests=4),
        Quota(hash_of("third"), requests_per_minute=60, concurrent_requests=4),
        None,
    ]


def test_a_hash_stands_for_its_key(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, f'[[key]]\nhash = "{hash_of(ANN)}"\nconcurrent_requests = 3\n[[key]]\nkey = "{BOB}"\n')
    assert quotas(keys, ANN, BOB, hash_of(ANN)) == [
        Quota(hash_of(ANN), concurrent_requests=3),
        Quota(hash_of(BOB)),
        None,
    ]


@pytest.mark.parametrize(
    ("written", "end_s"),
    [
        ("2027-01-31", 1801440000),  # all of the day
        ("2027-01-31T00:00:00", 1801353600),
        ("2027-01-31 00:00:00Z", 1801353600),
        ("2027-01-31T01:00:00+01:00", 1801353600),
        ("9999-12-31", 253402300800),
    ],
)
def test_a_key_expires_after_a_day_or_at_a_time_of_utc(tmp_path: Path, written: str, end_s: float) -> None:
    found = keys_of(tmp_path, f'[[key]]\nkey = "{ANN}"\nexpires = {written}\n').find([ANN])
    assert found is not None and found.expires_s == end_s


def test_a_key_lets_in_until_the_moment_it_expires_and_others_go_on() -> None:
    now_s = [99.9]
    ann, bob = Caller.of(hash_of(ANN), "team", 100.0), Caller.of(hash_of(BOB), "team")
    keys = Keys([ann, bob], clock_s=lambda: now_s[0])
    assert keys.find([ANN]) == ann and keys.has(ann) and bob.expires_s == math.inf
    now_s[0] = 100.0
    assert keys.find([ANN]) is None and not keys.has(ann) and keys.had([ANN])
    assert keys.find([ANN, BOB]) == keys.find([BOB]) == bob
    assert not keys.had(["sk-wrong", hash_of(ANN)])


def test_limits_of_all_kinds_may_be_the_default(tmp_path: Path) -> None:
    numbers = "requests_per_day = 2\ntokens_per_minute = 3\ntokens_per_day = 4\nqueued_requests = 5\n"
    text = f'[default]\n{numbers}weight = 7\nviewers = 8\npriority = true\n[[key]]\nkey = "{ANN}"\n'
    keys = keys_of(tmp_path, f'{text}[[key]]\nkey = "{BOB}"\npriority = false\nweight = 1000\nviewers = 0\n')
    ann, bob = (keys.find([key]) or Caller() for key in (ANN, BOB))
    quota = Quota(hash_of(ANN), requests_per_day=2, tokens_per_minute=3, tokens_per_day=4, queued_requests=5)
    assert (ann.quota, ann.weight, ann.viewers, ann.overtakes) == (quota, 7, 8, True)
    assert (bob.weight, bob.viewers, bob.overtakes) == (1000, 0, False)
    plain = keys_of(tmp_path, "", ANN).find([ANN]) or Caller()
    assert (plain.weight, plain.viewers, plain.overtakes) == (1, 0, False)


def test_once_keys_are_needed_they_stay_needed(tmp_path: Path) -> None:
    keys = read_keys([ANN], "", ADMIN)
    file = tmp_path / "limits.toml"
    file.write_text("[default]\nrequests_per_minute = 1\n")
    for other in (read_keys((), str(file), ADMIN, may_lack_keys=True), Keys([Caller(hash_of(ADMIN), is_admin=True)])):
        keys.replace(other)
        assert keys.exist and keys.find([]) is None and keys.find([ANN]) is None
        assert keys.find([ADMIN]) == Caller(hash_of(ADMIN), is_admin=True)
    keys.replace(Keys())
    assert keys.exist and keys.find([]) is None and keys.find([ADMIN]) is None


def test_owners_are_revoked_with_their_last_key_and_not_when_a_key_gets_a_name() -> None:
    keys = Keys([Caller.of("a" * 32), Caller.of("b" * 32, "team"), Caller.of("c" * 32, "team"), Caller.of("d" * 32)])
    assert keys.replace(Keys([Caller.of("a" * 32, "named"), Caller.of("c" * 32, "team")])) == {"d" * 32}
    assert keys.replace(Keys([Caller.of("e" * 32, "named")])) == {"team"}
    assert keys.owners == {"named"} and keys.num == 1


def test_keys_of_one_name_own_the_same_requests_and_are_counted_together(tmp_path: Path) -> None:
    text = f"""
        [default]
        concurrent_requests = 4
        [[key]]
        key = "{ANN}"
        name = "team-a"
        [[key]]
        key = "new"
        name = "team-a"
        [[key]]
        key = "{BOB}"
    """
    keys = keys_of(tmp_path, text)
    assert quotas(keys, ANN, "new", BOB) == [
        Quota("team-a", concurrent_requests=4),
        Quota("team-a", concurrent_requests=4),
        Quota(hash_of(BOB), concurrent_requests=4),
    ]
    ann, new, bob = (keys.find([key]) or Caller() for key in (ANN, "new", BOB))
    assert (ann.owner, ann.scope) == (new.owner, new.scope) == ("team-a", "team-a")
    assert ann.may_see("team-a") and new.may_see("team-a") and not bob.may_see("team-a")
    assert ann.may_see(hash_of(ANN)), "it was sent before the key had a name"
    for others in (new.may_see(hash_of(ANN)), bob.may_see(""), ann.may_see(""), Caller().may_see("")):
        assert not others


def test_the_admin_key_has_no_table_and_no_key_is_a_name(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    for name, key, expected in (
        ("", ADMIN, "has the key of --admin-key"),
        *((f'name = "{name}"', ANN, "a name") for name in (BOB[:6], ADMIN, ANN)),
    ):
        file.write_text(f'[[key]]\nkey = "{key}"\n{name}\n')
        with pytest.raises(ConfigError) as caught:
            read_keys([BOB[:6]], str(file), ADMIN)
        assert str(caught.value).startswith(f"--limits {file}: {expected}")
        assert ADMIN not in str(caught.value) and ANN not in str(caught.value)


def test_without_a_default_what_is_not_said_has_no_limit(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, f'[[key]]\nkey = "{ANN}"\nconcurrent_requests = 1\n', BOB)
    assert quotas(keys, ANN, BOB) == [Quota(hash_of(ANN), concurrent_requests=1), Quota(hash_of(BOB))]
    assert quotas(keys_of(tmp_path, "", BOB), BOB) == [Quota(hash_of(BOB))]


def test_of_several_keys_none_may_fill_more_than_half_of_the_log_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    def shares(keys: Keys) -> list[int]:
        return [quota.log_bytes if quota else 0 for quota in quotas(keys, ANN, BOB, ADMIN)]

    file = tmp_path / "limits.toml"
    file.write_text(f'[[key]]\nkey = "{ANN}"\nlog_bytes = 7\n')
    assert shares(read_keys([ANN, BOB], "", max_log_bytes=101)) == [50, 50, 0]
    assert shares(read_keys([ANN, BOB], "")) == [0, 0, 0], "the log has no limit"
    assert shares(read_keys([ANN], "", ADMIN, max_log_bytes=101)) == [0, 0, 0], "nobody else is stopped"
    assert shares(read_keys([ANN, BOB], str(file), ADMIN, max_log_bytes=101)) == [7, 50, 0]
    file.write_text(f'[default]\nlog_bytes = 9\n[[key]]\nkey = "{ANN}"\nlog_bytes = 7\n')
    assert shares(read_keys([BOB], str(file), max_log_bytes=101)) == shares(read_keys([BOB], str(file))) == [7, 9, 0]
    file.write_text("".join(f'[[key]]\nkey = "{key}"\nname = "team"\n' for key in (ANN, BOB)))
    assert shares(read_keys([], str(file), max_log_bytes=101)) == [0, 0, 0], "two keys of one owner"


def test_a_file_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "l.toml").write_text(f'[[key]]\nkey = "{ANN}"\n')
    assert quotas(read_keys((), "~/l.toml"), ANN) == [Quota(hash_of(ANN))]


KEY_LINE = f'key = "{ANN}"'
SPOILT = [
    ("[default]\n requests_per_minute 5", "at line 2, column 22"),
    (f"{KEY_LINE}\n{KEY_LINE}", "TOML"),
    (f'["{ANN}"]\n["{ANN}"]', "at line 2"),
    (f'x = {{"{ANN}" = 1, "{ANN}" = 2}}', "at line 1"),
    *((text, "TOML") for text in ("= 5", "[default", "x = " + "9" * 5000, "x = " + "[" * 100_000)),
    ("keys = 1", "keys"),
    (f'["{ANN}"]\nrequests_per_minute = 1', "a name"),
    *((text, "default") for text in ("default = 1", "[[default]]")),
    *((text, "[[key]]") for text in (f"[key]\n{KEY_LINE}", "key = [1]")),
    ("[default]\nrequests_per_second = 1", "[default]: requests_per_second"),
    ("[default]\nkey = 'x'", "[default]: key"),
    (f'[default]\n"{ANN}" = 1', "[default]: a name"),
    (f"[[key]]\n{KEY_LINE}\nburst = 1", "[[key]] 1: burst"),
    (f"[[key]]\n{KEY_LINE}\n[[key]]\n", "[[key]] 2: "),
    *((f"[[key]]\nkey = {bad}", "[[key]] 1: ") for bad in ("5", "''", f"'{ANN} {ANN}'")),
    (f"[[key]]\n{KEY_LINE}\nhash = '{hash_of(BOB)}'", "[[key]] 1: has key and hash"),
    *((f"[[key]]\nhash = {bad}", "[[key]] 1: has a bad hash") for bad in ("5", "''", f"'{ANN}'", f"'{'A' * 32}'")),
    (f"[[key]]\n{KEY_LINE}\n[[key]]\nhash = '{hash_of(ANN)}'", "[[key]] 2: has the key of [[key]] 1"),
    *(
        (f"[[key]]\n{KEY_LINE}\nexpires = {bad}", "[[key]] 1: has a bad expiry")
        for bad in ("5", "true", "'2027-01-31'", "12:00:00", "[]")
    ),
    ("[default]\nexpires = 2027-01-31", "[default]: expires"),
    *(
        (f"[[key]]\n{KEY_LINE}\n{line}", f"[[key]] 1: {line.split()[0]}: ")
        for line in ("weight = 0", "weight = 1001", "weight = 1.0", "viewers = -1", "priority = 1", "priority = 'yes'")
    ),
    (f"[[key]]\nhash = '{hash_of(ANN)}'\nname = '{ANN}'", "a name is one of the keys"),
    (f"[[key]]\n{KEY_LINE}\n[[key]]\nkey = 'b'\n[[key]]\n{KEY_LINE}", "[[key]] 3: has the key of [[key]] 1"),
    *(
        (f"[[key]]\n{KEY_LINE}\nname = {bad}", "[[key]] 1: has a bad name")
        for bad in ("1", "''", "'a b'", "'-a'", "'a:b'", "'é'", f"'{'x' * 65}'", f"'{hash_of(ANN)}'", '"a\\n"')
    ),
    (
        f"[[key]]\n{KEY_LINE}\nname = 'a'\n[[key]]\nkey = 'b'\nname = 'a'\nconcurrent_requests = 1",
        "[[key]] 2: has the name of [[key]] 1",
    ),
    *(
        (f"[[key]]\n{KEY_LINE}\n{name} = {value}", f"[[key]] 1: {name}: ")
        for name in ("requests_per_minute", "concurrent_requests", "log_bytes")
        for value in ("0", "-1", "1.5", "true", "nan", f"'{ANN}'", "[]")
    ),
    ("[default]\nrequests_per_minute = 0", "[default]: requests_per_minute: 0"),
    *((text, "--api-key") for text in ("[default]\nrequests_per_minute = 1", "")),
]


def test_a_file_that_is_wrong_is_refused_in_one_line_that_shows_no_key(tmp_path: Path) -> None:
    for text, expected in SPOILT:
        with pytest.raises(ConfigError) as caught:
            keys_of(tmp_path, text)
        message = str(caught.value)
        assert message.startswith(f"--limits {tmp_path / 'limits.toml'}: ") and expected in message, text
        assert "\n" not in message and ANN not in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"# \xff")
    for name, expected in (("nowhere", "No such file"), (".", "Is a directory"), ("latin", "UTF-8")):
        with pytest.raises(ConfigError) as caught:
            read_keys([ANN], str(tmp_path / name))
        assert str(caught.value).startswith(f"--limits {tmp_path / name}: ") and expected in str(caught.value)


# who may come in


OPEN_PATHS = ("/health", "/ping", "/ready", "/health_generate", "/metrics", "/docs", "/openapi.json")
OPEN_PAGES = ("/", "/pipeline", "/requests/x", "/pages/x")
GUARDED = [
    *(("GET", path) for path in ("/nothing/here", "/pages", "/pages/", "/health/x", "/health%2F..%2Fv1")),
    *(("GET", path) for path in ("/v1/models/health", CHAT)),
    ("OPTIONS", CHAT),
]
"""Besides every route that there is."""


async def test_every_path_but_those_that_are_open_needs_a_key(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.routes.cache, "PATIENCE_S", 0.0)  # no engine of the stand-in flushes
    async with site(redis_url, keys=read_keys([ANN, BOB], ""), pages=Path(__file__).parents[1] / "pages") as here:
        rules = [(method, str(rule)) for rule in here.app.url_map.iter_rules() for method in rule.methods or ()]
        rules = [(method, re.sub(r"<(path:)?name>", "x", path)) for method, path in rules]
        rules = [(method, f"{path}?pictures=1" * path.endswith("/pipeline/events") or path) for method, path in rules]
        tried = {*GUARDED, *rules}
        client: Any = here.client
        for method, path in sorted(tried):
            for headers in ({}, *by_night((bearer("wrong"),), (bearer("wrong"), bearer(""), {"x-api-key": ANN + "x"}))):
                response = await client.open(path, method=method, headers=headers)
                if path in (*OPEN_PATHS, *OPEN_PAGES):
                    assert response.status_code != 401
                    continue
                assert response.status_code == 401, (method, path)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                if method != "HEAD":
                    error = (await response.get_json())["error"]
                    is_openai = not path.startswith("/v1/messages")
                    assert error["type"] == "authentication_error"
                    assert error.get("code") == ("invalid_api_key" if is_openai else None)
            for headers in (bearer(ANN), *by_night((), (bearer(BOB), {"x-api-key": ANN}))):
                response = await client.open(path, method=method, headers=headers)
                assert response.status_code != 401, (method, path)
        assert {*OPEN_PATHS, *OPEN_PAGES, "/flush_cache", CHAT} <= {path for _, path in tried}
        # without a body only the tokenizer can be asked for something, and by a key
        assert {event.endpoint for _, event in stand_in.requests()} == {"/tokenizer_info"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"bearer {ANN}"}, 200),
        ({"authorization": f"BEARER   {ANN} "}, 200),
        ({"x-api-key": ANN, "authorization": "Bearer none"}, 200),
        ({"x-api-key": "none", "authorization": f"Bearer {ANN}"}, 200),
        ({"authorization": ANN}, 401),
        ({"authorization": f"Basic {ANN}"}, 401),
        ({"authorization": f"Bearer{ANN}"}, 401),
        ({"authorization": f"Bearer {ANN} {ANN}"}, 401),
        ({"authorization": "Bearer \xff"}, 401),
        ({"api-key": ANN}, 401),
    ],
)
async def test_a_key_is_a_bearer_token_or_the_header_x_api_key(
    redis_url: str, stand_in: StandIn, headers: dict[str, str], status: int
) -> None:
    async with site(redis_url, keys=read_keys([ANN], "")) as here:
        assert (await here.post(chat(), headers=headers)).status_code == status
    assert len(stand_in.requests()) == (1 if status == 200 else 0)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "needs an API key"),
        ({"authorization": "Bearer "}, "needs an API key"),
        (bearer("x"), "not one of this server"),
        (bearer("old"), "has expired"),
    ],
    ids=["no key", "an empty key", "a wrong key", "an expired key"],
)
async def test_who_has_a_wrong_key_is_not_told_to_send_one(redis_url: str, headers: dict[str, str], words: str) -> None:
    keys = Keys([Caller.of(hash_of(ANN)), Caller.of(hash_of("old"), "team", 1.0)])
    async with site(redis_url, ready=False, keys=keys) as here:
        status, error = await error_of(here.post(chat(), headers=headers))
        assert status == 401 and words in error["message"]
        assert error["code"] == "invalid_api_key"


async def test_a_key_that_is_revoked_while_a_body_comes_sends_no_request(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, headers = read_keys([ANN, BOB], ""), {"content-type": "application/json", **bearer()}
    found, find = list[Caller | None](), keys.find

    def note(given: Sequence[str]) -> Caller | None:
        found.append(find(given))
        return found[-1]

    monkeypatch.setattr(keys, "find", note)
    with capture_logs() as lines:
        async with site(redis_url, keys=keys) as here:
            async with here.client.request(CHAT, method="POST", headers=headers) as connection:
                await connection.send(b'{"messages":')
                await until(lambda: found)
                keys.replace(read_keys([BOB], ""))
                await connection.send(json.dumps(chat()["messages"]).encode() + b"}")
                await connection.send_complete()
            status, error = await error_of(await connection.as_response())
            assert status == 401 and "revoked" in error["message"] and error["code"] == "invalid_api_key"
    assert [line["status"] for line in request_lines(lines)] == [401] and not stand_in.requests()


async def test_pictures_of_the_pipeline_end_with_their_key(redis_url: str, stand_in: StandIn) -> None:
    keys = read_keys([ANN, BOB], "")
    async with site(redis_url, keys=keys) as here, here.reading("/v1/pipeline/events", bearer()) as connection:
        await received(connection, b"data:")
        keys.replace(read_keys([BOB], ""))
        await until(lambda: not here.frontend.pictures.is_reading)


async def test_without_keys_any_or_none_does(here: Site) -> None:
    for headers in ({}, bearer("anything"), {"x-api-key": "anything"}):
        assert (await here.post(chat(), headers=headers)).status_code == 200


async def test_a_key_is_in_no_log_line_and_only_its_hash_is_in_redis(redis_url: str, stand_in: StandIn) -> None:
    keys = with_limit(requests_per_minute=100, concurrent_requests=100)
    with capture_logs() as lines:
        async with site(redis_url, keys=keys) as here:
            await here.post(chat(), headers=bearer() | {"Idempotency-Key": "a-key"})
            await here.post(chat(stream=True), headers={"x-api-key": ANN})
            for wrong in (ANN + "x", "sk-wrong"):
                await here.post(chat(), headers=bearer(wrong))
    assert ANN not in str(lines) and "sk-wrong" not in str(lines)
    said = request_lines(lines)
    assert [line["status"] for line in said] == [200, 200, 401, 401]
    assert [line.get("key") for line in said] == 2 * [hash_of(ANN)[:8]] + 2 * [None]
    assert (said[2]["error"], said[2]["method"], said[2]["path"]) == ("invalid_api_key", "POST", CHAT)
    there = command(redis_url, "KEYS", "*")
    assert sum(hash_of(ANN).encode() in key for key in there) >= 2
    held = [command(redis_url, "DUMP", key) for key in there]
    assert all(ANN.encode() not in part for part in (*there, *held))


# how many


async def refused(response: Response) -> tuple[int, str, str, int]:
    """Return status, type, code and when to come again."""
    status, error = await error_of(response)
    return status, error["type"], error["code"], int(response.headers["Retry-After"])


@pytest.mark.parametrize("stream", [False, True])
async def test_beyond_the_requests_of_a_minute_429_says_when_there_is_one_more(
    redis_url: str, stand_in: StandIn, stream: bool
) -> None:
    keys = with_limit(requests_per_minute=2)
    async with site(redis_url, keys=keys) as here, site(redis_url, "web-1", keys=keys) as there:
        responses = [await place.post(chat(stream=stream), headers=bearer()) for place in (here, there, here, there)]
        assert [response.status_code for response in responses] == [200, 200, 429, 429]
        for response in responses[2:]:
            status, kind, code, again_s = await refused(response)
            assert (status, kind, code) == (429, "rate_limit_error", "rate_limit_exceeded")
            assert 1 <= again_s <= 30
        assert (await here.post(chat(), headers=bearer(BOB))).status_code == 200


async def test_beyond_the_requests_at_once_429_says_to_come_again_in_a_second(
    redis_url: str, stand_in: StandIn
) -> None:
    keys = with_limit(concurrent_requests=1)
    async with site(redis_url, keys=keys) as here, site(redis_url, "web-1", keys=keys) as there:
        async with here.connection(chat("silent", stream=True), bearer()):
            await until(stand_in.requests)
            for place in (here, there):
                answer = await refused(await place.post(chat(), headers=bearer()))
                assert answer == (429, "rate_limit_error", "rate_limit_exceeded", 1)
                assert (await place.post(chat(), headers=bearer(BOB))).status_code == 200
        await until(lambda: not here.is_busy)  # what its client left is cancelled
        for place in (here, there):
            assert (await place.post(chat(), headers=bearer())).status_code == 200


async def test_one_key_cannot_fill_the_log_for_the_others_and_is_told_when_it_may_go_on(
    redis_url: str, stand_in: StandIn
) -> None:
    keys = read_keys([ANN, BOB], "", ADMIN, max_log_bytes=400_000)
    sent = {"user": "u" * 60_000}
    async with site(redis_url, keys=keys) as here, site(redis_url, "web-1", keys=keys) as there:
        posts = [await place.post(chat(**sent), headers=bearer()) for place in (here, there, here, there)]
        assert [response.status_code for response in posts] == [200] * 4
        response = await there.post(chat(), headers=bearer() | {"Idempotency-Key": "x"})
        said = (await response.get_json())["error"]["message"]
        used = int(re.findall(r"has submitted (\d+) bytes", said)[0])
        assert 4 * 60_000 < used < 4 * 64_000 and "200000 bytes" in said and "Wait" in said
        status, kind, code, again_s = await refused(response)
        assert (status, kind, code) == (429, "rate_limit_error", "log_share_exceeded")
        assert 840 <= again_s <= 957
        assert len(command(redis_url, "KEYS", Names().idempotency("*"))) == 0
        for key in (BOB, ADMIN):
            assert (await here.post(chat(**sent), headers=bearer(key))).status_code == 200
        assert (await here.client.post("/tokenize", json={"prompt": "a"}, headers=bearer())).status_code == 429


async def test_one_that_comes_to_a_request_that_is_there_is_not_counted(redis_url: str, stand_in: StandIn) -> None:
    keys = with_limit(requests_per_minute=1, concurrent_requests=1)
    async with site(redis_url, keys=keys) as here, site(redis_url, "web-1", keys=keys) as there:
        posts = [await place.post(chat(), headers=bearer() | {"Idempotency-Key": "0"}) for place in (here, there, here)]
        posts.append(await here.post(chat(), headers=bearer()))
        assert [response.status_code for response in posts] == [200, 200, 200, 429]


# the official client


@asynccontextmanager
async def client_of(here: Site, key: str, *, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    """Give the official client of a site that listens."""
    listener, stop = open_listener("127.0.0.1", 0), asyncio.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    serving = asyncio.create_task(serve(here.app, listener, HttpConfig(DEFAULT_BODY_BYTES, 100, LogLimiter()), stop))
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=max_retries) as client:
            yield client
    finally:
        stop.set()
        await serving


def ask(client: openai.AsyncOpenAI) -> Any:
    return client.chat.completions.create(model=MODELS[0], messages=[{"role": "user", "content": "hello"}])


async def test_the_official_client_sees_what_is_wrong_with_its_key(redis_url: str, stand_in: StandIn) -> None:
    with capture_logs() as lines:
        async with site(redis_url, keys=read_keys([ANN], "")) as here:
            async with client_of(here, "sk-wrong", max_retries=5) as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await ask(client)
                assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
                assert "sk-wrong" not in caught.value.message
            async with client_of(here, ANN) as client:
                assert isinstance(await ask(client), ChatCompletion)
    statuses = [line["status"] for line in lines if line["event"] == "request"]
    assert statuses == [401, 200]  # it does not send it again


async def test_the_official_client_sees_a_limit_and_waits_for_as_long_as_it_is_told(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []

    keys = with_limit(requests_per_minute=1)
    async with site(redis_url, keys=keys) as here, client_of(here, ANN, max_retries=1) as client:

        async def sleep(seconds: float) -> None:
            waited_s.append(seconds)

        await ask(client)
        monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        again_s = int(caught.value.response.headers["Retry-After"])
        assert len(waited_s) == 1 and again_s <= waited_s[0] <= again_s + 5
