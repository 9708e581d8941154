"""Small random checkpoints, and what transformers generates from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, NoBadWordsLogitsProcessor

from ops.bench.checkpoints import (
    BOS,
    END,
    FAMILIES,
    LLAMA3_ROPE,
    START,
    STOP,
    TEXT,
    WINDOW,
    Family,
    make_checkpoint,
    train_tokenizer,
)

__all__ = [
    "BOS",
    "END",
    "FAMILIES",
    "LLAMA3_ROPE",
    "START",
    "STOP",
    "TEXT",
    "WINDOW",
    "Family",
    "make_checkpoint",
    "reference_tokens",
    "train_tokenizer",
]


def reference_tokens(
    folder: Path,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    ignore_eos: bool = True,
    bad_words: Sequence[Sequence[int]] = (),
) -> tuple[list[int], float]:
    """Return what transformers generates greedily (eager, float32), and the smallest gap between its two best logits.

    A test that compares tokens asserts that the gap is far above rounding, else it would compare noise. Without
    *ignore_eos* the tokens end with the end-of-sequence token, if one comes. No sequence of *bad_words* comes out; its
    processor is shown the output alone, because with vLLM and us the prompt begins none of them.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    eos_ids = () if ignore_eos else model.generation_config.eos_token_id
    forbid = NoBadWordsLogitsProcessor([list(word) for word in bad_words]) if bad_words else None
    tokens: list[int] = []
    smallest_gap = float("inf")
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos_ids):
        with torch.inference_mode():
            logits_V = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, -1]
        if forbid is not None:
            logits_V = forbid(torch.tensor([tokens], dtype=torch.long), logits_V[None])[0]
        best = logits_V.topk(2)
        smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens, smallest_gap
