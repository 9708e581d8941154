"""What the tests of the log's contract have in common: one suite over every RedisLog, tests/pipeline/log/contract."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from support.memory_log.log import MemoryLog
from support.memory_log.streams import id_text
from support.redis_servers import command

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
    DeadLetter,
    Entry,
    Inbox,
    Once,
    Owner,
    Produced,
    Quota,
    Reply,
    RequestLimits,
    StepCommitted,
    Submission,
    SubmitResult,
)
from pipeline.log.redis import AsyncRedisLog, RedisLog
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
KILLED = Failed(status=500, code="killed_its_worker", message="It killed its worker three times.")
ONCE = Once("key", "body")
ATTACHED_TO_A = SubmitResult(Submission.ATTACH, "a")
ACCEPTED, DUPLICATE, BUSY = Submission.ACCEPTED, Submission.DUPLICATE, Submission.BUSY
TOO_FAST, TOO_MANY, TOO_MUCH = Submission.TOO_FAST, Submission.TOO_MANY, Submission.TOO_MUCH


def limits(*, timeout_ms: int = LONG_MS, retention_ms: int = LONG_MS, max_queued: int = 100) -> RequestLimits:
    return RequestLimits(timeout_ms / 1000, retention_ms / 1000, max_queued, response_retention_s=retention_ms / 1000)


def submitted(frontend: str = "web-0", *, number: int = 0, prompt: str = "Hi") -> Submitted:
    sampling = SamplingParams(seed=number)
    return Submitted(endpoint="e", frontend=frontend, prompt=f"{prompt} {number}", sampling=sampling)


def step_of(uid: str = "a", n: int = 1) -> StepCompleted:
    return StepCompleted(rows=(TokenRow(uid=uid, n=n, token=40 + n),))


def say_tokens(uid: str, n: int, *, frontend: str = "web-0", text: str = "x") -> Produced:
    event = TokensProduced(count=1, tokens=(40 + n,), text=text, step=f"1-{n}")
    return Produced(uid, tokens_id(n), n, event, frontend)


def say_end(uid: str, event: End, *, n: int = 2, tell_engine: bool = False, frontend: str = "web-0") -> Produced:
    return Produced(uid, SEAL, n, event, frontend, tell_engine)


def put(log: RedisLog, key: str, fields: Mapping[str, str], entry_id: str = "*") -> str:
    """Append what no commit would; return its id."""
    if isinstance(log, RedisLog):
        words = (word for pair in fields.items() for word in pair)
        return str(command(log.url, "XADD", key, entry_id, *words).decode())
    assert isinstance(log, MemoryLog)
    with log._changed:
        stream = log._streams.append(key, None if entry_id == "*" else entry_id, fields, make=True)
        assert stream is not None
        return id_text(stream.last)


def with_front(url: str, act: Callable[[AsyncRedisLog], Awaitable[T]], limits: RequestLimits = LIMITS) -> T:
    """Return what *act* brings with the log of a frontend."""

    async def run() -> T:
        front = AsyncRedisLog(url, NAMES, limits)
        try:
            async with asyncio.timeout(20):
                return await act(front)
        finally:
            await front.close()

    return asyncio.run(run())


class Scene:
    """A log, and what tests have the stages do with it."""

    def __init__(self, log: RedisLog) -> None:
        self.log = log
        self.submitted = Inbox.submitted(log.names)
        self.steps = Inbox.steps(log.names, "generate-0")

    def prepare(self) -> None:
        """Make the groups that a server makes at its start."""
        for inbox in (self.submitted, Inbox.tokenized(self.log.names), self.steps):
            self.log.prepare(inbox)

    def another(self) -> Scene:
        """Return the same log for another thread."""
        return Scene(self.log.another() if isinstance(self.log, RedisLog) else self.log)

    def at_once(self, act: Callable[[Scene, str], T], uids: Iterable[str] = "abcdefgh") -> list[T]:
        """Return what *act* brings for each uid, all at the same time, each in a thread with a log of its own."""
        scenes = {uid: self.another() for uid in uids}
        start, brought = threading.Barrier(len(scenes)), list[T]()

        def begin(uid: str) -> None:
            start.wait()
            brought.append(act(scenes[uid], uid))

        threads = [threading.Thread(target=begin, args=(uid,)) for uid in scenes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for scene in scenes.values():
            if isinstance(scene.log, RedisLog):
                scene.log.close()
        return brought

    def meanwhile(self, wait: Callable[[RedisLog], T], act: Callable[[], object] = lambda: None) -> T:
        """Return what *wait* brings in a thread of its own, while *act* is done: sooner than the longest block."""
        log, brought = self.another().log, list[T]()
        thread = threading.Thread(target=lambda: brought.append(wait(log)))
        thread.start()
        act()
        thread.join(1.5)
        assert len(brought) == 1, "it waits on"
        return brought[0]

    # requests

    def submit_all(
        self,
        uid: str,
        count: int,
        once: Once | None = None,
        quota: Quota | None = None,
        *,
        frontend: str = "web-0",
        timeout_ms: int = LONG_MS,
        retention_ms: int = LONG_MS,
        max_queued: int = 100,
    ) -> SubmitResult:
        self.log.limits = limits(timeout_ms=timeout_ms, retention_ms=retention_ms, max_queued=max_queued)
        return self.log.submit(uid, [submitted(frontend, number=i) for i in range(count)], once, quota=quota)

    def submit(self, uid: str = "a", **how: Any) -> Submission:
        return self.submit_all(uid, 1, **how).submission

    def submit_once(self, uid: str, once: Once = ONCE, **how: Any) -> SubmitResult:
        return self.submit_all(uid, 1, once, **how)

    def submit_as(self, uid: str, quota: Quota, once: Once | None = None, **how: Any) -> SubmitResult:
        return self.submit_all(uid, 1, once, quota, **how)

    def waiting(self) -> list[str]:
        """Return whom the tokenizers are handed, in order."""
        return [entry.fields["uid"] for entry in self.log.read(SUBMITTED, "tokenize-0", max_entries=2000, block_ms=0)]

    def read_one(self, inbox: Inbox, consumer: str) -> Entry:
        entries = self.log.read(inbox, consumer, max_entries=1, block_ms=0)
        assert len(entries) == 1
        return entries[0]

    def tokenize(self, entry: Entry) -> bool:
        return self.log.tokenized(entry, Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0"))

    def accept(self, *uids: str, frontend: str = "web-0") -> None:
        """Bring requests as far as the engines."""
        for uid in uids:
            assert self.submit(uid, frontend=frontend) is ACCEPTED
            assert self.tokenize(self.read_one(self.submitted, "tokenize-0"))

    def take_all(self, owner: Owner, *uids: str) -> list[Entry]:
        """Bring requests as far as an engine that has them in hand."""
        self.accept(*uids)
        return self.take(owner)

    def take(self, owner: Owner, max_entries: int = 8) -> list[Entry]:
        return list(self.log.take(owner, max_entries, control_cursor="0-0").entries)

    def step(self, owner: Owner, number: int, *ended: str, cursor: str = "0-0") -> StepCommitted:
        event = step_of(n=number)
        return self.log.step(owner, {number: event}, ended=ended, control_cursor=cursor, lease_ms=LONG_MS)

    def end(self, uid: str = "a", event: End = CANCELLED, *, consume: Entry | None = None) -> bool:
        return self.log.end(uid, event, frontend="web-0", consume=consume)

    def bury(self, uid: str = "a", *, error: str = "exit code -11", frontend: str = "web-0") -> bool:
        letter = DeadLetter(stage="generate", entry={"uid": uid, "frontend": frontend}, deaths=3, error=error)
        return self.log.end(uid, KILLED, frontend=frontend, dead=letter)

    def abandon(self, uid: str = "a", **how: Any) -> bool:
        return self.log.abandon(uid, CANCELLED, frontend="web-0", **how)

    # slots

    def own(self, slot: str, *, nonce: str = "n", lease_ms: int = LONG_MS) -> Owner:
        owner = self.log.acquire(slot, nonce, lease_ms)
        assert owner is not None
        return owner

    def own_after(self, before: Owner) -> Owner:
        """Take the slot over from *before*."""
        self.log.release(before)
        return self.own(before.slot, nonce="later")

    def be_guest(self, slot: str, *, nonce: str = "x") -> Owner:
        return self.own(slot, nonce=GUEST + nonce)

    # what is there

    def history(self, uid: str = "a") -> list[Entry]:
        return self.log.histories([uid])[0]

    def ids(self, uid: str = "a") -> list[str]:
        return [entry.id for entry in self.history(uid)]

    def events(self, uid: str = "a") -> list[Event]:
        """Return the events of a history, without the times that the commit adds."""
        fields = [{**entry.fields, "ms": "0"} for entry in self.history(uid)]
        return [decode({name: text for name, text in each.items() if name != "age_ms"}) for each in fields]

    def replies_after(self, cursor: str, frontend: str = "web-0") -> list[Reply]:
        found: list[Reply] = []
        while True:
            cursor, replies = self.log.read_replies(frontend, cursor, block_ms=0)
            if not replies:
                return found
            found += replies

    def told(self, cursor: str = "0-0") -> tuple[str, ...]:
        """Return which ends `control` told the engines."""
        watcher = self.own("generate-9")
        taken = self.log.take(watcher, 0, control_cursor=cursor)
        self.log.release(watcher)
        return taken.ended


class Detokenizer:
    """Commits what follows from the steps of generate-0, one step for each call."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.engine = scene.own("generate-0")
        self.owner = scene.own("detokenize-0")
        self._numbers = itertools.count(1)

    def read_step(self, *ended: str) -> Entry:
        self.scene.step(self.engine, next(self._numbers), *ended)
        return self.scene.read_one(self.scene.steps, self.owner.slot)

    def commit(self, entry: Entry, *events: Produced) -> bool:
        return self.scene.log.produced(self.owner, [entry], "generate-0", events)

    def say(self, *events: Produced) -> bool:
        return self.commit(self.read_step(), *events)
