"""Is this folder a checkpoint that we can serve? Asked before any process starts, so: neither torch nor numpy."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from stages.generate.model.spec import ModelSpec, read_spec, tensor_shapes

WEIGHTS_FILE: Final = "model.safetensors"
TENSOR_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a safetensors header says of one tensor. `begin` and `end` are counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_folder(folder: Path) -> ModelSpec:
    """Return the spec of the model in *folder* if all its files are there and fit together.

    Raises:
        ConfigError: One line that names the file, or the file and the tensor.
    """
    check_is_folder(folder)
    spec = read_spec(folder)
    check_tokenizer(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        index = path.with_name(WEIGHTS_FILE + ".index.json")
        seen = f"there is {index.name} instead" if index.exists() else "not found"
        raise ConfigError(f"{path}: {seen}; so far the weights must be a single safetensors file")
    _check_tensors(path, read_header(path), spec)
    return spec


def check_is_folder(folder: Path) -> None:
    """Raise ConfigError unless *folder* is one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder; --model must be a folder with a Hugging Face checkpoint")


def check_tokenizer(folder: Path) -> None:
    """Raise ConfigError unless *folder* has what the text stages need of a checkpoint: its fast tokenizer."""
    check_is_folder(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder / 'tokenizer.json'}: not found; save the tokenizer as a fast one (tokenizer.json)")


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file: 8 bytes of length (little endian), a JSON header, gapless data.

    Raises:
        ConfigError: The file is not whole or not of this format.
    """
    raw, data_bytes = _raw_header(path)
    try:
        header = json.loads(raw)
        entries = {name: _entry(fields) for name, fields in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: its header is not that of a safetensors file: {error}") from error
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.end > data_bytes:
            raise ConfigError(
                f"{path}: truncated: {name} ends at byte {entry.end} of the data, the file has {data_bytes}"
            )
        if entry.begin != reached or entry.end < entry.begin:
            raise ConfigError(
                f"{path}: corrupt: {name} is at {entry.begin}-{entry.end}, expected to begin at {reached}"
            )
        reached = entry.end
    if reached != data_bytes:
        raise ConfigError(f"{path}: corrupt: its tensors end at byte {reached} of the data, the file has {data_bytes}")
    return entries


def fingerprint(folder: Path, dtype: str) -> str:
    """Return 16 hex digits that say which weights are computed with in which dtype.

    Hashes config.json, the header of the weights and 64 samples spread over them: a fine-tuned model has the header of
    its base, and to read gigabytes would cost the start-up seconds.
    """
    path = folder / WEIGHTS_FILE
    size = path.stat().st_size
    digest = hashlib.sha256(f"{dtype} {size} ".encode() + (folder / "config.json").read_bytes() + _raw_header(path)[0])
    with path.open("rb") as file:
        for sample in range(64):
            file.seek(size * sample // 64)
            digest.update(file.read(1024))
    return digest.hexdigest()[:16]


def _raw_header(path: Path) -> tuple[bytes, int]:
    """Return the header and how many bytes follow it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path}: corrupt: its header says {length} bytes, the file has {size}")
            return file.read(length), size - 8 - length
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _entry(fields: Any) -> TensorEntry:
    begin, end = map(int, fields["data_offsets"])
    return TensorEntry(str(fields["dtype"]), tuple(map(int, fields["shape"])), begin, end)


def _check_tensors(path: Path, entries: Mapping[str, TensorEntry], spec: ModelSpec) -> None:
    expected = tensor_shapes(spec)
    for name in expected:
        if name not in entries:
            raise ConfigError(f"{path}: {name} is missing; {spec.architecture} needs it")
    for name, entry in entries.items():
        if name not in expected:
            if name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_embeddings):
                continue  # old checkpoints carry it, and it says nothing that the config does not
            raise ConfigError(f"{path}: {name} is not part of {spec.architecture}; it would be ignored")
        if entry.dtype not in TENSOR_BYTES:
            raise ConfigError(f"{path}: {name} is {entry.dtype}; supported: {', '.join(TENSOR_BYTES)}")
        if entry.shape != expected[name]:
            raise ConfigError(f"{path}: {name} has shape {entry.shape}; config.json means {expected[name]}")
        if entry.end - entry.begin != math.prod(entry.shape) * TENSOR_BYTES[entry.dtype]:
            raise ConfigError(f"{path}: corrupt: {name} has {entry.end - entry.begin} bytes for shape {entry.shape}")
