"""Redis dies, stands still, fills up, loses its data: each fault has one right answer, and no process restarts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
import pytest
from redis_servers import Servers, command, watched
from servers import Server, eventually, serve
from streams import LONG, PROMPTS, Stream, ask_all, body, events_of

from pipeline.events import Cancelled, Finished, TakenOver, TokensProduced
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import STAGES, TOKENIZE

pytestmark = pytest.mark.slow

PAUSE_S = 12.0
"""Longer than the lease and every time-out."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, tuple[str, str]]:
    """Prompt -> what is answered to it when nothing happens."""
    answers = {stream.prompt: stream.answer for stream in ask_all(server)}
    assert len(set(answers.values())) == len(PROMPTS)
    return answers


@contextlib.contextmanager
def no_process_restarts(server: Server) -> Iterator[None]:
    before = {stage: [worker.pid for worker in server.command.workers(stage)] for stage in STAGES}
    assert all(len(pids) == 1 for pids in before.values())
    yield
    assert {stage: [worker.pid for worker in server.command.workers(stage)] for stage in STAGES} == before
    assert not server.command.log_lines("worker_died")


@contextlib.contextmanager
def running_streams(server: Server) -> Iterator[list[Stream]]:
    """Give one stream for each prompt, all of which have begun."""
    streams = ask_all(server)
    eventually(lambda: all(stream.num_frames > 5 for stream in streams), "all streams have begun")
    yield streams


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
    server: Server, streams: list[Stream], undisturbed: Mapping[str, tuple[str, str]], *, epochs: int = 1
) -> None:
    """Each client has its whole answer once, and each history each token once, said by so many epochs of an engine."""
    for stream in streams:
        assert stream.answer == undisturbed[stream.prompt]
    with server.log() as log:
        for stream in streams:
            events = events_of(log, stream.uid)
            tokens = [event for event in events if isinstance(event, TokensProduced)]
            assert [event.count for event in tokens] == [1] * LONG
            assert isinstance(events[-1], Finished)
            assert sum(isinstance(event, TakenOver) for event in events) == epochs - 1
            assert len({event.step.partition("-")[0] for event in tokens}) == epochs


def assert_nothing_is_left(log: RedisLog) -> None:
    names = log.names
    inboxes = (Inbox.submitted(names), Inbox.tokenized(names), Inbox.steps(names, "generate-0"))
    eventually(lambda: not any(log.backlog(inbox) for inbox in inboxes), "the work streams are empty")
    assert log.living() == []


def test_a_redis_that_is_killed_and_comes_back_with_its_data_costs_nothing(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    with no_process_restarts(server), running_streams(server) as streams:
        num_deaths = len(server.command.log_lines("redis_died"))
        redis_of(server).kill()
        eventually(lambda: len(server.command.log_lines("redis_died")) > num_deaths, "the supervisor notices")
        assert_all_is_as_undisturbed(server, streams, undisturbed, epochs=2)


def test_a_redis_that_comes_back_with_older_data_costs_only_what_is_computed_again(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    """As after a power loss, or a failover to a replica that had not got the last writes."""
    folder = data_folder_of(server)
    with no_process_restarts(server), running_streams(server) as streams:
        redis, older = redis_of(server), folder.parent / "older"
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
        for stream in streams:
            assert stream.answer == undisturbed[stream.prompt]
        with server.log() as log:
            for stream in streams:
                events = events_of(log, stream.uid)
                assert [event.count for event in events if isinstance(event, TokensProduced)] == [1] * LONG
                assert isinstance(events[-1], Finished)
                assert sum(isinstance(event, TakenOver) for event in events) == 1
            assert_nothing_is_left(log)


def test_a_redis_that_comes_back_empty_costs_only_the_streams_that_had_begun(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    """Who was sent nothing yet is answered as if nothing had happened; the others cannot go on, and are told."""
    with no_process_restarts(server), running_streams(server) as begun:
        (tokenizer,) = server.command.workers(TOKENIZE)
        tokenizer.suspend()
        prompts = [f"Wait for me, number {number}." for number in range(4)]
        waiting = [Stream(server, prompt, max_tokens=20) for prompt in prompts]
        with server.log() as log:
            submitted = Inbox.submitted(log.names)
            eventually(lambda: log.backlog(submitted) == len(waiting), "they are submitted")
        assert not any(stream.is_over for stream in begun)

        redis = redis_of(server)
        redis.suspend()
        forget_data(data_folder_of(server))
        redis.kill()
        tokenizer.resume()

        for stream in begun:
            *before, last = stream.frames
            assert last["error"]["code"] == "log_lost"
            assert all("choices" in frame for frame in before)
        answers = [stream.answer for stream in waiting]
        assert [reason for _, reason in answers] == ["length"] * len(prompts)
        again = [Stream(server, prompt, max_tokens=20).answer for prompt in prompts]
        assert answers == again
        assert_all_is_as_undisturbed(server, ask_all(server), undisturbed)
        with server.log() as log:
            assert_nothing_is_left(log)


def test_a_redis_that_stands_still_for_long_costs_only_that_time(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    with no_process_restarts(server), running_streams(server) as streams:
        redis = redis_of(server)
        redis.suspend()
        try:
            time.sleep(PAUSE_S)  # the one thing here that is a matter of time
        finally:
            redis.resume()
        assert_all_is_as_undisturbed(server, streams, undisturbed)


def test_a_full_redis_takes_no_new_work_and_lets_the_rest_drain_or_be_cancelled(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    with no_process_restarts(server), running_streams(server) as streams:
        leaving = Stream(server, "I shall not stay.", max_tokens=4000)
        eventually(lambda: leaving.num_frames > 5, "it has begun")
        command(server.redis_url, "CONFIG", "SET", "maxmemory", 1)
        try:
            refused = server.post(body("Is there room?"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            leaving.leave()
            with server.log() as log:
                eventually(lambda: isinstance(events_of(log, leaving.uid)[-1], Cancelled), "it is cancelled")
            assert_all_is_as_undisturbed(server, streams, undisturbed)
        finally:
            command(server.redis_url, "CONFIG", "SET", "maxmemory", 0)
        assert server.post(body("And now?", max_tokens=3)).status_code == 200


def test_a_redis_that_forgot_the_scripts_is_given_them_again(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    with no_process_restarts(server), running_streams(server) as streams:
        for _ in range(5):
            command(server.redis_url, "SCRIPT", "FLUSH")
        assert_all_is_as_undisturbed(server, streams, undisturbed)


def test_a_redis_that_is_read_only_after_a_failover_is_waited_for(
    server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    with no_process_restarts(server), running_streams(server) as streams:
        command(server.redis_url, "REPLICAOF", "127.0.0.1", 1)
        try:
            assert server.post(body("Who may write?")).status_code == 503
        finally:
            command(server.redis_url, "REPLICAOF", "NO", "ONE")
        assert_all_is_as_undisturbed(server, streams, undisturbed)


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
            stream = Stream(server, "Tell me a story.")
            eventually(lambda: stream.num_frames > 5, "it has begun")
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


@pytest.mark.night
def test_a_failover_that_sentinels_decide_is_followed_by_everybody(redis_servers: Servers, tmp_path: Path) -> None:
    with watched(redis_servers.binary("path"), tmp_path) as group, serve(tmp_path, redis_url=group.url) as server:
        expected = Stream(server, "Tell me a story.").answer
        stream = Stream(server, "Tell me a story.")
        eventually(lambda: stream.num_frames > 5, "it has begun")
        with no_process_restarts(server):
            group.master.process.kill()
            assert stream.answer == expected
            assert Stream(server, "Tell me a story.").answer == expected
