"""A config becomes a spec, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from stages.generate.model.config import read_spec
from stages.generate.model.spec import ExpertsSpec, RopeSpec, tensor_shapes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "eos_token_id": 7,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
LLAMA3_ROPE = RopeSpec("llama3", 500_000.0, 8.0, 1.0, 4.0, 256)


SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_absent_and_null_fields_have_the_defaults_of_the_architecture(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, head_dim=None, num_key_value_heads=None))
    assert (spec.head_dim, spec.num_kv_heads, spec.qk_norm, spec.tie_embeddings) == (16, 4, False, False)
    assert (spec.kinds[0].rope, spec.dtype) == (RopeSpec("default", 10_000.0), "float32")
    spec = read_spec(write(tmp_path, architectures=["Qwen3ForCausalLM"]))
    assert (spec.head_dim, spec.qk_norm) == (128, True)
    spec = read_spec(write(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (spec.qkv_bias, spec.output_bias) == (True, False)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **SCALING}}, LLAMA3_ROPE),
        ({"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}}, LLAMA3_ROPE),
        ({"rope_theta": 500_000, "rope_scaling": {"type": "llama3", **SCALING}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_theta": 1e6}}, RopeSpec("default", 1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, RopeSpec("default", 1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": None}, RopeSpec("default", 1e6)),
    ],
)
def test_both_spellings_of_rope_are_read_and_without_scaling_it_is_default(
    tmp_path: Path, config: dict[str, Any], rope: RopeSpec
) -> None:
    assert read_spec(write(tmp_path, **config)).kinds[0].rope == rope


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "factor": 9.0}, 1024),
        ({"rope_type": "linear", "factor": 2.5}, 2560),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048),
        ({"rope_type": "llama3", **SCALING}, 1024),
        (YARN, 1024),
        ({**YARN, "original_max_position_embeddings": 100}, 400),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({**YARN, "factor": None}, 1024),
    ],
    ids=str,
)
def test_a_stretched_rope_reaches_further(tmp_path: Path, rope: dict[str, Any], expected: int) -> None:
    assert read_spec(write(tmp_path, rope_parameters=rope)).max_positions == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        ([9, 7], None, (7, 9)),
        (7, {"eos_token_id": [8, 7]}, (7, 8)),
        (None, {"eos_token_id": 3}, (3,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(
    tmp_path: Path, config: object, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read_spec(write(tmp_path, generation, eos_token_id=config)).eos_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, 'architectures says ["GPT2LMHeadModel"]'),
        ({"architectures": None}, "architectures says null"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "supported for this architecture: full_attention"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": 2 * ["sliding_attention"], "sliding_window": None},
            "sliding_window is missing",
        ),
        ({**SMOLLM3, "no_rope_layers": [[1], [0]]}, "no_rope_layers is [[1], [0]]"),
        (
            {**PHI3, "rope_scaling": LONG, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1",
        ),
        ({**PHI3, "rope_scaling": {**LONG, "long_factor": []}}, "the rope has long_factor []"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor is 1e+308"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has chunked_attention"),
        ({"layer_types": ["full_attention"]}, "expected a list of 2"),
        ({**SMOLLM3, "no_rope_layers": [1, 0, 1]}, "no_rope_layers is [1, 0, 1]; expected a list of 2"),
        ({**SMOLLM3, "no_rope_layers": [1, 2]}, "no_rope_layers is [1, 2]; expected a list of 2, 1 where there is"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "bidirectional_attention is True",
        ),
        ({**GEMMA2, "hidden_activation": "relu"}, "hidden_activation is 'relu'; supported: silu, gelu_pytorch_tanh"),
        ({**GEMMA2, "final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ({**PHI3, "partial_rotary_factor": 0.2}, "3 of 16 dimensions are rotated; expected an even number"),
        ({**PHI3, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "the rope has long_factor None"),
        ({**PHI3, "rope_scaling": LONG}, "the rope has 1 factors; expected 8"),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4, "modules_to_not_convert": ["lm_head"]}},
            'quantization_config has quant_method "hqq"',
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config has quant_method null"),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_scaling has rope_type 'ntk'"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {**YARN, "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.0001}}, "has factor 0.0001"),
        ({"rope_theta": 1, "rope_parameters": None}, "rope_theta is 1.0"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate is 'no'"),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor is -1.0"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "yarn has beta_fast 1.0, not above beta_slow 2.0"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": "llama3", **SCALING, "low_freq_factor": 4.0}}, "not below high_freq_factor"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters.full_attention is 5; expected one flat object"),
        ({"rope_parameters": {"other": {}}}, "expected one flat object, or one for each layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of 3"),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "a dynamic rope needs a head_dim of at least 4",
        ),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        (MOE | {"num_experts": None}, "num_local_experts is missing"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 8 experts"),
        (MOE | {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (MOE | {"norm_topk_prob": 1.5}, "norm_topk_prob is 1.5"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_we_do_not_compute_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(write(tmp_path, **changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(caught.value)


def test_biases_and_a_head_of_its_own_are_tensors_of_the_checkpoint(tmp_path: Path) -> None:
    plain = tensor_shapes(read_spec(write(tmp_path, tie_word_embeddings=True)))
    rich = tensor_shapes(read_spec(write(tmp_path, attention_bias=True, mlp_bias=True)))
    assert set(rich) - set(plain) == {"lm_head.weight"} | {
        f"model.layers.{layer}.{name}_proj.bias"
        for layer in range(2)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert rich["model.layers.0.self_attn.k_proj.bias"] == (32,)
    assert plain["model.layers.1.mlp.down_proj.weight"] == (64, 96)


def test_a_window_is_read_where_the_architecture_has_one(tmp_path: Path) -> None:
    mistral, qwen2 = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    assert read_spec(write(tmp_path, architectures=mistral, sliding_window=4096)).kinds[0].window == 4096
    assert read_spec(write(tmp_path, architectures=mistral, sliding_window=None)).kinds[0].window == 0
    folder = write(tmp_path, architectures=qwen2, sliding_window=4096, use_sliding_window=False)
    assert read_spec(folder).kinds[0].window == 0


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": [1, 4]}, (0, 2, 3, 5)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (1, 5)),
    ],
    ids=str,
)
def test_experts_are_in_the_layers_that_the_config_means(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    spec = read_spec(write(tmp_path, **(MOE | changes)))
    assert spec.experts == ExpertsSpec(layers, 8, 2, 40, True)
    shapes = tensor_shapes(spec)
    assert {name.split(".")[2] for name in shapes if ".experts." in name} == {str(layer) for layer in layers}
    last = f"model.layers.{layers[-1]}.mlp"
    assert shapes[f"{last}.gate.weight"] == (8, 64)
    assert shapes[f"{last}.experts.7.down_proj.weight"] == (64, 40)
    assert f"{last}.gate_proj.weight" not in shapes


def test_both_spellings_of_the_number_of_experts_are_read(tmp_path: Path) -> None:
    """The hub's, and that of transformers 5."""
    changes = MOE | {"num_experts": None, "num_local_experts": 8}
    assert read_spec(write(tmp_path, **changes)).experts == read_spec(write(tmp_path, **MOE)).experts
