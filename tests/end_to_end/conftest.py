"""What the end-to-end tests share: small random checkpoints, and two servers for tests that kill nothing.

Modules that share a server are of one `xdist_group`, so that it is started once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from servers import NARROW, Server, serve


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
