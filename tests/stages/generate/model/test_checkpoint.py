"""What is wrong with a folder is said in one line, by a program without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, Family, make_checkpoint

from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import WEIGHTS_FILE, check_folder, read_header
from stages.generate.model.spec import tensor_shapes

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
    end = max(entry.end for entry in read_header(folder / WEIGHTS_FILE).values())
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    edit_header(folder, lambda header: header.update({name: entry}), b"\0\0\0\0")


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, ": not a folder"),
        (lambda f: (f / "config.json").unlink(), "config.json: not found; --model must be a folder"),
        (lambda f: overwrite(f, "config.json", b'{"a": '), "config.json: is not JSON: Expecting value"),
        (lambda f: overwrite(f, "config.json", b"[]"), "config.json: holds a JSON list; expected an object"),
        (lambda f: overwrite(f, "config.json", b"\xff\xfe"), "config.json: is not JSON"),
        (lambda f: overwrite(f, "generation_config.json", b"{"), "generation_config.json: is not JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: not found"),
        (lambda f: (f / WEIGHTS_FILE).unlink(), "model.safetensors: not found; so far the weights must be a single"),
        (
            lambda f: rename(f, WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json"),
            "model.safetensors: there is model.safetensors.index.json instead; so far the weights must be a single",
        ),
        (
            lambda f: overwrite(f, WEIGHTS_FILE, b""),
            "model.safetensors: corrupt: its header says 0 bytes, the file has 0",
        ),
        (
            lambda f: overwrite(f, WEIGHTS_FILE, b"version https://git-lfs.github.com/spec/v1\n"),
            "model.safetensors: corrupt: its header says",
        ),
        (
            lambda f: overwrite(f, WEIGHTS_FILE, (9).to_bytes(8, "little") + b"{not json"),
            "model.safetensors: its header is not that of a safetensors file",
        ),
        (
            lambda f: overwrite(f, WEIGHTS_FILE, (2).to_bytes(8, "little") + b"[]"),
            "model.safetensors: its header is not that of a safetensors file",
        ),
        (
            lambda f: edit_header(f, lambda header: header[NORM].pop("shape")),
            "model.safetensors: its header is not that of a safetensors file",
        ),
        (lambda f: truncate(f, 100), "model.safetensors: corrupt: its header says"),
        (lambda f: truncate(f, -1), "model.safetensors: truncated: "),
        (lambda f: edit_header(f, lambda header: None, b"more"), "model.safetensors: corrupt: its tensors end at byte"),
        (
            lambda f: edit_header(f, lambda header: header[NORM].update(data_offsets=[0, 10**9])),
            f"model.safetensors: truncated: {NORM} ends at byte 1000000000",
        ),
        (
            lambda f: edit_header(f, lambda header: header[NORM].update(data_offsets=[0, 320])),
            ", expected to begin at ",
        ),
        (
            lambda f: edit_header(f, lambda header: header.update(other=header.pop(NORM))),
            f"model.safetensors: {NORM} is missing; Qwen3ForCausalLM needs it",
        ),
        (
            lambda f: edit_header(f, lambda header: header[NORM].update(shape=[8, 10])),
            f"model.safetensors: {NORM} has shape (8, 10); config.json means (80,)",
        ),
        (
            lambda f: edit_header(f, lambda header: header[NORM].update(dtype="F8_E4M3")),
            f"model.safetensors: {NORM} is F8_E4M3; supported: F32, BF16, F16",
        ),
        (
            lambda f: edit_header(f, lambda header: header[NORM].update(dtype="BF16")),
            f"model.safetensors: corrupt: {NORM} has 320 bytes for shape (80,)",
        ),
        (
            lambda f: add_tensor(f, "model.layers.0.self_attn.q_proj.bias"),
            "model.safetensors: model.layers.0.self_attn.q_proj.bias is not part of Qwen3ForCausalLM",
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


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_a_tensor_that_says_nothing_new_is_let_through(folder: Path, name: str) -> None:
    add_tensor(folder, name)
    assert check_folder(folder).tie_embeddings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_transformers_saves_is_what_we_ask_for(tmp_path: Path, family: Family, tie: bool, dtype: str) -> None:
    spec = check_folder(make_checkpoint(tmp_path, family, tie=tie, dtype=dtype))
    entries = read_header(tmp_path / WEIGHTS_FILE)
    assert {name: entry.shape for name, entry in entries.items()} == tensor_shapes(spec)
    assert (spec.tie_embeddings, spec.dtype, len(spec.eos_ids)) == (tie, dtype, 2)


def test_a_folder_is_checked_without_torch_and_numpy(original: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stages.generate.model.checkpoint import check_folder;"
        "check_folder(Path(sys.argv[1]));"
        "print(sorted({'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(original)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
