"""Quantized checkpoints of the hub: their weights as they are stored, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from support.checkpoints import make_checkpoint, make_engine, reference_tokens
from support.gguf_files import WIDE
from support.kernel_variants import VARIANTS
from support.plans import Request, generate, plan
from support.quantized import KINDS, quantize
from support.schedules import make_schedule, marked, request, steps

from pipeline.errors import ConfigError
from stages.generate.forward.gguf_weights import load_blocks, load_gguf
from stages.generate.forward.unpacked import unpacked
from stages.generate.model.checkpoint import check_folder, read_tensors
from stages.generate.model.spec import ModelSpec
from stages.generate.setup.config import EngineConfig
from stages.generate.setup.resolve import resolve

Folders = tuple[Path, Path]
PROMPT = list(range(5, 40))


def group(**weights: Any) -> dict[str, Any]:
    of_weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"targets": ["Linear"], "weights": {**of_weights, **weights}}


def compressed(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group()}}
    return {**config, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", num_layers=3, sizes=WIDE)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a quantized checkpoint, and one with the weights that it means."""
    top = tmp_path_factory.mktemp(request.param)
    quantize(folder, KINDS[request.param], top / "quantized", top / "meant")
    return top / "quantized", top / "meant"


def test_weights_are_as_stored_in_float32(made: Folders) -> None:
    quantized, meant = made
    spec = check_folder(quantized)
    weights = load_gguf(spec, quantized, dtype=torch.float32, device=torch.device("cpu"))
    expected = load_file(meant / "model.safetensors")
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], expected["model.layers.0.mlp.down_proj.weight"])
    parts = [expected[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(weights["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(parts))
    last = expected["model.layers.2.mlp.down_proj.weight"]
    assert torch.equal(weights["model.layers.2.mlp.down_proj.weight"], last)


def test_float32_gives_the_tokens_of_transformers(made: Folders) -> None:
    quantized, meant = made
    tokens, gap = reference_tokens(meant, PROMPT, 16)
    assert gap > 1e-3
    settings = resolve(EngineConfig(device="cpu", dtype="float32", num_pages=32), check_folder(quantized))
    assert settings.quantization == "none"
    engine = make_engine(quantized, "float32", kernels=VARIANTS[-1])
    assert generate(engine, Request(0, list(PROMPT), list(range(64))), 16, 7) == tokens


def _blocks(spec: ModelSpec) -> list[str]:
    return [kind.lower() for kind in spec.blocks if kind not in ("F32", "BF16", "F16")]


def test_integers_stay_integers_in_the_kernels(made: Folders) -> None:
    quantized, meant = made
    spec = check_folder(quantized)
    settings = resolve(EngineConfig(device="cpu", dtype="bfloat16", num_pages=32), spec)
    options: dict[str, Any] = {"quantization": settings.quantization, "kernels": VARIANTS[-1]}
    engine, exact = make_engine(quantized, "bfloat16", **options), make_engine(meant, "float32", kernels=VARIANTS[-1])
    row = Request(0, list(PROMPT), list(range(64))).row(64)
    found, expected = engine.logits(plan(row)), exact.logits(plan(row))
    assert (found - expected).norm() < 0.2 * expected.norm(), "activations are rounded to 8 bits"
    assert settings.quantization == ("none" if set(spec.blocks) <= {"F32", "BF16"} else "+".join(_blocks(spec)))


def test_a_zero_of_zero_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Of a group in which no weight is negative. The first version of GPTQ subtracts 1 from whole words of zeros."""
    make_checkpoint(tmp_path / "plain", "qwen2", num_layers=2, sizes=WIDE)
    path, name = tmp_path / "plain" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name][::3, 64:128].abs_()
    save_file(tensors, path, {"format": "pt"})
    quantize(tmp_path / "plain", KINDS["gptq-zeros"], tmp_path / "quantized", tmp_path / "meant")
    spec = check_folder(tmp_path / "quantized")
    weights = load_gguf(spec, tmp_path / "quantized", dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(weights[name], load_file(tmp_path / "meant" / "model.safetensors")[name])


def test_experts_of_several_kinds_are_refused_by_the_kernels_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3moe", num_layers=3, sizes=WIDE)
    quantize(tmp_path / "plain", KINDS["packed-128"], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.2.down_proj.weight_scale"][3, 0] = 2.0**-27
    save_file(tensors, path, {"format": "pt"})
    spec = check_folder(path.parent)
    with pytest.raises(ConfigError, match=r"down_proj.weight has .* \(INT4_128, float32\).* --dtype float32"):
        load_blocks(spec, path.parent)
    assert load_gguf(spec, path.parent, dtype=torch.float32, device=torch.device("cpu"))


def test_fp8_may_be_rounded_to_int8(folder: Path, tmp_path: Path) -> None:
    quantize(folder, KINDS["fp8-blocks"], tmp_path / "quantized", tmp_path / "meant")
    spec = check_folder(tmp_path / "quantized")
    assert resolve(EngineConfig(device="cpu", quantization="int8", num_pages=32), spec).quantization == "int8"
    with capture_logs() as logs:
        rounded = make_engine(tmp_path / "quantized", "bfloat16", kernels=VARIANTS[-1], quantization="int8")
    assert [line["event"] for line in logs] == ["weights_are_widened"]
    exact = make_engine(tmp_path / "meant", "float32", kernels=VARIANTS[-1])
    row = Request(0, list(PROMPT), list(range(64))).row(64)
    found, expected = rounded.logits(plan(row)), exact.logits(plan(row))
    assert 0 < (found - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("kind", ["awq-32", "gptq-order"])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(folder: Path, tmp_path: Path, kind: str) -> None:
    quantize(folder, KINDS[kind], tmp_path / "quantized", tmp_path / "meant")

    def tokens(*uids: str, num_pages: int) -> dict[str, list[int]]:
        engine = make_engine(tmp_path / "quantized", "bfloat16", kernels=VARIANTS[-1], quantization=kind)
        schedule = make_schedule("radix", num_pages=num_pages, prefill=16, context=64, running=4, vocab_size=90)
        for uid in uids:
            assert (
                schedule.add(request(uid, 20, first=5 * int(uid), max_tokens=30, ignore_eos=True, temperature=0))
                is None
            )
        made: dict[str, list[int]] = {uid: [] for uid in uids}
        for _, marks, rows in steps(schedule, engine.forward):
            preempted.extend(marked(marks, "preempted"))
            for row in rows:
                made[row.uid].append(row.token)
        return made

    preempted: list[str] = []
    together = tokens("0", "1", "2", "3", num_pages=24)
    assert preempted
    assert together == {uid: tokens(uid, num_pages=24)[uid] for uid in together}


def test_scales_that_are_no_halves_are_kept_in_float32(folder: Path, tmp_path: Path) -> None:
    quantize(folder, KINDS["packed-128"], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[f"{name}_scale"][3, 1] = 2.0**-27
    save_file(tensors, path)
    found = {each: unpacked(entry).kind for each, entry in read_tensors(path.parent).items() if entry.stored}
    assert found.pop(name) == "F32" and set(found.values()) == {"INT4_128"}
    with capture_logs() as logs:
        load_blocks(check_folder(path.parent), path.parent)
    assert [(line["event"], line["matrices"]) for line in logs] == [("weights_are_widened", 1)]
    tensors[f"{name}_scale"][3, 1] = float("inf")
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"down_proj.weight has a scale that is not a finite number"):
        unpacked(read_tensors(path.parent)[name])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "bitsandbytes"}, '"bitsandbytes"; supported are awq, gptq, compressed-tensors and fp8'),
        ({"load_in_4bit": True}, "quant_method null"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'version is "gemv"; supported: gemm'),
        ({"quant_method": "gptq", "bits": 2}, "bits is 2; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; expected a number of inputs, or -1"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups must say"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "the shape of a block is [128]; expected two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "the shape of a block is [0, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [10**30, 128]}, "the shape of a block is [1000000"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp": {"bits": 8}}}, "dynamic is given"),
        (compressed(format=["x"]), 'format is ["x"]; supported: pack-quantized'),
        (compressed(config_groups={"a": 5, "b": {"weights": None}}), "config_groups must say"),
        (compressed(config_groups={"a": group(), "b": group(num_bits=8)}), "and the same for all"),
        (compressed(transform_config={"R1": {}}), "transform_config is given"),
        (compressed(config_groups={"a": group(strategy="block", block_structure=[2, 2])}), 'strategy is "block"'),
        (compressed(config_groups={"a": group(group_size=2**40)}), "group_size is 1099511627776; expected"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_in_one_line(
    folder: Path, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    quantize(folder, KINDS["awq-32"], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with pytest.raises(ConfigError) as refused:
        check_folder(path.parent)
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("qzeros", None, "qzeros is missing beside qweight"),
        ("scales", lambda tensor: tensor[:-1].contiguous(), "scales is F16 (7, 256), expected F16/BF16/F32 (8, 256)"),
        ("qzeros", lambda tensor: tensor.long(), "qzeros is I64 (8, 32), expected I32 (8, 32)"),
        ("qweight", lambda tensor: tensor[:250].contiguous(), "has 250 inputs, which groups of 32 do not divide"),
    ],
    ids=["missing", "shape", "dtype", "groups"],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(
    folder: Path, tmp_path: Path, part: str, change: Any, told: str
) -> None:
    quantize(folder, KINDS["awq-32"], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors, name = load_file(path), f"model.layers.0.self_attn.q_proj.{part}"
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, path)
    with pytest.raises(ConfigError) as refused:
        check_folder(path.parent)
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["awq-64", "gptq-32", "packed-128", "int8-128"])
def test_matrices_that_are_one_in_the_file_are_divided_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "plain", "phi3", head_dim=64, sizes=WIDE)
    quantize(tmp_path / "plain", KINDS[kind], tmp_path / "quantized", tmp_path / "meant")
    spec = check_folder(tmp_path / "quantized")
    weights = load_gguf(spec, tmp_path / "quantized", dtype=torch.float32, device=torch.device("cpu"))
    expected = load_file(tmp_path / "meant" / "model.safetensors")
    assert len(expected) == len(weights) + spec.tie_embeddings
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("awq-32", {"version": "GEMM"}),
        ("awq-32", {"version": None}),
        ("gptq-32", {"checkpoint_format": None, "dynamic": {"-:.*lm_head": {}}}),
        ("packed-128", {"config_groups": {"a": group(group_size=128, observer="mse"), "b": {"weights": None}}}),
    ],
    ids=str,
)
def test_what_quantizers_write_in_several_ways_is_read(
    folder: Path, tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    quantize(folder, KINDS[kind], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "config.json"
    written = json.loads(path.read_text())
    expected = check_folder(path.parent)
    path.write_text(json.dumps({**written, "quantization_config": {**written["quantization_config"], **config}}))
    assert check_folder(path.parent) == expected


def test_tensors_that_are_shorter_than_they_say_are_refused(folder: Path, tmp_path: Path) -> None:
    quantize(folder, KINDS["fp8"], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.layers.0.self_attn.q_proj.weight"]["shape"][0] *= 2
    made = json.dumps(header).encode()
    path.write_bytes(len(made).to_bytes(8, "little") + made + data[8 + size :])
    with pytest.raises(ConfigError, match=r"q_proj.weight has 65536 bytes for shape \(512, 256\)"):
        check_folder(path.parent)


def test_biases_of_zeros_that_no_module_has_are_left_out(folder: Path, tmp_path: Path) -> None:
    quantize(folder, KINDS["gptq-32"], tmp_path / "quantized", tmp_path / "meant")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.down_proj.bias"
    save_file({**tensors, name: torch.zeros(256)}, path)
    assert check_folder(path.parent)
    save_file({**tensors, name: torch.ones(256)}, path)
    with pytest.raises(ConfigError, match=r"down_proj.bias is not part of Qwen2ForCausalLM; it would be ignored"):
        check_folder(path.parent)
