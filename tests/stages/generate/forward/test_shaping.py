"""Bias, penalties and what may come out: what transformers' processors and OpenAI's formula give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from pipeline.events import SamplingParams
from stages.generate.forward.sampler import sample
from stages.generate.forward.shaping import shaped
from stages.generate.schedule.plan import Sample

NEVER = float("-inf")
PROMPT, OUTPUT = [1, 2, 2, 5], [3, 3, 7, 2]


def how(forbidden: tuple[int, ...] = (), **params: Any) -> Sample:
    tokens = [*PROMPT, *OUTPUT]
    return Sample(SamplingParams(**params), len(tokens), forbidden, tokens, len(PROMPT))


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


def test_bias_comes_before_the_penalties() -> None:
    logits_RV = torch.tensor([[0.0, -1.0, 4.0]])
    row = Sample(SamplingParams(logit_bias=((1, 3.0),), repetition_penalty=2.0), 1, (), [1], 1)
    assert shaped(logits_RV, [row])[0].tolist() == [0.0, 1.0, 4.0]


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


def test_a_bias_for_a_token_that_the_vocabulary_lacks_changes_nothing() -> None:
    logits_RV = logits()
    assert torch.equal(shaped(logits_RV, [how(logit_bias=((10, 100.0),))]), logits_RV)


def test_rows_are_shaped_each_by_itself_and_the_logits_stay() -> None:
    logits_RV = logits(3)
    before_RV = logits_RV.clone()
    rows = [how(), how(logit_bias=((4, 50.0),)), how(repetition_penalty=1.5)]
    together = shaped(logits_RV, rows)
    for index, row in enumerate(rows):
        assert torch.equal(together[index : index + 1], shaped(before_RV[index : index + 1], [row]))
    assert torch.equal(logits_RV, before_RV) and shaped(logits_RV, [how()] * 3) is logits_RV


def test_bfloat16_logits_are_shaped_in_float32() -> None:
    logits_RV = torch.tensor([[100.0, 1.0]]).bfloat16()  # of which the next one is 100.5
    assert shaped(logits_RV, [how(logit_bias=((0, 0.125),))])[0, 0] == 100.125


def test_a_greedy_row_is_shaped_too() -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 0.0, 1.5]])
    assert sample(logits_RV, [how(temperature=0)]) == [1]
    assert sample(logits_RV, [how(temperature=0, logit_bias=((3, 1.0),))]) == [3]
    once = Sample(SamplingParams(temperature=0, presence_penalty=0.6), 2, (), [0, 1], 1)
    assert sample(logits_RV, [once]) == [3]


@pytest.mark.parametrize("params", [{"logit_bias": ((-1, 5.0),)}, {"allowed_token_ids": (3, -1)}])
def test_a_negative_token_is_no_token(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        SamplingParams(**params)
