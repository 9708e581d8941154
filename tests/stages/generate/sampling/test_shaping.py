"""Bias, penalties and what may come out: what transformers' processors and OpenAI's formula give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from pipeline.events import SamplingParams
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling.masks import packed
from stages.generate.sampling.sampler import sample
from stages.generate.sampling.shaping import shape
from stages.generate.schedule.plan import NOT_A_NUMBER, Sample
from stages.generate.schedule.seen import Seen

NEVER = float("-inf")
PROMPT, OUTPUT = [1, 2, 2, 5], [3, 3, 7, 2]


def how(forbidden: tuple[int, ...] = (), **params: Any) -> Sample:
    return after(PROMPT, OUTPUT, forbidden, **params)


def after(prompt: list[int], output: list[int], forbidden: tuple[int, ...] = (), **params: Any) -> Sample:
    """Return how the token after *prompt* and *output* is drawn."""
    tokens = [*prompt, *output]
    seen = Seen(len(prompt)).follow(tokens, len(tokens))
    return Sample(SamplingParams(**params), len(tokens), forbidden, prompt_length=len(prompt), seen=seen)


def shaped(logits_RV: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    changed_RV = logits_RV.clone()
    shape(changed_RV, range(len(samples)), samples)
    return changed_RV


def logits(rows: int = 1, vocab_size: int = 10, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits_RV = logits()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*PROMPT, *OUTPUT]]), logits_RV.clone())
    torch.testing.assert_close(shaped(logits_RV, [how(repetition_penalty=penalty)]), theirs)


def test_the_bias_is_that_of_transformers() -> None:
    logits_RV = logits()
    theirs = SequenceBiasLogitsProcessor([[[4], -100.0], [[9], 7.5]])(torch.tensor([PROMPT]), logits_RV.clone())
    torch.testing.assert_close(shaped(logits_RV, [how(logit_bias=((4, -100.0), (9, 7.5)))]), theirs)


def test_presence_and_frequency_follow_the_formula_of_openai_over_the_output_alone() -> None:
    logits_RV = logits()
    counts = Counter(OUTPUT)
    expected = [
        logit - counts[token] * 0.75 - (counts[token] > 0) * -1.5 for token, logit in enumerate(logits_RV[0].tolist())
    ]
    found = shaped(logits_RV, [how(frequency_penalty=0.75, presence_penalty=-1.5)])[0]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert found[5] == logits_RV[0, 5], "the prompt alone has it"


@pytest.mark.parametrize(
    ("forbidden", "allowed", "left"),
    [
        ((), (3, 8, 99), {3, 8}),
        ((3, 5), (3, 8), {8}),
        ((3, 8), (3, 8), {3, 8}),  # to forbid all tokens forbids none
    ],
)
def test_what_is_allowed_and_not_forbidden_comes_out(
    forbidden: tuple[int, ...], allowed: tuple[int, ...], left: set[int]
) -> None:
    row = shaped(logits(), [how(forbidden, allowed_token_ids=allowed)])[0]
    assert {token for token, logit in enumerate(row.tolist()) if logit > NEVER} == left


def test_rows_are_shaped_each_by_itself_and_others_stay() -> None:
    logits_RV = logits(6)
    rows = [how((3,)), how(), how(logit_bias=((4, 50.0),)), how(repetition_penalty=1.5, presence_penalty=1.0)]
    rows += [how((2, 2), frequency_penalty=0.5), how(tuple(range(10)), allowed_token_ids=(2, 4))]
    together = shaped(logits_RV, rows)
    for index, row in enumerate(rows):
        assert torch.equal(together[index : index + 1], shaped(logits_RV[index : index + 1], [row]))
    some = logits_RV.clone()
    shape(some, [2, 5], rows)
    for index, expected in enumerate((logits_RV, logits_RV, together, logits_RV, logits_RV, together)):
        assert torch.equal(some[index], expected[index])


def test_a_row_that_is_still_computed_after_it_failed_and_left_changes_no_other_row() -> None:
    logits_RV = logits(3)
    left = after([1], [2, NOT_A_NUMBER], repetition_penalty=2.0, presence_penalty=2.0)
    assert torch.equal(shaped(logits_RV, [how(), left, how()])[[0, 2]], logits_RV[[0, 2]])
    assert torch.equal(shaped(logits_RV, [left, how(), how()])[1:], logits_RV[1:])


def test_bfloat16_logits_are_shaped_in_float32() -> None:
    logits_RV = torch.tensor([[100.0, 99.5]]).bfloat16()  # of which the one after 100 is 100.5
    samples = [how(temperature=0, logit_bias=((0, -0.25), (1, 0.125))), how(temperature=0, logit_bias=((1, 0.625),))]
    assert sample(logits_RV.expand(2, -1), samples) == [0, 1]


@pytest.mark.parametrize("params", [{"logit_bias": ((-1, 5.0),)}, {"allowed_token_ids": (3, -1)}])
def test_a_negative_token_is_no_token(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        SamplingParams(**params)


def bound(*allowed: int, forbidden: tuple[int, ...] = (), **params: Any) -> Sample:
    """Return a row with a grammar that allows some tokens."""
    return replace(how(forbidden, **params), allowed=packed(np.isin(np.arange(10), allowed)))


@pytest.mark.parametrize(
    ("sample", "left"),
    [
        (bound(1, 4), {1, 4}),
        (bound(1, 4, logit_bias=((4, -100.0), (5, 100.0))), {1, 4}),
        (bound(1, 4, allowed_token_ids=(4, 5, 99)), {4}),
        (bound(1, 4, allowed_token_ids=(5, 6)), {1, 4}),
        (bound(1, 4, forbidden=(4, 5, -1, 99)), {1}),
        (bound(1, 4, forbidden=(1, 4)), {1, 4}),
        (bound(1, 4, 5, forbidden=(4,), allowed_token_ids=(4,)), {4}),
        (bound(1, 4, repetition_penalty=2.0, presence_penalty=2.0), {1, 4}),
    ],
)
def test_what_a_grammar_does_not_allow_never_comes_out(sample: Sample, left: set[int]) -> None:
    logits_RV = logits(rows=3)
    free, other = how(logit_bias=((3, 1.0),)), how((7,), allowed_token_ids=(6, 7))
    found = shaped(logits_RV, [free, sample, other])
    assert {token for token, logit in enumerate(found[1].tolist()) if logit != NEVER} == left
    torch.testing.assert_close(found[[0, 2]], shaped(logits_RV[[0, 2]], [free, other]))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_token_that_a_grammar_allows_is_drawn_with_kernels_and_without(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(sampling, "functions", lambda: None)
    for temperature, more in ((0, {}), (1, {}), (2, {"top_k": 3}), (1, {"top_p": 0.1}), (1, {"typical_p": 0.5})):
        rows = [bound(2, 8, temperature=temperature, seed=seed, **more) for seed in range(20)]
        tokens = sample(logits(rows=20), rows)
        assert set(tokens) == {2, 8}, (temperature, more)
