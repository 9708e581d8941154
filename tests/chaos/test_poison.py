"""A request that kills its worker among fifty others: it is found and fails, and the others never know."""

from __future__ import annotations

import asyncio
import json
import random
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from support.checkpoints import make_checkpoint
from support.redis_servers import running_server
from support.selection import rest_at_night
from support.servers import ROOT, Command, free_port, run_command, wait_until_ready
from support.streams import assert_nothing_is_left, body

from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB, Names
from pipeline.process.redis_server import find_binary
from pipeline.views.history import copied_history, story

pytestmark = pytest.mark.slow

POISONED = Path(__file__).with_name("poisoned.py")
NUM_OTHERS = 50
NUM_TOKENS = 60
MOST_DEATHS = 5
CASES = {
    "the engine, in the midst of the answer": (GENERATE, 40),
    "the engine, with its prompt": (GENERATE, 0),
    "the tokenizer, at once": (TOKENIZE, 0),
    "the detokenizer, in the midst of the answer": (DETOKENIZE, 40),
}


def drawn_text() -> str:
    return "".join(random.SystemRandom().choices(string.ascii_lowercase, k=12))


def start(
    stage: str, redis_url: str, folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Command:
    program = (sys.executable, str(POISONED if environment else ROOT / "minisgl.py"))
    where = ["--redis-url", redis_url, "--lease", "1"]
    return run_command(["stage", stage, *where, *flags], folder / stage, program=program, environment=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(params=rest_at_night(CASES, first=0))
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    return CASES[request.param]


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_server(Path(find_binary()), tmp_path) as server:
        yield server.url


async def ask_all(url: str, texts: list[str]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=180, limits=limits) as client:
        bodies = [body(f"Tell me all about {text}.", max_tokens=NUM_TOKENS) for text in texts]
        return await asyncio.gather(*(client.post(f"{url}/v1/chat/completions", json=each) for each in bodies))


def test_a_request_that_kills_its_worker_fails_alone(
    case: tuple[str, int], model: Path, redis_url: str, tmp_path: Path
) -> None:
    stage, num_tokens = case
    poison = drawn_text()
    texts = [f"number {number}" for number in range(NUM_OTHERS)]
    place = random.SystemRandom().randrange(NUM_OTHERS)
    texts.insert(place, poison)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    deadly = {"POISON": poison, "POISON_TOKENS": str(num_tokens)}
    commands = {WEB: start(WEB, redis_url, tmp_path, "--port", str(port))}
    try:
        for each in (TOKENIZE, GENERATE, DETOKENIZE):
            flags = ["--model", str(model)]
            commands[each] = start(each, redis_url, tmp_path, *flags, environment=deadly if each == stage else None)
        wait_until_ready(url, list(commands.values()))
        responses = asyncio.run(ask_all(url, texts))
        log = RedisLog(redis_url, Names())

        poisoned = responses.pop(place)
        assert (poisoned.status_code, poisoned.json()["error"]["code"]) == (500, "poisonous"), poisoned.text
        assert [response.status_code for response in responses] == [200] * NUM_OTHERS
        usages = [response.json()["usage"]["completion_tokens"] for response in responses]
        assert usages == [NUM_TOKENS] * NUM_OTHERS

        num_deaths = {each: len(command.log_lines("worker_died")) for each, command in commands.items()}
        assert 0 < num_deaths.pop(stage) <= MOST_DEATHS
        assert not any(num_deaths.values())

        (letter,) = log.dead_letters(10)
        uid = poisoned.headers["x-minisgl-uid"]
        assert (letter.fields["uid"], letter.fields["stage"]) == (uid, stage)
        assert int(letter.fields["deaths"]) <= MOST_DEATHS
        traced = story(uid, copied_history(letter))
        assert (traced["state"], traced["error"]["code"]) == ("failed", "poisonous")
        assert traced["completion_tokens"] == 0 or stage != TOKENIZE
        assert_nothing_is_left(log)
        log.close()

        listed = subprocess.run(
            [sys.executable, str(ROOT / "minisgl.py"), "dead", "ls", "--json", "--redis-url", redis_url],
            capture_output=True,
            text=True,
            check=True,
        )
        assert uid in json.dumps(json.loads(listed.stdout))
        assert httpx.post(f"{url}/v1/chat/completions", json=body("this", max_tokens=3), timeout=60).status_code == 200
    finally:
        for command in commands.values():
            command.stop()
