"""A step of the kernels refuses what cannot be, and what is not a number fails alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, make_engine
from support.kernel_variants import VARIANTS
from support.plans import Request, plan, shuffled_pages

from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.schedule.plan import PlanRow

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")

VOCABULARY = 497
TOKENS = random.Random(6).choices(range(4, 400), k=21)
NOT_A_NUMBER = 401
"""A token whose embedding is NaN."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_checkpoint(tmp_path_factory.mktemp("steps"), "qwen3", tie=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][NOT_A_NUMBER] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return make_engine(folder, kernels=VARIANTS[-1])


def test_a_token_beyond_the_vocabulary_is_refused(engine: Engine) -> None:
    row = Request(0, list(TOKENS), shuffled_pages()).row(64)
    for token, error in ((VOCABULARY, ValueError), (-1, ValueError), (2**40, OverflowError)):
        with pytest.raises(error, match=r"497|greater than maximum"):
            engine.forward(plan(replace(row, token_ids=(*row.token_ids[:5], token))))


def test_a_page_that_does_not_exist_is_refused(engine: Engine) -> None:
    row = Request(0, list(TOKENS), shuffled_pages()).row(64)
    for page in (128, -1):
        with pytest.raises(ValueError, match=r"row 0 .* 128"):
            engine.forward(plan(replace(row, new_pages=(*row.new_pages[:-1], page))))


@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_that_is_not_a_number_fails_alone_and_leaves_no_trace(engine: Engine, greedy: bool) -> None:
    pool = shuffled_pages()
    sick, sound = Request(0, [*TOKENS, NOT_A_NUMBER], pool), Request(1, list(TOKENS), pool)
    rows = [sick.row(64), sound.row(64)]
    if not greedy:
        how = rows[0].sample
        assert how is not None
        rows[0] = replace(rows[0], sample=replace(how, params=how.params.model_copy(update={"temperature": 1.0})))
    with pytest.raises(ArithmeticError):
        engine.forward(plan(*rows))
    assert how_many_tokens(engine, *rows) == 1, "whoever waits sees which row it is"
    with pytest.raises(ArithmeticError):
        engine.forward(plan(rows[0]))
    alone = engine.forward(plan(rows[1])).token_ids
    again = Request(0, list(TOKENS), list(sick.pages))
    assert engine.forward(plan(again.row(64))).token_ids == alone, "pages that held NaN serve the next request"


def how_many_tokens(engine: Engine, *rows: PlanRow) -> int:
    """Return how many rows get a token, and a score, which is asked for here."""
    scored = [replace(row, sample=replace(row.sample, params=SamplingParams(logprobs=1))) for row in rows if row.sample]
    computed = engine.wait(engine.launch(plan(*scored), None))
    tokens = [token for token in computed.token_ids if token != -1]
    assert len(computed.token_ids) == len(rows) and len(computed.scores) == len(tokens)
    return len(tokens)


@pytest.mark.parametrize("kernels", ["torch", VARIANTS[-1] if VARIANTS else ""])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_largest_logit_is_infinite_fails(tmp_path: Path, kernels: str, temperature: float) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", tie=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[402, 403]] = 0
    weights["lm_head.weight"][[402, 403], 0] = torch.tensor([float("inf"), float("-inf")])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=temperature, allowed_token_ids=(7,))
    row = Request(0, list(TOKENS), shuffled_pages(), params=params).row(64)
    with pytest.raises(ArithmeticError):
        make_engine(folder, kernels=kernels).forward(plan(row))


@pytest.mark.parametrize("last", [1, 3])
def test_threads_share_a_row_of_few_queries_whose_pages_are_larger_than_a_segment(tmp_path: Path, last: int) -> None:
    folder = make_checkpoint(tmp_path, "llama3", max_positions=4096)
    prompt = random.Random(7).choices(range(4, 400), k=2600)
    found = []
    for threads in (1, 3):
        sizes: dict[str, Any] = {"num_pages": 4, "page_size": 2048, "max_seq_len": 4096}
        engine = make_engine(folder, kernels=VARIANTS[-1], threads=threads, **sizes)
        request = Request(0, list(prompt), [2, 0], page_size=2048)
        for count in (len(prompt) - last, last):
            logits_RV = engine.logits(plan(request.row(count)))
        found.append(logits_RV)
    assert torch.equal(*found)
