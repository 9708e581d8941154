"""A server in which something happens at every fail point, once at each, while clients ask: none of them notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import redis
from chaos.clients import Answer, Ask
from chaos.driver import LEASE_S, MAX_RUNNING, same_as, wrong_with
from chaos.quiet import ask_all, quiet_run, some_bodies
from chaos.scene import Look, Scene, together
from support.checkpoints import make_checkpoint
from support.selection import AT_NIGHT, by_night, rest_at_night
from support.servers import eventually

from pipeline.errors import LogError
from pipeline.names import GENERATE, STAGES, WEB
from pipeline.process.failpoints import FOLDER_VARIABLE, LOSES_A_REPLY, POINTS, VARIABLE

pytestmark = pytest.mark.slow

ELSEWHERE = {
    "web.on_disconnect": "its client has left: there is no answer to look at",
    "janitor.mid_sweep": "the requests have ended by their deadline",
    "generate.during_drain": "the server stops",
    **{name: "no request passes it" for name in POINTS if name.partition(".")[0] in ("archive", "forget")},
}
"""Points that no request passes which is answered in full."""
BY_DAY = frozenset(
    {
        "web.after_submit",
        "web.mid_stream",
        "tokenize.after_commit",
        "generate.mid_takeover",
        "generate.after_commit",
        "detokenize.after_commit",
    }
)
"""After the commit of each stage, and in a takeover: each death costs a start. At night all points. By day
`test_processes.py` kills workers before their commits."""
AT_START_ONLY = ("generate.after_lease", "generate.mid_takeover", "generate.after_takeover_committed")
"""Points that an engine passes once: there the first passing must count."""
NUM_TOKENS = 40
WAVE = 16
MOST_WAVES = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fail-points") / "model", "qwen3")


def points_for(action: str) -> list[str]:
    """Return the points at which a client must not notice *action*."""
    if action == "drop":
        return sorted(LOSES_A_REPLY - ELSEWHERE.keys())
    points = [name for name in POINTS if name not in ELSEWHERE and (AT_NIGHT or name in BY_DAY)]
    if action == "raise":  # in a frontend that is a bug, of which its client is told
        points = [name for name in points if not name.startswith(WEB)]
    return points


def armed(action: str, points: Sequence[str]) -> str:
    """Return the environment's text: in a stage one after the other, so that requests get on in between."""
    passings = {stage: itertools.count(2, 2) for stage in STAGES}
    texts = []
    for name in points:
        passing = 1 if name in AT_START_ONLY else next(passings[name.partition(".")[0]])
        texts.append(f"{name}={action}@{passing}")
    return ";".join(texts)


def killed_a_busy_engine(look: Look) -> bool:
    """Kill the engine if requests are in flight: what it does at a takeover, it does at no other time."""
    with contextlib.suppress(redis.RedisError, LogError, psutil.NoSuchProcess):
        for pid in look.ready(GENERATE):
            if look.in_flight()[0] > 4:
                psutil.Process(pid).kill()
                return True
    return False


async def wave(scene: Scene, asks: Sequence[Ask], *, kill: bool) -> tuple[list[Answer], bool]:
    """Return the answers, and whether a busy engine was killed: a wave may be over before one is seen."""
    asking = asyncio.ensure_future(ask_all(scene.url, asks, at_a_time=WAVE))
    with contextlib.closing(Look(scene.redis_url)) as look:
        killed = False
        while kill and not killed and not asking.done():
            killed = await asyncio.to_thread(killed_a_busy_engine, look)
            await asyncio.sleep(0.02)
    return await asking, killed


@pytest.mark.parametrize("action", rest_at_night(["exit", f"stop:{2 * LEASE_S}", "raise", "drop"]))
def test_every_answer_is_that_of_an_undisturbed_run_whatever_happens_at_every_fail_point(
    action: str, model: Path, tmp_path: Path
) -> None:
    """The undisturbed run is the last one: a point fires once, and by then all of them have."""
    points, fired = points_for(action), tmp_path / "fired"
    fired.mkdir()
    environment = {VARIABLE: armed(action, points), FOLDER_VARIABLE: str(fired)}
    bodies = some_bodies(by_night(WAVE, 40), NUM_TOKENS, 0)
    which = itertools.cycle(range(len(bodies)))
    body_of: dict[str, int] = {}
    answers: list[Answer] = []
    was_killed = False
    with (
        together(tmp_path, model, lease_s=LEASE_S, max_running=MAX_RUNNING, environment=environment) as scene,
        contextlib.closing(Look(scene.redis_url)) as look,
    ):
        for number in range(MOST_WAVES):
            asks = []
            for place, index in zip(range(WAVE), which, strict=False):
                asks.append(Ask(f"wave-{number}-{place}", bodies[index]))
                body_of[asks[-1].key] = index
            of_wave, killed = asyncio.run(wave(scene, asks, kill=number > 0 and not was_killed))
            answers += of_wave
            was_killed |= killed
            missing = set(points) - {file.name for file in fired.iterdir()}
            if number > 1 and was_killed and not missing:
                break
        assert was_killed, "no wave had an engine with requests in hand"
        assert not missing, f"passed too seldom to fire: {sorted(missing)}"
        undisturbed = quiet_run(scene.url, scene.redis_url, model, bodies)
        histories = look.histories()
        problems = [
            f"{answer.ask.key}: {problem}"
            for answer in answers
            if (story := undisturbed.get(body_of[answer.ask.key])) is not None
            for problem in wrong_with(answer, histories.get(answer.uid, []), same_as(story))
        ]
        assert undisturbed
        assert not problems, (problems, scene.errors())
        eventually(lambda: not look.leftovers(), f"nothing is left: {look.leftovers()}")
