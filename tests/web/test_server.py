"""The web process as it is started: its socket, the official client, signals."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from structlog.testing import capture_logs
from support.redis_servers import command, until
from support.stand_in_stages import MODELS, StandIn
from support.web_process import ends, serving

from pipeline.errors import ConfigError
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.names import Names
from pipeline.stage.slots import SlotLease
from web.http.listener import open_listener
from web.live.frontend import Frontend
from web.server import Seat, _beat

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
ENDLESS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "endless"}]


def test_the_official_client_is_served_and_a_signal_ends_the_process(redis_url: str, stand_in: StandIn) -> None:
    with serving(redis_url) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == list(MODELS)
        assert client.models.retrieve(MODELS[0]).id == MODELS[0]
        whole = client.chat.completions.create(model=MODELS[0], messages=HELLO)
        assert whole.choices[0].message.content == "Hello\u2028!"
        options: Any = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODELS[0], messages=HELLO, stream=True, stream_options=options, seed=1
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello\u2028!"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-5")
        assert caught.value.code == "model_not_found" and caught.value.request_id
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODELS[0], messages=HELLO, n=0)
        assert refused.value.param == "n"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert command(redis_url, "EXISTS", Names().lease("web-0"), Names().status("web-0")) == 0


def test_a_closed_connection_cancels_its_request_after_the_grace_that_a_flag_gives(
    redis_url: str, stand_in: StandIn
) -> None:
    with serving(redis_url, "--disconnect-grace", "1.5") as server, server.client() as client:
        stream = client.chat.completions.create(model="default", messages=ENDLESS, stream=True)
        next(iter(stream))
        left_s = time.monotonic()
        stream.close()
        until(lambda: ends(stand_in, redis_url, "by") == ["client"])
        assert time.monotonic() - left_s >= 1.4


def test_a_key_that_leaves_the_file_of_limits_is_refused_and_its_requests_end(
    redis_url: str, stand_in: StandIn, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text('[[key]]\nkey = "x"\n')
    with serving(redis_url, "--limits", str(limits)) as server, server.client() as client:
        stream = client.chat.completions.create(model="default", messages=ENDLESS, stream=True)
        next(iter(stream))
        limits.write_text("")
        with pytest.raises(openai.APIError, match="revoked"):
            list(stream)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert ends(stand_in, redis_url, "by") == ["revoked"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_a_signal_ends_open_streams_with_an_error_frame_after_the_drain(redis_url: str, stand_in: StandIn) -> None:
    with serving(redis_url, patience_s=0.5) as server, server.client() as client:
        stream = client.chat.completions.create(model="default", messages=ENDLESS, stream=True)
        next(iter(stream))
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)  # as at Ctrl-C: not the second of its kind
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "shutting_down"
        assert server.process.wait(10) == 0
    assert ends(stand_in, redis_url, "code") == ["shutting_down"]


def test_a_second_signal_ends_the_process_at_once_and_the_log_keeps_the_request(
    redis_url: str, stand_in: StandIn
) -> None:
    with serving(redis_url) as server, server.client() as client:
        stream = client.chat.completions.create(model="default", messages=ENDLESS, stream=True)
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.status("/ready") == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 1
        stream.close()
    assert ends(stand_in, redis_url, "kind") == []


def test_a_taken_port_is_a_configuration_error_that_says_what_to_do() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            open_listener("127.0.0.1", port)
    with open_listener("127.0.0.1", port) as again:  # at once, though connections may linger
        assert again.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_not_ours_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
        open_listener("192.0.2.1", 0)


async def test_a_process_that_waits_for_the_slot_of_a_dead_one_tells_its_watchdog_that_it_is_alive(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.server.BEAT_S", 0.005)
    beats, heard, names = 0, asyncio.Event(), list[str]()

    class Named:
        def rename(self, name: str) -> None:
            names.append(name)

    def open_log() -> RedisLog:
        return RedisLog(redis_url, Names())

    with closing(open_log()) as log, Seat(open_log, 90, 0, Measures()) as seat:
        lost, report_progress = seat.slot_lease, SlotLease.report_progress

        def beat(lease: SlotLease, **patience: Any) -> None:
            nonlocal beats
            beats += lost.lost.is_set()
            if beats >= 20:
                heard.set()
            report_progress(lease, **patience)

        monkeypatch.setattr(SlotLease, "report_progress", beat)
        while (dead := log.acquire("web-0", "dead", 60_000)) is None:
            log.release(lost.owner)
        beating = asyncio.create_task(_beat(seat, cast(Frontend, Named())))
        async with asyncio.timeout(20):
            await heard.wait()
            assert seat.slot_lease is lost and names == []
            log.release(dead)
            while not names:
                await asyncio.sleep(0.005)
        assert names == ["web-0"] and seat.slot_lease is not lost
        beating.cancel()
        await asyncio.wait({beating})


async def test_a_bug_while_a_slot_is_taken_again_ends_the_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.server.BEAT_S", 0.005)

    class Lost:
        lost = threading.Event()

        def report_progress(self) -> None:
            self.lost.set()

    class Broken:
        slot_lease = Lost()

        def retake(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(20):
            await _beat(cast(Seat, Broken()), cast(Frontend, None))


def test_a_process_that_starts_while_redis_takes_no_writes_waits_for_its_slot(redis_url: str) -> None:
    command(redis_url, "CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        with capture_logs() as logs, ThreadPoolExecutor() as threads:
            coming = threads.submit(Seat, lambda: RedisLog(redis_url, Names()), 3000, 0, Measures())
            until(lambda: sum(line["event"] == "no_slot" for line in logs) > 1)
            command(redis_url, "CONFIG", "SET", "min-replicas-to-write", 0)
            with coming.result(10) as seat:
                assert seat.slot == "web-0"
    finally:
        command(redis_url, "CONFIG", "SET", "min-replicas-to-write", 0)
