"""Plans made by hand: just enough of a schedule for tests of an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

PAGE_SIZE, NUM_PAGES = 4, 128
GREEDY = SamplingParams(temperature=0)


@dataclass
class Request:
    """Takes the pages of `pool` as it grows."""

    table: int
    tokens: list[int]
    pool: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    params: SamplingParams = GREEDY
    page_size: int = PAGE_SIZE

    def row(self, count: int) -> PlanRow:
        start, end = self.computed, min(self.computed + count, len(self.tokens))
        first = len(self.pages)
        new = tuple(self.pool.pop() for _ in range(-(-end // self.page_size) - first))
        self.pages += new
        self.computed = end
        sample = Sample(self.params, end, ()) if end == len(self.tokens) else None
        return PlanRow(self.table, start, tuple(self.tokens[start:end]), new, first, sample)


def plan(*rows: PlanRow) -> BatchPlan:
    return BatchPlan(0, rows, sum(len(row.token_ids) == 1 for row in rows))


def shuffled_pages(seed: int = 0, num_pages: int = NUM_PAGES) -> list[int]:
    return random.Random(seed).sample(range(num_pages), num_pages)


def generate(engine: Engine, request: Request, count: int, chunk: int) -> list[int]:
    """Return *count* tokens of one request alone, its prompt in chunks."""
    begin = len(request.tokens)
    while len(request.tokens) < begin + count:
        request.tokens += engine.forward(plan(request.row(chunk))).token_ids
    return request.tokens[begin:]
