"""In whose company a request was computed, step by step, and why its tokens were late.

A pure fold of its history and of the journals of its engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import Any, Final

from pipeline.events import Admitted, Preempted, TakenOver
from pipeline.log.journal import JournalStep
from pipeline.names import parse_id
from pipeline.views.recorded import History
from pipeline.views.waits import Wait, why_waited

MOST_WAITS: Final = 1000
"""So many waits are told, the longest."""
LATE: Final = 2.0
"""A token is late if it took so many times as long as the median."""
SOON_MS: Final = 5
"""Shorter waits are not late."""


class Company:
    """Takes the steps of the engines of one request, and tells what they were to it."""

    def __init__(self, history: History) -> None:
        self._uid = history.uid
        self._late = late_tokens(history)
        self._estimated = {token.n: token.made.ms for token in history.tokens[1:] if token.made.is_estimate}
        self._steps: list[dict[str, Any]] = []
        self._companions: list[tuple[str, ...]] = []
        """Of each of these steps."""
        self._between: dict[str, list[JournalStep]] = {}
        """The steps of each engine since its last one with a token of the request."""
        self._waits: list[Wait] = []
        self._missing = {(token.by.engine, token.step) for token in history.tokens}

    @property
    def companions(self) -> list[str]:
        """The uids of all others that were computed together with it, in the order of their coming."""
        return list(dict.fromkeys(uid for uids in self._companions for uid in uids))

    def take(self, engine: str, step: JournalStep) -> None:
        """Take the next step of *engine*."""
        between = self._between.setdefault(engine, [])
        between.append(replace(step, rows=(), schedule="", inputs=()))
        chunks = {chunk.uid: chunk.count for chunk in step.chunks}
        row = next((row for row in step.rows if row.uid == self._uid), None)
        if row is None and self._uid not in chunks and all(event.uid != self._uid for event in step.events):
            return
        self._tell(engine, step, row.n if row is not None else 0, chunks.get(self._uid, 0))
        others = dict.fromkeys([*(each.uid for each in step.rows), *chunks])
        self._companions.append(tuple(uid for uid in others if uid != self._uid))
        if row is not None:
            self._missing.discard((engine, step.id))
            since_ms = self._late.get(row.n)
            if since_ms is not None:
                those = [each for each in between if each.made_ms > since_ms or each.id == step.id]
                self._waits.append(why_waited(those, self._uid, row.n, since_ms, self._estimated.get(row.n)))
            between.clear()

    def plain(self, name: Callable[[str], str | int]) -> dict[str, Any]:
        """Return what is known as plain data. *name* says how another request is called: by its uid, or a number."""
        steps: list[dict[str, Any]] = []
        before: tuple[str, ...] | None = None
        both = sorted(zip(self._steps, self._companions, strict=True), key=lambda each: each[0]["ms"])
        for step, uids in both:
            steps.append(step if uids == before else step | {"companions": [name(uid) for uid in uids]})
            before = uids
        longest = sorted(self._waits, key=lambda wait: -wait.waited_ms)[:MOST_WAITS]
        waits = [
            {"n": wait.n, "waited_ms": wait.waited_ms, "why": wait.reasons}
            for wait in sorted(longest, key=lambda wait: wait.n)
        ]
        return {"uid": self._uid, "complete": not self._missing, "steps": steps, "waits": waits}

    def _tell(self, engine: str, step: JournalStep, n: int, prompt_tokens: int) -> None:
        figures = step.figures
        told: dict[str, Any] = {
            "id": step.id,
            "engine": engine,
            "ms": step.ms,
            "made_ms": step.made_ms,
            "forward_ms": figures.forward_ms,
            "rows": figures.decode_rows + figures.prefill_rows,
            "tokens": figures.decode_rows + figures.prefill_tokens,
            "waiting": figures.waiting,
            "pages_free": figures.free_pages,
        }
        told |= {"n": n} if n else {}
        told |= {"prompt_tokens": prompt_tokens} if prompt_tokens else {}
        self._steps.append(told)


def late_tokens(history: History) -> dict[int, int]:
    """Return the numbers of the tokens that the engine made late, and since when. The first token always is."""
    if history.submitted is None or not history.tokens:
        return {}
    made = [(token.n, token.made.ms) for token in history.tokens]
    pauses = [(n, since_ms, now_ms - since_ms) for (_, since_ms), (n, now_ms) in pairwise(made)]
    usual_ms = median_low(pause_ms for _, _, pause_ms in pauses) if pauses else 0
    least_ms = max(LATE * usual_ms, SOON_MS)
    late = {n: since_ms for n, since_ms, pause_ms in pauses if pause_ms > least_ms}
    return {1: history.submitted.ms} | late


def spans_of(history: History) -> Mapping[str, tuple[str, str]]:
    """Return engine -> the ids of the first and of the last step that it made for the request; a running one goes on,
    to `+`.
    """
    ids: dict[str, list[str]] = {}
    engine = ""
    for moment in history.walk():
        match moment.event:
            case Admitted() | Preempted() as event:
                engine = event.engine
                ids.setdefault(engine, []).append(f"{event.epoch}-{event.step}")
            case TakenOver() as event:
                engine = event.engine
    for token in history.tokens:
        if token.by.engine:
            ids.setdefault(token.by.engine, []).append(token.step)
    spans = {slot: (min(steps, key=parse_id), max(steps, key=parse_id)) for slot, steps in ids.items()}
    if engine in spans and history.end is None:
        spans[engine] = spans[engine][0], "+"
    return spans
