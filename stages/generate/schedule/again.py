"""Plans the steps of the journal again and returns where a plan differs from the engine's. A pure fold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import orjson

from pipeline.errors import MiniSGLError, UndecodableEvent
from pipeline.events import Admitted, Chunk, EventRow, Preempted, StepRow
from pipeline.log.entries import clipped
from pipeline.log.journal import JournalStep
from stages.generate.schedule.plan import NOT_A_NUMBER, BatchPlan
from stages.generate.schedule.recorded import LANDED, LITERAL, USUAL, RecordedSchedule
from stages.generate.schedule.request import NewRequest

NOTHING: Final = BatchPlan(0, (), 0)


class StepsMissing(MiniSGLError):
    """A step is not in the journal."""


class ToldSchedule(RecordedSchedule):
    """A schedule whose drafts are those of the journal."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: dict[str, tuple[int, bool, Sequence[int]]] = {}
        """uid -> number of drafts in the next plan, whether a grammar forced them, and with a grammar their tokens."""

    def _drafts_of(self, row_cost: int | None) -> dict[str, Sequence[int]]:
        told, self.told = self.told, {}
        found: dict[str, Sequence[int]] = {}
        for uid, (count, are_forced, token_ids) in told.items():
            if (request := self._by_uid.get(uid)) is not None:
                request.are_forced = are_forced
                found[uid] = token_ids if request.is_constrained else request.drafts(count, at_most=None)
        return found


class Again:
    """Plans the steps of an engine again, beginning with a step that has a snapshot.

    The tokens come from the journal. *request_of* returns the request of a uid with its first n tokens of output.
    """

    def __init__(self, first: JournalStep, request_of: Callable[[str, int], NewRequest]) -> None:
        """*first* has a snapshot.

        Raises:
            UndecodableEvent: The snapshot does not decode.
        """
        self._request_of = request_of
        self.schedule = ToldSchedule.restored(first.schedule, first.number, request_of)
        self._next = first.epoch, first.number
        self.plan = NOTHING
        """Plan of the last step that landed."""
        self._in_flight: deque[tuple[BatchPlan, list[StepRow]]] = deque()
        """Plans that have not landed, and the marks of each that no step has had yet."""

    def difference(self, step: JournalStep) -> str:
        """Plan *step*, which follows the one before; return the first difference, or "".

        Raises:
            StepsMissing: *step* does not follow the one before.
        """
        if (step.epoch, step.number) != self._next:
            raise StepsMissing(f"the journal lacks the step {self._next[0]}-{self._next[1]}")
        self._next = step.epoch, step.number + 1
        for what, mine, its in self._checks(step):
            if mine != its:
                return f"{what}: {clipped(told(mine))} is planned, {clipped(told(its))} was"
        return ""

    def _checks(self, step: JournalStep) -> Iterator[tuple[str, object, object]]:
        """Yield pairs that must be equal: what is planned now, and what the journal has."""
        if step.schedule:
            mine, its = orjson.loads(self.schedule.snapshot()), orjson.loads(step.schedule)
            for name in its:
                yield f"the {name} of the snapshot", mine.get(name), its[name]
        marks: list[StepRow] = []
        figures = step.figures
        said = step.inputs if not LITERAL.isdisjoint(step.inputs) else (*step.inputs, *USUAL)
        landed = not LANDED.isdisjoint(said)
        for word in said:
            match word.split():
                case ["add", n, _, uid]:
                    self.schedule.add(self._request_of(uid, int(n)))
                case ["drop", uid]:
                    self.schedule.drop(uid)
                case ["flush"]:
                    self.schedule.flush()
                case ["alone", uid]:
                    marks += self.schedule.isolate(uid)
                case ["all"]:
                    marks += self.schedule.isolate(None)
                case ["skip"]:
                    self.schedule.skip_step()
                case ["start", "over"]:
                    marks += self._land(len(self._in_flight))
                    marks += self.schedule.start_over()
                    yield from self._counts(step)
                case ["draft" | "force" as how, count, uid, *token_ids]:
                    self.schedule.told[uid] = int(count), how == "force", [int(token) for token in token_ids]
                case ["plan", *budget] | ["no", "plan", *budget]:
                    planned = self.schedule.plan(self._budget(step, budget))
                    yield "a plan", planned is not None, word.startswith("plan")
                    if planned is not None:
                        self._in_flight.append(planned)
                case ["complete"]:
                    sampled = self.schedule.sampled
                    uids = [*dict.fromkeys(uid for uid, is_here in sampled if is_here)]
                    yield "the rows", uids, [*dict.fromkeys(row.uid for row in step.rows)]
                    tokens: dict[str, deque[int]] = {}
                    for row in step.rows:
                        tokens.setdefault(row.uid, deque()).append(row.token)
                    drawn = [tokens[uid].popleft() if tokens.get(uid) else NOT_A_NUMBER for uid, _ in sampled]
                    made = self.schedule.complete(drawn)
                    its = [(row.uid, row.n, row.end, row.chunks) for row in step.rows]
                    yield "the tokens", [(row.uid, row.n, row.end, row.chunks) for row in made], its
                    marks += self._land(1)
                    yield from self._counts(step)
                case _:
                    raise UndecodableEvent(f"the step {step.id} was given {word!r}, which this MiniSGL does not know")
        if not landed:  # a takeover: the engine committed it, with the plan's marks, before it computed anything
            for _, of_plan in self._in_flight:
                marks += of_plan
                of_plan.clear()
        _, chunks = self.schedule.note()
        yield "the chunks of prompts", chunks, step.chunks
        yield "what happened", _said(marks), _said(step.events)
        held = self.schedule.num_running, self.schedule.num_waiting, self.schedule.free_pages
        yield "running, waiting and free pages", held, (figures.running, figures.waiting, figures.free_pages)

    def _budget(self, step: JournalStep, said: Sequence[str]) -> int | None:
        """Return the budget of a plan. The words have it if the plan was made while a step was in flight."""
        if self._in_flight:
            return int(said[0]) if said else None
        return step.figures.mixed_prefill_length

    def _land(self, count: int) -> list[StepRow]:
        """Remove the oldest plans in flight. Return their marks."""
        marks: list[StepRow] = []
        for at in range(count):
            plan, of_plan = self._in_flight.popleft()
            self.plan = self.plan if at else plan
            marks += of_plan
        return marks

    def _counts(self, step: JournalStep) -> Iterator[tuple[str, object, object]]:
        plan, figures = self.plan, step.figures
        prefills = plan.rows[plan.num_decode_rows :]
        num_tokens = sum(len(row.token_ids) for row in prefills)
        counts = plan.num_decode_rows - plan.num_drafts, plan.num_drafts, len(prefills), num_tokens
        its = figures.decode_rows, figures.drafts or 0, figures.prefill_rows, figures.prefill_tokens
        yield "decode rows, drafts, prefill rows and prefill tokens", counts, its


def differences(
    steps: Iterable[JournalStep],
    request_of: Callable[[str, int], NewRequest],
    computed: Callable[[JournalStep, BatchPlan], None] = lambda *_: None,
) -> Iterator[tuple[JournalStep, str]]:
    """Plan *steps* again; yield each with its first difference, or "". Stop after the first difference. The first step
    of an owner has a snapshot, with which planning begins again.

    *computed* is called with each step that has a forward pass, and with its plan.
    """
    again: Again | None = None
    for step in steps:
        if again is None or (step.number == 1 and step.schedule):
            again = Again(step, request_of)
        different = again.difference(step)
        if step.figures.forward_ms and not different:
            computed(step, again.plan)
        yield step, different
        if different:
            return


def _said(rows: Sequence[StepRow]) -> list[EventRow]:
    """Return the rows that a schedule makes. The engine adds others: failures and takeovers."""
    return [row for row in rows if isinstance(row, EventRow) and isinstance(row.event, Admitted | Preempted)]


def told(value: object) -> str:
    """Return a part of a plan for people."""
    match value:
        case EventRow(uid=uid, n=n, event=event):
            cached = f", {event.cached_tokens} tokens cached" if isinstance(event, Admitted) else ""
            return f"{uid} {event.kind} at token {n}{cached}"
        case Chunk(uid=uid, start=start, count=count):
            return f"{count} tokens of {uid} from {start} on"
        case list() | tuple():
            return f"({', '.join(map(told, value))})"
    return f"{value}"
