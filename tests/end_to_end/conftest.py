"""What the end-to-end tests share: small random checkpoints and servers.

Modules that share a server are of one `xdist_group`, so that it is started once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from servers import MEASURED_CONTEXT, NARROW, Server, is_alive, serve
from streams import PROMPTS, ask_all, family_of

Answers = dict[str, tuple[str, str]]
"""Prompt -> the text that answers it, and why it ended."""


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama 3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama3", "llama3")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def llama3_server(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of `llama3`, which computes long prompts in chunks."""
    flags = ("--model", str(llama3), "--dtype", "float32", "--max-prefill-length", "64")
    with serve(tmp_path_factory.mktemp("llama3"), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_server(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of `llama3` under two names, with a context of `NARROW` tokens."""
    flags = ("--model", str(llama3), "--dtype", "float32", "--max-seq-len", str(NARROW))
    with serve(tmp_path_factory.mktemp("narrow"), *flags, "--served-model-name", "org/name", "other-name") as server:
        yield server


@pytest.fixture(scope="session")
def measured_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers can outlast any look at its figures. Its tests kill engines."""
    folder = tmp_path_factory.mktemp("measured")
    model = make_checkpoint(folder / "llama3", "llama3", max_positions=MEASURED_CONTEXT)
    with serve(folder, "--model", str(model), "--served-model-name", "llama", "--page-size", "16") as server:
        yield server


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as it comes. Its tests kill workers and Redis: it is whole again after each, and ends well at last."""
    with serve(tmp_path_factory.mktemp("plain")) as server:
        yield server
        with family_of(server.command) as family:
            assert server.command.stop(signal.SIGINT) == 0
            assert not any(map(is_alive, family))
        assert "Traceback" not in server.command.output


@pytest.fixture(scope="session")
def undisturbed(plain_server: Server) -> Answers:
    """What `plain_server` answers to the prompts when nothing happens."""
    answers = {stream.prompt: stream.answer for stream in ask_all(plain_server)}
    assert len(set(answers.values())) == len(PROMPTS)
    assert {reason for _, reason in answers.values()} == {"length"}
    return answers
