"""Rank 0's loop: take in, plan, forward, commit. Tokenized -> StepCompleted.

What it remembers is the schedule; whatever crosses the network goes through the courier's thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import structlog

from pipeline.config import Config
from pipeline.events import EventRow, Failed, Figures, StepCompleted, StepRow, TakenOver, TokenRow
from pipeline.log import Inbox, StreamLog
from pipeline.names import GENERATE
from pipeline.slots import Place, acquire_slot, progress_reporter
from pipeline.worker import Stop
from stages.generate.courier import Arrived, Courier, Ended, Flush, Lost, News
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.checkpoint import check_folder
from stages.generate.resolve import Settings, resolve
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.schedule import Identity, Schedule

logger = structlog.get_logger()

STEP_TIMEOUT_S = 60.0
"""A forward pass that takes longer is stuck, and the watchdog ends the process."""
LOAD_TIMEOUT_S = 3600.0
SWITCH_INTERVAL_S = 0.0005
"""How long the courier's thread may keep the interpreter from the forward pass, which wants it at every operation."""
FEWEST_STEPS_BETWEEN_CHECKS = 100
"""An engine that has nothing to do looks whether its books add up, when it has made so many steps since, or as many as
it has pages: what a look costs grows with them.
"""


class Forward(Protocol):
    """What the loop needs of an engine."""

    def forward(self, plan: BatchPlan) -> list[int]:
        """Compute one step; return a token id for each row that samples, in row order."""
        ...


class GenerateWorker:
    """One engine's loop."""

    def __init__(self, engine: Forward, schedule: Schedule, courier: Courier, place: Place) -> None:
        self._engine = engine
        self._schedule = schedule
        self._courier = courier
        self._place = place
        self._let_go: list[str] = []
        """Uids that ended elsewhere; the next step says so."""
        self._rows: list[StepRow] = []
        """Rows for the next step that no forward pass makes."""
        self._refused: list[str] = []
        """Uids of requests that failed here; the next step consumes their entries."""
        self._next_check = 0
        """Number of the step from which on the books are looked at again."""

    def run(self, stop: Stop) -> None:
        """Work until *stop* is set or the slot is lost."""
        while not stop and not self._place.lost.is_set():
            self._place.came_round(patience_s=STEP_TIMEOUT_S)
            self._take_in()
            planned = self._schedule.plan()
            if planned is not None:
                plan, marks = planned
                rows = self._forward(plan)
                ended = [row.uid for row in rows if isinstance(row, TokenRow) and row.end is not None]
                self._commit(plan.step, [*marks, *rows], ended, _figures(plan))
            elif self._let_go or self._rows:
                self._commit(self._schedule.skip_step(), [], [], Figures())
            else:
                self._courier.idle(self._schedule.room)
                self._check_books()
                self._wait_for_news(stop)

    def _forward(self, plan: BatchPlan) -> Sequence[StepRow]:
        """Compute a step and return its rows.

        When it raises, its rows are tried one by one, and the requests of those that raise again fail. The others start
        over: what the step wrote to the pages, which they may share, cannot be trusted. When all of several rows raise,
        it is the engine that is broken, and its process ends.
        """
        try:
            return self._schedule.complete(self._engine.forward(plan))
        except Exception:
            logger.exception("step_failed", step=plan.step, rows=len(plan.rows))
        errors: dict[str, tuple[int, Exception]] = {}
        for place, row in enumerate(plan.rows):
            try:
                self._engine.forward(BatchPlan(plan.step, (row,), int(place < plan.num_decode_rows)))
            except Exception as error:
                uid, n = self._schedule.holder(row.table)
                errors[uid] = n, error
        if len(errors) == len(plan.rows) > 1:
            raise next(iter(errors.values()))[1]
        failed: list[StepRow] = []
        for uid, (n, reason) in errors.items():
            event = Failed(status=500, code="engine_error", message=f"The engine failed on this request: {reason}")
            failed.append(EventRow(uid=uid, n=n, event=event))
            self._schedule.drop(uid)
            self._refused.append(uid)
        return [*self._schedule.start_over(), *failed]

    def _take_in(self) -> None:
        while (news := self._courier.hear()) is not None:
            self._fold(news)

    def _wait_for_news(self, stop: Stop) -> None:
        while not stop and not self._place.lost.is_set():
            self._place.came_round()
            news = self._courier.hear(timeout_s=0.2)
            if news is not None:
                self._fold(news)
                return

    def _check_books(self) -> None:
        """Look, while nothing is to be done, whether the books add up; report what is wrong and go on.

        A page that is lost costs memory; an engine that ends for it would cost every request.
        """
        if self._schedule.next_step < self._next_check:
            return
        self._next_check = self._schedule.next_step + max(FEWEST_STEPS_BETWEEN_CHECKS, self._schedule.num_pages)
        try:
            problems = self._schedule.problems()
        except Exception as error:  # books so wrong that they cannot be read
            problems = [f"the check failed: {error!r}"]
        if problems:
            times = self._place.status.books_wrong + 1
            logger.error("books_wrong", problems=problems, times=times)
            self._place.say(books_wrong=times)

    def _flush(self, control_id: str) -> None:
        pages = self._schedule.flush()
        logger.info("flushed", pages=pages)
        self._place.say(flushed=control_id, flushed_pages=self._place.status.flushed_pages + pages)

    def _fold(self, news: News) -> None:
        match news:
            case Arrived():
                self._arrived(news)
            case Ended(uid):
                self._schedule.drop(uid)
                self._let_go.append(uid)
            case Flush(control_id):
                self._flush(control_id)
            case Lost(error):
                raise error

    def _arrived(self, news: Arrived) -> None:
        request, identity = news.request, self._schedule.identity
        n = len(request.output_ids)
        failed = self._schedule.add(request)
        if failed is not None:
            self._rows.append(EventRow(uid=request.uid, n=n, event=failed))
            self._refused.append(request.uid)
        elif news.resumed:
            event = TakenOver(engine=identity.engine, epoch=identity.epoch)
            self._rows.append(EventRow(uid=request.uid, n=n, event=event))

    def _commit(self, number: int, rows: Sequence[StepRow], ended: Sequence[str], figures: Figures) -> None:
        schedule = self._schedule
        event = StepCompleted(
            rows=(*self._rows, *rows),
            let_go=tuple(self._let_go),
            figures=figures.model_copy(
                update={
                    "running": schedule.num_running,
                    "waiting": schedule.num_waiting,
                    "free_pages": schedule.free_pages,
                }
            ),
        )
        self._courier.commit(number, event, [*ended, *self._refused, *self._let_go], schedule.room)
        self._rows, self._let_go, self._refused = [], [], []


def _figures(plan: BatchPlan) -> Figures:
    prefills = plan.rows[plan.num_decode_rows :]
    return Figures(
        decode_rows=plan.num_decode_rows,
        prefill_rows=len(prefills),
        prefill_tokens=sum(len(row.token_ids) for row in prefills),
    )


def run(config: Config, log: StreamLog, lease_log: StreamLog, folder: Path) -> int:
    """Be one engine until SIGTERM; return the exit code."""
    stop = Stop().on_signals()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    lease_ms, retention_ms = int(config.log.lease_s * 1000), int(config.log.retention_s * 1000)
    place = Place(lease_log, acquire_slot(log, GENERATE, lease_ms, preferred=config.worker.slot), lease_ms)
    owner = place.owner
    structlog.contextvars.bind_contextvars(slot=owner.slot)
    try:
        place.came_round(patience_s=LOAD_TIMEOUT_S)
        place.say(phase="loading", detail="torch")
        engine, schedule, settings = load(config, folder, place)
        log.prepare(Inbox.tokenized(log.names))
        log.prepare(Inbox.steps(log.names, owner.slot))
        courier = Courier(
            log,
            owner,
            lease_ms=lease_ms,
            retention_ms=retention_ms,
            came_round=lambda: place.came_round(patience_s=STEP_TIMEOUT_S),
        )
        courier.start()
        place.say(
            phase="ready",
            detail="",
            progress=1.0,
            models=config.names.served_model_name or (folder.name,),
            context=settings.limits.context,
            fingerprint=engine.fingerprint,
        )
        try:
            GenerateWorker(engine, schedule, courier, place).run(stop)
        finally:
            courier.stop()
    finally:
        place.leave()
    return 0


def load(config: Config, folder: Path, place: Place) -> tuple[Engine, Schedule, Settings]:
    """Load the model and make its schedule.

    Raises:
        ConfigError: The folder, the flags and the machine do not go together.
    """
    spec = check_folder(folder, dummy=config.engine.dummy_weight)
    settings = resolve(config.engine, spec)
    report = progress_reporter(place, "weights")
    began_s = time.monotonic()
    engine = Engine(
        spec,
        folder,
        device=settings.device,
        dtype=settings.dtype,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        max_running_requests=settings.limits.max_running_requests,
        max_seq_len=settings.limits.context,
        attention=settings.attention,
        threads=settings.threads,
        dummy=config.engine.dummy_weight,
        progress=lambda done_bytes, total_bytes: report(done_bytes / max(total_bytes, 1)),
    )
    schedule = Schedule(
        make_cache(settings.cache, settings.num_pages, settings.page_size),
        settings.limits,
        spec.eos_ids,
        Identity(place.owner.slot, place.owner.epoch, engine.fingerprint),
    )
    logger.info(
        "engine_loaded",
        seconds=round(time.monotonic() - began_s, 2),
        architecture=spec.architecture,
        device=settings.device,
        dtype=str(settings.dtype).removeprefix("torch."),
        attention=settings.attention,
        cache=settings.cache,
        pages=settings.num_pages,
        page_size=settings.page_size,
        context=settings.limits.context,
        threads=settings.threads,
    )
    return engine, schedule, settings
