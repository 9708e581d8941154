"""The checkpoints of the benchmarks: what they are shaped like, and texts of exactly so many tokens."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ops.bench import models
from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import check_folder

SHAPES = models.SHAPES
TINY = models.Shape(32, 2, 4, 2, 8, 48, 1_000, 10_000.0, 128)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SHAPES", {"tiny": TINY})


def test_a_checkpoint_is_one_that_can_be_served_and_is_made_once(tmp_path: Path) -> None:
    folder = models.ensure("tiny", tmp_path)
    spec = check_folder(folder)
    assert (spec.vocab_size, spec.tie_embeddings, spec.dtype) == (1_000, True, "bfloat16")
    made = (folder / "model.safetensors").stat()
    assert models.ensure("tiny", tmp_path) == folder
    assert (folder / "model.safetensors").stat() == made


def test_a_checkpoint_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = models.ensure("tiny", tmp_path / "first"), models.ensure("tiny", tmp_path / "second")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_every_word_of_the_vocabulary_is_one_token_behind_a_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(models.ensure("tiny", tmp_path) / "tokenizer.json"))
    known = list(islice(models.words(), TINY.vocab_size - 256 - 100 - len(models.SPECIAL_TOKENS)))
    text = "".join(f" {word}" for word in known)
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(known) == len(set(ids))
    assert tokenizer.decode(ids) == text


def test_a_name_that_there_is_not_names_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="7b: no such benchmark checkpoint; expected one of tiny"):
        models.ensure("7b", tmp_path)


def test_the_shapes_are_those_that_results_are_compared_on() -> None:
    """A figure is worth nothing beside one of another shape."""
    small, large = SHAPES["95m"], SHAPES["0.6b"]
    assert (small.hidden_size, small.num_layers, small.intermediate_size, small.vocab_size) == (768, 12, 2304, 16_000)
    assert (small.num_heads, small.num_kv_heads, small.head_dim) == (12, 4, 64)
    assert (large.hidden_size, large.num_layers, large.intermediate_size, large.vocab_size) == (1024, 28, 3072, 151_936)
    assert (large.num_heads, large.num_kv_heads, large.head_dim) == (16, 8, 128)
