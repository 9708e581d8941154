"""The text that Prometheus reads: the measures of every process, and what the log holds.

Any frontend shows all processes. Its own counts are current; those of other processes are as old as their last status,
a third of a lease. The text is made when a client asks for it. What owners of keys used is only for the admin.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from pipeline.errors import LogError
from pipeline.log.operations.usage import today
from pipeline.log.protocol import Occupancy, Used
from pipeline.metrics.counters import Counts, Reading, Readings, read_snapshot
from pipeline.metrics.families import (
    DEAD_LETTERS,
    FAMILIES,
    LOG_LIMIT_BYTES,
    LOG_SERVER,
    LOG_SLOT,
    LOG_UP,
    LOG_USED_BYTES,
    MODEL,
    NUM_LIVE,
    NUM_WAITING,
    OWNER_OUTPUT_TOKENS,
    OWNER_PROMPT_TOKENS,
    OWNER_REQUESTS,
    SLOT,
    STREAM_LAG,
    STREAM_LENGTH,
    STREAM_PENDING,
    WORKER_READY,
    Family,
)
from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, STAGES, slot_stage
from pipeline.stage.slots import Status, known_statuses
from web.http.keys import shown as shown_owner
from web.live.frontend import Frontend
from web.live.ready import statuses_of_ranks

logger = structlog.get_logger()

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE_S = 2.0
"""How long the log has to answer; after that, the text goes without it. Prometheus itself waits for 10 s."""
MOST_OWNERS: Final = 50
MOST_READ: Final = 1000
"""Most owners with a series of their own, and most whose usage is read."""


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What the log answered."""

    server: tuple[str, str]
    """Its name and version."""
    used_bytes: int
    limit_bytes: int
    """Memory above which new requests are refused; 0: no limit."""
    occupancy: Occupancy
    statuses: Sequence[Status]
    used: Mapping[tuple[str, int, str], Used]
    """What owners used today; empty if the text is not for the admin."""


_METRICS: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Exposition:
    """Makes the text. Clients that ask while it is being made share it, so asking often costs little."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._making: dict[bool, asyncio.Task[bytes]] = {}

    async def text(self, *, is_admin: bool) -> bytes:
        """Return the text; if the log does not answer, with the measures of this process alone."""
        if is_admin not in self._making or self._making[is_admin].done():
            self._making[is_admin] = self._frontend.spawn(self._make(is_admin))
        return await asyncio.shield(self._making[is_admin])

    async def _make(self, is_admin: bool) -> bytes:
        asking = self._frontend.spawn(self._ask(is_admin))
        await asyncio.wait({asking}, timeout=PATIENCE_S)  # a late one is left to end by itself
        facts = asking.result() if asking.done() else None
        models = self._frontend.readiness.models
        own = {self._frontend.name: self._frontend.measures.snapshot()}
        text: list[bytes] = []
        for lines in render(facts, own, models[0] if models else ""):
            text.append(lines)
            await asyncio.sleep(0)  # all of it takes milliseconds; streams go on meanwhile
        return b"".join(text)

    async def _ask(self, is_admin: bool) -> LogFacts | None:
        log = self._frontend.log
        try:
            server = await log.server()
            used_bytes, max_bytes = await log.memory()
            occupancy = await log.occupancy()
            texts = await asyncio.gather(*(log.statuses(stage) for stage in (*STAGES, ARCHIVE)))
            ranks = await statuses_of_ranks(log)
            day = today()
            used = await log.usage((await log.users(day))[:MOST_READ], [day]) if is_admin else {}
        except LogError as error:
            logger.warning("metrics_without_log", error=str(error))
            return None
        workers = (status for found in texts for status in known_statuses(found))
        limit_bytes = min(filter(None, (max_bytes, self._frontend.budget.most_bytes)), default=0)
        all_workers = [*workers, *chain.from_iterable(ranks.values())]
        return LogFacts(server, used_bytes, limit_bytes, occupancy, all_workers, used)


def render(facts: LogFacts | None, own: Mapping[str, str], served: str) -> Iterator[bytes]:
    """Yield the text in Prometheus' format, family by family. Before that, yield nothing once for each process: the
    caller can let other tasks run after each step.

    *own*: slot -> snapshot of this process, which wins over its status. *served*: the name of the served model, for
    slots that do not say theirs.
    """
    statuses = facts.statuses if facts is not None else ()
    snapshots = {status.slot: status.metrics for status in statuses if status.metrics} | dict(own)
    models = {status.slot: status.models[0] for status in statuses if status.models}
    shown: Readings = {LOG_UP: {(): float(facts is not None)}}
    for slot, snapshot in snapshots.items():
        engine = slot.replace(DETOKENIZE, GENERATE)  # a detokenizer reads the steps of this engine
        _show(shown, slot, models.get(engine, served), read_snapshot(snapshot))
        yield b""
    if facts is not None:
        _show_log(shown, facts, served)
    for family in FAMILIES:
        if family in shown:
            yield generate_latest(_Shown(_metric(family, shown[family])))


def _show(shown: Readings, slot: str, model: str, readings: Readings) -> None:
    """Add the measures of a worker, and zeros for label values that it has not seen yet."""
    for family in FAMILIES:
        if slot_stage(slot) not in family.stages:
            continue
        series = dict.fromkeys(_known(family), _nothing(family)) | readings.get(family, {})
        slot_lease = (slot, model) if family.of_model else (slot,)
        shown.setdefault(family, {}).update({(*slot_lease, *labels): reading for labels, reading in series.items()})


def _show_log(shown: Readings, facts: LogFacts, served: str) -> None:
    """Add what the log holds."""
    shown[LOG_SERVER] = {facts.server: 1}
    shown[LOG_USED_BYTES] = {(): facts.used_bytes}
    if facts.limit_bytes:
        shown[LOG_LIMIT_BYTES] = {(): facts.limit_bytes}
    occupancy = facts.occupancy
    waiting = occupancy.submitted.length + occupancy.tokenized.lag
    shown.setdefault(NUM_WAITING, {})[LOG_SLOT, served] = waiting
    shown[WORKER_READY] = {(status.slot,): float(status.phase == "ready") for status in facts.statuses}
    steps = {f"steps:{engine}": depth for engine, depth in occupancy.steps.items()}
    streams = {"submitted": occupancy.submitted, "tokenized": occupancy.tokenized} | steps
    shown[STREAM_LENGTH] = {(stream,): depth.length for stream, depth in streams.items()}
    shown[STREAM_PENDING] = {(stream,): depth.pending for stream, depth in streams.items()}
    shown[STREAM_LAG] = {(stream,): depth.lag for stream, depth in streams.items()}
    shown[DEAD_LETTERS] = {(): occupancy.num_dead}
    shown[NUM_LIVE] = {(): occupancy.num_live}
    if facts.used:
        _show_owners(shown, facts.used)


def _show_owners(shown: Readings, used: Mapping[tuple[str, int, str], Used]) -> None:
    """Add what each of the owners with the most tokens used, and the sum of what the others did."""
    tokens: Counter[str] = Counter()
    for (owner, _, _), one in used.items():
        tokens[owner] += one.prompt_tokens + one.output_tokens
    labels = {owner: shown_owner(owner) for owner, _ in tokens.most_common(MOST_OWNERS)}
    for family in (OWNER_REQUESTS, OWNER_PROMPT_TOKENS, OWNER_OUTPUT_TOKENS):
        figure = family.name.removeprefix("owner_").removesuffix("_total")
        sums: Counter[str] = Counter()  # two owners may have one label: a key may be named `other`
        for (owner, _, _), one in used.items():
            sums[labels.get(owner, "other")] += getattr(one, figure)
        shown[family] = {(label,): amount for label, amount in sums.items()}


def _known(family: Family) -> Iterable[tuple[str, ...]]:
    """Return the label values that are shown from the start. A process that cannot be measured has none."""
    return [(word,) for word in family.known] if family.labels else () if family.bare else [()]


def _nothing(family: Family) -> Reading:
    return Counts(0, (0,) * (len(family.buckets) + 1)) if family.kind == "histogram" else 0


def _metric(family: Family, series: Mapping[tuple[str, ...], Reading]) -> Any:
    slot_lease = (SLOT, MODEL) if family.of_model else (SLOT,)
    labels = (*(slot_lease if family.stages else ()), *family.labels)
    metric: Any = _METRICS[family.kind](family.shown_as, family.help, labels=labels)
    bounds = [*map(str, family.buckets), "+Inf"]
    for values, reading in sorted(series.items()):
        if isinstance(reading, Counts):
            cumulative = list(zip(bounds, accumulate(reading.counts), strict=True))
            metric.add_metric(values, cumulative, reading.total)
        else:
            metric.add_metric(values, reading)
    return metric


class _Shown(Collector):
    """One metric, in the form that the library asks for."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)
