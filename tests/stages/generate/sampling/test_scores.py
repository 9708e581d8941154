"""Log-probabilities of prompts and answers are transformers', however the rows of the steps were cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, make_engine, reference_model
from support.schedules import make_schedule, steps

from pipeline.events import SamplingParams, Score, TokenRow
from stages.generate.forward.engine import Engine
from stages.generate.sampling import scores as scores_module
from stages.generate.sampling.scores import LEAST, scores_of
from stages.generate.schedule.plan import BatchPlan, Computed, RowScores
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Schedule

PROMPT = random.Random(3).choices(range(4, 480), k=61)
OTHER = random.Random(4).choices(range(4, 480), k=23)
NUM_TOP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


def theirs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logprobs_TV."""
    with torch.inference_mode():
        logprobs_TV: torch.Tensor = reference_model(folder)(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs_TV


def assert_equal(scores: list[Score], logprobs_NV: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    assert len(scores) == len(logprobs_NV) == len(token_ids) > 0
    for score, logprobs_V, token in zip(scores, logprobs_NV, token_ids, strict=True):
        best = logprobs_V.topk(num_top)
        assert score.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-4)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def schedule_of(budget: int = 64) -> Schedule:
    return make_schedule("radix", num_pages=64, context=128, prefill=budget, mixed=budget, running=4)


def run(engine: Engine, budget: int = 64, **requests: tuple[list[int], SamplingParams]) -> dict[str, list[TokenRow]]:
    """Run requests through a schedule; return the rows of each."""
    schedule = schedule_of(budget)
    for uid, (prompt, sampling) in requests.items():
        assert schedule.add(NewRequest(uid, tuple(prompt), (), sampling)) is None
    said = [row for _, _, rows in steps(schedule, engine.forward) for row in rows]
    return {uid: [row for row in said if row.uid == uid] for uid in requests}


def of_prompt(rows: list[TokenRow]) -> list[Score]:
    """Return the scores of a prompt, which the first token brings."""
    assert all(row.prompt_scores is None for row in rows[1:])
    return list(rows[0].prompt_scores or ())


@pytest.mark.parametrize("budget", [7, 64])
def test_a_prompts_scores_are_those_of_transformers_in_chunks_or_whole(
    engine: Engine, folder: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "AT_ONCE", 5)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=NUM_TOP)
    said = run(engine, budget, one=(PROMPT, params), other=(OTHER, params.model_copy(update={"prompt_logprobs": 0})))
    assert_equal(of_prompt(said["one"]), theirs(folder, PROMPT)[:-1], PROMPT[1:], NUM_TOP)
    assert_equal(of_prompt(said["other"]), theirs(folder, OTHER)[:-1], OTHER[1:], 0)


def test_the_scores_of_an_answer_are_of_the_models_own_logits_however_its_tokens_were_drawn(
    engine: Engine, folder: Path
) -> None:
    wild = {"seed": 7, "max_tokens": 9, "logit_bias": ((9, 5.0),), "repetition_penalty": 1.5}
    params = SamplingParams(temperature=1.5, logprobs=NUM_TOP, **wild)  # type: ignore[arg-type]
    said = run(engine, wild=(PROMPT, params), plain=(OTHER, SamplingParams(temperature=0, max_tokens=5)))
    tokens, scores = [row.token for row in said["wild"]], [row.score for row in said["wild"] if row.score is not None]
    assert len(set(tokens)) > 1
    assert_equal(scores, theirs(folder, PROMPT + tokens)[len(PROMPT) - 1 : -1], tokens, NUM_TOP)
    assert not any(row.score for row in said["plain"]), "nobody asked"


def test_a_prompt_with_scores_reads_no_page_of_the_cache(engine: Engine) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1)
    asked = plain.model_copy(update={"prompt_logprobs": 0})
    schedule = schedule_of()
    starts: list[list[int]] = []
    for uid, sampling in (("first", plain), ("again", plain), ("asked", asked), ("last", plain)):
        schedule.add(NewRequest(uid, tuple(PROMPT), (), sampling))
        ((plan, _, rows),) = steps(schedule, engine.forward)
        starts.append([row.start for row in plan.rows])
    assert starts == [[0], [60], [0], [60]] and rows[0].prompt_scores is None


def test_a_prompt_that_was_preempted_before_its_first_token_is_scored_once() -> None:
    schedule, targets = schedule_of(budget=8), list[tuple[int, ...]]()
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    schedule.add(NewRequest("a", tuple(PROMPT[:12]), (), sampling))

    def forward(plan: BatchPlan) -> Computed:
        """A token's score is minus the token."""
        (row,) = plan.rows
        targets.append(row.scoring.targets if row.scoring else ())
        scores = RowScores((Score(logprob=-1),), tuple(Score(logprob=-token) for token in targets[-1]))
        return Computed([7] * (row.sample is not None), {row.table: scores})

    assert next(steps(schedule, forward, most=1))[2] == []
    schedule.start_over()
    rows = [row for _, _, rows in steps(schedule, forward) for row in rows]
    assert targets == [tuple(PROMPT[1:9]), tuple(PROMPT[1:9]), tuple(PROMPT[9:12]), ()]
    assert of_prompt(rows) == [Score(logprob=-token) for token in PROMPT[1:12]] and len(rows) == 2


def test_tokens_that_the_client_named_are_told_instead_of_the_most_probable_ones(engine: Engine, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, logprob_token_ids=(9, 3), prompt_logprobs=1)
    rows = run(engine, one=(PROMPT, params))["one"]
    tokens = [row.token for row in rows]
    logprobs_NV = theirs(folder, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    for row, logprobs_V in zip(rows, logprobs_NV, strict=True):
        assert row.score is not None and row.score.logprob == pytest.approx(float(logprobs_V[row.token]), abs=1e-4)
        assert [token for token, _ in row.score.top] == [9, 3]
        assert [logprob for _, logprob in row.score.top] == pytest.approx(logprobs_V[[9, 3]].tolist(), abs=1e-4)
    assert [len(score.top) for score in of_prompt(rows)] == [1] * (len(PROMPT) - 1), "those of the prompt stay"


def test_a_token_that_the_model_does_not_have_has_no_score() -> None:
    ((token, logprob),) = scores_of(torch.tensor([[0.0, 0.0]]), [1], 0, (7, 0))[0].top
    assert token == 0 and logprob == pytest.approx(-0.693147)
    assert scores_of(torch.tensor([[0.0, 0.0]]), [1], 2, (7,))[0].top == ()


def test_minus_infinity_is_told_as_a_number() -> None:
    (score,) = scores_of(torch.tensor([[0.0, float("-inf"), 1.0]]), [1], 3)
    assert score.logprob == LEAST and score.top[0][0] == 2 and score.top[-1] == (1, LEAST)
