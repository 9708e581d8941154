"""llama.cpp as a peer: how requests are batched, with a double of its library, and the real one where there is one."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import make_checkpoint, reference_tokens

from ops.bench.compare import LLAMA, CompareConfig, checked_llama, gguf_file
from ops.bench.targets import helper

VOCAB_SIZE = 50
MOST_TOKENS = 8


def next_token(ids: Sequence[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(ids)) % VOCAB_SIZE


class Double:
    """The functions of llama_cpp that are called. Its model's next token depends on every token and position before."""

    __version__ = "double"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.kept: dict[int, dict[int, int]] = {}
        self.logits: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: SimpleNamespace()

    def llama_vocab_n_tokens(self, vocab: object) -> int:
        return VOCAB_SIZE

    def llama_batch_init(self, tokens: int, embeddings: int, sequences: int) -> Any:
        names = ("token", "pos", "n_seq_id", "logits")
        return SimpleNamespace(**{name: [0] * tokens for name in names}, seq_id=[[0] for _ in range(tokens)])

    def llama_memory_clear(self, memory: object, data: bool) -> None:
        self.kept.clear()

    def llama_memory_seq_rm(self, memory: object, sequence: int, first: int, end: int) -> None:
        assert (first, end) == (-1, -1)
        del self.kept[sequence]

    def llama_decode(self, context: object, batch: Any) -> int:
        assert 0 < batch.n_tokens <= MOST_TOKENS
        self.steps.append(batch.n_tokens)
        self.logits.clear()
        for index in range(batch.n_tokens):
            assert batch.n_seq_id[index] == 1
            kept = self.kept.setdefault(batch.seq_id[index][0], {})
            assert batch.pos[index] == len(kept), "positions follow each other"
            kept[batch.pos[index]] = batch.token[index]
            if batch.logits[index]:
                array = (ctypes.c_float * VOCAB_SIZE)()
                array[next_token(list(kept.values()))] = 1.0
                self.logits[index] = ctypes.cast(array, ctypes.POINTER(ctypes.c_float))
        return 0

    def llama_get_logits_ith(self, context: object, index: int) -> Any:
        return self.logits[index]


def test_requests_join_and_leave_the_batch_and_each_gets_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Double()
    monkeypatch.setitem(sys.modules, "llama_cpp", double)
    llama = importlib.import_module("ops.bench.llama")
    monkeypatch.delitem(sys.modules, "ops.bench.llama")
    monkeypatch.setattr(llama, "MOST_TOKENS", MOST_TOKENS)
    asked = [([3, 1, 4], 6), ([1], 1), (list(range(20)), 3), ([5, 9], 12)]
    made = llama.Model("file.gguf", 2).generate(asked)
    for (ids, count), answer in zip(asked, made, strict=True):
        expected = list(ids)
        for _ in range(count):
            expected.append(next_token(expected))
        assert answer == expected[len(ids) :]
    assert double.steps[:3] == [8, 8, 8], "prompts are computed beside the tokens of others"
    assert double.steps[-1] == 1 and sum(double.steps) == sum(len(ids) + count - 1 for ids, count in asked)


@pytest.mark.slow
@pytest.mark.night
def test_the_real_llama_cpp_makes_the_tokens_of_transformers(tmp_path: Path) -> None:
    python = os.environ.get("MINISGL_TEST_LLAMA_PYTHON", "")
    if not python:
        pytest.skip("MINISGL_TEST_LLAMA_PYTHON names no python with llama-cpp-python")
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", dtype="bfloat16", tie=False)
    prompts = [list(range(30, 70)), list(range(90, 97))]
    expected = [reference_tokens(folder, prompt, 8)[0] for prompt in prompts]
    config = CompareConfig(llama_python=python)
    python = checked_llama(config)
    command = [python, "-I", str(LLAMA), gguf_file(config, python, folder, tmp_path), "1"]
    with helper("llama.cpp", command) as side:
        assert "BF16" in side.answer()["dtype"]
        for batch in (True, False):
            answer = side.ask({"ids": prompts, "output_tokens": [8, 8], "batch": batch})
            assert answer["ids"] == expected
