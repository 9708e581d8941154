"""The attackers: each kind does one thing to the server, from one address and with one key, and counts the answers.

A kind prepares what it needs, such as bodies, before it attacks. It may attack several times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from chaos.attack import bodies
from chaos.attack.bodies import LARGEST_BODY, Requests
from chaos.attack.wire import (
    ANSWER_TIMEOUT_S,
    ATTACKERS_HOST,
    CHAT,
    NO_ANSWER,
    Connection,
    ask,
    connected,
    request,
    status_in,
)

PAUSE_S: Final = 0.2
"""Between two requests of an attacker: it attacks the server, not the machine."""
OPENED_PER_S: Final = 300
"""Idle connections. The server closes them after a while, and they are opened again."""
VIEWERS_PER_S: Final = 1000
REOPENED_AFTER_S: Final = 3.0
NUM_DRIBBLERS: Final = 64
NUM_LEAVERS: Final = 8
NUM_CONNECTIONS: Final = 2060
"""More than a server takes by default."""
NUM_PIPELINED: Final = 60
PAGE_FILES: Final = ("/pages/vendor/marked-18.2.1.js", "/pages/icon.svg")
"""A large one and a small one."""
PAGE_COMES: Final = b"HTTP/1.1 200"
NUM_UNFINISHED: Final = 150
NUM_READERS: Final = 12
STORY_TIMEOUT_S: Final = 300.0

UNANSWERED: Final = "unanswered"
"""Counted as a status where the attack ended before the answer."""


@dataclass
class Attack:
    """What the attackers did: what they sent -> status -> number of answers."""

    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    connections: int = 0
    """How many were opened to ask for nothing, slowly, or for something that does not end."""
    cpu_s: float = 0.0
    """CPU time of the attackers."""

    def count(self, what: str, status: str) -> None:
        counts = self.answers.setdefault(what, {})
        counts[status] = counts.get(status, 0) + 1


@dataclass(frozen=True, slots=True)
class Order:
    """What a process of clients is to do."""

    port: int
    streams: int = 0
    """Innocent streams at any time."""
    tokens: int = 0
    """Of each stream."""
    whole: bool = True
    """Whether streams that have begun are read to their end."""
    idle: int = 0
    """Connections that ask for nothing."""


Working = Callable[[Attack], Iterable[Coroutine[Any, Any, None]]]
"""Returns what attacks, each until it is cancelled."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of attack."""

    about: str
    prepare: Callable[[Order], Awaitable[Working]]
    serve_flags: tuple[str, ...] = ()
    """More flags of the server that is attacked by this kind alone."""
    seconds: float = 10.0
    """Length of the attack by this kind alone."""


def _repeating(requests: Callable[[], Requests], times: int = 2) -> Callable[[Order], Awaitable[Working]]:
    """Return the attackers that send *requests* over and over: so many clients for each name."""

    async def prepare(order: Order) -> Working:
        made = requests()

        async def send(attack: Attack, what: str, of_them: Iterator[bytes]) -> None:
            while True:
                await _ask(order, attack, what, next(of_them))
                await asyncio.sleep(PAUSE_S)

        return lambda attack: [
            send(attack, what, itertools.cycle(of_them)) for what, of_them in made.items() for _ in range(times)
        ]

    return prepare


async def _ask(order: Order, attack: Attack, what: str, data: bytes) -> None:
    """Send a request, and count its answer."""
    status = UNANSWERED
    try:
        status = await ask(order.port, data, host=ATTACKERS_HOST)
    finally:
        attack.count(what, status)


async def leavers(order: Order) -> Working:
    """Clients that leave in the middle of an answer, some with a reset."""
    data = bodies.chat(stream=True, max_tokens=500)

    async def leave(attack: Attack, resets: bool) -> None:
        while True:
            status = NO_ANSWER
            try:
                with contextlib.suppress(OSError, EOFError, TimeoutError):
                    async with asyncio.timeout(ANSWER_TIMEOUT_S), _attacker(order) as (reader, writer):
                        writer.write(data)
                        status = status_in(await reader.readline())
                        await reader.readuntil(b"data: ")
                        if resets:
                            linger = struct.pack("ii", 1, 0)
                            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            finally:
                attack.count("leavers", status)
            await asyncio.sleep(PAUSE_S)

    return lambda attack: [leave(attack, resets=number % 2 == 0) for number in range(NUM_LEAVERS)]


async def idlers(order: Order) -> Working:
    """Connections that ask for nothing, and some that send a request byte by byte."""
    head = request("/health")
    body = bodies.chat()

    async def idle(attack: Attack, which: int) -> None:
        await asyncio.sleep(which / OPENED_PER_S)
        sent = (b"", head[:20], request("/health", stays=True))[which % 3]
        while True:
            with contextlib.suppress(OSError):
                async with _attacker(order) as (reader, writer):
                    attack.connections += 1
                    writer.write(sent)
                    await _read_to_end(reader)
            await asyncio.sleep(1.0)

    async def dribble(attack: Attack, data: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                async with _attacker(order) as (reader, writer):
                    attack.connections += 1
                    sending = asyncio.create_task(_dribbled(writer, data))
                    try:
                        line = await reader.readline()
                    finally:
                        sending.cancel()
                    attack.count("dribblers", status_in(line))
            await asyncio.sleep(PAUSE_S)

    return lambda attack: [
        *(idle(attack, which) for which in range(order.idle)),
        *(dribble(attack, (head, body)[which % 2]) for which in range(NUM_DRIBBLERS)),
    ]


async def _dribbled(writer: asyncio.StreamWriter, data: bytes) -> None:
    for place in range(len(data)):
        writer.write(data[place : place + 1])
        await asyncio.sleep(PAUSE_S)


async def viewers(order: Order) -> Working:
    """Streams of pictures of the pipeline, more than the server takes connections, all with one key."""
    data = request("/v1/pipeline/events")

    async def view(attack: Attack, which: int) -> None:
        await asyncio.sleep(which / VIEWERS_PER_S)
        while True:
            status = NO_ANSWER
            with contextlib.suppress(OSError):
                async with _attacker(order) as (reader, writer):
                    attack.connections += 1
                    writer.write(data)
                    status = status_in(await reader.readline())
                    attack.count("viewers", status)
                    await _read_to_end(reader)
            if status == NO_ANSWER:
                attack.count("viewers", status)
            await asyncio.sleep(REOPENED_AFTER_S)

    return lambda attack: [view(attack, which) for which in range(NUM_CONNECTIONS)]


async def unfinished(order: Order) -> Working:
    """Bodies that never end: most of each is sent, and then nothing."""
    whole = request(CHAT, b"[" * LARGEST_BODY)
    data = memoryview(whole)[:-1000]

    async def stop_halfway(attack: Attack) -> None:
        while True:
            status = NO_ANSWER
            with contextlib.suppress(OSError):
                async with _attacker(order) as (reader, writer):
                    attack.connections += 1
                    reading = asyncio.create_task(reader.readline())
                    try:
                        for place in range(0, len(data), 1 << 16):
                            writer.write(data[place : place + (1 << 16)])
                            await writer.drain()
                        status = status_in(await reading)
                    except OSError:  # it was refused before all was sent
                        status = status_in(await reading)
                    finally:
                        reading.cancel()
            attack.count("unfinished bodies", status)
            await asyncio.sleep(1.0)

    return lambda attack: [stop_halfway(attack) for _ in range(NUM_UNFINISHED)]


async def pages(order: Order) -> Working:
    """Connections that ask for files of the pages, many times before they read the first answer."""
    asked = [request(path, stays=True) * NUM_PIPELINED for path in PAGE_FILES]

    async def pipeline(attack: Attack, which: int) -> None:
        await asyncio.sleep(which / VIEWERS_PER_S)
        while True:
            seen, end = 0, b""
            with contextlib.suppress(OSError):
                async with _attacker(order) as (reader, writer):
                    attack.connections += 1
                    writer.write(asked[which % len(asked)])
                    while seen < NUM_PIPELINED and (piece := await reader.read(1 << 18)):
                        seen += (end + piece).count(PAGE_COMES)
                        end = piece[1 - len(PAGE_COMES) :]
            attack.count("pipelined page files", f"{200 if seen else NO_ANSWER}")
            await asyncio.sleep(PAUSE_S)

    return lambda attack: [pipeline(attack, which) for which in range(NUM_CONNECTIONS)]


async def stories(order: Order) -> Working:
    """Reads long histories, several at once."""
    uid = await _uid_of(order, bodies.story())
    asked = [request(f"/v1/requests/{uid}{of_it}") for of_it in ("", "/steps", "/events")]

    async def read(attack: Attack, which: int) -> None:
        for data in itertools.cycle(asked[which % len(asked) :] + asked[: which % len(asked)]):
            await _ask(order, attack, "stories", data)

    return lambda attack: [read(attack, which) for which in range(NUM_READERS)]


async def _uid_of(order: Order, data: bytes) -> str:
    """Have a request answered; return its uid. Raises EOFError if it is refused."""
    async with asyncio.timeout(STORY_TIMEOUT_S), connected(order.port, ATTACKERS_HOST) as (reader, writer):
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await _read_to_end(reader)
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"x-minisgl-uid:"):
            return line.partition(b":")[2].strip().decode()
    raise EOFError(f"a request for a story was refused: {(head + body)[:300]!r}")


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Read what comes until the end; return the first of it."""
    first = await reader.read(1 << 16)
    while await reader.read(1 << 16):
        pass
    return first


def _attacker(order: Order) -> contextlib.AbstractAsyncContextManager[Connection]:
    return connected(order.port, ATTACKERS_HOST)


KINDS: Final[Mapping[str, Kind]] = {
    "bodies": Kind("wrong and legal giant bodies, lists of prompts, giant tokenizes", _repeating(bodies.giant_bodies)),
    "leavers": Kind("clients that leave in the middle of an answer", leavers),
    "idlers": Kind("idle connections, and clients that send byte by byte", idlers),
    "stops": Kind("stop strings that the answer almost matches", _repeating(bodies.stops, 1), seconds=30.0),
    "scores": Kind("prompts whose every token comes back with its alternatives", _repeating(bodies.scores, 1)),
    "grammars": Kind("grammars that take long to compile", _repeating(bodies.grammars)),
    "schemas": Kind(
        "tools whose properties share a large schema", _repeating(bodies.schemas), ("--tool-parser", "qwen3_coder")
    ),
    "viewers": Kind("2,060 streams of pictures of the pipeline", viewers),
    "unfinished": Kind("150 bodies that never end", unfinished),
    "labels": Kind("labels that fill the log", _repeating(bodies.labels, 4), ("--max-log-bytes", "64M")),
    "pages": Kind("2,060 connections that ask for 60 page files at once", pages),
    "stories": Kind("12 clients that read histories of 2,000 tokens", stories),
}
ALONE: Final = tuple(KINDS)[3:]
"""Those that `alone` measures. The others use up what all keys share, such as the queue, as documented."""
