"""The start line that people have in their scripts, typed as it is: Mini-SGLang's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from servers import free_port, run_command, wait_until_ready

from ops.bench import nonsense
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB

pytestmark = pytest.mark.slow


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
    command = run_command(arguments, here, program=program, environment={"XDG_STATE_HOME": str(tmp_path / "state")})
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", [command])
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
    finally:
        command.stop()
