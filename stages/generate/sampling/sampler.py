"""From logits to token ids, all rows of a step at once, on every device. A token depends only on its row's logits and
parameters, the tokens before it, and (seed, position).

So a request gets the same tokens alone, in any batch, after a preemption and after a crash. Only integers are summed,
so neither the order of a sum nor the device matters. Where there are kernels, `sample.c` draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pipeline.events import SamplingParams
from stages.generate.batch import on_device
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling.draws import HALF_BITS, Draws, fractions, make_draws
from stages.generate.sampling.shaping import shape
from stages.generate.schedule.plan import NOT_A_NUMBER, Sample

# R = rows that sample, X = some of them, V = vocabulary, C = candidates, N = any number of tokens, B = blocks of them

VERSION: Final = 2
"""Increase this with every change that may choose another token. It is part of an engine's numerics."""
GREEDY: Final = SamplingParams(temperature=0)
AGAIN: Final = -2
"""Stands for a token: the row must be drawn again, alone."""
FEW: Final = 1024
"""Largest top_k with which only candidates are looked at, and number of candidates of a row with top_p alone."""
BLOCK: Final = 128
"""Number of weights in a block; blocks are summed first. The vocabularies of most models are a multiple of it."""
AT_ONCE: Final = {"cpu": 2**19, "cuda": 2**24}
"""Number of logits whose weights are computed at a time. Each takes up to 24 bytes: on a CPU they stay in its cache, on
a GPU all of them take 400 MB.
"""
FARTHEST: Final = 50.0
"""Number of halvings after which a weight is 0."""
EXPONENT: Final = 40 + 127
"""Exponent of the largest weight, 2**40, in float32."""
POLYNOMIAL: Final = (0.0013264729641377926, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253)
SLOPE: Final = 0.6931470036506653
"""2**f is 1 + f (SLOPE + f (.. + f POLYNOMIAL[0])) for f in [-0.5, 0.5], with an error of 2e-7: a minimax fit."""


def sample(logits_RV: Tensor, samples: Sequence[Sample], *, threads: int = 1) -> list[int]:
    """Return one token id per row, or NOT_A_NUMBER, and leave the logits as they are.

    Temperature 0 takes the argmax of the shaped logits and ignores top_p and so on.
    """
    if not samples:
        return []
    logits_RV = logits_RV.float().contiguous()
    if any(how.changes_logits for how in samples):
        logits_RV = logits_RV.clone()
    tokens_R = best(logits_RV)
    draw(tokens_R, logits_RV, samples, threads=threads)
    return draw_again(tokens_R.tolist(), logits_RV, samples)


def choose(logits_RV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return the token of each row, int64, or NOT_A_NUMBER: on a GPU, by Triton's kernels. None of them is AGAIN.

    *logits_RV*: the model's own, contiguous, float32, float16 or bfloat16; they stay as they are. Only rows whose
    requests change the logits are copied as float32. Only a row with typical_p waits for the device.
    """
    changed = [row for row, how in enumerate(samples) if how.changes_logits]
    own = list(samples)
    for row in changed:
        own[row] = Sample(GREEDY, 0, ())  # tells whether its own logits are numbers
    tokens_R = _chosen(logits_RV, own)
    if not changed:
        return tokens_R
    rows_X, samples_X = on_device(changed, logits_RV.device), [samples[row] for row in changed]
    logits_XV = logits_RV[rows_X].float()
    shape(logits_XV, range(len(changed)), samples_X)
    tokens_R[rows_X] = _chosen(logits_XV, samples_X).masked_fill_(tokens_R[rows_X] < 0, NOT_A_NUMBER)
    return tokens_R


def _chosen(logits_RV: Tensor, samples: Sequence[Sample]) -> Tensor:
    from stages.generate.sampling.fused import choose_all

    tokens_R = choose_all(logits_RV, make_draws(samples))
    for row, how in enumerate(samples):
        if how.params.typical_p < 1 and how.params.temperature > 0:
            tokens_R[row] = _draw_alone(logits_RV[row].float(), how)
    return tokens_R


def best(logits_RV: Tensor) -> Tensor:
    """Return the token with the largest logit of each row, the first of several.

    NOT_A_NUMBER: a logit is NaN, or the largest one is infinite.
    """
    most_R, tokens_R = logits_RV.max(-1)
    return tokens_R.masked_fill_(~most_R.isfinite(), NOT_A_NUMBER)


def draw(tokens_R: Tensor, logits_RV: Tensor, samples: Sequence[Sample], *, threads: int = 1) -> None:
    """Replace the `best` tokens, int64, of rows that are drawn, or whose requests change the logits.

    Nothing waits for the device. Only the logits of those rows are read; they are changed in place. Tokens may become
    AGAIN: once they are on the host, call `draw_again`. On a CPU, *threads* share the rows.
    """
    changed = [row for row, how in enumerate(samples) if how.changes_logits]
    drawn = [row for row, how in enumerate(samples) if how.params.temperature > 0]
    if not (changed or drawn):
        return
    wrong_R = tokens_R < 0
    if changed:
        shape(logits_RV, changed, samples, threads=threads)
        greedy = [row for row in changed if samples[row].params.temperature == 0]
        if greedy:
            rows_X = on_device(greedy, tokens_R.device)
            tokens_R[rows_X] = best(logits_RV[rows_X])
    if drawn:
        draws = make_draws([samples[row] for row in drawn])
        odd = np.array([samples[row].params.typical_p < 1 for row in drawn])
        _draw(tokens_R, logits_RV, np.array(drawn), draws, odd, threads)
    tokens_R.masked_fill_(wrong_R, NOT_A_NUMBER)


def is_drawn_again(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether `draw` always returns AGAIN for a row with these parameters where there are no kernels."""
    return params.temperature > 0 and (params.typical_p < 1 or FEW < params.top_k < vocab_size)


def draw_again(token_ids: Sequence[int], logits_RV: Tensor, samples: Sequence[Sample]) -> list[int]:
    """Return the *token_ids* that `draw` wrote, with each AGAIN replaced. Wait for the device."""
    return [
        _draw_alone(logits_RV[row], samples[row]) if token == AGAIN else token for row, token in enumerate(token_ids)
    ]


def weights(distances_XN: Tensor, divisors_X1: Tensor) -> Tensor:
    """Return rint(2**(40 - distance / divisor)) as int64, not normalised: 2**40 is the weight of the largest logit.

    *distances_XN*, of each logit from the largest one of its row, are overwritten. IEEE 754 defines the result of each
    of these operations, on every device. A sum of 2**20 weights fits into 61 bits.
    """
    halvings_XN = distances_XN.div_(divisors_X1).clamp_(max=FARTHEST)
    whole_XN = halvings_XN.round()
    part_XN = torch.sub(whole_XN, halvings_XN, out=halvings_XN)
    power_XN = part_XN * POLYNOMIAL[0]
    for factor in (*POLYNOMIAL[1:], SLOPE):
        power_XN.add_(factor).mul_(part_XN)
    power_XN.add_(1)
    scale_XN = whole_XN.neg_().add_(EXPONENT).to(torch.int32).bitwise_left_shift_(23).view(torch.float32)
    return power_XN.mul_(scale_XN).round_().to(torch.int64)


def share(sums_X: Tensor, fractions_2X: Tensor) -> Tensor:
    """Return the fraction of each sum, rounded down, exactly. A sum has at most 60 bits."""
    (high_X, low_X), rest = fractions_2X, 2**HALF_BITS - 1
    upper_X, lower_X = sums_X >> HALF_BITS, sums_X & rest
    middle_X = upper_X * low_X + lower_X * high_X + ((lower_X * low_X) >> HALF_BITS)
    shares_X: Tensor = upper_X * high_X + (middle_X >> HALF_BITS)
    return shares_X


def _draw(
    tokens_R: Tensor,
    logits_RV: Tensor,
    drawn: np.ndarray,
    draws: Draws,
    odd: np.ndarray,
    threads: int,
) -> None:
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    kernels = sampling.functions() if device.type == "cpu" else None
    if kernels is not None:
        sampling.draw(kernels, tokens_R.numpy(), logits_RV.numpy(), drawn, draws, threads)
        if odd.any():
            tokens_R.index_fill_(0, torch.from_numpy(drawn[odd]), AGAIN)
        return
    top_k, top_p_high = draws.numbers_FR[:2]
    limited = (top_k > 0) & (top_k < vocab_size)
    alone = odd | (limited & (top_k > FEW))
    nucleus = ~limited & (top_p_high < 2**HALF_BITS) & ~alone
    whole = ~(limited | nucleus | alone)
    divisors_X1 = on_device(draws.divisors_R, device)[:, None]
    numbers_FX = on_device(draws.numbers_FR, device)
    rows_X = on_device(drawn, device)
    if alone.any():
        tokens_R.index_fill_(0, on_device(drawn[alone], device), AGAIN)
    ways = (limited & ~alone, _by_candidates), (nucleus, _by_nucleus), (whole, _by_all)
    for which, by in ways:
        for some in _in_turn(which.nonzero()[0], vocab_size, device):
            some_Y = on_device(some, device)
            rows_Y = rows_X[some_Y]
            told_FY = draws.numbers_FR[:, some]
            tokens_R[rows_Y] = by(logits_RV[rows_Y], divisors_X1[some_Y], numbers_FX[:, some_Y], told_FY)


def _in_turn(which: np.ndarray, vocab_size: int, device: torch.device) -> Iterator[np.ndarray]:
    num_rows = max(1, AT_ONCE[device.type] // vocab_size)
    for start in range(0, len(which), num_rows):
        yield which[start : start + num_rows]


def _by_all(logits_XV: Tensor, divisors_X1: Tensor, numbers_FX: Tensor, told_FX: np.ndarray) -> Tensor:
    """Return a token of each row that min_p keeps. Overwrite the logits. *told_FX*: the numbers on the host."""
    most_X1 = logits_XV.amax(-1, keepdim=True)
    weights_XV = weights(torch.sub(most_X1, logits_XV, out=logits_XV), divisors_X1)
    if told_FX[3].any():
        weights_XV.mul_(weights_XV >= numbers_FX[3][:, None])
    if padding := -weights_XV.shape[1] % BLOCK:
        weights_XV = torch.nn.functional.pad(weights_XV, (0, padding))
    blocks_XBN = weights_XV.view(len(weights_XV), -1, BLOCK)
    sums_XB = blocks_XBN.sum(-1)
    ends_XB = sums_XB.cumsum(-1)
    before_X1 = share(ends_XB[:, -1], numbers_FX[4:6])[:, None]
    block_X1 = _place(ends_XB, before_X1)
    inside_X1 = before_X1 - (ends_XB.gather(1, block_X1) - sums_XB.gather(1, block_X1))
    weights_XN = blocks_XBN.gather(1, block_X1[..., None].expand(-1, -1, BLOCK))[:, 0]
    tokens_X = (block_X1 * BLOCK + _place(weights_XN.cumsum(-1), inside_X1))[:, 0]
    return tokens_X.masked_fill_(~most_X1[:, 0].isfinite(), NOT_A_NUMBER)


def _by_candidates(logits_XV: Tensor, divisors_X1: Tensor, numbers_FX: Tensor, told_FX: np.ndarray) -> Tensor:
    """Return a token of each row, among its top_k and those that equal the last of them."""
    most = 1 << int(2 * told_FX[0].max() - 1).bit_length()  # about twice as many, for equal logits
    num_candidates = min(most, logits_XV.shape[1])
    distances_XC, ids_XC = _nearest(logits_XV, num_candidates)
    weights_XC = weights(distances_XC.clone(), divisors_X1)
    weights_XC.mul_(distances_XC <= distances_XC.gather(1, numbers_FX[0][:, None] - 1))
    more_X = weights_XC[:, -1] > 0  # tokens beyond the candidates may equal the last one, and count for top_p
    sums_X = weights_XC.sum(-1)
    tokens_X = _of_candidates(distances_XC, ids_XC, weights_XC, sums_X, numbers_FX, logits_XV.shape[1])
    return tokens_X.masked_fill_(more_X, AGAIN) if num_candidates < logits_XV.shape[1] else tokens_X


def _by_nucleus(logits_XV: Tensor, divisors_X1: Tensor, numbers_FX: Tensor, told_FX: np.ndarray) -> Tensor:
    """Return a token of each row with top_p, and without top_k. Overwrite the logits."""
    distances_XC, ids_XC = _nearest(logits_XV, min(FEW, logits_XV.shape[1]))
    most_X1 = logits_XV.amax(-1, keepdim=True)
    sums_X = weights(torch.sub(most_X1, logits_XV, out=logits_XV), divisors_X1).sum(-1)
    weights_XC = weights(distances_XC.clone(), divisors_X1)
    return _of_candidates(distances_XC, ids_XC, weights_XC, sums_X, numbers_FX, logits_XV.shape[1])


def _nearest(logits_XV: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Return the distances of the largest logits of each row from the largest, in rising order, and their tokens."""
    best_XC, ids_XC = logits_XV.topk(num_candidates)
    return best_XC[:, :1] - best_XC, ids_XC


def _of_candidates(
    distances_XC: Tensor, ids_XC: Tensor, weights_XC: Tensor, sums_X: Tensor, numbers_FX: Tensor, vocab_size: int
) -> Tensor:
    """Return a token of each row, among those that top_p and min_p keep; AGAIN: they may be more than the candidates.

    *sums_X*: the weights of all tokens that top_k keeps.
    """
    before_XC = weights_XC.cumsum(-1) - weights_XC
    wanted_X = share(sums_X, numbers_FX[1:3]).clamp_(min=1)
    last_X1 = (before_XC < wanted_X[:, None]).sum(-1, keepdim=True) - 1
    border_X1 = distances_XC.gather(1, last_X1.clamp_(min=0))
    kept_XC = distances_XC <= border_X1
    weights_XC.mul_(kept_XC & (weights_XC >= numbers_FX[3][:, None]))
    ids_XC, order_XC = ids_XC.sort(-1)
    ends_XC = weights_XC.gather(1, order_XC).cumsum(-1)
    place_X1 = _place(ends_XC, share(ends_XC[:, -1], numbers_FX[4:6])[:, None])
    tokens_X = ids_XC.gather(1, place_X1)[:, 0]
    if ids_XC.shape[1] < vocab_size:
        tokens_X.masked_fill_(kept_XC[:, -1], AGAIN)
    return tokens_X.masked_fill_(distances_XC[:, 0] != 0, NOT_A_NUMBER)  # inf - inf is NaN


def _place(ends_XN: Tensor, before_X1: Tensor) -> Tensor:
    """Return where the running sums *ends_XN* first pass *before_X1*: the inverse of a distribution function."""
    place_X1 = torch.searchsorted(ends_XN, before_X1, right=True)
    return place_X1.clamp_(max=ends_XN.shape[1] - 1)  # with NaN it may be beyond the end


def _draw_alone(logits_V: Tensor, how: Sample) -> int:
    if not logits_V.max().isfinite():
        return NOT_A_NUMBER
    ends_V = kept_weights(logits_V, how).cumsum(-1)
    fraction_21 = on_device(make_draws([how]).numbers_FR[4:6], logits_V.device)
    return int(torch.searchsorted(ends_V, share(ends_V[-1:], fraction_21), right=True))


def kept_weights(logits_V: Tensor, how: Sample) -> Tensor:
    """Return the weights of one row after temperature, top_k, top_p, min_p and typical_p in this order, as in
    transformers. Sort all tokens.

    Equal logits at a border are all kept or all dropped, so the result does not depend on how a sort orders them. In
    bfloat16 they are common.
    """
    params, draws = how.params, make_draws([how])
    divisor_1 = on_device(draws.divisors_R, logits_V.device)
    distances_V = logits_V.max() - logits_V
    weights_V = weights(distances_V.clone(), divisor_1)
    sorted_V, order_V = distances_V.sort()
    if 0 < params.top_k < len(weights_V):
        weights_V.mul_(distances_V <= sorted_V[params.top_k - 1])
    if params.top_p < 1:
        weights_V.mul_(distances_V <= _border(sorted_V, weights_V[order_V], params.top_p))
    weights_V.mul_(weights_V >= int(draws.numbers_FR[3, 0]))
    if params.typical_p < 1:
        surprise_V = distances_V.div_(divisor_1).clamp_(max=FARTHEST).mul_(2**20).round_().to(torch.int64)
        _keep_typical(weights_V, surprise_V, params.typical_p)
    return weights_V


def _keep_typical(weights_V: Tensor, surprise_V: Tensor, typical_p: float) -> None:
    """Keep the tokens with information closest to the entropy that together reach *typical_p*.

    *surprise_V* is the information of each token, in 2**-20 bits, minus that of the most probable one. Meister,
    Pimentel, Wiher, Cotterell: Locally Typical Sampling, TACL 2023 (arXiv:2202.00666).
    """
    limbs = (((weights_V >> shift & 0x3FFF) * surprise_V).sum() for shift in (0, 14, 28))  # a whole one has 85 bits
    mean = sum(int(limb) << shift for limb, shift in zip(limbs, (0, 14, 28), strict=True)) // int(weights_V.sum())
    distances_V = (surprise_V - mean).abs_().masked_fill_(weights_V == 0, 2**40)
    sorted_V, order_V = distances_V.sort()
    weights_V.mul_(distances_V <= _border(sorted_V, weights_V[order_V], typical_p))


def _border(sorted_N: Tensor, weights_N: Tensor, fraction: float) -> Tensor:
    """Return the largest distance, of *sorted_N*, among the tokens that together reach *fraction* of the weights."""
    fraction_21 = on_device(np.array(fractions(np.array([fraction]))).astype(np.int64), sorted_N.device)
    ends_N = weights_N.cumsum(-1)
    wanted_1 = share(ends_N[-1:], fraction_21).clamp_(min=1)
    return sorted_N[(ends_N - weights_N < wanted_1).sum() - 1]
