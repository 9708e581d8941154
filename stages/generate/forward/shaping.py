"""How a request changes its logits before a token is chosen: bias, penalties, allowed and forbidden tokens, grammar.

A pure function of the logits, the parameters and the tokens so far. The order is that of vLLM and transformers: bias,
penalties, then tokens that must not come out. Greedy rows are shaped like all others. The grammar has the last word: no
other wish gives a token that it does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stages.generate.forward.masks import mask_of, unpacked
from stages.generate.kernels import sampling
from stages.generate.schedule.plan import Sample

# R = rows that sample, V = vocabulary, P = places of all rows in the flat logits: row * V + token

NEVER: Final = float("-inf")
LEAST: Final = torch.finfo(torch.float32).tiny
MOST: Final = torch.finfo(torch.float32).max


class Places:
    """Places in the flat logits, of any rows, and a number for each."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def add(self, row: int, token_ids: Sequence[int] | np.ndarray, numbers: float | np.ndarray) -> None:
        """Add places of *row*, each with its number or all with one."""
        places = np.asarray(token_ids, np.int64) + row * self._vocab_size
        self._places.append(places)
        self._numbers.append(np.broadcast_to(np.asarray(numbers, np.float32), places.shape))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the places, int64, and the numbers, float32."""
        return on_device(np.concatenate(self._places), device), on_device(np.concatenate(self._numbers), device)

    def __bool__(self) -> bool:
        return bool(self._places)


def shape(logits_RV: Tensor, rows: Sequence[int], samples: Sequence[Sample], *, threads: int = 1) -> None:
    """Change, in place, the logits of *rows*, float32, as *samples* say, which are of all rows.

    On a CPU, *threads* share the rows with grammars.

    Token ids beyond the vocabulary are ignored, because clients send stop ids of other models.
    """
    device, flat, vocab_size = logits_RV.device, logits_RV.view(-1), logits_RV.shape[1]
    biases, repeated, used, allowed, forbidden = (Places(vocab_size) for _ in range(5))
    limited: list[int] = []
    forbidding: list[int] = []
    bound: list[int] = []
    for row in rows:
        how = samples[row]
        params = how.params
        if bias := {token: bias for token, bias in params.logit_bias if token < vocab_size}:
            biases.add(row, list(bias), np.array(list(bias.values())))
        if params.repetition_penalty != 1:
            repeated.add(row, how.token_ids, max(params.repetition_penalty, LEAST))
        if params.frequency_penalty or params.presence_penalty:
            tokens, counts = np.unique(np.array(how.token_ids[how.prompt_length :], np.int64), return_counts=True)
            often = counts.astype(np.float32) * np.float32(params.frequency_penalty)
            used.add(row, tokens, often + np.float32(params.presence_penalty))
        if how.allowed is not None:
            bound.append(row)
            continue
        if known := [token for token in params.allowed_token_ids if token < vocab_size]:
            allowed.add(row, known, 0)
            limited.append(row)
        if known := [token for token in how.forbidden if 0 <= token < vocab_size]:
            forbidden.add(row, known, len(forbidding))
            forbidding.append(row)
    if biases:
        places_P, biases_P = biases.on(device)
        flat[places_P] += biases_P
    if repeated:
        places_P, factors_P = repeated.on(device)  # a place that is there twice gets the same number twice
        there_P = flat[places_P]
        flat[places_P] = torch.where(there_P > 0, (there_P / factors_P).clamp_(max=MOST), there_P * factors_P)
    if used:
        places_P, penalties_P = used.on(device)
        flat[places_P] -= penalties_P
    if limited:
        places_P, _ = allowed.on(device)
        there_P = flat[places_P]
        logits_RV.index_fill_(0, on_device(limited, device), NEVER)
        flat[places_P] = there_P
    if forbidding:
        places_P, which_P = forbidden.on(device)
        there_P = flat[places_P]
        flat.index_fill_(0, places_P, NEVER)
        has_others_R = logits_RV[on_device(forbidding, device)].amax(-1) > NEVER
        flat[places_P] = there_P.masked_fill_(has_others_R[which_P.long()], NEVER)  # to forbid all tokens forbids none
    if bound:
        _refuse(logits_RV, bound, samples, threads)


def _refuse(logits_RV: Tensor, rows: Sequence[int], samples: Sequence[Sample], threads: int) -> None:
    """Make the logits minus infinity of those tokens that *rows*, which have grammars, cannot have."""
    vocab_size = logits_RV.shape[1]
    masks_XW = [mask_of(samples[row], vocab_size) for row in rows]
    kernels = sampling.functions() if logits_RV.device.type == "cpu" else None
    if kernels is not None:
        sampling.refuse(kernels, logits_RV.numpy(), rows, masks_XW, threads)
        return
    for row, mask_W in zip(rows, masks_XW, strict=True):
        logits_RV[row].masked_fill_(on_device(~unpacked(mask_W, vocab_size), logits_RV.device), NEVER)


def on_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor. Nothing waits for the device."""
    tensor = torch.from_numpy(np.asarray(numbers))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
