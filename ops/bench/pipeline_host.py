"""What the host does for each step of an engine, without a model: plan it, lay it out as tensors, and complete it."""

from __future__ import annotations

import torch

from ops.bench.pipeline_way import PAGE_SIZE, IdleEngine, length_of, step_times_alone
from stages.generate.batch import PageTables, build_batch
from stages.generate.schedule.plan import BatchPlan, Computed


class PackingEngine(IdleEngine):
    """A Forward that lays a plan out as tensors, and computes nothing."""

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        super().__init__(0.0)
        self._tables = PageTables(num_rows, length_of(num_tokens), PAGE_SIZE)

    def forward(self, plan: BatchPlan) -> Computed:
        """As IdleEngine.forward."""
        computed = super().forward(plan)
        self._tables.update(plan.rows)
        build_batch(plan, self._tables, torch.device("cpu"))
        return computed


def host_times_us(num_rows: int, num_tokens: int) -> list[float]:
    """Return the host's time for each step that decodes *num_rows* requests of *num_tokens* tokens."""
    return step_times_alone(num_rows, num_tokens, PackingEngine(num_rows, num_tokens))
