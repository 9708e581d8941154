"""The tokenizer of the demo model, and torch on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from stages.generate.model.checkpoint import DEMO_FOLDER


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """What `make_tokenizer` makes in seconds, as `test_demo_folder.py` sees at night."""
    return Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
