"""A broken GGUF file is one clear line, and takes little memory."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
from support.raw_gguf import FIELDS, PIECES, TENSORS, Tensors, gguf_bytes, header, info, text
from support.selection import by_night

from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import read_tensors
from stages.generate.model.folder import model_folder
from stages.generate.model.gguf import read_gguf

GOOD: Final = gguf_bytes()
COUNTS: Final = len(b"GGUF") + 4
"""Where the numbers of tensors and fields begin."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(path: Path, raw: bytes) -> str:
    """Return the one line that refuses a file with these bytes."""
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        model_folder(str(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def outcome(path: Path) -> str:
    """Return the one line that refuses a file; empty if it is a model."""
    try:
        folder = model_folder(str(path))
    except ConfigError as error:
        line = str(error)
    else:
        return "" if (folder / "tokenizer.json").is_file() else "\n"
    return line


def array(kind: int, length: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, length) + raw


def with_fields(**fields: Any) -> bytes:
    """Return the file with other fields; `__` is a dot."""
    return gguf_bytes({**FIELDS, **{name.replace("__", "."): value for name, value in fields.items()}})


def with_tensors(tensors: Tensors) -> bytes:
    return gguf_bytes(FIELDS, {**TENSORS, **tensors})


def with_info(raw: bytes) -> bytes:
    """Return a file with one more tensor, which comes last."""
    return header(FIELDS, [raw]) + bytes(4096)


def test_the_smallest_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GOOD)
    folder = model_folder(str(tmp_path / "m.gguf"))
    assert read_tensors(folder)["model.embed_tokens.weight"].shape == (8, 32)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {one.name: one.data_offset for one in reader.tensors} == {
        name: tensor.begin for name, tensor in read_gguf(tmp_path / "m.gguf").tensors.items()
    }


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GOOD)
    begin = read_gguf(tmp_path / "m.gguf").header_bytes
    last = len(GOOD) - 1
    for end in (0, 1, 3, 4, *range(5, begin, by_night(53, 1)), begin, (begin + last) // 2, last):
        refused(tmp_path / "m.gguf", GOOD[:end])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "GGUF"),
        (b"GGML" + GOOD[4:], "GGUF"),
        (header(FIELDS, [], version=1), "version 1;"),
        (b"GGUF" + struct.pack(">I", 3) + GOOD[8:], "little endian"),
        (GOOD[:COUNTS] + struct.pack("<Q", 2**60) + GOOD[COUNTS + 8 :], "tensors"),
        (GOOD[: COUNTS + 8] + struct.pack("<Q", 2**60) + GOOD[COUNTS + 16 :], "fields"),
        (GOOD[: COUNTS + 16] + struct.pack("<Q", 2**63) + GOOD[COUNTS + 24 :], "bytes"),
        (with_fields(x=struct.pack("<IQ", 8, 2**63)), "bytes"),
        (with_fields(x=array(4, 2**60)), "elements"),
        (with_fields(x=array(8, 2**60)), "elements"),
        (with_fields(x=array(12, 2**20)), "early"),
        (with_fields(x=array(9, 1, array(4, 0)[4:])), "arrays"),
        (with_fields(x=array(13, 1)), "type 13"),
        (with_fields(x=struct.pack("<I", 99)), "type 99"),
        (with_fields(general__alignment=0), "alignment"),
        (with_fields(general__alignment=32.0), "alignment"),
        (with_fields(general__alignment=True), "alignment"),
        (with_info(info("x", (), 0, 0)), "0 dimensions"),
        (with_info(info("x", (1,) * 5, 0, 0)), "5 dimensions"),
        (with_info(info("x", (4, 0), 0, 0)), "shape"),
        (with_info(info("x", (2**62, 2**62), 0, 0)), "truncated"),
        (with_info(info("x", (2, 48), 2, 0)), "multiple of 32"),
        (with_info(info("x", (2, 32), 0, 2**63)), "offset"),
        (with_info(info("x", (2, 32), 0, 32)), "offset"),
        (header(FIELDS, [info("x", (8,), 0, 0), info("y", (8,), 0, 0)]) + bytes(256), "offset"),
        (header(FIELDS, [info("x", (8,), 0, 0), info("x", (8,), 0, 32)]) + bytes(256), "twice"),
        (header({**FIELDS, "x\ny": 1}, []).replace(text("general.architecture"), text("x\ny")), "twice"),
        *((with_info(info("blk.0.ffn_up.weight", (2, 256), kind, 0)), name) for kind, name in (
            (10, "blk.0.ffn_up.weight is Q2_K"), (20, "IQ4_NL"), (39, "MXFP4"), (5, "type 5"), (2**31, "type 2147"),
        )),
        *((with_info(info(name, (8,), 0, 0)), "name") for name in ("x\ny", "x" * 65, "", b"\xff\x00")),
        (with_tensors({"blk.0.attn_q.bias": ("F32", (32,))}), "q_proj.bias is not part"),
        (with_tensors({"token_embd.weight": ("Q8_0", (7, 32))}), "8 tokens"),
        (with_tensors({"token_embd.weight": ("F32", (8,))}), "shape"),
        (with_tensors({"blk.0.ffn_up.weight": ("F16", (32, 64))}), "shape"),
        (with_tensors({"output_norm.weight": ("Q8_0", (32,))}), "model.norm.weight is Q8_0; supported: F32, BF16, F16"),
        (gguf_bytes(FIELDS, {name: one for name, one in TENSORS.items() if name != "token_embd.weight"}), "token_embd"),
        (gguf_bytes(FIELDS, {name: one for name, one in TENSORS.items() if "ffn_up" not in name}), "up_proj"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line(raw: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path / "m.gguf", raw)


@pytest.mark.parametrize("value", [7, True, 0.5, float("nan"), "x", "x\ny", "", [1], ["x", "a b\n"], [0.5], [True], []])
@pytest.mark.parametrize("name", FIELDS)
def test_no_value_of_a_field_is_another_error(name: str, value: Any, tmp_path: Path) -> None:
    """Of any type, and so for lists of each length."""
    for content in (value, value * 8 if isinstance(value, list) else value):
        (tmp_path / "m.gguf").write_bytes(gguf_bytes({**FIELDS, name: content}))
        assert "\n" not in outcome(tmp_path / "m.gguf")


@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("name", [name for name, value in FIELDS.items() if type(value) is int])
def test_no_number_of_a_field_takes_time_or_memory(name: str, value: int, tmp_path: Path) -> None:
    raw = struct.pack("<Ii", 5, value) if value < 0 else value
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({**FIELDS, name: raw}))
    if name.endswith(("token_id", "context_length")) and (value > 0 or name.endswith("token_id")):
        assert model_folder(str(tmp_path / "m.gguf")).is_dir()
    else:
        assert refused(tmp_path / "m.gguf", gguf_bytes({**FIELDS, name: raw}))


def test_a_flipped_byte_of_the_header_is_a_model_or_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    begin, choose = read_gguf(path).header_bytes, random.Random(5)
    every = [(place, flip) for place in range(begin) for flip in (1, 4, 0x80, 0xFF, GOOD[place] ^ 10, GOOD[place])]
    for place, flip in every if by_night(False, True) else choose.sample(every, 100):
        raw = bytearray(GOOD)
        raw[place] ^= flip
        path.write_bytes(raw)
        assert "\n" not in outcome(path), (place, flip)


def many_experts() -> bytes:
    """Return a small file that claims to have millions of experts."""
    count = 60_000
    infos = [info(f"blk.{layer}.ffn_up_exps.weight", (4096, 1, 1), 0, layer * 4096 * 4) for layer in range(count)]
    return header({**FIELDS, "llama.block_count": count}, [info("token_embd.weight", (8, 1), 0, 0), *infos])


WORST: Final[Mapping[str, bytes]] = {
    "tensors": GOOD[:COUNTS] + struct.pack("<Q", 2**16) + GOOD[COUNTS + 8 :],
    "elements": with_fields(x=array(8, 2**20)),
    "layers": with_fields(llama__block_count=2**32 - 1),
    "experts": many_experts(),
    "arrays": with_fields(**{f"x{one}": array(0, 2**20, bytes(2**20)) for one in range(24)}),
    "strings": with_fields(**{f"x{one}": "a" * 1_000_000 + "🙂" for one in range(20)}),
    "piece": with_fields(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=["a" * 1_000_000, *PIECES[1:]],
        tokenizer__ggml__scores=[0.0] * 8,
    ),
}
MEASURED: Final = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from pipeline.errors import ConfigError
from stages.generate.model.folder import model_folder
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
try:
    model_folder(sys.argv[1])
except ConfigError as error:
    print(error)
print((peak() - before) // 1024)
"""


@pytest.mark.parametrize("name", WORST)
def test_a_broken_file_takes_at_most_100_mb(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WORST[name])
    if name == "experts":  # a sparse file
        os.truncate(path, 2**30)
    done = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, text=True, timeout=60)
    *_, megabytes = done.stdout.split()
    assert int(megabytes) < 100, done.stdout


@pytest.mark.parametrize("splits", [2, 3])
def test_several_files_are_one_model(splits: int, tmp_path: Path) -> None:
    paths = write_parts(tmp_path, splits)
    folder = model_folder(str(tmp_path))
    assert folder.name == "m" and {entry.file.name for entry in read_tensors(folder).values()} == {
        path.name for path in paths
    }
    assert model_folder(str(paths[-1])) == folder
    paths[-1].unlink()
    with pytest.raises(ConfigError, match=paths[-1].name):
        model_folder(str(paths[0]))


def write_parts(folder: Path, splits: int) -> list[Path]:
    """Write the model as several files, of which the first has the metadata."""
    names = list(TENSORS)
    paths = []
    for number in range(splits):
        path = folder / f"m-{number + 1:05}-of-{splits:05}.gguf"
        fields = {"split.no": number, "split.count": splits, "split.tensors.count": len(names)}
        part = {name: TENSORS[name] for name in names[number::splits]}
        path.write_bytes(gguf_bytes({**(FIELDS if number == 0 else {}), **fields}, part))
        paths.append(path)
    return paths


@pytest.mark.parametrize("name", ["m-00001-of-00000.gguf", "m-00003-of-00002.gguf", "m-00000-of-00001.gguf"])
def test_a_file_that_is_none_of_its_parts_is_refused(name: str, tmp_path: Path) -> None:
    assert name in refused(tmp_path / name, GOOD)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, 2)
    second.write_bytes(gguf_bytes({}, TENSORS))
    with pytest.raises(ConfigError, match="too; one of them"):
        model_folder(str(first))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(ConfigError):
        read_gguf(tmp_path / "m.gguf")
    for model in (tmp_path / "m.gguf", tmp_path / "other.gguf"):
        with pytest.raises(ConfigError) as caught:
            model_folder(str(model))
        assert "not found" in str(caught.value)


def test_metadata_of_each_type_is_read(tmp_path: Path) -> None:
    letters = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    fields = {letter: struct.pack(f"<I{letter}", kind, 1) for kind, letter in letters.items()}
    fields |= {letter * 2: array(kind, 2, struct.pack(f"<2{letter}", 0, 1)) for kind, letter in letters.items()}
    (tmp_path / "m.gguf").write_bytes(header({**fields, "s": "ä", "ss": ["ä", ""]}, []) + bytes(32))
    read = read_gguf(tmp_path / "m.gguf").fields
    assert all(read[letter] == 1 and read[letter * 2] == (0, 1) for letter in letters.values())
    assert (read["s"], read["ss"]) == ("ä", ("ä", ""))


def test_another_alignment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({**FIELDS, "general.alignment": 64}, alignment=64))
    begins = [tensor.begin for tensor in read_gguf(tmp_path / "m.gguf").tensors.values()]
    assert not any(begin % 64 for begin in begins)
