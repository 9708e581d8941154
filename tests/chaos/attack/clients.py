"""The clients of `make attack`. Each role is a process of its own, so that none delays what another measures.

`python -m chaos.attack.clients ROLE ORDER`, with an `Order` as JSON, prints a line when it is ready. Then, for each
line on its stdin: `go` begins, and is answered by a line once all of its clients have begun; `stop` ends them, and is
answered by what they saw, as JSON. Roles are the kinds of attackers and:

health     asks /health twenty times a second, each time on a new connection
streams    chats that are read as they come, so many at a time
newcomers  each second a short chat, one that must match a pattern with letters of all alphabets, and a GET of the admin
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from chaos.attack.kinds import KINDS, PAUSE_S, Attack, Order
from chaos.attack.wire import ADMIN, ANSWER_TIMEOUT_S, CHAT, HOST, INNOCENT, NO_ANSWER, ask, connected, request

from pipeline.process.priority import LOWEST, give_way
from web.http.files import raise_file_limit

HEALTH, STREAMS, NEWCOMERS = "health", "streams", "newcomers"
HEALTH_EVERY_S: Final = 0.05
HEALTH_TIMEOUT_S: Final = 10.0
NEWCOMERS_EVERY_S: Final = 1.0
STREAM_TIMEOUT_S: Final = 300.0
HONEST_PATTERN: Final = r"^[\p{L}\p{N} .'-]{1,50}$"
END_BYTES: Final = 4096
"""Kept of a stream: more than its last two frames have."""


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
    """Between two arrivals at a connection, or between the last one and the end of the measurement."""


@dataclass
class Newcomers:
    """What other innocent requests got."""

    first_ms: list[float] = field(default_factory=list)
    """Time to the first token of each chat, or to the end of its client's patience."""
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    """What was asked -> status -> number."""


Result = Health | Streams | Newcomers | Attack
Role = Callable[[Order, Callable[[], None], asyncio.Event], Coroutine[Any, Any, Result]]
"""Takes the order, what to call when it has begun, and when to end."""


async def health(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Health:
    result, first_s = Health(), time.perf_counter()

    async def one() -> None:
        began_s = time.perf_counter()
        status = await ask(order.port, request("/health", key=""), HEALTH_TIMEOUT_S)
        result.ms.append((time.perf_counter() - began_s) * 1000)
        result.sent_s.append(began_s - first_s)
        result.failures += status != "200"

    begun()
    async with asyncio.TaskGroup() as asked:
        while not end.is_set():
            asked.create_task(one())  # whether or not those before it are answered: else a slow server is asked less
            await asyncio.sleep(HEALTH_EVERY_S)
    return result


async def streams(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Streams:
    result, waiting = Streams(), set(range(order.streams))

    def came(which: int) -> None:
        if which in waiting:
            waiting.discard(which)
            if not waiting:
                begun()

    async def one_after_the_other(which: int) -> None:
        while not end.is_set():
            try:
                await _stream(order, which, result, lambda: came(which), end)
            except (OSError, EOFError) as error:
                result.early.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(one_after_the_other, range(order.streams)))
    return result


class Reading(asyncio.Protocol):
    """Reads one answer, and measures when its bytes arrive."""

    def __init__(self, came: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._came = came
        self._clock = clock
        self.head = b""
        self.end = b""
        """The last bytes."""
        self.last_s = 0.0
        """When the last piece of the stream came; 0: none has come."""
        self.longest_s = 0.0
        """The longest time between two pieces."""
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        now_s = self._clock()
        self.head = self.head or data
        self.end = (self.end + data)[-END_BYTES:]
        if self.last_s:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        if self.last_s or b"data: " in self.end:
            self.last_s = now_s
            self._came()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def stop(self) -> None:
        """End the measurement: a stream that stands still has paused until now."""
        if self.last_s and not self.closed.is_set():
            self.longest_s = max(self.longest_s, self._clock() - self.last_s)

    @property
    def frames(self) -> list[bytes]:
        """The last frames that came whole."""
        return [line.strip() for line in self.end.split(b"\n")[:-1] if line.startswith(b"data: ")]


async def _stream(order: Order, which: int, result: Streams, came: Callable[[], None], end: asyncio.Event) -> None:
    """Read one answer to its end, or to the end of the measurement."""
    fields = {
        "stream": True,
        "max_tokens": order.tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields | {"messages": [{"role": "user", "content": f"Count from {which}."}]}).encode()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(STREAM_TIMEOUT_S):
        transport, reading = await loop.create_connection(lambda: Reading(came), HOST, order.port)
        try:
            transport.write(request(CHAT, body, key=INNOCENT))
            until = [reading.closed] if order.whole else [reading.closed, end]
            await _first_of(*until)
        finally:
            transport.abort()
            reading.stop()
            result.longest_pause_ms = max(result.longest_pause_ms, reading.longest_s * 1000)
    if not reading.closed.is_set():
        return
    status = reading.head.split(maxsplit=2)[1:2]
    if status == [b"503"]:
        result.refused += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), 1.0)
        return
    if status != [b"200"]:
        raise EOFError(f"{b''.join(status).decode()}: {reading.end[-300:]!r}")
    *_, last, frame = [b"", b"", *reading.frames]
    if frame == b"data: [DONE]" and b'"completion_tokens":%d' % order.tokens in last:
        result.whole += 1
    else:
        result.early.append(f"it ended with {(last + frame)[-200:]!r}")


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def newcomers(order: Order, begun: Callable[[], None], end: asyncio.Event) -> Newcomers:
    result = Newcomers()

    async def chat(what: str, **fields: object) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}).encode()
        began_s, status = time.perf_counter(), NO_ANSWER
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), connected(order.port) as (reader, writer):
                writer.write(request(CHAT, body, key=INNOCENT))
                status = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
                while not (await reader.readline()).startswith(b"data: ") and not reader.at_eof():
                    pass
                if what == "chats" and status == "200":
                    result.first_ms.append((time.perf_counter() - began_s) * 1000)
                rest = await reader.read()
                if (status == "200" and b"data: [DONE]" not in rest) or b'{"error"' in rest:
                    status = "an error after 200"
        except TimeoutError:
            status = "timeout"
            if what == "chats":
                result.first_ms.append((time.perf_counter() - began_s) * 1000)
        except (OSError, EOFError):
            status = NO_ANSWER
        count(what, status)

    async def admin() -> None:
        count("admin", await ask(order.port, request("/v1/caller", key=ADMIN)))

    def count(what: str, status: str) -> None:
        counts = result.answers.setdefault(what, {})
        counts[status] = counts.get(status, 0) + 1

    begun()
    async with asyncio.TaskGroup() as asked:
        while not end.is_set():
            asked.create_task(chat("chats", max_tokens=4))
            asked.create_task(chat("patterns", max_tokens=4, guided_regex=HONEST_PATTERN))
            asked.create_task(admin())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), NEWCOMERS_EVERY_S)
    return result


INNOCENTS: Final[Mapping[str, Role]] = {HEALTH: health, STREAMS: streams, NEWCOMERS: newcomers}


async def attacker(kind: str, order: Order) -> Role:
    """Prepare an attack of this kind; return it."""
    working = await KINDS[kind].prepare(order)

    async def play(_: Order, begun: Callable[[], None], end: asyncio.Event) -> Attack:
        attack, began_s = Attack(), time.process_time()
        begun()
        tasks = [asyncio.create_task(each) for each in working(attack)]
        await end.wait()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        attack.cpu_s = time.process_time() - began_s
        return attack

    return play


async def main(name: str, order: Order) -> None:
    """Play the role *name* whenever stdin says so, until it ends."""
    raise_file_limit()
    role = INNOCENTS[name] if name in INNOCENTS else await attacker(name, order)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say("ready")
    while await lines.readline():
        end = asyncio.Event()
        playing = asyncio.create_task(role(order, lambda: _say("begun"), end))
        stopping = asyncio.create_task(lines.readline())
        await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
        end.set()
        result = await playing
        await stopping
        _say(json.dumps(asdict(result)))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1] in KINDS:
        give_way(LOWEST)  # what they take from the server's cores is not what they do to the server
    asyncio.run(main(sys.argv[1], Order(**json.loads(sys.argv[2]))))
