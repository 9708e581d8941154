"""A running server as the chaos driver sees it: its processes by role, what is in flight, what is left at the end."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
import redis
from support.servers import ROOT, Command, free_port, run_command, wait_until_ready

from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB, Names, parse_id, rank_stage
from pipeline.process.redis_server import EmbeddedRedis
from pipeline.stage.slots import Status, read_statuses

REDIS: Final = "redis"
ROLES: Final = (TOKENIZE, GENERATE, DETOKENIZE, WEB, REDIS)
CHAIN_ENGINE: Final = Path(__file__).with_name("chain_engine.py")
PAGE_SIZE: Final = 16
"""Small, so that prompts share several pages and an answer begins new ones."""

NUM_PAGES: Final = 48
"""Of an engine that makes chains: too few for all that it runs, so that some are preempted."""


def roles_of(num_ranks: int) -> tuple[str, ...]:
    """Return the roles where an engine has so many ranks. Rank 0 is the engine."""
    return (*ROLES, *map(rank_stage, range(1, num_ranks)))


@dataclass(frozen=True, slots=True)
class Scene:
    """A server, or stages apart."""

    url: str
    redis_url: str
    commands: Sequence[Command]
    replicas: int
    """Workers of each stage."""
    tend: Callable[[], None]
    """Keeps alive what nobody else does."""
    roles: tuple[str, ...] = ROLES
    """Whose processes there are."""

    def errors(self) -> Counter[str]:
        """Return how often each warning and error was logged."""
        found: Counter[str] = Counter()
        for line in itertools.chain.from_iterable(command.output.splitlines() for command in self.commands):
            with contextlib.suppress(orjson.JSONDecodeError):
                said = orjson.loads(line)
                if said["level"] in ("warning", "error"):
                    found[said["event"]] += 1
        return found


@contextlib.contextmanager
def together(
    folder: Path,
    model: Path,
    *,
    lease_s: float,
    max_running: int,
    overlap: str = "off",
    num_ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Scene]:
    """Run `minisgl serve` with its embedded Redis."""
    port, data = free_port(), folder / "data"
    where = ["--port", str(port), "--data-dir", str(data), "--model", str(model), "--lease", str(lease_s)]
    flags = [*_engine_flags(max_running, overlap), "--tp", str(num_ranks)]
    command = run_command(["serve", *where, *flags], folder, environment=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, [command])
        yield Scene(url, f"unix://{data / 'redis.sock'}", [command], 1, lambda: None, roles_of(num_ranks))
    finally:
        command.stop()


@contextlib.contextmanager
def apart(folder: Path, model: Path, *, lease_s: float, max_running: int, overlap: str = "off") -> Iterator[Scene]:
    """Run two workers of each stage around a Redis of their own, with engines that make chains."""
    server = EmbeddedRedis(folder / "redis")
    port = free_port()
    where = ["--redis-url", server.url, "--lease", str(lease_s), "--replicas", "2"]
    flags = {
        TOKENIZE: ["--model", str(model)],
        GENERATE: [
            *("--model", str(model), "--dummy-weight", "--num-pages", str(NUM_PAGES)),
            *_engine_flags(max_running, overlap),
        ],
        DETOKENIZE: ["--model", str(model)],
        WEB: ["--port", str(port)],
    }
    commands: list[Command] = []
    try:
        for stage, more in flags.items():
            program = (sys.executable, str(CHAIN_ENGINE if stage == GENERATE else ROOT / "minisgl.py"))
            commands.append(run_command(["stage", stage, *where, *more], folder / stage, program=program))
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, commands)
        yield Scene(url, server.url, commands, 2, server.watch)
    finally:
        for command in reversed(commands):
            command.stop()
        server.stop()


def _engine_flags(max_running: int, overlap: str) -> list[str]:
    # One thread: two that wait for each other by spinning would starve the processes that are to be seen at work.
    sizes = ["--page-size", str(PAGE_SIZE), "--max-running-requests", str(max_running), "--threads", "1"]
    return [*sizes, "--overlap", overlap]


class Look:
    """Connections of one observer. Everything raises redis.RedisError or LogError while Redis is away."""

    def __init__(self, redis_url: str) -> None:
        self.names = Names()
        self.log = RedisLog(redis_url, self.names)
        self._redis: Any = redis.Redis.from_url(redis_url, protocol=2, socket_timeout=2, decode_responses=True)

    def close(self) -> None:
        self.log.close()
        self._redis.close()

    def ready(self, role: str) -> list[int]:
        """Return the process ids of the workers of *role* that live and work.

        A frontend works also while it waits: its probe comes after the requests that are queued.
        """
        if role == REDIS:
            return [int(self._redis.info("server")["process_id"])]
        phases = ("ready", "waiting") if role == WEB else ("ready",)
        return [one.pid for one in self._statuses(role) if one.phase in phases and _lives(one.pid)]

    def in_flight(self) -> tuple[int, int]:
        """Return how many requests have not ended, with tokens in the log and without."""
        uids = self._redis.zrange(self.names.live, 0, -1)
        pipe = self._redis.pipeline(transaction=False)
        for uid in uids:
            pipe.xrevrange(self.names.request(uid), count=1)
        lengths = [parse_id(last[0][0])[0] for last in pipe.execute() if last]
        return sum(n > 0 for n in lengths), sum(n == 0 for n in lengths)

    def histories(self) -> dict[str, list[Entry]]:
        """Return uid -> history of every request that the log has."""
        prefix = self.names.request("")
        uids = [key.removeprefix(prefix) for key in self._redis.scan_iter(match=f"{prefix}*", count=1000)]
        return dict(zip(uids, self.log.histories(uids), strict=True))

    def leftovers(self) -> list[str]:
        """Return what is not as it should be when no request is on its way."""
        names = self.names
        found: list[str] = []
        steps = list(self._redis.scan_iter(match=names.steps("*")))
        for key in (names.submitted, names.tokenized, *steps):
            if self._redis.exists(key):
                pending = {group["name"]: group["pending"] for group in self._redis.xinfo_groups(key)}
                if length := self._redis.xlen(key):
                    found.append(f"{key} has {length} entries")
                found += [f"{key}: {count} pending in {group}" for group, count in pending.items() if count]
        if live := self._redis.zcard(names.live):
            found.append(f"{live} requests are live")
        found += [f"dead letter {fields}" for _, fields in self._redis.xrange(names.dead)]
        found += [f"{one.slot}: books wrong" for one in self._statuses(GENERATE) if one.books_wrong]
        return found

    def _statuses(self, stage: str) -> list[Status]:
        return read_statuses(self.log, stage)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
