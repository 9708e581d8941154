"""The pipeline as people want to see it: a pure fold of snapshots of the log into a `PipelineView`.

Knows no log, no clock and no screen. A rate is the difference between two statuses of a worker, divided by the time
between them. So it does not jump when snapshots come more often than statuses.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipeline.errors import UndecodableEvent
from pipeline.events import Preempted
from pipeline.log.journal import outline
from pipeline.log.protocol import Entry
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, LogSnapshot, RedisFacts, SlotState
from pipeline.metrics import families
from pipeline.metrics.counters import Counts, Readings, read_snapshot
from pipeline.metrics.families import Family
from pipeline.names import (
    ARCHIVE,
    DETOKENIZE,
    GENERATE,
    JANITOR,
    SEAL,
    STAGES,
    WEB,
    rank_of,
    slot_index,
    slot_name,
    slot_stage,
)
from pipeline.stage.slots import Status, parse_status
from pipeline.views.requests import ENDED, RequestFacts, RequestView, Sees, heard, request_view


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
        median_ms=statistics.median(times_ms),
        longest_ms=max(times_ms),
        decode_rows=last.figures.decode_rows,
        num_prompts=len({chunk.uid for chunk in chunks}),
        prompt_tokens=sum(chunk.count for chunk in chunks),
        preempted=sum(isinstance(row.event, Preempted) for step in steps for row in step.events),
        waiting=last.figures.waiting,
        free_pages=last.figures.free_pages,
    )


MOST_REQUESTS: Final = 50
"""A view shows so many requests, the newest."""
APART_MS: Final = 100
"""Two statuses so far apart are different ones. Below that, the difference may be the time a snapshot took."""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """A status of the worker of a slot."""

    at_ms: int
    owner: str
    metrics: Readings


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of the log after some snapshots."""

    snapshot: LogSnapshot
    said: Mapping[str, tuple[StatusReport, StatusReport]]
    """Slot -> an earlier status of its worker and the last one; the same one twice if there was only one."""
    requests: Mapping[str, RequestFacts]
    """By uid, the newest first."""
    steps: tuple[StepsView, ...] = ()
    """Of the engines with a journal."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """A numbered place of a stage, and who works there."""

    slot: str
    phase: str
    """As its worker says. `away`: nobody has the slot. `guest`: another worker looks after it. `held`: somebody has
    it and publishes no status, as the janitor does not."""
    detail: str
    progress: float
    host: str
    pid: int
    """0: unknown."""
    epoch: int
    lease_ms: int
    """Time left of the lease; 0: nobody holds it."""
    pending: int
    address: str
    streams_open: int
    """Open streams of a frontend."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream of work."""

    stream: str
    length: int
    pending: int
    lag: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine. None: it has not published the figure, or nothing happened between its last two statuses."""

    engine: str
    model: str
    context: int
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    cache_used: float | None = None
    """Share of its pages."""
    prefix_hits: float | None = None
    """Share of the prompt tokens since it started."""
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    first_token_p50_s: float | None = None
    between_tokens_p50_s: float | None = None


@dataclass(frozen=True, slots=True)
class PipelineView:
    """The pipeline at one moment."""

    at_ms: int
    """Redis' clock."""
    redis: RedisFacts
    slots: tuple[SlotView, ...]
    streams: tuple[StreamView, ...]
    num_live: int
    num_dead: int
    engines: tuple[EngineView, ...]
    requests: tuple[RequestView, ...]
    """The newest first."""
    steps: tuple[StepsView, ...] = ()
    """What the engines with a journal did last."""
    others: int = 0
    """Of the newest requests, those that whoever looks may not see."""
    error: str = ""
    """Why there is no newer view; empty: the log answers."""


# Snapshots become what was observed


def queries_for(before: Observed | None, snapshot: LogSnapshot, found: Iterable[str]) -> dict[str, HistoryQuery]:
    """Return what to read of which requests: the newest of the living, the known and the *found* ones."""
    known = before.requests if before is not None else {}
    newest = sorted({*known, *snapshot.living, *found}, reverse=True)[:MOST_REQUESTS]
    asks = {}
    for uid in newest:
        facts = known.get(uid, RequestFacts(uid))
        is_over = facts.state in ENDED
        asks[uid] = HistoryQuery(SEAL if is_over else facts.known_to, last=not is_over)
    return asks


def observe(before: Observed | None, snapshot: LogSnapshot, peeks: Mapping[str, HistoryEnds]) -> Observed:
    """Return what is known after one more look."""
    known = before.requests if before is not None else {}
    requests = {}
    for uid, peek in peeks.items():
        if peek.exists:
            facts = known.get(uid, RequestFacts(uid))
            if facts.state not in ENDED:
                facts = heard(facts, peek, snapshot.now_ms, snapshot.held.get(uid, ""))
            requests[uid] = facts
    return Observed(snapshot, _said(before, snapshot), requests)


def _said(before: Observed | None, snapshot: LogSnapshot) -> dict[str, tuple[StatusReport, StatusReport]]:
    said = {}
    for slot, seen in snapshot.slots.items():
        status = _status(seen)
        if status is None or not status.metrics:
            continue
        now = StatusReport(seen.said_ms, status.owner, read_snapshot(status.metrics))
        earlier, latest = before.said.get(slot, (now, now)) if before is not None else (now, now)
        if latest.owner != now.owner:
            said[slot] = now, now
        elif now.at_ms - latest.at_ms >= APART_MS:
            said[slot] = latest, now
        else:
            said[slot] = earlier, latest
    return said


# What was observed becomes a view


def _everybody(_: str) -> bool:
    return True


def view_of(reading: Observed, sees: Sees = _everybody) -> PipelineView:
    """Return the view of what was observed, with the requests of the owners that somebody *sees*."""
    requests = [facts for facts in reading.requests.values() if sees(facts.owner)]
    snapshot = reading.snapshot
    occupancy = snapshot.occupancy
    steps = {
        f"steps:{engine}": depth for engine, depth in sorted(occupancy.steps.items(), key=lambda each: _place(each[0]))
    }
    depths = {"submitted": occupancy.submitted, "tokenized": occupancy.tokenized} | steps
    slots = sorted(snapshot.slots, key=_place)
    return PipelineView(
        at_ms=snapshot.now_ms,
        redis=snapshot.redis,
        slots=tuple(_slot(slot, reading) for slot in slots),
        streams=tuple(StreamView(name, each.length, each.pending, each.lag) for name, each in depths.items()),
        num_live=occupancy.num_live,
        num_dead=occupancy.num_dead,
        engines=tuple(_engine(slot, reading) for slot in slots if slot_stage(slot) == GENERATE),
        requests=tuple(request_view(facts, snapshot.now_ms) for facts in requests),
        steps=reading.steps,
        others=len(reading.requests) - len(requests),
    )


def without_addresses(view: PipelineView) -> PipelineView:
    """Return *view* without what names the machines and processes of the workers."""
    return replace(view, slots=tuple(replace(slot, host="", pid=0, address="") for slot in view.slots))


_ORDER: Final = (WEB, *(stage for stage in STAGES if stage != WEB), ARCHIVE, JANITOR)
"""The order in which a request passes them."""


def _place(slot: str) -> tuple[int, int, int]:
    """Return where *slot* comes in the order. Ranks come after the engines, those of rank 0 first."""
    stage = slot_stage(slot)
    rank = rank_of(stage)
    return _ORDER.index(GENERATE if rank is not None else stage), -1 if rank is None else rank, slot_index(slot)


def _status(seen: SlotState) -> Status | None:
    """Return the status of a worker; None if there is none, or if it is of another version."""
    try:
        return parse_status(seen.status) if seen.status else None
    except UndecodableEvent:
        return None


def _slot(slot: str, reading: Observed) -> SlotView:
    seen = reading.snapshot.slots[slot]
    status = _status(seen)
    lease = seen.lease
    if status is not None and status.owner and status.owner != seen.owner:
        status = None  # of the worker that had the slot before: the new one has not said anything yet
    announced = status is not None and not status.owner  # it asks for the slot once it is ready
    if lease.holder and lease.is_free and not announced:
        phase = "guest"
    elif status is not None and (announced or not lease.is_free):
        phase = status.phase
    else:
        phase = "away" if lease.is_free else "held"
    shown = status if status is not None and phase == status.phase else None
    return SlotView(
        slot=slot,
        phase=phase,
        detail=shown.detail if shown is not None else "",
        progress=shown.progress if shown is not None else 0.0,
        host=status.host if status is not None else "",
        pid=status.pid if status is not None else 0,
        epoch=int(seen.owner.partition(":")[0] or 0),
        lease_ms=lease.ttl_ms,
        pending=reading.snapshot.pending.get(slot, 0),
        address=status.address if status is not None else "",
        streams_open=int(_number(_latest(slot, reading), families.STREAMS_OPEN)) if shown is not None else 0,
    )


def _engine(slot: str, reading: Observed) -> EngineView:
    seen = reading.snapshot.slots[slot]
    status = _status(seen)
    model, context = (status.models[0] if status.models else "", status.context) if status is not None else ("", 0)
    if slot not in reading.said or seen.lease.is_free:  # the last status of a dead engine says nothing about now
        return EngineView(slot, model, context)
    latest = _latest(slot, reading)
    detokenizer = slot_name(DETOKENIZE, slot_index(slot))
    queries = _number(latest, families.PREFIX_QUERIES)
    return EngineView(
        engine=slot,
        model=model,
        context=context,
        running=int(_number(latest, families.NUM_RUNNING)),
        waiting=int(_number(latest, families.NUM_WAITING)),
        preemptions=int(_number(latest, families.NUM_PREEMPTIONS)),
        cache_used=_number(latest, families.KV_CACHE_USAGE),
        prefix_hits=_number(latest, families.PREFIX_HITS) / queries if queries else None,
        prompt_tokens_per_s=_rate(slot, reading, families.PROMPT_TOKENS),
        output_tokens_per_s=_rate(slot, reading, families.GENERATION_TOKENS),
        first_token_p50_s=_median(detokenizer, reading, families.FIRST_TOKEN_SECONDS),
        between_tokens_p50_s=_median(detokenizer, reading, families.BETWEEN_TOKENS_SECONDS),
    )


def _latest(slot: str, reading: Observed) -> Readings:
    return reading.said[slot][1].metrics if slot in reading.said else {}


def _number(readings: Readings, family: Family) -> float:
    """Return the value of a counter or gauge without labels; a status leaves out zeros."""
    value = readings.get(family, {}).get((), 0)
    return 0 if isinstance(value, Counts) else value


def _rate(slot: str, reading: Observed, family: Family) -> float | None:
    """Return how much a counter grew per second; None if there is one status only, or if the worker restarted."""
    earlier, latest = reading.said[slot]
    grown = _number(latest.metrics, family) - _number(earlier.metrics, family)
    return grown * 1000 / (latest.at_ms - earlier.at_ms) if latest.at_ms > earlier.at_ms and grown >= 0 else None


def _median(slot: str, reading: Observed, family: Family) -> float | None:
    """Return the median of the values that a histogram got between the last two statuses."""
    if slot not in reading.said:
        return None
    earlier, latest = (said.metrics.get(family, {}).get(()) for said in reading.said[slot])
    if not isinstance(latest, Counts):
        return None
    before = earlier.counts if isinstance(earlier, Counts) else (0,) * len(latest.counts)
    return median([now - then for now, then in zip(latest.counts, before, strict=True)], family.buckets)


def median(counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    """Return the approximate median of values that were counted in buckets; None if there are none.

    Values are taken as spread evenly in their bucket. Those above all bounds count as the last bound."""
    total = sum(counts)
    if total <= 0 or min(counts) < 0:
        return None
    below = 0
    for index, count in enumerate(counts[: len(bounds)]):
        if below + count >= total / 2:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (total / 2 - below) / count
        below += count
    return bounds[-1]
