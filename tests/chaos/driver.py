"""Kill and stop every process of a running server while it serves, and see that no request notices.

    make chaos                      the real model: every answer must be that of a run that nobody disturbed
    make chaos ARGS="--tp 2"        the same with an engine of two ranks; rank 0 is the engine
    make chaos ARGS="--chain"       two of each stage, and a model whose tokens certify themselves

What was disturbed and what came of it is printed; the exit code is 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias

import aiohttp
import psutil
import redis
from chaos.chain_model import CHAIN_TOKENS, check_chain, make_chain_model, text_of, tokens_of
from chaos.clients import Answer, Ask, stream
from chaos.quiet import Story, quiet_run, read_story, some_bodies
from chaos.scene import ROLES, Look, Scene, apart, roles_of, together
from support.checkpoints import make_checkpoint
from support.servers import eventually

from pipeline.errors import LogError, UndecodableEvent
from pipeline.events import Submitted, decode
from pipeline.log.protocol import Entry
from pipeline.names import GENERATE, SEAL, STAGES, TOKENIZE, parse_id, rank_of
from web.wire.endpoints import CHAT_ENDPOINT

Action = Literal["kill", "stop"]
ACTIONS: Final[tuple[Action, Action]] = ("kill", "stop")
LEASE_S: Final = 1.0
STOP_S: Final = 2.5 * LEASE_S
RANK_STOP_S: Final = 6 * LEASE_S
"""So long that its engine gives a rank up."""
MAX_RUNNING: Final = 16
"""Requests that all engines together compute at once: of a larger burst the rest waits without tokens."""
ENGINE_BURST: Final = 36
FEWEST: Final = 10
"""When an engine is hit, at least so many requests have tokens and so many have none."""
LAYERS: Final = 8
"""Of the real model: steps slow enough that a burst is in flight for a second."""
MOMENT_S: Final = 60.0
"""How long the moment for a hit is waited for."""
SETTLE_S: Final = 60.0
POLL_S: Final = 0.005


Judge: TypeAlias = Callable[[Story], str]
"""Says what is wrong with the tokens of a request; empty when nothing is."""
MakeRequest: TypeAlias = Callable[[int], tuple[Ask, Judge]]
"""Makes request number i, and says what must come of it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run is like."""

    requests: int = 1000
    """At least; more where a burst went by before the moment for a hit."""
    tokens: int = 50
    """Tokens of each answer."""
    turns: int = 6
    """How often each role is hit, killed and stopped in turn."""
    every_s: float = 3.0
    """Time between two hits, at least."""
    seed: int = 0
    chain: bool = False
    overlap: str = "off"
    """The engine's flag."""
    roles: tuple[str, ...] = ROLES
    actions: tuple[Action, ...] = ACTIONS
    num_ranks: int = 1
    """Of the engine."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One thing that is done to a worker, with so many requests begun right before it."""

    role: str
    action: Action
    burst: int


@dataclass(slots=True)
class Tally:
    """What was done, and what was seen of it."""

    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    marks: Counter[str] = field(default_factory=Counter)
    """How often each kind of event is in the histories."""
    seconds: float = 0.0


def planned_hits(settings: Settings) -> list[Hit]:
    """Return who is hit and how, each role in turn."""
    pairs = [
        (role, settings.actions[(turn + place) % len(settings.actions)])
        for turn in range(settings.turns)
        for place, role in enumerate(settings.roles)
    ]
    num_engine = sum(_computes(role) for role, _ in pairs)
    others = len(pairs) - num_engine
    for_others = (settings.requests - num_engine * ENGINE_BURST) // max(others, 1)
    if pairs and for_others < 2:
        raise SystemExit(f"--requests {settings.requests}: too few for {len(pairs)} hits; ask for more or fewer turns")
    return [Hit(role, action, ENGINE_BURST if _computes(role) else for_others) for role, action in pairs]


def _computes(role: str) -> bool:
    """Whether it is the role of an engine or of one of its ranks."""
    return role == GENERATE or rank_of(role) is not None


class Population:
    """The clients of one run."""

    def __init__(self, session: aiohttp.ClientSession, url: str, make: MakeRequest) -> None:
        self._session = session
        self._url = url
        self._make = make
        self._tasks: list[asyncio.Task[Answer]] = []
        self.judges: dict[str, Judge] = {}
        """By the keys of the asks."""

    @property
    def num_listening(self) -> int:
        return sum(not task.done() for task in self._tasks)

    def begin(self, count: int) -> None:
        """Let *count* more clients ask."""
        for _ in range(count):
            ask, self.judges[ask.key] = self._make(len(self._tasks))
            self._tasks.append(asyncio.create_task(stream(self._session, self._url, ask)))

    def begin_up_to(self, count: int) -> None:
        """Let as many more clients ask as make *count* in all."""
        self.begin(max(0, count - len(self._tasks)))

    async def answers(self, timeout_s: float) -> tuple[list[Answer], int]:
        """Return all answers, and how many clients were still waiting for theirs."""
        done, hanging = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        return [task.result() for task in done], len(hanging)


async def disturb(scene: Scene, settings: Settings, make: MakeRequest) -> tuple[Tally, Mapping[str, Judge]]:
    """Ask, hit, and wait for all answers; return what came of it, and what must be true of each answer."""
    tally = Tally()
    began_s = time.monotonic()
    no_limit = aiohttp.ClientTimeout(total=None)
    watch = asyncio.create_task(_watch(scene, tally))
    async with aiohttp.ClientSession(timeout=no_limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        population = Population(session, scene.url, make)
        with contextlib.closing(Look(scene.redis_url)) as look:
            draw = random.Random(settings.seed)
            for hit in planned_hits(settings):
                begun_s = time.monotonic()
                await _hit(hit, look, population, draw, tally)
                await asyncio.sleep(max(0.0, begun_s + settings.every_s - time.monotonic()))
        population.begin_up_to(settings.requests)
        tally.answers, num_hanging = await population.answers(SETTLE_S + settings.requests / 10)
    if num_hanging:
        tally.problems.append(f"{num_hanging} clients are still waiting for the end of their stream")
    kills = Counter({role: tally.hits[role, "kill"] for role in scene.roles})
    if not await _eventually(lambda: tally.restarts >= kills):
        tally.problems.append(f"killed {dict(kills)}, but came back {dict(tally.restarts)}")
    watch.cancel()
    await asyncio.wait([watch])
    tally.seconds = time.monotonic() - began_s
    return tally, population.judges


async def _hit(hit: Hit, look: Look, population: Population, draw: random.Random, tally: Tally) -> None:
    population.begin(hit.burst)
    found = await _moment(hit, look, population, draw)
    if found is None:
        tally.problems.append(f"the moment to {hit.action} {hit.role} did not come within {MOMENT_S:.0f} s")
        return
    victim, with_tokens, without = found
    tally.hits[hit.role, hit.action] += 1
    say(f"{hit.action} {hit.role} (process {victim.pid}): {with_tokens} live with tokens, {without} without")
    if hit.action == "kill":
        victim.kill()
        return
    victim.suspend()
    try:
        await asyncio.sleep(STOP_S if rank_of(hit.role) is None else RANK_STOP_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # its supervisor ended it
            victim.resume()


async def _moment(
    hit: Hit, look: Look, population: Population, draw: random.Random
) -> tuple[psutil.Process, int, int] | None:
    """Wait until the victim is ready and enough is in flight; begin more requests when a burst went by."""
    few = hit.burst // 3
    needed = (FEWEST, FEWEST) if _computes(hit.role) else (0, few) if hit.role == TOKENIZE else (few, 0)
    deadline_s = time.monotonic() + MOMENT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(redis.RedisError, LogError, psutil.NoSuchProcess):
            pids = await asyncio.to_thread(look.ready, hit.role)
            victim = psutil.Process(draw.choice(pids)) if pids else None
            with_tokens, without = await asyncio.to_thread(look.in_flight)
            if victim is not None and with_tokens >= needed[0] and without >= needed[1]:
                return victim, with_tokens, without
            if population.num_listening < sum(needed):
                population.begin(hit.burst)
        await asyncio.sleep(POLL_S)
    return None


async def _watch(scene: Scene, tally: Tally) -> NoReturn:
    """Count the processes that come back, and keep alive what nobody else does."""
    seen: dict[str, set[int]] = {}
    with contextlib.closing(Look(scene.redis_url)) as look:
        while True:
            scene.tend()
            for role in scene.roles:
                with contextlib.suppress(redis.RedisError, LogError):
                    ready = set(await asyncio.to_thread(look.ready, role))
                    tally.restarts[role] += len(ready - seen.setdefault(role, ready))
                    seen[role] |= ready
            await asyncio.sleep(0.1)


async def _eventually(check: Callable[[], bool], timeout_s: float = SETTLE_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.1)
    return True


# what must be true afterwards


def wrong_with(answer: Answer, history: Sequence[Entry], judge: Judge) -> list[str]:
    """Return what is wrong with one request: with what its client saw, and with what the log holds."""
    if answer.refusal or not answer.done:
        return [f"the client was told {answer.refusal or 'no end'}"]
    found: list[str] = []
    if len(answer.ends) != 1:
        found.append(f"the client saw {len(answer.ends)} ends: {answer.ends}")
    if any(parse_id(later) <= parse_id(earlier) for earlier, later in pairwise(answer.ids)):
        found.append(f"the ids do not increase: {answer.ids}")
    if answer.ids[-1:] != [SEAL]:
        found.append(f"the last id is {answer.ids[-1:]}, expected the seal")
    try:
        story = read_story(history)
    except UndecodableEvent as error:
        return [*found, f"the history is wrong: {error}"]
    if answer.text != story.text:
        found.append(f"the client has the text {answer.text!r}, but the history {story.text!r}")
    if problem := judge(story):
        found.append(problem)
    return found


def same_as(expected: Story) -> Judge:
    """Expect the tokens and the text of a run that nobody disturbed."""

    def judge(story: Story) -> str:
        if story.tokens == expected.tokens and story.text == expected.text:
            return ""
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(story.tokens, expected.tokens, strict=False))))
        ours, theirs = story.tokens[same : same + 5], expected.tokens[same : same + 5]
        return f"from token {same + 1} on the answer is {ours} .., undisturbed {theirs} .."

    return judge


def one_chain(prompt_ids: Sequence[int], num_tokens: int) -> Judge:
    """Expect so many tokens that are one chain behind the prompt."""

    def judge(story: Story) -> str:
        broken = check_chain(prompt_ids, story.tokens)
        if broken is not None:
            return f"the chain is broken at token {broken + 1} of {len(story.tokens)}"
        if tokens_of(story.text) != list(story.tokens):
            return f"the text {story.text!r} is not that of the tokens"
        return "" if len(story.tokens) == num_tokens else f"{len(story.tokens)} tokens, expected {num_tokens}"

    return judge


async def check(scene: Scene, settings: Settings, tally: Tally, judges: Mapping[str, Judge]) -> None:
    """Add to the tally's problems whatever is wrong; *judges* are by the asks' keys."""
    tally.problems += [
        f"{role}: no {action}" for role in settings.roles for action in settings.actions if not tally.hits[role, action]
    ]
    with contextlib.closing(Look(scene.redis_url)) as look:
        if not await _eventually(lambda: not look.leftovers(), 20.0):
            tally.problems += look.leftovers()
        histories = {uid: history for uid, history in look.histories().items() if _is_chat(history)}
    tally.marks = Counter(entry.fields["kind"] for history in histories.values() for entry in history)
    for answer in tally.answers:
        for problem in wrong_with(answer, histories.get(answer.uid, []), judges[answer.ask.key]):
            tally.problems.append(f"{answer.ask.key} {answer.uid}: {problem}")
    answered = Counter(answer.uid for answer in tally.answers)
    tally.problems += [f"{uid} answered {count} clients" for uid, count in answered.items() if count > 1]
    tally.problems += [f"{uid} has no client: it was taken twice" for uid in histories.keys() - answered.keys()]


def _is_chat(history: Sequence[Entry]) -> bool:
    """Return whether a client asked for it: frontends ask, too, to see whether they are ready."""
    submitted = decode(history[0].fields)
    return isinstance(submitted, Submitted) and submitted.endpoint == CHAT_ENDPOINT


# the two kinds of run


def run_real(settings: Settings, folder: Path) -> Tally:
    """Disturb `minisgl serve` with a small random model, and compare with a run that nobody disturbed."""
    model = make_checkpoint(folder / "model", "qwen3", num_layers=LAYERS)
    different = min(settings.requests, 30 + settings.requests // 8)  # the rest asks again what somebody has asked
    bodies = some_bodies(different, settings.tokens, settings.seed)
    with together(folder / "quiet", model, lease_s=LEASE_S, max_running=MAX_RUNNING) as scene:
        stories = quiet_run(scene.url, scene.redis_url, model, bodies)
    say(f"undisturbed: {different} requests, of which {len(stories)} do not depend on rounding")
    which = list(stories)

    def make(number: int) -> tuple[Ask, Judge]:
        index = random.Random(settings.seed + number).choice(which)
        return Ask(f"chaos-{number}", bodies[index]), same_as(stories[index])

    more: dict[str, Any] = {"overlap": settings.overlap, "num_ranks": settings.num_ranks}
    with together(folder / "chaos", model, lease_s=LEASE_S, max_running=MAX_RUNNING, **more) as scene:
        return _disturb_and_check(scene, settings, make)


def run_chain(settings: Settings, folder: Path) -> Tally:
    """Disturb stages apart, two workers of each, and check the chains."""
    model = make_chain_model(folder / "model")
    draw = random.Random(settings.seed)
    heads = [[draw.randrange(CHAIN_TOKENS) for _ in range(60)] for _ in range(4)]

    def make(number: int) -> tuple[Ask, Judge]:
        prompt = [*draw.choice(heads), *(draw.randrange(CHAIN_TOKENS) for _ in range(draw.randrange(2, 40)))]
        body = {"prompt": text_of(prompt), "max_tokens": settings.tokens, "ignore_eos": True}
        return Ask(f"chaos-{number}", body), one_chain(prompt, settings.tokens)

    chaos = apart(folder / "chaos", model, lease_s=LEASE_S, max_running=MAX_RUNNING // 2, overlap=settings.overlap)
    with chaos as scene:
        return _disturb_and_check(scene, settings, make)


def _disturb_and_check(scene: Scene, settings: Settings, make: MakeRequest) -> Tally:
    async def both() -> Tally:
        tally, judges = await disturb(scene, settings, make)
        await check(scene, settings, tally, judges)
        return tally

    with contextlib.closing(Look(scene.redis_url)) as look:
        eventually(lambda: all(len(look.ready(role)) >= scene.replicas for role in STAGES), "everybody is ready")
    tally = asyncio.run(both())
    report(scene, tally)
    return tally


def report(scene: Scene, tally: Tally) -> None:
    """Print what was done and what came of it."""
    for role in scene.roles:
        counts = f"{tally.hits[role, 'kill']} kills, {tally.hits[role, 'stop']} stops, {tally.restarts[role]} restarts"
        say(f"{role:>11}: {counts}")
    answers = tally.answers
    say(
        f"{len(answers)} answers in {tally.seconds:.0f} s; {sum(one.num_resumed for one in answers)} times a client "
        f"went on, {sum(max(0, one.num_asked - 1) for one in answers)} times one asked again"
    )
    silences_s = sorted(one.longest_silence_s for one in answers) or [0.0]
    half = len(silences_s) // 2
    say(f"longest silence within a stream: median {silences_s[half]:.2f} s, worst {silences_s[-1]:.1f} s")
    taken_over, preempted = tally.marks["taken_over"], tally.marks["preempted"]
    say(f"{tally.marks['tokens']} tokens; {taken_over} times an engine went on for another, {preempted} preempted")
    for event, count in scene.errors().most_common():
        say(f"    logged {count} times: {event}")
    for problem in tally.problems[:50]:
        say(f"WRONG {problem}")
    say(f"{len(tally.problems)} problems")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run once; return 0 when nothing is wrong."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=usual.requests)
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each answer")
    parser.add_argument("--turns", type=int, default=usual.turns, help="how often each role is hit")
    parser.add_argument("--every", type=float, default=usual.every_s, help="seconds between hits")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--tp", type=int, default=usual.num_ranks, help="ranks of the engine; not with --chain")
    parser.add_argument("--roles", nargs="*", help=f"who is hit: {', '.join(ROLES)}; with --tp also rank-1 .. [all]")
    parser.add_argument("--actions", nargs="*", choices=ACTIONS, default=ACTIONS)
    parser.add_argument("--chain", action="store_true", help="two of each stage, and tokens that certify themselves")
    parser.add_argument("--overlap", choices=("on", "off"), default=usual.overlap, help="as of minisgl serve")
    parser.add_argument("--folder", type=Path, help="of logs and data [a new one, removed when all is well]")
    given = parser.parse_args(arguments)
    if given.chain and given.tp > 1:
        parser.error("--chain: its engines have no ranks; leave out --tp")
    every = roles_of(given.tp)
    roles, actions = tuple(every if given.roles is None else given.roles), tuple(given.actions)
    if unknown := set(roles) - set(every):
        parser.error(f"--roles: {', '.join(sorted(unknown))}: expected some of {', '.join(every)}")
    numbers = given.requests, given.tokens, given.turns, given.every, given.seed
    settings = Settings(*numbers, given.chain, given.overlap, roles, actions, given.tp)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the servers
    folder = given.folder or Path(tempfile.mkdtemp(prefix="minisgl-chaos-"))
    tally = (run_chain if settings.chain else run_real)(settings, folder)
    if tally.problems:
        say(f"logs and data are in {folder}")
    elif given.folder is None:
        shutil.rmtree(folder)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
