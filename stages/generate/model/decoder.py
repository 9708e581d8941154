"""The one decoder: every architecture is a `ModelSpec`. Knows no requests or sampling, and keeps no state of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.batch import ForwardBatch
from stages.generate.collectives import ALONE, Collectives
from stages.generate.model.attention import Attend
from stages.generate.model.layers.blocks import by_rows
from stages.generate.model.layers.experts import Experts, GroupedExperts
from stages.generate.model.layers.linear import Linear
from stages.generate.model.layers.mlp import FeedForward, Mlp
from stages.generate.model.layers.operations import TORCH, Operations, suited_to
from stages.generate.model.layers.rope import Rope, make_rope
from stages.generate.model.spec import ModelSpec, mlp_norm_of

# T = packed tokens, R = rows that sample, E = hidden size, H = query heads, K = kv heads, D = head dim, V = vocabulary,
# L = layers, P = pages, S = slots of a page, N = H + K


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    kind: int
    """Index of its kind (`ModelSpec.kinds`)."""
    qkv: Linear
    qk_norm_ND: Tensor | None
    """Norm of each query head, then of each kv head; None if the architecture has none."""
    output: Linear
    norm_after_attention_E: Tensor | None
    mlp_norm_E: Tensor
    mlp: FeedForward
    norm_after_mlp_E: Tensor | None
    next_norm_E: Tensor | None
    """Norm at the input of the next layer; None for the last one."""


Ropes: TypeAlias = Sequence[tuple[Tensor, ...]]
"""For each kind of layer what `Operations.rotate` needs; nothing without a rope."""
Heads: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""q_THD, k_TKD and v_TKD."""


class Decoder:
    """A spec and its weights. With several ranks they are a rank's part, and all ranks compute the same steps."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Tensor],
        collectives: Collectives = ALONE,
        block_rows: int = 0,
        operations: Operations = TORCH,
    ) -> None:
        """Move the weights, under their fused names (`forward/weights.py`), out of *weights*, which is then empty.

        *block_rows*: compute all but attention for this many tokens at a time (`by_rows`), if there is no `product`.
        """
        operations = suited_to(spec, operations)
        block_rows = block_rows if operations.product is None else 0
        if block_rows:  # the rows that pad a block have no slots
            operations = replace(operations, place_heads=None)

        def norm(name: str) -> Tensor:
            weight_E = weights.pop(f"{name}.weight")
            return weight_E.float() + spec.norm_offset if spec.norm_offset else weight_E

        def norm_after(name: str) -> Tensor | None:
            return norm(name) if spec.norms_after else None

        def linear(name: str) -> Linear:
            return Linear(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None), operations.product)

        def mlp(name: str) -> Mlp:
            return Mlp(linear(f"{name}.gate_up_proj"), linear(f"{name}.down_proj"), operations.gated)

        def experts(name: str) -> Experts | GroupedExperts:
            how = (spec.experts.experts_per_token, spec.experts.normalize)
            if f"{name}.experts.down_proj.weight" in weights:
                gate_up, down = (weights.pop(f"{name}.experts.{kind}_proj.weight") for kind in ("gate_up", "down"))
                return GroupedExperts(linear(f"{name}.gate"), gate_up, down, *how, operations.gated)
            each = [mlp(f"{name}.experts.{expert}") for expert in range(spec.experts.num_experts)]
            return Experts(linear(f"{name}.gate"), each, *how, one_shape=block_rows > 0)

        def qk_norm(name: str) -> Tensor:
            q_norm_D, k_norm_D = (norm(f"{name}.{kind}_norm") for kind in "qk")
            return torch.cat((q_norm_D.expand(spec.num_heads, -1), k_norm_D.expand(spec.num_kv_heads, -1)))

        self._spec, self._collectives, self._block_rows, self._operations = spec, collectives, block_rows, operations
        self._embedding_VE = weights.pop("model.embed_tokens.weight")
        prefixes = [f"model.layers.{layer}" for layer in range(spec.num_layers)]
        input_norms = [norm(f"{prefix}.input_layernorm") for prefix in prefixes]
        self._first_norm_E = input_norms[0]
        self.layers = [
            Layer(
                kind=spec.kind_of[layer],
                qkv=linear(f"{prefix}.self_attn.qkv_proj"),
                qk_norm_ND=qk_norm(f"{prefix}.self_attn") if spec.qk_norm else None,
                output=linear(f"{prefix}.self_attn.o_proj"),
                norm_after_attention_E=norm_after(f"{prefix}.post_attention_layernorm"),
                mlp_norm_E=norm(f"{prefix}.{mlp_norm_of(spec)}"),
                mlp=(experts if layer in spec.experts.layers else mlp)(f"{prefix}.mlp"),
                norm_after_mlp_E=norm_after(f"{prefix}.post_feedforward_layernorm"),
                next_norm_E=next_norm_E,
            )
            for layer, (prefix, next_norm_E) in enumerate(zip(prefixes, [*input_norms[1:], None], strict=True))
        ]
        self._norm_E = norm("model.norm")
        tied = Linear(self._embedding_VE, None, operations.product)
        self._head = linear("lm_head") if "lm_head.weight" in weights else tied
        device = self._embedding_VE.device
        self._ropes = [
            None if kind.rope is None else make_rope(kind.rope, spec.rotary_dim, device) for kind in spec.kinds
        ]
        self._scale = float(torch.tensor(spec.embedding_scale, dtype=self._embedding_VE.dtype))  # as transformers
        assert not weights, f"unused weights: {', '.join(weights)}"

    @property
    def hidden_size(self) -> int:
        """E."""
        return self._spec.hidden_size

    @property
    def num_kinds(self) -> int:
        """Number of kinds of layers."""
        return len(self._ropes)

    def forward(self, batch: ForwardBatch, attends: Sequence[Attend], kv_L2PKSD: Tensor) -> Tensor:
        """Return x_TE, the last layer's output for each token; write the keys and values of all rows.

        *attends*: the attention of each kind of layer.
        """
        x_TE, y_TE, ropes = self.begin(batch.token_ids_T, batch.positions_T)
        for layer, kv_2PKSD in zip(self.layers, kv_L2PKSD, strict=True):
            heads = self.project(layer, y_TE, ropes, batch.slots_T, kv_2PKSD)
            o_THD = attends[layer.kind](*heads, kv_2PKSD)
            x_TE, y_TE = self.finish(layer, x_TE, o_THD)
        return x_TE

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Ropes]:
        """Return x_TE and y_TE, the embeddings and their norm, and what `project` needs of the positions."""
        x_TE = self._collectives.all_reduce(self._embed(token_ids_T))
        if self._spec.scales_embeddings:
            x_TE = x_TE * self._scale
        (y_TE,) = by_rows(self._block_rows, partial(self._norm, self._first_norm_E), x_TE)
        return x_TE, y_TE, [self._tables(rope, positions_T, x_TE.dtype) for rope in self._ropes]

    def project(self, layer: Layer, y_TE: Tensor, ropes: Ropes, slots_T: Tensor, kv_2PKSD: Tensor) -> Heads:
        """Return q_THD, k_TKD and v_TKD of a layer; None for the latter two if they are in the pages."""
        spec, place_heads = self._spec, self._operations.place_heads
        if place_heads is None:
            q_THD, k_TKD, v_TKD = by_rows(self._block_rows, partial(self._project, layer), y_TE, *ropes[layer.kind])
            return q_THD, k_TKD, v_TKD
        heads_TMD = layer.qkv(y_TE).view(len(y_TE), -1, spec.head_dim)
        table_TD = next(iter(ropes[layer.kind]), None)
        return place_heads(heads_TMD, layer.qk_norm_ND, spec.norm_eps, table_TD, slots_T, kv_2PKSD), None, None

    def finish(self, layer: Layer, x_TE: Tensor, o_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x_TE after the layer, which may replace the argument, and y_TE, its norm for the next layer."""
        x_TE, y_TE = by_rows(self._block_rows, partial(self._after_attention, layer), x_TE, o_THD.flatten(1))
        return x_TE, y_TE

    def logits(self, x_RE: Tensor) -> Tensor:
        """Return logits_RV in float32 for some of the tokens that `forward` returned; only rank 0's are complete."""
        return self.head_logits(x_RE).float()

    def head_logits(self, x_RE: Tensor) -> Tensor:
        """Return the same in the dtype in which they are computed."""
        (logits_RV,) = by_rows(self._block_rows, self._logits, x_RE)
        if cap := self._spec.logits_cap:
            logits_RV = (logits_RV.float() / cap).tanh() * cap
        return self._collectives.gather_to_0(logits_RV)[:, : self._spec.vocab_size].contiguous()

    def _logits(self, x_RE: Tensor) -> tuple[Tensor]:
        return (self._head(self._operations.norm(x_RE, self._norm_E, self._spec.norm_eps)),)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        """Return x_TE, with zeros where another rank has the token."""
        if self._spec.num_ranks == 1:
            return F.embedding(token_ids_T, self._embedding_VE)
        rows_T = token_ids_T - self._spec.rank * self._spec.vocab_rows
        others_T = (rows_T < 0) | (rows_T >= self._spec.vocab_rows)
        return F.embedding(rows_T.masked_fill(others_T, 0), self._embedding_VE).masked_fill_(others_T[:, None], 0)

    def _tables(self, rope: Rope | None, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return what `rotate` needs; nothing without a rope."""
        if rope is None:
            return ()
        tables = self._operations.rope_tables
        return by_rows(self._block_rows, lambda positions_T: tables(rope, positions_T, dtype), positions_T)

    def _norm(self, weight_E: Tensor, x_TE: Tensor) -> tuple[Tensor]:
        return (self._operations.norm(x_TE, weight_E, self._spec.norm_eps),)

    def _project(self, layer: Layer, y_TE: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, operations = self._spec, self._operations
        num_qk = spec.num_heads + spec.num_kv_heads
        heads = layer.qkv(y_TE).view(len(y_TE), -1, spec.head_dim)
        qk_TND, v_TKD = heads[:, :num_qk], heads[:, num_qk:]
        if layer.qk_norm_ND is not None:
            qk_TND = operations.norm_heads(qk_TND, layer.qk_norm_ND, spec.num_heads, spec.norm_eps)
        if not rope:
            return qk_TND[:, : spec.num_heads], qk_TND[:, spec.num_heads :], v_TKD
        cos, sin = rope
        return *operations.rotate(qk_TND, spec.num_heads, cos, sin), v_TKD

    def _added(self, part_TE: Tensor, norm_E: Tensor | None) -> Tensor:
        """Return what attention or MLP adds: the sum of the ranks' parts, normalised if the architecture does that."""
        sum_TE = self._collectives.all_reduce(part_TE)
        return sum_TE if norm_E is None else self._operations.norm(sum_TE, norm_E, self._spec.norm_eps)

    def _after_attention(self, layer: Layer, x_TE: Tensor, o_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Return x_TE after the layer and, unless it is the last one, its norm for the next layer; X = H * D."""
        add_norm, eps = self._operations.add_norm, self._spec.norm_eps
        x_TE, y_TE = add_norm(
            x_TE, self._added(layer.output(o_TX), layer.norm_after_attention_E), layer.mlp_norm_E, eps
        )
        added_TE = self._added(layer.mlp(y_TE), layer.norm_after_mlp_E)
        if layer.next_norm_E is None:
            return x_TE + added_TE, y_TE
        return add_norm(x_TE, added_TE, layer.next_norm_E, eps)
