"""Kill a web process with a stream open: its client goes on where it was, with another one."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from typing import Any

import httpx
from support.stand_in_stages import StandIn
from support.web_process import serving
from support.web_site import CHAT, IDS, chat


class Stream:
    """The frames of a streaming answer, one by one."""

    def __init__(self, response: httpx.Response) -> None:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        self.uid = response.headers["x-minisgl-uid"]
        self._pieces = response.iter_raw()
        self._rest = b""

    def frames_until(self, wanted: bytes) -> list[bytes]:
        """Return the next frames, up to the one that has *wanted* in it."""
        frames: list[bytes] = []
        while not frames or wanted not in frames[-1]:
            while b"\n\n" not in self._rest:
                self._rest += next(self._pieces)
            frame, _, self._rest = self._rest.partition(b"\n\n")
            frames.append(frame)
        return frames


def test_the_client_of_a_killed_web_process_goes_on_with_another_one(redis_url: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(closing(StandIn(redis_url, renews=True)))
        first, second = (stack.enter_context(serving(redis_url, "--slot", slot)) for slot in ("0", "1"))
        client = stack.enter_context(httpx.Client(timeout=20))

        def stream(method: str, url: str, **options: Any) -> Stream:
            return Stream(stack.enter_context(client.stream(method, url, **options)))

        body = chat("endless", stream=True)
        original = stream("POST", f"http://127.0.0.1:{first.port}{CHAT}", json=body, headers=IDS)
        path = f"http://127.0.0.1:{second.port}/v1/requests/{original.uid}"
        sent = original.frames_until(b"id: 10-0\n")
        first.process.kill()
        first.process.wait()
        resumed = stream("GET", f"{path}/events", headers={"Last-Event-ID": "10-0"})
        sent += resumed.frames_until(b"id: 200-0\n")
        by_text = stream("GET", f"{path}/events?after_characters={len('1 2')}")
        frames = [frame.partition(b"data: ")[2] for frame in by_text.frames_until(b"id: 200-0\n")]
        texts = [json.loads(frame)["choices"][0]["delta"]["content"] for frame in frames]
        assert texts == [" ", *(f"{n} " for n in range(3, 201))], "without an id, after the text that came"
        assert client.delete(path).json()["cancelled"] is True
        sent += resumed.frames_until(b"[DONE]")
        ids = [frame.partition(b"\n")[0] for frame in sent if frame.startswith(b"id: ")]
        assert ids[:200] == [b"id: %d-0" % n for n in range(1, 201)] and len(ids) == len(set(ids))
        assert b'"code":"cancelled"' in sent[-2]
        assert stream("GET", f"{path}/events").frames_until(b"[DONE]") == sent


def test_a_web_process_that_starts_again_beside_ready_stages_answers_its_first_request(redis_url: str) -> None:
    with closing(StandIn(redis_url, renews=True)), serving(redis_url, waits=False) as server:
        response = httpx.post(f"http://127.0.0.1:{server.port}{CHAT}", json=chat("one"), timeout=20)
        assert response.status_code == 200, response.text
