"""The metadata of GGUF files becomes a config, and their folder is made once."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from support.raw_gguf import FIELDS, PIECES, TENSORS, Tensors, gguf_bytes

from pipeline.errors import ConfigError
from stages.generate.model.config import read_spec
from stages.generate.model.folder import model_folder
from stages.generate.model.gguf import read_gguf
from stages.generate.model.gguf_folder import ARCHITECTURES, ENDS, config_of
from stages.generate.model.spec import ExpertsSpec, RopeSpec

MOE_TENSORS: Final[Tensors] = {
    **{name: one for name, one in TENSORS.items() if ".ffn_" not in name or "norm" in name},
    **{f"blk.0.attn_{letter}_norm.weight": ("F32", (16,)) for letter in "qk"},
    "blk.0.ffn_gate_inp.weight": ("F32", (4, 32)),
    "blk.0.ffn_gate_exps.weight": ("Q4_0", (4, 32, 32)),
    "blk.0.ffn_up_exps.weight": ("Q4_0", (4, 32, 32)),
    "blk.0.ffn_down_exps.weight": ("Q4_0", (4, 32, 32)),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fields_of(architecture: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of the smallest model with another architecture; `__` is a dot."""
    named = {name.replace("__", "."): value for name, value in more.items()}
    return {
        **{name.replace("llama.", f"{architecture}."): one for name, one in FIELDS.items()},
        "general.architecture": architecture,
        **{f"{architecture}.{name}" if "tokenizer" not in name else name: value for name, value in named.items()},
    }


YARN: Final = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 16,
}


def config(tmp_path: Path, fields: dict[str, Any], tensors: Tensors = TENSORS) -> dict[str, Any]:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields, tensors))
    return config_of([read_gguf(tmp_path / "m.gguf")])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_is_that_of_the_hub(architecture: str, tmp_path: Path) -> None:
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = dict(TENSORS)
    if architecture == "qwen2":
        tensors |= {f"blk.0.attn_{one}.bias": ("F32", (rows,)) for one, rows in (("q", 32), ("k", 16), ("v", 16))}
    if architecture.startswith("gemma"):
        tensors |= {f"blk.0.{name}.weight": ("F32", (32,)) for name in ("post_attention_norm", "post_ffw_norm")}
    if architecture == "phi3":
        fused = {"blk.0.attn_qkv.weight": ("F32", (64, 32)), "blk.0.ffn_up.weight": ("F32", (128, 32))}
        apart = {f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "ffn_gate")}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in apart} | fused
    if architecture.startswith("qwen3") or architecture == "gemma3":
        tensors |= {f"blk.0.attn_{letter}_norm.weight": ("F32", (16,)) for letter in "qk"}
    is_moe = architecture == "qwen3moe"
    fields = fields_of(architecture, **(experts if is_moe else {}))
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields, MOE_TENSORS if is_moe else tensors))
    spec = read_spec(model_folder(str(tmp_path / "m.gguf")))
    assert spec.architecture == ARCHITECTURES[architecture]
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (1, 32, 2, 1, 16)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_positions) == (64, len(PIECES), 64)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert (spec.tie_embeddings, spec.eos_ids, spec.dtype) == (True, (7,), "bfloat16")
    assert (spec.block, spec.blocks["Q8_0"]) == (32, 8 * 34)  # the embeddings are the head, too
    assert spec.experts == (ExpertsSpec((0,), 4, 2, 32, True) if is_moe else ExpertsSpec((), 0, 0, 0, False))


@pytest.mark.parametrize("architecture", ["gemma4", "", 7, ["llama"], None])
def test_another_architecture_is_named_beside_those_that_are_supported(architecture: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=", ".join(ARCHITECTURES)) as caught:
        config(tmp_path, {**FIELDS, "general.architecture": architecture})
    assert isinstance(architecture, list) or repr(architecture) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeSpec("default", 10_000.0)),
        ({"rope__freq_base": None}, RopeSpec("default", 10_000.0)),
        ({"rope__scaling__type": "none"}, RopeSpec("default", 10_000.0)),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, RopeSpec("linear", 10_000.0, 4.0)),
        ({"rope__scaling__factor": 4.0}, RopeSpec("linear", 10_000.0, 4.0)),  # as in llama.cpp
        ({"rope__scale_linear": 1.0}, RopeSpec("default", 10_000.0)),
        (
            {
                "rope__freq_base": 1e6,
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16,
                "rope__scaling__yarn_beta_fast": 32.0,
            },
            RopeSpec("yarn", 1e6, 4.0, original_max_positions=16, attention_factor=1.1386294361119891),
        ),
    ],
)
def test_each_rope_is_that_of_the_file(fields: dict[str, Any], rope: RopeSpec, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields_of("llama", **fields)))
    assert read_spec(model_folder(str(tmp_path / "m.gguf"))).kinds[0].rope == rope


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.factor"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "original_context_length"),
        ({**YARN, "rope__scaling__attn_factor": 0.5}, "attn_factor is 0.5; expected 1.0"),
        ({**YARN, "rope__scaling__yarn_beta_slow": 2.0}, "yarn_beta_slow"),
        ({"rope__scale_linear": 4.0}, "rope.scale_linear is 4.0"),
        ({"rope__dimension_count": 8}, "rope.dimension_count"),
        ({"attention__value_length": 8}, "attention.value_length"),
        ({"attention__head_count": [2, 2]}, "attention.head_count"),
        ({"block_count": None}, "block_count is missing"),
        ({"block_count": 100}, "block_count"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"attention__layer_norm_rms_epsilon": "small"}, "epsilon"),
    ],
)
def test_what_is_not_supported_names_the_field(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, fields_of("llama", **fields))


def test_millions_of_experts_are_refused(tmp_path: Path) -> None:
    fields = fields_of("qwen3moe", expert_count=2**31, expert_used_count=2, expert_feed_forward_length=32)
    with pytest.raises(ConfigError, match="expert_count"):
        config(tmp_path, fields, MOE_TENSORS)


@pytest.mark.parametrize("factors", [("F16", (8,)), ("F32", (4,)), ("F32", (2, 8))])
def test_other_factors_of_the_rope_are_refused(factors: tuple[str, tuple[int, ...]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rope_freqs"):
        config(tmp_path, dict(FIELDS), {**TENSORS, "rope_freqs.weight": factors})


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, [7]),
        ({"eot_token_id": 5, "eom_token_id": 4}, [4, 5, 7]),
        ({"eos_token_id": None}, [7]),  # its name says it
        ({"eos_token_id": 6, "token_type": [1] * 8}, [6]),
        ({"eos_token_id": None, "token_type": None}, []),
        ({"eos_token_id": 2**32 - 1, "eot_token_id": 8}, [7]),
        ({"eos_token_id": True, "eot_token_id": [1]}, [7]),
        (
            {"tokens": [*ENDS[:6], "x", "<|im_end|>"], "token_type": [3] * 8, "eos_token_id": 6},
            [0, 1, 2, 3, 4, 5, 6, 7],
        ),
    ],
)
def test_all_tokens_that_end_an_answer_are_known(fields: dict[str, Any], ends: list[int], tmp_path: Path) -> None:
    every = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    assert config(tmp_path, {**FIELDS, **every})["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_dtype_is_that_of_the_matrices(kind: str, dtype: str, tmp_path: Path) -> None:
    tensors = {name: (kind if len(shape) > 1 else "F32", shape) for name, (_, shape) in TENSORS.items()}
    made = config(tmp_path, dict(FIELDS), tensors)
    assert made["dtype"] == dtype and made["gguf"].keys() == {kind, "F32"}
    untied = config(tmp_path, dict(FIELDS), {**tensors, "output.weight": (kind, (8, 32))})
    assert untied["tie_word_embeddings"] is False
    # Tied embeddings that are numbers are copied for the head. The head's blocks are read as embeddings, too.
    assert (made["gguf"] == untied["gguf"]) is (kind != "Q8_0")


# ---- the folder


def test_a_folder_is_made_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    folder = model_folder(str(path))
    before = {one.name: one.stat(follow_symlinks=False).st_mtime_ns for one in folder.iterdir()}
    assert folder.name == "m" and (folder / "m.gguf").resolve() == path.resolve()
    assert model_folder(str(path)) == model_folder(str(folder)) == model_folder(str(tmp_path)) == folder
    assert before == {one.name: one.stat(follow_symlinks=False).st_mtime_ns for one in folder.iterdir()}
    path.write_bytes(gguf_bytes({**FIELDS, "llama.context_length": 32}))
    other = model_folder(str(path))
    assert other != folder and read_spec(other).max_positions == 32
    os.utime(path, ns=(1, 1))
    assert model_folder(str(path)) not in (folder, other)


def test_an_ending_in_capital_letters_is_one(tmp_path: Path) -> None:
    (tmp_path / "m.GGUF").write_bytes(gguf_bytes())
    assert read_spec(folder := model_folder(str(tmp_path / "m.GGUF"))).num_layers == 1
    assert (folder / "m.gguf").resolve() == tmp_path / "m.GGUF"


def test_a_folder_is_made_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    code = "import sys\nfrom stages.generate.model.folder import model_folder\nprint(model_folder(sys.argv[1]))"
    ascii_alone = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf")]
    made = Path(subprocess.run(command, env=ascii_alone, text=True, capture_output=True, check=True).stdout.strip())
    assert "Ġ" in (made / "tokenizer.json").read_text("utf-8")


def test_a_file_that_moved_is_found_in_the_folder(tmp_path: Path) -> None:
    path, moved = tmp_path / "m.gguf", tmp_path / "to" / "m.gguf"
    path.write_bytes(gguf_bytes())
    folder = model_folder(str(path))
    moved.parent.mkdir()
    path.rename(moved)
    assert model_folder(str(moved)) == folder
    assert (folder / "m.gguf").readlink() == moved
    assert sorted(one.name for one in folder.iterdir()) == sorted(
        ("config.json", "generation_config.json", "m.gguf", "tokenizer.json", "tokenizer_config.json")
    )


def test_processes_may_make_one_folder_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    code = (
        "import sys, tokenizers\nfrom stages.generate.model.folder import model_folder\n"
        "print('ready', flush=True); sys.stdin.readline()\nprint(model_folder(sys.argv[1]))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "m.gguf"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    found = [process.communicate("\n", timeout=60)[0].strip() for process in processes]
    assert len(set(found)) == 1 and Path(found[0]).is_dir()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [one.name for one in Path(found[0]).parent.iterdir()] == ["m"]


def test_a_folder_that_another_process_made_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    folder = model_folder(str(tmp_path / "m.gguf"))
    seen: list[Path] = []
    is_dir = Path.is_dir

    def not_at_first(path: Path) -> bool:
        if path == folder and not seen:
            seen.append(path)
            return False
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", not_at_first)
    assert model_folder(str(tmp_path / "m.gguf")) == folder == seen[0]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", Path("/proc/none"), tmp_path / ("x" * 300)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        with pytest.raises(ConfigError, match="XDG_CACHE_HOME") as caught:
            model_folder(str(tmp_path / "m.gguf"))
        assert "\n" not in str(caught.value)


def test_a_link_that_cannot_be_replaced_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    folder = model_folder(str(path))
    (folder / path.name).unlink()
    (folder / path.name).mkdir()
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        model_folder(str(path))


def test_factors_of_the_rope_are_read(tmp_path: Path) -> None:
    raw = bytearray(gguf_bytes(FIELDS, {**TENSORS, "rope_freqs.weight": ("F32", (8,))}))
    raw[-32:] = struct.pack("<8f", *range(1, 9))
    (tmp_path / "m.gguf").write_bytes(raw)
    rope = read_spec(model_folder(str(tmp_path / "m.gguf"))).kinds[0].rope
    assert rope is not None and rope.factors == tuple(map(float, range(1, 9)))
    raw[-4:] = struct.pack("<f", float("nan"))
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ConfigError, match="factors"):
        model_folder(str(tmp_path / "m.gguf"))
