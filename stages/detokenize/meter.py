"""The metrics of a detokenizer: times of requests by Redis' clock, taken from the events that the fold returns.

The fold has no clock and does not know the meter. The meter learns and forgets a request when the fold does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.events import Failed, Finished, StepCompleted, Submitted, TokensProduced
from pipeline.log.protocol import Produced
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    BETWEEN_TOKENS_SECONDS,
    DECODE_SECONDS,
    FIRST_TOKEN_SECONDS,
    INFERENCE_SECONDS,
    PER_TOKEN_SECONDS,
    PREFILL_SECONDS,
    QUEUE_SECONDS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SECONDS,
    REQUEST_SUCCESS,
)
from pipeline.names import SEAL
from pipeline.walk import Moment


@dataclass(slots=True)
class _Times:
    """Times of a running request, in milliseconds."""

    submitted_ms: int
    token_ms: int = 0
    """Time of its last token; 0 before the first."""


class DetokenizeMeter:
    """The requests of one engine."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._requests: dict[str, _Times] = {}

    @property
    def num_known(self) -> int:
        """Number of requests that are remembered."""
        return len(self._requests)

    def learn(self, uid: str, history: Iterable[Moment]) -> None:
        """Start where the history of a request ends."""
        times: _Times | None = None
        for entry_id, _, event, _ in history:
            if isinstance(event, Submitted):
                times = _Times(event.ms)
            elif entry_id == SEAL:
                times = None
            elif isinstance(event, TokensProduced) and times is not None:
                times.token_ms = event.ms
        if times is None:
            self._requests.pop(uid, None)
        else:
            self._requests[uid] = times

    def committed(self, step: StepCompleted, produced: Sequence[Produced]) -> None:
        """Count a step once it is in the histories."""
        gaps: dict[int, int] = {}  # most rows of a step have the same gap
        for item in produced:
            event = item.event
            if isinstance(event, TokensProduced):
                times = self._requests.get(item.uid)
                if times is None:
                    continue
                if times.token_ms:
                    gap_ms = step.ms - times.token_ms
                    gaps[gap_ms] = gaps.get(gap_ms, 0) + 1
                    gaps[0] = gaps.get(0, 0) + event.count - 1
                else:
                    self._measures.observe(FIRST_TOKEN_SECONDS, _seconds(step.ms - times.submitted_ms))
                times.token_ms = step.ms
            elif isinstance(event, Finished):
                self._requests.pop(item.uid, None)
                self._finished(event)
            elif isinstance(event, Failed):
                self._requests.pop(item.uid, None)
                self.failed()
        for gap_ms, count in gaps.items():
            if count:
                self._measures.observe(BETWEEN_TOKENS_SECONDS, _seconds(gap_ms), times=count)
        for uid in step.released:
            self._requests.pop(uid, None)

    def failed(self) -> None:
        """Count a request that ended with an error."""
        self._measures.add(REQUEST_SUCCESS, "error")

    def forget(self, step: StepCompleted) -> None:
        """Forget the requests of a step that was not committed, or was committed by another worker."""
        for row in step.rows:
            self._requests.pop(row.uid, None)

    def forget_all(self) -> None:
        """Forget every request, as DetokenizeFold.forget_all does."""
        self._requests.clear()

    def _finished(self, event: Finished) -> None:
        usage, timings, observe = event.usage, event.timings, self._measures.observe
        self._measures.add(REQUEST_SUCCESS, event.reason)
        decode_s = _seconds(timings.total_ms - timings.first_token_ms)
        observe(REQUEST_SECONDS, _seconds(timings.total_ms))
        observe(QUEUE_SECONDS, _seconds(timings.admitted_ms))
        observe(PREFILL_SECONDS, _seconds(timings.first_token_ms - timings.admitted_ms))
        observe(DECODE_SECONDS, decode_s)
        observe(INFERENCE_SECONDS, _seconds(timings.total_ms - timings.admitted_ms))
        observe(REQUEST_PROMPT_TOKENS, usage.prompt_tokens)
        observe(REQUEST_GENERATION_TOKENS, usage.completion_tokens)
        if usage.completion_tokens > 1:
            observe(PER_TOKEN_SECONDS, decode_s / (usage.completion_tokens - 1))


def _seconds(ms: int) -> float:
    """Return *ms* in seconds; 0 if Redis' clock went back, as after a failover, because a sum must never decrease."""
    return max(ms, 0) / 1000
