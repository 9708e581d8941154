"""`minisgl bench soak`: whether anything grows with the requests that were served. Short requests in great number
through a server of its own; what its processes and its Redis hold when all of them are over and forgotten.

The first requests are a warm-up: caches, pools of connections and trimmed streams reach their size. The engine gets a
cache so small that all of its pages, which become memory when they are first written, have been written by then.
"""

from __future__ import annotations

import dataclasses
import math
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis
from rich.console import Console
from rich.status import Status as Shown

from ops.bench import compare, models, report
from ops.bench.compare import CompareConfig, Prompts
from ops.bench.peers import Served, Workload, our_server
from pipeline.config import at_least, flag, parse_flags, seconds
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.log.address import connect
from pipeline.log.redis import RedisLog
from pipeline.names import STAGES, Names
from pipeline.process.redis_server import socket_of, url_of
from pipeline.slots import read_statuses

ABOUT: Final = """\
Sends many short requests to a server of its own, and compares what its processes and its Redis hold after the first of
them and after all, each time when they are over and their retention has passed. Exits with 1 when a process was
replaced meanwhile: then nothing can be said.
"""
PACKAGES: Final = ("torch", "redis", "quart", "hypercorn")
LARGEST_GROWTH: Final = 0.05
NUM_PAGES, PAGE_SIZE = 256, 8
"""Of the engine's cache, so that even prompts of 8 tokens enter the prefix cache and the warm-up fills it."""
MOST_LOOKS_BETWEEN: Final = 9
"""Snapshots after the first one; what grows steadily and what levels off differ in those between."""
LOOK_EVERY_S: Final = 1.0
STEADY: Final = 0.01
"""What Redis holds is at rest when it changes by less from look to look."""
PATIENCE_S: Final = 60.0
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """What is sent, and when it is forgotten."""

    model: str = flag(
        "--model", default="95m", help=f"{' or '.join(models.SHAPES)}, made on the spot, or the folder of a checkpoint"
    )
    checkpoints: str = flag("--checkpoints", default="", help="where they are made [cache folder/minisgl]")
    requests: int = flag("--requests", default=10_000, parse=at_least(2), help="requests in all")
    warmup: int = flag("--warmup", default=1000, parse=at_least(1), help="of them, those before the first snapshot")
    concurrency: int = flag("--concurrency", default=32, parse=at_least(1), help="requests under way at any time")
    input_tokens: int = flag("--input-len", default=8, parse=at_least(1), help="tokens of a prompt")
    output_tokens: int = flag("--output-len", default=4, parse=at_least(1), help="tokens of an answer")
    retention_s: float = flag(
        "--retention", default=5.0, parse=seconds, help="seconds after which the server forgets a finished request"
    )
    seed: int = flag("--seed", default=0, parse=at_least(0), help="of the prompts")
    output: str = flag("--output", default="", help="file for the set-up and all snapshots, as JSON")


class NotQuiet(MiniSGLError):
    """The server cannot be measured: it does not come to rest, or a process of it is gone."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds; None where the kernel does not say it (before 4.14)."""

    rss_bytes: int
    """With shared libraries, whose pages the kernel may drop and read again."""
    uss_bytes: int | None
    """What would be free if it ended: more when another process ends that has the same libraries."""
    heap_bytes: int | None
    """Of no file, heap and stacks: what it has asked for itself."""


@dataclass(frozen=True, slots=True)
class Process:
    """Who is in a place of the server, and what it holds."""

    name: str
    pid: int
    memory: Memory


@dataclass(frozen=True, slots=True)
class Redis:
    """What Redis holds."""

    used_bytes: int
    keys: int
    groups: int
    consumers: int
    clients: int
    bytes_by_key: Mapping[str, int]
    """Kind of key, `steps:*`, to what all its keys take."""
    entries_by_key: Mapping[str, int]
    """The same for streams: how many entries they have."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at rest, after so many requests."""

    requests: int
    processes: tuple[Process, ...]
    redis: Redis


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of two snapshots."""

    name: str
    first: int
    last: int
    is_bytes: bool

    @property
    def ratio(self) -> float:
        if not self.first:
            return math.inf if self.last else 1.0
        return self.last / self.first

    @property
    def within(self) -> bool:
        """Say whether it has not grown by more than 5 %."""
        return self.ratio <= 1 + LARGEST_GROWTH

    def per_request(self, requests: int) -> float:
        """Return by how much it grew with each of *requests*."""
        return (self.last - self.first) / requests


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Soak; return the exit code.

    Raises:
        ConfigError: The flags, the checkpoint or the system cannot work.
        SideFailed: The server did not start, a request failed, or it had another number of tokens than was asked.
        NotQuiet: The server does not come to rest.
    """
    (config,) = parse_flags("bench soak", (SoakConfig,), arguments, environment, about=ABOUT)
    check(config)
    folder = compare.checkpoint(CompareConfig(model=config.model, checkpoints=config.checkpoints), environment)
    prompts = Prompts(folder)
    signal.signal(signal.SIGTERM, _interrupt)  # so that what was started is ended too
    flags = ["--model", str(folder), "--retention", f"{config.retention_s:g}"]
    flags += ["--num-pages", str(max(NUM_PAGES, config.concurrency * pages_of_a_request(config)))]
    flags += ["--page-size", str(PAGE_SIZE)]
    with (
        tempfile.TemporaryDirectory(prefix="minisgl-bench-", ignore_cleanup_errors=True) as data,
        Console(stderr=True).status("starting minisgl", refresh_per_second=1) as status,
        our_server(Path(data), flags) as (ours, _),
    ):
        snapshots = soak(config, ours, prompts, url_of(socket_of(Path(data))), status)
    first, last = snapshots[0], snapshots[-1]
    replaced = changed(first, last)
    print(f"{folder.name} on {report.cpu_model()}: {config.requests:,} requests of {config.input_tokens} tokens in and")
    print(f"{config.output_tokens} out, {config.concurrency} at a time; at rest, {config.retention_s:g} s of retention")
    print("later. RSS counts shared libraries too; USS only what no other process has, whoever that is at the moment;")
    print("heap only what the process has asked for itself.\n")
    if not replaced:
        print(table(first, last))
        if grew := evidence(snapshots):
            print(f"\n{grew}")
    if config.output:
        document = {
            "setup": report.setup(("minisgl", "bench", "soak", *arguments), PACKAGES),
            "options": dataclasses.asdict(config),
            "checkpoint": str(folder),
            "flags": flags,
            "snapshots": snapshots,
            "changed": replaced,
            "rows": [] if replaced else [_as_plain(row, last.requests - first.requests) for row in rows(first, last)],
        }
        report.write_json(Path(config.output), document)
    if replaced:
        print(f"minisgl: not the same processes: {'; '.join(replaced)}", file=sys.stderr)
    return 1 if replaced else 0


def check(config: SoakConfig) -> None:
    """Refuse what would be found only after the measurement.

    Raises:
        ConfigError: There are no requests after the warm-up, the output cannot be written, or this is no Linux.
    """
    if config.requests <= config.warmup:
        raise ConfigError(
            f"--requests {config.requests} and --warmup {config.warmup}: the second snapshot comes after more requests "
            "than the first; pass fewer to warm up"
        )
    report.check_can_write("--output", config.output)
    if not Path("/proc/self/status").exists():
        raise ConfigError("bench soak reads what processes hold from /proc, which this system has not; run it on Linux")


def pages_of_a_request(config: SoakConfig) -> int:
    """Return how many pages of the engine's cache a request takes."""
    return math.ceil((config.input_tokens + config.output_tokens) / PAGE_SIZE)


def soak(config: SoakConfig, ours: Served, prompts: Prompts, url: str, status: Shown) -> list[Snapshot]:
    """Send all requests; return the snapshots, the first after the warm-up, the last after all."""
    generator = random.Random(config.seed)
    names = Names()
    lengths = (config.input_tokens, config.output_tokens)
    batch = max(config.warmup, math.ceil((config.requests - config.warmup) / MOST_LOOKS_BETWEEN))
    snapshots: list[Snapshot] = []
    done = 0
    with connected(url) as client:
        while done < config.requests:
            count = min(batch if done else config.warmup, config.requests - done)
            status.update(f"requests {done + 1:,} to {done + count:,} of {config.requests:,}")
            ours.measure(Workload(prompts.drawn(generator, [lengths] * count), config.concurrency))
            done += count
            status.update(f"after {done:,} requests: waiting until they are forgotten")
            wait_until_quiet(client, names, config.retention_s + PATIENCE_S)
            snapshots.append(Snapshot(done, processes_of(url, names, client), redis_now(client, names)))
    return snapshots


def connected(url: str) -> redis.Redis:
    """Return a client of the server's Redis; it counts itself in every snapshot."""
    return connect(url, decode_responses=True)


def wait_until_quiet(client: redis.Redis, names: Names, patience_s: float) -> None:
    """Wait until every request is over and forgotten, and Redis holds as much as a moment before.

    Raises:
        NotQuiet: That does not come.
    """
    deadline_s = time.monotonic() + patience_s
    before = -1
    while True:
        left = work_left(client, names)
        now = _used_bytes(client)
        steady = abs(now - before) <= STEADY * now and not _info(client, "persistence")["aof_rewrite_in_progress"]
        if not left and steady:
            return
        if time.monotonic() > deadline_s:
            why = ", ".join(left) or f"Redis held {before:,} bytes, and then {now:,}"
            raise NotQuiet(f"the server did not come to rest in {patience_s:g} s; left: {why}")
        before = now
        time.sleep(LOOK_EVERY_S)


def work_left(client: redis.Redis, names: Names) -> list[str]:
    """Return what says that requests are not over, or not forgotten yet: kind of key and how much is there."""
    found: Counter[str] = Counter()
    for key in _keys(client, names):
        kind = _kind(key)
        if kind == "request:*":
            found[kind] += 1
        elif kind in ("submitted", "tokenized", "steps:*"):
            found[kind] += int(client.execute_command("XLEN", key))
        elif kind == "live":
            found[kind] += int(client.execute_command("ZCARD", key))
    return [f"{kind}: {count}" for kind, count in sorted(found.items()) if count]


def redis_now(client: redis.Redis, names: Names) -> Redis:
    """Return what Redis holds."""
    groups = consumers = 0
    bytes_by_key: Counter[str] = Counter()
    entries_by_key: Counter[str] = Counter()
    keys = _keys(client, names)
    for key in keys:
        bytes_by_key[_kind(key)] += int(client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)
        if client.execute_command("TYPE", key) == "stream":
            entries_by_key[_kind(key)] += int(client.execute_command("XLEN", key))
            of_stream: Any = client.xinfo_groups(key)
            groups += len(of_stream)
            consumers += sum(int(group["consumers"]) for group in of_stream)
    num_clients = int(_info(client, "clients")["connected_clients"])
    return Redis(
        _used_bytes(client), len(keys), groups, consumers, num_clients, dict(bytes_by_key), dict(entries_by_key)
    )


def _keys(client: redis.Redis, names: Names) -> list[str]:
    prefix = names.live.removesuffix("live")
    return sorted(client.scan_iter(match=f"{prefix}*", count=1000))


def _kind(key: str) -> str:
    """Return the name of a key without namespace and without what is one of many: `steps:*`."""
    kind, colon, _ = key.partition("}:")[2].partition(":")
    return f"{kind}:*" if colon else kind


def _info(client: redis.Redis, section: str) -> dict[str, Any]:
    info = client.info(section)
    assert isinstance(info, dict)
    return info


def _used_bytes(client: redis.Redis) -> int:
    return int(_info(client, "memory")["used_memory"])


def processes_of(url: str, names: Names, client: redis.Redis) -> tuple[Process, ...]:
    """Return all processes of the server: the workers by their slots, their supervisor, and Redis."""
    log = RedisLog(url, names)
    try:
        pids = {status.slot: status.pid for stage in STAGES for status in read_statuses(log, stage)}
    finally:
        log.close()
    pids["supervisor"] = _parent_of(next(iter(pids.values())))
    pids["Redis"] = int(_info(client, "server")["process_id"])
    return tuple(Process(name, pid, memory_of(pid)) for name, pid in pids.items())


def memory_of(pid: int) -> Memory:
    """Return what process *pid* holds.

    Raises:
        NotQuiet: There is no such process any more.
    """
    rss_bytes = _bytes_in(pid, "status").get("VmRSS")
    if rss_bytes is None:
        raise NotQuiet(f"process {pid} is gone or of another user; it cannot be measured")
    parts = _bytes_in(pid, "smaps_rollup")
    if not parts:
        return Memory(rss_bytes, None, None)
    return Memory(rss_bytes, parts["Private_Clean"] + parts["Private_Dirty"], parts["Anonymous"])


def _bytes_in(pid: int, name: str) -> dict[str, int]:
    """Return the lines `Name: 123 kB` of a file in /proc; nothing of a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {key: int(value.split()[0]) * 1024 for key, _, value in fields if value.endswith(" kB")}


def _parent_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        raise NotQuiet(f"process {pid} is gone; its parent cannot be found") from error
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def changed(first: Snapshot, last: Snapshot) -> list[str]:
    """Return which places have another process, or none, or were not there."""
    before = {process.name: process.pid for process in first.processes}
    after = {process.name: process.pid for process in last.processes}
    said = []
    for name, pid in (before | after).items():
        if name not in after:
            said.append(f"{name}: process {pid} is gone")
        elif name not in before:
            said.append(f"{name}: process {pid} is new")
        elif before[name] != pid:
            said.append(f"{name}: process {before[name]} became {pid}")
    return said


def rows(first: Snapshot, last: Snapshot) -> list[Row]:
    """Return all figures of two snapshots of the same processes."""
    assert not changed(first, last), "figures of different processes say nothing"
    found = [
        Row("Redis, used_memory", first.redis.used_bytes, last.redis.used_bytes, is_bytes=True),
        Row("keys", first.redis.keys, last.redis.keys, is_bytes=False),
        Row("consumer groups", first.redis.groups, last.redis.groups, is_bytes=False),
        Row("consumers", first.redis.consumers, last.redis.consumers, is_bytes=False),
        Row("clients of Redis", first.redis.clients, last.redis.clients, is_bytes=False),
    ]
    for before, after in zip(first.processes, last.processes, strict=True):
        found.append(Row(f"{before.name}, RSS", before.memory.rss_bytes, after.memory.rss_bytes, is_bytes=True))
        for name, first_bytes, last_bytes in (
            ("USS", before.memory.uss_bytes, after.memory.uss_bytes),
            ("heap", before.memory.heap_bytes, after.memory.heap_bytes),
        ):
            if first_bytes is not None and last_bytes is not None:
                found.append(Row(f"{before.name}, {name}", first_bytes, last_bytes, is_bytes=True))
    return found


def table(first: Snapshot, last: Snapshot) -> str:
    """Return the comparison for people."""
    requests = last.requests - first.requests
    lines = [("", f"after {first.requests:,}", f"after {last.requests:,}", "ratio", "within 5 %", "a request")]
    for row in rows(first, last):
        each = f"{row.per_request(requests):,.0f} B" if row.is_bytes else ""
        within = "yes" if row.within else "grew"
        lines.append((row.name, _shown(row.first, row), _shown(row.last, row), f"{row.ratio:.3f}", within, each))
    return report.aligned(lines)


def _shown(value: int, row: Row) -> str:
    return f"{value / MIB:,.1f} MiB" if row.is_bytes else f"{value:,}"


def evidence(snapshots: Sequence[Snapshot]) -> str:
    """Return of everything that grew how it went on from snapshot to snapshot, and which keys it was; else nothing."""
    first, last = snapshots[0], snapshots[-1]
    courses = list(zip(*(rows(first, snapshot) for snapshot in snapshots), strict=True))
    after = ", ".join(f"{snapshot.requests:,}" for snapshot in snapshots)
    lines = []
    for course in courses:
        if not course[-1].within:
            values = (f"{row.last / MIB:,.1f}" if row.is_bytes else f"{row.last:,}" for row in course)
            unit = ", MiB" if course[-1].is_bytes else ""
            lines.append(f"{course[-1].name} after {after} requests{unit}: {' '.join(values)}")
    if lines and (keys := _keys_that_grew(first.redis, last.redis)):
        lines.append(f"keys that grew: {keys}")
    return "\n".join(lines)


def _keys_that_grew(first: Redis, last: Redis) -> str:
    """Return which kinds of keys take more, what grew most first, with the entries of streams."""
    before, after = first.bytes_by_key, last.bytes_by_key
    grown = [kind for kind, size in after.items() if size > before.get(kind, 0) * (1 + LARGEST_GROWTH)]
    said = []
    for kind in sorted(grown, key=lambda kind: before.get(kind, 0) - after[kind]):
        entries = ""
        if kind in last.entries_by_key:
            entries = f" ({first.entries_by_key.get(kind, 0):,} to {last.entries_by_key[kind]:,} entries)"
        said.append(f"{kind} from {before.get(kind, 0):,} to {after[kind]:,} bytes{entries}")
    return ", ".join(said)


def _as_plain(row: Row, requests: int) -> dict[str, Any]:
    ratio = row.ratio if math.isfinite(row.ratio) else None
    plain = dataclasses.asdict(row) | {"ratio": ratio, "within": row.within}
    return plain | {"per_request": row.per_request(requests)}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
