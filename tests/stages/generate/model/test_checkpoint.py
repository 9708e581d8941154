"""What is wrong with a folder is said in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, Family, make_checkpoint

from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import (
    INDEX_FILE,
    WEIGHTS_FILE,
    check_folder,
    fingerprint,
    read_header,
    read_tensors,
)
from stages.generate.model.spec import Loading, tensor_shapes

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object], data: bytes = b"") -> None:
    """Let *edit* change the header of the weights, and append *data*."""
    path = folder / WEIGHTS_FILE
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:] + data)


def overwrite(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def truncate(folder: Path, num_bytes: int) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:num_bytes])


def add_tensor(folder: Path, name: str) -> None:
    entries = read_header(folder / WEIGHTS_FILE).values()
    end = max(entry.end for entry in entries) - min(entry.begin for entry in entries)
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    edit_header(folder, lambda header: header.update({name: entry}), b"\0\0\0\0")


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def norm_is(**fields: object) -> Callable[[Path], None]:
    """Return the damage that the header says this of one tensor."""
    return lambda folder: edit_header(folder, lambda header: header[NORM].update(fields))


def weights_are(content: bytes) -> Callable[[Path], None]:
    return lambda folder: overwrite(folder, WEIGHTS_FILE, content)


NO_HEADER = "model.safetensors: its header is not that of a safetensors file"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, ": not a folder"),
        (lambda f: (f / "config.json").unlink(), "config.json: not found"),
        (lambda f: overwrite(f, "config.json", b'{"a": '), "config.json: is not JSON"),
        (lambda f: overwrite(f, "config.json", b"[]"), "config.json: holds a JSON list"),
        (lambda f: overwrite(f, "config.json", b"\xff\xfe"), "config.json: is not JSON"),
        (lambda f: overwrite(f, "config.json", b"[" * 100_000), "config.json: is not JSON"),
        (lambda f: overwrite(f, "generation_config.json", b"{"), "generation_config.json: is not JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: not found"),
        (lambda f: (f / WEIGHTS_FILE).unlink(), "model.safetensors: not found"),
        (lambda f: rename(f, WEIGHTS_FILE, INDEX_FILE), "model.safetensors.index.json: is not JSON"),
        (weights_are(b""), "model.safetensors: corrupt"),
        (weights_are(b"version https://git-lfs.github.com/spec/v1\n"), "model.safetensors: corrupt"),
        (weights_are((9).to_bytes(8, "little") + b"{not json"), NO_HEADER),
        (weights_are((2).to_bytes(8, "little") + b"[]"), NO_HEADER),
        (lambda f: edit_header(f, lambda header: header[NORM].pop("shape")), NO_HEADER),
        (weights_are((100_000).to_bytes(8, "little") + b"[" * 100_000), NO_HEADER),
        (lambda f: truncate(f, 100), "model.safetensors: corrupt"),
        (lambda f: truncate(f, -1), "model.safetensors: truncated: "),
        (lambda f: edit_header(f, lambda header: None, b"more"), "model.safetensors: corrupt"),
        (norm_is(data_offsets=[0, 10**9]), f"model.safetensors: truncated: {NORM} ends at byte 10000"),
        (norm_is(data_offsets=[0, 320]), ", expected to begin at "),
        (
            lambda f: edit_header(f, lambda header: header.update(other=header.pop(NORM))),
            f"model.safetensors: {NORM} is missing",
        ),
        (norm_is(shape=[8, 10]), f"model.safetensors: {NORM} has shape (8, 10)"),
        (norm_is(dtype="F8_E4M3"), f"model.safetensors: {NORM} is F8_E4M3"),
        (norm_is(dtype="BF16"), f"model.safetensors: corrupt: {NORM} has 320 bytes for shape (80,)"),
        (
            lambda f: add_tensor(f, "model.layers.0.self_attn.q_proj.bias"),
            "model.safetensors: model.layers.0.self_attn.q_proj.bias",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_damaged_folder_is_refused_in_one_line(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        check_folder(folder)
    assert str(caught.value).startswith(str(folder)) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_that_says_nothing_new_is_let_through(folder: Path) -> None:
    add_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert check_folder(folder).tie_embeddings


# Embeddings that are tied, and a head all the same


def give_a_head(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(tensors | {"lm_head.weight": change(tensors[EMBEDDING].clone())}, folder / WEIGHTS_FILE)


def last_changed(weight: torch.Tensor) -> torch.Tensor:
    weight[-1, -1] += 1
    return weight


def test_a_head_that_is_the_tied_embeddings_byte_by_byte_is_let_through(folder: Path) -> None:
    give_a_head(folder, lambda weight: weight)
    assert check_folder(folder).tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (last_changed, f"lm_head.weight is given beside {EMBEDDING} and differs from it"),
        (lambda weight: weight.to(torch.bfloat16), "and differs from it"),
        (lambda weight: weight[1:].contiguous(), "lm_head.weight has shape (496, 80); config.json means (497, 80)"),
    ],
    ids=["one number", "dtype", "shape"],
)
def test_a_head_that_differs_from_the_tied_embeddings_is_refused(
    folder: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    give_a_head(folder, change)
    with pytest.raises(ConfigError) as caught:
        check_folder(folder)
    assert str(caught.value).startswith(f"{folder / WEIGHTS_FILE}: ") and message in str(caught.value)


# Weights in several files


@pytest.fixture(scope="module")
def sharded_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tie=False, shard_size="200KB")
    assert not (folder / WEIGHTS_FILE).exists() and len(shards(folder)) >= 4
    return folder


@pytest.fixture
def sharded(sharded_original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_original, tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def owner(folder: Path, name: str) -> Path:
    """Return the shard that holds the tensor *name*."""
    return next(shard for shard in shards(folder) if name in read_header(shard))


def edit_shard(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    edit(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_weights_in_several_files_are_checked_as_those_in_one(sharded: Path, original: Path) -> None:
    tensors = read_tensors(sharded)
    assert {name: entry.shape for name, entry in tensors.items()} == tensor_shapes(check_folder(sharded))
    assert {entry.file for entry in tensors.values()} == set(shards(sharded))


def test_one_file_counts_where_there_is_an_index_too(sharded: Path) -> None:
    save_file({name: tensor for shard in shards(sharded) for name, tensor in load_file(shard).items()}, sharded / "all")
    (sharded / "all").rename(sharded / WEIGHTS_FILE)
    shards(sharded)[0].unlink()
    check_folder(sharded)
    assert {entry.file.name for entry in read_tensors(sharded).values()} == {WEIGHTS_FILE}


def twice(folder: Path) -> None:
    other = next(shard for shard in shards(folder) if shard != owner(folder, NORM))
    edit_shard(other, lambda tensors: tensors.update({NORM: torch.ones(80)}))


def nobody_asked_for(folder: Path) -> None:
    edit_shard(owner(folder, NORM), lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))


def moved(folder: Path) -> None:
    edit_index(
        folder, lambda names: names.update({NORM: next(s.name for s in shards(folder) if s != owner(folder, NORM))})
    )


def drop_everywhere(folder: Path) -> None:
    edit_shard(owner(folder, NORM), lambda tensors: tensors.pop(NORM))
    edit_index(folder, lambda names: names.pop(NORM))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (lambda f: shards(f)[1].unlink(), "model-00002", "not found"),
        (lambda f: cut(shards(f)[2]), "model-00003", "truncated: "),
        (lambda f: shards(f)[2].write_bytes(b""), "model-00003", "corrupt: its header says 0 bytes"),
        (twice, "model-0000", f"{NORM} is in model-0000"),
        (nobody_asked_for, "model-0000", "model.extra.weight"),
        (moved, "model-0000", f"{NORM} is missing"),
        (lambda f: edit_shard(owner(f, NORM), lambda tensors: tensors.pop(NORM)), "model-0000", f"{NORM} is missing"),
        (drop_everywhere, INDEX_FILE, f"{NORM} is missing"),
        (lambda f: edit_index(f, dict.clear), INDEX_FILE, "weight_map"),
        (lambda f: overwrite(f, INDEX_FILE, b'{"weight_map": {"a": 1}}'), INDEX_FILE, "weight_map"),
        (lambda f: overwrite(f, INDEX_FILE, b"{}"), INDEX_FILE, "weight_map"),
        (lambda f: overwrite(f, INDEX_FILE, b"{"), INDEX_FILE, "is not JSON"),
        (
            lambda f: edit_index(f, lambda names: names.update({NORM: "../secret.safetensors"})),
            INDEX_FILE,
            "../secret.safetensors",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_damaged_shards_are_refused_in_one_line(
    sharded: Path, damage: Callable[[Path], object], file: str, message: str
) -> None:
    damage(sharded)
    with pytest.raises(ConfigError) as caught:
        check_folder(sharded)
    assert str(caught.value).startswith(str(sharded / file)) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_covers_every_shard(sharded: Path) -> None:
    seen = {fingerprint(sharded)}
    assert fingerprint(sharded) in seen
    for shard in shards(sharded):
        edit_shard(shard, lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
        seen.add(fingerprint(sharded))
    assert len(seen) == 1 + len(shards(sharded))


def test_a_dummy_needs_no_weights_and_its_fingerprint_says_so(folder: Path) -> None:
    real = fingerprint(folder)
    (folder / WEIGHTS_FILE).unlink()
    assert check_folder(folder, Loading(dummy=True)).tie_embeddings
    assert fingerprint(folder, dummy=True).startswith("dummy-")
    assert not real.startswith("dummy-")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        check_folder(folder, Loading(dummy=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_transformers_saves_is_what_we_ask_for(tmp_path: Path, family: Family, tie: bool, dtype: str) -> None:
    spec = check_folder(make_checkpoint(tmp_path, family, tie=tie, dtype=dtype))
    entries = read_tensors(tmp_path)
    assert {name: entry.shape for name, entry in entries.items()} == tensor_shapes(spec)
    assert (spec.tie_embeddings, spec.dtype, len(spec.eos_ids)) == (tie, dtype, 2)
