"""A request that kills its detokenizer, among seven others: it is found and ends. The others never know.

A death is an exception that nothing catches. Then another worker goes on, with nothing but what is in the log. An
operator who kills a worker at a bad moment makes deaths, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.folds import DECODER, admitted, bring, prepared
from support.memory_log.log import MemoryLog
from support.selection import by_night

from pipeline.events import (
    AnyEvent,
    Failed,
    FinishReason,
    StepCompleted,
    StepRow,
    TokenRow,
    TokensProduced,
    decode,
)
from pipeline.log.protocol import Inbox
from pipeline.metrics.counters import Measures
from pipeline.names import Names
from pipeline.stage.slots import SlotLease, acquire_slot
from pipeline.stage.worker import Stop
from pipeline.walk import Moment
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.worker import ALONE, MOST_TOGETHER, DetokenizeWorker, follow_steps

LEASE_MS = 60_000
NUM_REQUESTS = 8
MOST_KILLS = 3
"""An operator kills so many workers of one history."""
SCRIPTS = frozenset({"histories", "produced", "retry", "end", "pending"})


class Death(BaseException):
    """The end of the process."""


class MortalFold(DetokenizeFold):
    """Dies of the work for some requests, once they have so many tokens: of their rows, or only of their history."""

    def __init__(self, guilty: dict[str, int], *, of_rows: bool) -> None:
        super().__init__(DECODER)
        self._guilty = guilty
        self._of_rows = of_rows

    def learn(self, uid: str, history: Iterable[Moment]) -> None:
        moments = list(history)
        super().learn(uid, moments)
        self._live(uid, moments[-1].n if moments else 0)

    def apply(self, step: StepCompleted, step_id: str) -> Any:
        produced = super().apply(step, step_id)
        for item in produced if self._of_rows else ():
            self._live(item.uid, item.n)
        return produced

    def _live(self, uid: str, n: int) -> None:
        if uid in self._guilty and n >= self._guilty[uid]:
            raise Death


class KillingLog:
    """The log of a worker that an operator kills at drawn moments, before or after something is in the log."""

    def __init__(self, log: MemoryLog, kills: set[int]) -> None:
        self._log = log
        self._kills = kills
        self._calls = itertools.count()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._log, name)
        if name not in SCRIPTS:
            return method

        def called(*arguments: Any, **options: Any) -> Any:
            self._die_here()
            result = method(*arguments, **options)
            self._die_here()
            return result

        return called

    def _die_here(self) -> None:
        call = next(self._calls)
        if call in self._kills:
            self._kills.discard(call)
            raise Death


class UntilAllIsSaid(Stop):
    """Stops a worker when its inbox is empty."""

    def __init__(self, log: MemoryLog, inbox: Inbox) -> None:
        super().__init__()
        self._log = log
        self._inbox = inbox

    def __bool__(self) -> bool:
        return self._log.backlog(self._inbox) == 0


class Histories:
    """Eight requests of one engine, and its steps, drawn with a seed."""

    def __init__(self, seed: int) -> None:
        self.log = MemoryLog(Names())
        self.inbox = prepared(self.log)
        self.random = random.Random(seed)
        self.uids = [f"{number:032x}" for number in range(NUM_REQUESTS)]
        self.lengths = {uid: self.random.randint(3, 12) for uid in self.uids}
        self.measures = Measures()
        self.deaths = 0
        for uid in self.uids:
            bring(self.log, uid, stop=("cab", "bb"), min_tokens=self.random.randint(0, 8))
        owner = acquire_slot(self.log, "generate", LEASE_MS)
        for number, rows in enumerate(self._rows(), start=1):
            self.log.step(owner, {number: StepCompleted(rows=rows)}, ended=[], control_cursor="0-0", lease_ms=LEASE_MS)

    def _rows(self) -> Iterable[tuple[StepRow, ...]]:
        """Yield the rows of each step: most requests are in most steps."""
        said = dict.fromkeys(self.uids, 0)
        while running := [uid for uid in self.uids if said[uid] < self.lengths[uid]]:
            rows: list[StepRow] = []
            for uid in running:
                if self.random.random() < 0.2:
                    continue
                if not said[uid]:
                    rows.append(admitted(uid))
                said[uid] += 1
                end: FinishReason | None = "length" if said[uid] == self.lengths[uid] else None
                rows.append(TokenRow(uid=uid, n=said[uid], token=ord(self.random.choice("abc")), end=end))
            yield tuple(rows)

    def detokenize(self, fold: Callable[[], DetokenizeFold], kills: set[int]) -> None:
        """Have workers go on, one after the other, until all is said."""
        log: Any = KillingLog(self.log, kills)
        while self.log.backlog(self.inbox):
            assert self.deaths < 100
            slot_lease = SlotLease(self.log, acquire_slot(self.log, "detokenize", LEASE_MS), LEASE_MS)
            worker = DetokenizeWorker(log, slot_lease, fold(), "generate-0", self.measures)
            stop = UntilAllIsSaid(self.log, self.inbox)
            try:
                follow_steps(log, self.inbox, slot_lease, worker, stop)
            except Death:
                self.deaths += 1
            finally:
                slot_lease.leave()

    def events(self, uid: str) -> list[tuple[str, AnyEvent]]:
        """Return what a history has of detokenizers, without times."""
        (history,) = self.log.histories([uid])
        timeless = {"ms": 0, "age_ms": None, "timings": None}
        found = []
        for entry in history[2:]:
            event = decode(entry.fields)
            changes = {name: value for name, value in timeless.items() if name in type(event).model_fields}
            found.append((entry.id, event.model_copy(update=changes)))
        return found

    def text(self, uid: str) -> str:
        return "".join(event.text for _, event in self.events(uid) if isinstance(event, TokensProduced))


@pytest.mark.parametrize("of_rows", [True, False], ids=["rows", "history"])
@pytest.mark.parametrize("seed", range(by_night(8, 50)))
def test_of_eight_requests_only_those_end_that_kill_their_detokenizer(seed: int, of_rows: bool) -> None:
    expected, lived = Histories(seed), Histories(seed)
    expected.detokenize(lambda: DetokenizeFold(DECODER), set())
    assert expected.deaths == 0

    draw = random.Random(-seed)
    guilty = {uid: draw.randint(1, lived.lengths[uid]) for uid in draw.sample(lived.uids, draw.choice([1, 1, 1, 2]))}
    kills = {draw.randrange(8), *draw.sample(range(60), MOST_KILLS - 1)}  # the first one in any case
    lived.detokenize(lambda: MortalFold(guilty, of_rows=of_rows), kills)
    assert lived.deaths
    found = set()
    for uid in lived.uids:
        was, (_, last) = expected.events(uid), lived.events(uid)[-1]
        if isinstance(last, Failed):
            assert (last.code, last.status) == ("poisonous", 500) and uid in guilty
            assert expected.text(uid).startswith(lived.text(uid))
            found.add(uid)
        else:
            assert lived.events(uid) == was
    letters = [letter.fields for letter in lived.log.dead_letters(9)]
    assert {letter["uid"] for letter in letters} == found and len(letters) == len(found)
    assert {letter["deaths"] for letter in letters} <= {str(MOST_TOGETHER + ALONE)}
    if of_rows:
        num_tokens = {
            uid: sum(isinstance(event, TokensProduced) for _, event in expected.events(uid)) for uid in guilty
        }
        assert found == {uid for uid in guilty if num_tokens[uid] >= guilty[uid]}
