"""The start line that people have in their scripts, typed as it is on a terminal: Mini-SGLang's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.servers import free_port
from support.terminal import on_a_terminal

from ops.bench.models import write_nonsense

pytestmark = pytest.mark.slow


def curl(url: str, body: Mapping[str, Any]) -> str:
    """Send *body* with curl, and return what it prints."""
    line = ["curl", "--no-buffer", "--silent", "--show-error", "--fail-with-body", "--max-time", "120", url]
    header = ["--header", "Content-Type: application/json"]
    done = subprocess.run([*line, *header, "--data", json.dumps(body)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown_at_the_start(text: str) -> list[str]:
    """Return the log lines of a terminal that shows *text*, without their times."""
    found = [re.fullmatch(r"\d\d:\d\d:\d\d \[(\w+) *\] (.+)", line) for line in text.splitlines()]
    return [" ".join(f"{line[1]} {line[2]}".split()) for line in found if line is not None]


def with_the_names_of_ours(folder: Path) -> Path:
    """Return *folder* with packages in it that are called like ours: `python -m` looks there first."""
    for name in ("pipeline", "stages", "web"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('not this one')\n")
    return folder


def test_as_a_module_it_imports_what_is_ours(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "minisgl", "--version"]
    here = with_the_names_of_ours(tmp_path)
    done = subprocess.run(line, cwd=here, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("minisgl ")


@pytest.mark.night  # a server for it; by day test_config.py has the names of its flags
def test_mini_sglangs_own_start_line_and_curl_work_and_a_terminal_shows_one_line_for_each_worker(
    tmp_path: Path,
) -> None:
    model, here, port = tmp_path / "M", with_the_names_of_ours(tmp_path / "here"), free_port()
    model.mkdir()
    write_nonsense(model)
    line = (
        f"-m minisgl --model-path {model} --tensor-parallel-size 1 --host 127.0.0.1 --port {port} --num-tokenizer 2 "
        "--cache-type naive --max-running-requests 128"
    )
    program, arguments = [sys.executable, *line.split()[:2]], line.split()[2:]
    with on_a_terminal(arguments, here, program=program, columns=250) as terminal:
        terminal.until_shown("Ctrl-C ends it.")
        data = here / "state" / "minisgl" / str(port)
        shown = shown_at_the_start(terminal.text)
        first, *others = (line for line in shown if "not_ready_yet" not in line)  # busy cores
        assert first == f"info redis_ready data={data}" and (data / "lock").exists()
        engine = r"info worker_ready worker=generate-0 model=M context=\d+ numerics=\w+/none/[^/ ]+"
        (line,) = (line for line in others if re.fullmatch(engine, line))
        names = ("detokenize-0", "tokenize-0", "tokenize-1", "web-0")
        assert sorted(others) == sorted([line, *(f"info worker_ready worker={name}" for name in names)])
        assert f"In a browser: http://127.0.0.1:{port}\n" in terminal.text
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
        terminal.press("\x03")
        assert terminal.ended() == 0
