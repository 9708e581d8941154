"""What the end-to-end tests share: small random checkpoints, and what transformers makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, reference_tokens

SMALLEST_GAP = 1e-3
"""Between the two best logits; rounding is a thousand times smaller."""


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama 3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama3", "llama3")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, Sequence[int], int], list[int]]:
    """(folder, prompt ids, count) -> the tokens that transformers generates greedily, end-of-sequence ignored.

    Fails where a token hangs on rounding, and where the model repeats itself: then equal tokens would prove nothing.
    """
    known: dict[tuple[Path, tuple[int, ...], int], list[int]] = {}

    def tokens_of(folder: Path, prompt_ids: Sequence[int], count: int) -> list[int]:
        key = (folder, tuple(prompt_ids), count)
        if key not in known:
            with one_thread():
                tokens, smallest_gap = reference_tokens(folder, prompt_ids, count)
            assert smallest_gap > SMALLEST_GAP, f"the two best logits are {smallest_gap} apart: take another prompt"
            assert len(set(tokens)) > count // 4, "the model repeats itself: take another seed"
            known[key] = tokens
        return known[key]

    return tokens_of


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: on a busy machine several wait for each other longer than so small a model computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
