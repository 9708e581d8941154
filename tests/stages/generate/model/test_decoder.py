"""The decoder, through the engine, gives the logits of transformers for every rope and for every mixture of experts.

The families themselves, in chunks and in company, are in `tests/stages/generate/forward/test_engine.py`; that no two
ropes are the same is in `layers/test_rope.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Family, make_checkpoint, make_engine, reference_logits, reference_model
from support.selection import by_night
from transformers import DynamicCache

from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.model.spec import Loading
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

pytestmark = pytest.mark.usefixtures("kernels")

REACH, PAGE_SIZE = 40, 4
TOKENS = random.Random(5).choices(range(4, 480), k=96)
PLAIN: dict[str, Any] = {}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = {"mscale": 1.4, "mscale_all_dim": 0.6, "beta_fast": 16, "beta_slow": 2, "truncate": False}
ROPES: dict[str, dict[str, Any]] = {
    name: {"rope_type": name.partition(",")[0], "rope_theta": 1000.0, "factor": 4.0, **more}
    for name, more in {
        "default": PLAIN,
        "linear": PLAIN,
        "dynamic": PLAIN,
        "llama3": LLAMA3,
        "yarn": {"original_max_position_embeddings": REACH},
        "yarn, mscale": {"original_max_position_embeddings": 16, **MSCALE},
    }.items()
}


def row(tokens: Sequence[int], start: int, table: int = 0) -> PlanRow:
    """Return the row that computes *tokens* from *start* on; each table has pages of its own."""
    first, end = -(-start // PAGE_SIZE), -(-len(tokens) // PAGE_SIZE)
    pages = tuple(32 * table + page for page in range(first, end))
    return PlanRow(
        table, start, tuple(tokens[start:]), pages, first, Sample(SamplingParams(temperature=0), len(tokens), ())
    )


def logits(engine: Engine, *rows: PlanRow) -> torch.Tensor:
    return engine.logits(BatchPlan(0, rows, sum(len(row.token_ids) == 1 for row in rows))).cpu()


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.float() - theirs.float()).abs().max())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ROPES)
@torch.inference_mode()
def test_every_rope_gives_the_logits_of_transformers_token_by_token(tmp_path: Path, kind: str) -> None:
    """Token by token on its cache, as a server generates; a prompt of more than dynamic's training context differs."""
    folder = make_checkpoint(tmp_path, "llama3", max_positions=REACH, rope=ROPES[kind])
    engine, model = make_engine(folder), reference_model(folder)
    prompt = 30
    cache = DynamicCache(config=model.config)
    theirs_TV = reference_logits(model, TOKENS[:prompt], cache)
    for end in range(prompt, by_night(60, len(TOKENS))):
        start = 0 if end == prompt else end - 1
        assert difference(logits(engine, row(TOKENS[:end], start)), theirs_TV[-1:]) < 2e-4, f"at {end}"
        theirs_TV = reference_logits(model, TOKENS[end : end + 1], cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True, "mlp_only_layers": []},
        {"norm_topk_prob": False, "mlp_only_layers": []},
        {"norm_topk_prob": True, "num_experts_per_tok": 1, "mlp_only_layers": [1]},
        {"norm_topk_prob": False, "num_experts_per_tok": 6, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ],
    ids=str,
)
@torch.inference_mode()
def test_experts_give_the_logits_of_transformers(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen3moe", experts=changes)
    assert json.loads((folder / "config.json").read_text()).items() >= changes.items()
    mine = logits(make_engine(folder, dtype), row(TOKENS, 0))
    theirs = reference_model(folder, getattr(torch, dtype))(torch.tensor([TOKENS])).logits[:, -1]
    exact = reference_model(folder)(torch.tensor([TOKENS])).logits[:, -1]
    if dtype == "float32":
        assert difference(mine, exact) < 2e-4
    else:  # rounded in another order, and as near to the exact ones as transformers is
        assert difference(mine, exact) < 2 * difference(theirs, exact)


@pytest.mark.parametrize("family", ["qwen3", "qwen3moe", "odd"])
def test_dummy_weights_neither_repeat_a_token_nor_forget_the_prompt(tmp_path: Path, family: Family) -> None:
    folder = make_checkpoint(tmp_path, family)
    engine = make_engine(folder, "bfloat16", loading=Loading(dummy=True))

    def generated(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 32:
            start = 0 if len(tokens) == len(prompt) else len(tokens) - 1
            tokens.append(int(logits(engine, row(tokens, start)).argmax()))
        return tokens[len(prompt) :]

    one, other = generated(TOKENS[:20]), generated(TOKENS[30:50])
    assert len(set(one)) > 12 and one[-8:] != other[-8:]
    assert generated(TOKENS[:20]) == one
