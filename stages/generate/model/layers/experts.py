"""A mixture of experts (https://arxiv.org/abs/1701.06538) as an MLP: a router sends each token to a few of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.generate.model.layers.linear import Linear
from stages.generate.model.layers.mlp import Mlp

# T = packed tokens, E = hidden size, X = experts, C = experts of a token, P = T * C pairs of a token and its expert,
# N = tokens of one expert


@dataclass(frozen=True, slots=True)
class Experts:
    """Each expert computes all its tokens of a step together. An expert without tokens costs nothing."""

    router: Linear
    experts: Sequence[Mlp]
    experts_per_token: int
    normalize: bool

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return y_TE.

        The experts of a token are always added in the same order, whatever else is in the batch.
        """
        weights_P, experts_P = self._route(x_TE)
        order_P = experts_P.argsort(stable=True)
        y_TE = torch.zeros_like(x_TE)
        begin = 0
        num_tokens_X = torch.bincount(experts_P, minlength=len(self.experts))
        for expert, count in zip(self.experts, num_tokens_X.tolist(), strict=True):
            if count:
                pairs_N = order_P[begin : begin + count]
                tokens_N = pairs_N // self.experts_per_token
                y_TE.index_add_(0, tokens_N, expert(x_TE[tokens_N]) * weights_P[pairs_N, None])
            begin += count
        return y_TE

    def _route(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight and the expert of each pair; the softmax is in float32 and over all experts."""
        weights_TC, experts_TC = self.router(x_TE).float().softmax(dim=-1).topk(self.experts_per_token, dim=-1)
        if self.normalize:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        return weights_TC.to(x_TE.dtype).flatten(), experts_TC.flatten()
