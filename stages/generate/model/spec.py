"""What a model is, as data: sizes, kinds of layers, names and shapes of its tensors. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from pipeline.errors import ConfigError
from stages.generate.model.gguf import BLOCKS

DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: Final = ("float32", "bfloat16", "float16")
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]
DUMMY_SEED: Final = 0
"""Seed of random weights: every engine, and the next one, has the same."""
ROPE_KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
Activation = Literal["silu", "gelu_pytorch_tanh"]
ROUNDED: Final = ("int8", "int4")
"""Values of `--quantization` with which float weights are rounded when they are loaded."""
MOST_ROOM: Final = 1.25
"""Largest room of the parts of a page, of what its layers fill."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Each kind uses `theta`, its own fields and, except for default, `factor`."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """Context of the training, before it was stretched: dynamic, llama3, yarn, longrope."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the bounds of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Factor with which yarn and longrope multiply cosine and sine."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, as GGUF files have them for Llama 3: factors. For longrope, those of a context that
    is no longer than that of the training .."""
    long_factors: tuple[float, ...] = ()
    """.. and those of a longer one."""

    def at(self, context: int) -> RopeSpec:
        """Return the rope of a process that serves *context* tokens: it decides which divisors longrope has.

        transformers decides it by the longest row of a call. Then a token would depend on the requests beside it.
        """
        if self.kind != "longrope":
            return self
        factors = self.long_factors if context > self.original_max_positions else self.factors
        return RopeSpec("factors", self.theta, attention_factor=self.attention_factor, factors=factors)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the layers of a model may differ in."""

    rope: RopeSpec | None
    """None: queries and keys are not rotated."""
    window: int
    """Number of tokens that a token sees, itself included; 0: all before it."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is loaded."""

    dummy: bool = False
    """With random weights: the folder needs none."""
    by: Literal["auto", "native", "transformers"] = "auto"
    """What computes it; auto: our decoder if it knows the architecture, else transformers."""
    trusts_code: bool = False
    """Whether Python files of the folder may run."""


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
    """A decoder-only transformer: pre-norm, rotary, grouped-query attention, gated MLP."""

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
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    """Index in `kinds` of each layer."""
    rotary_dim: int
    """The first dimensions of a head, which are rotated."""
    attention_scale: float
    """Factor of the scores."""
    max_positions: int
    eos_ids: tuple[int, ...]
    """End-of-sequence tokens of config.json and generation_config.json, sorted; `end_tokens` adds the tokenizer's."""
    dtype: DTypeName
    """Dtype in the config; float32 if it has none."""
    experts: ExpertsSpec = NO_EXPERTS
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """What is added to the weights of all norms."""
    norms_after: bool = False
    """Whether the outputs of the attention and of the MLP are normalised, too, before they are added."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    attention_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: they stay as they are."""
    logits_cap: float = 0.0
    """The same for logits."""
    by: Literal["native", "transformers"] = "native"
    """What computes it: our decoder, or transformers' own class. The latter needs only the sizes above."""
    num_weights: int = 0
    """Number of weights of a model that transformers computes."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the tensors of each type in GGUF files, where the weights are such files."""
    rank: int = 0
    """Rank that computes this part of a model, where several ranks compute one together."""
    num_ranks: int = 1

    @property
    def vocab_rows(self) -> int:
        """Rows of the embeddings, and of the head. With ranks, rows beyond the vocabulary are zeros."""
        return -(-self.vocab_size // self.num_ranks)

    def page_parts(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each part of a page: first those without a window, then those with one, as many in each
        part, except for the last. One part has all layers if they are all alike, or if too much room would stay empty.
        """
        whole = tuple(range(self.num_layers))
        local = [layer for layer in whole if self.kinds[self.kind_of[layer]].window]
        size = self.num_layers - len(local)
        if not local or not size:
            return (whole,)
        parts = [local[first : first + size] for first in range(0, len(local), size)]
        if (1 + len(parts)) * size > MOST_ROOM * self.num_layers:
            return (whole,)
        return tuple(sorted(set(whole) - set(local))), *map(tuple, parts)

    @property
    def window(self) -> int:
        """Largest window of a layer; 0: none has one."""
        return max(kind.window for kind in self.kinds)

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether the rotation of a token depends on the length of its row."""
        return any(kind.rope is not None and kind.rope.kind == "dynamic" for kind in self.kinds)

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return math.sqrt(self.hidden_size) if self.scales_embeddings else 1.0

    def long_or_short(self, context: int) -> str:
        """Return which divisors longrope has in a process that serves *context* tokens; empty: there is no longrope."""
        ropes = (kind.rope for kind in self.kinds if kind.rope is not None)
        reach = max((rope.original_max_positions for rope in ropes if rope.kind == "longrope"), default=0)
        return "" if not reach else "long" if context > reach else "short"

    def at(self, context: int) -> ModelSpec:
        """Return the spec of a process that serves *context* tokens: see `RopeSpec.at`."""
        kinds = tuple(replace(kind, rope=kind.rope and kind.rope.at(context)) for kind in self.kinds)
        return self if kinds == self.kinds else replace(self, kinds=kinds)

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
        weights are zeros. With int8 and int4 the multiple is 64 times that: weights that share a scale stay together.
        Blocks are never cut.

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
        multiple = 64 if quantization in ROUNDED else 1

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


def mlp_norm_of(spec: ModelSpec) -> str:
    """Return the name of the norm before the MLP of a layer. The one behind the attention has that name elsewhere."""
    return "pre_feedforward_layernorm" if spec.norms_after else "post_attention_layernorm"


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
    if spec.norms_after:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
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
