"""`minisgl replay schedule ENGINE`: plan an engine's journalled steps again, with its limits or with others.

With other limits, the same requests come at the same times, and get the same tokens. How long a step takes follows from
its rows, by a fit to the times of the journalled steps. Trials of suspects are left out: all run together.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import orjson

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig
from ops.connection import columns, one_line, running_log, split_named
from ops.replay.source import Source
from ops.trace import as_json
from pipeline.archive.reader import open_archive
from pipeline.errors import ConfigError, MiniSGLError, UndecodableEvent
from pipeline.events import Preempted, TakenOver
from pipeline.flags import at_least, flag, parse_flags
from pipeline.log.journal import JournalStep, steps
from pipeline.log.protocol import Entry, HistoryLog
from pipeline.names import parse_id
from stages.generate.kvcache.base import LocalLayers
from stages.generate.loop.pace import Pace
from stages.generate.loop.past import recorded_request
from stages.generate.schedule.again import StepsMissing, differences
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.recorded import RecordedSchedule, snapshot_uids
from stages.generate.schedule.request import NewRequest
from stages.generate.setup.config import ON_CPU, ON_GPU, Targets

ABOUT: Final = """\
Plans steps of an engine again, from its journal in Redis, and compares. ENGINE is a slot, such as generate-0.
Exit code 0: the same; 1: different; 2: the journal lacks steps, or a prompt is gone.
"""
EXIT_DIFFERENT: Final = 1
EXIT_IMPOSSIBLE: Final = 2
READ_AT_ONCE: Final = 1000
HISTORIES_AT_ONCE: Final = 64
FAR: Final = 2.0
"""An estimate of pauses that is so many times what was measured, or that part of it, is far off .."""
NEAR_MS: Final = 2.0
""".. unless they differ by no more than this: the journal counts whole milliseconds."""
STEPS_BEHIND: Final = 300
"""An engine may make so many tokens of a request after its end, before it hears of it."""


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """Which steps."""

    first: str = flag("--from", default="", help="first step, such as 1200, or 3-1200 for one of epoch 3 [oldest]")
    last: str = flag("--to", default="", help="last step [newest]")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Other limits than the engine's."""

    max_prefill_length: int = flag(
        "--max-prefill-length",
        default=0,
        parse=at_least(1),
        help="estimate what another limit would have done: prompt tokens per step while nothing decodes [as it was]",
    )
    mixed_prefill_length: int = flag(
        "--mixed-prefill-length",
        default=0,
        parse=at_least(1),
        help="estimate what another limit would have done: prompt tokens per step while streams run [as it was]",
    )

    running_requests: int = flag(
        "--max-running-requests",
        default=0,
        parse=at_least(1),
        help="estimate what another limit would have done: requests that run at once [as it was]",
    )
    num_pages: int = flag(
        "--num-pages",
        default=0,
        parse=at_least(1),
        help="estimate what another limit would have done: pages in the cache [as it was]",
    )

    def given(self) -> dict[str, int]:
        """Return the limits that differ, as `RecordedSchedule.restored` takes them."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value}
        if "running_requests" in given:  # its field has a name of its own: unlike the engine's it has no default
            given["max_running_requests"] = given.pop("running_requests")
        return given | ({"mixed_prefill_per_request": 0} if self.mixed_prefill_length else {})


FLAGS: Final = (ConnectConfig, ArchivedConfig, StepsConfig, LimitsConfig, PrintConfig)


class CannotPlan(MiniSGLError):
    """What the journal or the log holds is not enough to plan the steps again."""


@dataclass(slots=True)
class Requests:
    """The requests of some steps: prompts and tokens from their histories, later tokens from the journal."""

    source: Source
    tokens: Mapping[str, Mapping[int, int]]
    """uid -> n -> token, from the journal."""
    _known: dict[str, NewRequest] = field(default_factory=dict)
    """With all output that their histories have."""

    def learn(self, uids: Sequence[str]) -> None:
        """Read the histories of *uids*, as far as they are there and hold a prompt."""
        new = [uid for uid in dict.fromkeys(uids) if uid not in self._known]
        for at in range(0, len(new), HISTORIES_AT_ONCE):
            some = new[at : at + HISTORIES_AT_ONCE]
            for uid, history in zip(some, self.source.histories(some), strict=True):
                request = recorded_request(uid, history)
                if request is not None:
                    self._known[uid] = request

    @property
    def uids(self) -> list[str]:
        return list(self._known)

    def all_tokens(self, uid: str) -> tuple[int, ...]:
        """Return all output of a request that is known: a stop string or its client may have ended it."""
        output, later = self._known[uid].output_ids, self.tokens.get(uid, {})
        return self.request(uid, max(len(output), *later)).output_ids if later else output

    def request(self, uid: str, n: int) -> NewRequest:
        """Return a request as it was with *n* tokens of output.

        Raises:
            CannotPlan: Its prompt or one of the tokens is gone.
        """
        known = self._known.get(uid)
        if known is None:
            raise CannotPlan(
                f"the prompt of {one_line(uid)} is gone: its history expired, or the request was removed; pass "
                "--archive if there is one, plan steps that are not as old, or let the server keep histories longer "
                "(--retention)"
            )
        output, later = known.output_ids[:n], self.tokens.get(uid, {})
        try:
            output += tuple(later[number] for number in range(len(output) + 1, n + 1))
        except KeyError as error:
            raise CannotPlan(f"token {error} of {one_line(uid)} is neither in its history nor in the journal") from None
        return dataclasses.replace(known, output_ids=output)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Plan the steps again and say whether they are the same; return the exit code.

    Raises:
        ConfigError: The flags cannot work, or the folder is no archive.
        LogUnavailable: There is no such server.
    """
    engine, flags = split_named("replay schedule", arguments, "the slot of an engine, such as generate-0", FLAGS)
    command = "replay schedule ENGINE"
    connect, archived, which, other, prints = parse_flags(command, FLAGS, flags, environment, about=ABOUT)
    try:
        with running_log(connect) as log:
            source = Source(log, open_archive(archived.archive) if archived.archive else None)
            told = planned_again(source, engine, which, other.given())
    except (CannotPlan, StepsMissing, UndecodableEvent) as error:
        sys.stderr.write(f"minisgl: {error}\n")
        return EXIT_IMPOSSIBLE
    sys.stdout.write(as_json(told) if prints.as_json else "\n".join(_lines(told)) + "\n")
    return 0 if told["identical"] else EXIT_DIFFERENT


def planned_again(source: Source, engine: str, which: StepsConfig, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return what planning steps of *engine* again says, and what would have happened under other *limits*, if any.

    Raises:
        ConfigError: *which* names no steps.
        CannotPlan: A step or a prompt is gone, or there are too few steps for an estimate.
        UndecodableEvent: The journal is damaged.
    """
    found = steps_between(source.log, engine, which.first, which.last)
    requests = Requests(source, found.tokens)
    requests.learn([uid for step in found.steps for uid in _uids_in(step)] + snapshot_uids(found.steps[0].schedule))
    counts = dict.fromkeys(("steps", "tokens", "arrivals", "preemptions", "takeovers"), 0)
    difference: dict[str, Any] = {}
    computed: list[tuple[JournalStep, BatchPlan]] = []
    for step, different in differences(found.steps, requests.request, lambda *one: computed.append(one)):
        if different:
            difference = {"step": step.id, "what": different}
        if (step.epoch, step.number) >= found.first:
            _count(counts, step)
    told: dict[str, Any] = {
        "engine": engine,
        "from": "{}-{}".format(*found.first),
        "to": found.steps[-1].id,
        "snapshot": found.steps[0].id,
    }
    told |= counts | {"identical": not difference}
    if difference:
        return told | {"difference": difference}
    return told | (_otherwise(found.steps, computed, requests, limits) if limits else {})


def _otherwise(
    steps: Sequence[JournalStep],
    computed: Sequence[tuple[JournalStep, BatchPlan]],
    requests: Requests,
    limits: Mapping[str, int],
) -> dict[str, Any]:
    """Return what was measured from the snapshot on, and what is estimated for the same and for other *limits*."""
    if len(computed) < FEWEST_FITTED:
        raise CannotPlan(
            f"{len(computed)} steps are too few for an estimate, which needs {FEWEST_FITTED}; ask for more"
        )
    time_of = fitted(
        [parts_of(plan) for _, plan in computed],
        [step.figures.forward_ms for step, _ in computed],
        between_ms(steps),
    )
    tokens = {uid: requests.all_tokens(uid) for uid in requests.uids}
    if "num_pages" in limits:
        plain = orjson.loads(steps[0].schedule)
        local = LocalLayers(*plain["local"])
        chunks = (limits.get(name, 0) for name in ("max_prefill_length", "mixed_prefill_length"))
        local = dataclasses.replace(local, largest_chunk=max(local.largest_chunk, *chunks))
        _check_pages(limits["num_pages"], plain["page_size"], local, requests, tokens)
    estimates = {
        name: lived_again(steps, requests.request, tokens, time_of, **other)
        for name, other in (("estimated_as_it_was", {}), ("estimated", limits))
    }
    outcomes = {name: outcome.told() for name, outcome in {"measured": measured(steps), **estimates}.items()}
    return {
        "limits": dict(limits),
        "error_of_estimated_steps": round(time_of.error, 3),
        "unreliable": far_off(outcomes["measured"], outcomes["estimated_as_it_was"]),
        "outcomes": outcomes,
    }


def far_off(measured: Mapping[str, float], estimated: Mapping[str, float]) -> list[str]:
    """Return the names of the pauses whose estimate, under the engine's own limits, is far from the measured one."""
    return [
        name
        for name in ("pause_p50_ms", "pause_p99_ms", "longest_pause_ms")
        if abs(measured[name] - estimated[name]) > NEAR_MS
        and max(measured[name], estimated[name]) > FAR * min(measured[name], estimated[name])
    ]


def _check_pages(
    num_pages: int, page_size: int, local: LocalLayers, requests: Requests, tokens: Mapping[str, Sequence[int]]
) -> None:
    """Raise CannotPlan if one of the requests does not fit into so many pages."""
    lengths = {uid: len(requests.request(uid, 0).prompt_ids) + max(len(made), 1) for uid, made in tokens.items()}
    longest = max(lengths, key=lengths.__getitem__)
    needed = local.whole_pages(-(-lengths[longest] // page_size), page_size)
    if needed > num_pages:
        raise CannotPlan(
            f"--num-pages {num_pages}: {one_line(longest)} has {lengths[longest]:,} tokens, which need {needed:,} "
            f"pages; pass at least {needed}"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What the journal has of the steps that were asked for."""

    first: tuple[int, int]
    """The first of them."""
    steps: Sequence[JournalStep]
    """From the last snapshot before it on."""
    tokens: Mapping[str, Mapping[int, int]]
    """As in Requests, also of steps a little before the snapshot."""


def steps_between(log: HistoryLog, engine: str, first: str, last: str) -> Found:
    """Read a journal from the last snapshot before *first* to *last*.

    Raises:
        ConfigError: *first* or *last* is no step.
        CannotPlan: There is no journal, or no snapshot before *first*.
    """
    newest = log.journal(engine, max_entries=1, newest=True)
    if not newest:
        raise CannotPlan(
            f"there is no journal of {one_line(engine)}: no such engine, no step within --retention, or the server "
            "runs with --journal-bytes 0"
        )
    epoch = parse_id(newest[0].id)[0]
    start, end = _step_id("--from", first, epoch), _step_id("--to", last, epoch)
    if start and end and parse_id(start) > parse_id(end):
        raise ConfigError(f"--from {first} comes after --to {last}; pass the earlier step first")
    if start and parse_id(start) > parse_id(newest[0].id):
        raise CannotPlan(f"the last step in the journal of {engine} is {newest[0].id}, before --from {first}")
    snapshot = _snapshot_before(log, engine, start) if start else _first_snapshot(log, engine)
    if not snapshot:
        oldest = _first_snapshot(log, engine)
        remedy = f"pass --from {oldest}" if oldest else "it has none at all yet; one is taken every 1,000 steps"
        raise CannotPlan(f"the journal of {engine} has no snapshot of the schedule at or before {start}; {remedy}")
    before = log.journal(engine, last=snapshot, max_entries=STEPS_BEHIND, newest=True)
    entries = [*before, *_forward(log, engine, snapshot, end or "+")]
    tokens: dict[str, dict[int, int]] = {}
    found: list[JournalStep] = []
    for step in steps(entries):
        for row in step.rows:
            tokens.setdefault(row.uid, {})[row.n] = row.token
        if parse_id(step.id) >= parse_id(snapshot):
            found.append(step)
    return Found(parse_id(start or snapshot), found, tokens)


def _step_id(name: str, text: str, epoch: int) -> str:
    """Return the id of a step that a user names; "" stays.

    Raises:
        ConfigError: It names none.
    """
    given, dash, number = text.rpartition("-")
    if not text:
        return ""
    if not number.isdecimal() or (dash and not given.isdecimal()):
        raise ConfigError(f"{name} {text}: must be a step, such as 1200, or 3-1200 for one of epoch 3")
    return f"{given or epoch}-{number}"


def _snapshot_before(log: HistoryLog, engine: str, step_id: str) -> str:
    """Return the id of the last step with a snapshot up to *step_id*; "": there is none."""
    last = step_id
    while entries := log.journal(engine, last=last, max_entries=READ_AT_ONCE, newest=True):
        with_one = [entry.id for entry in entries if "schedule" in entry.fields]
        if with_one:
            return with_one[-1]
        last = f"({entries[0].id}"
    return ""


def _first_snapshot(log: HistoryLog, engine: str) -> str:
    first = "-"
    while entries := log.journal(engine, first=first, max_entries=READ_AT_ONCE):
        with_one = [entry.id for entry in entries if "schedule" in entry.fields]
        if with_one:
            return with_one[0]
        first = f"({entries[-1].id}"
    return ""


def _forward(log: HistoryLog, engine: str, after: str, last: str) -> Iterator[Entry]:
    while entries := log.journal(engine, first=f"({after}", last=last, max_entries=READ_AT_ONCE):
        yield from entries
        after = entries[-1].id


def _uids_in(step: JournalStep) -> list[str]:
    """Return the requests that came to the schedule in a step."""
    return [word.rpartition(" ")[2] for word in step.inputs if word.startswith("add ")]


def _count(counts: dict[str, int], step: JournalStep) -> None:
    counts["steps"] += 1
    counts["tokens"] += len(step.rows)
    counts["arrivals"] += len(_uids_in(step))
    counts["preemptions"] += sum(isinstance(row.event, Preempted) for row in step.events)
    counts["takeovers"] += sum(isinstance(row.event, TakenOver) for row in step.events)


def _lines(told: Mapping[str, Any]) -> list[str]:
    said = ", ".join(f"{told[name]:,} {name}" for name in ("steps", "tokens", "arrivals", "preemptions", "takeovers"))
    lines = [
        f"{told['engine']}: steps {told['from']} to {told['to']}, from the snapshot of {told['snapshot']} on",
        said,
    ]
    if told["identical"]:
        return [*lines, "planned again: identical", *(_estimates(told) if "outcomes" in told else [])]
    difference = told["difference"]
    return [*lines, f"planned again: different at step {difference['step']}", one_line(difference["what"])]


def _estimates(told: Mapping[str, Any]) -> list[str]:
    """Return a table: what was, what the estimate makes of it, and what it makes of other limits."""
    outcomes = told["outcomes"]
    rows = [("", "measured", "as it was, estimated", "with other limits, estimated")]
    rows += [
        (name.replace("_", " "), *(f"{outcomes[one][name]:,}" for one in outcomes)) for name in outcomes["measured"]
    ]
    share = f"{told['error_of_estimated_steps']:.0%}"
    return [
        "",
        *columns(rows, right=(1, 2, 3)),
        "",
        "All of the last two columns is estimated, from a fit to the times of these steps.",
        f"Half of the steps took less than {share} more or less than the fit says.",
        *_warning(told),
    ]


def _warning(told: Mapping[str, Any]) -> list[str]:
    """Return a line that names the pauses whose estimates are far off, if there are any."""
    was, is_said = (told["outcomes"][name] for name in ("measured", "estimated_as_it_was"))
    far = [
        f"{name.replace('_', ' ')} {was[name]:,} measured, {is_said[name]:,} estimated" for name in told["unreliable"]
    ]
    if not far:
        return []
    return [f"The estimate of pauses is unreliable: with the engine's own limits, {'; '.join(far)}."]


FEWEST_FITTED: Final = 20
"""A fit to fewer steps says nothing."""
UNKNOWN: Final = 0
"""The token of a request of which no token is known."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes, in milliseconds: a sum with a summand for each number of `parts`."""

    per_part: tuple[float, ...]
    between_ms: float
    """From one step to the next, besides the forward pass."""
    error: float
    """Half of the fitted steps took less than this share longer or shorter."""

    def forward_ms(self, parts: Sequence[float]) -> float:
        return float(np.dot(self.per_part, parts))


def parts_of(plan: BatchPlan) -> tuple[float, ...]:
    """Return what the time of a step depends on: a step, its streams, their context, its prompt tokens, and how many
    earlier positions those attend to.
    """
    decodes, prefills = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
    return (
        1.0,
        float(len(decodes)),
        float(sum(row.start for row in decodes)),
        float(sum(len(row.token_ids) for row in prefills)),
        float(sum(len(row.token_ids) * (row.start + len(row.token_ids) / 2) for row in prefills)),
    )


def fitted(parts: Sequence[Sequence[float]], forward_ms: Sequence[float], between_ms: Sequence[float]) -> StepTime:
    """Fit the times of steps. No part makes a step shorter: where the best fit says so, it is left out."""
    rows, times = np.array(parts), np.array(forward_ms)
    weights = 1 / np.maximum(times, 1e-3)  # a short step counts as much as a long one
    used = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used] * weights[:, None], times * weights, rcond=None)
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    per_part = np.zeros(rows.shape[1])
    per_part[used] = found
    errors = np.abs(rows @ per_part - times) * weights
    usual = sorted(between_ms)[: -(-9 * len(between_ms) // 10)]  # the others were held up
    return StepTime(tuple(per_part.tolist()), statistics.fmean(usual or [0.0]), float(np.median(errors)))


@dataclass(slots=True)
class Outcome:
    """What became of the requests of some steps, in milliseconds."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    total_ms: float = 0
    step_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    """From the arrival at the engine to the first token, of the requests that came."""
    pause_ms: list[float] = field(default_factory=list)
    """From each token to the next of the same request."""

    def told(self) -> dict[str, float]:
        """Return it in numbers."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "preemptions": self.preemptions,
            "seconds": round(self.total_ms / 1000, 1),
            "longest_step_ms": round(max(self.step_ms), 1),
            "first_token_p50_ms": _quantile(self.first_token_ms, 0.5),
            "first_token_p99_ms": _quantile(self.first_token_ms, 0.99),
            "pause_p50_ms": _quantile(self.pause_ms, 0.5),
            "pause_p99_ms": _quantile(self.pause_ms, 0.99),
            "longest_pause_ms": _quantile(self.pause_ms, 1),
        }


@dataclass(slots=True)
class Times:
    """When the tokens of requests come."""

    outcome: Outcome = field(default_factory=Outcome)
    _last: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """uid -> moment of its last token, or of its arrival, and whether it was a token."""

    def came(self, uid: str, now_ms: float) -> None:
        self._last[uid] = now_ms, False

    def made(self, uid: str, now_ms: float) -> None:
        self.outcome.tokens += 1
        if uid in self._last:
            before_ms, was_token = self._last[uid]
            (self.outcome.pause_ms if was_token else self.outcome.first_token_ms).append(now_ms - before_ms)
        self._last[uid] = now_ms, True

    def stepped(self, forward_ms: float, preemptions: int) -> None:
        self.outcome.steps += 1
        self.outcome.step_ms.append(forward_ms)
        self.outcome.preemptions += preemptions


def measured(steps: Sequence[JournalStep]) -> Outcome:
    """Return what the journal itself says."""
    times = Times()
    for step in steps:
        began_ms = step.made_ms - step.figures.forward_ms
        for word in step.inputs:
            if word.startswith("add "):
                times.came(word.rpartition(" ")[2], began_ms)
        for row in step.rows:
            times.made(row.uid, step.made_ms)
        if step.figures.forward_ms:
            times.stepped(step.figures.forward_ms, sum(isinstance(row.event, Preempted) for row in step.events))
    times.outcome.total_ms = steps[-1].made_ms - (steps[0].made_ms - steps[0].figures.forward_ms)
    return times.outcome


def lived_again(
    steps: Sequence[JournalStep],
    request_of: Callable[[str, int], NewRequest],
    tokens: Mapping[str, Sequence[int]],
    time_of: StepTime,
    **other_limits: int,
) -> Outcome:
    """Return what becomes of the requests of *steps*, the first of which has a snapshot, under *other_limits*.

    *tokens*: uid -> all tokens that are known of its output. A request leaves with the last of them; if it got none, it
    leaves when it left.
    """
    first = steps[0]
    schedule = RecordedSchedule.restored(first.schedule, first.number, request_of, **other_limits)
    schedule.isolate(None)
    paced = any(step.figures.mixed_prefill_length is not None for step in steps)
    pace = Pace(targets_of(steps)) if paced and "mixed_prefill_length" not in other_limits else None
    times, waiting, known = Times(), deque(_given(steps)), set(snapshot_uids(first.schedule))
    begin_ms = now_ms = first.ms - first.figures.forward_ms
    while True:
        while waiting and waiting[0][0] <= now_ms:
            at_ms, word = waiting.popleft()
            match word.split():
                case ["add", n, _, uid] if uid not in known:  # else its engine died, which does not happen here
                    known.add(uid)
                    if (failed := schedule.add(request_of(uid, int(n)))) is not None:
                        raise CannotPlan(f"{one_line(uid)} does not fit these limits: {failed.message}")
                    times.came(uid, at_ms)
                case ["drop", uid] if (schedule.num_output(uid) or 0) >= len(tokens.get(uid, ())):
                    schedule.drop(uid)
                case ["flush"]:
                    schedule.flush()
        budget = None if pace is None else pace.budget(schedule.work)
        planned = schedule.plan(None if budget is None else budget.tokens)
        if planned is None:
            if not waiting:
                break
            now_ms = waiting[0][0]
            continue
        plan, marks = planned
        forward_ms = time_of.forward_ms(parts_of(plan))
        if pace is not None:
            pace.measured(plan, forward_ms / 1000, budget)
        now_ms += forward_ms + time_of.between_ms
        times.stepped(forward_ms, sum(mark.kind == "event" and isinstance(mark.event, Preempted) for mark in marks))
        following = [tokens[uid][schedule.num_output(uid) or 0 :] for uid, _ in schedule.sampled]
        for row in schedule.complete([more[0] if more else UNKNOWN for more in following]):
            times.made(row.uid, now_ms)
            if row.end is None and row.n >= len(tokens[row.uid]):
                schedule.drop(row.uid)
    times.outcome.total_ms = now_ms - begin_ms
    return times.outcome


def targets_of(steps: Sequence[JournalStep]) -> Targets:
    """Return targets like those that an engine had in *steps*."""
    beside = {step.figures.target_ms or 0 for step in steps if step.figures.decode_rows} - {0}
    least_ms = min(beside, default=round(ON_CPU.step_s * 1000))
    usual = (targets for targets in (ON_CPU, ON_GPU) if least_ms == round(targets.step_s * 1000))
    return next(usual, Targets.exactly(least_ms / 1000))


def between_ms(steps: Sequence[JournalStep]) -> list[float]:
    """Return the times between steps, besides the forward passes, while there was something to compute."""
    return [
        max(0.0, step.made_ms - step.figures.forward_ms - before.made_ms)
        for before, step in pairwise(steps)
        if before.figures.running or before.figures.waiting
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    return round(float(np.quantile(values, share)), 1) if values else 0.0


def _given(steps: Sequence[JournalStep]) -> list[tuple[float, str]]:
    """Return what the schedule was told, each with its moment."""
    return [(step.made_ms - step.figures.forward_ms, word) for step in steps for word in step.inputs]
