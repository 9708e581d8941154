"""What an engine did in its last steps, and what waits there, from its journal. A pure fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.errors import UndecodableEvent
from pipeline.events import Preempted
from pipeline.log.journal import outline
from pipeline.log.protocol import Entry


@dataclass(frozen=True, slots=True)
class StepsView:
    """Some steps of an engine, up to its last one."""

    engine: str
    at_ms: int
    """When the last one was committed, by Redis' clock."""
    num_steps: int
    median_ms: float
    """Of the forward passes."""
    longest_ms: float
    decode_rows: int
    """Requests that got a token in the last one, besides those with a prompt."""
    num_prompts: int
    """Prompts of which something was computed in any of them."""
    prompt_tokens: int
    preempted: int
    """Requests that lost their pages in any of them."""
    waiting: int
    """Requests that the engine could not admit, after the last one."""
    free_pages: int


def last_steps(engine: str, entries: Sequence[Entry]) -> StepsView | None:
    """Return what *entries*, the last ones of a journal, tell; None if there are none, or if they cannot be read."""
    try:
        steps = [outline(entry) for entry in entries]
    except UndecodableEvent:
        return None
    if not steps:
        return None
    times_ms = [step.figures.forward_ms for step in steps]
    chunks = [chunk for step in steps for chunk in step.chunks]
    last = steps[-1]
    return StepsView(
        engine=engine,
        at_ms=last.ms,
        num_steps=len(steps),
        median_ms=median(times_ms),
        longest_ms=max(times_ms),
        decode_rows=last.figures.decode_rows,
        num_prompts=len({chunk.uid for chunk in chunks}),
        prompt_tokens=sum(chunk.count for chunk in chunks),
        preempted=sum(isinstance(row.event, Preempted) for step in steps for row in step.events),
        waiting=last.figures.waiting,
        free_pages=last.figures.free_pages,
    )
