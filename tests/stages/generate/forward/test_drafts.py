"""Requests get the same tokens with drafts, right ones and wrong ones, as without: the same bits of logits, too."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import WINDOW, make_checkpoint, make_engine
from support.kernel_variants import DTYPES, VARIANTS

from pipeline.events import SamplingParams, TokenRow
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, LocalLayers
from stages.generate.loop.grammars import GrammarMatcher, Grammars
from stages.generate.loop.updates import Arrived
from stages.generate.model.config import read_spec
from stages.generate.model.ends import end_tokens
from stages.generate.schedule.request import NewRequest, Request
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

NIGHT = bool(os.environ.get("MINISGL_NIGHT"))
NUM_REQUESTS = 500 if NIGHT else 60
CONTEXT, PAGE_SIZE, NUM_PAGES = 160, 4, 120
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
}
GRAMMARS = (
    'start: "{\\"" /name|title/ "\\": \\"" /[a-z ]{0,12}/ "\\", \\"number of things\\": " /[0-9]{1,4}/ "}"',
    "start: /[a-f]{3}( [a-f]{3}){0,9}/",
    'start: "the same words again and again, the same words again and again" /[.!]/',
)
Told = tuple[int, object, object]
"""Token, end and score."""


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = KINDS[request.param]
    made, layers = tmp_path_factory.mktemp(request.param), len(sizes.get("layer_types", "12"))
    return make_checkpoint(made, request.param, num_layers=layers, max_positions=CONTEXT, sizes=sizes)


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    spec = read_spec(folder)
    made = Grammars(folder, end_tokens(folder, spec), spec.vocab_size)
    yield made
    made.close()


def random_requests(chance: random.Random, count: int, vocab_size: int) -> list[NewRequest]:
    """Return requests with all that decides which token follows."""
    made = []
    for number in range(count):
        words = [chance.randrange(vocab_size) for _ in range(chance.randrange(1, 9))]
        prompt = [token for _ in range(chance.randrange(1, 6)) for token in (*words, chance.choice(words))]
        greedy = chance.random() < 0.4
        sampling = SamplingParams(
            temperature=0 if greedy else chance.choice([0.1, 0.7, 1.0, 1.5]),
            top_p=chance.choice([1, 0.9]),
            top_k=chance.choice([0, 0, 5]),
            min_p=chance.choice([0, 0.05]),
            typical_p=chance.choice([1, 1, 1, 0.9]),
            seed=number,
            max_tokens=chance.randrange(1, 50),
            min_tokens=chance.choice([0, 0, 6]),
            stop_token_ids=tuple(chance.sample(range(vocab_size), chance.choice([0, 3]))),
            ignore_eos=chance.random() < 0.5,
            presence_penalty=chance.choice([0, 0, 0.5]),
            frequency_penalty=chance.choice([0, 0, 0.3, -0.5]),
            repetition_penalty=chance.choice([1, 1, 1.2]),
            logprobs=chance.choice([None, None, 0, 3]),
            prompt_logprobs=chance.choice([None, None, None, 1]),
        )
        bad_words = [tuple(chance.choices(words, k=chance.choice([1, 2]))) for _ in range(chance.choice([0, 0, 2]))]
        grammar = chance.choice(GRAMMARS) + '\n%llguidance {"no_forcing": true}' if chance.random() < 0.3 else ""
        prediction = tuple(chance.choices(words, k=chance.choice([0, 0, 12])))
        made.append(
            NewRequest(
                *(f"{number}", tuple(prompt), (), sampling, 0, tuple(bad_words)), grammar=grammar, prediction=prediction
            )
        )
    return made


class Forced(Schedule):
    """A schedule with drafts that are right up to some token, by what the request drew without any, and then wrong."""

    chance: random.Random
    known: dict[str, list[Told]]

    def _drafts_for(self, request: Request, streams: int, row_cost: int) -> Sequence[int]:
        most = min(self.chance.randrange(9), request.limit - 1 - len(request.token_ids))
        coming = [token for token, *_ in self.known[request.uid][request.num_output :]]
        num_right = self.chance.randrange(9)
        drafts = [*coming[:num_right], *(self.chance.randrange(90) for _ in range(8))][: max(most, 0)]
        if request.matcher is None:
            return drafts
        return request.matcher.draft(drafts, most)[0] if most > 0 else ()


def matcher_of(grammars: Grammars, one: NewRequest) -> GrammarMatcher:
    grammars.begin(Arrived(one, resumed=False))
    while not (found := grammars.ready()):
        grammars.wait(1)
    ((_, result),) = found
    assert isinstance(result, GrammarMatcher), result
    return result


def lived(
    schedule: Schedule, engine: Engine, requests: Sequence[NewRequest], grammars: Grammars, *, row_cost: int | None
) -> tuple[dict[str, list[Told]], int, int]:
    """Compute all requests, a few at a time; return what was told of each, and the numbers of steps and drafts."""
    told: dict[str, list[Told]] = {one.uid: [] for one in requests}
    waiting, num_steps, num_drafts = list(requests), 0, 0
    while waiting or schedule.num_running or schedule.num_waiting:
        while waiting and schedule.num_running + schedule.num_waiting < 5:
            one = waiting.pop(0)
            matcher = matcher_of(grammars, one) if one.grammar else None
            assert schedule.add(replace(one, matcher=matcher)) is None
        planned = schedule.plan(8, row_cost)
        assert planned is not None
        computed = engine.wait(engine.launch(planned[0], None))
        computed.fits(planned[0])
        assert schedule.misfits() == []
        rows = schedule.complete(computed.token_ids, computed.scores)
        assert schedule.problems() == []
        num_steps, num_drafts = num_steps + 1, num_drafts + planned[0].num_drafts
        for row in rows:
            assert isinstance(row, TokenRow) and row.n == len(told[row.uid]) + 1
            told[row.uid].append((row.token, row.end, (row.score, row.prompt_scores)))
    return told, num_steps, num_drafts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS if NIGHT else VARIANTS[-1:])
def test_drafts_change_no_token_no_end_and_no_score(folder: Path, grammars: Grammars, variant: str, dtype: str) -> None:
    spec = read_spec(folder)
    local = NO_LOCAL_LAYERS
    if len(parts := spec.page_parts()) > 1:
        local = LocalLayers(len(parts) - 1, WINDOW, 16)
    quantization = "int8" if dtype == "int8" else "none"
    engine = make_engine(
        folder,
        "bfloat16" if dtype == "int8" else dtype,
        kernels=variant,
        quantization=quantization,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_seq_len=CONTEXT,
        has_parts=local.num_parts > 0,
    )
    eos_ids = end_tokens(folder, spec)
    chance = random.Random(f"{folder.name[:4]} {variant} {dtype}")
    requests = random_requests(chance, NUM_REQUESTS, spec.vocab_size)

    def empty(kind: type[Schedule] = Schedule) -> Any:
        limits = ScheduleLimits(CONTEXT, 16, 8, max_running_requests=4, vocab_size=spec.vocab_size, most_drafts=8)
        return kind(make_cache("radix", NUM_PAGES, PAGE_SIZE, local), limits, eos_ids, Identity("generate-0", 1, ""))

    without, most_steps, no_drafts = lived(empty(), engine, requests, grammars, row_cost=None)
    drafted, fewer_steps, num_drafts = lived(empty(), engine, requests, grammars, row_cost=0)
    assert drafted == without and no_drafts == 0 < num_drafts and fewer_steps < most_steps
    forced = empty(Forced)
    forced.chance, forced.known = chance, without
    told, num_steps, num_drafts = lived(forced, engine, requests, grammars, row_cost=0)
    assert told == without and num_drafts > 300 and num_steps < 0.9 * most_steps
