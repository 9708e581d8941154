"""What the end-to-end tests share: small random checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama 3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama3", "llama3")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3")
