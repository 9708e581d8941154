"""Turns the config of a Hugging Face folder into a `ModelSpec`. Needs neither torch nor transformers.

To add a model, add a row to `ARCHITECTURES`. If its config has something new, add a field to `ModelSpec`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast, get_args

from pipeline.errors import ConfigError
from stages.generate.model.quantized import Scheme, read_scheme
from stages.generate.model.spec import (
    DTYPES,
    NO_EXPERTS,
    ROPE_KINDS,
    Activation,
    DTypeName,
    ExpertsSpec,
    LayerKind,
    ModelSpec,
    RopeSpec,
)

OF_BOTH: Final = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "gguf")
"""Fields of the config of a model that also sees, which its language model has, too."""
MOST_NUMBER: Final = 10**12
"""No number of a config is larger: products of two must be finite."""
GENERATION_CONFIG: Final = "generation_config.json"
ORIGINAL_REACH: Final = "original_max_position_embeddings"
FULL, LOCAL = "full_attention", "sliding_attention"
"""Types of layers in a config."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of an architecture that are not in its config."""

    head_dim: int = 0
    """Default if the config has none; 0: hidden_size / num_attention_heads."""
    qk_norm: bool = False
    qkv_bias: bool = False
    """Whether the projections to q, k and v always have a bias. Then the output projection has none."""
    reads_layer_types: bool = False
    """Whether `layer_types` of the config counts."""
    full_every: int = 1
    """Every so-manieth layer sees all tokens, where the config does not list the types of its layers; 0: none. The
    others see `sliding_window` (of the config) tokens."""
    no_rope_every: int = 0
    """Every so-manieth layer has no rope, where the config does not list `no_rope_layers`; 0: all have it."""
    has_experts: bool = False
    """Whether layers have experts instead of an MLP, except those that the config names."""
    partial_rotary: bool = False
    """Whether the config may have a `partial_rotary_factor`."""
    local_theta: str = ""
    """Field with the theta of the layers with a window, which are not stretched; empty: the same for all layers."""
    is_gemma: bool = False
    """Whether the norms have an offset of 1 and are also behind attention and MLP, and embeddings are scaled."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the config has where it says nothing: some of the hub's say only what differs from transformers' classes."""


_GEMMA2: Final = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA3: Final = {
    **_GEMMA2,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_PHI3: Final = {"rms_norm_eps": 1e-5, ORIGINAL_REACH: 4096}
_SMOLLM3: Final = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
_OF_GEMMA3: Final = Architecture(
    qk_norm=True,
    reads_layer_types=True,
    full_every=6,
    local_theta="rope_local_base_freq",
    is_gemma=True,
    defaults=_GEMMA3,
)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(full_every=0),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, reads_layer_types=True),
    "Qwen3ForCausalLM": Architecture(head_dim=128, qk_norm=True, reads_layer_types=True),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, has_experts=True),
    "Gemma2ForCausalLM": Architecture(reads_layer_types=True, full_every=2, is_gemma=True, defaults=_GEMMA2),
    "Gemma3ForCausalLM": _OF_GEMMA3,
    "Gemma3ForConditionalGeneration": _OF_GEMMA3,
    "Phi3ForCausalLM": Architecture(full_every=0, partial_rotary=True, defaults=_PHI3),
    "SmolLM3ForCausalLM": Architecture(reads_layer_types=True, no_rope_every=4, defaults=_SMOLLM3),
}


def knows_architecture(folder: Path) -> bool:
    """Return whether our decoder knows the architecture of the model in *folder*."""
    names = read_json(folder / "config.json").get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name in ARCHITECTURES for name in names)


def read_spec(folder: Path) -> ModelSpec:
    """Read the config of the model in *folder*.

    Raises:
        ConfigError: A file is missing or broken, or asks for something that is not supported.
    """
    path = folder / "config.json"
    fields = read_json(path)
    architecture, row = _architecture(path, fields)
    config = _Config(path, {**row.defaults, **_of_text(fields)})
    config.refuse_unless("use_bidirectional_attention", False)
    read_scheme(path, config.fields.get("quantization_config"))  # refuses what we do not know
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{path}: num_attention_heads is {heads}, not a multiple of {kv_heads} kv heads")
    head_dim = config.integer("head_dim", row.head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim is {head_dim}; rotary embedding needs an even number")
    kinds, kind_of, max_positions, rotary_dim = _kinds(config, row, head_dim)
    bias = config.flag("attention_bias")
    return ModelSpec(
        architecture=architecture,
        num_layers=len(kind_of),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        qk_norm=row.qk_norm,
        qkv_bias=bias or row.qkv_bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        tie_embeddings=config.flag("tie_word_embeddings"),
        kinds=kinds,
        kind_of=kind_of,
        rotary_dim=rotary_dim,
        attention_scale=(config.number("query_pre_attn_scalar", head_dim) if row.is_gemma else head_dim) ** -0.5,
        max_positions=max_positions,
        eos_ids=eos_ids(folder),
        dtype=_dtype(config),
        experts=_experts(config) if row.has_experts else NO_EXPERTS,
        activation=_activation(config, row),
        norm_offset=1.0 if row.is_gemma and "gguf" not in fields else 0.0,  # those files have it in the weights
        norms_after=row.is_gemma,
        scales_embeddings=row.is_gemma,
        attention_cap=config.optional("attn_logit_softcapping") if row.is_gemma else 0.0,
        logits_cap=config.optional("final_logit_softcapping") if row.is_gemma else 0.0,
        blocks=fields.get("gguf") or {},
    )


def _of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model of one that also sees; the config is that of both, and its ends count."""
    text = fields.get("text_config")
    if not isinstance(text, dict):
        return fields
    return text | {name: fields[name] for name in OF_BOTH if fields.get(name) is not None}


def _activation(config: _Config, row: Architecture) -> Activation:
    name, usual = ("hidden_activation", "gelu_pytorch_tanh") if row.is_gemma else ("hidden_act", "silu")
    value = config.fields.get(name) or usual
    if value not in get_args(Activation):
        raise ConfigError(f"{config.path}: {name} is {value!r}; supported: {', '.join(get_args(Activation))}")
    return cast(Activation, value)


# ---- kinds of layers


def _kinds(
    config: _Config, row: Architecture, head_dim: int
) -> tuple[tuple[LayerKind, ...], tuple[int, ...], int, int]:
    """Return the kinds of layers, the index of that of each layer, how many positions they reach, and the dimensions of
    a head that are rotated.
    """
    types, rotated = _layer_types(config, row), _rotated(config, row)
    ropes = {name: _rope(config, row, name) for name in dict.fromkeys(types)}
    window = config.integer("sliding_window") if LOCAL in types else 0
    of_layers = [
        LayerKind(ropes[name][0] if has_rope else None, window if name == LOCAL else 0)
        for name, has_rope in zip(types, rotated, strict=True)
    ]
    kinds = tuple(dict.fromkeys(of_layers))
    rotary_dim = _rotary_dim(config, row, head_dim)
    for rope, _ in ropes.values():
        of_kind = {"factors": (rope.factors,), "longrope": (rope.factors, rope.long_factors)}
        for factors in of_kind.get(rope.kind, ()):
            if len(factors) != rotary_dim // 2:
                raise ConfigError(f"{config.path}: the rope has {len(factors)} factors; expected {rotary_dim // 2}")
        if rope.kind == "dynamic" and (head_dim == 2 or len(kinds) > 1):
            raise ConfigError(f"{config.path}: a dynamic rope needs a head_dim of at least 4, and layers of one kind")
    return kinds, tuple(map(kinds.index, of_layers)), min(reach for _, reach in ropes.values()), rotary_dim


def _layer_types(config: _Config, row: Architecture) -> list[str]:
    """Return the type of each layer."""
    num_layers, given = config.integer("num_hidden_layers"), config.fields.get("layer_types")
    uses_windows = row.full_every != 1  # else the config says whether it does
    if not uses_windows and not (row.reads_layer_types and given is not None):
        config.refuse_unless("use_sliding_window", False)
    if given is None or (not row.reads_layer_types and uses_windows):
        every = config.integer("sliding_window_pattern", row.full_every) if row.local_theta else row.full_every
        if not config.fields.get("sliding_window"):
            every = 1
        return [FULL if every and not (layer + 1) % every else LOCAL for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ConfigError(f"{config.path}: layer_types is {given!r:.80}; expected a list of {num_layers}")
    if strange := set(map(str, given)) - {FULL, LOCAL}:
        raise ConfigError(f"{config.path}: layer_types has {', '.join(sorted(strange))}; supported: {FULL}, {LOCAL}")
    if not row.reads_layer_types and LOCAL in given:
        raise ConfigError(f"{config.path}: layer_types has {LOCAL}; supported for this architecture: {FULL}")
    return given if uses_windows or config.flag("use_sliding_window") else [FULL] * num_layers


def _rotated(config: _Config, row: Architecture) -> list[bool]:
    """Return for each layer whether it has a rope."""
    num_layers, given = config.integer("num_hidden_layers"), config.fields.get("no_rope_layers")
    if not row.no_rope_every:
        return [True] * num_layers
    if given is None:
        every = config.integer("no_rope_layer_interval", row.no_rope_every)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not all(one in (0, 1) for one in given):
        raise ConfigError(
            f"{config.path}: no_rope_layers is {given!r:.80}; expected a list of {num_layers}, 1 where there is a rope"
        )
    return list(map(bool, given))


def _rope_fields(config: _Config) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the config's field about the rope, and what it holds."""
    name = "rope_scaling" if config.fields.get("rope_scaling") else "rope_parameters"
    return name, config.fields.get(name) or {}


def _rotary_dim(config: _Config, row: Architecture, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated."""
    if not row.partial_rotary:
        return head_dim
    _, given = _rope_fields(config)
    rope = _Config(config.path, given if isinstance(given, dict) else {})
    factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * factor + 1e-6)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(f"{config.path}: {rotary_dim} of {head_dim} dimensions are rotated; expected an even number")
    return rotary_dim


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in *path*.

    Raises:
        ConfigError: The file does not exist, cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; --model must be a folder with a Hugging Face checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or thousands of brackets
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value


@dataclass(frozen=True, slots=True)
class _Config:
    """A JSON object and its file. A null field counts as absent."""

    path: Path
    fields: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        return cast(int, self._positive(name, default, int))

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._positive(name, default, (int, float)))

    def optional(self, name: str) -> float:
        """Return a number that 0 stands for if it is absent."""
        return self.number(name) if self.fields.get(name) else 0.0

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.fields.get(name)
        numbers = value if isinstance(value, list) else []
        if not numbers or any(type(one) not in (int, float) or not 0 < one <= MOST_NUMBER for one in numbers):
            raise ConfigError(f"{self.path}: the rope has {name} {value!r:.80}; expected positive numbers")
        return tuple(map(float, numbers))

    def _positive(self, name: str, default: float | None, kind: type[int] | tuple[type[int], type[float]]) -> Any:
        value: Any = default if self.fields.get(name) is None else self.fields[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= MOST_NUMBER:
            seen = "is missing" if value is None else f"is {value!r}"
            raise ConfigError(f"{self.path}: {name} {seen}; expected a positive number")
        return value

    def flag(self, name: str, absent: bool = False) -> bool:
        value = self.fields.get(name, absent)
        if value not in (None, False, True):
            raise ConfigError(f"{self.path}: {name} is {value!r}; expected true or false")
        return bool(value)

    def refuse_unless(self, name: str, supported: object) -> None:
        if (value := self.fields.get(name)) not in (None, supported):
            raise ConfigError(f"{self.path}: {name} is {value!r}; supported: {json.dumps(supported)}")


def _architecture(path: Path, fields: Mapping[str, Any]) -> tuple[str, Architecture]:
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    seen = json.dumps(names)
    known = ", ".join(ARCHITECTURES)
    raise ConfigError(f"{path}: architectures says {seen}; --model-impl native knows {known}; leave it out for others")


def scheme_of(folder: Path) -> Scheme | None:
    """Return how the weights of a checkpoint are quantized; None: they are not."""
    path = folder / "config.json"
    return read_scheme(path, _of_text(read_json(path)).get("quantization_config"))


def _rope(config: _Config, row: Architecture, layer_type: str) -> tuple[RopeSpec, int]:
    """Return the rope of the layers of a type, and how many positions it reaches.

    Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before). Either
    may be one for all layers, or one for each type of them.
    """
    name, given = _rope_fields(config)
    theta_name = "rope_theta"
    if isinstance(given, dict) and any(each in given for each in (FULL, LOCAL)):
        name, given = f"{name}.{layer_type}", given.get(layer_type) or {}
        theta_name = row.local_theta if layer_type == LOCAL and row.local_theta else theta_name
    elif layer_type == LOCAL and row.local_theta:  # the scaling is that of the other layers
        theta_name, given = row.local_theta, {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(f"{config.path}: {name} is {given!r}; expected one flat object, or one for each layer type")
    rope = _Config(config.path, {"rope_theta": config.fields.get(theta_name), **given})
    for owner in () if row.partial_rotary else (config, rope):
        owner.refuse_unless("partial_rotary_factor", 1.0)
    theta, reach = rope.number("rope_theta", 10_000.0), config.integer("max_position_embeddings")
    if theta <= 1:
        raise ConfigError(f"{config.path}: rope_theta is {theta}; expected a number above 1")
    # The config's own field wins over the rope's, and either may be absent, as in transformers.
    original = config.integer(ORIGINAL_REACH, rope.integer(ORIGINAL_REACH, reach))
    if row.partial_rotary and given.get("rope_type", given.get("type")) == "yarn":
        rope = _Config(config.path, {**rope.fields, "rope_type": "longrope"})  # as transformers takes it for Phi-3
    spec, stretched = _rope_of_kind(name, rope, theta, reach, original)
    return spec, stretched if not row.local_theta else reach  # Gemma's reach includes the factor


def _rope_of_kind(name: str, rope: _Config, theta: float, reach: int, original: int) -> tuple[RopeSpec, int]:
    given = rope.fields
    kind = given.get("rope_type") or given.get("type") or "default"
    if rope.fields.get("factor") and rope.number("factor") * min(reach, original) < 1:
        raise ConfigError(f"{rope.path}: {name} has factor {rope.number('factor')}, which leaves no position")
    match kind:
        case "default":
            return RopeSpec("default", theta), reach
        case "linear":
            factor = rope.number("factor")
            return RopeSpec("linear", theta, factor), int(reach * factor)
        case "dynamic":
            factor = rope.number("factor")
            return RopeSpec("dynamic", theta, factor, original_max_positions=reach), int(reach * factor)
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise ConfigError(f"{rope.path}: {name} has low_freq_factor {low}, not below high_freq_factor {high}")
            return RopeSpec("llama3", theta, rope.number("factor"), low, high, original), reach
        case "yarn":
            return _yarn(rope, theta, original, rope.number("factor", reach / original))
        case "longrope" | "su":
            return _longrope(rope, theta, original, reach)
        case "factors":
            return RopeSpec("factors", theta, factors=rope.numbers("factors")), reach
        case _:
            supported = ", ".join(ROPE_KINDS)
            raise ConfigError(f"{rope.path}: {name} has rope_type {kind!r}; supported: {supported}")


def _yarn(rope: _Config, theta: float, original: int, factor: float) -> tuple[RopeSpec, int]:
    """Read the fields of yarn (https://arxiv.org/abs/2309.00071). As in transformers, 0 counts as absent."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def optional(name: str, default: float) -> float:
        return rope.number(name, default) if rope.fields.get(name) else default

    over, under = optional("mscale", 0.0), optional("mscale_all_dim", 0.0)
    inferred = mscale(over) / mscale(under) if over and under else mscale(1.0)
    spec = RopeSpec(
        "yarn",
        theta,
        factor,
        original_max_positions=original,
        beta_fast=optional("beta_fast", 32.0),
        beta_slow=optional("beta_slow", 1.0),
        truncate=rope.flag("truncate", absent=True),
        attention_factor=rope.number("attention_factor", inferred),
    )
    if spec.beta_fast <= spec.beta_slow:
        raise ConfigError(f"{rope.path}: yarn has beta_fast {spec.beta_fast}, not above beta_slow {spec.beta_slow}")
    return spec, int(original * factor)


def _longrope(rope: _Config, theta: float, original: int, reach: int) -> tuple[RopeSpec, int]:
    """Read the fields of LongRoPE (https://arxiv.org/abs/2402.13753)."""
    factor, inferred = rope.number("factor", reach / original), 1.0
    if factor > 1 and rope.fields.get("attention_factor") is None:
        if original < 2:
            raise ConfigError(f"{rope.path}: {ORIGINAL_REACH} is {original}; expected at least 2")
        inferred = math.sqrt(1 + math.log(factor) / math.log(original))
    spec = RopeSpec(
        "longrope",
        theta,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", inferred),
        factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
    return spec, reach


def _experts(config: _Config) -> ExpertsSpec:
    """Read the mixture of experts; transformers 5 writes `num_local_experts`, the hub has `num_experts`."""
    name = "num_experts" if config.fields.get("num_experts") is not None else "num_local_experts"
    num_experts, per_token = config.integer(name), config.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise ConfigError(f"{config.path}: num_experts_per_tok is {per_token}, more than the {num_experts} experts")
    dense = config.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"{config.path}: mlp_only_layers is {dense!r}; expected a list of layers")
    step = config.integer("decoder_sparse_step", 1)
    layers = range(step - 1, config.integer("num_hidden_layers"), step)
    return ExpertsSpec(
        layers=tuple(layer for layer in layers if layer not in dense),
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob"),
    )


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the two configs of a model, sorted.

    Raises:
        ConfigError: One of them is no token id.
    """
    ids: set[int] = set()
    config, generation = folder / "config.json", folder / GENERATION_CONFIG
    for path, fields in (
        (config, _of_text(read_json(config))),
        (generation, read_json(generation) if generation.exists() else {}),
    ):
        value = fields.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int and one >= 0 for one in values):
            raise ConfigError(f"{path}: eos_token_id is {value!r}; expected a token id or a list of them")
        ids.update(values)
    return tuple(sorted(ids))


def _dtype(config: _Config) -> DTypeName:
    value = config.fields.get("dtype") or config.fields.get("torch_dtype") or "float32"
    if value not in DTYPES:
        raise ConfigError(f"{config.path}: dtype is {value!r}; supported: {', '.join(DTYPES)}")
    return cast(DTypeName, value)
