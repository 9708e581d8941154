"""Rank 0's loop: read updates, plan, compute, commit. Tokenized -> StepCompleted.

The loop's memory is the schedule. The log thread does everything that crosses the network.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog

from pipeline import VERSION
from pipeline.errors import Fenced
from pipeline.events import EventRow, Failed, StepCompleted, StepRow, StepStats, TakenOver, TokenRow
from pipeline.log.protocol import Owner
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.names import GENERATE
from pipeline.prefixes import packed
from pipeline.process.failpoints import failpoint
from pipeline.process.priority import give_way
from pipeline.serving import Serving, tokenizer_fingerprint
from pipeline.stage.slots import Reporter, progress_reporter, wait_until_it_fits
from pipeline.stage.worker import Stop, WorkerProcess
from stages.generate.kvcache import make_cache
from stages.generate.loop.flights import MOST_STEPS, Flight, Flights, Forward
from stages.generate.loop.grammars import Grammars
from stages.generate.loop.log_thread import LogThread
from stages.generate.loop.meter import EngineMeter, measure_cache
from stages.generate.loop.pace import Budget, Pace
from stages.generate.loop.row_cost import RowCost
from stages.generate.loop.suspects import Suspects
from stages.generate.loop.updates import Arrived, Ended, EngineLink, Flush, Lost, Room, Update
from stages.generate.model.checkpoint import check_folder, fingerprint, model_id
from stages.generate.model.config import GENERATION_CONFIG
from stages.generate.model.ends import end_tokens
from stages.generate.model.recommended import read_recommended
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.recorded import SNAPSHOT_EVERY, SNAPSHOT_EVERY_S, RecordedSchedule
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule
from stages.generate.setup.config import DefaultsConfig, GenerateConfig
from stages.generate.setup.loading import load_engine
from stages.generate.setup.resolve import Settings, resolve

FEWEST_STEPS_BETWEEN_CHECKS: Final = 100
"""Fewest steps between two checks of an idle engine's page allocation. With more pages than this, there are as many
steps as pages: the cost of a check grows with the pages.
"""


STEP_TIMEOUT_S = 60.0
"""A forward pass that takes longer is stuck, and the watchdog ends the process."""
LOAD_TIMEOUT_S = 3600.0
GIVES_WAY = 8
"""Steps of niceness on a CPU: the engine shares its cores with the processes that pass its tokens on."""
SWITCH_INTERVAL_S = 0.0005
"""Longest time that the log thread keeps the interpreter from the forward pass, which needs it at every operation."""
NO_STEP = StepCompleted(rows=())
STEPS_BESIDE_DRAFTS = 2
"""Largest number of steps in a call while drafts are expected to pay: they may be found after each token."""
PUBLISH_EVERY_S = 1.0
MOST_PUBLISHED = 1024
"""Number of digests in an engine's status: 5.5 KB of text."""
GRAMMAR_POLL_S = 0.005
"""Pause between two looks for updates while an idle engine waits for a grammar."""


class GenerateWorker:
    """One engine's loop."""

    def __init__(
        self,
        engine: Forward,
        schedule: Schedule,
        log_thread: EngineLink,
        slot_lease: Reporter,
        measures: Measures | None = None,
        pace: Pace | None = None,
        grammars: Grammars | None = None,
        *,
        overlap: bool = False,
        together_s: float = 0.0,
        drafts: str = "",
        namespace: str = "",
    ) -> None:
        """*pace*: decides how many prompt tokens a step computes, instead of the limits of *schedule*.

        *grammars*: of the engine's tokenizer; without it, a request with a grammar ends this worker. *overlap*: the
        worker plans and launches the next step before it waits for the tokens of the last one. *together_s*: time in
        which several steps may be computed in one call. *drafts*: `paying` drafts that are expected to save time, or
        `all`; empty: none. *namespace*: the worker publishes digests of its cache, made with this name; empty: none.
        """
        self._namespace = namespace
        self._published_s = 0.0
        self._num_left = 0
        """Number of prompt tokens that were to be computed then, without those that were computed since."""
        self._schedule = schedule
        self._log_thread = log_thread
        self._slot_lease = slot_lease
        self._pace = pace
        self._grammars = grammars
        self._overlap = overlap
        self._together_s = together_s
        self._step_s = math.inf
        """Time of the last step."""
        self._released: list[str] = []
        """Uids of requests that ended elsewhere, for the next step's `released`."""
        self._rows: list[StepRow] = []
        """Rows for the next step that do not come from a forward pass."""
        self._refused: list[str] = []
        """Uids of requests that failed here. The next step consumes their entries."""
        self._resumed: dict[str, int] = {}
        """uid -> number of tokens of requests that another owner of a slot began, until they are planned here."""
        self._suspects = Suspects()
        self._uncompiled: list[Arrived] = []
        """Requests with a grammar whose compilation has not begun."""
        self._books = PageAudit(schedule, slot_lease)
        self._meter = EngineMeter(measures or Measures(), schedule)
        self._row_cost = RowCost() if drafts == "paying" else None
        self._drafts = drafts
        self._flights = Flights(engine, schedule, self._meter, pace, self._row_cost)
        self._snapshot = schedule.snapshot() if isinstance(schedule, RecordedSchedule) else ""
        """Snapshot of the schedule before the next step, if that step records one; else empty."""
        self._snapshot_from = SNAPSHOT_EVERY
        """Number of the step after which the next snapshot is taken .."""
        self._snapshot_s = time.monotonic() + SNAPSHOT_EVERY_S
        """.. or after the first step that ends later than this time."""
        self._snapshot_is_due = False
        """A snapshot is taken as soon as no step is in flight."""

    def run(self, stop: Stop) -> None:
        """Work until *stop* is set or the slot is lost."""
        while not stop and not self._slot_lease.lost.is_set():
            self._slot_lease.report_progress(patience_s=STEP_TIMEOUT_S)
            self._take_in()
            self._publish_cache()
            takes_over = self._resumed and self._schedule.may_admit
            ahead = self._overlap and not takes_over and not self._suspects and not self._may_draft
            if not ahead or self._snapshot_is_due or self._flights.have_failed:
                self._land_until(0)
            self._try_suspects()
            if self._uncompiled and not self._suspects:  # else new grammars would delay the trials for ever
                self._begin_grammars()
                self._try_suspects()
            if self._launch():
                self._land_until(1 if ahead else 0)
            elif self._flights:
                self._land_until(0)
            elif self._released or self._rows:
                self._commit(self._schedule.skip_step(), [], [])
            else:
                (self._log_thread.look if self._grammars else self._log_thread.idle)(self._room)
                self._books.check()
                self._wait_for_update(stop)
        self._land_until(0)
        if self._schedule.num_running:
            failpoint("generate.during_drain")

    def _launch(self) -> bool:
        """Plan and launch the next step; False: there is nothing to compute, or a step must land first."""
        schedule, pace = self._schedule, self._pace
        budget = pace.budget(schedule.work) if pace is not None and schedule.has_prompts else None
        planned = schedule.plan(None if budget is None else budget.tokens, self._row_cost_now)
        if planned is None:
            return False
        plan, marks = planned
        self._meter.planned(marks)
        number = plan.step
        if self._resumed and self._take_over(plan, marks, budget):
            marks, number = [], self._schedule.skip_step()
        failpoint("generate.before_forward")
        num_steps, ends = self._schedule.alike(self._most_steps())
        self._flights.launch(Flight(plan, marks, number, budget), num_steps, ends)
        return True

    def _most_steps(self) -> int:
        """Return how many steps may be computed in one call now."""
        waits = self._uncompiled or self._resumed or self._suspects or self._grammars
        if waits or self._overlap or not self._flights.can_compute_several:
            return 1
        most = (
            STEPS_BESIDE_DRAFTS if self._may_draft and self._schedule.expects_drafts(self._row_cost_now) else MOST_STEPS
        )
        return max(1, min(most, int(self._together_s / self._step_s)))

    @property
    def _may_draft(self) -> bool:
        return bool(self._drafts) and self._schedule.may_draft

    @property
    def _row_cost_now(self) -> int | None:
        """See `Schedule.plan`."""
        if self._row_cost is not None:
            return self._row_cost.thousandths(max(self._schedule.num_running, 1))
        return 0 if self._drafts else None

    def _land_until(self, most: int) -> None:
        """Wait for steps in flight and commit them, oldest first, until at most *most* are left."""
        while len(self._flights) > most:
            flight, rows, failed = self._flights.land()
            self._refused += failed
            self._step_s = flight.seconds
            self._commit_flight(flight, rows)
            for after, its_rows in self._flights.follow(flight):
                self._commit_flight(after, its_rows)
            if flight.following:
                self._log_thread.close()

    def _commit_flight(self, flight: Flight, rows: Sequence[StepRow]) -> None:
        failpoint("generate.after_forward")
        ended = [row.uid for row in rows if isinstance(row, TokenRow) and row.end is not None]
        if ended:
            failpoint("generate.with_end_row")
        figures = _figures(flight)
        self._num_left -= figures["prefill_tokens"]
        self._commit(flight.number, [*flight.marks, *rows], ended, **figures)

    def _take_in(self) -> None:
        while (update := self._log_thread.next_update()) is not None:
            self._fold(update)
        for arrived, result in self._grammars.ready() if self._grammars else ():
            if isinstance(result, Failed):
                self._refuse(arrived.request, result)
            else:
                request = dataclasses.replace(arrived.request, matcher=result)
                self._enter(dataclasses.replace(arrived, request=request))

    @property
    def _room(self) -> Room:
        """What may be taken from the log now."""
        uncompiled = len(self._uncompiled) + (len(self._grammars) if self._grammars else 0)
        count = max(self._schedule.room - uncompiled, 0)
        spare = max(self._schedule.spare - uncompiled, 0)
        return Room(count, spare=spare) if count or uncompiled else Room(*self._schedule.room_for_others)

    def _wait_for_update(self, stop: Stop) -> None:
        if self._grammars:
            self._grammars.wait(GRAMMAR_POLL_S)
            return
        while not stop and not self._slot_lease.lost.is_set():
            self._slot_lease.report_progress()
            self._publish_cache()
            update = self._log_thread.next_update(timeout_s=0.2)
            if update is not None:
                self._fold(update)
                return

    def _publish_cache(self) -> None:
        """Tell the tokenizers once a second what is cached and how much there is to do, if that has changed."""
        if not self._namespace or time.monotonic() - self._published_s < PUBLISH_EVERY_S:
            return
        schedule = self._schedule
        cached = packed(schedule.prefixes(MOST_PUBLISHED, self._namespace))
        backlog, self._num_left = max(self._num_left, 0), sum(left for _, left in schedule.work.prompts)
        status = self._slot_lease.status
        if (status.cached, status.backlog, status.page_size) != (cached, backlog, schedule.page_size):
            self._slot_lease.say(cached=cached, backlog=backlog, page_size=schedule.page_size)
        self._published_s = time.monotonic()

    def _fold(self, update: Update) -> None:
        match update:
            case Arrived(request) as arrived:
                if request.grammar:
                    assert self._grammars is not None, "an engine without grammars got a request with one"
                    self._uncompiled.append(arrived)
                else:
                    self._enter(arrived)
            case Ended(uid):
                self._schedule.drop(uid)
                if self._grammars is not None:
                    self._grammars.drop(uid)
                self._uncompiled = [other for other in self._uncompiled if other.request.uid != uid]
                self._resumed.pop(uid, None)
                self._suspects.drop(uid)
                self._released.append(uid)
            case Flush(control_id):
                pages = self._schedule.flush()
                logger.info("flushed", pages=pages)
                self._slot_lease.say(flushed=control_id, flushed_pages=self._slot_lease.status.flushed_pages + pages)
            case Lost(error):
                raise error

    def _enter(self, arrived: Arrived) -> None:
        """Add a request, whose grammar is compiled if it has one, to the schedule or to the suspects."""
        request = arrived.request
        if arrived.resumed and not request.grammar:
            self._resumed[request.uid] = len(request.output_ids)
        if arrived.suspect and not request.grammar:
            self._suspects.add(request)
        else:
            self._add(request)

    def _begin_grammars(self) -> None:
        """Begin to compile the grammars of new requests. A suspect waits for its trial."""
        came = {arrived.request.uid for arrived in self._uncompiled}
        self._say_taken_over([one.request for one in self._uncompiled if one.resumed and not one.suspect], alone=False)
        uncompiled, self._uncompiled = self._uncompiled, []  # without the requests that ended meanwhile
        for arrived in uncompiled:
            if arrived.request.uid not in came:
                self._uncompiled.append(arrived)
            elif arrived.suspect:
                self._suspects.add(arrived.request)
            else:
                self._compile(arrived)

    def _compile(self, arrived: Arrived) -> None:
        assert self._grammars is not None, "an engine without grammars got a request with one"
        self._grammars.begin(arrived)

    def _say_taken_over(self, requests: Sequence[NewRequest], *, alone: bool) -> None:
        """Commit that this engine took over *requests*, before it compiles their grammars: that may kill it."""
        if not requests:
            return
        self._land_until(0)
        rows = [self._taken_over(request.uid, len(request.output_ids), alone=alone) for request in requests]
        self._commit(self._schedule.skip_step(), rows, [], settled=True)
        failpoint("generate.after_takeover_committed")
        self._take_in()  # as in _take_over

    def _try_suspects(self) -> None:
        """Let the next suspect run alone, once the trial before is over. No other grammar is compiled then."""
        trial = self._suspects.trial
        if trial is not None:
            is_compiled = self._grammars is None or trial.uid not in self._grammars
            if not is_compiled or not trial.is_over(self._schedule.num_output(trial.uid)):
                return
            self._end_trial()
        request = None if self._grammars else self._suspects.begin()
        if request is None:
            return
        logger.warning("runs_alone", uid=request.uid, n=len(request.output_ids))
        self._land_until(0)
        self._rows += self._schedule.isolate(request.uid)
        if request.grammar:
            self._say_taken_over([request], alone=True)
            if request.uid not in self._released:  # it may have ended meanwhile
                self._compile(Arrived(request, resumed=True, suspect=True))
        elif not self._add(request):
            self._end_trial()

    def _end_trial(self) -> None:
        self._suspects.end()
        self._schedule.isolate(None)

    def _take_over(self, plan: BatchPlan, marks: Sequence[StepRow], budget: Budget | None) -> bool:
        """Commit that this engine took over the requests of a plan that others began; return False if there are none.

        The takeover is in the log before anything is computed for them. So it stays there if one kills the engine.
        """
        trial = self._suspects.trial
        rows: list[StepRow] = []
        for mark in marks:
            n = self._resumed.pop(mark.uid, None) if isinstance(mark, EventRow) else None
            if n is not None:
                rows.append(self._taken_over(mark.uid, n, alone=trial is not None and trial.uid == mark.uid))
        if rows:
            assert not self._flights, "step.lua would take a step in flight for one that was committed before"
            self._commit(plan.step, [*rows, *marks], [], **_decided(budget), settled=True)
            failpoint("generate.after_takeover_committed")
            self._take_in()  # raises if it could not be committed because the slot has another owner
        return bool(rows)

    def _taken_over(self, uid: str, n: int, *, alone: bool) -> EventRow:
        by = self._schedule.identity
        event = TakenOver(engine=by.engine, epoch=by.epoch, numerics=by.numerics, alone=alone)
        return EventRow(uid=uid, n=n, event=event)

    def _add(self, request: NewRequest) -> bool:
        """Queue a request; return False if it can never run here. The next step reports that."""
        failed = self._schedule.add(request)
        if failed is not None:
            self._refuse(request, failed)
        return failed is None

    def _refuse(self, request: NewRequest, failed: Failed) -> None:
        self._resumed.pop(request.uid, None)
        self._rows.append(EventRow(uid=request.uid, n=len(request.output_ids), event=failed))
        self._refused.append(request.uid)

    def _commit(
        self, number: int, rows: Sequence[StepRow], ended: Sequence[str], *, settled: bool = False, **figures: Any
    ) -> None:
        schedule = self._schedule
        inputs, chunks = schedule.note() if isinstance(schedule, RecordedSchedule) else ((), ())
        held = {"running": schedule.num_running, "waiting": schedule.num_waiting, "free_pages": schedule.free_pages}
        said = {
            "rows": (*self._rows, *rows),
            "released": tuple(self._released),
            "inputs": inputs,
            "chunks": chunks,
            "schedule": self._snapshot,
            "figures": StepStats(**held, **figures),
        }
        event = NO_STEP.model_copy(update=said)  # validates no row again; model_construct is half as fast
        self._meter.committed(event)
        self._log_thread.commit(number, event, [*ended, *self._refused, *self._released], self._room, settled=settled)
        self._rows, self._released, self._refused = [], [], []
        self._snapshot = ""
        due = number >= self._snapshot_from or time.monotonic() >= self._snapshot_s
        if not isinstance(schedule, RecordedSchedule) or not due or settled:
            return
        self._snapshot_is_due = bool(self._flights)
        if not self._flights:
            self._snapshot, self._snapshot_from = schedule.snapshot(), number + SNAPSHOT_EVERY
            self._snapshot_s = time.monotonic() + SNAPSHOT_EVERY_S


def _figures(flight: Flight) -> dict[str, Any]:
    plan = flight.plan
    prefills = plan.rows[plan.num_decode_rows :]
    return {
        "decode_rows": plan.num_decode_rows - plan.num_drafts,
        "drafts": plan.num_drafts or None,
        "prefill_rows": len(prefills),
        "prefill_tokens": sum(len(row.token_ids) for row in prefills),
        "forward_ms": round(flight.seconds * 1000, 3),
        **_decided(flight.budget),
    }


def _decided(budget: Budget | None) -> dict[str, Any]:
    """Return a budget's part of the figures of its step."""
    return {} if budget is None else {"mixed_prefill_length": budget.tokens, "target_ms": round(budget.target_s * 1000)}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to compute. Its process keeps it when the slot is lost."""

    engine: Forward
    settings: Settings
    eos_ids: tuple[int, ...]

    def can_serve(self, serving: Serving) -> Serving:
        """Return *serving* with the context that this engine can serve."""
        settings = self.settings
        step = settings.page_size if settings.context_flag == "--num-pages" else 1
        return dataclasses.replace(
            serving, context=settings.limits.context, context_flag=settings.context_flag, context_step=step
        )

    def said(self) -> dict[str, object]:
        """Return how the engine computes, for its status."""
        settings = self.settings
        return {
            "numerics": settings.numerics,
            "batch_invariant": settings.batch_invariant,
            "why_torch": settings.why_torch,
        }

    def grammars(self, folder: Path) -> Grammars:
        """Return the grammars of an engine with the tokenizer of *folder*."""
        return Grammars(folder, self.eos_ids, self.settings.limits.vocab_size).started()

    def schedule(self, owner: Owner, serving: Serving, *, noted: bool = False) -> Schedule:
        """Return an empty schedule with an empty cache for the engine *owner*. *serving* has the served context.

        *noted*: record the schedule's inputs in the steps.
        """
        settings = self.settings
        return (RecordedSchedule if noted else Schedule)(
            make_cache(settings.cache, settings.num_pages, settings.page_size, settings.local),
            dataclasses.replace(settings.limits, context=serving.context),
            self.eos_ids,
            Identity(owner.slot, owner.epoch, serving.weights, settings.numerics, VERSION),
        )


Load: TypeAlias = Callable[[GenerateConfig, Path, Callable[[float], None]], Loaded]
"""Loads a model and reports its progress."""


def run(config: GenerateConfig, open_log: Callable[[], RedisLog], folder: Path) -> int:
    """Run one engine until SIGTERM; return the exit code."""

    def load_and_give_way(config: GenerateConfig, folder: Path, say: Callable[[float], None]) -> Loaded:
        loaded = load(config, folder, say)
        if loaded.settings.device.type == "cpu":
            give_way(GIVES_WAY)
        return loaded

    return run_engine(config, open_log, folder, load_and_give_way)


def run_engine(config: GenerateConfig, open_log: Callable[[], RedisLog], folder: Path, load: Load) -> int:
    """Run one engine with the model that *load* returns.

    The engine asks for a slot once the model is loaded. When it loses the slot, it forgets its requests, keeps its
    weights and asks again.
    """
    process = WorkerProcess(GENERATE, open_log, lease_ms=int(config.log.lease_s * 1000), preferred=config.worker.slot)
    measures = process.measures
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    names = config.names.served_model_name or (model_id(folder),)
    serving = serving_of(folder, names[0], dummy=config.engine.dummy_weight)
    with process.loading("torch", LOAD_TIMEOUT_S) as announcement:
        wait_until_it_fits(process.log, serving, process.stop)  # loading takes long, and may need other engines' memory
        loaded = load(config, folder, progress_reporter(announcement, "weights"))
    measure_cache(measures, loaded.settings)
    defaults = sampling_defaults(config.defaults, folder)
    pace = None if loaded.settings.targets is None else Pace(loaded.settings.targets)
    for slot_lease in process.slot_leases(loaded.can_serve(serving)):
        failpoint("generate.after_lease")
        serving = slot_lease.serving or serving
        log_thread = LogThread(
            process.log,
            slot_lease.owner,
            lease_ms=process.lease_ms,
            report_progress=functools.partial(slot_lease.report_progress, patience_s=STEP_TIMEOUT_S),
            measures=measures,
            serving=serving,
            commit_interval_s=loaded.settings.commit_interval_s,
            steal_after_s=config.engine.steal_after_s,
        )
        log_thread.start()
        slot_lease.say(
            phase="ready",
            models=names,
            context=serving.context,
            sampling_defaults=defaults,
            fingerprint=serving.weights,
            **loaded.said(),
        )
        schedule = loaded.schedule(slot_lease.owner, serving, noted=config.log.journal_bytes > 0)
        grammars = loaded.grammars(folder)
        try:
            overlap = loaded.settings.overlap
            worker = GenerateWorker(
                loaded.engine,
                schedule,
                log_thread,
                slot_lease,
                measures,
                pace,
                grammars,
                overlap=overlap,
                together_s=loaded.settings.commit_interval_s,
                drafts=loaded.settings.drafts,
                namespace=config.log.namespace if loaded.settings.cache == "radix" else "",
            )
            worker.run(process.stop)
        except Fenced as error:
            logger.warning("fenced", error=str(error))
            slot_lease.lost.set()
        finally:
            grammars.close()
            log_thread.stop()
    return 0


def sampling_defaults(config: DefaultsConfig, folder: Path) -> Mapping[str, int | float]:
    """Return the sampling defaults that the model in *folder* recommends, unless *config* switches them off.

    Raises:
        ConfigError: The file with the recommendations cannot be read.
    """
    if config.generation_config == "none":
        return {}
    recommended = read_recommended(folder)
    for reason in recommended.ignored:
        logger.warning("recommendation_ignored", file=str(folder / GENERATION_CONFIG), reason=reason)
    return recommended.sampling


def load(config: GenerateConfig, folder: Path, report: Callable[[float], None]) -> Loaded:
    """Load the model and call *report* with the progress, 0 to 1.

    Raises:
        ConfigError: Folder, flags and machine do not fit together.
    """
    assert config.engine.tp == 1, "ranks are loaded together"
    spec = check_folder(folder, config.engine.loading)
    settings = resolve(config.engine, spec, share=config.share)
    engine = load_engine(config, spec, folder, settings, report)
    if settings.device.type == "cuda":
        settings = settings.with_pages(engine.num_pages)
    return Loaded(engine, settings.with_fused(engine.fused), end_tokens(folder, spec))


def serving_of(folder: Path, model: str, *, dummy: bool = False) -> Serving:
    """Return what an engine of the checked *folder* serves under the name *model*, but for the context."""
    return Serving(model, fingerprint(folder, dummy=dummy), tokenizer_fingerprint(folder))


class PageAudit:
    """Checks the page allocation of one engine. Problems are logged and counted in the status, and the engine goes on.

    A lost page costs memory. An engine that ended because of it would cost every request.
    """

    def __init__(self, schedule: Schedule, slot_lease: Reporter) -> None:
        self._schedule = schedule
        self._slot_lease = slot_lease
        self._next_check = 0
        """Number of the first step after which the pages are checked again."""

    def check(self) -> None:
        """Check the pages, if it is time. The engine is idle."""
        if self._schedule.next_step < self._next_check:
            return
        self._next_check = self._schedule.next_step + max(FEWEST_STEPS_BETWEEN_CHECKS, self._schedule.num_pages)
        try:
            problems = self._schedule.problems()
        except Exception as error:  # an allocation so wrong that it cannot be read
            problems = [f"the check failed: {error!r}"]
        if problems:
            times = self._slot_lease.status.books_wrong + 1
            logger.error("books_wrong", problems=problems, times=times)
            self._slot_lease.say(books_wrong=times)


logger = structlog.get_logger()
