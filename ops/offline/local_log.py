"""The log of one engine in this process: `RequestLog` for those who ask, `EngineLink` for the engine's loop.

    submit -> [tokenizer] -> tokenized -> next_update -> [engine] -> commit -> [fold] -> history

Three threads share it, and what they leave behind is read by a later engine of this process as by another process in
Redis. Nothing else outlives its process, so there are no leases, no streams and no deadlines.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.events import End, Failed, StepCompleted, Submitted, Tokenized, encode
from pipeline.log.protocol import (
    NO_TURN,
    DeadLetter,
    Entry,
    Inbox,
    Once,
    Owner,
    Quota,
    RequestLimits,
    Submission,
    SubmitResult,
    Turn,
    is_between,
)
from pipeline.log.shared import submitted_fields
from pipeline.names import (
    GENERATE,
    SEAL,
    SUBMITTED_ID,
    TOKENIZED_ID,
    Names,
    parse_id,
    sibling_uids,
    slot_name,
)
from pipeline.stage.slots import Status
from pipeline.stage.worker import Stop
from pipeline.walk import walk
from stages.detokenize.fold import DetokenizeFold
from stages.generate.loop.past import past_of
from stages.generate.loop.updates import Arrived, Ended, Flush, Room, Update

LOOK_S: Final = 0.2
"""How long a thread waits for something before it looks whether it should stop."""
MOST_STEPS_BEHIND: Final = 64
"""The engine plans no further step while more than this many wait for the fold."""


@dataclass(slots=True)
class _History:
    """What the log has of a request."""

    entries: list[Entry] = field(default_factory=list)
    is_ended: bool = False
    with_engine: bool = False
    """Whether the engine has the request in hand."""

    @property
    def num_tokens(self) -> int:
        return parse_id(self.entries[-1 - self.is_ended].id)[0]


class LocalLog:
    """The requests of this process. An engine that follows another one takes over what that had not ended."""

    def __init__(self, limits: RequestLimits) -> None:
        self.names, self.limits = Names(), limits
        self.status = Status(slot=slot_name(GENERATE, 0), owner="", pid=0, host="")
        """That of the engine."""
        self._changed = threading.Condition()
        self._histories: dict[str, _History] = {}
        self._submitted: deque[str] = deque()
        """Requests that wait for the tokenizer."""
        self._tokenized: deque[str] = deque()
        """Requests that wait for the engine."""
        self._room = 0
        """How many of them it takes now."""
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._stop = Stop()
        self._steps: queue.Queue[tuple[str, StepCompleted]] = queue.Queue(MOST_STEPS_BEHIND)
        self._epoch = self._num_flushes = 0

    # as RequestLog

    def submit(
        self,
        uid: str,
        events: Sequence[Submitted],
        once: Once | None = None,
        *,
        quota: Quota | None = None,
        letter: str = "",
    ) -> SubmitResult:
        """As RequestLog. It accepts all: there are no limits, and no client sends anything again."""
        with self._changed:
            for sibling, fields in zip(sibling_uids(uid, len(events)), submitted_fields(events), strict=True):
                self._histories[sibling] = _History([Entry(SUBMITTED_ID, _stamped(fields))])
                self._submitted.append(sibling)
            self._changed.notify_all()
        return SubmitResult(Submission.ACCEPTED, uid)

    def tokenized(self, entry: Entry, event: Tokenized, *, stored: bool = False, turn: Turn = NO_TURN) -> bool:
        with self._changed:
            uid = entry.fields["uid"]
            is_new = self._append(uid, TOKENIZED_ID, encode(event))
            if is_new:
                self._tokenized.append(uid)
                self._deliver()
            return is_new

    def end(
        self, uid: str, event: End, *, frontend: str, consume: Entry | None = None, dead: DeadLetter | None = None
    ) -> bool:
        with self._changed:
            history = self._histories.get(uid)
            if history is None or history.is_ended:
                return False
            self._append(uid, SEAL, {**encode(event), "n": str(history.num_tokens)})
            self._tell_engine(uid)
            return True

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        first = parse_id(after) if after else (0, 0)
        with self._changed:
            found = [self._histories[uid].entries if uid in self._histories else [] for uid in uids]
            return [[entry for entry in entries if parse_id(entry.id) > first] for entries in found]

    def alive(self, uids: Sequence[str]) -> set[str]:
        with self._changed:
            return {uid for uid in uids if uid in self._histories and not self._histories[uid].is_ended}

    def begins(self, uids: Sequence[str]) -> dict[str, Entry]:
        with self._changed:
            return {uid: self._histories[uid].entries[0] for uid in uids if uid in self._histories}

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        with self._changed:
            return sorted(uid for uid in self._histories if is_between(uid, since_ms, until_ms))

    def journal(
        self, engine: str, *, first: str = "-", last: str = "+", max_entries: int = 0, newest: bool = False
    ) -> list[Entry]:
        return []  # it keeps none

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        return []

    def statuses(self, stage: str) -> dict[str, str]:
        return {self.status.slot: self.status.model_dump_json()} if stage == GENERATE else {}

    def bury(
        self,
        inbox: Inbox,
        entry: Entry,
        reason: str,
        event: Failed,
        requests: Mapping[str, str],
        owner: Owner | None = None,
    ) -> tuple[str, ...] | None:
        return tuple(uid for uid in requests if self.end(uid, event, frontend=""))

    def leave(self, inbox: Inbox, consumer: str, entry: Entry, version: int) -> bool:
        return False

    def left(self, inbox: Inbox, max_entries: int) -> list[Entry]:
        return []

    def frontends_of(self, uids: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(uids, "")

    # for the caller

    def wait(self, uids: Iterable[str], timeout_s: float) -> list[str]:
        """Wait until one of *uids* has ended; return those that have."""

        def ended() -> list[str]:
            return [uid for uid in uids if uid not in self._histories or self._histories[uid].is_ended]

        with self._changed:
            self._changed.wait_for(ended, timeout_s)
            return ended()

    def num_tokens(self, uids: Iterable[str]) -> int:
        """Return how many tokens *uids* have together."""
        with self._changed:
            return sum(self._histories[uid].num_tokens for uid in uids if uid in self._histories)

    def forget(self, uids: Iterable[str]) -> None:
        """Delete the histories of ended requests."""
        with self._changed:
            for uid in uids:
                self._histories.pop(uid, None)

    def flush(self) -> str:
        """Ask the engine to clear the prefix cache; return what its status says as `flushed` once it has."""
        with self._changed:
            self._num_flushes += 1
            self._updates.put(Flush(f"{self._num_flushes}-0"))
            return f"{self._num_flushes}-0"

    # for the tokenizer's thread

    def prompts(self, max_entries: int, timeout_s: float) -> list[Entry]:
        """Return requests to tokenize, waiting up to *timeout_s* for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._submitted, timeout_s)
            uids = [self._submitted.popleft() for _ in range(min(max_entries, len(self._submitted)))]
        return [Entry(uid, {"uid": uid, "frontend": ""}) for uid in uids]

    # for the engine's thread

    def publish(self, status: Status) -> None:
        """Take the engine's status."""
        self.status = status

    def begin(self, stop: Stop) -> Owner:
        """Begin as a new engine, until *stop*. It gets all requests that were tokenized and have not ended."""
        with self._changed:
            self._epoch += 1
            self._stop, self._steps = stop, queue.Queue(MOST_STEPS_BEHIND)
            self._updates, self._room = queue.SimpleQueue(), 0
            alive = {uid: history for uid, history in self._histories.items() if not history.is_ended}
            self._submitted = deque(uid for uid, history in alive.items() if len(history.entries) == 1)
            self._tokenized = deque(uid for uid, history in alive.items() if len(history.entries) > 1)
            for history in alive.values():
                history.with_engine = False
            return Owner(self.status.slot, self._epoch, "local")

    def commit(
        self, number: int, event: StepCompleted, ended: Sequence[str], room: Room, *, settled: bool = False
    ) -> None:
        """As EngineLink. What is committed outlives the engine in any case, so *settled* changes nothing."""
        while not self._stop:
            with contextlib.suppress(queue.Full):
                self._steps.put((f"{self._epoch}-{number}", event), timeout=LOOK_S)
                break
        self.idle(room)

    def close(self) -> None:
        """As EngineLink: nothing waits here."""

    def idle(self, room: Room) -> None:
        with self._changed:
            self._room = room.count - self._updates.qsize()
            self._deliver()

    look = idle

    def next_update(self, timeout_s: float = 0.0) -> Update | None:
        try:
            return self._updates.get(timeout=timeout_s) if timeout_s else self._updates.get_nowait()
        except queue.Empty:
            return None

    # the detokenizer's thread

    def fold_steps(self, fold: DetokenizeFold) -> None:
        """Fold the engine's steps until it stops, and write what follows to the histories."""
        while not self._stop:
            try:
                step_id, step = self._steps.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            for uid, history in zip(unknown := fold.unknown(step), self.histories(unknown), strict=True):
                fold.learn(uid, walk([] if history and history[-1].id == SEAL else history))
            produced = fold.apply(step, step_id)
            with self._changed:
                for uid, entry_id, _, event, _, tells_engine in produced:
                    if self._append(uid, entry_id, encode(event)) and tells_engine:
                        self._tell_engine(uid)

    # the caller holds the lock

    def _append(self, uid: str, entry_id: str, fields: Mapping[str, str]) -> bool:
        """Add an entry to a history, unless that has ended or is gone."""
        history = self._histories.get(uid)
        if history is None or history.is_ended:
            return False
        history.entries.append(Entry(entry_id, _stamped(fields)))
        if entry_id == SEAL:
            history.is_ended = True
            self._changed.notify_all()
        return True

    def _tell_engine(self, uid: str) -> None:
        if self._histories[uid].with_engine:
            self._updates.put(Ended(uid))

    def _deliver(self) -> None:
        """Pass requests to the engine, as long as it has room."""
        while self._room > 0 and self._tokenized:
            uid = self._tokenized.popleft()
            history = self._histories.get(uid)
            past = past_of(uid, history.entries) if history is not None else None
            if history is None or past is None:  # it has ended
                continue
            history.with_engine = True
            self._room -= 1
            self._updates.put(Arrived(past.request, past.had_begun, past.had_begun and past.num_taken_over > 0))


def _stamped(fields: Mapping[str, str]) -> dict[str, str]:
    return {"ms": str(time.time_ns() // 1_000_000), **fields}
