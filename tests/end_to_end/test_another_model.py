"""A namespace serves one model: what does not fit to the workers that live there ends with one line and exit code 2."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.redis_servers import Servers, running_server
from support.servers import Command, Server, eventually, free_port, run_command, serve, wait_until_ready
from support.streams import Stream, events_of

from ops.bench.models import nonsense
from pipeline.events import Admitted, Failed, Finished
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]


def refusal(folder: Path, *arguments: str) -> str:
    """Run a command that must end by itself, not restarted, and return the one line that says why."""
    command = run_command(arguments, folder)
    try:
        assert command.process.wait(60) == 2, command.output
        assert command.log_lines("worker_died") == []
        [line] = (line for line in command.output.splitlines() if not line.startswith("{"))
        return line
    finally:
        command.stop()


def with_other_weights(folder: Path) -> Path:
    """Write the model of `plain_server` under *folder*, as after another training."""
    model = shutil.copytree(nonsense(folder / "models"), folder / "tuned")
    weights = load_file(model / "model.safetensors")
    save_file({name: (values * np.float32(0.5)) for name, values in weights.items()}, model / "model.safetensors")
    return model


@pytest.mark.night  # by day the contract of the log has it
def test_other_weights_are_refused_beside_a_living_server(plain_server: Server, tmp_path: Path) -> None:
    model, redis = with_other_weights(tmp_path), ("--redis-url", plain_server.redis_url)
    line = refusal(tmp_path, "stage", "generate", "--model", str(model), *redis)
    assert line.startswith("minisgl: --namespace minisgl: its generate workers serve minisgl-nonsense (weights ")
    assert "but this worker has tuned (weights " in line and "pass another --namespace, or stop them first" in line
    assert plain_server.post({"prompt": "still there", "max_tokens": 1}).status_code == 200


@pytest.mark.night  # by day other weights are
def test_another_tokenizer_is_refused_beside_a_living_server(plain_server: Server, tmp_path: Path) -> None:
    line = refusal(tmp_path, "stage", "tokenize", "--redis-url", plain_server.redis_url)  # of the demo model
    assert line.startswith("minisgl: --namespace minisgl: its ") and "(tokenizer " in line


@pytest.mark.night  # tests/pipeline/stage/test_slots.py has it
def test_less_context_is_refused_beside_a_living_server_with_the_flag(plain_server: Server, tmp_path: Path) -> None:
    model = str(nonsense(tmp_path / "models"))
    flags = ("--redis-url", plain_server.redis_url, "--max-seq-len", "1024")
    line = refusal(tmp_path, "stage", "generate", "--model", model, *flags)
    assert line.startswith("minisgl: --max-seq-len: gives a context of 1024 tokens")
    assert "pass --max-seq-len 4096 or more, or stop them first" in line


@pytest.mark.night  # tests/stages/generate/loop/test_takeover.py has it
def test_an_engine_in_another_dtype_takes_over_and_the_history_says_so(redis_servers: Servers, tmp_path: Path) -> None:
    model, port = str(nonsense(tmp_path / "models")), free_port()
    commands: list[Command] = []

    def start(stage: str, *flags: str) -> Command:
        where = ["stage", stage, "--redis-url", redis.url, "--lease", "1"]
        commands.append(run_command([*where, *flags], tmp_path / stage))
        return commands[-1]

    with running_server(redis_servers.binary("embedded"), tmp_path) as redis:
        try:
            start(WEB, "--port", str(port))
            for stage in (TOKENIZE, DETOKENIZE):
                start(stage, "--model", model)
            first = start(GENERATE, "--model", model, "--dtype", "float32")
            server = Server(commands[0], f"http://127.0.0.1:{port}", redis.url)
            wait_until_ready(server.url, commands)
            stream = Stream(server, "Tell me a story.").begun()
            for process in first.processes():
                process.send_signal(signal.SIGKILL)
            start(GENERATE, "--model", model, "--dtype", "bfloat16")
            stream.join()
            with server.log() as log:
                events = events_of(log, stream.uid)
        finally:
            for command in commands:
                command.stop()
    admitted = [event for event in events if isinstance(event, Admitted)]
    assert [event.numerics.partition("/")[0] for event in admitted] == ["float32", "bfloat16"]
    assert len({event.fingerprint for event in admitted}) == 1 and isinstance(events[-1], Finished)


@pytest.mark.night
def test_after_a_crash_another_model_starts_and_continues_nothing(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        stream = Stream(server, "Tell me a story.").begun()
        for process in server.command.processes():
            process.send_signal(signal.SIGKILL)
    with serve(tmp_path, "--model", str(with_other_weights(tmp_path / "other"))) as server, server.log() as log:
        eventually(lambda: events_of(log, stream.uid)[-1].kind == "failed", "it has ended")
        failed = events_of(log, stream.uid)[-1]
        assert isinstance(failed, Failed) and failed.code == "other_model"
        assert server.post({"prompt": "Hi", "max_tokens": 1}).status_code == 200
