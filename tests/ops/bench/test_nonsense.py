"""The model that is made on the spot: once, whole, whoever else makes it at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench import nonsense
from stages.generate.model.checkpoint import check_folder


def test_it_is_a_model_that_can_be_served_and_is_made_once(tmp_path: Path) -> None:
    folder = nonsense.ensure(tmp_path / "models")
    assert check_folder(folder).max_positions == nonsense.CONTEXT
    made = (folder / "model.safetensors").stat()
    assert nonsense.ensure(tmp_path / "models") == folder
    assert (folder / "model.safetensors").stat() == made


def test_it_is_the_same_model_every_time(tmp_path: Path) -> None:
    first, second = nonsense.ensure(tmp_path / "first"), nonsense.ensure(tmp_path / "second")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_of_two_that_make_it_at_once_the_faster_one_wins_and_the_other_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = nonsense.write

    def slow(folder: Path) -> None:
        monkeypatch.setattr(nonsense, "write", write)
        assert nonsense.ensure(tmp_path).is_dir()  # the other one, from beginning to end
        write(folder)

    monkeypatch.setattr(nonsense, "write", slow)
    folder = nonsense.ensure(tmp_path)
    assert check_folder(folder).max_positions == nonsense.CONTEXT
    assert list(tmp_path.iterdir()) == [folder]
