"""The interface of an attention backend. It writes and reads the KV pages; it knows neither model nor schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from stages.generate.batch import ForwardBatch
from stages.generate.model.spec import ModelSpec

# T = packed tokens, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page, 2 = keys and values

Attend: TypeAlias = Callable[..., Tensor]
"""(q_THD, k_TKD, v_TKD, kv_2PKSD of one layer, sinks_H) -> o_THD.

Writes all k and v to the batch's slots before it reads any page: a row may read what another row writes in the same
step. Only the positions below a row's length matter. The rest of its pages may hold anything, even NaN. FlashInfer's
takes None for k and v if they are in the pages already (`Operations.place_heads`).

*sinks_H*, which some backends know: for each query head a score that counts in the sum of a softmax and adds no value.
"""

CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Properties of the attention that are the same in every step, and in every layer of a kind."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int = 0
    """Number of tokens that a token sees, itself included; 0: all before it."""
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    deterministic: bool = False
    """Whether the bits of a token must not depend on the batch, nor on how its prompt is divided."""
    new: bool = False
    """Whether FlashInfer is used in ways that no GPU has run yet (`--gpu-new`): deterministic plans for graphs, and
    kernels of `fused.py` that begin before the kernel before them ends. They wait before they read.
    """
    fused: bool = False
    """Whether FlashInfer, if it computes attention, also computes what it can of the rest of a layer (`fused.py`)."""
    given_scale: float = 0.0
    """Factor of the scores; 0: 1 / sqrt(head_dim)."""
    cap: float = 0.0
    """Scores become cap * tanh(score / cap), as in Gemma 2 (https://arxiv.org/abs/2408.00118); 0: they stay."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.given_scale or self.head_dim**-0.5

    def capped(self, scores: Tensor) -> Tensor:
        """Return *scores*, which include the factor, after the cap."""
        return (scores / self.cap).tanh() * self.cap if self.cap else scores


def attention_shape(
    spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device, window: int
) -> AttentionShape:
    """Return the attention of the layers of *spec* with this window."""
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    scale, cap = spec.attention_scale, spec.attention_cap
    return AttentionShape(*heads, page_size, window, dtype, device, given_scale=scale, cap=cap)


class Attention(Protocol):
    """Causal grouped-query attention over pages; softmax(q k scale) v with the sums in float32."""

    def plan(self, batch: ForwardBatch) -> Attend:
        """Do the work that all layers of a step share, once, and return the function that the layers call."""
        ...


def plan_all(attentions: Sequence[Attention], batch: ForwardBatch) -> list[Attend]:
    """Return the plan of each attention; an object that comes more than once plans once."""
    planned = {id(each): each.plan(batch) for each in dict.fromkeys(attentions)}
    return [planned[id(each)] for each in attentions]


def places_of(slots_T: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the page of each slot, and its place on the page."""
    return slots_T // page_size, slots_T % page_size


def write_pages(kv_2PKSD: Tensor, k_TKD: Tensor, v_TKD: Tensor, places: tuple[Tensor, Tensor]) -> None:
    """Store keys and values in the pages, at *places* (`places_of`)."""
    pages_T, offsets_T = places
    kv_2PKSD[0, pages_T, :, offsets_T] = k_TKD
    kv_2PKSD[1, pages_T, :, offsets_T] = v_TKD
