"""A mixture of experts (https://arxiv.org/abs/1701.06538) as an MLP: a router sends each token to a few of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.model.layers.blocks import padded
from stages.generate.model.layers.linear import Linear
from stages.generate.model.layers.mlp import Mlp, gated

# T = packed tokens, E = hidden size, X = experts, C = experts of a token, P = T * C pairs of a token and its expert,
# N = tokens of one expert, I = intermediate size

LEAST_CAPABILITY = (8, 0)
ALIGNMENT_BYTES = 16
"""Alignment of each row of a matrix that torch multiplies in groups."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Each expert computes all its tokens of a step together. An expert without tokens costs nothing."""

    router: Linear
    experts: Sequence[Mlp]
    experts_per_token: int
    normalize: bool
    one_shape: bool = False
    """Whether each expert multiplies T rows, however many are its own: then their sums do not depend on the others."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return y_TE.

        The experts of a token are always added in the same order, whatever else is in the batch.
        """
        weights_P, experts_P = _route(self.router, x_TE, self.experts_per_token, normalize=self.normalize)
        order_P = experts_P.argsort(stable=True)
        y_TE = torch.zeros_like(x_TE)
        begin = 0
        num_tokens_X = torch.bincount(experts_P, minlength=len(self.experts))
        for expert, count in zip(self.experts, num_tokens_X.tolist(), strict=True):
            if count:
                pairs_N = order_P[begin : begin + count]
                tokens_N = pairs_N // self.experts_per_token
                x_NE = padded(x_TE[tokens_N], len(x_TE) - count) if self.one_shape else x_TE[tokens_N]
                y_TE.index_add_(0, tokens_N, expert(x_NE)[:count] * weights_P[pairs_N, None])
            begin += count
        return y_TE


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The same in a few operations for all experts. Nothing waits to learn how many tokens each of them has."""

    router: Linear
    gate_up_XOE: Tensor
    """O = 2 I."""
    down_XEI: Tensor
    experts_per_token: int
    normalize: bool
    gated: Callable[[Tensor], Tensor] = gated

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return y_TE. The experts of a token are added in float32, whatever else is in the batch."""
        weights_P, experts_P = _route(self.router, x_TE, self.experts_per_token, normalize=self.normalize)
        sorted_P, order_P = experts_P.sort(stable=True)
        ids_X = torch.arange(len(self.gate_up_XOE), device=x_TE.device)
        ends_X = torch.searchsorted(sorted_P, ids_X, right=True, out_int32=True)
        x_PE = x_TE[order_P // self.experts_per_token]
        y_PI = self.gated(F.grouped_mm(x_PE, self.gate_up_XOE.transpose(1, 2), offs=ends_X))
        y_PE = F.grouped_mm(y_PI, self.down_XEI.transpose(1, 2), offs=ends_X)
        y_PE = torch.empty_like(y_PE).index_copy_(0, order_P, y_PE * weights_P[order_P, None])
        return y_PE.view(-1, self.experts_per_token, y_PE.shape[1]).sum(1)


def can_group(dtype: torch.dtype, device: torch.device, *sizes: int) -> bool:
    """Return whether torch multiplies matrices with rows of these *sizes* in groups, without waiting for the device."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
        and not any(size * dtype.itemsize % ALIGNMENT_BYTES for size in sizes)
    )


def _route(router: Linear, x_TE: Tensor, experts_per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the weight and the expert of each pair; the softmax is in float32 and over all experts."""
    weights_TC, experts_TC = router(x_TE).float().softmax(dim=-1).topk(experts_per_token, dim=-1)
    if normalize:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    return weights_TC.to(x_TE.dtype).flatten(), experts_TC.flatten()
