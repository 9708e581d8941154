"""A frontend with its application, as HTTP clients see it, behind a real Redis; and what its answers say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from quart import Quart, Response
from support.selection import by_night
from support.stand_in_stages import StandIn

from pipeline.log.protocol import DEFAULT_LIMITS, RequestLimits
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.names import SEAL, Names
from web.app import create_app
from web.http.keys import Keys, read_keys
from web.http.origins import Origins
from web.live.frontend import Frontend

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
IDS = {"x-minisgl-event-ids": "1"}
"""The header of a client that wants ids in its stream."""
ANN, BOB, ADMIN = "sk-ann", "sk-bob", "sk-root"
KEYS = read_keys([ANN, BOB], "", ADMIN)


def bearer(key: str) -> dict[str, str]:
    """Return the header of a client with *key*; "": of one without."""
    return {"authorization": f"Bearer {key}"} if key else {}


def chat(words: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], **fields}


class Site:
    """A frontend with its application, and what it says of itself. *more* are options of the frontend."""

    def __init__(
        self,
        url: str,
        limits: RequestLimits,
        name: str = "web-0",
        *,
        keys: Keys | None = None,
        origins: Origins | None = None,
        pages: Path | None = None,
        **more: Any,
    ) -> None:
        self.said: list[dict[str, object]] = []
        self.log = AsyncRedisLog(url, Names(), limits)
        self.frontend = Frontend(name, self.log, self._say, **more)
        self.app: Quart = create_app(self.frontend, keys, origins=origins, pages=pages)
        self.client = self.app.test_client()

    def _say(self, **changes: object) -> None:
        self.said.append(changes)

    @property
    def is_busy(self) -> bool:
        """Return whether a client is being answered, or a task is still writing to the log."""
        return bool(self.frontend._clients or self.frontend._background)

    async def post(self, body: Any, **options: Any) -> Response:
        return await self.client.post(CHAT, json=body, **options)

    async def get(self, path: str, **headers: str) -> Response:
        return await self.client.get(path, headers=headers)

    async def read(self, path: str, **headers: str) -> bytes:
        """Return the bytes of a good answer to a GET."""
        return await bytes_of(self.get(path, **headers))

    async def streamed(self, body: Mapping[str, Any], path: str = CHAT, **options: Any) -> tuple[str, bytes]:
        """Return the uid and the bytes of a stream with ids."""
        response = await self.client.post(path, json=body, headers=IDS, **options)
        assert response.content_type == "text/event-stream; charset=utf-8"
        return response.headers["x-minisgl-uid"], await bytes_of(response)

    @asynccontextmanager
    async def connection(
        self, body: dict[str, Any], headers: Mapping[str, str] | None = None, *, path: str = CHAT
    ) -> AsyncIterator[Any]:
        """Send a request that wants ids, and leave at the end, whatever has been answered by then."""
        given = {"content-type": "application/json", **IDS, **(headers or {})}
        async with self.client.request(path, method="POST", headers=given) as connection:
            await connection.send(json.dumps(body).encode())
            await connection.send_complete()
            yield connection
            await connection.disconnect()

    def waiting(self) -> AbstractAsyncContextManager[Any]:
        """As `connection`, for a request that waits: the stand-in for a tokenizer has it in hand and does nothing."""
        return self.connection({"prompt": "silent"}, path="/tokenize")

    @asynccontextmanager
    async def reading(self, path: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[Any]:
        """Read what a path sends and leave at the end, whatever has come by then."""
        async with self.client.request(path, headers=dict(headers or {})) as connection:
            await connection.send_complete()
            yield connection
            await connection.disconnect()

    async def chunks(self, body: dict[str, Any]) -> list[Any]:
        """Return the JSON of each frame of a stream."""
        response = await self.post(body | {"stream": True})
        assert response.status_code == 200 and response.content_type == "text/event-stream; charset=utf-8"
        *frames, done, rest = (await response.get_data(as_text=False)).split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        return [json.loads(frame.partition(b"data: ")[2]) for frame in frames]


@asynccontextmanager
async def site(
    url: str, name: str = "web-0", *, ready: bool = True, limits: RequestLimits = DEFAULT_LIMITS, **more: Any
) -> AsyncIterator[Site]:
    """Run a frontend; *ready*: once a token went through the stages behind it, and its probe is over.

    *more*: options of `Site`, of which *pages* is the folder of its pages; None: it has none.
    """
    site = Site(url, limits, name, **more)
    task = asyncio.create_task(site.frontend.run())
    try:
        async with asyncio.timeout(by_night(30, 300)):
            if ready:
                await until(lambda: site.frontend.readiness.probed and not site.frontend.tail.listeners)
            yield site
            await until(lambda: not site.is_busy)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await site.log.close()


@asynccontextmanager
async def away(folder: Path, *, keys: Keys | None = None, origins: Origins | None = None) -> AsyncIterator[Site]:
    """Give a frontend that does not run, whose log is away: what it lets in gets no further than its route."""
    site = Site(f"unix://{folder}/nothing.sock", DEFAULT_LIMITS, keys=keys, origins=origins)
    try:
        yield site
    finally:
        await site.log.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def bytes_of(response: Awaitable[Any] | Response) -> bytes:
    """Return what is sent to a client whose request is fine."""
    answer = await response if isinstance(response, Awaitable) else response
    assert answer.status_code == 200
    found: bytes = await answer.get_data(as_text=False)
    return found


async def error_of(response: Awaitable[Any] | Response) -> tuple[int, dict[str, Any]]:
    answer = await response if isinstance(response, Awaitable) else response
    assert answer.content_type == "application/json" and answer.headers["x-request-id"]
    body = await answer.get_json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, body["error"]


async def code_of(response: Awaitable[Any]) -> tuple[int, str]:
    """Return the status of an error, and its code."""
    status, error = await error_of(response)
    return status, error["code"]


async def received(connection: Any, wanted: bytes) -> bytes:
    """Return what comes up to and with *wanted*."""
    got = b""
    while wanted not in got:
        got += await connection.receive()
    return got


async def one_request(stand_in: StandIn) -> str:
    """Return the uid of the only one, as soon as it is there."""
    await until(stand_in.requests)
    ((uid, _),) = stand_in.requests()
    return uid


def seal_of(log: RedisLog, uid: str) -> Mapping[str, str]:
    """Return the fields of the end of *uid*; empty while it has none. Asks on a connection of its own."""
    with closing(log.another()) as own:
        return next((entry.fields for entry in own.histories([uid])[0] if entry.id == SEAL), {})


def request_lines(lines: Iterable[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """Return the canonical lines of requests."""
    return [line for line in lines if line["event"] == "request"]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
