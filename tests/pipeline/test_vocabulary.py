"""The tokens of a model folder are those that transformers reads, with the ids and the special ones that it has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import BOS, END, STOP, train_tokenizer
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ConfigError
from pipeline.serving import tokenizer_fingerprint
from pipeline.vocabulary import Vocabulary, read_vocabulary


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as transformers 5 saves it: 300 tokens, the special ones in tokenizer.json."""
    folder = tmp_path_factory.mktemp("saved")
    train_tokenizer(300, with_bos=True).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def config_is(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def token(content: str, **more: object) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    return {"content": content, **flags, **more}


def read_as_transformers(folder: Path) -> Vocabulary:
    """Read *folder* both ways, and return ours."""
    ours, theirs = read_vocabulary(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    added = theirs.added_tokens_decoder
    assert ours.added.ids == {each.content: token for token, each in added.items()}
    assert ours.added.special == {token for token in added if not theirs.decode([token], skip_special_tokens=True)}
    assert {**ours.pieces, **ours.added.ids} == theirs.get_vocab()
    assert ours.end == (theirs.eos_token or "") and ours.id_of(ours.end) == theirs.eos_token_id
    return ours


IN_VOCAB = "Ġt"
CASES: Mapping[str, tuple[dict[str, Any], dict[str, bool]]] = {
    # what: (fields of tokenizer_config.json, new or changed token -> whether it is special)
    "nothing more": ({}, {STOP: True}),
    "a tool": ({"added_tokens_decoder": {"300": token("<my_tool>")}}, {"<my_tool>": False}),
    "ids that are not free": (
        {"added_tokens_decoder": {"900": token("<b>"), "400": token("<a>", special=True)}},
        {"<a>": True, "<b>": False},
    ),
    "another flag": ({"added_tokens_decoder": {"7": token("<a>"), "0": token(END, rstrip=True)}}, {"<a>": False}),
    "special later": ({"added_tokens_decoder": {"300": token(IN_VOCAB, special=True)}}, {IN_VOCAB: True}),
    "special by name": ({"added_tokens_decoder": {"300": token("<pad>")}, "pad_token": "<pad>"}, {"<pad>": True}),
    "additional": ({"additional_special_tokens": ["<a>", BOS, "<b>"]}, {"<a>": True, "<b>": True}),
    "additional objects": (
        {"extra_special_tokens": [{"__type": "AddedToken", **token("<a>")}], "added_tokens_decoder": {}},
        {"<a>": False},
    ),
    "by name": ({"unk_token": {"__type": "AddedToken", **token("<unk>")}, "mask_token": IN_VOCAB}, {"<unk>": True}),
    "names of its own": (
        {"image_token": "<image>", "add_eos_token": False, "extra_special_tokens": {"boi_token": "<boi>"}},
        {"<image>": True, "<boi>": True},
    ),
    "no end": ({"eos_token": None, "added_tokens_decoder": {}}, {STOP: True}),
    "an end of its own": ({"eos_token": "<end>"}, {"<end>": True}),
    "an end that is an object": ({"eos_token": {"__type": "AddedToken", **token(END)}}, {END: True}),
}


@pytest.mark.parametrize(("fields", "found"), CASES.values(), ids=CASES)
def test_tokens_that_only_the_config_adds_are_read_as_transformers_reads_them(
    folder: Path, fields: dict[str, Any], found: dict[str, bool]
) -> None:
    config_is(folder, **fields)
    ours = read_as_transformers(folder)
    assert {content: ours.added.ids[content] in ours.added.special for content in found} == found


@pytest.mark.parametrize("has_config", [True, False])
def test_files_of_older_versions_count_where_the_config_has_no_tokens(folder: Path, has_config: bool) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<b>": 301, "<a>": 300, END: 0}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": token("<a>"), "additional_special_tokens": ["<c>"]})
    )
    if not has_config:
        (folder / "tokenizer_config.json").unlink()
    ours = read_as_transformers(folder)
    assert [ours.id_of(content) for content in ("<a>", "<b>", "<c>")] == [300, 301, 302]
    assert ours.end == "<a>" and {300, 302} <= ours.added.special and 301 not in ours.added.special
    config_is(folder, added_tokens_decoder={}) if has_config else None
    assert not has_config or read_as_transformers(folder).id_of("<b>") is None


def test_a_file_of_older_versions_is_part_of_the_fingerprint_where_it_counts(folder: Path) -> None:
    before = tokenizer_fingerprint(folder)
    (folder / "added_tokens.json").write_text('{"<a>": 300}')
    assert tokenizer_fingerprint(folder) != before
    config_is(folder, added_tokens_decoder={})
    before = tokenizer_fingerprint(folder)
    (folder / "added_tokens.json").write_text('{"<b>": 300}')
    assert tokenizer_fingerprint(folder) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer ('model'); copy the model's again"),
        ("tokenizer.json", "{broken", "tokenizer.json: not a tokenizer ("),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [7]}', "tokenizer.json: not a tokenizer ("),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: holds a JSON list; expected an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "tokenizer_config.json: its tokens cannot be read ("),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}', "its tokens cannot be read ('content')"),
        ("added_tokens.json", "{", "added_tokens.json: not a tokenizer ("),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_vocabulary(folder)
    assert str(caught.value).startswith(str(folder)) and message in str(caught.value)
