"""Measures what bfloat16 and int8 change: `python -m ops.demo_model.precision`.

Our engine answers and scores held-out questions with the demo model, and computes logits of a random one, in float32,
bfloat16 and int8. All three begin with the weights of the checkpoint, which are in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ops.bench.models import CheckpointConfig
from ops.bench.report import aligned, cpu_model
from ops.demo_model.evaluate import FAMILIES, ROOM, Examiner
from ops.demo_model.tokens import STOP
from ops.offline import LLM, Completion
from pipeline.events import SamplingParams
from pipeline.flags import parse_config
from stages.generate.forward.engine import Engine
from stages.generate.loop.worker import Loaded, load
from stages.generate.model.checkpoint import DEMO_FOLDER
from stages.generate.model.spec import read_spec
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample, Scoring
from stages.generate.setup.config import GenerateConfig

# R = rows that sample, V = vocabulary

PRECISIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
"""The flags of each."""
GREEDY: Final = SamplingParams(temperature=0)
NUM_PAGES: Final = 128
NUM_PROMPTS, PROMPT_TOKENS = 32, 64
"""Of the random model."""


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question and its right answer, as tokens."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """With the end-of-sequence token."""
    answer: str


def questions(folder: Path, number: int) -> list[Question]:
    """Return *number* questions of each family."""
    examiner = Examiner(folder)
    return [
        Question(examiner.ids(each.prompt), examiner.ids(each.expected + STOP), each.expected)
        for family in FAMILIES
        for each in examiner.questions(family, number)
    ]


def answers(folder: Path, asked: Sequence[Question], precision: str, threads: int) -> list[Completion]:
    """Return the greedy answers."""
    params = [GREEDY.model_copy(update={"max_tokens": len(each.answer_ids) + ROOM}) for each in asked]
    with LLM(folder, threads=threads, num_pages=NUM_PAGES, **PRECISIONS[precision]) as llm:
        return llm.generate([each.prompt_ids for each in asked], params, progress=False)


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def loaded(folder: Path, precision: str, threads: int) -> Loaded:
    """Return the engine."""
    flags = [f"--{name}={value}" for name, value in PRECISIONS[precision].items()]
    flags += ["--threads", str(threads), "--num-pages", str(NUM_PAGES), "--device", "cpu"]
    return load(parse_config("stage generate", GenerateConfig, flags, {}), folder, lambda progress: None)


def cross_entropy(engine: Loaded, asked: Sequence[Question]) -> float:
    """Return the mean cross entropy of the right answers after their questions, in nats per token."""
    nats, num_tokens = 0.0, 0
    for each in asked:
        ids = (*each.prompt_ids, *each.answer_ids)
        row = PlanRow(0, 0, ids[:-1], _pages(engine, 0, len(ids)), 0, None, Scoring(ids[1:], 0))
        scores = engine.engine.forward(BatchPlan(0, (row,), 0)).scores[0].prompt
        nats -= sum(score.logprob for score in scores[-len(each.answer_ids) :])
        num_tokens += len(each.answer_ids)
    return nats / num_tokens


def logits(engine: Loaded, vocab_size: int) -> Tensor:
    """Return logits_RV after random tokens."""
    generator = random.Random(0)
    rows = [
        PlanRow(
            table,
            0,
            tuple(generator.choices(range(vocab_size), k=PROMPT_TOKENS)),
            _pages(engine, table, PROMPT_TOKENS),
            0,
            Sample(GREEDY, PROMPT_TOKENS, ()),
        )
        for table in range(NUM_PROMPTS)
    ]
    assert isinstance(engine.engine, Engine)
    return engine.engine.logits(BatchPlan(0, tuple(rows), 0))


def _pages(engine: Loaded, table: int, num_tokens: int) -> tuple[int, ...]:
    """Return pages for a row of *num_tokens*, where all rows have as many."""
    count = -(-num_tokens // engine.settings.page_size)
    return tuple(range(table * count, (table + 1) * count))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m ops.demo_model.precision", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="checkpoint that was trained as the demo model")
    parser.add_argument("--random", default="95m", help="checkpoint of random weights, as --model of `bench compare`")
    parser.add_argument("--number", type=int, default=50, help="questions per family")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    asked, folder = questions(given.model, given.number), CheckpointConfig(given.random).folder(os.environ)
    vocab_size = read_spec(folder).vocab_size
    rows = [("", "right answers", "tokens as in float32", "nats per token", "error of logits")]
    for precision in PRECISIONS:
        told = answers(given.model, asked, precision, given.threads)
        logits_RV = logits(loaded(folder, precision, given.threads), vocab_size)
        if precision == "float32":
            exact, exact_RV = told, logits_RV
        num_right = sum(one.text == each.answer for one, each in zip(told, asked, strict=True))
        same = sum(num_equal(one.token_ids, other.token_ids) for one, other in zip(told, exact, strict=True))
        rows.append(
            (
                precision,
                f"{num_right / len(asked):.2%}",
                f"{same / sum(len(one.token_ids) for one in exact):.2%}",
                f"{cross_entropy(loaded(given.model, precision, given.threads), asked):.6f}",
                f"{torch.linalg.norm(logits_RV - exact_RV) / torch.linalg.norm(exact_RV):.2%}",
            )
        )
    print(f"{len(asked)} held-out questions; {NUM_PROMPTS} random prompts for {folder.name}; {cpu_model()}\n")
    print(aligned(rows))


if __name__ == "__main__":
    main()
