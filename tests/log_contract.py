"""What the tests of the log's contract have in common: one suite over every StreamLog, tests/pipeline/log/contract."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.events import (
    Cancelled,
    End,
    Event,
    Failed,
    Finished,
    SamplingParams,
    StepCompleted,
    Submitted,
    Timings,
    Tokenized,
    TokenRow,
    TokensProduced,
    Usage,
    decode,
)
from pipeline.log.protocol import (
    GUEST,
    Entry,
    Inbox,
    Once,
    Owner,
    Produced,
    Quota,
    Reply,
    RequestLimits,
    StepCommitted,
    StreamLog,
    Submission,
    SubmitResult,
)
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, Names, tokens_id

T = TypeVar("T")

NAMES = Names("test")
LIMITS = RequestLimits(timeout_s=60, retention_s=60, max_queued=100)
SUBMITTED = Inbox.submitted(NAMES)
TOKENIZED = Inbox.tokenized(NAMES)
STEPS = Inbox.steps(NAMES, "generate-0")
LONG_MS = 60_000
SHORT_MS = 20

FINISHED = Finished(
    n=2,
    reason="stop",
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3),
)
CANCELLED = Cancelled(by="client")
FAILED = Failed(status=400, code="invalid_value", message="No.")
ONCE = Once("key", "body")
ATTACHED_TO_A = SubmitResult(Submission.ATTACH, "a")
ACCEPTED, TOO_FAST, TOO_MANY = Submission.ACCEPTED, Submission.TOO_FAST, Submission.TOO_MANY


def another(log: StreamLog) -> StreamLog:
    """Return the same log for another thread."""
    return log.another() if isinstance(log, RedisLog) else log


def limits(*, timeout_ms: int = LONG_MS, retention_ms: int = LONG_MS, max_queued: int = 100) -> RequestLimits:
    return RequestLimits(timeout_ms / 1000, retention_ms / 1000, max_queued)


def submit(
    log: StreamLog,
    uid: str = "a",
    *,
    frontend: str = "web-0",
    timeout_ms: int = LONG_MS,
    retention_ms: int = LONG_MS,
    max_queued: int = 100,
) -> Submission:
    event = Submitted(endpoint="/v1/completions", frontend=frontend, prompt="Hi", sampling=SamplingParams(seed=1))
    log.limits = limits(timeout_ms=timeout_ms, retention_ms=retention_ms, max_queued=max_queued)
    return log.submit(uid, [event]).submission


def read_one(log: StreamLog, inbox: Inbox, consumer: str) -> Entry:
    entries = log.read(inbox, consumer, max_entries=1, block_ms=0)
    assert len(entries) == 1
    return entries[0]


def tokenize(log: StreamLog, entry: Entry) -> bool:
    return log.tokenized(entry, Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0"))


def accept(log: StreamLog, *uids: str, frontend: str = "web-0") -> None:
    """Bring requests as far as the engines."""
    for uid in uids:
        assert submit(log, uid, frontend=frontend) is Submission.ACCEPTED
        assert tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))


def own(log: StreamLog, slot: str, *, nonce: str = "n", lease_ms: int = LONG_MS) -> Owner:
    owner = log.acquire(slot, nonce, lease_ms)
    assert owner is not None
    return owner


def own_after(log: StreamLog, before: Owner) -> Owner:
    """Take the slot over from *before*."""
    log.release(before)
    return own(log, before.slot, nonce="later")


def step_of(uid: str = "a", n: int = 1) -> StepCompleted:
    return StepCompleted(rows=(TokenRow(uid=uid, n=n, token=40 + n),))


def step(log: StreamLog, owner: Owner, number: int, *ended: str, cursor: str = "0-0") -> StepCommitted:
    return log.step(owner, number, step_of(n=number), ended=ended, control_cursor=cursor, lease_ms=LONG_MS)


def say_tokens(uid: str, n: int, *, frontend: str = "web-0", text: str = "x") -> Produced:
    event = TokensProduced(count=1, tokens=(40 + n,), text=text, step=f"1-{n}")
    return Produced(uid, tokens_id(n), n, event, frontend)


def say_end(uid: str, event: End, *, n: int = 2, tell_engine: bool = False) -> Produced:
    return Produced(uid, SEAL, n, event, "web-0", tell_engine)


class Detokenizer:
    """Commits what follows from the steps of generate-0, one step for each call."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.engine = own(log, "generate-0")
        self.owner = own(log, "detokenize-0")
        self._numbers = itertools.count(1)

    def read_step(self) -> Entry:
        step(self.log, self.engine, next(self._numbers))
        return read_one(self.log, STEPS, self.owner.slot)

    def commit(self, entry: Entry, *events: Produced) -> bool:
        return self.log.produced(self.owner, entry, "generate-0", events)

    def say(self, *events: Produced) -> bool:
        return self.commit(self.read_step(), *events)


def end(log: StreamLog, uid: str, event: End, *, consume: Entry | None = None) -> bool:
    return log.end(uid, event, frontend="web-0", consume=consume)


def history(log: StreamLog, uid: str = "a") -> list[Entry]:
    return log.histories([uid])[0]


def ids(log: StreamLog, uid: str = "a") -> list[str]:
    return [entry.id for entry in history(log, uid)]


def events(log: StreamLog, uid: str = "a") -> list[Event]:
    """Return the events of a history, without the moment of their commit."""
    return [decode(entry.fields).model_copy(update={"ms": 0}) for entry in history(log, uid)]


def replies_after(log: StreamLog, cursor: str, frontend: str = "web-0") -> list[Reply]:
    found: list[Reply] = []
    while True:
        cursor, replies = log.read_replies(frontend, cursor, block_ms=0)
        if not replies:
            return found
        found += replies


def told(log: StreamLog, cursor: str = "0-0") -> tuple[str, ...]:
    """Return which ends `control` told the engines."""
    watcher = own(log, "generate-9")
    taken = log.take(watcher, 0, control_cursor=cursor)
    log.release(watcher)
    return taken.ended


def submit_once(
    log: StreamLog, uid: str, once: Once = ONCE, *, timeout_ms: int = LONG_MS, max_queued: int = 100
) -> SubmitResult:
    event = Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams())
    log.limits = limits(timeout_ms=timeout_ms, retention_ms=timeout_ms, max_queued=max_queued)
    return log.submit(uid, [event], once)


def submit_as(
    log: StreamLog, uid: str, quota: Quota, once: Once | None = None, *, max_queued: int = 100
) -> SubmitResult:
    event = Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams())
    log.limits = limits(max_queued=max_queued)
    return log.submit(uid, [event], once, quota=quota)


def in_one_minute(act: Callable[[str], T]) -> T:
    """Return what *act* brings with a fresh key, done again when a minute ended on its way."""
    for attempt in itertools.count():
        minute = int(time.time()) // 60
        brought = act(f"key{attempt}")
        if int(time.time()) // 60 == minute:
            return brought
    raise AssertionError


def submit_all(
    log: StreamLog,
    uid: str,
    count: int,
    once: Once | None = None,
    quota: Quota | None = None,
    *,
    timeout_ms: int = LONG_MS,
    max_queued: int = 100,
) -> SubmitResult:
    events = [
        Submitted(endpoint="e", frontend="web-0", prompt=f"prompt {i}", sampling=SamplingParams(seed=i))
        for i in range(count)
    ]
    log.limits = limits(timeout_ms=timeout_ms, max_queued=max_queued)
    return log.submit(uid, events, once, quota=quota)


def waiting(log: StreamLog) -> list[str]:
    """Return whom the tokenizers are handed, in order."""
    return [entry.fields["uid"] for entry in log.read(SUBMITTED, "tokenize-0", max_entries=2000, block_ms=0)]


def be_guest(log: StreamLog, slot: str, *, nonce: str = "x") -> Owner:
    return own(log, slot, nonce=GUEST + nonce)


def take_all(log: StreamLog, owner: Owner, *uids: str) -> list[Entry]:
    """Bring requests as far as an engine that has them in hand."""
    accept(log, *uids)
    return list(log.take(owner, 8, control_cursor="0-0").entries)
