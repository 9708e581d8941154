"""Times of each commit in a tight loop: one client, one Redis, and no other work."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

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

MOST_TAKEN: Final = 8
"""Most requests per `take`, as in an engine."""
STEPS_OF_A_LIFE: Final = 4
PROMPT: Final = "A prompt of a usual length: thirty words or so, of which none matters here. " * 2
PROMPT_IDS: Final = tuple(range(32))
FRONTEND: Final = "web-0"
LEASE_MS: Final = 600_000
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=2, max_queued=sys.maxsize)


class Lives:
    """Requests that live at the same time: submitted, tokenized, taken, some steps together, ended."""

    def __init__(self, log: StreamLog, num_rows: int) -> None:
        self._log = log
        self._num_rows = num_rows
        self._times_us: defaultdict[str, list[float]] = defaultdict(list)
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
        """Run until there are *num_samples* steps; return commit -> times."""
        self._live()  # the scripts are loaded, the connection is open
        self._times_us.clear()
        for _ in range(math.ceil(num_samples / STEPS_OF_A_LIFE)):
            self._live()
        return dict(self._times_us)

    @contextlib.contextmanager
    def _timed(self, commit: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._times_us[commit].append((time.perf_counter() - began_s) * 1e6)

    def _live(self) -> None:
        log, uids = self._log, [new_uid() for _ in range(self._num_rows)]
        log.open_replies(FRONTEND)
        submitted = Submitted(endpoint="bench", frontend=FRONTEND, prompt=PROMPT, sampling=SamplingParams())
        for uid in uids:
            with self._timed("submit"):
                log.submit(uid, [submitted])
        consumer = slot_name(TOKENIZE, 0)
        tokenized = Tokenized(token_ids=PROMPT_IDS, fingerprint="bench", by=consumer)
        for entry in log.read(self._submitted, consumer, max_entries=self._num_rows, block_ms=0):
            with self._timed("tokenized"):
                log.tokenized(entry, tokenized)
        entry_ids = self._take()
        for n in range(1, STEPS_OF_A_LIFE + 1):
            self._step(uids, n)
        for uid in uids:
            with self._timed("end"):
                log.end(uid, Cancelled(by="bench"), frontend=FRONTEND)
        self._commit_step(StepCompleted(rows=(), let_go=tuple(uids)), entry_ids)
        log.produced(self._detokenizer, [self._read_step()], self._engine.slot, [])

    def _take(self) -> list[str]:
        """Take all requests; return their entries."""
        ids: list[str] = []
        while len(ids) < self._num_rows:
            with self._timed("take"):
                taken = self._log.take(self._engine, MOST_TAKEN, control_cursor=self._control_cursor)
            self._control_cursor = taken.control_cursor
            ids += [entry.id for entry in taken.entries]
        return ids

    def _step(self, uids: list[str], n: int) -> None:
        rows = tuple(TokenRow(uid=uid, n=n, token=40 + n) for uid in uids)
        with self._timed("step"):
            self._commit_step(StepCompleted(rows=rows), [])
        entry = self._read_step()
        event = TokensProduced(count=1, tokens=(40 + n,), text=" word", step=entry.id)
        produced = [Produced(uid, tokens_id(n), n, event, FRONTEND) for uid in uids]
        with self._timed("produced"):
            self._log.produced(self._detokenizer, [entry], self._engine.slot, produced)

    def _commit_step(self, event: StepCompleted, ended: list[str]) -> None:
        steps = {next(self._numbers): event}
        done = self._log.step(self._engine, steps, ended=ended, control_cursor=self._control_cursor, lease_ms=LEASE_MS)
        self._control_cursor = done.control_cursor

    def _read_step(self) -> Entry:
        (entry,) = self._log.read(self._steps, self._detokenizer.slot, max_entries=1, block_ms=0)
        return entry


def _own(log: StreamLog, stage: str) -> Owner:
    owner = log.acquire(slot_name(stage, 0), "bench", LEASE_MS)
    assert owner is not None, "the namespace is this benchmark's own"
    return owner
