"""Checks whether a folder is a checkpoint that we can serve. It runs before any process starts: no torch, no numpy."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from stages.generate.model import gguf
from stages.generate.model.config import knows_architecture, read_json, read_spec, scheme_of
from stages.generate.model.foreign import refuse_other_weights, tokenizer_missing
from stages.generate.model.quantized import Stored, gathered
from stages.generate.model.spec import Loading, ModelSpec, tensor_shapes

DEMO_FOLDER: Final = Path(__file__).resolve().with_name("demo")
"""Folder of the demo model, the default of `--model`. ops/demo_model/ makes it."""
DEMO_ID: Final = "minisgl-demo"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
USUAL: Final = Loading()
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
TENSOR_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes of weights that are not quantized, and their bytes."""
ALL_BYTES: Final = {**TENSOR_BYTES, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}
"""The same with those of quantized ones."""
PARTS: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some checkpoints have in one, and their names apart."""
FUSED: Final = re.compile(rf"\.({'|'.join(PARTS)})\.")
SIGHT: Final = (
    *("vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)
"""What a model that also sees has beside its language model."""
LANGUAGE: Final = re.compile(r"^(?:language_model\.(?:model\.|(lm_head\.))|model\.language_model\.)")
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors header. `begin` and `end` are offsets in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    rotated_heads: int = 0
    """Number of heads, if the rows of a q or k projection have the order of llama's GGUF files; 0: the hub's order."""
    stored: Stored | None = None
    """The tensors that make it up, if it is quantized. Then the other fields are about what it becomes in memory."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return (self.end - self.begin) // self.shape[0]


def check_folder(folder: Path, loading: Loading = USUAL) -> ModelSpec:
    """Return the spec of the model in *folder* if its files are complete and consistent.

    Raises:
        ConfigError: The message is one line with the name of the file, or of the file and the tensor.
    """
    check_is_folder(folder)
    if not has_weights(folder) and not (loading.dummy and (folder / "config.json").is_file()):
        refuse_other_weights(folder)
    if not _is_native(folder, loading):
        return _check_foreign(folder, loading)
    spec = read_spec(folder)
    check_tokenizer(folder)
    if not loading.dummy:
        tensors = read_tensors(folder)
        _check_tensors(folder, tensors, spec)
        _check_tied(tensors, spec)
        if any(entry.stored for entry in tensors.values()):
            spec = replace(spec, blocks=_bytes_of_types(tensors, spec))
    return spec


def _bytes_of_types(tensors: Mapping[str, TensorEntry], spec: ModelSpec) -> dict[str, int]:
    """Return the bytes of each type in memory; the head has a copy of tied embeddings."""
    every = [tensors[name] for name in tensor_shapes(spec)] + [tensors[EMBEDDING]] * spec.tie_embeddings
    types = sorted({entry.dtype for entry in every})
    return {kind: sum(entry.end - entry.begin for entry in every if entry.dtype == kind) for kind in types}


def _is_native(folder: Path, loading: Loading) -> bool:
    """Return whether our decoder computes the model. It does that for GGUF files in any case."""
    if loading.by != "auto" or is_gguf(folder):
        if loading.by == "transformers" and is_gguf(folder):
            raise ConfigError("--model-impl transformers: GGUF files are computed by our decoder alone; leave it out")
        return loading.by != "transformers"
    return knows_architecture(folder)


def _check_foreign(folder: Path, loading: Loading) -> ModelSpec:
    """Check a model that transformers computes: which tensors it has, only its own code knows."""
    from stages.generate.model.by_transformers import foreign_spec

    spec = foreign_spec(folder, loading)
    check_tokenizer(folder)
    if loading.dummy:
        return spec
    return replace(spec, num_weights=sum(math.prod(entry.shape) for entry in _stored_tensors(folder).values()))


def model_id(folder: Path) -> str:
    """Return the default name under which the model in *folder* is served."""
    return DEMO_ID if is_demo(folder) else folder.name


def is_demo(folder: Path) -> bool:
    """Return whether *folder* is the demo model's."""
    return folder.resolve() == DEMO_FOLDER


def check_is_folder(folder: Path) -> None:
    """Raise ConfigError unless *folder* is a folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: not a folder; --model must be a folder with a Hugging Face checkpoint, a GGUF file, or "
            "owner/name on the Hugging Face hub"
        )


def check_tokenizer(folder: Path) -> None:
    """Raise ConfigError unless *folder* has a fast tokenizer. The text stages need nothing else."""
    check_is_folder(folder)
    if not (folder / "tokenizer.json").is_file():
        refuse_other_weights(folder)
        raise tokenizer_missing(folder)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights: a single one, or those in the index, sorted.

    If there are both, the single file is used, as in transformers.

    Raises:
        ConfigError: There is neither, or the index cannot be read or names a file that does not exist.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if is_gguf(folder):
        return tuple(sorted(folder.glob("*.gguf")))
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise ConfigError(f"{single}: not found, and no {INDEX_FILE} either; save the weights as safetensors")
    shards = sorted(set(_weight_map(index).values()))
    for name in shards:
        if name != Path(name).name:
            raise ConfigError(f"{index}: names the shard {name!r}; expected a file beside it")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: not found; {INDEX_FILE} names it")
    return tuple(folder / name for name in shards)


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the weights of *folder*, by the names of `tensor_shapes`.

    Raises:
        ConfigError: As `_stored_tensors`, or a tensor is there in two ways.
    """
    tensors = _of_text(_stored_tensors(folder), folder)
    if not is_gguf(folder) and (scheme := scheme_of(folder)) is not None:
        tensors = gathered(tensors, scheme)
    return _apart(tensors, folder)


def _stored_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the weights of *folder* under its name there.

    Raises:
        ConfigError: A file is missing or truncated, or a tensor is in two files or not in the index's file.
    """
    tensors: dict[str, TensorEntry] = {}
    files, has_gguf = weight_files(folder), is_gguf(folder)
    for path in files:
        for name, entry in (_read_gguf(path) if has_gguf else read_header(path)).items():
            if name in tensors:
                raise ConfigError(f"{path}: {name} is in {tensors[name].file.name} too; one of them must go")
            tensors[name] = entry
    if files != (folder / WEIGHTS_FILE,) and not has_gguf:
        for name, shard in _weight_map(folder / INDEX_FILE).items():
            if name not in tensors or tensors[name].file.name != shard:
                raise ConfigError(f"{folder / shard}: {name} is missing; {INDEX_FILE} says that it is there")
    return tensors


def _of_text(tensors: dict[str, TensorEntry], folder: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the language model of one that also sees, under the names of a model that only reads."""
    names = read_json(folder / "config.json").get("architectures")
    if not isinstance(names, list) or not str(names[:1]).endswith("ForConditionalGeneration']"):
        return tensors
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if name.startswith(SIGHT):
            continue
        plain = LANGUAGE.sub(lambda match: "lm_head." if match[1] else "model.", name)
        if plain in found:
            raise ConfigError(f"{entry.file}: {name} is there under two names; one of them must go")
        found[plain] = entry
    return found


def _apart(tensors: dict[str, TensorEntry], folder: Path) -> dict[str, TensorEntry]:
    """Return the tensors with the parts of those that are fused in the file, such as q|k|v, in their place."""
    if not any(FUSED.search(name) for name in tensors) or not knows_architecture(folder):
        return tensors
    shapes, apart = tensor_shapes(read_spec(folder)), dict(tensors)
    for name, entry in tensors.items():
        if (found := FUSED.search(name)) is None:
            continue
        names = [name.replace(found[1], part) for part in PARTS[found[1]]]
        rows = [shapes[part][0] for part in names if part in shapes]
        if len(rows) < len(names) or not entry.shape:
            continue  # `_check_tensors` says what is wrong
        if twice := next((part for part in names if part in tensors), ""):
            raise ConfigError(f"{entry.file}: {twice} is there beside {name}, which has it, too; one of them must go")
        if sum(rows) != entry.shape[0]:
            raise ConfigError(f"{entry.file}: {name} has {entry.shape[0]} rows; config.json means {sum(rows)}")
        del apart[name]
        begin = entry.begin
        for part, count in zip(names, rows, strict=True):
            end = begin + count * entry.row_bytes
            apart[part] = replace(entry, shape=(count, *entry.shape[1:]), begin=begin, end=end)
            begin = end
    return apart


def has_weights(folder: Path) -> bool:
    """Return whether *folder* has weights: safetensors, or the GGUF files of a folder that `gguf_folder.py` made."""
    return any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)) or is_gguf(folder)


def is_gguf(folder: Path) -> bool:
    """Return whether the weights of *folder* are GGUF files: `gguf_folder.py` made it."""
    config = folder / "config.json"
    return config.is_file() and "gguf" in read_json(config)


def _read_gguf(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a GGUF file under their names on the hub."""
    config = read_json(path.with_name("config.json"))
    heads: dict[str, int] = {}
    if config["architectures"][0] in ("LlamaForCausalLM", "SmolLM3ForCausalLM"):
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    entries: dict[str, TensorEntry] = {}
    for stored, whole in _gguf_header(path, path.stat().st_mtime_ns)[0].items():
        for name, tensor in gguf.named(stored, whole, config.get("gguf_architecture", "")).items():
            place = tensor.begin, tensor.begin + tensor.size, heads.get(name.rpartition(".")[0].rpartition(".")[2], 0)
            entries[name] = TensorEntry(path, tensor.type, tensor.shape, *place)
    return entries


@functools.lru_cache(maxsize=64)
def _gguf_header(path: Path, modified_ns: int) -> tuple[Mapping[str, gguf.GgufTensor], int]:
    """Return the tensors and the length of a header. Reading one takes a quarter second; a start asks thrice."""
    file = gguf.read_gguf(path)
    return file.tensors, file.header_bytes


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file: 8 bytes of length (little endian), a JSON header, data without gaps.

    Raises:
        ConfigError: The file is truncated or not of this format.
    """
    raw, data_bytes = _raw_header(path)
    try:
        header = json.loads(raw)
        entries = {
            name: _entry(path, fields, 8 + len(raw)) for name, fields in header.items() if name != "__metadata__"
        }
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: its header is not that of a safetensors file: {error}") from error
    reached = data_begin = 8 + len(raw)
    end = data_begin + data_bytes
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.end > end:
            raise ConfigError(f"{path}: truncated: {name} ends at byte {entry.end}, the file has {end}")
        if entry.begin != reached or entry.end < entry.begin:
            raise ConfigError(
                f"{path}: corrupt: {name} is at {entry.begin}-{entry.end}, expected to begin at {reached}"
            )
        reached = entry.end
    if reached != end:
        raise ConfigError(f"{path}: corrupt: its tensors end at byte {reached}, the file has {end}")
    return entries


def fingerprint(folder: Path, *, dummy: bool = False) -> str:
    """Return 16 hex digits that identify config and weights, with `dummy-` before them for random weights.

    Hash config.json, the header of each weights file, and 64 samples spread over all files. The header alone is not
    enough, because a fine-tuned model has the header of its base; reading every byte would cost seconds at the start.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if dummy:
        return f"dummy-{digest.hexdigest()[:16]}"
    files = weight_files(folder)
    num_samples = -(-64 // len(files))
    for path in files:
        status, has_gguf = path.stat(), is_gguf(folder)
        size = status.st_size
        with path.open("rb") as file:
            header = file.read(_gguf_header(path, status.st_mtime_ns)[1]) if has_gguf else _raw_header(path)[0]
            digest.update(f"{size} ".encode() + header)
            for sample in range(num_samples):
                file.seek(size * sample // num_samples)
                digest.update(file.read(1024))
    return digest.hexdigest()[:16]


def _raw_header(path: Path) -> tuple[bytes, int]:
    """Return the header and the number of bytes after it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path}: corrupt: its header says {length} bytes, the file has {size}")
            return file.read(length), size - 8 - length
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _entry(path: Path, fields: Any, data_begin: int) -> TensorEntry:
    begin, end = (data_begin + int(offset) for offset in fields["data_offsets"])
    return TensorEntry(path, str(fields["dtype"]), tuple(map(int, fields["shape"])), begin, end)


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index}: weight_map is not an object of tensors and their files; download it again")
    return names


def _check_tensors(folder: Path, entries: Mapping[str, TensorEntry], spec: ModelSpec) -> None:
    expected, has_gguf = tensor_shapes(spec), is_gguf(folder)
    quantized = {stored.name for entry in entries.values() if (stored := entry.stored) is not None}
    quantized |= {name for name, entry in entries.items() if entry.stored}  # parts of those that are one in the file
    for name in expected:
        if name not in entries:
            where = weight_files(folder)[0].name if has_gguf else WEIGHTS_FILE
            if not (folder / where).is_file():
                where = INDEX_FILE
            raise ConfigError(f"{folder / where}: {name} is missing; {spec.architecture} needs it")
    for name, entry in entries.items():
        path = entry.file
        shape = expected.get(name)
        if shape is None and name == HEAD and spec.tie_embeddings:
            shape = expected[EMBEDDING]  # `_check_tied` compares its bytes
        if shape is None:
            if name.endswith(".rotary_emb.inv_freq"):
                continue  # old checkpoints have it; the config has the same
            if name.endswith(".bias") and name.removesuffix("bias") + "weight" in quantized and _is_zero(entry):
                continue  # AutoGPTQ gives every module one
            raise ConfigError(f"{path}: {name} is not part of {spec.architecture}; it would be ignored")
        if entry.dtype not in TENSOR_BYTES and not (has_gguf and len(shape) > 1) and not entry.stored:
            raise ConfigError(f"{path}: {name} is {entry.dtype}; supported: {', '.join(TENSOR_BYTES)}")
        for part in () if has_gguf else entry.stored.tensors.values() if entry.stored else (entry,):
            size = part.end - part.begin
            if size != math.prod(part.shape) * ALL_BYTES[part.dtype]:
                raise ConfigError(f"{path}: corrupt: {name} has {size} bytes for shape {part.shape}")
        if entry.shape != shape:
            raise ConfigError(f"{path}: {name} has shape {entry.shape}; config.json means {shape}")
        if entry.stored and name in (EMBEDDING, HEAD):
            raise ConfigError(f"{path}: {name} is quantized; only the matrices of layers may be; pass another file")


def _is_zero(entry: TensorEntry) -> bool:
    """Return whether all bytes of a tensor of one dimension are zero."""
    if len(entry.shape) != 1:
        return False
    with entry.file.open("rb") as file:
        file.seek(entry.begin)
        return not any(file.read(entry.end - entry.begin))


def _check_tied(tensors: Mapping[str, TensorEntry], spec: ModelSpec) -> None:
    """Refuse a head beside embeddings that are tied to it, unless both have the same bytes.

    Some checkpoints have the same weights under both names, which is fine. If they differ, config and file contradict
    each other, and either choice would be a guess.
    """
    if not (spec.tie_embeddings and HEAD in tensors):
        return
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if head.dtype != embedding.dtype or not _same_bytes(head, embedding):
        raise ConfigError(
            f"{head.file}: {HEAD} is given beside {EMBEDDING} and differs from it, but config.json has"
            " tie_word_embeddings; remove the one or the other"
        )


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Compare two tensors of one size, a megabyte at a time: a gigabyte in the page cache takes half a second."""
    piece, other_piece = bytearray(2**20), bytearray(2**20)
    with one.file.open("rb", buffering=0) as file, other.file.open("rb", buffering=0) as other_file:
        file.seek(one.begin)
        other_file.seek(other.begin)
        for begin in range(one.begin, one.end, len(piece)):
            size = min(len(piece), one.end - begin)
            file.readinto(memoryview(piece)[:size])
            other_file.readinto(memoryview(other_piece)[:size])
            if piece != other_piece:  # after a short last read both end with equal bytes of the read before
                return False
    return True
