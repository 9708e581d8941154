"""Times of each commit in a tight loop: one client, one Redis, and no other work."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from pipeline.events import (
    Cancelled,
    SamplingParams,
    StepCompleted,
    Submitted,
    Tokenized,
    TokenRow,
    TokensProduced,
    new_uid,
)
from pipeline.log.protocol import Entry, Inbox, Owner, Produced, RequestLimits, StreamLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, slot_name, tokens_id

COMMITS: Final = ("submit", "tokenized", "take", "step", "produced", "end")
MOST_TAKEN: Final = 8
"""Most requests per `take`, as in an engine."""
STEPS_OF_A_LIFE: Final = 4
PROMPT: Final = "A prompt of a usual length: thirty words or so, of which none matters here. " * 2
PROMPT_IDS: Final = tuple(range(32))
FRONTEND: Final = "web-0"
LEASE_MS: Final = 600_000
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=2, max_queued=sys.maxsize)

P = ParamSpec("P")
T = TypeVar("T")


class Stopwatch:
    """Times of commits, by their name."""

    def __init__(self) -> None:
        self.times_us: dict[str, list[float]] = {name: [] for name in COMMITS}

    def time(self, commit: str, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Do *work* and note how long it took."""
        began_s = time.perf_counter()
        done = work(*arguments, **options)
        self.times_us[commit].append((time.perf_counter() - began_s) * 1e6)
        return done


class Lives:
    """Requests that live at the same time: submitted, tokenized, taken, some steps together, ended."""

    def __init__(self, log: StreamLog, num_rows: int) -> None:
        self._log = log
        self._num_rows = num_rows
        self._engine, self._detokenizer = _own(log, GENERATE), _own(log, DETOKENIZE)
        self._submitted = Inbox.submitted(log.names)
        self._steps = Inbox.steps(log.names, self._engine.slot)
        for inbox in (self._submitted, Inbox.tokenized(log.names), self._steps):
            log.prepare(inbox)
        self._numbers = itertools.count(1)
        self._control_cursor = "0-0"

    def close(self) -> None:
        """Release the slots, for another number of rows."""
        for owner in (self._engine, self._detokenizer):
            self._log.release(owner)

    def times_us(self, num_samples: int) -> dict[str, list[float]]:
        """Run until there are *num_samples* steps; return the times of each commit."""
        self._live(Stopwatch())  # the scripts are loaded, the connection is open
        watch = Stopwatch()
        for _ in range(math.ceil(num_samples / STEPS_OF_A_LIFE)):
            self._live(watch)
        return watch.times_us

    def _live(self, watch: Stopwatch) -> None:
        self._log.open_replies(FRONTEND)
        uids = [new_uid() for _ in range(self._num_rows)]
        self._submit(uids, watch)
        entry_ids = self._take(watch)
        for n in range(1, STEPS_OF_A_LIFE + 1):
            self._step(uids, n, watch)
        for uid in uids:
            watch.time("end", self._log.end, uid, Cancelled(by="bench"), frontend=FRONTEND)
        self._commit_step(StepCompleted(rows=(), released=tuple(uids)), entry_ids, Stopwatch())
        self._log.produced(self._detokenizer, [self._read_step()], self._engine.slot, [])

    def _submit(self, uids: list[str], watch: Stopwatch) -> None:
        log = self._log
        submitted = Submitted(endpoint="bench", frontend=FRONTEND, prompt=PROMPT, sampling=SamplingParams())
        for uid in uids:
            watch.time("submit", log.submit, uid, [submitted])
        tokenized = Tokenized(token_ids=PROMPT_IDS, fingerprint="bench", by=slot_name(TOKENIZE, 0))
        consumer = slot_name(TOKENIZE, 0)
        for entry in log.read(self._submitted, consumer, max_entries=self._num_rows, block_ms=0):
            watch.time("tokenized", log.tokenized, entry, tokenized)

    def _take(self, watch: Stopwatch) -> list[str]:
        """Take all requests; return their entries."""
        log, ids = self._log, list[str]()
        while len(ids) < self._num_rows:
            taken = watch.time("take", log.take, self._engine, MOST_TAKEN, control_cursor=self._control_cursor)
            self._control_cursor = taken.control_cursor
            ids += [entry.id for entry in taken.entries]
        return ids

    def _step(self, uids: list[str], n: int, watch: Stopwatch) -> None:
        token = 40 + n
        self._commit_step(StepCompleted(rows=tuple(TokenRow(uid=uid, n=n, token=token) for uid in uids)), [], watch)
        entry = self._read_step()
        event = TokensProduced(count=1, tokens=(token,), text=" word", step=entry.id)
        produced = [Produced(uid, tokens_id(n), n, event, FRONTEND) for uid in uids]
        watch.time("produced", self._log.produced, self._detokenizer, [entry], self._engine.slot, produced)

    def _commit_step(self, event: StepCompleted, ended: list[str], watch: Stopwatch) -> None:
        done = watch.time(
            "step",
            self._log.step,
            self._engine,
            {next(self._numbers): event},
            ended=ended,
            control_cursor=self._control_cursor,
            lease_ms=LEASE_MS,
        )
        self._control_cursor = done.control_cursor

    def _read_step(self) -> Entry:
        (entry,) = self._log.read(self._steps, self._detokenizer.slot, max_entries=1, block_ms=0)
        return entry


def _own(log: StreamLog, stage: str) -> Owner:
    owner = log.acquire(slot_name(stage, 0), "bench", LEASE_MS)
    assert owner is not None, "the namespace is this benchmark's own"
    return owner
