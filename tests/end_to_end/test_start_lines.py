"""The start lines that people have in their scripts, typed as they are: Mini-SGLang's own, and flags by environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Command, free_port, run_command, wait_until_ready

from ops.bench import nonsense
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB

pytestmark = pytest.mark.slow


@contextmanager
def started(
    program: Sequence[str], arguments: Sequence[str], port: int, folder: Path, environment: Mapping[str, str]
) -> Iterator[Command]:
    command = run_command(arguments, folder, program=program, environment=environment)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", [command])
        yield command
    finally:
        command.stop()


def curl(url: str, body: Mapping[str, Any]) -> str:
    """Send *body* with curl, and return what it prints."""
    line = ["curl", "--no-buffer", "--silent", "--show-error", "--fail-with-body", "--max-time", "120", url]
    header = ["--header", "Content-Type: application/json"]
    done = subprocess.run([*line, *header, "--data", json.dumps(body)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mini_sglangs_own_start_line_and_curl_work(tmp_path: Path) -> None:
    model, here, port = tmp_path / "M", tmp_path / "here", free_port()
    model.mkdir()
    nonsense.write(model)
    for name in ("pipeline", "stages", "web"):  # `python -m` looks here first, but ours are meant
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text("raise ImportError('not this one')\n")
    line = (
        f"-m minisgl --model-path {model} --tensor-parallel-size 1 --host 127.0.0.1 --port {port} --num-tokenizer 2 "
        "--cache-type naive --max-running-requests 128"
    )
    program, arguments = [sys.executable, *line.split()[:2]], line.split()[2:]
    with started(program, arguments, port, here, {"XDG_STATE_HOME": str(tmp_path / "state")}) as command:
        assert [len(command.workers(stage)) for stage in (GENERATE, TOKENIZE, DETOKENIZE, WEB)] == [1, 2, 1, 1]
        assert (tmp_path / "state" / "minisgl" / str(port) / "lock").exists()
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        message = {"role": "user", "content": "Hello!"}
        body = {"model": "default", "messages": [message], "max_tokens": 16, "temperature": 0, "ignore_eos": True}

        lines = curl(url, body | {"stream": True}).splitlines()
        sent = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert sent[-1] == "[DONE]"
        chunks = [json.loads(data) for data in sent[:-1]]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert {chunk["model"] for chunk in chunks} == {"M"}
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

        whole = json.loads(curl(url, body))
        assert whole["choices"][0]["message"]["content"] == text != ""
        assert whole["usage"]["completion_tokens"] == 16

        assert json.loads(curl(url, {"model": "default", "prompt": "Hello!", "max_tokens": 4}))["choices"]
        assert command.stop() == 0


def test_a_flag_can_be_set_by_the_environment_and_the_command_line_wins(tmp_path: Path) -> None:
    port = free_port()
    environment = {
        "MINISGL_PORT": str(port),
        "MINISGL_DATA_DIR": str(tmp_path / "data"),
        "MINISGL_TOKENIZERS": "3",
        "MINISGL_SERVED_MODEL_NAME": "one two",
    }
    program = [str(Path(sys.executable).with_name("minisgl"))]
    with started(program, ["serve", "--tokenizers", "2"], port, tmp_path, environment) as command:
        assert len(command.workers(TOKENIZE)) == 2
        assert (tmp_path / "data" / "lock").exists()
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["one", "two"]
        said = json.loads(curl(f"http://127.0.0.1:{port}/v1/chat/completions", {"prompt": "Hi", "max_tokens": 2}))
        assert said["model"] == "one"
        assert command.stop() == 0
