"""The checkpoints of the benchmarks: what they are shaped like, and texts of exactly so many tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ops.bench import models
from stages.generate.model.checkpoint import check_folder

TINY = models.Shape(32, 2, 4, 2, 8, 48, 1_000, 10_000.0, 128)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SHAPES", {"tiny": TINY})


@pytest.mark.parametrize("ensure", [partial(models.ensure, "tiny"), models.nonsense])
def test_a_checkpoint_can_be_served_is_made_once_and_is_the_same_every_time(
    ensure: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder, other = ensure(tmp_path / "first"), ensure(tmp_path / "second")
    spec = check_folder(folder)
    assert (spec.vocab_size, spec.max_positions, spec.dtype) in ((1_000, 128, "bfloat16"), (259, 4096, "float32"))
    made = (folder / "model.safetensors").stat()
    assert ensure(tmp_path / "first") == folder
    assert (folder / "model.safetensors").stat() == made
    for file in folder.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_every_word_of_the_vocabulary_is_one_token_behind_a_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(models.ensure("tiny", tmp_path) / "tokenizer.json"))
    known = list(islice(models.words(), TINY.vocab_size - 256 - 100 - len(models.SPECIAL_TOKENS)))
    text = "".join(f" {word}" for word in known)
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(known) == len(set(ids))
    assert tokenizer.decode(ids) == text


def test_of_two_that_make_it_at_once_the_faster_one_wins_and_the_other_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = models.write_nonsense

    def slow(folder: Path) -> None:
        monkeypatch.setattr(models, "write_nonsense", write)
        assert models.nonsense(tmp_path).is_dir()  # the other one, from beginning to end
        write(folder)

    monkeypatch.setattr(models, "write_nonsense", slow)
    folder = models.nonsense(tmp_path)
    assert check_folder(folder).max_positions == models.NONSENSE.max_positions
    assert list(tmp_path.iterdir()) == [folder]
