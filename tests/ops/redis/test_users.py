"""ops/redis/users.acl: each role can do its work and nothing else, on every version of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from support.lived_requests import LivedRequests
from support.redis_servers import STARTED, Servers, running_server, users_with_password
from support.web_site import site

from minisgl import main
from pipeline.errors import LogUnavailable
from pipeline.log.address import connect
from pipeline.log.operation import script_text
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, STAGES, TOKENIZE, WEB, Names

ROOT = Path(__file__).resolve().parents[3]
ACL = (ROOT / "ops" / "redis" / "users.acl").read_text()
RIGHTS: Mapping[str, frozenset[str]] = {
    words[1]: frozenset(words[2:]) for words in map(str.split, ACL.splitlines()) if words[0] == "user"
}
ROLES = tuple(role for role in RIGHTS if role != "default")
PASSWORD = "secret"
COMMITS = ROOT / "pipeline" / "log" / "commits"
NAMES = Names()

SLOT = ("acquire", "announce", "renew", "release")
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    WEB: (*SLOT, "submit", "end", "abandon", "reading", "flush", "open_replies", "drop_dead"),
    TOKENIZE: (*SLOT, "prepare", "claim", "retry", "tokenized", "end", "bury", "leave"),
    GENERATE: (*SLOT, "prepare", "claim", "step", "take", "end", "bury", "leave", "form", "joined"),
    DETOKENIZE: (*SLOT, "prepare", "claim", "retry", "produced", "end", "bury"),
    "operator": ("import", "end", "erase", "purge", "flush", "drop_dead"),
    ARCHIVE: (*SLOT, "prepare", "claim", "retry", "open_archive", "archived", "bury", "recount", "recounted"),
    "minisgl": tuple(path.stem for path in COMMITS.glob("*.lua") if path.stem != "lib"),
}
"""Which commits each role may call. An operator also calls `submit`, with neither key nor quota: see below."""


@pytest.fixture(scope="module", params=STARTED)
def guarded(
    redis_servers: Servers, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server with these users, without any."""
    folder = tmp_path_factory.mktemp("guarded")
    binary = redis_servers.binary(request.param)
    with running_server(binary, folder, "--aclfile", users_with_password(folder, PASSWORD)) as server:
        yield server.url


def as_user(url: str, user: str) -> str:
    return url.replace("unix://", f"unix://{user}:{PASSWORD}@")


def test_there_is_a_user_for_each_stage_one_for_all_and_one_for_people() -> None:
    assert set(ROLES) == {*STAGES, ARCHIVE, "operator", "scaler", "minisgl"}
    # Nobody can log in as this user, but some versions load their append-only file with its rights.
    assert RIGHTS["default"] == {"reset", "off", "~*", "&*", "+@all"}
    assert all({"reset", "on"} < rights for role, rights in RIGHTS.items() if role != "default")


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_whole_categories_or_all_keys(role: str) -> None:
    for right in RIGHTS[role] - {"reset", "on"}:
        assert re.fullmatch(r"~\{minisgl:0\}:.+|\+[a-z|]+", right), right


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_role_may_run_every_command_of_its_commits(role: str) -> None:
    for script in SCRIPTS[role]:
        commands = re.findall(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?", script_text(script))
        assert commands, script
        for command, sub in commands:
            name = command.lower()
            right = f"+{name}|{sub.lower()}" if name in ("xgroup", "xinfo") else f"+{name}"
            assert right in RIGHTS[role], f"{script}.lua: {command} {sub}"


def test_a_scaler_reads_how_long_the_two_queues_are(guarded: str) -> None:
    with connect(as_user(guarded, "scaler")) as client:
        assert client.ping()
        assert [client.xlen(key) for key in (NAMES.submitted, NAMES.tokenized)] == [0, 0]
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.xrange(NAMES.submitted)


def test_nobody_gets_in_without_a_password(guarded: str) -> None:
    with connect(guarded) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    with connect(guarded.replace("unix://", "unix://web:@")) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


FORBIDDEN = (
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("KEYS", "*"),
    ("SAVE",),
    ("SHUTDOWN", "NOSAVE"),
    ("MONITOR",),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("REPLICAOF", "NO", "ONE"),
    ("MODULE", "LIST"),
    ("DUMP", NAMES.live),
    ("RENAME", NAMES.live, NAMES.dead),
    ("XTRIM", "other", "MAXLEN", "0"),
    ("XADD", NAMES.request("u").replace("minisgl", "other"), "*", "a", "b"),
    ("GET", "foreign"),
    ("SET", "foreign", "1"),
    ("PUBLISH", "channel", "text"),
)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("words", FORBIDDEN, ids=" ".join)
def test_no_role_may_do_what_is_not_its_work(guarded: str, role: str, words: tuple[str, ...]) -> None:
    quoted = ", ".join(f"'{word}'" for word in words)
    with connect(as_user(guarded, role)) as client:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*words)
        refused = r"can't (run|access)|not allowed from script|ACL failure|no permissions to run the 'eval'"
        with pytest.raises(redis.exceptions.ResponseError, match=refused):
            client.execute_command("EVAL", f"return redis.call({quoted})", 0)


OTHERS = (
    (TOKENIZE, "GET", NAMES.owner("generate-0")),
    (TOKENIZE, "XADD", NAMES.steps("generate-0"), "*", "a", "b"),
    (TOKENIZE, "GET", NAMES.limit("k")),
    (TOKENIZE, "GET", NAMES.idempotency("k")),
    (GENERATE, "SET", NAMES.owner("tokenize-0"), "1"),
    (GENERATE, "SET", NAMES.owner("detokenize-0"), "1"),
    (GENERATE, "SADD", NAMES.reader("u"), "1"),
    (DETOKENIZE, "SET", NAMES.owner("generate-0"), "1"),
    (DETOKENIZE, "XADD", NAMES.tokenized, "*", "a", "b"),
    (DETOKENIZE, "SET", NAMES.status("web-0"), "1"),
    (ARCHIVE, "XADD", NAMES.submitted, "*", "a", "b"),
    (ARCHIVE, "SET", NAMES.owner("generate-0"), "1"),
    (ARCHIVE, "GET", NAMES.idempotency("k")),
    (WEB, "SET", NAMES.serving("generate"), "1"),
    (WEB, "XADD", NAMES.ranks("0"), "*", "a", "b"),
    (WEB, "XREADGROUP", "GROUP", "tokenize", "c", "STREAMS", NAMES.submitted, ">"),
    (WEB, "XGROUP", "DESTROY", NAMES.submitted, "tokenize"),
    (TOKENIZE, "XGROUP", "DESTROY", NAMES.submitted, "tokenize"),
    ("operator", "SET", NAMES.owner("generate-0"), "1"),
    ("operator", "SADD", NAMES.reader("u"), "1"),
    ("operator", "DEL", NAMES.live),
    ("minisgl", "XGROUP", "DESTROY", NAMES.submitted, "tokenize"),
)


@pytest.mark.parametrize("case", OTHERS, ids=" ".join)
def test_no_role_does_the_work_of_another(guarded: str, case: tuple[str, ...]) -> None:
    role, *words = case
    with connect(as_user(guarded, role)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*words)


def test_an_operator_looks_and_deals_with_dead_letters(
    guarded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(RedisLog(as_user(guarded, "minisgl"), NAMES)) as log:
        uid = LivedRequests(log).dead()
    where = ["--redis-url", as_user(guarded, "operator")]
    for line in (["trace", uid], ["top", "--once"], ["dead", "ls"], ["dead", "show", uid], ["dead", "requeue", uid]):
        assert main([*line, *where]) == 0, capsys.readouterr().err
    assert uid in capsys.readouterr().out
    file = str(tmp_path / "requests.zst")
    assert main(["replay", "dump", file, *where]) == 0, capsys.readouterr().err
    with connect(as_user(guarded, "admin")) as client:
        client.execute_command("FLUSHALL")
    assert main(["replay", "import", file, *where]) == 0, capsys.readouterr().err
    assert main(["trace", uid, *where]) == 0, capsys.readouterr().err
    assert main(["replay", "forget", uid, *where]) == 0, capsys.readouterr().err
    with connect(as_user(guarded, "admin")) as client:
        client.execute_command("FLUSHALL")


NEW_ROUTES = (
    "GET /v1/requests",
    "GET /v1/requests/{uid}",
    "GET /v1/requests/{uid}/steps",
    "GET /v1/pipeline/events?pictures=1",
    "GET /v1/dead",
    "POST /v1/dead/{uid}/requeue",
)


def test_a_frontend_shows_the_pipeline_and_its_requests_and_sends_dead_letters_again(guarded: str) -> None:
    with contextlib.closing(RedisLog(as_user(guarded, "minisgl"), NAMES)) as log:
        uid = LivedRequests(log).dead()

    async def ask() -> None:
        async with site(as_user(guarded, WEB), ready=False) as here:
            for route in NEW_ROUTES:
                method, _, path = route.format(uid=uid).partition(" ")
                client: Any = here.client
                response = await client.open(path, method=method)
                text = await response.get_data(as_text=True)
                assert response.status_code == 200 and uid in text, (route, text)

    asyncio.run(ask())
    with connect(as_user(guarded, "admin")) as client:
        client.execute_command("FLUSHALL")


def test_with_the_rights_of_an_older_version_the_live_page_says_what_is_missing(guarded: str) -> None:
    rights = RIGHTS[WEB] - {"+scan", "~{minisgl:0}:lease:*", "~{minisgl:0}:owner:*", "reset"}
    with connect(as_user(guarded, "admin")) as client:
        client.execute_command("ACL", "SETUSER", "older", "reset", f">{PASSWORD}", *rights)

    async def ask() -> str:
        async with site(as_user(guarded, "older"), ready=False) as here:
            response = await here.get("/v1/pipeline/events?pictures=1")
            return str(await response.get_data(as_text=True))

    assert "give the user the rights that ops/redis/users.acl has for its role" in asyncio.run(ask())


def test_from_redis_7_on_a_frontend_may_only_read_what_is_of_other_workers(guarded: str) -> None:
    readme = (ROOT / "ops" / "redis" / "README.md").read_text()
    (before, after) = re.findall(r"sed -i '/\^user web /s/(.*?)/(%R~.*?)/g'", readme)[0]
    pattern = re.sub(r"\\([(){}|])|([{}])", lambda found: found[1] or f"\\{found[2]}", before)
    web = next(line for line in ACL.splitlines() if line.startswith("user web "))
    rights = re.sub(pattern, after, web).split()[3:]
    assert sum(right.startswith("%R~") for right in rights) == 3
    with connect(as_user(guarded, "admin")) as client:
        if int(client.info("server")["redis_version"].partition(".")[0]) < 7:
            pytest.skip("Redis 6.2 has no keys that can only be read")
        client.execute_command("ACL", "SETUSER", "careful", "reset", "on", f">{PASSWORD}", *rights)
    with connect(as_user(guarded, "careful")) as client:
        for key in (NAMES.owner("generate-0"), NAMES.lease("generate-0"), NAMES.status("generate-0")):
            client.execute_command("GET", key)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command("SET", key, "1")
        client.execute_command("SET", NAMES.owner("web-0"), "1")
        client.execute_command("DEL", NAMES.owner("web-0"))


def test_a_log_that_may_not_do_its_work_says_which_rights_are_missing(guarded: str) -> None:
    with connect(as_user(guarded, "admin")) as client:
        client.execute_command("ACL", "SETUSER", "crippled", "reset", "on", f">{PASSWORD}", "~*", "+@all", "-xgroup")
    for user in ("operator", "crippled"):
        refused = pytest.raises(LogUnavailable, match=r"give the user the rights that ops/redis/users\.acl has")
        with contextlib.closing(RedisLog(as_user(guarded, user), NAMES)) as log, refused:
            log.prepare(Inbox.submitted(NAMES))
