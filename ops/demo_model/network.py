"""Qwen3 to train on a CPU: torch alone, the names of its checkpoints, matrices multiplied in bfloat16. Never serves."""

# T = tokens of several conversations, one after the other; B = conversations of about one length, L = the longest's,
# C = hidden, H = query heads, K = kv heads, G = H / K, D = head dim, V = vocabulary, N = learned tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ops.demo_model.tokens import CONTEXT


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model."""

    vocab_size: int
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 640
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model, without its tokens."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "attention_bias": False,
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """Conversations that attention computes together, padded at their ends."""

    tokens_BL: Tensor
    """Index in T of each token; padding has any index."""
    places_T: Tensor
    """Index in B * L of each token of these conversations, in their order."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Conversations one after the other, so only attention computes padding."""

    tokens_T: Tensor
    positions_T: Tensor
    rows: tuple[Rows, ...]
    """All tokens, in order."""
    learned_N: Tensor
    """Indexes in T of the tokens to predict from the token before them."""


class Qwen3(nn.Module):
    """The network; its parameters have the names of a checkpoint."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        parameters = {
            "model.embed_tokens.weight": (shape.vocab_size, shape.hidden),
            "model.norm.weight": (shape.hidden,),
        }
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for layer in range(shape.layers):
            parameters |= {
                f"model.layers.{layer}.{name}.weight": size
                for name, size in {
                    "input_layernorm": (shape.hidden,),
                    "self_attn.q_proj": (q, shape.hidden),
                    "self_attn.k_proj": (kv, shape.hidden),
                    "self_attn.v_proj": (kv, shape.hidden),
                    "self_attn.o_proj": (shape.hidden, q),
                    "self_attn.q_norm": (shape.head_dim,),
                    "self_attn.k_norm": (shape.head_dim,),
                    "post_attention_layernorm": (shape.hidden,),
                    "mlp.gate_proj": (shape.intermediate, shape.hidden),
                    "mlp.up_proj": (shape.intermediate, shape.hidden),
                    "mlp.down_proj": (shape.hidden, shape.intermediate),
                }.items()
            }
        self.weights = {name: nn.Parameter(_initial(name, size)) for name, size in parameters.items()}
        """By their names in a checkpoint."""

    def loss(self, packed: Packed) -> Tensor:
        """Return the sum of the cross entropy of the learned tokens."""
        hidden_NC = functional.embedding(packed.learned_N - 1, self.hidden(packed))
        return functional.cross_entropy(self.logits(hidden_NC), packed.tokens_T[packed.learned_N], reduction="sum")

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return logits_NV in float32."""
        normed = self._normed(hidden_NC, "model.norm")
        return functional.linear(
            normed.to(self.dtype), self.weights["model.embed_tokens.weight"].to(self.dtype)
        ).float()

    def hidden(self, packed: Packed) -> Tensor:
        """Return hidden_TC, before the last norm."""
        cos_TD, sin_TD = self._rotation(packed.positions_T)
        x_TC = functional.embedding(packed.tokens_T, self.weights["model.embed_tokens.weight"])
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}"
            y_TC = self._normed(x_TC, f"{prefix}.input_layernorm").to(self.dtype)
            x_TC = x_TC + self._attend(y_TC, f"{prefix}.self_attn", cos_TD, sin_TD, packed.rows)
            y_TC = self._normed(x_TC, f"{prefix}.post_attention_layernorm").to(self.dtype)
            gate, up = (self._times(y_TC, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
            x_TC = x_TC + self._times(functional.silu(gate) * up, f"{prefix}.mlp.down_proj")
        return x_TC

    def _attend(self, y_TC: Tensor, prefix: str, cos_TD: Tensor, sin_TD: Tensor, rows: tuple[Rows, ...]) -> Tensor:
        K, D = self.shape.kv_heads, self.shape.head_dim

        def rotated(name: str, scale: float) -> Tensor:
            x = self._times(y_TC, f"{prefix}.{name}_proj").view(len(y_TC), -1, D).float()
            x = self._normed(x, f"{prefix}.{name}_norm") * scale
            first, second = x.chunk(2, -1)
            x = x * cos_TD[:, None] + torch.cat((-second, first), -1) * sin_TD[:, None]
            return x.to(self.dtype).flatten(1)

        q_TX, k_TX, v_TX = rotated("q", D**-0.5), rotated("k", 1.0), self._times(y_TC, f"{prefix}.v_proj")
        found = []
        for each in rows:
            B, L = each.tokens_BL.shape
            q, k, v = (functional.embedding(each.tokens_BL, x).view(B, L, K, -1, D) for x in (q_TX, k_TX, v_TX))
            found.append(functional.embedding(each.places_T, _attention(q, k, v).flatten(0, 1)))
        return self._times(torch.cat(found), f"{prefix}.o_proj")

    def _times(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"].to(self.dtype))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return x * scale * self.weights[f"{name}.weight"]

    def _rotation(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        D = self.shape.head_dim
        frequencies = self.shape.rope_theta ** (-torch.arange(0, D, 2) / D)
        angles_TD = torch.outer(positions_T, frequencies).repeat(1, 2)
        return angles_TD.cos(), angles_TD.sin()


def _attention(q_BLKGD: Tensor, k_BLK1D: Tensor, v_BLK1D: Tensor) -> Tensor:
    """Return o_BLX with X = K * G * D. Two matrix products: at these lengths faster than torch's fused one on a CPU."""
    B, L, K, G, D = q_BLKGD.shape
    q = q_BLKGD.permute(0, 2, 3, 1, 4).reshape(B * K, G * L, D)
    k = k_BLK1D.squeeze(3).permute(0, 2, 3, 1).reshape(B * K, D, L)
    v = v_BLK1D.squeeze(3).permute(0, 2, 1, 3).reshape(B * K, L, D)
    mask_LL = torch.full((L, L), -1e9).triu(1)  # what fills up comes after all that counts
    scores = torch.bmm(q, k).view(B * K, G, L, L).float() + mask_LL
    weights = scores.softmax(-1).to(q.dtype).view(B * K, G * L, L)
    return torch.bmm(weights, v).view(B, K, G, L, D).permute(0, 3, 1, 2, 4).reshape(B, L, K * G * D)


def _initial(name: str, size: tuple[int, ...]) -> Tensor:
    """Return the initial value of a parameter: norms are 1, projections into the residual stream 0."""
    if len(size) == 1:
        return torch.ones(size)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros(size)
    return torch.randn(size) * 0.02
