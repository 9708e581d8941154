"""The clients of the chaos tests, on a server that breaks connections: nothing counts twice, nothing is passed over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web
from chaos.clients import ENDPOINT, Answer, Ask, stream

UID = "0" * 32
SEAL = "9-9"
FRAMES: Sequence[tuple[str, str]] = (
    ("", '{"choices":[{"delta":{"content":""},"finish_reason":null}]}'),
    ("1-0", '{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}'),
    ("2-0", '{"choices":[{"delta":{"content":"b"},"finish_reason":null}]}'),
    ("", '{"choices":[{"delta":{},"finish_reason":"length"}]}'),
    (SEAL, '{"choices":[],"usage":{}}'),
    ("", "[DONE]"),
)


def written(event_id: str, data: str) -> bytes:
    return (f"id: {event_id}\n" if event_id else "").encode() + f"data: {data}\n\n".encode()


class BreakingServer:
    """Ends the connections: number i after `cuts[i]` frames, later ones never. Goes on as MiniSGL does."""

    def __init__(self, cuts: Sequence[int], *, refusals: int = 0, inside: bool = False) -> None:
        self.cuts = list(cuts)
        self.refusals = refusals
        self.inside = inside
        """Cut inside the frame."""
        self.keys: list[str] = []
        self.cursors: list[str] = []

    async def asked(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers["Idempotency-Key"])
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"error": {}}, status=503)
        return await self._send(request, 0)

    async def resumed(self, request: web.Request) -> web.StreamResponse:
        cursor = request.headers.get("Last-Event-ID", "")
        self.cursors.append(cursor)
        places = [number for number, (event_id, _) in enumerate(FRAMES, 1) if cursor and event_id == cursor]
        return await self._send(request, places[0] if places else 0)

    async def _send(self, request: web.Request, first: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-minisgl-uid": UID})
        cut = self.cuts.pop(0) if self.cuts else len(FRAMES)
        await response.prepare(request)
        for frame in FRAMES[first : first + cut]:
            await response.write(written(*frame))
        if cut < len(FRAMES):
            if self.inside:
                await response.write(written(*FRAMES[first + cut])[:20])
            assert request.transport is not None
            request.transport.close()
        return response

    async def answer(self) -> Answer:
        application = web.Application()
        application.router.add_post(ENDPOINT, self.asked)
        application.router.add_get(f"/v1/requests/{UID}/events", self.resumed)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with aiohttp.ClientSession() as session:
                return await stream(session, f"http://{host}:{port}", Ask("key", {"prompt": "x"}))
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("cuts", "inside", "cursors"),
    [
        pytest.param([2, 1], False, ["1-0", "2-0"], id="again and again"),
        pytest.param([2], True, ["1-0"], id="inside a frame, which does not count"),
        pytest.param([4], False, ["2-0"], id="between the frames of an event, which do not count twice"),
        pytest.param([1], False, [""], id="before the first id, so that it is read from the start"),
        pytest.param([5], False, [SEAL], id="before its very end"),
    ],
)
def test_a_stream_that_breaks_goes_on_behind_its_last_id(cuts: list[int], inside: bool, cursors: list[str]) -> None:
    server = BreakingServer(cuts, inside=inside)
    answer = asyncio.run(server.answer())
    assert (answer.text, answer.ends, answer.ids) == ("ab", ["length"], ["1-0", "2-0", SEAL])
    assert answer.done and server.cursors == cursors


def test_who_was_refused_for_now_asks_again_with_the_same_key() -> None:
    server = BreakingServer([], refusals=2)
    assert asyncio.run(server.answer()).text == "ab"
    assert server.keys == ["key"] * 3
