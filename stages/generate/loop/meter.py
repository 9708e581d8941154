"""The metrics of an engine's loop, counted from plans and rows. The schedule does not know them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.events import Admitted, EventRow, Preempted, StepCompleted, StepRow, TakenOver, TokenRow
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    ACCEPTED_TOKENS,
    CACHE_CONFIG,
    DRAFT_TOKENS,
    GENERATION_SPEED,
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    NUM_PREEMPTIONS,
    NUM_RUNNING,
    NUM_WAITING,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    STEP_SECONDS,
    STEP_TOKENS,
    TAKEOVERS,
)
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.schedule import Schedule
from stages.generate.setup.resolve import Settings

PERIOD_S: Final = 1.0
"""Shortest period over which the speed of an engine is measured, unless the engine becomes idle before."""


class EngineMeter:
    """Counts the steps of one engine."""

    def __init__(
        self, measures: Measures, schedule: Schedule, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._measures = measures
        self._schedule = schedule
        self._clock_s = clock_s
        self._since_s: float | None = None
        """Time when the measured period began; None: the engine is idle."""
        self._num_made = 0
        """Number of tokens since then."""
        self._was_measured = False
        """Whether a period was measured since the engine was idle."""
        for gauge in (NUM_RUNNING, NUM_WAITING, KV_CACHE_USAGE, GENERATION_SPEED):
            measures.set(gauge, 0)  # the process may still show the values of the slot that it held before

    def planned(self, marks: Sequence[StepRow]) -> None:
        """Count the look-ups in the prefix cache.

        As in vLLM, a request that had tokens before does not count: it finds its own pages again.
        """
        for mark in marks:
            if mark.n == 0 and isinstance(mark, EventRow) and isinstance(mark.event, Admitted):
                self._measures.add(PREFIX_QUERIES, amount=self._schedule.num_tokens(mark.uid))
                self._measures.add(PREFIX_HITS, amount=mark.event.cached_tokens)

    def computed(self, plan: BatchPlan) -> None:
        """Count the prompts that a plan completed. A prompt counts once even if it was preempted."""
        samples = (row.sample for row in plan.rows[plan.num_decode_rows :])
        lengths = (sample.prompt_length for sample in samples if sample and sample.position == sample.prompt_length)
        self._measures.add(PROMPT_TOKENS, amount=sum(lengths))

    def committed(self, step: StepCompleted) -> None:
        """Count the rows of a step, and set the gauges to what the engine holds after it."""
        tokens = 0
        for row in step.rows:
            if isinstance(row, TokenRow):
                tokens += 1
            elif isinstance(row.event, Preempted):
                self._measures.add(NUM_PREEMPTIONS)
            elif isinstance(row.event, TakenOver):
                self._measures.add(TAKEOVERS)
        figures = step.figures
        self._measures.add(GENERATION_TOKENS, amount=tokens)
        if figures.drafts:
            accepted = sum(row.accepted or 0 for row in step.rows if isinstance(row, TokenRow))
            self._measures.add(DRAFT_TOKENS, amount=figures.drafts)
            self._measures.add(ACCEPTED_TOKENS, amount=accepted)
        if figures.forward_ms:
            self._measures.observe(STEP_SECONDS, figures.forward_ms / 1000)
            self._measures.observe(STEP_TOKENS, tokens + figures.prefill_tokens)
        self._measure_speed(tokens, goes_on=bool(figures.running or figures.waiting))
        self._measures.set(NUM_RUNNING, figures.running)
        self._measures.set(NUM_WAITING, figures.waiting)
        self._measures.set(KV_CACHE_USAGE, 1 - figures.free_pages / self._schedule.num_pages)

    def _measure_speed(self, num_tokens: int, *, goes_on: bool) -> None:
        """Count the tokens of a step. Leave out the first step after idle time: its duration is not known."""
        now_s = self._clock_s()
        if self._since_s is None:
            self._since_s, self._num_made, self._was_measured = now_s, 0, False
            lasted_s = 0.0
        else:
            self._num_made += num_tokens
            lasted_s = now_s - self._since_s
        if lasted_s >= PERIOD_S or (lasted_s and not goes_on and not self._was_measured):
            self._measures.set(GENERATION_SPEED, self._num_made / lasted_s)
            self._since_s, self._num_made, self._was_measured = now_s, 0, True
        if not goes_on:
            self._since_s = None


def measure_cache(measures: Measures, settings: Settings) -> None:
    """Publish the settings of the cache, with vLLM's labels and words."""
    dtype, shares = str(settings.dtype).removeprefix("torch."), settings.cache != "naive"
    measures.set(CACHE_CONFIG, 1, str(settings.page_size), dtype, str(shares), str(settings.num_pages))
