"""Every kind of rope turns as fast as transformers' own functions say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stages.generate.model.config import read_spec
from stages.generate.model.layers.rope import Rope, make_rope, rope_tables

CPU = torch.device("cpu")
REACH = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": YARN,
    "yarn, original absent": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor null": {**YARN, "factor": None, "original_max_position_embeddings": 16},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
    "yarn, mscale alone": {**YARN, "mscale": 0.8},
    "yarn, mscale of 0": {**YARN, "mscale": 1.0, "mscale_all_dim": 0},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
    "yarn, betas": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, betas null": {**YARN, "beta_fast": None, "beta_slow": 0},
    "yarn, bounds not truncated": {**YARN, "truncate": False},
    "yarn, truncate null": {**YARN, "truncate": None},
}
"""As `rope_parameters`, beside `max_position_embeddings` of 64."""


def config_of(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=300,
        max_position_embeddings=REACH,
        rope_parameters={"rope_theta": 500.0, **rope},
    )


def ours(folder: Path, config: LlamaConfig, **more: Any) -> Rope:
    (folder / "config.json").write_text(json.dumps(config.to_dict() | more))
    spec = read_spec(folder)
    rope = spec.kinds[0].rope
    assert rope is not None
    return make_rope(rope, spec.head_dim, CPU)


def unsigned(sin_T1D: torch.Tensor) -> torch.Tensor:
    """Return the sines as transformers has them, whose minus is in the rotation instead."""
    first, second = sin_T1D.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ROPES)
def test_the_tables_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    config = config_of(dict(ROPES[kind]))
    theirs = LlamaRotaryEmbedding(config)
    positions_T = torch.arange(REACH)
    cos_T1D, sin_T1D = rope_tables(ours(tmp_path, config), positions_T, torch.float32)
    cos_1TD, sin_1TD = theirs(torch.zeros(1), positions_T[None])
    torch.testing.assert_close(cos_T1D[:, 0], cos_1TD[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(unsigned(sin_T1D)[:, 0], sin_1TD[0], atol=2e-5, rtol=0)


def test_every_kind_differs_from_the_others(tmp_path: Path) -> None:
    """Else the test above would prove little. Those left out spell another one differently."""
    same = ("yarn, original absent", "yarn, mscale alone", "yarn, mscale of 0", "yarn, betas null")
    tables = {
        kind: rope_tables(ours(tmp_path, config_of(dict(ROPES[kind]))), torch.arange(2 * REACH), torch.float32)[0]
        for kind in ROPES
        if kind not in (*same, "yarn, truncate null")
    }
    for one, mine in tables.items():
        for other, their in tables.items():
            assert one == other or (mine - their).abs().max() > 1e-2, f"{one} is {other}"


def test_dynamic_gives_each_token_the_speed_of_transformers_when_it_was_the_last(tmp_path: Path) -> None:
    config = config_of(dict(ROPES["dynamic"]))
    theirs = LlamaRotaryEmbedding(config)
    positions_T = torch.arange(3 * REACH)
    cos_T1D, sin_T1D = rope_tables(ours(tmp_path, config), positions_T, torch.float32)
    for position in positions_T.tolist():
        cos_11D, sin_11D = theirs(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(cos_T1D[position], cos_11D[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(unsigned(sin_T1D)[position], sin_11D[0], atol=1e-4, rtol=0)
    plain_T1D, _ = rope_tables(ours(tmp_path, config_of({"rope_type": "default"})), positions_T, torch.float32)
    assert torch.equal(cos_T1D[:REACH], plain_T1D[:REACH])
    assert (cos_T1D[REACH:] - plain_T1D[REACH:]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["default", "dynamic", "yarn"])
def test_a_rotation_depends_on_the_position_alone(tmp_path: Path, kind: str) -> None:
    """Not on what else is in the step, so that requests can share pages."""
    rope = ours(tmp_path, config_of(dict(ROPES[kind])))
    alone, _ = rope_tables(rope, torch.tensor([100]), torch.float32)
    together, _ = rope_tables(rope, torch.tensor([3, 190, 100, 7]), torch.float32)
    assert torch.equal(alone[0], together[2])


def test_a_reach_beside_the_rope_wins_over_one_in_it_as_in_transformers(tmp_path: Path) -> None:
    config = config_of({**YARN, "original_max_position_embeddings": 32})
    config.original_max_position_embeddings = 16
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(ours(tmp_path, config).freq_F, theirs.inv_freq, atol=1e-6, rtol=1e-5)
    plain = ours(tmp_path, config_of({**YARN, "original_max_position_embeddings": 32}))
    assert (plain.freq_F - theirs.inv_freq).abs().max() > 1e-3
