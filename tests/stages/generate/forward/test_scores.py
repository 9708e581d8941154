"""Log-probabilities of prompts and answers are transformers', however the rows of the steps were cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM

from pipeline.events import SamplingParams, Score
from stages.generate.forward import scores as scores_module
from stages.generate.forward.engine import Engine
from stages.generate.forward.scores import LEAST, scores_of
from stages.generate.kvcache import make_cache
from stages.generate.model.checkpoint import check_folder
from stages.generate.schedule.plan import RowScores
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

PROMPT = random.Random(3).choices(range(4, 480), k=61)
OTHER = random.Random(4).choices(range(4, 480), k=23)
PAGE_SIZE, NUM_PAGES, CONTEXT = 4, 64, 128
NUM_TOP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(
        check_folder(folder),
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_running_requests=4,
        max_seq_len=CONTEXT,
    )


def theirs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logprobs_TV."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        logprobs_TV: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs_TV


def assert_equal(scores: list[Score], logprobs_NV: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    assert len(scores) == len(logprobs_NV) == len(token_ids) > 0
    for score, logprobs_V, token in zip(scores, logprobs_NV, token_ids, strict=True):
        best = logprobs_V.topk(num_top)
        assert score.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-4)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def run(engine: Engine, budget: int, **requests: tuple[list[int], SamplingParams]) -> dict[str, dict[str, list[Score]]]:
    """Run requests through a schedule; return the scores of each one's prompt and answer, and its tokens."""
    limits = ScheduleLimits(CONTEXT, budget, budget, max_running_requests=4, vocab_size=512)
    cache = make_cache("radix", NUM_PAGES, PAGE_SIZE)
    schedule = Schedule(cache, limits, (), Identity("generate-0", 1, "f"))
    said: dict[str, dict[str, list[Score]]] = {uid: {"prompt": [], "answer": [], "tokens": []} for uid in requests}
    for uid, (prompt, sampling) in requests.items():
        assert schedule.add(NewRequest(uid, tuple(prompt), (), sampling)) is None
    while (planned := schedule.plan()) is not None:
        computed = engine.forward(planned[0])
        for row in schedule.complete(computed.token_ids, computed.scores):
            said[row.uid]["prompt"] += row.prompt_scores or ()
            said[row.uid]["answer"] += () if row.score is None else (row.score,)
            said[row.uid]["tokens"].append(row.token)  # type: ignore[arg-type]
    return said


@pytest.mark.parametrize("budget", [7, 64])
def test_a_prompts_scores_are_those_of_transformers_in_chunks_or_whole(
    engine: Engine, folder: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "AT_ONCE", 5)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=NUM_TOP)
    said = run(engine, budget, one=(PROMPT, params), other=(OTHER, params.model_copy(update={"prompt_logprobs": 0})))
    assert_equal(said["one"]["prompt"], theirs(folder, PROMPT)[:-1], PROMPT[1:], NUM_TOP)
    assert_equal(said["other"]["prompt"], theirs(folder, OTHER)[:-1], OTHER[1:], 0)


def test_the_scores_of_an_answer_are_of_the_models_own_logits_however_its_tokens_were_drawn(
    engine: Engine, folder: Path
) -> None:
    wild = {"seed": 7, "max_tokens": 9, "logit_bias": ((9, 5.0),), "repetition_penalty": 1.5}
    params = SamplingParams(temperature=1.5, logprobs=NUM_TOP, **wild)  # type: ignore[arg-type]
    said = run(engine, 64, wild=(PROMPT, params), plain=(OTHER, SamplingParams(temperature=0, max_tokens=5)))
    tokens: list[int] = said["wild"]["tokens"]  # type: ignore[assignment]
    assert len(set(tokens)) > 1
    assert_equal(said["wild"]["answer"], theirs(folder, PROMPT + tokens)[len(PROMPT) - 1 : -1], tokens, NUM_TOP)
    assert said["plain"]["answer"] == [], "nobody asked"


def test_a_prompt_with_scores_reads_no_page_of_the_cache(engine: Engine, folder: Path) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1)
    asked = plain.model_copy(update={"prompt_logprobs": 0})
    limits = ScheduleLimits(CONTEXT, 64, 64, max_running_requests=4, vocab_size=512)
    schedule = Schedule(make_cache("radix", NUM_PAGES, PAGE_SIZE), limits, (), Identity("generate-0", 1, "f"))
    starts: list[list[int]] = []
    for uid, sampling in (("first", plain), ("again", plain), ("asked", asked), ("last", plain)):
        schedule.add(NewRequest(uid, tuple(PROMPT), (), sampling))
        planned = schedule.plan()
        assert planned is not None
        starts.append([row.start for row in planned[0].rows])
        computed = engine.forward(planned[0])
        rows = schedule.complete(computed.token_ids, computed.scores)
    assert starts == [[0], [60], [0], [60]]
    assert rows[0].prompt_scores is None and schedule.problems() == []


def test_a_prompt_that_was_preempted_before_its_first_token_is_scored_once() -> None:
    limits = ScheduleLimits(CONTEXT, 8, 8, max_running_requests=4, vocab_size=512)
    schedule = Schedule(make_cache("radix", NUM_PAGES, PAGE_SIZE), limits, (), Identity("generate-0", 1, "f"))
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    schedule.add(NewRequest("a", tuple(PROMPT[:12]), (), sampling))

    def step() -> list[tuple[int, ...]]:
        planned = schedule.plan()
        assert planned is not None
        targets = [row.scoring.targets for row in planned[0].rows if row.scoring is not None]
        scores = {
            row.table: RowScores(
                Score(logprob=-1) if row.sample else None,
                tuple(Score(logprob=-token) for token in (row.scoring.targets if row.scoring else ())),
            )
            for row in planned[0].rows
        }
        self_rows.extend(schedule.complete([7] * sum(row.sample is not None for row in planned[0].rows), scores))
        return targets

    self_rows: list[object] = []
    assert step() == [tuple(PROMPT[1:9])]
    schedule.start_over()
    assert step() == [tuple(PROMPT[1:9])]
    assert step() == [tuple(PROMPT[9:12])]
    assert step() == [], "the second token has nothing to say of the prompt"
    first, second = self_rows
    assert first.prompt_scores == tuple(Score(logprob=-token) for token in PROMPT[1:12])  # type: ignore[attr-defined]
    assert second.prompt_scores is None  # type: ignore[attr-defined]


def test_minus_infinity_is_told_as_a_number() -> None:
    (score,) = scores_of(torch.tensor([[0.0, float("-inf"), 1.0]]), [1], 3)
    assert score.logprob == LEAST and score.top[0][0] == 2 and score.top[-1] == (1, LEAST)
