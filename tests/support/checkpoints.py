"""Small random checkpoints, engines with their weights, and what transformers generates from them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
from stages.generate.forward.engine import Engine
from stages.generate.model.checkpoint import check_folder
from stages.generate.setup.resolve import resolve_dtype

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
    "make_engine",
    "reference_logits",
    "reference_model",
    "reference_tokens",
    "train_tokenizer",
]


KERNELS, DEVICE = "torch", torch.device("cpu")
"""What computes in `make_engine`, and where, unless it is told; a test module sets them to each kind in turn."""


def make_engine(folder: Path, dtype: str = "auto", *, dummy: bool = False, **more: Any) -> Engine:
    """Return an engine whose unused memory is NaN, so that whoever reads it is found out."""
    spec = check_folder(folder, dummy=dummy)
    sizes = {"num_pages": 128, "page_size": 4, "max_running_requests": 4, "max_seq_len": 160}
    options: dict[str, Any] = {
        "device": DEVICE,
        "attention": "torch" if DEVICE.type == "cuda" else "reference",
        "dtype": resolve_dtype(spec, dtype),
        "kernels": KERNELS,
        **sizes,
    }
    options |= more
    engine = Engine(spec, folder, dummy=dummy, **options)
    engine.kv_L2PKSD.fill_(float("nan"))
    return engine


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model as transformers computes it, in eager mode."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default one multiplies in some dtypes alone
    return model


def reference_logits(model: Any, token_ids: Sequence[int], cache: Any) -> Tensor:
    """Return logits_TV of *token_ids* after what *cache*, a DynamicCache, has seen, and let it see these, too."""
    # transformers 5.24 has renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits_TV: Tensor = model(torch.tensor([token_ids]), use_cache=True, **{name: cache}).logits[0]
    return logits_TV


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
    model = reference_model(folder)
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
