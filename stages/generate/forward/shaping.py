"""How a request changes its logits before a token is chosen: bias, penalties, allowed and forbidden tokens.

A pure function of the logits, the parameters and the tokens so far. The order is that of vLLM and transformers: bias,
penalties, then tokens that must not come out. Greedy rows are shaped like all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.events import SamplingParams
from stages.generate.schedule.plan import Sample

# R = rows that sample, V = vocabulary, S = tokens seen

NEVER = float("-inf")


def shaped(logits_RV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return the logits from which each row's token is chosen: *logits_RV* itself when no row changes them.

    Token ids beyond the vocabulary are ignored, because clients send stop ids of other models.
    """
    shaped_RV = logits_RV
    for row, how in enumerate(samples):
        if how.changes_logits:
            shaped_RV = logits_RV.float().clone() if shaped_RV is logits_RV else shaped_RV
            shaped_RV[row] = _shaped_row(shaped_RV[row], how)
    return shaped_RV


def _shaped_row(logits_V: Tensor, how: Sample) -> Tensor:
    params = how.params
    shaped_V = logits_V.clone()
    biases = {token: bias for token, bias in params.logit_bias if token < len(shaped_V)}
    if biases:
        shaped_V[list(biases)] += torch.tensor(list(biases.values()), device=shaped_V.device)
    _penalize(shaped_V, params, how.token_ids, how.prompt_length)
    if params.allowed_token_ids:
        allowed_V = _marked(shaped_V, params.allowed_token_ids)
        if allowed_V.any():
            shaped_V[~allowed_V] = NEVER
    if not how.forbidden:
        return shaped_V
    rest_V = shaped_V.masked_fill(_marked(shaped_V, how.forbidden), NEVER)
    return rest_V if (rest_V > NEVER).any() else shaped_V  # to forbid all tokens forbids none


def _penalize(logits_V: Tensor, params: SamplingParams, token_ids: Sequence[int], prompt_length: int) -> None:
    if params.repetition_penalty != 1:
        seen_S = torch.tensor(sorted(set(token_ids)), device=logits_V.device)
        there_S = logits_V[seen_S]
        factor = params.repetition_penalty
        logits_V[seen_S] = torch.where(there_S > 0, there_S / factor, there_S * factor)
    output = token_ids[prompt_length:]
    if output and (params.frequency_penalty or params.presence_penalty):
        count_V = torch.bincount(torch.tensor(output, device=logits_V.device), minlength=len(logits_V))
        logits_V -= count_V * params.frequency_penalty + (count_V > 0) * params.presence_penalty


def _marked(logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
    marked_V = torch.zeros(len(logits_V), dtype=torch.bool, device=logits_V.device)
    marked_V[[token for token in set(token_ids) if 0 <= token < len(logits_V)]] = True
    return marked_V
