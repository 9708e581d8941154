"""Steps in flight: launched, and their tokens not yet read. There are at most two.

Knows the engine and the schedule. The worker decides when a step is launched and when it lands.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast, runtime_checkable

import structlog

from pipeline.errors import DeviceFull, RankLost
from pipeline.events import EventRow, Failed, StepRow
from stages.generate.loop.grammars import refusal
from stages.generate.loop.meter import EngineMeter
from stages.generate.loop.pace import Budget, Pace
from stages.generate.loop.row_cost import RowCost
from stages.generate.schedule.plan import NOT_A_NUMBER, BatchPlan, Computed, filled
from stages.generate.schedule.schedule import Schedule

logger = structlog.get_logger()

MOST_STEPS: Final = 8
"""Largest number of steps that are computed in one call: a group of commits has as many. New requests wait for them."""


class Forward(Protocol):
    """The part of an engine that the loop needs."""

    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step."""
        ...


@runtime_checkable
class Launches(Protocol):
    """An engine that can begin a step before the tokens of the step before are on the host."""

    def launch(self, plan: BatchPlan, before: Any) -> Any:
        """Begin one step; return what `wait` needs.

        *before*: what this method returned for the step before. Its tokens replace the placeholders of *plan*; None:
        there are no placeholders. All tokens before those of *before* are known now.
        """
        ...

    def wait(self, launched: Any) -> Computed:
        """Return the result of a step once it is computed. All tokens before its own are known now."""
        ...


class Several(Forward, Protocol):
    """An engine that can compute several steps in one call."""

    @property
    def computes_several(self) -> bool:
        """Whether this engine can."""
        ...

    def several(self, plan: BatchPlan, most: int, ends: Sequence[Sequence[int]]) -> Sequence[Computed]:
        """Compute up to *most* steps of the same rows; return the result of each. The last one may lack a token.

        No step follows one in which a row draws one of its *ends*. Each row of *plan* decodes a plain token and has
        pages for all steps.
        """
        ...


class Withheld:
    """An engine that computes a step at its launch and withholds the tokens until `wait`."""

    def __init__(self, engine: Forward) -> None:
        self._engine = engine

    def launch(self, plan: BatchPlan, before: Computed | None) -> Computed:
        """See `Launches`."""
        return self._engine.forward(plan if before is None else filled(plan, before.token_ids))

    def wait(self, launched: Computed) -> Computed:
        """See `Launches`."""
        return launched


def launching(engine: Forward) -> Launches:
    """Return *engine* if it can launch steps, else a wrapper that can."""
    return engine if isinstance(engine, Launches) else Withheld(engine)


@dataclass(slots=True)
class Flight:
    """A step that was launched."""

    plan: BatchPlan
    marks: Sequence[StepRow]
    number: int
    """Number of its commit. It differs from the plan's where a takeover was committed first."""
    budget: Budget | None
    """What `Pace` decided."""
    launched: Any = None
    error: Exception | None = None
    """The error that the launch raised."""
    seconds: float = 0.0
    """Time that the loop has spent on launch and wait."""
    following: Sequence[Computed] = ()
    """Results of the steps after it that the same call has computed."""


class Flights:
    """The steps in flight of one engine, oldest first."""

    def __init__(
        self,
        engine: Forward,
        schedule: Schedule,
        meter: EngineMeter,
        pace: Pace | None,
        row_cost: RowCost | None = None,
    ) -> None:
        self._engine = launching(engine)
        self._several = cast(Several, engine) if getattr(engine, "computes_several", False) else None
        self._schedule = schedule
        self._meter = meter
        self._pace = pace
        self._row_cost = row_cost
        self._flights: deque[Flight] = deque()
        self._token_ids: Sequence[int] = ()
        """Tokens of the last step that landed."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def have_failed(self) -> bool:
        """Whether the last launch raised an error. The step fails when it lands."""
        return bool(self._flights) and self._flights[-1].error is not None

    @property
    def can_compute_several(self) -> bool:
        """Whether `launch` may get more than one step now."""
        return self._several is not None and not self._flights

    def launch(self, flight: Flight, num_steps: int = 1, ends: Sequence[Sequence[int]] = ()) -> None:
        """Begin a step, or up to *num_steps*: see `Several`."""
        before = self._flights[-1].launched if self._flights else None
        began_s = time.perf_counter()
        try:
            if num_steps > 1 and self._several is not None:
                first, *others = self._several.several(flight.plan, num_steps, ends)
                flight.launched = first
                # A step without a token is computed again, alone.
                flight.following = [one for one in others if NOT_A_NUMBER not in one.token_ids]
            else:
                flight.launched = self._engine.launch(flight.plan, before)
        except Exception as error:  # the error belongs to this step, and the step before must still land
            flight.error = error
            if num_steps > 1:
                self._several = None  # it may be the call's own fault
        flight.seconds = time.perf_counter() - began_s
        self._flights.append(flight)

    def land(self) -> tuple[Flight, list[StepRow], list[str]]:
        """Wait for the oldest step. Return it, the rows that follow its marks, and the uids of requests that failed.

        When the engine raises an error, or returns something else than asked, each row of the step is tried alone. A
        request whose row fails again fails. The others start over, because the step may have written anything to the
        pages that they share. The step after it is undone. When all of several rows fail, the engine is broken and its
        process ends. The process also ends when the engine has lost a rank or the device has no memory left: no request
        caused that. What the schedule raises is a bug of ours: it ends the process, and no request fails for it.
        """
        flight, began_s = self._flights.popleft(), time.perf_counter()
        flight.seconds /= 1 + len(flight.following)
        misfits: list[StepRow] = []
        unfit: list[str] = []
        rows: list[StepRow] = []
        failed: list[str] = []
        computed, error = self._waited_for(flight)
        flight.seconds += time.perf_counter() - began_s
        if computed is not None:
            misfits, unfit = self._without_misfits()
            error = self._fault_in(computed, flight.plan)
        if computed is None or error is not None:
            logger.error("step_failed", step=flight.plan.step, rows=len(flight.plan.rows), exc_info=error)
            began_s = time.perf_counter()
            rows, failed = self._begun_again(flight)
            flight.seconds += time.perf_counter() - began_s
            flight.following = ()
        else:
            rows += self._folded(flight, computed)
        return flight, [*misfits, *rows], [*unfit, *failed]

    def follow(self, flight: Flight) -> Iterator[tuple[Flight, Sequence[StepRow]]]:
        """Plan the steps that the call of *flight* has computed after it; yield each with its rows."""
        for computed in flight.following:
            planned = self._schedule.plan()
            assert planned is not None and len(planned[0].rows) == len(computed.token_ids), "nothing came in between"
            after = Flight(planned[0], planned[1], planned[0].step, None, seconds=flight.seconds)
            yield after, self._folded(after, computed)

    def _folded(self, flight: Flight, computed: Computed) -> Sequence[StepRow]:
        """Fold the result of a step into the schedule; return its rows."""
        rows = self._schedule.complete(computed.token_ids, computed.scores)
        self._token_ids = computed.token_ids
        self._meter.computed(flight.plan)
        if self._pace is not None:
            self._pace.measured(flight.plan, flight.seconds, flight.budget)
        if self._row_cost is not None:
            self._row_cost.measured(flight.plan, flight.seconds)
        return rows

    def _waited_for(self, flight: Flight) -> tuple[Computed | None, Exception | None]:
        """Return what the engine computed, or the error of the step. Raise errors that no request can have caused."""
        try:
            if flight.error is not None:
                raise flight.error
            if isinstance(flight.launched, Computed):
                return flight.launched, None
            return self._engine.wait(flight.launched), None
        except RankLost:
            raise
        except DeviceFull as error:
            self._log_full(flight.plan, error)
            raise
        except Exception as error:
            return None, error

    def _fault_in(self, computed: Computed, plan: BatchPlan) -> Exception | None:
        """Return why *computed* is no result of *plan*. Requests that ended while the step ran are left out."""
        try:
            computed.fits(plan)
            if NOT_A_NUMBER in computed.token_ids:
                self._of_requests_here(plan, computed).checked()
        except (ArithmeticError, ValueError) as error:
            return error
        return None

    def _log_full(self, plan: BatchPlan, error: DeviceFull) -> None:
        """Log the batch that did not fit into memory."""
        holders = (self._holder(row.table) for row in plan.rows)
        logger.error(
            "out_of_memory",
            error=str(error),
            step=plan.step,
            decode_rows=plan.num_decode_rows - plan.num_drafts,
            drafts=plan.num_drafts,
            prefill_tokens=[len(row.token_ids) for row in plan.rows[plan.num_decode_rows :]],
            uids=[holder[0] for holder in holders if holder is not None],
            remedy="lower --memory-ratio, --max-prefill-length or --max-running-requests if it happens again",
        )

    def _without_misfits(self) -> tuple[list[StepRow], list[str]]:
        """Fail the requests whose grammars turned out to be too complex; return their rows and uids."""
        misfits = self._schedule.misfits()
        for uid, *_ in misfits:
            self._schedule.drop(uid)
        rows: list[StepRow] = [
            EventRow(uid=uid, n=n, event=refusal(reason, param)) for uid, n, reason, param in misfits
        ]
        return rows, [uid for uid, *_ in misfits]

    def _of_requests_here(self, plan: BatchPlan, computed: Computed) -> Computed:
        """Return only the tokens of requests that did not end while the step ran, without those that follow drafts."""
        rows = [row for row in plan.rows if row.sample is not None]
        tokens = zip(rows, computed.token_ids, strict=True)
        here = [token for row, token in tokens if not row.is_draft and self._holder(row.table) is not None]
        return replace(computed, token_ids=here)

    def _holder(self, table: int) -> tuple[str, int] | None:
        with contextlib.suppress(KeyError):  # the request ended elsewhere while the step ran
            return self._schedule.holder(table)
        return None

    def _begun_again(self, flight: Flight) -> tuple[list[StepRow], list[str]]:
        """Return the rows of a step that failed, and the uids of the requests that failed in it."""
        rows = [row for row in filled(flight.plan, self._token_ids).rows if not row.is_draft]
        num_streams = flight.plan.num_decode_rows - flight.plan.num_drafts
        errors: list[Exception] = []
        of_requests: dict[str, tuple[int, Exception]] = {}
        """Failed requests that are still here, with n and error. A broken engine raises for the others, too."""
        for index, row in enumerate(rows):
            alone = BatchPlan(flight.plan.step, (row,), int(index < num_streams))
            try:
                computed = self._engine.wait(self._engine.launch(alone, None))
                computed.fits(alone)
                computed.checked()
            except (RankLost, DeviceFull):
                raise
            except Exception as error:
                errors.append(error)
                if (holder := self._holder(row.table)) is not None:
                    of_requests[holder[0]] = holder[1], error
        if len(errors) == len(rows) > 1:
            raise errors[0]
        failed: list[StepRow] = []
        for uid, (n, reason) in of_requests.items():
            event = Failed(status=500, code="engine_error", message=f"The engine failed on this request: {reason}")
            failed.append(EventRow(uid=uid, n=n, event=event))
            self._schedule.drop(uid)
        undone = [mark for after in self._flights for mark in after.marks]
        self._flights.clear()
        return [*undone, *self._schedule.start_over(), *failed], list(of_requests)
