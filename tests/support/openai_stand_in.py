"""A stand-in for any OpenAI server, which answers as its script says and keeps what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

OVERHEAD_TOKENS = 5
TOKENS_PER_WORD = 2
Body = dict[str, Any]
Frames = list[bytes]


def data(document: object) -> bytes:
    """Return one frame."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def text_chunk(text: str) -> bytes:
    """Return the frame of one piece of text."""
    return data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


FINISH = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
DONE = b"data: [DONE]\n\n"
ROLE = data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})


def usage_chunk(prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> bytes:
    """Return the last frame before the end."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return data({"choices": [], "usage": usage})


def prompt_tokens(body: Body) -> int:
    """Return what the stand-in counts: so many tokens a word, and some for the template of each message."""
    texts = [body["prompt"]] if "prompt" in body else [message["content"] for message in body["messages"]]
    return sum(OVERHEAD_TOKENS + TOKENS_PER_WORD * len(text.split()) for text in texts)


def whole(body: Body) -> Frames:
    """Return a good answer, in chunks of two tokens each."""
    chunks = [text_chunk("ab") for _ in range(-(-body["max_tokens"] // 2))]
    return [ROLE, *chunks, FINISH, usage_chunk(prompt_tokens(body), body["max_tokens"]), DONE]


class Hold:
    """A gate that says when a request has come, and holds its answer until it may go on."""

    def __init__(self) -> None:
        self.has_come, self.may_go_on = threading.Event(), threading.Event()

    async def __call__(self) -> None:
        self.has_come.set()
        await asyncio.to_thread(self.may_go_on.wait, 60)


@dataclass
class OpenAIStandIn:
    """What it was sent, and how it answers streams: with frames, or with a status and a body."""

    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    """Of the requests for a stream, in order of arrival."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    script: Callable[[Body], Frames | tuple[int, object]] = field(default=lambda body: whole(body))
    gate: Callable[[], Any] | None = None
    """Awaited before a stream is answered."""
    cut: bool = False
    """Whether the connection breaks after the frames."""
    breaks: int = 0
    """How many connections break before an answer begins."""
    reason: str = "length"
    """Why answers end that are no streams."""
    model: str = "stand-in"
    version: object = None
    """What /version says; None: there is no such path."""
    uid: str = ""
    """What a stream's header says, where its request can be read again."""
    rest: Callable[[str], Frames | tuple[int, object]] = field(default=lambda last_id: (404, {}))
    """What is said to who reads it again, after an id."""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def say_version(self, request: web.Request) -> web.Response:
        return web.json_response(self.version, status=404 if self.version is None else 200)

    async def events(self, request: web.Request) -> web.StreamResponse:
        assert request.match_info["uid"] == self.uid
        return await self._send(request, self.rest(request.headers.get("last-event-id", "")))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if not body.get("stream"):
            usage = {"prompt_tokens": prompt_tokens(body)}
            return web.json_response({"usage": usage, "choices": [{"finish_reason": self.reason}]})
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path)
        if self.gate is not None:
            await self.gate()
        if self.breaks and request.transport is not None:
            self.breaks -= 1
            request.transport.abort()
        return await self._send(request, self.script(body))

    async def _send(self, request: web.Request, answer: Frames | tuple[int, object]) -> web.StreamResponse:
        if isinstance(answer, tuple):
            return web.json_response(answer[1], status=answer[0])
        named = {"x-minisgl-uid": self.uid} if self.uid else {}
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **named})
        await response.prepare(request)
        for frame in answer:
            await response.write(frame)
        if self.cut and request.transport is not None:
            request.transport.abort()
        return response


@contextlib.contextmanager
def listening() -> Iterator[OpenAIStandIn]:
    """Give a stand-in that listens, in a thread of its own."""
    server = OpenAIStandIn()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def listen() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_get("/version", server.say_version)
        app.router.add_get("/v1/requests/{uid}/events", server.events)
        app.router.add_post("/v1/chat/completions", server.complete)
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(listen()))
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()
