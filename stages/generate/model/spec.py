"""Turns the config of a Hugging Face folder into a `ModelSpec`. Needs neither torch nor transformers.

To add a model, add a row to `ARCHITECTURES`. If its config has something new, add a field to `ModelSpec`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from pipeline.errors import ConfigError
from stages.generate.model.gguf import BLOCKS

DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: Final = ("float32", "bfloat16", "float16")
GENERATION_CONFIG: Final = "generation_config.json"
ORIGINAL_REACH: Final = "original_max_position_embeddings"


RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]
ROPE_KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Each kind uses `theta`, its own fields and, except for default, `factor`."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """Context of the training, before it was stretched: dynamic, llama3, yarn."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the bounds of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Factor with which yarn multiplies cosine and sine."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, as GGUF files have them for Llama 3: factors."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The mixture of experts that some layers have instead of an MLP."""

    layers: tuple[int, ...]
    """Layers that have experts; the others have one dense MLP."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Intermediate size of one expert."""
    normalize: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""


NO_EXPERTS: Final = ExpertsSpec((), 0, 0, 0, False)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm, rotary, grouped-query attention, SwiGLU."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    qk_norm: bool
    """Whether q and k are normalised per head before the rotation."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    rope: RopeSpec
    window: int
    """Number of tokens that a token sees, itself included; 0: all before it."""
    max_positions: int
    eos_ids: tuple[int, ...]
    """End-of-sequence tokens of config.json and generation_config.json, sorted; `end_tokens` adds the tokenizer's."""
    dtype: DTypeName
    """Dtype in the config; float32 if it has none."""
    experts: ExpertsSpec = NO_EXPERTS
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the tensors of each type in GGUF files, where the weights are such files."""
    rank: int = 0
    """Rank that computes this part of a model, where several ranks compute one together."""
    num_ranks: int = 1

    @property
    def vocab_rows(self) -> int:
        """Rows of the embeddings, and of the head. With ranks, rows beyond the vocabulary are zeros."""
        return -(-self.vocab_size // self.num_ranks)

    @property
    def block(self) -> int:
        """Most weights of a block of the GGUF files; 1: there are no blocks."""
        return max((BLOCKS[kind][1] for kind in self.blocks), default=1)

    def _keeps_blocks(self, num_ranks: int) -> bool:
        """Return whether so many ranks cut no block: they divide the inputs of two kinds of matrices."""
        sizes = [self.num_heads * self.head_dim, self.intermediate_size, self.experts.intermediate_size]
        return 1 in (num_ranks, self.block) or not any(size % (num_ranks * self.block) for size in sizes)

    def sharded(self, rank: int, num_ranks: int, quantization: str = "none") -> ModelSpec:
        """Return the part of this model that one of *num_ranks* ranks has: a smaller model.

        The result has the rank's heads and intermediate sizes, and the whole vocabulary. Query heads are divided. A
        rank has a copy of each KV head that its query heads need. Each copy serves the same number of query heads, so a
        KV head may be there twice. Intermediate sizes are rounded up to a multiple of *num_ranks*, and the additional
        weights are zeros. With int8 the multiple is 64 times that: the weights that share a scale stay together. The
        blocks of GGUF files are never cut.

        Raises:
            ConfigError: The query heads or the blocks cannot be divided.
        """
        if self.num_heads % num_ranks:
            possible = (str(size) for size in range(1, self.num_heads + 1) if self.num_heads % size == 0)
            raise ConfigError(
                f"--tp {num_ranks}: the model has {self.num_heads} query heads, which {num_ranks} ranks cannot divide; "
                f"pass one of {', '.join(possible)}"
            )
        if num_ranks == 1:
            return self
        if not self._keeps_blocks(num_ranks):
            possible = (
                str(size) for size in range(1, num_ranks) if self.num_heads % size == 0 and self._keeps_blocks(size)
            )
            raise ConfigError(
                f"--tp {num_ranks}: the matrices have blocks of {self.block} weights, which so many ranks would cut; "
                f"pass one of {', '.join(possible)}"
            )
        multiple = 64 if quantization == "int8" else 1

        def part(size: int) -> int:
            return -(-size // (num_ranks * multiple)) * multiple

        num_heads = self.num_heads // num_ranks
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=num_heads // math.gcd(num_heads, self.num_heads // self.num_kv_heads),
            intermediate_size=part(self.intermediate_size),
            experts=replace(self.experts, intermediate_size=part(self.experts.intermediate_size)),
            rank=rank,
            num_ranks=num_ranks,
        )


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of an architecture that are not in its config."""

    head_dim: int = 0
    """Default if the config has none; 0: hidden_size / num_attention_heads."""
    qk_norm: bool = False
    qkv_bias: bool = False
    """Whether the projections to q, k and v always have a bias. Then the output projection has none."""
    has_window: bool = False
    """Whether a token sees only `sliding_window` (of the config) tokens in every layer, itself included."""
    has_experts: bool = False
    """Whether layers have experts instead of an MLP, except those that the config names."""


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(has_window=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(head_dim=128, qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, has_experts=True),
}


def read_spec(folder: Path) -> ModelSpec:
    """Read the config of the model in *folder*.

    Raises:
        ConfigError: A file is missing or broken, or asks for something that is not supported.
    """
    config = _Config(folder / "config.json", read_json(folder / "config.json"))
    architecture, row = _architecture(config)
    config.refuse_unless("hidden_act", "silu")
    config.refuse_unless("use_sliding_window", False)
    _refuse_quantized(config)
    layer_types = config.fields.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"{config.path}: layer_types is {layer_types!r}; expected a list")
    if strange := set(map(str, layer_types)) - {"full_attention"}:
        raise ConfigError(f"{config.path}: layer_types has {', '.join(sorted(strange))}; supported: full_attention")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{config.path}: num_attention_heads is {heads}, not a multiple of {kv_heads} kv heads")
    head_dim = config.integer("head_dim", row.head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{config.path}: head_dim is {head_dim}; rotary embedding needs an even number")
    bias = config.flag("attention_bias")
    rope, max_positions = _rope(config)
    if rope.kind == "factors" and len(rope.factors) != head_dim // 2:
        raise ConfigError(f"{config.path}: the rope has {len(rope.factors)} factors; expected {head_dim // 2}")
    if rope.kind == "dynamic" and head_dim == 2:
        raise ConfigError(f"{config.path}: head_dim is 2; a dynamic rope needs at least 4")
    return ModelSpec(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
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
        rope=rope,
        window=config.integer("sliding_window") if row.has_window and config.fields.get("sliding_window") else 0,
        max_positions=max_positions,
        eos_ids=_eos_ids(folder, config),
        dtype=_dtype(config),
        experts=_experts(config) if row.has_experts else NO_EXPERTS,
        blocks=config.fields.get("gguf") or {},
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a checkpoint, or of a rank's part of them.

    Tensors that are fused are neighbours: q, k, v and gate, up.
    """
    hidden, q_size, kv_size = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention: _Linears = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.output_bias and not spec.rank),  # added once to the ranks' sum
    }
    dense = _mlp_shapes("mlp", hidden, spec.intermediate_size, spec.mlp_bias, spec.mlp_bias and not spec.rank)
    experts: _Linears = {"mlp.gate": (spec.experts.num_experts, hidden, False)}
    for expert in range(spec.experts.num_experts):
        experts |= _mlp_shapes(f"mlp.experts.{expert}", hidden, spec.experts.intermediate_size, False, False)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_rows, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        linears = attention | (experts if layer in spec.experts.layers else dense)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        shapes |= {f"{prefix}{name}.weight": (rows, columns) for name, (rows, columns, _) in linears.items()}
        shapes |= {f"{prefix}{name}.bias": (rows,) for name, (rows, _, bias) in linears.items() if bias}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_rows, hidden)
    return shapes


_Linears: TypeAlias = dict[str, tuple[int, int, bool]]
"""name -> outputs, inputs, has a bias"""


def _mlp_shapes(prefix: str, hidden_size: int, intermediate_size: int, bias: bool, down_bias: bool) -> _Linears:
    return {
        f"{prefix}.gate_proj": (intermediate_size, hidden_size, bias),
        f"{prefix}.up_proj": (intermediate_size, hidden_size, bias),
        f"{prefix}.down_proj": (hidden_size, intermediate_size, down_bias),
    }


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

    def _positive(self, name: str, default: float | None, kind: type[int] | tuple[type[int], type[float]]) -> Any:
        value: Any = default if self.fields.get(name) is None else self.fields[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
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


def _architecture(config: _Config) -> tuple[str, Architecture]:
    names = config.fields.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    seen = json.dumps(names)
    raise ConfigError(f"{config.path}: architectures says {seen}; supported: {', '.join(ARCHITECTURES)}")


def _refuse_quantized(config: _Config) -> None:
    """Raise ConfigError if the weights are quantized."""
    given = config.fields.get("quantization_config")
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, dict) else None
    raise ConfigError(
        f"{config.path}: quantization_config has quant_method {json.dumps(method):.50}; supported are weights that are "
        "not quantized yet; pass that model, with --quantization int8 to save memory on a CPU"
    )


def _rope(config: _Config) -> tuple[RopeSpec, int]:
    """Return the rope and how many positions it reaches.

    Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before).
    """
    name = "rope_scaling" if config.fields.get("rope_scaling") else "rope_parameters"
    given = config.fields.get(name) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(f"{config.path}: {name} is {given!r}; expected one flat object for all layers")
    rope = _Config(config.path, {"rope_theta": config.fields.get("rope_theta"), **given})
    for owner in (config, rope):
        owner.refuse_unless("partial_rotary_factor", 1.0)
    theta, reach = rope.number("rope_theta", 10_000.0), config.integer("max_position_embeddings")
    if theta <= 1:
        raise ConfigError(f"{config.path}: rope_theta is {theta}; expected a number above 1")
    # The config's own field wins over the rope's, and either may be absent, as in transformers.
    original = config.integer(ORIGINAL_REACH, rope.integer(ORIGINAL_REACH, reach))
    kind = given.get("rope_type") or given.get("type") or "default"
    if rope.fields.get("factor") and rope.number("factor") * min(reach, original) < 1:
        raise ConfigError(f"{config.path}: {name} has factor {rope.number('factor')}, which leaves no position")
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
                raise ConfigError(f"{config.path}: {name} has low_freq_factor {low}, not below high_freq_factor {high}")
            return RopeSpec("llama3", theta, rope.number("factor"), low, high, original), reach
        case "yarn":
            return _yarn(rope, theta, original, rope.number("factor", reach / original))
        case "factors":
            factors = given.get("factors")
            if not isinstance(factors, list) or not all(isinstance(one, (int, float)) and one > 0 for one in factors):
                raise ConfigError(f"{config.path}: {name} has factors {factors!r:.80}; expected positive numbers")
            return RopeSpec("factors", theta, factors=tuple(map(float, factors))), reach
        case _:
            supported = ", ".join(ROPE_KINDS)
            raise ConfigError(f"{config.path}: {name} has rope_type {kind!r}; supported: {supported}")


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


def _eos_ids(folder: Path, config: _Config) -> tuple[int, ...]:
    ids: set[int] = set()
    generation = folder / GENERATION_CONFIG
    for path, fields in (
        (config.path, config.fields),
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
