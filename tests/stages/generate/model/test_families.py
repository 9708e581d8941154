"""What is particular about a family, beside what all of them have in common (`test_engine.py`)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    Family,
    make_checkpoint,
    make_engine,
    reference_model,
    reference_tokens,
)
from support.plans import Request, generate, shuffled_pages
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from pipeline.errors import ConfigError
from stages.generate.model.checkpoint import DEMO_FOLDER, check_folder
from stages.generate.model.config import read_spec
from stages.generate.setup.config import EngineConfig
from stages.generate.setup.resolve import resolve

pytestmark = pytest.mark.usefixtures("kernels")

PROMPT = random.Random(5).choices(range(4, 480), k=30)


def tokens_of(folder: Path, prompt: list[int], count: int, **more: Any) -> list[int]:
    engine = make_engine(folder, **more)
    return generate(engine, Request(0, list(prompt), shuffled_pages()), count, 16)


@pytest.mark.parametrize(("context", "reach"), [(12, "short"), (13, "long"), (160, "long")])
def test_the_served_context_decides_which_factors_the_rope_has(tmp_path: Path, context: int, reach: str) -> None:
    """transformers looks at the longest row of each call, so 20 more tokens give it the long ones."""
    folder = make_checkpoint(tmp_path, "phi3", sizes={"original_max_position_embeddings": 12})
    model = reference_model(folder)
    prompt = PROMPT[:8]
    tokens: list[int] = []
    for _ in range(4):
        with torch.inference_mode():
            padded = torch.tensor([[*prompt, *tokens, *([0] * 20 if reach == "long" else [])]])
            tokens.append(int(model(padded).logits[0, len(prompt) + len(tokens) - 1].argmax()))
    assert tokens_of(folder, prompt, 4, max_seq_len=context) == tokens
    settings = resolve(EngineConfig(max_seq_len=context, device="cpu"), read_spec(folder))
    assert f"/rope-{reach}" in settings.numerics


def test_a_rope_is_no_part_of_the_numerics_where_the_context_decides_nothing() -> None:
    assert "rope" not in resolve(EngineConfig(device="cpu"), read_spec(DEMO_FOLDER)).numerics


@pytest.mark.parametrize(("family", "head_dim"), [("gemma3", 256), ("gemma2", 256), ("phi3", 96)])
def test_heads_of_the_size_that_the_family_has(tmp_path: Path, family: Family, head_dim: int) -> None:
    folder = make_checkpoint(tmp_path, family, head_dim=head_dim, seed=1)
    expected, gap = reference_tokens(folder, PROMPT, 12)
    assert gap > 1e-3 and len(set(expected)) > 4
    assert tokens_of(folder, PROMPT, 12) == expected


def seeing(folder: Path, text: Path) -> Path:
    """Write a Gemma 3 that also sees, whose language model is that of *text*; return *folder*."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=Gemma3TextConfig.from_pretrained(text), vision_config=vision, mm_tokens_per_image=1
    )
    model = Gemma3ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(AutoModelForCausalLM.from_pretrained(text).model.state_dict())
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((text / name).read_bytes())
    return folder


def other_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    old, new = "language_model.model.", "model.language_model."
    if not any(name.startswith(old) for name in weights):
        old, new = new, old
    return {name.replace(old, new) if name.startswith(old) else name: one.clone() for name, one in weights.items()}


@pytest.mark.parametrize("renamed", [False, True])
def test_the_language_model_of_a_gemma_that_sees_is_served(tmp_path: Path, renamed: bool) -> None:
    """Its tensors have two kinds of names on the hub: transformers has changed them."""
    text = make_checkpoint(tmp_path / "text", "gemma3")
    folder = seeing(tmp_path / "sees", text)
    if renamed:
        save_file(other_names(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    assert check_folder(folder).architecture == "Gemma3ForConditionalGeneration"
    assert tokens_of(folder, PROMPT, 8) == tokens_of(text, PROMPT, 8)


def test_what_the_config_of_a_gemma_leaves_out_has_the_value_of_its_class(tmp_path: Path) -> None:
    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {**said, "model_type": "gemma3_text", "rope_scaling": scaling},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, theirs = read_spec(tmp_path), Gemma3TextConfig(**said, rope_scaling=scaling)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_positions, spec.tie_embeddings) == (262_208, 131_072, True)
    assert (spec.attention_cap, spec.logits_cap, spec.attention_scale) == (0, 0, 1 / 16)
    assert (spec.dtype, spec.eos_ids) == ("bfloat16", (1, 106))
    types = ["full_attention" if not spec.kinds[kind].window else "sliding_attention" for kind in spec.kind_of]
    assert types == theirs.layer_types
    assert {kind.window: kind.rope and (kind.rope.theta, kind.rope.factor) for kind in spec.kinds} == {
        0: (1_000_000.0, 8.0),
        1024: (10_000.0, 1.0),
    }


def test_fused_matrices_of_the_wrong_size_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "phi3")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.qkv_proj.weight"] = torch.zeros(127, 64)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1\.self_attn\.qkv_proj\.weight has 127 rows; config.json means 128"):
        check_folder(folder)


def test_the_ends_of_a_gemma_that_sees_are_those_of_the_whole_config(tmp_path: Path) -> None:
    """transformers saves the default of its class in the part of the text."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "eos_token_id": 1, "dtype": "float32"}
    whole = {"eos_token_id": [1, 106], "dtype": "bfloat16", "rope_theta": 5.0, "attn_logit_softcapping": 7.0}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": sizes, **whole}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    assert (spec.eos_ids, spec.dtype, spec.attention_cap) == ((1, 106), "bfloat16", 0.0)
    assert {kind.rope and kind.rope.theta for kind in spec.kinds} <= {1e6, 1e4}


def test_a_tensor_that_is_there_in_two_ways_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "phi3", "phi3")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj\.weight is there beside model\.layers\.0\.self_attn\.qkv_proj"):
        check_folder(folder)
    sees = seeing(tmp_path / "sees", make_checkpoint(tmp_path / "text", "gemma3"))
    weights = load_file(sees / "model.safetensors")
    save_file(weights | other_names(weights), sees / "model.safetensors")
    with pytest.raises(ConfigError, match="is there under two names"):
        check_folder(sees)


def test_what_sees_is_no_part_of_a_model_that_only_reads(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama3")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"vision_tower.x.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"vision_tower\.x\.weight is not part of LlamaForCausalLM"):
        check_folder(folder)
