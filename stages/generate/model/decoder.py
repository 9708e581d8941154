"""The one decoder: every architecture is a `ModelSpec`. Knows no requests and no sampling, holds no state of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.generate.attention.base import Attend
from stages.generate.forward.batch import ForwardBatch
from stages.generate.model.layers.activation import swiglu
from stages.generate.model.layers.embedding import embed
from stages.generate.model.layers.linear import Linear
from stages.generate.model.layers.norm import rms_norm
from stages.generate.model.layers.rope import apply_rope, rope_frequencies, rope_tables
from stages.generate.model.spec import ModelSpec

# T = packed tokens, R = rows that sample, E = hidden size, H = query heads, K = kv heads, D = head dim, V = vocabulary,
# L = layers, P = pages, S = slots of a page


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; `q_norm_D` and `k_norm_D` are None where the architecture has none."""

    input_norm_E: Tensor
    qkv: Linear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    output: Linear
    mlp_norm_E: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A spec and its weights, by their fused names (`forward/weights.py`)."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        def linear(name: str) -> Linear:
            return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        self._spec = spec
        self._embedding_VE = weights["model.embed_tokens.weight"]
        self._layers = [
            Layer(
                input_norm_E=weights[f"{prefix}.input_layernorm.weight"],
                qkv=linear(f"{prefix}.self_attn.qkv_proj"),
                q_norm_D=weights.get(f"{prefix}.self_attn.q_norm.weight"),
                k_norm_D=weights.get(f"{prefix}.self_attn.k_norm.weight"),
                output=linear(f"{prefix}.self_attn.o_proj"),
                mlp_norm_E=weights[f"{prefix}.post_attention_layernorm.weight"],
                gate_up=linear(f"{prefix}.mlp.gate_up_proj"),
                down=linear(f"{prefix}.mlp.down_proj"),
            )
            for prefix in (f"model.layers.{layer}" for layer in range(spec.num_layers))
        ]
        self._norm_E = weights["model.norm.weight"]
        self._head = Linear(self._embedding_VE, None) if spec.tie_embeddings else linear("lm_head")
        self._freq_F = rope_frequencies(spec.rope, spec.head_dim, self._embedding_VE.device)

    def forward(self, batch: ForwardBatch, attend: Attend, kv_L2PKSD: Tensor) -> Tensor:
        """Return logits_RV in float32, for the rows that sample; writes the keys and values of all rows."""
        eps = self._spec.norm_eps
        x_TE = embed(batch.token_ids_T, self._embedding_VE)
        cos_sin = rope_tables(self._freq_F, batch.positions_T, x_TE.dtype)
        for layer, kv_2PKSD in zip(self._layers, kv_L2PKSD, strict=True):
            q_THD, k_TKD, v_TKD = self._project(layer, rms_norm(x_TE, layer.input_norm_E, eps), cos_sin)
            x_TE = x_TE + layer.output(attend(q_THD, k_TKD, v_TKD, kv_2PKSD).flatten(1))
            x_TE = x_TE + layer.down(swiglu(layer.gate_up(rms_norm(x_TE, layer.mlp_norm_E, eps))))
        return self._head(rms_norm(x_TE[batch.logits_rows_R], self._norm_E, eps)).float()

    def _project(self, layer: Layer, x_TE: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._spec
        heads = layer.qkv(x_TE).view(len(x_TE), -1, spec.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD = rms_norm(q_THD, layer.q_norm_D, spec.norm_eps)
            k_TKD = rms_norm(k_TKD, layer.k_norm_D, spec.norm_eps)
        return apply_rope(q_THD, *cos_sin), apply_rope(k_TKD, *cos_sin), v_TKD
