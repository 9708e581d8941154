"""Streaming clients that do what a good one does when its connection breaks: go on behind the last id, or ask again.

What they saw is kept as it came, so that a check can find what was said twice or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from ops.sse_reader import Frame, FrameReader

ENDPOINT = "/v1/chat/completions"
RETRY_S = 0.1
TRY_AGAIN = (429, 502, 503)
"""Statuses that say: not now."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    key: str
    """Idempotency key: who asks again with it gets the answer of the first time."""
    body: Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """What one client has seen, over all its connections."""

    ask: Ask
    uid: str = ""
    text: str = ""
    ids: list[str] = field(default_factory=list)
    """The id of each frame that had one."""
    ends: list[str] = field(default_factory=list)
    """What each last chunk gave as the reason."""
    done: bool = False
    refusal: str = ""
    """Why it was given up, or what an error frame said."""
    num_resumed: int = 0
    num_asked: int = 0
    heard_s: float = 0.0
    """When the last frame with an id came."""
    longest_silence_s: float = 0.0
    """Longest time between two frames with an id, on whatever connections."""


async def stream(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answer:
    """Ask, and listen until the stream is done, over as many connections as it takes."""
    answer = Answer(ask)
    while not answer.done and not answer.refusal:
        try:
            await _connect(session, url, answer)
        except (aiohttp.ClientError, OSError):
            await asyncio.sleep(RETRY_S)
    return answer


async def _connect(session: aiohttp.ClientSession, url: str, answer: Answer) -> None:
    if answer.uid:
        answer.num_resumed += 1
        cursor = {"Last-Event-ID": answer.ids[-1]} if answer.ids else {}
        request = session.get(f"{url}/v1/requests/{answer.uid}/events", headers=cursor)
    else:
        answer.num_asked += 1
        body = {**answer.ask.body, "stream": True}
        headers = {"Idempotency-Key": answer.ask.key, "x-minisgl-event-ids": "1"}
        request = session.post(url + ENDPOINT, json=body, headers=headers)
    async with request as response:
        if response.status in TRY_AGAIN:
            await asyncio.sleep(RETRY_S)
        elif response.status != 200:
            answer.refusal = f"{response.status} {(await response.text())[:500]}"
        else:
            answer.uid = answer.uid or response.headers["x-minisgl-uid"]
            await _listen(response, answer)


async def _listen(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Take in frames until the connection ends.

    When an event makes several frames its id is on the last of them: only then they count, because whoever goes on
    behind the id before gets all of them again.
    """
    texts: list[str] = []
    ends: list[str] = []
    async for frame in _frames(response):
        if frame.data == "[DONE]":
            answer.done = True
            return
        chunk = orjson.loads(frame.data)
        if "error" in chunk:
            answer.refusal = frame.data
            return
        for choice in chunk["choices"]:
            texts.append(choice["delta"].get("content") or "")
            if choice["finish_reason"] is not None:
                ends.append(choice["finish_reason"])
        if frame.id:
            now_s = time.monotonic()
            if answer.ids:
                answer.longest_silence_s = max(answer.longest_silence_s, now_s - answer.heard_s)
            answer.heard_s = now_s
            answer.ids.append(frame.id)
            answer.text += "".join(texts)
            answer.ends += ends
            texts, ends = [], []


async def _frames(response: aiohttp.ClientResponse) -> AsyncIterator[Frame]:
    reader = FrameReader()
    async for piece in response.content.iter_any():
        for frame in reader.feed(piece):
            yield frame
