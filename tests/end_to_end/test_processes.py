"""The process tree: how it ends, that nothing of it is left, and that what dies in it comes back unnoticed."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from selection import rest_at_night
from servers import Command, Server, eventually, free_port, run_command, serve, wait_until_ready
from streams import LONG, PROMPTS, Stream, ask_all, body, events_of, family_of, is_gone

from ops.bench import nonsense
from pipeline.events import Finished, TakenOver, Tokenized, TokensProduced
from pipeline.log.protocol import Inbox
from pipeline.names import DETOKENIZE, GENERATE, STAGES, TOKENIZE, WEB

pytestmark = pytest.mark.slow

ENDLESS_CONTEXT = 200_000
"""Tokens that no server here can make within the time that a drain lasts."""


def assert_is_whole(family: Sequence[psutil.Process], command: Command) -> None:
    """A supervisor, its Redis and one worker of each stage: else a test that finds nothing left proves nothing."""
    assert [len(command.workers(stage)) for stage in STAGES] == [1, 1, 1, 1]
    assert len(family) == 6
    assert any(process.name().endswith("-server") for process in family)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of the tests that kill only workers: it is whole again after each."""
    with serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple[str, str]]:
    """What is answered to the prompts when nobody dies."""
    answers = [stream.answer for stream in ask_all(server)]
    assert len(set(answers)) == len(PROMPTS)
    assert {reason for _, reason in answers} == {"length"}
    return answers


def kill(server: Server, stage: str, streams: Sequence[Stream]) -> None:
    """Kill the worker of *stage* in the midst of *streams*: it stands still while we see that none of them is done."""
    (worker,) = server.command.workers(stage)
    num_deaths = len(server.command.log_lines("worker_died"))
    worker.suspend()
    with server.log() as log:
        ended = [
            stream.uid for stream in streams if stream.uid and isinstance(events_of(log, stream.uid)[-1], Finished)
        ]
    assert not ended
    worker.kill()
    eventually(lambda: is_gone(worker), f"{worker} ends")
    eventually(lambda: len(server.command.log_lines("worker_died")) > num_deaths, "the supervisor notices")
    assert server.command.log_lines("worker_died")[-1]["worker"] == f"{stage}-0"
    eventually(lambda: len(server.command.workers(stage)) == 1, f"{stage} is started again")


# What dies comes back


@pytest.mark.parametrize("stage", [GENERATE, DETOKENIZE])
def test_a_killed_engine_or_detokenizer_is_restarted_and_its_streams_go_on(
    stage: str, server: Server, undisturbed: list[tuple[str, str]]
) -> None:
    streams = ask_all(server)
    eventually(lambda: all(stream.num_frames > 5 for stream in streams), "all streams have begun")
    kill(server, stage, streams)
    assert [stream.answer for stream in streams] == undisturbed
    with server.log() as log:
        for stream in streams:
            events = events_of(log, stream.uid)
            tokens = [event for event in events if isinstance(event, TokensProduced)]
            assert sum(event.count for event in tokens) == LONG
            assert isinstance(events[-1], Finished)
            assert any(isinstance(event, TakenOver) for event in events) is (stage == GENERATE)


def test_a_killed_tokenizer_is_restarted_and_who_waited_for_it_is_answered(
    server: Server, undisturbed: list[tuple[str, str]]
) -> None:
    (worker,) = server.command.workers(TOKENIZE)
    with server.log() as log:
        worker.suspend()  # between read and commit for what it has taken, and the rest nobody has taken
        streams = ask_all(server)
        submitted = Inbox.submitted(log.names)
        eventually(lambda: log.backlog(submitted) == len(PROMPTS), "all are submitted")
        kill(server, TOKENIZE, streams)
        assert [stream.answer for stream in streams] == undisturbed
        for stream in streams:
            assert sum(isinstance(event, Tokenized) for event in events_of(log, stream.uid)) == 1


def test_when_the_frontend_is_killed_its_clients_are_cut_off_and_their_requests_run_on_to_their_end(
    server: Server,
) -> None:
    streams = ask_all(server)
    eventually(lambda: all(stream.num_frames > 5 for stream in streams), "all streams have begun")
    kill(server, WEB, streams)
    for stream in streams:
        assert isinstance(stream.join().error, httpx.RemoteProtocolError | httpx.ReadError), stream.lines[-3:]
        assert "data: [DONE]" not in stream.lines
    with server.log() as log:
        for stream in streams:
            eventually(lambda uid=stream.uid: isinstance(events_of(log, uid)[-1], Finished), "it ends in the log")  # type: ignore[misc]
            end = events_of(log, stream.uid)[-1]
            assert isinstance(end, Finished) and end.usage.completion_tokens == LONG
    wait_until_ready(server.url, [server.command])
    assert server.post(body("Are you back?", max_tokens=3)).status_code == 200


def test_a_killed_redis_is_started_again_and_all_streams_go_on(
    server: Server, undisturbed: list[tuple[str, str]]
) -> None:
    streams = ask_all(server)
    eventually(lambda: all(stream.num_frames > 5 for stream in streams), "all streams have begun")
    (redis,) = (process for process in server.command.processes() if process.name().endswith("-server"))
    pids = {stage: [worker.pid for worker in server.command.workers(stage)] for stage in STAGES}
    redis.kill()
    eventually(lambda: bool(server.command.log_lines("redis_died")), "the supervisor notices")
    assert [stream.answer for stream in streams] == undisturbed
    assert {stage: [worker.pid for worker in server.command.workers(stage)] for stage in STAGES} == pids


def test_after_all_these_deaths_the_server_ends_as_any_other(server: Server) -> None:
    with family_of(server.command) as family:
        assert_is_whole(family, server.command)
        assert server.command.stop() == 0
        assert [process for process in family if not is_gone(process)] == []


# How it ends


@pytest.mark.parametrize("number", rest_at_night([signal.SIGTERM, signal.SIGINT]), ids=lambda number: number.name)
def test_a_signal_ends_a_server_that_is_not_ready_yet_without_an_error(number: signal.Signals, tmp_path: Path) -> None:
    with serve(tmp_path, ready=False) as server:
        eventually(lambda: bool(server.command.workers(DETOKENIZE)), "all processes are there")
        with family_of(server.command) as family:
            server.command.process.send_signal(number)
            assert server.command.process.wait(60) == 0
            eventually(lambda: all(map(is_gone, family)), "all its processes end")
            assert "Traceback" not in server.command.output


def test_sigint_ends_the_server_and_all_its_processes(tmp_path: Path) -> None:
    with serve(tmp_path) as server, family_of(server.command) as family:
        assert_is_whole(family, server.command)
        server.command.process.send_signal(signal.SIGINT)
        assert server.command.process.wait(60) == 0
        assert [process for process in family if not is_gone(process)] == []
        assert "Traceback" not in server.command.output


def test_sigterm_lets_a_short_stream_end_well_and_tells_an_endless_one_that_it_shuts_down(tmp_path: Path) -> None:
    model = tmp_path / "endless"
    model.mkdir()
    nonsense.write(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ENDLESS_CONTEXT}))
    with (
        serve(tmp_path, "--model", str(model), "--num-pages", str(ENDLESS_CONTEXT // 64)) as server,
        family_of(server.command) as family,
    ):
        assert_is_whole(family, server.command)
        endless = Stream(server, "Never end.", max_tokens=None)
        short = Stream(server, "Be short.")
        eventually(lambda: min(short.num_frames, endless.num_frames) > 2, "both streams have begun")
        server.command.process.send_signal(signal.SIGTERM)
        eventually(lambda: bool(server.command.log_lines("signal")), "the frontend hears of it")

        refused = server.post(body("Too late."))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"]
        assert httpx.get(f"{server.url}/ready").json()["status"] == "draining"

        text, reason = short.answer
        assert text and reason == "length"
        *before, last = endless.frames
        assert all("choices" in frame for frame in before)
        assert last["error"]["code"] == "shutting_down"
        assert last["error"]["type"] == "service_unavailable"

        assert server.command.process.wait(60) == 0
        assert [process for process in family if not is_gone(process)] == []
        lines = [json.loads(line) for line in server.command.output.splitlines() if line.startswith("{")]
        told = [line.get("uid", line["event"]) for line in lines if line["event"] in ("signal", "request")]
        story = [each for each in told if each in ("signal", short.uid, endless.uid)]
        assert story == ["signal", short.uid, endless.uid]


def test_kill_9_of_the_supervisor_leaves_nothing_and_the_next_start_finishes_what_was_accepted(tmp_path: Path) -> None:
    with serve(tmp_path) as server, family_of(server.command) as family:
        assert_is_whole(family, server.command)
        stream = Stream(server, "To be continued.", max_tokens=500)
        eventually(lambda: stream.num_frames > 5, "the stream has begun")
        server.command.process.kill()
        server.command.process.wait()
        eventually(lambda: all(map(is_gone, family)), "all its processes end")
        assert isinstance(stream.join().error, httpx.RemoteProtocolError | httpx.ReadError)

    with serve(tmp_path) as again, again.log() as log:
        assert again.post(body("Who are you?", max_tokens=3)).status_code == 200
        eventually(lambda: isinstance(events_of(log, stream.uid)[-1], Finished), "the next start finishes it")
        events = events_of(log, stream.uid)
        assert [event.count for event in events if isinstance(event, TokensProduced)] == [1] * 500
        assert sum(isinstance(event, TakenOver) for event in events) == 1


def test_a_worker_that_finds_its_configuration_broken_ends_everything(tmp_path: Path) -> None:
    """The supervisor does not look into tokenizer.json; who does says its one line, and is not started again."""
    model = tmp_path / "model"
    model.mkdir()
    nonsense.write(model)
    (model / "tokenizer.json").write_text("{}")
    arguments = ["serve", "--port", str(free_port()), "--data-dir", str(tmp_path / "data"), "--model", str(model)]
    command = run_command(arguments, tmp_path)
    eventually(lambda: bool(command.workers(DETOKENIZE)) or command.process.poll() is not None, "it starts")
    with family_of(command) as family:
        assert command.process.wait(60) == 2
        eventually(lambda: all(map(is_gone, family)), "all its processes end")
    said = [line for line in command.output.splitlines() if line.startswith("minisgl: ")]
    assert said and all(f"{model / 'tokenizer.json'}: not a tokenizer" in line for line in said)
    assert "Traceback" not in command.output
    shutil.rmtree(model)
