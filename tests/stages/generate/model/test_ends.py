"""Which tokens end an answer: the model's two configs and its tokenizer say it together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stages.generate.model.checkpoint import DEMO_FOLDER
from stages.generate.model.config import read_spec
from stages.generate.model.ends import end_tokens

SPEC = dataclasses.replace(read_spec(DEMO_FOLDER), vocab_size=6, eos_ids=(0,))
ADDED = {"content": "<|im_end|>", "special": True}


def write(folder: Path, **config: object) -> Path:
    added = [{"id": 0, "content": "<|endoftext|>", "special": True}, {"id": 2, **ADDED}]
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "<|im_end|>": 2, "b": 3}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}, **config}))
    return folder


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token": "<|im_end|>"}, (0, 2)),
        ({"eos_token": {"__type": "AddedToken", **ADDED}}, (0, 2)),
        ({"eos_token": "<|endoftext|>"}, (0,)),
        ({"eos_token": "b"}, (0, 3)),
        ({"eos_token": "<turn>", "added_tokens_decoder": {"4": {"content": "<turn>", "special": True}}}, (0, 4)),
        ({"eos_token": None}, (0,)),
        ({}, (0,)),
    ],
    ids=str,
)
def test_the_end_token_of_the_tokenizer_ends_answers_too(
    tmp_path: Path, config: dict[str, object], ends: tuple[int, ...]
) -> None:
    with capture_logs() as lines:
        assert end_tokens(write(tmp_path, **config), SPEC) == ends
    assert lines == []


@pytest.mark.parametrize("num_tokens", [4, 2])
def test_an_end_token_that_the_model_does_not_have_is_ignored_with_a_log_line(tmp_path: Path, num_tokens: int) -> None:
    folder = write(tmp_path, eos_token="<nope>" if num_tokens == 4 else "<|im_end|>")
    with capture_logs() as lines:
        assert end_tokens(folder, dataclasses.replace(SPEC, vocab_size=num_tokens)) == (0,)
    (line,) = lines
    assert (line["event"], line["file"]) == ("eos_token_ignored", str(folder / "tokenizer_config.json"))
    assert line["reason"]


def test_a_folder_without_a_tokenizer_config_has_the_ends_of_the_model(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert end_tokens(tmp_path, SPEC) == (0,)
