"""The self-certifying model: what the shipped schedule makes of it is a chain, and every kind of damage breaks it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chaos.chain_model import CHAIN_TOKENS, ChainEngine, check_chain, make_chain_model, text_of, tokens_of

from pipeline.events import SamplingParams, Submitted
from stages.detokenize.text import IncrementalText
from stages.detokenize.worker import load_decoder
from stages.generate.kvcache.radix import RadixCache
from stages.generate.schedule.plan import BatchPlan, PlanRow
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits
from stages.tokenize.prompts import PromptEncoder

PAGE_SIZE = 4
NUM_TOKENS = 30
Damage = Callable[[BatchPlan], BatchPlan]


def prompts(count: int, *, shared: int = 9) -> list[tuple[int, ...]]:
    """Return prompts that begin with the same *shared* tokens."""
    draw = random.Random(count)
    head = tuple(draw.randrange(CHAIN_TOKENS) for _ in range(shared))
    return [head + tuple(draw.randrange(CHAIN_TOKENS) for _ in range(3 + number % 7)) for number in range(count)]


def generate(
    asked: Sequence[tuple[int, ...]], *, num_pages: int = 400, damage: Damage = lambda plan: plan
) -> tuple[list[list[int]], int]:
    """Run *asked* through the schedule and the engine; return their tokens, and how often one was preempted."""
    limits = ScheduleLimits(
        context=num_pages * PAGE_SIZE,
        max_prefill_length=16,
        mixed_prefill_length=5,
        max_running_requests=8,
        vocab_size=CHAIN_TOKENS,
    )
    schedule = Schedule(RadixCache(num_pages, PAGE_SIZE), limits, [], Identity("generate-0", 1, "chain"))
    engine = ChainEngine(num_pages=num_pages, page_size=PAGE_SIZE, max_running_requests=8)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(asked))}
    for uid, prompt in zip(tokens, asked, strict=True):
        assert schedule.add(NewRequest(uid, prompt, (), SamplingParams(max_tokens=NUM_TOKENS))) is None
    num_preempted = 0
    while (planned := schedule.plan()) is not None:
        plan, marks = planned
        num_preempted += sum(mark.kind == "event" and mark.event.kind == "preempted" for mark in marks)
        for row in schedule.complete(engine.forward(damage(plan)).token_ids):
            tokens[row.uid].append(row.token)
    assert {len(one) for one in tokens.values()} == {NUM_TOKENS}
    return list(tokens.values()), num_preempted


def test_what_the_schedule_makes_of_it_is_a_chain() -> None:
    asked = prompts(20)
    tokens, _ = generate(asked)
    assert [check_chain(prompt, one) for prompt, one in zip(asked, tokens, strict=True)] == [None] * 20


def test_a_request_that_is_preempted_and_recomputed_is_still_one_chain() -> None:
    asked = prompts(6)
    tokens, num_preempted = generate(asked, num_pages=30)
    assert num_preempted > 0
    assert [check_chain(prompt, one) for prompt, one in zip(asked, tokens, strict=True)] == [None] * 6


def test_a_chain_goes_on_behind_what_another_engine_made() -> None:
    (prompt,) = prompts(1)
    ((*tokens,),), _ = generate([prompt])
    ((*further,),), _ = generate([(*prompt, *tokens)])
    assert check_chain(prompt, [*tokens, *further]) is None


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("lost", lambda ours, theirs: [*ours[:7], *ours[8:]]),
        ("repeated", lambda ours, theirs: [*ours[:7], ours[6], *ours[7:]]),
        ("of another engine", lambda ours, theirs: [*ours[:7], theirs[7], *ours[8:]]),
        ("from there on of another engine", lambda ours, theirs: [*ours[:7], *theirs[7:]]),
        ("no link", lambda ours, theirs: [*ours[:7], CHAIN_TOKENS, *ours[8:]]),
    ],
)
def test_a_token_that_does_not_belong_there_breaks_the_chain(
    name: str, damaged: Callable[[list[int], list[int]], list[int]]
) -> None:
    (prompt,) = prompts(1)
    (ours,), _ = generate([prompt])
    (theirs,), _ = generate([prompt])
    found = check_chain(prompt, damaged(ours, theirs))
    assert found is not None and found >= 7, name


def test_another_prompt_breaks_it_at_once() -> None:
    first, second = prompts(2)
    (tokens, _), _ = generate([first, second])
    found = check_chain(second, tokens)
    assert found is not None and found < 3  # one link in 256 fits by chance


def _at_step(number: int, change: Callable[[list[PlanRow]], list[PlanRow]]) -> Damage:
    def damage(plan: BatchPlan) -> BatchPlan:
        return dataclasses.replace(plan, rows=tuple(change(list(plan.rows)))) if plan.step == number else plan

    return damage


def _swap_tables(rows: list[PlanRow]) -> list[PlanRow]:
    first, second, *others = rows
    return [dataclasses.replace(first, table=second.table), dataclasses.replace(second, table=first.table), *others]


def _swap_tokens(rows: list[PlanRow]) -> list[PlanRow]:
    first, second, *others = rows
    exchanged = [(first, second), (second, first)]
    return [*(dataclasses.replace(row, token_ids=other.token_ids) for row, other in exchanged), *others]


def _position_too_early(rows: list[PlanRow]) -> list[PlanRow]:
    return [dataclasses.replace(row, start=row.start - 1) for row in rows]


@pytest.mark.parametrize("change", [_swap_tables, _swap_tokens, _position_too_early])
def test_a_wrong_row_or_position_in_one_step_breaks_it(change: Callable[[list[PlanRow]], list[PlanRow]]) -> None:
    asked = prompts(4)
    tokens, _ = generate(asked, damage=_at_step(20, change))
    assert any(check_chain(prompt, one) is not None for prompt, one in zip(asked, tokens, strict=True))


def test_a_page_that_two_requests_write_to_breaks_it() -> None:
    asked = prompts(4)
    page: list[int] = []

    def damage(plan: BatchPlan) -> BatchPlan:
        rows = []
        for row in plan.rows:
            if row.new_pages and row.start and not page:
                page.append(row.new_pages[0])
            elif row.new_pages and row.start and len(row.new_pages) == 1:
                row = dataclasses.replace(row, new_pages=(page[0],))
            rows.append(row)
        return dataclasses.replace(plan, rows=tuple(rows))

    tokens, _ = generate(asked, damage=damage)
    assert any(check_chain(prompt, one) is not None for prompt, one in zip(asked, tokens, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chain_model(tmp_path_factory.mktemp("chain"))


def test_a_client_reads_the_tokens_off_the_text(folder: Path) -> None:
    tokens = [0, 1, 0xFFFF, 0xABCD, 7]
    encoder = PromptEncoder(folder)
    event = Submitted(endpoint="chat", frontend="web-0", prompt=text_of(tokens), sampling=SamplingParams())
    (prompt_ids,) = encoder.encode([encoder.render(event)])
    assert list(prompt_ids) == tokens
    text = IncrementalText(load_decoder(folder).plain, prompt_ids)
    shown = "".join(text.push(token) for token in tokens) + text.flush()
    assert tokens_of(shown) == tokens
