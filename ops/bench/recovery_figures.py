"""What a killed engine did to the streams: their pauses, what each was made of, and whether every answer is whole.

Folds frames and histories; starts and asks nothing.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson

from ops.bench import report
from ops.bench.load import Arrival, read_stream
from ops.bench.peers import SideFailed
from ops.bench.report import KINDS_OF_FAILURE_SHOWN
from pipeline.errors import UndecodableEvent
from pipeline.events import Finished, TakenOver, Tokenized, TokensProduced, decode
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, parse_id

SLACK_S: Final = 0.5
"""What a pause may take beside lease, start and prefill."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stream."""

    came_s: float
    entry_id: str
    """What its event has in the history; empty where the event makes more frames after this one."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """The time between two frames, by the clock of the arrivals."""

    began_s: float
    ended_s: float
    length_s: float
    """Less than that where tokens came in between that had nothing to show."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What the history of a request says of the engine that went on with it. Redis' clock."""

    taken_over_ms: int
    next_token_ms: int
    tokens_before: int
    tokens_again: int
    """Of prompt and output, that had to be computed again."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One stream. Times are from the kill on, in seconds, or lengths."""

    uid: str
    pause_s: float
    """Less than from its begin to its end where tokens came in between that had nothing to show."""
    pause_began_s: float
    pause_ended_s: float
    later_pause_s: float
    """The longest since it went on."""
    ended_s: float
    taken_over_s: float | None
    resumed: Resumed | None
    """None: it was on the engine that lives."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A request that did not get exactly its tokens, once, and in which way."""

    uid: str
    what: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill. Times are from the kill on, in seconds, or lengths; None where there is no such thing."""

    streams: Sequence[StreamFigures]
    lease_s: float
    """What the goal grants for the lease: nothing where the supervisor gives it back."""
    ready_s: float | None
    """Until the new engine was ready; None where another takes over, which is ready."""
    freed_s: float
    """Until the lease of the dead was gone."""
    owner_s: float
    """Until its slot had a new owner."""
    noticed_s: float | None
    """Until the supervisor said that it had died."""
    load_s: float | None
    """Of the start, what loading the model took, by the engine's own account."""
    alone_tokens_per_s: float
    """How fast the engine computes a prompt while it has nothing else to do."""
    problems: Sequence[Problem]
    """Requests that did not get exactly their tokens, once."""

    @property
    def start_s(self) -> float:
        """What the goal grants for the start."""
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
        """Of the streams whose engine lives, and computes what the other had as well."""
        return max((one.pause_s for one in self.streams if one.resumed is None), default=None)

    @property
    def later_pause_s(self) -> float:
        """The longest of any stream since it went on: what the kill is not the reason of."""
        return max(one.later_pause_s for one in self.streams)

    @property
    def taken_over_s(self) -> float:
        """Until the new engine began with what was in flight."""
        return min(one.taken_over_s for one, _ in self.hit if one.taken_over_s is not None)

    def prefill_for_s(self, resumed: Resumed) -> float:
        """Return how long a stream waited for its next token once the engine had begun: all are computed again."""
        return (resumed.next_token_ms - min(again.taken_over_ms for _, again in self.hit)) / 1000

    @property
    def prefill_s(self) -> float:
        """Until the last of them had its next token."""
        return max(self.prefill_for_s(again) for _, again in self.hit)

    @property
    def tokens_again(self) -> int:
        return sum(again.tokens_again for _, again in self.hit)

    @property
    def alone_s(self) -> float:
        """What these tokens would take if nothing ran beside them."""
        return self.tokens_again / self.alone_tokens_per_s

    def allowed_for_s(self, resumed: Resumed) -> float:
        """Return how long the pause of such a stream may be."""
        return self.lease_s + self.start_s + self.prefill_for_s(resumed) + SLACK_S

    @property
    def worst(self) -> tuple[StreamFigures, Resumed]:
        """The stream that is furthest beyond what its pause may be, or nearest to it."""
        return max(self.hit, key=lambda one: one[0].pause_s - self.allowed_for_s(one[1]))

    @property
    def allowed_s(self) -> float:
        return self.allowed_for_s(self.worst[1])

    @property
    def beyond_s(self) -> float:
        """By how much its pause is longer than it may be; below 0 where it is not."""
        return self.worst[0].pause_s - self.allowed_s


FIGURES: Final[Mapping[str, str]] = {
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
"""What is printed of a run, in seconds."""


def frames(arrivals: Sequence[Arrival]) -> list[Frame]:
    """Return all frames, each with the time of the piece that ended its last line."""
    found = []
    rest, entry_id = b"", ""
    for came_s, piece in arrivals:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"id":
                entry_id = value.strip().decode()
            elif name == b"data":
                found.append(Frame(came_s, entry_id, value.strip()))
                entry_id = ""
    return found


def token_times_ms(history: Sequence[Entry]) -> dict[int, int]:
    """Return when each token was committed, and as one more the end: n -> Redis' clock."""
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


def pauses_of(frames: Sequence[Frame], times_ms: Mapping[int, int]) -> list[Pause]:
    """Return the times between the frames.

    A character may be many tokens long, and those before its last one make no frame. Of the time between two frames
    only the longest between two tokens is a pause; what the other tokens took is not.
    """
    last = max(times_ms, default=0)
    numbered = [
        (frame.came_s, last if frame.entry_id == SEAL else parse_id(frame.entry_id)[0])
        for frame in frames
        if frame.entry_id
    ]
    found = []
    for (before_s, before), (after_s, after) in pairwise(numbered):
        times = [times_ms[n] for n in range(before, after + 1) if n in times_ms]
        steps_ms = [later - earlier for earlier, later in pairwise(times)]
        silent_s = (sum(steps_ms) - max(steps_ms, default=0)) / 1000
        found.append(Pause(before_s, after_s, max(after_s - before_s - silent_s, 0.0)))
    return found


def longest_pause(pauses: Sequence[Pause], killed_s: float, resumed_s: float = math.inf) -> Pause | None:
    """Return the longest pause around the kill; None where there is none.

    It ended after the kill and began before the stream went on: what comes later has other reasons.
    """
    around = [pause for pause in pauses if pause.ended_s > killed_s and pause.began_s < resumed_s]
    return max(around, key=lambda pause: pause.length_s, default=None)


def longest_later_s(pauses: Sequence[Pause], resumed_s: float) -> float:
    """Return the longest pause of a stream that has gone on; 0 where there is none."""
    return max((pause.length_s for pause in pauses if pause.began_s >= resumed_s), default=0.0)


def resumed(history: Sequence[Entry], killed_ms: float) -> Resumed | None:
    """Return how a request went on that was taken over after the kill; None where that did not happen."""
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
    """Return in what an answer is not exactly *output_tokens* tokens, once, for its client and in its history."""
    answer = read_stream(0.0, arrivals)
    if answer.error:
        return answer.error
    chunks = [frame.data for frame in frames(arrivals)]
    num_done = chunks.count(b"[DONE]")
    choices = [choice for chunk in chunks if chunk != b"[DONE]" for choice in orjson.loads(chunk).get("choices") or ()]
    num_ends = sum(choice.get("finish_reason") is not None for choice in choices)
    if (num_ends, num_done) != (1, 1):
        return f"{num_ends} last chunks and {num_done} [DONE], expected one of each"
    if answer.output_tokens != output_tokens:
        return f"its usage says {answer.output_tokens} tokens, {output_tokens} were asked"
    try:
        text = _text_told(history, output_tokens)
    except UndecodableEvent as error:
        return str(error)
    if len(answer.text) != len(text):
        return f"its client read {len(answer.text)} characters, its history has {len(text)}"
    return "" if answer.text == text else "its client read another text than its history has"


def _text_told(history: Sequence[Entry], output_tokens: int) -> str:
    """Return the text of a history.

    Raises:
        UndecodableEvent: A token is missing or there twice, or it did not finish with *output_tokens* of them.
    """
    n, texts, last = 0, [], "nothing"
    for entry in history:
        event = decode(entry.fields)
        last = event.kind
        if isinstance(event, TokensProduced):
            if parse_id(entry.id) != (n + event.count, 0) or event.count != len(event.tokens):
                raise UndecodableEvent(f"after {n} tokens comes {entry.id} with {len(event.tokens)}")
            n += event.count
            texts.append(event.text)
        elif isinstance(event, Finished) and (entry.id, event.n, n) != (SEAL, output_tokens, output_tokens):
            raise UndecodableEvent(f"its history ends at {entry.id} with {n} tokens and says {event.n}")
    if last != "finished":
        raise UndecodableEvent(f"its history ends with {last}, expected finished")
    return "".join(texts)


def said_since(said: Path, killed_ms: float, slot: str) -> tuple[float | None, float | None]:
    """Return when the supervisor said that *slot* had died, in seconds from the kill on, and how long a load took."""
    noticed_s = load_s = None
    for line in said.read_text(errors="replace").splitlines():
        with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
            told = orjson.loads(line)
            since_s = datetime.fromisoformat(told["timestamp"]).timestamp() - killed_ms / 1000
            if since_s >= 0 and told["event"] == "worker_died" and told["worker"] == slot and noticed_s is None:
                noticed_s = since_s
            if since_s >= 0 and told["event"] == "engine_loaded" and load_s is None:
                load_s = float(told["seconds"])
    return noticed_s, load_s


def must_have_hit(recovery: Recovery) -> None:
    """Refuse a run that says nothing.

    Raises:
        SideFailed: No stream was taken over.
    """
    if not recovery.hit:
        wrong = f"; {recovery.problems[0].what}" if recovery.problems else ""
        raise SideFailed(f"the engine was killed, and nothing was taken over: no stream was its own{wrong}")


def figures(run: Recovery) -> dict[str, Any]:
    """Return what follows from a run."""
    names = (*FIGURES, "start_s", "tokens_again")
    return {name: getattr(run, name) for name in names}


def medians(runs: Sequence[Recovery]) -> dict[str, float | None]:
    """Return the median of each figure; None where a run has none."""
    columns = {name: [figures(run)[name] for run in runs] for name in figures(runs[0])}
    return {name: None if None in values else statistics.median(values) for name, values in columns.items()}


def table(runs: Sequence[Recovery]) -> str:
    """Return the figures for people: a line each, a column for each run and one for the medians."""
    middle = medians(runs)
    rows = [("s", *(f"run {number}" for number in range(1, len(runs) + 1)), "median")]
    for name, title in FIGURES.items():
        values = [*(getattr(run, name) for run in runs), middle[name]]
        if any(value is not None for value in values):
            rows.append((title, *("-" if value is None else f"{value:.2f}" for value in values)))
    again = [*(run.tokens_again for run in runs), middle["tokens_again"]]
    rows.append(("tokens computed again", *(f"{value:,.0f}" for value in again)))
    return report.aligned(rows)


def verdict(runs: Sequence[Recovery]) -> str:
    """Return in one line whether the goal holds, in the run in the middle; of two, in the worse one."""
    run = sorted(runs, key=lambda one: one.beyond_s)[len(runs) // 2]
    stream, again = run.worst
    prefill_s = run.prefill_for_s(again)
    parts = f"lease {run.lease_s:.2f} + start {run.start_s:.2f} + prefill {prefill_s:.2f} + {SLACK_S:.2f} s"
    if run.beyond_s <= 0:
        outcome = f"met, {-run.beyond_s:.2f} s to spare"
    else:
        outcome = f"missed by {run.beyond_s:.2f} s"
    return f"goal: a pause of at most {parts} = {run.allowed_s:.2f} s; it was {stream.pause_s:.2f} s: {outcome}"


def failures(problems: Sequence[Problem], num_requests: int) -> str:
    """Return in one line how many requests were not whole, and of each way an example; empty where all were."""
    if not problems:
        return ""
    counts = Counter(problem.what for problem in problems)
    examples = {problem.what: problem.uid for problem in reversed(problems)}
    kinds = [f"{count}x {what} (as {examples[what]})" for what, count in counts.most_common(KINDS_OF_FAILURE_SHOWN)]
    more = len(counts) - len(kinds)
    return (
        f"{len(problems)} of {num_requests} requests did not get exactly their tokens, once: {'; '.join(kinds)}"
        f"{f'; and {more} other errors' if more else ''}"
    )
