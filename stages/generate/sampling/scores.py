"""Log-probabilities of tokens, from the model's own logits before bias, penalties and temperature.

vLLM returns the same by default (`raw_logprobs`). They do not depend on how a token was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from pipeline.events import Score
from stages.generate.schedule.plan import NOT_A_NUMBER, BatchPlan, PlanRow, RowScores

# T = packed tokens, R = rows that sample, V = vocabulary, E = hidden size, N = tokens of a prompt, C = candidates

AT_ONCE: Final = 128
"""Number of prompt tokens whose logits are computed at a time: with a large vocabulary all logits take gigabytes."""
LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI returns the same number."""
DIGITS: Final = 6
"""Digits after the decimal point; float32 has no more."""


def score(
    plan: BatchPlan,
    starts: Sequence[int],
    x_TE: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    logits_RV: Tensor,
    token_ids: Sequence[int],
) -> dict[int, RowScores]:
    """Return table row -> scores of its drawn tokens and its prompt, for the rows that ask for them.

    *starts*: where in T each row begins. *logits_RV*: at least the rows that ask for scores must be filled in.
    """
    found: dict[int, RowScores] = {}
    sampled = iter(range(len(token_ids)))
    for index, row in enumerate(plan.rows):
        sample = next(sampled) if row.sample is not None else 0
        params = row.sample.params if row.sample is not None and row.sample.params.logprobs is not None else None
        if params is None and row.scoring is None:
            continue  # as nearly all rows
        before = found.get(row.table, RowScores()) if row.is_draft else RowScores()
        tokens = before.tokens
        prompt: tuple[Score, ...] = ()
        if params is not None and params.logprobs is not None and token_ids[sample] != NOT_A_NUMBER:
            drawn_1V, drawn = logits_RV[sample : sample + 1], token_ids[sample : sample + 1]
            tokens += tuple(scores_of(drawn_1V, drawn, params.logprobs, params.logprob_token_ids))
        if row.scoring is not None:
            prompt = tuple(
                one
                for x_NE, targets in blocks_of(row, starts[index], x_TE)
                for one in scores_of(logits_of(x_NE), targets, row.scoring.num_top)
            )
        if tokens or prompt:
            found[row.table] = RowScores(tokens, prompt)
    return found


def blocks_of(row: PlanRow, first: int, x_TE: Tensor) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield x_NE of the scored tokens of *row*, and their targets, in blocks. The row begins at *first* in T."""
    targets = row.scoring.targets if row.scoring is not None else ()
    for start in range(0, len(targets), AT_ONCE):
        block = targets[start : start + AT_ONCE]
        yield x_TE[first + start : first + start + len(block)], block


def scores_of(logits_NV: Tensor, token_ids: Sequence[int], num_top: int, others: Sequence[int] = ()) -> list[Score]:
    """Return the score of each of *token_ids* in its row of logits, with the *num_top* most probable tokens, or instead
    with *others* if there are any."""
    logprobs_NV = logits_NV.float().log_softmax(-1)
    chosen_N1 = logprobs_NV.gather(1, torch.tensor(token_ids, device=logprobs_NV.device)[:, None])
    if others:
        known_C = torch.tensor([token for token in others if token < logprobs_NV.shape[1]], device=logprobs_NV.device)
        values_NC, tokens_NC = logprobs_NV[:, known_C.long()], known_C.expand(len(logprobs_NV), -1)
    else:
        values_NC, tokens_NC = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]))
    told = zip(chosen_N1[:, 0].tolist(), tokens_NC.tolist(), values_NC.tolist(), strict=True)
    return [
        Score(logprob=_told(chosen), top=tuple((token, _told(logprob)) for token, logprob in zip(*best, strict=True)))
        for chosen, *best in told
    ]


def _told(logprob: float) -> float:
    return round(max(logprob, LEAST), DIGITS)
