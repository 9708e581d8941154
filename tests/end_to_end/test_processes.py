"""The process tree: how it ends, that nothing of it is left, and that what dies in it comes back unnoticed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from support.selection import rest_at_night
from support.servers import Server, eventually, free_port, is_alive, run_command, serve, wait_until_ready
from support.streams import LONG, PROMPTS, Stream, ask_all, begun, body, events_of, family_of, num_of, token_counts

from ops.bench.models import write_nonsense
from pipeline.events import Finished, TakenOver, Tokenized
from pipeline.log.protocol import Inbox
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB
from web.server import DRAIN_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

ENDLESS_CONTEXT = 200_000
"""Tokens that no server here can make within the time that a drain lasts."""
Answers = Mapping[str, tuple[str, str]]


def kill(server: Server, stage: str, streams: Sequence[Stream]) -> None:
    """Kill the worker of *stage* in the midst of *streams*: it stands still while we see that none of them is done."""
    (worker,) = server.command.workers(stage)
    num_deaths = len(server.command.log_lines("worker_died"))
    worker.suspend()
    try:
        with server.log() as log:
            assert not [s.uid for s in streams if s.uid and isinstance(events_of(log, s.uid)[-1], Finished)]
    except AssertionError:
        worker.resume()  # for the tests after this one
        raise
    worker.kill()
    eventually(lambda: not is_alive(worker), f"{worker} ends")
    eventually(lambda: len(server.command.log_lines("worker_died")) > num_deaths, "the supervisor notices")
    assert server.command.log_lines("worker_died")[-1]["worker"] == f"{stage}-0"
    eventually(lambda: len(server.command.workers(stage)) == 1, f"{stage} is started again")


# What dies comes back


@pytest.mark.parametrize("stage", [GENERATE, DETOKENIZE])
def test_a_killed_engine_or_detokenizer_is_restarted_and_its_streams_go_on(
    stage: str, plain_server: Server, undisturbed: Answers
) -> None:
    streams = begun(plain_server)
    kill(plain_server, stage, streams)
    assert {stream.prompt: stream.answer for stream in streams} == undisturbed
    with plain_server.log() as log:
        for stream in streams:
            events = events_of(log, stream.uid)
            assert sum(token_counts(events)) == LONG and isinstance(events[-1], Finished)
            assert num_of(events, TakenOver) == (stage == GENERATE)


def test_a_killed_tokenizer_is_restarted_and_who_waited_for_it_is_answered(
    plain_server: Server, undisturbed: Answers
) -> None:
    (worker,) = plain_server.command.workers(TOKENIZE)
    with plain_server.log() as log:
        worker.suspend()  # between read and commit for what it has taken, and the rest nobody has taken
        streams = ask_all(plain_server)
        submitted = Inbox.submitted(log.names)
        eventually(lambda: log.backlog(submitted) == len(PROMPTS), "all are submitted")
        kill(plain_server, TOKENIZE, streams)
        assert {stream.prompt: stream.answer for stream in streams} == undisturbed
        assert [num_of(events_of(log, stream.uid), Tokenized) for stream in streams] == [1] * len(PROMPTS)


def test_when_the_frontend_is_killed_its_clients_are_cut_off_and_their_requests_run_on_to_their_end(
    plain_server: Server,
) -> None:
    streams = begun(plain_server)
    kill(plain_server, WEB, streams)
    for stream in streams:
        assert isinstance(stream.join().error, httpx.RemoteProtocolError | httpx.ReadError), stream.lines[-3:]
        assert "data: [DONE]" not in stream.lines
    with plain_server.log() as log:
        for stream in streams:
            eventually(lambda uid=stream.uid: isinstance(events_of(log, uid)[-1], Finished), "it ends in the log")  # type: ignore[misc]
            end = events_of(log, stream.uid)[-1]
            assert isinstance(end, Finished) and end.usage.completion_tokens == LONG
    wait_until_ready(plain_server.url, [plain_server.command])
    assert plain_server.post(body("Are you back?", max_tokens=3)).status_code == 200


# How it ends. SIGINT ends `plain_server`, in test_redis_faults; test_recovery kills a supervisor.


@pytest.mark.parametrize("number", rest_at_night([signal.SIGTERM, signal.SIGINT]), ids=lambda number: number.name)
def test_a_signal_ends_a_server_that_is_not_ready_yet_without_an_error(number: signal.Signals, tmp_path: Path) -> None:
    with serve(tmp_path, ready=False) as server:
        eventually(lambda: bool(server.command.workers(DETOKENIZE)), "all processes are there")
        with family_of(server.command) as family:
            server.command.process.send_signal(number)
            assert server.command.process.wait(60) == 0
            eventually(lambda: not any(map(is_alive, family)), "all its processes end")
            assert "Traceback" not in server.command.output


@pytest.mark.night  # by day tests/web/http/test_connections.py ends a web process, and `plain_server` a whole server
def test_sigterm_lets_a_short_stream_end_well_and_tells_an_endless_one_that_it_shuts_down(tmp_path: Path) -> None:
    model = tmp_path / "endless"
    model.mkdir()
    write_nonsense(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ENDLESS_CONTEXT}))
    with (
        serve(tmp_path, "--model", str(model), "--num-pages", str(ENDLESS_CONTEXT // 64), "--lease", "30") as server,
        family_of(server.command) as family,
    ):
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
        (engine,) = server.command.workers(GENERATE)
        engine.suspend()  # it would take a core for as long as the streams have, and has a lease that lasts longer
        time.sleep(DRAIN_S / 2)
        engine.resume()
        *before, last = endless.frames
        assert all("choices" in frame for frame in before)
        assert (last["error"]["code"], last["error"]["type"]) == ("shutting_down", "service_unavailable")

        assert server.command.process.wait(60) == 0
        assert not any(map(is_alive, family))
        lines = [json.loads(line) for line in server.command.output.splitlines() if line.startswith("{")]
        told = [line.get("uid", line["event"]) for line in lines if line["event"] in ("signal", "request")]
        story = [each for each in told if each in ("signal", short.uid, endless.uid)]
        assert story == ["signal", short.uid, endless.uid]


@pytest.mark.night  # by day tests/pipeline/stage/test_supervisor.py has one
def test_a_worker_that_finds_its_configuration_broken_ends_everything(tmp_path: Path) -> None:
    """The supervisor does not look into tokenizer.json; who does says its one line, and is not started again."""
    model = tmp_path / "model"
    model.mkdir()
    write_nonsense(model)
    (model / "tokenizer.json").write_text("{}")
    arguments = ["serve", "--port", str(free_port()), "--data-dir", str(tmp_path / "data"), "--model", str(model)]
    command = run_command(arguments, tmp_path)
    eventually(lambda: bool(command.workers(DETOKENIZE)) or command.process.poll() is not None, "it starts")
    family = command.processes()
    try:
        assert command.process.wait(60) == 2
        eventually(lambda: not any(map(is_alive, family)), "all its processes end")
    finally:
        command.stop()
    said = [line for line in command.output.splitlines() if line.startswith("minisgl: ")]
    assert said and all(f"{model / 'tokenizer.json'}: not a tokenizer" in line for line in said)
    assert "Traceback" not in command.output
