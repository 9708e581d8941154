"""What requests leave behind, whether their clients wait for the end or go: nothing that lasts, and free pages."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.checkpoints import TEXT, make_checkpoint
from support.raw_client import connect, request
from support.selection import by_night
from support.servers import MEASURED_RETENTION_S, MEASURED_RUNNING, Server, eventually, serve

from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    Failed,
    Finished,
    Preempted,
    Submitted,
    TokensProduced,
    decode,
)
from pipeline.log.protocol import Inbox
from pipeline.names import LASTING, SEAL, Names

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("measured_server")]

NAMES = Names()
ENGINE = "generate-0"
NUM_STAYING, NUM_LEAVING_QUEUED, NUM_LEAVING_STREAM = by_night((32, 6, 6), (160, 20, 20))
CONTEXT = 4096
"""Enough for a request to run for many seconds, so that who leaves has left before it ends by itself."""

Body = Mapping[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3", max_positions=CONTEXT)


def prompt(label: str, said: str = "你好", **sampling: Any) -> dict[str, Any]:
    """Return a request that its history knows by *label*."""
    return {"messages": [{"role": "user", "content": said}], "user": label, **sampling}


def endless(label: str) -> dict[str, Any]:
    """Return a streamed request that runs until the context is full."""
    return prompt(label, ignore_eos=True, stream=True)


@contextlib.contextmanager
def streaming(server: Server, body: Body) -> Iterator[httpx.Response]:
    """Begin a stream and wait for its first words; the connection is closed at the end of the block."""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: httpx closes the connection with its last iterator
        assert any('"content":"' in line and '"content":""' not in line for line in lines)
        yield response
        del lines


@contextlib.contextmanager
def raw(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.redis_url, protocol=2, decode_responses=True) as client:
        yield client


def texts(found: Any) -> list[str]:
    """Return what a redis-py command brought, whose annotations leave open what it is."""
    return [str(item) for item in found]


def histories(server: Server) -> dict[str, list[tuple[str, AnyEvent]]]:
    """Return label -> (id, event) of the requests that have one, and of the frontend's probe."""
    with raw(server) as client:
        keys = texts(client.scan_iter(match=NAMES.request("*"), count=1000))
    with server.log() as log:
        found = log.histories([key.rpartition(":")[2] for key in keys])
    events = [[(entry.id, decode(entry.fields)) for entry in history] for history in found]
    told = {first.labels.get("user", first.endpoint): history for history in events if (first := submitted(history))}
    return {str(label): told[label] for label in told if not str(label).startswith("/")}


def submitted(history: Sequence[tuple[str, AnyEvent]]) -> Submitted:
    event = history[0][1]
    assert isinstance(event, Submitted)
    return event


def stay(server: Server, index: int) -> None:
    """Send a request of one kind or another and wait for its end."""
    kind, label = index % 8, f"stays {index}"
    said = TEXT[index : index + 1 + index % 60]
    sampling: dict[str, Any] = {"max_tokens": 1 + index % 24, "seed": index}
    if kind == 0:  # the template refuses it: the tokenizer ends it
        body = prompt(label) | {"messages": 2 * [{"role": "user", "content": said}]}
        assert server.post(body).json()["error"]["code"] == "template_error"
        return
    if kind == 1:  # a stop string: the detokenizer ends it, and the engine has to be told
        sampling |= {"stop": ["a", "e", "\n", "1"], "ignore_eos": True, "max_tokens": 400}
    if kind in (2, 3, 4):
        body = prompt(label, said, stream=True, **sampling)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
            *_, last = [line for line in response.iter_lines() if line]
        assert last == "data: [DONE]"
        return
    response = server.post(prompt(label, said, **sampling))
    assert response.status_code == 200, response.text


def leave_stream(server: Server, label: str) -> None:
    with streaming(server, endless(label)):
        pass


def leave_queued(server: Server) -> None:
    """Fill the engine with endless streams, let more clients queue behind them, and let all of them leave."""
    port = httpx.URL(server.url).port
    assert port is not None
    with raw(server) as client, contextlib.ExitStack() as runners, contextlib.ExitStack() as queued:
        eventually(lambda: client.zcard(NAMES.live) == 0, "all requests before have ended")
        for index in range(MEASURED_RUNNING):
            runners.enter_context(streaming(server, endless(f"leaves stream {index}")))
        clients = [queued.enter_context(contextlib.closing(connect(port))) for _ in range(NUM_LEAVING_QUEUED)]
        for index, each in enumerate(clients):
            each.send(request(prompt(f"leaves queued {index}", stream=index % 2 == 0)))
        expected = MEASURED_RUNNING + NUM_LEAVING_QUEUED
        eventually(lambda: client.zcard(NAMES.live) == expected, "all are accepted")
        for each, how in zip(clients, itertools.cycle(("closes", "resets", "half-closes"))):
            each.leave(how)
        eventually(lambda: client.zcard(NAMES.live) == MEASURED_RUNNING, "those that left are cancelled")


def left_over(server: Server) -> dict[str, int]:
    """Return how much there is of what a finished request must not leave."""
    inboxes = [Inbox.submitted(NAMES), Inbox.tokenized(NAMES), Inbox.steps(NAMES, ENGINE)]
    with raw(server) as client:
        found = {inbox.stream: int(client.execute_command("XLEN", inbox.stream)) for inbox in inboxes}
        for inbox in inboxes:
            pending = client.execute_command("XPENDING", inbox.stream, inbox.group)
            found[f"pending in {inbox.stream}"] = int(pending["pending"])
        found[NAMES.live] = int(client.execute_command("ZCARD", NAMES.live))
        steps = texts(client.scan_iter(match=NAMES.steps("*"), count=1000))
        assert steps == [NAMES.steps(ENGINE)], "the test knows of one engine"
    return found


def lasting_without_leave(server: Server) -> list[str]:
    """Return the keys that will never expire and are not among those that may last."""
    allowed = [NAMES.submitted.removesuffix("submitted") + pattern for pattern in LASTING]
    with raw(server) as client:
        forever = [key for key in texts(client.scan_iter(count=1000)) if int(client.execute_command("PTTL", key)) == -1]
    return [key for key in forever if not any(fnmatchcase(key, pattern) for pattern in allowed)]


def test_after_many_requests_nothing_is_left_that_lasts(measured_server: Server) -> None:
    server = measured_server
    order = random.Random(5).sample(range(most := NUM_STAYING + NUM_LEAVING_STREAM - MEASURED_RUNNING), most)
    with ThreadPoolExecutor(24) as threads:
        running = [
            threads.submit(stay, server, index)
            if index < NUM_STAYING
            else threads.submit(leave_stream, server, f"leaves stream {index - NUM_STAYING + MEASURED_RUNNING}")
            for index in order
        ]
    for each in running:
        each.result()
    leave_queued(server)
    eventually(lambda: not any(left_over(server).values()), "every work stream is empty and nothing pending")
    assert not any(left_over(server).values())
    assert lasting_without_leave(server) == []

    found = histories(server)
    probe = found.pop("probe")
    assert isinstance(probe[-1][1], Finished)
    assert len(found) == NUM_STAYING + NUM_LEAVING_QUEUED + NUM_LEAVING_STREAM
    for label, history in found.items():
        ids = [entry_id for entry_id, _ in history]
        ends = [event for _, event in history if isinstance(event, Finished | Failed | Cancelled)]
        assert len(ends) == 1 and ids[-1] == SEAL and len(set(ids)) == len(ids), label
        if label.startswith("stays"):
            assert isinstance(ends[0], Finished | Failed), label
        else:
            assert isinstance(ends[0], Cancelled) and ends[0].by == "client", label
            assert (ends[0].n == 0) == label.startswith("leaves queued"), label
    with raw(server) as client:
        for key in texts(client.scan_iter(match=NAMES.request("*"), count=1000)):
            assert 0 < int(client.execute_command("PTTL", key)) <= 1000 * MEASURED_RETENTION_S, (
                "the retention, not longer"
            )


@pytest.mark.night
def test_a_cache_filled_by_one_request_is_free_for_the_next_when_its_client_leaves(
    folder: Path, tmp_path: Path
) -> None:
    page_size, num_pages = 16, 32
    context = num_pages * page_size
    flags = ("--page-size", str(page_size), "--num-pages", str(num_pages))
    body = {"prompt": 3 * TEXT[:400], "ignore_eos": True}
    with serve(tmp_path, "--model", str(folder), *flags) as server:
        for _ in range(2):
            with streaming(server, body | {"user": "first", "stream": True}) as response:
                first = response.headers["x-minisgl-uid"]
            answer = server.post(body | {"user": "second"})
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            usage = answer.json()["usage"]
            assert usage["total_tokens"] == context, "it filled the cache to the last slot"
            assert usage["prompt_tokens"] > context / 2, "two do not fit"

            def events_of(uid: str) -> list[AnyEvent]:
                with server.log() as log:
                    return [decode(entry.fields) for entry in log.histories([uid])[0]]

            left, stayed = events_of(first), events_of(answer.headers["x-minisgl-uid"])
            assert isinstance(left[-1], Cancelled), "it did not end by itself"
            assert 0 < left[-1].n < usage["completion_tokens"]
            kinds = [type(event) for event in stayed if not isinstance(event, TokensProduced)]
            assert kinds.count(Admitted) == 1 and Preempted not in kinds
