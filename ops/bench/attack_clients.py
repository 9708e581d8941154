"""The clients of `minisgl bench attack`. Each role is a process of its own, so that none delays what another measures.

`python -m ops.bench.attack_clients ROLE PORT NUMBER TOKENS` prints a line when it has begun, goes on until its stdin
ends, and prints what it saw as JSON. It knows HTTP over plain sockets, and not why it is sent.

health    asks /health twenty times a second, each time on a new connection
streams   NUMBER chats at a time, each of TOKENS tokens to its end
bodies    wrong and legal giant bodies, lists of prompts, giant tokenizes, and clients that leave
idlers    NUMBER connections that ask for nothing, and some that send a request byte by byte
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pipeline.process.priority import LOWEST, give_way
from web.files import raise_file_limit

HEALTH, STREAMS, BODIES, IDLERS = ROLES = ("health", "streams", "bodies", "idlers")
ATTACKERS: Final = (BODIES, IDLERS)
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
LARGEST_BODY: Final = 4 << 20
HEALTH_EVERY_S: Final = 0.05
HEALTH_TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 60.0
STREAM_TIMEOUT_S: Final = 300.0
PAUSE_S: Final = 0.2
"""Between two requests of an attacker: it attacks the server, not the machine."""
OPENED_PER_S: Final = 300
"""Idle connections. The server closes them after a while, and they are opened again."""
NUM_DRIBBLERS: Final = 64
NUM_LEAVERS: Final = 8
NO_ANSWER: Final = "none"
"""Counted as a status where the server closed without an answer."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Health:
    """What /health did."""

    ms: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    """When each was sent, from the first one on."""
    failures: int = 0
    """No answer, or another status than 200."""


@dataclass
class Streams:
    """What the innocent streams got."""

    whole: int = 0
    """Answers with all tokens and their end."""
    refused: int = 0
    """Refused before they began, because the server was full. Each was sent again."""
    early: list[str] = field(default_factory=list)
    """What was wrong with each of the others."""
    longest_pause_ms: float = 0.0
    """Between two chunks."""


@dataclass
class Attack:
    """What the attackers did: kind -> status -> number of answers."""

    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    connections: int = 0
    """How many were opened to ask for nothing, or slowly."""

    def count(self, kind: str, status: str) -> None:
        counts = self.answers.setdefault(kind, {})
        counts[status] = counts.get(status, 0) + 1


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to do."""

    port: int
    number: int
    tokens: int


Role = Callable[[Order, Callable[[], None], asyncio.Event], Awaitable[Health | Streams | Attack]]
"""Takes the order, what to call when it has begun, and when to end."""


def request(path: str, body: bytes | None = None, *headers: str) -> bytes:
    """Return a POST of *body*, or a GET without one, after which the connection ends."""
    method = "GET" if body is None else "POST"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(port: int, data: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
    """Return the status that answers *data*, once the answer is whole. The server may answer before it has all."""
    try:
        async with asyncio.timeout(timeout_s), connected(port) as (reader, writer):
            writer.write(data)
            line = await reader.readline()
            while await reader.read(1 << 20):
                pass
    except TimeoutError:
        return "timeout"
    except OSError:
        return NO_ANSWER
    return line.split()[1].decode() if line.count(b" ") > 1 else NO_ANSWER


async def health(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Health:
    told, first_s = Health(), time.perf_counter()

    async def one() -> None:
        began_s = time.perf_counter()
        status = await ask(order.port, request("/health"), HEALTH_TIMEOUT_S)
        told.ms.append((time.perf_counter() - began_s) * 1000)
        told.sent_s.append(began_s - first_s)
        told.failures += status != "200"

    begun()
    async with asyncio.TaskGroup() as asked:
        while not end.is_set():
            asked.create_task(one())  # whether or not those before it are answered: else a slow server is asked less
            await asyncio.sleep(HEALTH_EVERY_S)
    return told


async def streams(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Streams:
    told, waiting = Streams(), set(range(order.number))

    def came(which: int) -> None:
        if which in waiting:
            waiting.discard(which)
            if not waiting:
                begun()

    async def one_after_the_other(which: int) -> None:
        while not end.is_set():
            try:
                await _stream(order, which, told, lambda: came(which))
            except (OSError, EOFError) as error:
                told.early.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(one_after_the_other, range(order.number)))
    return told


async def _stream(order: Order, which: int, told: Streams, came: Callable[[], None]) -> None:
    """Read one answer to its end."""
    fields = {
        "stream": True,
        "max_tokens": order.tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields | {"messages": [{"role": "user", "content": f"Count from {which}."}]}).encode()
    async with asyncio.timeout(STREAM_TIMEOUT_S), connected(order.port) as (reader, writer):
        writer.write(request(CHAT, body))
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split()[1]
        if status == b"503":
            told.refused += 1
            await asyncio.sleep(1.0)
            return
        if status != b"200":
            raise EOFError(f"{status.decode()}: {(await reader.read(300))!r}")
        last, frame, before_s = b"", b"", 0.0
        while line := await reader.readline():
            if line.startswith(b"data: "):
                now_s = time.perf_counter()
                if before_s:
                    told.longest_pause_ms = max(told.longest_pause_ms, (now_s - before_s) * 1000)
                before_s, last, frame = now_s, frame, line.strip()
                came()
    if frame == b"data: [DONE]" and b'"completion_tokens":%d' % order.tokens in last:
        told.whole += 1
    else:
        told.early.append(f"it ended with {(last + frame)[-200:]!r}")


async def bodies(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Attack:
    attack, all_of_them = Attack(), giant_bodies()
    begun()

    async def send(kind: str, requests: Iterator[bytes]) -> None:
        while not end.is_set():
            attack.count(kind, await ask(order.port, next(requests)))
            await asyncio.sleep(PAUSE_S)

    async def leave(resets: bool) -> None:
        body = json.dumps({"stream": True, "max_tokens": 500, "messages": [{"role": "user", "content": "Hi"}]}).encode()
        while not end.is_set():
            status = NO_ANSWER
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(ANSWER_TIMEOUT_S), connected(order.port) as (reader, writer):
                    writer.write(request(CHAT, body))
                    status = (await reader.readline()).split()[1].decode()
                    await reader.readuntil(b"data: ")
                    if resets:
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            attack.count("leavers", status)
            await asyncio.sleep(PAUSE_S)

    working = [send(kind, itertools.cycle(requests)) for kind, requests in all_of_them.items() for _ in range(2)]
    working += [leave(resets=number % 2 == 0) for number in range(NUM_LEAVERS)]
    await _until(end, working)
    return attack


def giant_bodies() -> Mapping[str, list[bytes]]:
    """Return kind -> requests: most of them have the largest body, or one byte more."""
    user = b'{"messages":[{"role":"user","content":"Hi"}],'
    text = b"all work, and no [play] "
    message, prompt = b'{"role":"user","content":"%s"},', b'"' + text * 400 + b'",'

    def chat(before: bytes, unit: bytes, after: bytes, most: int = LARGEST_BODY) -> bytes:
        return request(CHAT, _filled(before, unit, after, most))

    return {
        "wrong bodies": [
            chat(b'{"max_tokens":1,"messages":[', b"1,", b"1]}"),
            chat(b'{"messages":[', b'{"role":"user","content":""},', b"1]}"),
            chat(user + b'"x":[', b"[],", b"1]}"),
            chat(user + b'"x":', b"1", b"}"),
            chat(b"", b"[", b""),
            chat(b'{"messages":[{"role":"user","content":"', text, b'"}]}', LARGEST_BODY + 100),
        ],
        "legal bodies": [
            chat(b'{"max_tokens":1,"messages":[', message % (b"a" * 900), message[:-1] % b"a" + b"]}", 3_800_000),
            chat(user + b'"max_tokens":1,"x":[', b"1.25e-17,", b"1]}", 2_000_000),
            chat(b'{"max_tokens":1,"messages":[{"role":"user","content":"', text, b'"}]}'),
            chat(b'{"max_tokens":1,"messages":[{"role":"user","content":"', b"\\n", b'"}]}'),
        ],
        "lists of prompts": [
            request(COMPLETIONS, _filled(b'{"max_tokens":1,"prompt":[', prompt, b'"a"]}', 1_000_000)),
            request(COMPLETIONS, _filled(b'{"max_tokens":8,"prompt":[', b'"Count.",', b'"a"]}', 600)),
            request(COMPLETIONS, b'{"n":4,"max_tokens":1,"prompt":"' + text * 40_000 + b'"}'),
        ],
        "tokenizes": [
            request("/tokenize", _filled(b'{"prompt":"', text, b'"}')),
            request("/tokenize", _filled(b'{"prompt":"', b"a", b'"}')),
            request("/tokenize", _filled(b'{"prompt":"', "中".encode(), b'"}')),
            request("/tokenize", _filled(b'{"return_token_strs":true,"prompt":"', text, b'"}', 200_000)),
        ],
    }


def _filled(before: bytes, unit: bytes, after: bytes, most: int = LARGEST_BODY) -> bytes:
    """Return a body of at most *most* bytes."""
    return before + unit * ((most - len(before) - len(after)) // len(unit)) + after


async def idlers(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Attack:
    attack = Attack()
    raise_file_limit()
    begun()
    head = request("/health")
    body = request(CHAT, b'{"messages":[{"role":"user","content":"Hi"}]}')

    async def idle(which: int) -> None:
        await asyncio.sleep(which / OPENED_PER_S)
        sent = (b"", head[:20], head)[which % 3]
        while True:
            with contextlib.suppress(OSError):
                async with connected(order.port) as (reader, writer):
                    attack.connections += 1
                    writer.write(sent.replace(b"Connection: close\r\n", b""))
                    while await reader.read(1 << 16):
                        pass
            await asyncio.sleep(1.0)

    async def dribble(data: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                async with connected(order.port) as (reader, writer):
                    attack.connections += 1
                    sending = asyncio.create_task(_dribbled(writer, data))
                    try:
                        line = await reader.readline()
                    finally:
                        sending.cancel()
                    attack.count("dribblers", line.split()[1].decode() if line.count(b" ") > 1 else NO_ANSWER)
            await asyncio.sleep(PAUSE_S)

    working = [idle(which) for which in range(order.number)]
    working += [dribble((head, body)[which % 2]) for which in range(NUM_DRIBBLERS)]
    await _until(end, working)
    return attack


async def _dribbled(writer: asyncio.StreamWriter, data: bytes) -> None:
    for place in range(len(data)):
        writer.write(data[place : place + 1])
        await asyncio.sleep(PAUSE_S)


async def _until(end: asyncio.Event, working: list[Any]) -> None:
    """Let all of *working* go on until *end*, and stop them wherever they are."""
    tasks = [asyncio.create_task(each) for each in working]
    await end.wait()
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


PARTS: Final[Mapping[str, Role]] = {HEALTH: health, STREAMS: streams, BODIES: bodies, IDLERS: idlers}


async def main(role: str, order: Order) -> None:
    """Play *role* until stdin ends."""
    end = asyncio.Event()
    reading = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    reading.add_done_callback(lambda _: end.set())
    told = await PARTS[role](order, lambda: print("begun", flush=True), end)
    print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] in ATTACKERS:
        give_way(LOWEST)  # what they take from the server's cores is not what they do to the server
    asyncio.run(main(sys.argv[1], Order(*map(int, sys.argv[2:]))))
