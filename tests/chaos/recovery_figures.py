"""The effect of a killed engine on streams: how long each paused, why, and whether every answer is whole.

Folds frames and histories; starts nothing and sends nothing.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson
from chaos.quiet import read_story

from ops.bench import report
from ops.bench.load import DONE, Arrival, read_stream, timed_frames
from ops.bench.targets import SideFailed
from ops.sse_reader import Frame
from pipeline.errors import UndecodableEvent
from pipeline.events import Finished, TakenOver, Tokenized, TokensProduced, decode
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, parse_id

SLACK_S: Final = 0.5
"""How long a pause may be in addition to lease, start and prefill."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The time between two frames, by the clock of the arrivals."""

    began_s: float
    ended_s: float
    length_s: float
    """Shorter than from begin to end if tokens without text came in between."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """When and from where the next engine continued a request, by its history. Redis' clock."""

    taken_over_ms: int
    next_token_ms: int
    tokens_before: int
    tokens_again: int
    """Tokens of prompt and output that had to be computed again."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One stream. Times are from the kill on, in seconds, or lengths."""

    uid: str
    pause_s: float
    """Shorter than from begin to end if tokens without text came in between."""
    pause_began_s: float
    pause_ended_s: float
    later_pause_s: float
    """The longest pause after the stream continued."""
    ended_s: float
    taken_over_s: float | None
    resumed: Resumed | None
    """None: the stream was on the engine that lives."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A request that did not get exactly its tokens, once, and the reason."""

    uid: str
    what: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill. Times are from the kill on, in seconds, or lengths; None where there is no such thing."""

    streams: Sequence[StreamFigures]
    lease_s: float
    """How long the goal lets the lease take: 0 if the supervisor releases it."""
    ready_s: float | None
    """Until the new engine was ready; None if an engine that is ready takes over."""
    freed_s: float
    """Until the dead engine's lease was gone."""
    owner_s: float
    """Until the dead engine's slot had a new owner."""
    noticed_s: float | None
    """Until the supervisor logged the death."""
    load_s: float | None
    """How much of the start was loading the model, by the engine's log."""
    alone_tokens_per_s: float
    """Prompt tokens per second of an engine that does nothing else."""
    problems: Sequence[Problem]
    """Requests that did not get exactly their tokens, once."""

    @property
    def start_s(self) -> float:
        """How long the goal lets the start take."""
        return self.ready_s or 0.0

    @property
    def hit(self) -> list[tuple[StreamFigures, Resumed]]:
        """The streams of the engine that died."""
        return [(one, one.resumed) for one in self.streams if one.resumed is not None]

    @property
    def longest_pause_s(self) -> float:
        return max(one.pause_s for one, _ in self.hit)

    @property
    def median_pause_s(self) -> float:
        return statistics.median(one.pause_s for one, _ in self.hit)

    @property
    def longest_other_pause_s(self) -> float | None:
        """The longest pause of a stream on the engine that lives, which also computes the other engine's streams."""
        return max((one.pause_s for one in self.streams if one.resumed is None), default=None)

    @property
    def later_pause_s(self) -> float:
        """The longest pause of any stream after it continued: the kill is not its reason."""
        return max(one.later_pause_s for one in self.streams)

    @property
    def taken_over_s(self) -> float:
        """Until the new engine began with the streams in flight."""
        return min(one.taken_over_s for one, _ in self.hit if one.taken_over_s is not None)

    def prefill_for_s(self, resumed: Resumed) -> float:
        """Return how long a stream waited for its next token after the engine began to compute all of them again."""
        return (resumed.next_token_ms - min(again.taken_over_ms for _, again in self.hit)) / 1000

    @property
    def prefill_s(self) -> float:
        """Until every stream had its next token."""
        return max(self.prefill_for_s(again) for _, again in self.hit)

    @property
    def tokens_again(self) -> int:
        return sum(again.tokens_again for _, again in self.hit)

    @property
    def alone_s(self) -> float:
        """How long these tokens would take if nothing ran beside them."""
        return self.tokens_again / self.alone_tokens_per_s

    def allowed_for_s(self, resumed: Resumed) -> float:
        """Return how long the pause of this stream may be."""
        return self.lease_s + self.start_s + self.prefill_for_s(resumed) + SLACK_S

    @property
    def worst(self) -> tuple[StreamFigures, Resumed]:
        """The stream that misses the goal by most, or meets it by least."""
        return max(self.hit, key=lambda one: one[0].pause_s - self.allowed_for_s(one[1]))

    @property
    def allowed_s(self) -> float:
        return self.allowed_for_s(self.worst[1])

    @property
    def beyond_s(self) -> float:
        """How much longer the worst stream's pause is than allowed; below 0 if it is shorter."""
        return self.worst[0].pause_s - self.allowed_s


FIGURES: Final = {
    "longest_pause_s": "longest pause",
    "median_pause_s": "median pause",
    "longest_other_pause_s": "longest pause of the others",
    "later_pause_s": "longest pause later on",
    "noticed_s": "kill to: supervisor notices",
    "freed_s": "kill to: lease is free",
    "owner_s": "kill to: slot has an owner",
    "ready_s": "kill to: engine is ready",
    "load_s": "  of it loading the model",
    "taken_over_s": "kill to: first is taken over",
    "prefill_s": "from there to the last's token",
    "alone_s": "  these tokens, computed alone",
    "allowed_s": "allowed (worst stream)",
    "beyond_s": "beyond that",
}
"""The printed figures of a run, in seconds."""


def token_times_ms(history: Sequence[Entry]) -> dict[int, int]:
    """Return when each token was committed, n -> Redis' clock. The end counts as one token more."""
    times: dict[int, int] = {}
    for entry in history:
        match decode(entry.fields):
            case TokensProduced(ms=ms):
                times[parse_id(entry.id)[0]] = ms
            case Finished(n=n, ms=ms):
                times[n + 1] = ms
            case _:
                pass
    return times


def pauses_of(frames: Iterable[tuple[float, Frame]], times_ms: Mapping[int, int]) -> list[Pause]:
    """Return the times between the frames that have an id: each is the last one that its event makes.

    A character may be many tokens long, and only its last token makes a frame. The time between two frames is then the
    time of several tokens. Only the longest of these counts as the pause.
    """
    last = max(times_ms, default=0)
    numbered = [(came_s, last if frame.id == SEAL else parse_id(frame.id)[0]) for came_s, frame in frames if frame.id]
    found = []
    for (before_s, before), (after_s, after) in pairwise(numbered):
        times = [times_ms[n] for n in range(before, after + 1) if n in times_ms]
        steps_ms = [later - earlier for earlier, later in pairwise(times)]
        silent_s = (sum(steps_ms) - max(steps_ms, default=0)) / 1000
        found.append(Pause(before_s, after_s, max(after_s - before_s - silent_s, 0.0)))
    return found


def longest_pause(pauses: Sequence[Pause], killed_s: float, resumed_s: float = math.inf) -> Pause | None:
    """Return the longest pause that ended after the kill and began before the stream continued, or None.

    A later pause has other reasons.
    """
    around = [pause for pause in pauses if pause.ended_s > killed_s and pause.began_s < resumed_s]
    return max(around, key=lambda pause: pause.length_s, default=None)


def longest_later_s(pauses: Sequence[Pause], resumed_s: float) -> float:
    """Return the longest pause after a stream continued; 0 if there is none."""
    return max((pause.length_s for pause in pauses if pause.began_s >= resumed_s), default=0.0)


def resumed(history: Sequence[Entry], killed_ms: float) -> Resumed | None:
    """Return how a request continued that was taken over after the kill; None if it was not taken over."""
    prompt_tokens, n, taken_over_ms = 0, 0, None
    for entry in history:
        match decode(entry.fields):
            case Tokenized(token_ids=ids):
                prompt_tokens = len(ids)
            case TakenOver(ms=ms) if ms > killed_ms and taken_over_ms is None:
                taken_over_ms = ms
            case TokensProduced(ms=ms, count=count):
                if taken_over_ms is not None:
                    return Resumed(taken_over_ms, ms, n, prompt_tokens + n)
                n += count
            case _:
                pass
    return None


def what_is_wrong(arrivals: Sequence[Arrival], history: Sequence[Entry], output_tokens: int) -> str:
    """Return why an answer is not exactly *output_tokens* tokens, once, for its client and in its history; or ""."""
    answer = read_stream(0.0, arrivals)
    if answer.error:
        return answer.error
    chunks = [frame.data for _, frame in timed_frames(arrivals)]
    num_done = chunks.count(DONE)
    choices = [choice for chunk in chunks if chunk != DONE for choice in orjson.loads(chunk).get("choices") or ()]
    num_ends = sum(choice.get("finish_reason") is not None for choice in choices)
    if (num_ends, num_done) != (1, 1):
        return f"{num_ends} last chunks and {num_done} [DONE], expected one of each"
    if answer.output_tokens != output_tokens:
        return f"its usage says {answer.output_tokens} tokens, {output_tokens} were asked"
    try:
        story = read_story(history)
    except UndecodableEvent as error:
        return f"its history is wrong: {error}"
    if len(story.tokens) != output_tokens:
        return f"its history has {len(story.tokens)} tokens, {output_tokens} were asked"
    if len(answer.text) != len(story.text):
        return f"its client read {len(answer.text)} characters, its history has {len(story.text)}"
    return "" if answer.text == story.text else "its client read another text than its history has"


def logged_since(log_file: Path, killed_ms: float, slot: str) -> tuple[float | None, float | None]:
    """Return how many seconds after the kill the supervisor logged the death of *slot*, and how long the load took."""
    noticed_s = load_s = None
    for line in log_file.read_text(errors="replace").splitlines():
        with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
            entry = orjson.loads(line)
            since_s = datetime.fromisoformat(entry["timestamp"]).timestamp() - killed_ms / 1000
            if since_s >= 0 and entry["event"] == "worker_died" and entry["worker"] == slot and noticed_s is None:
                noticed_s = since_s
            if since_s >= 0 and entry["event"] == "engine_loaded" and load_s is None:
                load_s = float(entry["seconds"])
    return noticed_s, load_s


def must_have_hit(recovery: Recovery) -> None:
    """Refuse a run without a result.

    Raises:
        SideFailed: No stream was taken over.
    """
    if not recovery.hit:
        wrong = f"; {recovery.problems[0].what}" if recovery.problems else ""
        raise SideFailed(f"the engine was killed, but nothing was taken over: it had no stream{wrong}")


def figures(run: Recovery) -> dict[str, Any]:
    """Return the figures of a run, by name."""
    return {name: getattr(run, name) for name in (*FIGURES, "start_s", "tokens_again")}


def medians(runs: Sequence[Recovery]) -> dict[str, float | None]:
    """Return the median of each figure; None if a run lacks it."""
    columns = {name: [figures(run)[name] for run in runs] for name in figures(runs[0])}
    return {name: None if None in values else statistics.median(values) for name, values in columns.items()}


def table(runs: Sequence[Recovery]) -> str:
    """Return a table with a line for each figure, and a column for each run and for the medians."""
    middle = medians(runs)
    rows = [("s", *(f"run {number}" for number in range(1, len(runs) + 1)), "median")]
    for name, title in (FIGURES | {"tokens_again": "tokens computed again"}).items():
        values = [*(getattr(run, name) for run in runs), middle[name]]
        form = ",.0f" if name == "tokens_again" else ".2f"
        if any(value is not None for value in values):
            rows.append((title, *("-" if value is None else f"{value:{form}}" for value in values)))
    return report.aligned(rows)


def verdict(runs: Sequence[Recovery]) -> str:
    """Return in one line whether the median run meets the goal; of two runs the worse one counts."""
    run = sorted(runs, key=lambda one: one.beyond_s)[len(runs) // 2]
    stream, again = run.worst
    prefill_s = run.prefill_for_s(again)
    parts = f"lease {run.lease_s:.2f} + start {run.start_s:.2f} + prefill {prefill_s:.2f} + {SLACK_S:.2f} s"
    beyond_s = run.beyond_s
    outcome = f"met, {-beyond_s:.2f} s to spare" if beyond_s <= 0 else f"missed by {beyond_s:.2f} s"
    return f"goal: a pause of at most {parts} = {run.allowed_s:.2f} s; it was {stream.pause_s:.2f} s: {outcome}"


def failures(problems: Sequence[Problem], num_requests: int) -> str:
    """Return in one line how many requests were not whole, with an example of each kind; empty if all were whole."""
    examples = {problem.what: problem.uid for problem in reversed(problems)}
    kinds = report.most_common([f"{problem.what} (as {examples[problem.what]})" for problem in problems])
    return kinds and f"{len(problems)} of {num_requests} requests did not get exactly their tokens, once: {kinds}"
