"""An engine's loop whose requests come, go and fail as chance has it, and the journal of its steps."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.events import SamplingParams, Score, StepCompleted, TokenRow, encode
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import Entry
from pipeline.stage.worker import Stop
from stages.generate.kvcache import make_cache
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, LocalLayers
from stages.generate.loop.log_thread import Arrived, Ended, Flush, Update
from stages.generate.loop.pace import Budget, Pace
from stages.generate.loop.updates import Room
from stages.generate.loop.worker import GenerateWorker
from stages.generate.schedule.plan import BatchPlan, Computed, RowScores, Work
from stages.generate.schedule.recorded import RecordedSchedule
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, ScheduleLimits

EOS, POISON, VOCABULARY = 3, 11, 12
ENGINE, EPOCH = "generate-0", 7


@contextlib.contextmanager
def silent_loop(snapshot_every: int) -> Iterator[None]:
    """Have engines log nothing, and snapshots of their schedules after so many steps."""
    silent = SimpleNamespace(**dict.fromkeys(("info", "warning", "error", "exception"), lambda *_, **__: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.generate.loop.worker.SNAPSHOT_EVERY", snapshot_every)
        patch.setattr("stages.generate.loop.worker.logger", silent)
        patch.setattr("stages.generate.loop.flights.logger", silent)
        yield


def journal_of(steps: Iterable[tuple[int, StepCompleted]], epoch: int) -> Iterator[Entry]:
    """Give steps as the detokenizer writes them."""
    writer = JournalWriter()
    for number, event in steps:
        entry = Entry(f"{epoch}-{number}", {"ms": str(number)} | encode(event))
        yield Entry(entry.id, writer.fields(entry, event))


class Life:
    """An engine's log without a log: requests come and go as chance has it, and the steps are kept.

    It is the log thread of a worker, its lease and its engine.
    """

    def __init__(self, seed: int, num_steps: int) -> None:
        self.chance = random.Random(seed)
        self.drafts = "" if seed % 2 else "all"
        self.stop = Stop()
        self.lost = threading.Event()
        self.status = SimpleNamespace(flushed_pages=0, books_wrong=0)
        self.came: dict[str, NewRequest] = {}
        self.made: dict[str, list[int]] = {}
        self.here: list[str] = []
        self.steps: list[tuple[int, StepCompleted]] = []
        self._num_steps = num_steps
        self._room = 8

    # as a log thread

    def next_update(self, timeout_s: float = 0.0) -> Update | None:
        chance = self.chance
        if self.here and chance.random() < 0.06:
            uid = self.here.pop(chance.randrange(len(self.here)))
            return Ended(uid)
        if chance.random() < 0.02:
            return Flush("1-0")
        if timeout_s or (self._room > 0 and chance.random() < 0.3):
            self._room -= 1
            return self._arrival()
        return None

    def _arrival(self) -> Arrived:
        chance, uid = self.chance, f"r{len(self.came)}"
        known = [one.prompt_ids for one in self.came.values()]
        prefix = chance.choice(known)[: chance.randrange(40)] if known and chance.random() < 0.6 else ()
        poison = (POISON,) if chance.random() < 0.03 else ()
        prompt = (*prefix, *(chance.randrange(4, 7) for _ in range(chance.randrange(1, 30))), *poison)
        resumed = chance.random() < 0.2
        output = tuple(chance.randrange(4, 7) for _ in range(chance.randrange(5))) if resumed else ()
        sampling = SamplingParams(
            max_tokens=chance.choice([None, 8, 20]),
            ignore_eos=chance.random() < 0.3,
            prompt_logprobs=chance.choice([None, None, None, 0]),
        )
        owner = chance.choice(["", "", "", "ann", "bob"])
        request = NewRequest(
            *(uid, prompt, output, sampling, chance.choice([0, 0, 0, 1, -1])),
            owner=owner,
            weight={"bob": 3}.get(owner, 1),
            overtakes=chance.random() < 0.1,
        )
        self.came[uid], self.made[uid] = request, list(output)
        self.here.append(uid)
        return Arrived(request, resumed, suspect=resumed and chance.random() < 0.3)

    def commit(self, number: int, event: StepCompleted, ended: Sequence[str], room: Room, **_: Any) -> None:
        self.steps.append((number, event))
        self._room = room.count
        for row in event.rows:
            if isinstance(row, TokenRow):
                self.made[row.uid].append(row.token)
        self.here = [uid for uid in self.here if uid not in ended]
        if len(self.steps) >= self._num_steps:
            self.stop.set()

    def idle(self, room: Room) -> None:
        self._room = max(room.count, 1)

    # as a lease

    def report_progress(self, patience_s: float = 0.0) -> None: ...

    def say(self, **_: Any) -> None: ...

    # as an engine

    def forward(self, plan: BatchPlan) -> Computed:
        if any(POISON in row.token_ids for row in plan.rows):
            raise IndexError("poison")
        scored = {row.table: row.scoring.targets for row in plan.rows if row.scoring is not None}
        scores = {table: RowScores(prompt=(Score(logprob=-1),) * len(targets)) for table, targets in scored.items()}
        return Computed([self.chance.randrange(3, 7) for row in plan.rows if row.sample is not None], scores)

    # as the histories

    def request_of(self, uid: str, n: int) -> NewRequest:
        return dataclasses.replace(self.came[uid], output_ids=tuple(self.made[uid][:n]))

    def journal(self) -> Iterator[Entry]:
        """Give the steps as the detokenizer writes them."""
        return journal_of(self.steps, EPOCH)


class Fickle(Pace):
    """A pace that decides by chance."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def budget(self, work: Work) -> Budget | None:
        return Budget(self._chance.randrange(0 if work.streams else 1, 12), 0.1) if work.prompts else None


def live(cache: str, num_steps: int, snapshot_every: int, seed: int = 0, *, overlap: bool = False) -> Life:
    """Return what became of an engine's loop after so many steps."""
    life = Life(seed, num_steps)
    schedule = run(life, cache, snapshot_every, overlap=overlap)
    assert schedule.problems() == []
    return life


def run(life: Life, cache: str = "radix", snapshot_every: int = 1000, *, overlap: bool = False) -> RecordedSchedule:
    """Let a worker live *life*; return its schedule."""
    limits = ScheduleLimits(64, 24, 6, max_running_requests=5, vocab_size=VOCABULARY, most_drafts=8)
    cache, _, local = cache.partition(" with ")
    pages = make_cache(cache, 30, 4, LocalLayers(2, 7, 24) if local else NO_LOCAL_LAYERS)
    schedule = RecordedSchedule(pages, limits, [EOS], Identity(ENGINE, EPOCH, "w", "n"))
    with silent_loop(snapshot_every):
        pace = Fickle(life.chance)
        worker = GenerateWorker(
            *(life, schedule, cast(Any, life), cast(Any, life)), pace=pace, overlap=overlap, drafts=life.drafts
        )
        worker.run(life.stop)
    return schedule
