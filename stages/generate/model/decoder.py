"""The one decoder: every architecture is a `ModelSpec`. Knows no requests or sampling, and keeps no state of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.attention.base import Attend
from stages.generate.forward.batch import ForwardBatch
from stages.generate.forward.collectives import ALONE, Collectives
from stages.generate.model.layers.blocks import by_rows
from stages.generate.model.layers.experts import Experts, GroupedExperts
from stages.generate.model.layers.linear import Linear
from stages.generate.model.layers.mlp import FeedForward, Mlp
from stages.generate.model.layers.norm import rms_norm
from stages.generate.model.layers.rope import apply_rope, make_rope, rope_tables
from stages.generate.model.spec import ModelSpec

# T = packed tokens, R = rows that sample, E = hidden size, H = query heads, K = kv heads, D = head dim, V = vocabulary,
# L = layers, P = pages, S = slots of a page, N = H + K


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm_E: Tensor
    qkv: Linear
    qk_norm_ND: Tensor | None
    """The norm of each query head, then of each kv head; None if the architecture has none."""
    output: Linear
    mlp_norm_E: Tensor
    mlp: FeedForward


class Decoder:
    """A spec and its weights. With several ranks they are a rank's part, and all ranks compute the same steps."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, Tensor], collectives: Collectives = ALONE, block_rows: int = 0
    ) -> None:
        """Move the weights, under their fused names (`forward/weights.py`), out of *weights*, which is empty then.

        *block_rows*: compute all but attention of so many tokens at a time (`by_rows`).
        """

        def linear(name: str) -> Linear:
            return Linear(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))

        def mlp(name: str) -> Mlp:
            return Mlp(linear(f"{name}.gate_up_proj"), linear(f"{name}.down_proj"))

        def experts(name: str) -> Experts | GroupedExperts:
            how = (spec.experts.experts_per_token, spec.experts.normalize)
            if f"{name}.experts.down_proj.weight" in weights:
                gate_up, down = (weights.pop(f"{name}.experts.{kind}_proj.weight") for kind in ("gate_up", "down"))
                return GroupedExperts(linear(f"{name}.gate"), gate_up, down, *how)
            each = [mlp(f"{name}.experts.{expert}") for expert in range(spec.experts.num_experts)]
            return Experts(linear(f"{name}.gate"), each, *how, one_shape=block_rows > 0)

        def qk_norm(name: str) -> Tensor:
            q_norm_D, k_norm_D = (weights.pop(f"{name}.{kind}_norm.weight") for kind in "qk")
            return torch.cat((q_norm_D.expand(spec.num_heads, -1), k_norm_D.expand(spec.num_kv_heads, -1)))

        self._spec, self._collectives, self._block_rows = spec, collectives, block_rows
        self._embedding_VE = weights.pop("model.embed_tokens.weight")
        self._layers = [
            Layer(
                input_norm_E=weights.pop(f"{prefix}.input_layernorm.weight"),
                qkv=linear(f"{prefix}.self_attn.qkv_proj"),
                qk_norm_ND=qk_norm(f"{prefix}.self_attn") if spec.qk_norm else None,
                output=linear(f"{prefix}.self_attn.o_proj"),
                mlp_norm_E=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
                mlp=(experts if layer in spec.experts.layers else mlp)(f"{prefix}.mlp"),
            )
            for layer, prefix in ((layer, f"model.layers.{layer}") for layer in range(spec.num_layers))
        ]
        self._norm_E = weights.pop("model.norm.weight")
        self._head = linear("lm_head") if "lm_head.weight" in weights else Linear(self._embedding_VE, None)
        self._rope = make_rope(spec.rope, spec.head_dim, self._embedding_VE.device)
        assert not weights, f"unused weights: {', '.join(weights)}"

    def forward(self, batch: ForwardBatch, attend: Attend, kv_L2PKSD: Tensor) -> Tensor:
        """Return x_TE, the last layer's output for each token; write the keys and values of all rows."""
        x_TE = self._collectives.all_reduce(self._embed(batch.token_ids_T))
        cos_sin = by_rows(
            self._block_rows, lambda positions_T: rope_tables(self._rope, positions_T, x_TE.dtype), batch.positions_T
        )
        for layer, kv_2PKSD in zip(self._layers, kv_L2PKSD, strict=True):
            q_THD, k_TKD, v_TKD = by_rows(self._block_rows, partial(self._project, layer), x_TE, *cos_sin)
            o_TX = attend(q_THD, k_TKD, v_TKD, kv_2PKSD).flatten(1)
            (x_TE,) = by_rows(self._block_rows, partial(self._after_attention, layer), x_TE, o_TX)
        return x_TE

    def logits(self, x_RE: Tensor) -> Tensor:
        """Return logits_RV in float32 for some of the tokens that `forward` returned; only those of rank 0 count."""
        (logits_RV,) = by_rows(self._block_rows, self._logits, x_RE)
        return self._collectives.gather_to_0(logits_RV.float())[:, : self._spec.vocab_size].contiguous()

    def _logits(self, x_RE: Tensor) -> tuple[Tensor]:
        return (self._head(rms_norm(x_RE, self._norm_E, self._spec.norm_eps)),)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        """Return x_TE; where another rank has the token, zeros."""
        if self._spec.num_ranks == 1:
            return F.embedding(token_ids_T, self._embedding_VE)
        rows_T = token_ids_T - self._spec.rank * self._spec.vocab_rows
        others_T = (rows_T < 0) | (rows_T >= self._spec.vocab_rows)
        return F.embedding(rows_T.masked_fill(others_T, 0), self._embedding_VE).masked_fill_(others_T[:, None], 0)

    def _project(self, layer: Layer, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._spec
        num_qk = spec.num_heads + spec.num_kv_heads
        heads = layer.qkv(rms_norm(x_TE, layer.input_norm_E, spec.norm_eps)).view(len(x_TE), -1, spec.head_dim)
        qk_TND, v_TKD = heads[:, :num_qk], heads[:, num_qk:]
        if layer.qk_norm_ND is not None:
            qk_TND = rms_norm(qk_TND, layer.qk_norm_ND, spec.norm_eps)
        qk_TND = apply_rope(qk_TND, cos_T1D, sin_T1D)
        return qk_TND[:, : spec.num_heads], qk_TND[:, spec.num_heads :], v_TKD

    def _after_attention(self, layer: Layer, x_TE: Tensor, o_TX: Tensor) -> tuple[Tensor]:
        """Return x_TE after the layer; X = H * D."""
        sum_of_ranks = self._collectives.all_reduce
        x_TE = x_TE + sum_of_ranks(layer.output(o_TX))
        return (x_TE + sum_of_ranks(layer.mlp(rms_norm(x_TE, layer.mlp_norm_E, self._spec.norm_eps))),)
