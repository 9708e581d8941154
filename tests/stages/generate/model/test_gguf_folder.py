"""Models in GGUF files are computed as their weights say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.checkpoints import FAMILIES as EVERY
from support.checkpoints import Family, make_engine, reference_model, reference_tokens
from support.gguf_files import BLOCK_TYPES, make_gguf, mixed
from support.kernel_variants import VARIANTS
from support.plans import Request, generate, plan, shuffled_pages

from stages.generate.model.folder import model_folder
from stages.generate.model.recommended import read_recommended

FAMILIES: tuple[Family, ...] = tuple(family for family in EVERY if family != "odd")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


PROMPT = random.Random(3).choices(range(4, 480), k=40)
COUNT = 16
SEEDS: dict[Family, int] = {"gemma2": 1}
"""Of models that would repeat themselves with the usual one."""


@pytest.mark.parametrize("family", FAMILIES)
def test_widened_weights_give_the_tokens_of_transformers(family: Family, tmp_path: Path) -> None:
    original = make_gguf(tmp_path / "model.gguf", family, mixed, seed=SEEDS.get(family, 0))
    expected, smallest_gap = reference_tokens(original, PROMPT, COUNT)
    assert smallest_gap > 1e-3
    assert len(set(expected)) > COUNT // 3, "a model that repeats itself proves nothing"
    folder = model_folder(str(tmp_path / "model.gguf"))
    for kernels in ("torch", *VARIANTS):
        engine = make_engine(folder, "float32", kernels=kernels)
        assert generate(engine, Request(0, list(PROMPT), shuffled_pages()), COUNT, 64) == expected


@pytest.mark.parametrize("kernels", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_give_nearly_the_logits_of_their_weights(family: Family, kernels: str, tmp_path: Path) -> None:
    original = make_gguf(tmp_path / "model.gguf", family, mixed)
    with torch.inference_mode():
        expected_V = reference_model(original)(torch.tensor([PROMPT])).logits[0, -1]
    engine = make_engine(model_folder(str(tmp_path / "model.gguf")), "float32", kernels=kernels, quantization="q4_k")
    logits_V = engine.logits(plan(Request(0, list(PROMPT), shuffled_pages()).row(64)))[0]
    # Activations are rounded to 8 bits for 9 products one after the other, each of which is half a per cent off. A
    # SmolLM3 has four layers here, and 17 products.
    assert (logits_V - expected_V).norm() < (0.12 if family == "smollm3" else 0.05) * expected_V.norm()


@pytest.mark.parametrize("kernels", VARIANTS)
def test_the_last_of_q_k_and_v_ends_where_the_next_token_begins(kernels: str, tmp_path: Path) -> None:
    """8 heads of 8 numbers are 64, as far apart as two tokens are; v has half a panel."""
    kinds = {"blk.0.attn_v.weight": "Q4_0", "blk.1.attn_v.weight": "Q4_0"}
    sizes = {"head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 1}
    original = make_gguf(
        tmp_path / "model.gguf",
        "mistral",
        lambda name: "F32" if "attn_output" in name else kinds.get(name, "Q8_0"),
        sizes=sizes,
    )
    with torch.inference_mode():
        expected_V = reference_model(original)(torch.tensor([PROMPT])).logits[0, -1]
    engine = make_engine(model_folder(str(tmp_path / "model.gguf")), "float32", kernels=kernels, quantization="q8_0")
    logits_V = engine.logits(plan(Request(0, list(PROMPT), shuffled_pages()).row(64)))[0]
    assert (logits_V - expected_V).norm() < 0.05 * expected_V.norm()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_file_of_one_type_gives_nearly_the_logits_of_its_weights(kind: str, tmp_path: Path) -> None:
    """With embeddings that are the head, too: they are read out of its panels."""
    original = make_gguf(tmp_path / "model.gguf", "qwen3", lambda name: kind)
    with torch.inference_mode():
        expected_V = reference_model(original)(torch.tensor([PROMPT])).logits[0, -1]
    engine = make_engine(
        model_folder(str(tmp_path / "model.gguf")), "float32", kernels=VARIANTS[-1], quantization=kind.lower()
    )
    logits_V = engine.logits(plan(Request(0, list(PROMPT), shuffled_pages()).row(64)))[0]
    assert (logits_V - expected_V).norm() < 0.05 * expected_V.norm()


def test_recommended_sampling_comes_from_the_metadata_or_from_a_file_beside(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    make_gguf(tmp_path / "model.gguf", "qwen3", lambda name: "Q8_0", fields=sampling)
    assert read_recommended(model_folder(str(tmp_path / "model.gguf"))).sampling == {"temperature": 0.5, "top_k": 40}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.75}')
    assert read_recommended(model_folder(str(tmp_path / "model.gguf"))).sampling == {"top_p": 0.75}
