"""Redis dies, stands still, fills up, loses its data: each fault has one right answer, and no process restarts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from support.redis_servers import Servers, command
from support.servers import Server, eventually, serve
from support.streams import (
    Stream,
    ask_all,
    assert_nothing_is_left,
    assert_whole,
    begun,
    body,
    events_of,
    no_process_restarts,
    num_of,
)

from pipeline.events import Cancelled, TakenOver, TokensProduced
from pipeline.log.protocol import Inbox
from pipeline.names import GENERATE, STAGES, TOKENIZE, slot_name

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

PAUSE_S = 12.0
"""Longer than the lease and every time-out."""
Answers = Mapping[str, tuple[str, str]]


def redis_of(server: Server) -> psutil.Process:
    (process,) = (process for process in server.command.processes() if process.name().endswith("-server"))
    return process


def data_folder_of(server: Server) -> Path:
    return Path(server.redis_url.removeprefix("unix://")).parent


def forget_data(folder: Path) -> None:
    """Remove the append-only file, of 6.2, or files, of 7."""
    for path in (folder / "appendonlydir", folder / "appendonly.aof"):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)


def assert_all_is_as_undisturbed(
    server: Server, streams: Sequence[Stream], undisturbed: Answers, *, takeovers: int = 0
) -> None:
    """Each client has its whole answer once, and each history each token once, with so many takeovers."""
    assert {stream.prompt: stream.answer for stream in streams} == undisturbed
    with server.log() as log:
        for events in assert_whole(log, streams):
            assert num_of(events, TakenOver) == takeovers
            epochs = {event.step.partition("-")[0] for event in events if isinstance(event, TokensProduced)}
            assert len(epochs) <= takeovers + 1
        assert_nothing_is_left(log)


def num_missed(server: Server) -> int:
    """Return how often the engine's thread to the log has missed it. Its lines name no stage, the others' do."""
    return sum("stage" not in line for line in server.command.log_lines("log_unavailable"))


def begun_and_held(server: Server, engine: psutil.Process) -> list[Stream]:
    """Return streams that have begun, and of which none has ended for *engine*, which stands still."""
    with server.log() as log:
        for _ in range(10):  # a machine that is busy with others may look too late
            streams = begun(server)
            engine.suspend()
            if log.backlog(Inbox.tokenized(log.names)) == len(streams):
                return streams
            engine.resume()
            for stream in streams:
                stream.join()
    pytest.fail("the engine was always done before it could be stopped")


def test_a_redis_that_is_killed_and_comes_back_with_its_data_costs_nothing(
    plain_server: Server, undisturbed: Answers
) -> None:
    """It comes back when the engine has missed it: an engine that asks for nothing meanwhile takes nothing over."""
    supervisor = psutil.Process(plain_server.command.process.pid)
    (engine,) = plain_server.command.workers(GENERATE)
    with no_process_restarts(plain_server):
        streams = begun_and_held(plain_server, engine)
        missed_before, num_deaths = num_missed(plain_server), len(plain_server.command.log_lines("redis_died"))
        supervisor.suspend()
        try:
            redis_of(plain_server).kill()
            engine.resume()
            eventually(lambda: num_missed(plain_server) > missed_before, "the engine misses Redis")
        finally:
            supervisor.resume()
        eventually(lambda: len(plain_server.command.log_lines("redis_died")) > num_deaths, "the supervisor notices")
        assert_all_is_as_undisturbed(plain_server, streams, undisturbed, takeovers=1)


@pytest.mark.night  # by day a Redis comes back with its data, and empty
def test_a_redis_that_comes_back_with_older_data_costs_only_what_is_computed_again(
    plain_server: Server, undisturbed: Answers
) -> None:
    """As after a power loss, or a failover to a replica that had not got the last writes."""
    folder = data_folder_of(plain_server)
    older = folder.parent / "older"
    with no_process_restarts(plain_server):
        streams = begun(plain_server)
        redis = redis_of(plain_server)
        redis.suspend()
        shutil.copytree(folder, older, ignore=shutil.ignore_patterns("*.sock", "lock", "*.log"))
        frames = [stream.num_frames for stream in streams]
        redis.resume()
        eventually(
            lambda: all(stream.num_frames > 20 + before for stream, before in zip(streams, frames, strict=True)),
            "all streams have gone on",
        )
        assert not any(stream.is_over for stream in streams)
        redis.suspend()
        forget_data(folder)
        shutil.copytree(older, folder, dirs_exist_ok=True)
        redis.kill()
        assert_all_is_as_undisturbed(plain_server, streams, undisturbed, takeovers=1)


def test_a_redis_that_comes_back_empty_costs_nothing_of_which_a_frontend_knows(
    plain_server: Server, undisturbed: Answers
) -> None:
    """Requests begin again, and each client is sent what it does not have yet."""
    with no_process_restarts(plain_server):
        streams = begun(plain_server)
        (tokenizer,) = plain_server.command.workers(TOKENIZE)
        tokenizer.suspend()
        prompts = [f"Wait for me, number {number}." for number in range(4)]
        waiting = [Stream(plain_server, prompt, max_tokens=20) for prompt in prompts]
        with plain_server.log() as log:
            submitted = Inbox.submitted(log.names)
            eventually(lambda: log.backlog(submitted) == len(waiting), "they are submitted")
        assert not any(stream.is_over for stream in streams)

        redis = redis_of(plain_server)
        redis.suspend()
        forget_data(data_folder_of(plain_server))
        redis.kill()
        tokenizer.resume()

        assert {stream.prompt: stream.answer for stream in streams} == undisturbed
        answers = [stream.answer for stream in waiting]
        assert [reason for _, reason in answers] == ["length"] * len(prompts)
        assert answers == [Stream(plain_server, prompt, max_tokens=20).answer for prompt in prompts]
        assert_all_is_as_undisturbed(plain_server, ask_all(plain_server), undisturbed)


@pytest.mark.night  # by day test_takeover does it, with two workers of each stage
def test_a_redis_that_stands_still_for_long_costs_only_that_time(plain_server: Server, undisturbed: Answers) -> None:
    with no_process_restarts(plain_server):
        streams = begun(plain_server)
        redis = redis_of(plain_server)
        redis.suspend()
        try:
            time.sleep(PAUSE_S)  # the one thing here that is a matter of time
        finally:
            redis.resume()
        assert_all_is_as_undisturbed(plain_server, streams, undisturbed)


def test_a_full_redis_takes_no_new_work_and_lets_the_rest_drain_or_be_cancelled(
    plain_server: Server, undisturbed: Answers
) -> None:
    with no_process_restarts(plain_server):
        streams = begun(plain_server)
        leaving = Stream(plain_server, "I shall not stay.", max_tokens=4000).begun()
        command(plain_server.redis_url, "CONFIG", "SET", "maxmemory", 1)
        try:
            refused = plain_server.post(body("Is there room?"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            leaving.leave()
            with plain_server.log() as log:
                eventually(lambda: isinstance(events_of(log, leaving.uid)[-1], Cancelled), "it is cancelled")
            assert_all_is_as_undisturbed(plain_server, streams, undisturbed)
        finally:
            command(plain_server.redis_url, "CONFIG", "SET", "maxmemory", 0)
        assert plain_server.post(body("And now?", max_tokens=3)).status_code == 200


@pytest.mark.night  # by day test_redis_faults misses its replicas
def test_a_redis_that_forgot_the_scripts_or_is_read_only_after_a_failover_is_waited_for(
    plain_server: Server, undisturbed: Answers
) -> None:
    with no_process_restarts(plain_server):
        streams, missed_before = begun(plain_server), num_missed(plain_server)
        command(plain_server.redis_url, "SCRIPT", "FLUSH")
        command(plain_server.redis_url, "REPLICAOF", "127.0.0.1", 1)
        try:
            assert plain_server.post(body("Who may write?")).status_code == 503
            eventually(lambda: num_missed(plain_server) > missed_before, "the engine may not write")
        finally:
            command(plain_server.redis_url, "REPLICAOF", "NO", "ONE")
        assert_all_is_as_undisturbed(plain_server, streams, undisturbed, takeovers=1)  # as another one could lack steps


def test_a_redis_that_misses_its_replicas_for_longer_than_a_lease_is_waited_for(
    plain_server: Server, undisturbed: Answers
) -> None:
    with no_process_restarts(plain_server), plain_server.log() as log:
        streams = begun(plain_server)
        command(plain_server.redis_url, "CONFIG", "SET", "min-replicas-to-write", 1)
        try:
            refused = plain_server.post(body("Is it written twice?"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            leases = [log.names.lease(slot_name(stage, 0)) for stage in STAGES]
            eventually(lambda: command(plain_server.redis_url, "EXISTS", *leases) == 0, "all leases have run out")
            assert not any(stream.is_over for stream in streams)
        finally:
            command(plain_server.redis_url, "CONFIG", "SET", "min-replicas-to-write", 0)
        assert_all_is_as_undisturbed(plain_server, streams, undisturbed)
        assert plain_server.post(body("And now?", max_tokens=3)).status_code == 200


@pytest.mark.night
def test_while_redis_loads_its_data_the_server_is_not_ready_and_then_goes_on(
    redis_servers: Servers, tmp_path: Path
) -> None:
    """A Redis of somebody else, which takes long to load: some of its keys slow it down."""
    folder = tmp_path / "redis"
    folder.mkdir()
    url = f"unix://{folder / 'redis.sock'}"
    words: list[str | Path] = [redis_servers.binary("path"), "--port", "0", "--dir", folder]
    words += ["--unixsocket", folder / "redis.sock"]
    words += ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"]

    def start(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*words, *more], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        with contextlib.suppress(Exception):
            return bool(command(url, "PING"))
        return False

    process = start()
    try:
        eventually(answers, "Redis is up")
        for number in range(2000):
            command(url, "SET", f"ballast:{number}", "x" * 1000)
        with serve(tmp_path, redis_url=url) as server:
            expected = Stream(server, "Tell me a story.").answer
            stream = Stream(server, "Tell me a story.").begun()
            with no_process_restarts(server):
                command(url, "BGREWRITEAOF")
                process.kill()
                process.wait()
                process = start("--key-load-delay", "1500", "--loading-process-events-interval-bytes", "1024")
                seen: set[int] = set()

                def is_ready() -> bool:
                    seen.add(httpx.get(f"{server.url}/ready", timeout=30).status_code)
                    return 503 in seen and 200 in seen

                eventually(is_ready, "it is not ready, and ready again", timeout_s=60)
                assert stream.answer == expected
    finally:
        process.kill()
        process.wait()
