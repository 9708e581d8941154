"""How a request changes its logits before a token is chosen: bias, penalties, allowed and forbidden tokens, grammar.

A pure function of the logits, the parameters and the tokens so far. The order is that of vLLM and transformers: bias,
penalties, then forbidden tokens. Greedy rows are changed like all others. The grammar comes last: no other parameter
can add a token that it does not allow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.generate.batch import on_device
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling.masks import mask_of, unpacked
from stages.generate.schedule.plan import Sample

# R = rows that sample, V = vocabulary, P = places of all rows in the flat logits: row * V + token

NEVER: Final = float("-inf")
LEAST: Final = torch.finfo(torch.float32).tiny
MOST: Final = torch.finfo(torch.float32).max

Floats = npt.NDArray[np.float32]
Number = TypeVar("Number", np.float32, np.int64)


class Places:
    """Places in the flat logits, of any rows. Adding a row calls no numpy: there may be hundreds of rows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._token_ids: list[array[int]] = []

    def add(self, row: int, token_ids: array[int]) -> None:
        """Add places of *row*."""
        self._starts.append(row * self._vocab_size)
        self._lengths.append(len(token_ids))
        self._token_ids.append(token_ids)

    def on(self, device: torch.device) -> Tensor:
        """Return the places as int64 on *device*."""
        return on_device(np.repeat(np.array(self._starts, np.int64), self._lengths) + int32s(self._token_ids), device)

    def spread(self, numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return for each place the number of its row. *numbers* has one for each `add`."""
        return np.repeat(numbers, self._lengths)

    def __bool__(self) -> bool:
        return any(self._lengths)


def int32s(parts: Iterable[array[int]]) -> npt.NDArray[np.int32]:
    """Return arrays as one. For hundreds of short ones np.concatenate takes far longer."""
    return np.frombuffer(bytearray().join(parts), np.int32)


def float32s(parts: Iterable[array[float]]) -> Floats:
    """Return arrays as one."""
    return np.frombuffer(bytearray().join(parts), np.float32)


def shape(logits_RV: Tensor, rows: Sequence[int], samples: Sequence[Sample], *, threads: int = 1) -> None:
    """Change, in place, the logits of *rows*, float32. *samples* has the samples of all rows.

    On a CPU, *threads* share the rows with grammars.

    Token ids beyond the vocabulary are ignored, because clients send stop ids of other models.
    """
    device, flat, vocab_size = logits_RV.device, logits_RV.view(-1), logits_RV.shape[1]
    biased, allowed, forbidden = (Places(vocab_size) for _ in range(3))
    biases: list[array[float]] = []
    penalized: list[int] = []
    limited: list[int] = []
    forbidding: list[int] = []
    bound: list[int] = []
    for row in rows:
        how = samples[row]
        params = how.params
        if bias := {token: bias for token, bias in params.logit_bias if token < vocab_size}:
            biased.add(row, array("i", bias))
            biases.append(array("f", bias.values()))
        if params.penalizes:
            penalized.append(row)
        if how.allowed is not None:
            bound.append(row)
            continue
        if known := [token for token in params.allowed_token_ids if token < vocab_size]:
            allowed.add(row, array("i", known))
            limited.append(row)
        if known := [token for token in how.forbidden if 0 <= token < vocab_size]:
            forbidden.add(row, array("i", known))
            forbidding.append(row)
    if biased:
        flat[biased.on(device)] += on_device(float32s(biases), device)
    if penalized:
        _penalize(logits_RV, penalized, samples)
    if limited:
        places_P = allowed.on(device)
        there_P = flat[places_P]
        logits_RV.index_fill_(0, on_device(limited, device), NEVER)
        flat[places_P] = there_P
    if forbidding:
        places_P = forbidden.on(device)
        there_P = flat[places_P]
        flat.index_fill_(0, places_P, NEVER)
        which_P = on_device(forbidden.spread(np.arange(len(forbidding))), device)
        has_others_R = logits_RV[on_device(forbidding, device)].amax(-1) > NEVER
        flat[places_P] = there_P.masked_fill_(has_others_R[which_P], NEVER)  # forbidding all tokens forbids none
    if bound:
        _refuse(logits_RV, bound, samples, threads)


def _penalize(logits_RV: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> None:
    """Change the logits of the tokens that *rows* already have.

    On a CPU, `index_select` and `index_copy_` take half as long as brackets.
    """
    device, flat, vocab_size = logits_RV.device, logits_RV.view(-1), logits_RV.shape[1]
    repeated, used = Places(vocab_size), Places(vocab_size)
    factors: list[float] = []
    counts: list[array[float]] = []
    penalties: list[tuple[float, float]] = []
    for row in rows:
        params, seen = samples[row].params, samples[row].seen
        assert seen is not None, "a sample with penalties has its request's record"
        if params.repetition_penalty != 1:
            repeated.add(row, seen.prompt_ids)
            repeated.add(row, seen.output_ids)
            factors += [max(params.repetition_penalty, LEAST)] * 2
        if params.frequency_penalty or params.presence_penalty:
            used.add(row, seen.output_ids)
            counts.append(seen.counts)
            penalties.append((params.frequency_penalty, params.presence_penalty))
    if repeated:
        places_P = repeated.on(device)
        factors_P = on_device(repeated.spread(np.array(factors, np.float32)), device)
        there_P = flat.index_select(0, places_P)  # a place that comes twice gets the same number twice
        penalized_P = torch.where(there_P > 0, (there_P / factors_P).clamp_(max=MOST), there_P * factors_P)
        flat.index_copy_(0, places_P, penalized_P)
    if used:
        places_P = used.on(device)
        often, present = np.array(penalties, np.float32).T
        penalties_P = float32s(counts) * used.spread(often) + used.spread(present)
        flat.index_copy_(0, places_P, flat.index_select(0, places_P) - on_device(penalties_P, device))


def _refuse(logits_RV: Tensor, rows: Sequence[int], samples: Sequence[Sample], threads: int) -> None:
    """Set the logits of the tokens that *rows*, which have grammars, cannot have to minus infinity."""
    vocab_size = logits_RV.shape[1]
    masks_XW = [mask_of(samples[row], vocab_size) for row in rows]
    kernels = sampling.functions() if logits_RV.device.type == "cpu" else None
    if kernels is not None:
        sampling.refuse(kernels, logits_RV.numpy(), rows, masks_XW, threads)
        return
    for row, mask_W in zip(rows, masks_XW, strict=True):
        logits_RV[row].masked_fill_(on_device(~unpacked(mask_W, vocab_size), logits_RV.device), NEVER)
