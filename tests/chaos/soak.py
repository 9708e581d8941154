"""`make soak`: does anything grow with the number of requests? It sends many short requests to a server of its own and
measures its processes and its Redis when all of them are over and forgotten.

The first requests are a warm-up: caches, connection pools and trimmed streams reach their size. The engine's cache is
so small that the warm-up writes all of its pages; a page takes memory when it is first written.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil
import redis
from chaos.measure import MeasureConfig, exit_code, parsed
from rich.status import Status as Shown

from ops.bench import report
from ops.bench.models import Prompts
from ops.bench.targets import Served, our_server, scratch_and_status
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.flags import at_least, flag, seconds
from pipeline.log.address import connect
from pipeline.log.redis import RedisLog
from pipeline.names import STAGES, Names
from pipeline.process.redis_server import socket_of, url_of
from pipeline.stage.slots import read_statuses

ABOUT: Final = """\
Sends many short requests to a server of its own. Compares the memory of its processes and its Redis after the warm-up
and after all requests, each time when the requests are over and their retention has passed. Exits with 1 if a process
was replaced meanwhile: then the figures mean nothing.
"""
PACKAGES: Final = ("torch", "redis", "quart", "hypercorn")
LARGEST_GROWTH: Final = 0.05
COUNTS: Final = ("keys", "consumer groups", "consumers", "clients of Redis")
"""The figures that are not bytes."""
NUM_PAGES, PAGE_SIZE = 256, 8
"""The engine's cache: prompts of 8 tokens enter the prefix cache, and the warm-up fills it."""
MOST_LOOKS_BETWEEN: Final = 9
"""Snapshots after the first one. Those between show whether something grows steadily or levels off."""
LOOK_EVERY_S: Final = 1.0
STEADY: Final = 0.01
"""Redis is at rest when its memory changes by less than this between two looks."""
PATIENCE_S: Final = 60.0
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class SoakConfig(MeasureConfig):
    """What is sent, and when it is forgotten."""

    requests: int = flag("--requests", default=10_000, parse=at_least(2), help="requests in all")
    warmup: int = flag("--warmup", default=1000, parse=at_least(1), help="requests before the first snapshot")
    concurrency: int = flag("--concurrency", default=32, parse=at_least(1), help="requests under way at any time")
    input_tokens: int = flag("--input-len", default=8, parse=at_least(1), help="tokens per prompt")
    output_tokens: int = flag("--output-len", default=4, parse=at_least(1), help="tokens per answer")
    retention_s: float = flag(
        "--retention", default=5.0, parse=seconds, help="seconds after which the server forgets a finished request"
    )


class NotQuiet(MiniSGLError):
    """The server cannot be measured: it does not come to rest, or a process of it is gone."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a process."""

    rss_bytes: int
    """With shared libraries; the kernel may drop their pages and read them again."""
    uss_bytes: int
    """Free if it ended. It grows when another process with the same libraries ends."""
    heap_bytes: int
    """Heap and stacks: pages that belong to no file."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the server and its memory."""

    name: str
    pid: int
    memory: Memory


@dataclass(frozen=True, slots=True)
class Redis:
    """The contents of Redis."""

    used_bytes: int
    keys: int
    groups: int
    consumers: int
    clients: int
    bytes_by_key: Mapping[str, int]
    """Kind of key, say `steps:*` -> bytes of all its keys."""
    entries_by_key: Mapping[str, int]
    """Kind of stream -> entries of all its streams."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at rest, after a number of requests."""

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
        """Return whether it grew by at most 5 %."""
        return self.ratio <= 1 + LARGEST_GROWTH

    def per_request(self, requests: int) -> float:
        """Return the growth per request."""
        return (self.last - self.first) / requests

    def plain(self, requests: int) -> dict[str, Any]:
        """Return it for the JSON."""
        ratio = self.ratio if math.isfinite(self.ratio) else None
        grown = {"ratio": ratio, "within": self.within, "per_request": self.per_request(requests)}
        return report.options_of(self) | grown

    def shown(self, value: int) -> str:
        return f"{value / MIB:,.1f} MiB" if self.is_bytes else f"{value:,}"


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Soak; return the exit code.

    Raises:
        ConfigError: The flags or the checkpoint cannot work, or no requests are left after the warm-up.
        SideFailed: The server did not start, a request failed, or an answer has a wrong number of tokens.
        NotQuiet: The server does not come to rest.
    """
    config = parsed("make soak", SoakConfig, ABOUT, arguments, environment)
    if config.requests <= config.warmup:
        raise ConfigError(
            f"--requests {config.requests} and --warmup {config.warmup}: no request is left after the warm-up; pass a "
            "smaller --warmup"
        )
    report.check_can_write("--output", config.output)
    folder = config.folder(environment)
    prompts = Prompts(folder)
    flags = ["--model", str(folder), "--retention", f"{config.retention_s:g}"]
    pages_of_a_request = math.ceil((config.input_tokens + config.output_tokens) / PAGE_SIZE)
    flags += ["--num-pages", str(max(NUM_PAGES, config.concurrency * pages_of_a_request))]
    flags += ["--page-size", str(PAGE_SIZE)]
    with scratch_and_status() as (data, status), our_server(data, flags) as (ours, _):
        snapshots = soak(config, ours, prompts, url_of(socket_of(data)), status)
    first, last = snapshots[0], snapshots[-1]
    replaced = changed(first, last)
    print(f"""\
{folder.name} on {report.cpu_model()}: {config.requests:,} requests of {config.input_tokens} tokens in and
{config.output_tokens} out, {config.concurrency} at a time; measured at rest, after a retention of
{config.retention_s:g} s. RSS includes shared libraries, USS only pages that no other process has now, heap
pages that belong to no file.
""")
    if not replaced:
        print(table(first, last))
        if grew := evidence(snapshots):
            print(f"\n{grew}")
    document = {
        "options": report.options_of(config),
        "checkpoint": str(folder),
        "flags": flags,
        "snapshots": snapshots,
        "changed": replaced,
        "rows": [] if replaced else [row.plain(last.requests - first.requests) for row in rows(first, last)],
    }
    report.save(config.output, ("make", "soak", *arguments), PACKAGES, document)
    if replaced:
        print(f"minisgl: not the same processes: {'; '.join(replaced)}", file=sys.stderr)
    return 1 if replaced else 0


def soak(config: SoakConfig, ours: Served, prompts: Prompts, url: str, status: Shown) -> list[Snapshot]:
    """Send all requests; return the snapshots, the first after the warm-up, the last after all."""
    generator = random.Random(config.seed)
    names = Names()
    lengths = (config.input_tokens, config.output_tokens)
    batch = max(config.warmup, math.ceil((config.requests - config.warmup) / MOST_LOOKS_BETWEEN))
    snapshots: list[Snapshot] = []
    done = 0
    with connect(url, decode_responses=True) as client:  # every snapshot counts it
        while done < config.requests:
            count = min(batch if done else config.warmup, config.requests - done)
            status.update(f"requests {done + 1:,} to {done + count:,} of {config.requests:,}")
            ours.measure(prompts.drawn(generator, [lengths] * count), config.concurrency)
            done += count
            status.update(f"after {done:,} requests: waiting until they are forgotten")
            wait_until_quiet(client, names, config.retention_s + PATIENCE_S)
            snapshots.append(Snapshot(done, processes_of(url, names, client), redis_now(client, names)))
    return snapshots


def wait_until_quiet(client: redis.Redis, names: Names, patience_s: float) -> None:
    """Wait until every request is over and forgotten, and Redis' memory no longer changes.

    Raises:
        NotQuiet: It takes longer than *patience_s*.
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
    """Return the kinds of keys of requests that are not over or not forgotten, with their counts."""
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
    """Return the contents of Redis."""
    groups = consumers = 0
    bytes_by_key, entries_by_key, keys = Counter[str](), Counter[str](), _keys(client, names)
    for key in keys:
        bytes_by_key[_kind(key)] += int(client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)
        if client.execute_command("TYPE", key) == "stream":
            entries_by_key[_kind(key)] += int(client.execute_command("XLEN", key))
            of_stream: Any = client.xinfo_groups(key)
            groups += len(of_stream)
            consumers += sum(int(group["consumers"]) for group in of_stream)
    clients = int(_info(client, "clients")["connected_clients"])
    return Redis(_used_bytes(client), len(keys), groups, consumers, clients, dict(bytes_by_key), dict(entries_by_key))


def _keys(client: redis.Redis, names: Names) -> list[str]:
    prefix = names.live.removesuffix("live")
    return sorted(client.scan_iter(match=f"{prefix}*", count=1000))


def _kind(key: str) -> str:
    """Return the name of a key without its namespace, and with `*` for its slot or uid: `steps:*`."""
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
    with contextlib.closing(RedisLog(url, names)) as log:
        pids = {status.slot: status.pid for stage in STAGES for status in read_statuses(log, stage)}
    pids["supervisor"] = psutil.Process(next(iter(pids.values()))).ppid()
    pids["Redis"] = int(_info(client, "server")["process_id"])
    return tuple(Process(name, pid, memory_of(pid)) for name, pid in pids.items())


def memory_of(pid: int) -> Memory:
    """Return the memory of process *pid*.

    Raises:
        NotQuiet: The process is gone.
    """
    try:
        process = psutil.Process(pid)
        whole = process.memory_full_info()
        return Memory(whole.rss, whole.uss, sum(part.anonymous for part in process.memory_maps()))
    except psutil.Error as error:
        raise NotQuiet(f"process {pid} is gone or of another user; it cannot be measured") from error


def changed(first: Snapshot, last: Snapshot) -> list[str]:
    """Return which processes were replaced, are gone or are new."""
    before = {process.name: process.pid for process in first.processes}
    after = {process.name: process.pid for process in last.processes}
    gone = [f"{name}: process {pid} is gone" for name, pid in before.items() if name not in after]
    new = [f"{name}: process {pid} is new" for name, pid in after.items() if name not in before]
    both = [name for name in before if name in after and before[name] != after[name]]
    return [*(f"{name}: process {before[name]} became {after[name]}" for name in both), *gone, *new]


def rows(first: Snapshot, last: Snapshot) -> list[Row]:
    """Return all figures of two snapshots of the same processes."""
    assert not changed(first, last), "figures of different processes say nothing"
    before, after = _values(first), _values(last)
    return [Row(name, before[name], after[name], name not in COUNTS) for name in before]


def _values(snapshot: Snapshot) -> dict[str, int]:
    redis = snapshot.redis
    counts = dict(zip(COUNTS, (redis.keys, redis.groups, redis.consumers, redis.clients), strict=True))
    found = {"Redis, used_memory": redis.used_bytes, **counts}
    for process in snapshot.processes:
        memory = process.memory
        for kind, value in (("RSS", memory.rss_bytes), ("USS", memory.uss_bytes), ("heap", memory.heap_bytes)):
            found[f"{process.name}, {kind}"] = value
    return found


def table(first: Snapshot, last: Snapshot) -> str:
    """Return the comparison as a table."""
    requests = last.requests - first.requests
    lines = [("", f"after {first.requests:,}", f"after {last.requests:,}", "ratio", "within 5 %", "a request")]
    for row in rows(first, last):
        each = f"{row.per_request(requests):,.0f} B" if row.is_bytes else ""
        within = "yes" if row.within else "grew"
        lines.append((row.name, row.shown(row.first), row.shown(row.last), f"{row.ratio:.3f}", within, each))
    return report.aligned(lines)


def evidence(snapshots: Sequence[Snapshot]) -> str:
    """Return the course of every figure that grew, and which keys grew; empty if none did."""
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
    """Return which kinds of keys grew, most growth first, with the entries of streams."""
    before, after = first.bytes_by_key, last.bytes_by_key
    grown = [kind for kind, size in after.items() if size > before.get(kind, 0) * (1 + LARGEST_GROWTH)]
    kinds = []
    for kind in sorted(grown, key=lambda kind: before.get(kind, 0) - after[kind]):
        entries = ""
        if kind in last.entries_by_key:
            entries = f" ({first.entries_by_key.get(kind, 0):,} to {last.entries_by_key[kind]:,} entries)"
        kinds.append(f"{kind} from {before.get(kind, 0):,} to {after[kind]:,} bytes{entries}")
    return ", ".join(kinds)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
