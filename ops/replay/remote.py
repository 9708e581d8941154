"""Another MiniSGL server computes recorded requests again, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import orjson

from ops.bench.load import broken
from ops.shell.server import UID, base_of
from ops.sse_reader import frames_in
from pipeline.events import Submitted
from pipeline.log.protocol import Entry
from pipeline.recording import Recording
from pipeline.replaying import NotComputed
from pipeline.views.recorded import History
from web.wire import copies
from web.wire.constraints import constraint_fields
from web.wire.sglang.schemas import WITHIN

HIGHEST: Final = 2**31 - 1
"""The lowest priority that a client can ask for."""
NETWORK: Final = (aiohttp.ClientError, OSError, TimeoutError)


class RemoteComputer:
    """Has requests computed by the server at *url*, as a client of /v1/completions."""

    def __init__(self, url: str, api_key: str, *, at_once: int, timeout_s: float) -> None:
        """Raises ConfigError if *url* is none."""
        self._url = base_of(url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._at_once, self._timeout_s = at_once, timeout_s

    def compute(self, events: Sequence[Submitted]) -> list[History]:
        """Return the histories of *events*, which that server writes.

        Raises:
            NotComputed: The server cannot be reached, refuses one of them, or is no MiniSGL server.
        """
        return asyncio.run(self._compute(events))

    def models(self) -> list[str]:
        """Return the names of the models that the server lists; none if it does not."""
        return asyncio.run(self._models())

    async def _models(self) -> list[str]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.get(f"{self._url}/v1/models") as answer,
            ):
                return [str(each["id"]) for each in orjson.loads(await answer.read())["data"]]
        except (*NETWORK, orjson.JSONDecodeError, KeyError, TypeError):
            return []  # what becomes of the requests says why

    async def _compute(self, events: Sequence[Submitted]) -> list[History]:
        turns = asyncio.Semaphore(self._at_once)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            try:
                return await asyncio.gather(*(self._one(session, turns, event) for event in events))
            except NETWORK as error:
                raise NotComputed(f"--url {self._url}: {broken(error)}") from error

    async def _one(self, session: aiohttp.ClientSession, turns: asyncio.Semaphore, event: Submitted) -> History:
        async with turns:
            async with session.post(
                f"{self._url}/v1/completions", json=body_of(event), headers=_headers(event)
            ) as answer:
                said, uid = await answer.text(), answer.headers.get(UID, "")
            if not uid:
                raise NotComputed(f"--url {self._url}: answered {answer.status} without a uid: {said[:200]}")
            async with session.get(f"{self._url}/v1/requests/{uid}/events", params={"format": "events"}) as answer:
                stream = await answer.read()
        if answer.status != 200:
            raise NotComputed(f"--url {self._url}: the history of {uid} cannot be read: {stream[:200]!r}")
        frames = [frame for frame in frames_in(stream) if frame.id]  # the last one says that the stream is over
        return History(Recording(uid, tuple(Entry(frame.id, _fields(frame.data)) for frame in frames)))


def body_of(event: Submitted) -> dict[str, Any]:
    """Return the body for /v1/completions that asks for the same tokens as *event*."""
    sampling = event.sampling.model_dump(mode="json", exclude_none=True)
    sampling["logit_bias"] = {str(token): value for token, value in event.sampling.logit_bias}
    longest = sampling.pop("max_tokens", None)
    body = {name: value for name, value in sampling.items() if value not in ([], {})}
    body |= {"n_predict": -1} if longest is None else {"max_tokens": longest}
    body |= constraint_fields(event.constraint, WITHIN)
    if "user" in event.labels:  # `replay forget --user` must find it there
        body["user"] = event.labels["user"]
    return {"prompt": list(event.prompt_ids), "priority": HIGHEST, **body}


def _headers(event: Submitted) -> dict[str, str]:
    """Return how `replay forget` finds the request there when the recorded one is to be removed."""
    return {copies.HEADER: event.replay.of} if event.replay is not None else {}


def _fields(data: str) -> dict[str, str]:
    """Return the fields of the entry that a frame holds."""
    values = orjson.loads(data)
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in values.items()}
