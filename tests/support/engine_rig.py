"""An engine's loop in a thread, with an engine that counts instead of computing, and requests for it; and all stages in
threads on one log: answers are known before, and a worker that dies is seen.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.redis_servers import until

from pipeline.events import (
    AnyEvent,
    Finished,
    SamplingParams,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
    decode,
    new_uid,
)
from pipeline.log.protocol import Inbox, Owner, Turn
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.names import DETOKENIZE, GENERATE, SEAL, TOKENIZE, parse_id, slot_index, slot_name
from pipeline.serving import Serving
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from pipeline.stage.worker import Stop, follow
from stages.detokenize.text import Decoder
from stages.detokenize.worker import serve
from stages.generate.kvcache.base import PrefixCache
from stages.generate.kvcache.naive import NaiveCache
from stages.generate.loop.grammars import Grammars
from stages.generate.loop.log_thread import LogThread
from stages.generate.loop.pace import Pace
from stages.generate.loop.worker import GenerateWorker
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits
from stages.tokenize.prompts import Rendered
from stages.tokenize.worker import TokenizeWorker

LEASE_MS = 3000
CONTEXT = 64
POISON = 150
"""A token on which the engine raises."""
LIMITS = ScheduleLimits(
    context=CONTEXT, max_prefill_length=64, mixed_prefill_length=16, max_running_requests=8, vocab_size=200
)
LONG_LIMITS = replace(LIMITS, context=2 * CONTEXT)


class Killed(BaseException):
    """As what ends the process of an engine: nothing in it can catch it."""


class CountingEngine:
    """The next token of a row is its last one plus one. *pace_s*: how long a step takes."""

    def __init__(self, pace_s: float = 0.0) -> None:
        self.pace_s = pace_s
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.closes_after = -1
        """Number of steps after which it closes its own gate; -1: never."""
        self.plans: list[BatchPlan] = []

    def forward(self, plan: BatchPlan) -> Computed:
        if any(POISON in row.token_ids for row in plan.rows) or self.broken:
            raise IndexError("index out of range in self")
        if len(self.plans) == self.closes_after:
            self.gate.clear()
        self.gate.wait(30)
        threading.Event().wait(self.pace_s)
        self.plans.append(plan)
        return Computed([row.token_ids[-1] + 1 for row in plan.rows if row.sample is not None])


@dataclass
class Running:
    """An engine's loop in a thread."""

    worker: GenerateWorker
    log_thread: LogThread
    slot_lease: SlotLease
    engine: CountingEngine
    schedule: Schedule
    stop: Stop
    measures: Measures
    errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            self.worker.run(self.stop)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.log_thread.stop()


def letters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


LETTERS = Decoder(letters, letters, chr)


class Scene:
    """A log, requests in it, and engines that serve them."""

    def __init__(self, another_log: Callable[[], RedisLog]) -> None:
        self.another_log = another_log
        self.log = another_log()
        self.submitted, self.tokenized = Inbox.submitted(self.log.names), Inbox.tokenized(self.log.names)

    def send(
        self,
        *prompt: int,
        priority: int = 0,
        bad_words: Sequence[tuple[int, ...]] = (),
        grammar: str = "",
        prefer: str = "",
        **sampling: object,
    ) -> str:
        """Bring a request as far as `tokenized`, and return its uid."""
        uid = new_uid()
        self.log.prepare(self.submitted)
        params = SamplingParams.model_validate(sampling)
        self.log.submit(uid, [Submitted(endpoint="chat", frontend="web-0", sampling=params, priority=priority)])
        (entry,) = self.log.read(self.submitted, "tokenize-0", max_entries=1, block_ms=1000)
        tokenized = Tokenized(
            token_ids=prompt, fingerprint="f", by="tokenize-0", bad_words=tuple(bad_words), grammar=grammar
        )
        assert self.log.tokenized(entry, tokenized, turn=Turn(prefer=prefer))
        return uid

    @contextlib.contextmanager
    def running(
        self,
        *,
        slot: int = 0,
        engine: CountingEngine | None = None,
        limits: ScheduleLimits = LIMITS,
        num_pages: int = 64,
        pace_s: float = 0.0,
        heard: bool = True,
        cache: PrefixCache | None = None,
        lease_ms: int = LEASE_MS,
        thread_log: RedisLog | None = None,
        serving: Serving | None = None,
        numerics: str = "",
        pace: Pace | None = None,
        overlap: bool = False,
        commit_interval_s: float = 0.01,
        grammars: Grammars | None = None,
        steal_after_s: float = 60.0,
    ) -> Iterator[Running]:
        """Run an engine in slot generate-<slot>, or the lowest free one, until the block ends.

        *heard*: its detokenizer's slot is held, too. *serving*, *numerics*: its weights, and how it computes with them.
        """
        log = self.another_log()
        owner = acquire_slot(log, "generate", lease_ms, preferred=slot)
        slot_lease = SlotLease(self.another_log(), owner, lease_ms)
        log.prepare(Inbox.steps(log.names, owner.slot))
        if heard:
            log.acquire(slot_name("detokenize", slot_index(owner.slot)), "the detokenizer", LEASE_MS * 10)
        weights = serving.weights if serving else "counting"
        identity = Identity(owner.slot, owner.epoch, weights, numerics)
        schedule = Schedule(cache or NaiveCache(num_pages, 4), limits, [], identity)
        measures = Measures()
        log_thread = LogThread(
            thread_log or self.another_log(),
            owner,
            lease_ms=lease_ms,
            report_progress=slot_lease.report_progress,
            measures=measures,
            serving=serving,
            commit_interval_s=commit_interval_s,
            steal_after_s=steal_after_s,
        )
        engine = engine or CountingEngine(pace_s)
        worker = GenerateWorker(
            engine, schedule, log_thread, slot_lease, measures, pace, grammars, overlap=overlap, namespace="rig"
        )
        item = Running(worker, log_thread, slot_lease, engine, schedule, Stop(), measures)
        thread = threading.Thread(target=item.run)
        log_thread.start()
        thread.start()
        try:
            yield item
        finally:
            engine.gate.set()
            item.stop.set()
            thread.join(30)
            slot_lease.leave()
            assert not thread.is_alive()

    @property
    def is_consumed(self) -> bool:
        """Whether no request waits for an engine, or is in the hand of one."""
        return self.log.backlog(self.tokenized) == 0

    def in_hand(self, slot: str = "generate-0") -> list[str]:
        """Return the uids that the log delivered to an engine and that it has not consumed."""
        return [entry.fields["uid"] for entry in self.log.pending(self.tokenized, slot)]

    def history(self, uid: str) -> list[AnyEvent]:
        return [decode(entry.fields) for entry in self.log.histories([uid])[0]]

    def tokens(self, uid: str) -> list[int]:
        return [token for event in self.history(uid) if isinstance(event, TokensProduced) for token in event.tokens]

    def takeovers(self, uid: str) -> list[tuple[int, TakenOver]]:
        """Return who took a request over, and how many tokens it had then."""
        entries = self.log.histories([uid])[0]
        found = ((parse_id(entry.id)[0], decode(entry.fields)) for entry in entries)
        return [(n, event) for n, event in found if isinstance(event, TakenOver)]

    def have_ended(self, *uids: str) -> bool:
        return all(entries[-1].id == SEAL for entries in self.log.histories(uids))


@contextlib.contextmanager
def detokenizing(scene: Scene, *indices: int) -> Iterator[None]:
    """Run the detokenizers of these engines, where a token is a character."""
    if not indices:
        yield
        return
    log, stop = scene.another_log(), Stop()
    owner = acquire_slot(log, "detokenize", LEASE_MS, preferred=indices[0])
    slot_lease = SlotLease(scene.another_log(), owner, LEASE_MS)
    thread = threading.Thread(target=serve, args=(log, slot_lease, LETTERS, stop))
    thread.start()
    try:
        with detokenizing(scene, *indices[1:]):
            yield
    finally:
        stop.set()
        thread.join(30)
        slot_lease.leave()


class LetterEncoder:
    """One token for each letter."""

    fingerprint = "letters"

    def render(self, event: Submitted) -> Rendered:
        return Rendered(event.prompt, True, "prompt", event.prompt_ids)

    def encode(self, prompts: Sequence[Rendered]) -> list[tuple[int, ...]]:
        return [prompt.token_ids or tuple(map(ord, prompt.text)) for prompt in prompts]

    def refuse_too_long(self, prompt: Rendered, context: int) -> None:
        """Nothing is."""


class Pipeline:
    """A tokenizer, an engine that counts on from the last letter of a prompt, and a detokenizer."""

    def __init__(self, another_log: Callable[[], RedisLog]) -> None:
        self.another_log = another_log
        self.log = another_log()
        self.names = self.log.names
        self.scene = Scene(another_log)
        self.measures = {stage: Measures() for stage in (TOKENIZE, DETOKENIZE)}
        self.gate = threading.Event()
        """While it is clear, the engine stands still."""
        self.errors: list[BaseException] = []
        """Of workers that died."""
        self.inboxes = (
            Inbox.submitted(self.names),
            Inbox.tokenized(self.names),
            Inbox.steps(self.names, slot_name(GENERATE, 0)),
        )

    @contextlib.contextmanager
    def running(self, limits: ScheduleLimits = LIMITS) -> Iterator[Pipeline]:
        for inbox in self.inboxes:
            self.log.prepare(inbox)
        with self._detokenizer(), self.scene.running(heard=False, limits=limits) as engine:
            self.measures[GENERATE], self.gate = engine.measures, engine.engine.gate
            engine.slot_lease.say(phase="ready", context=CONTEXT)
            until(lambda: any(status.context for status in read_statuses(self.log, GENERATE)))  # a thread writes it
            with self._tokenizer():
                yield self
            self.errors += engine.errors

    def ask(self, prompt: str, max_tokens: int = 4, uid: str = "") -> str:
        uid = uid or new_uid()
        sampling = SamplingParams(max_tokens=max_tokens)
        self.log.submit(uid, [Submitted(endpoint="chat", frontend="web-0", prompt=prompt, sampling=sampling)])
        return uid

    def answer(self, uid: str) -> str:
        """Wait for the end of a request; return its text."""
        until(lambda: bool(self.errors) or self.scene.have_ended(uid), timeout_s=20)
        assert not self.errors, self.errors
        history = self.history(uid)
        assert isinstance(history[-1], Finished), history[-1]
        return "".join(event.text for event in history if isinstance(event, TokensProduced))

    def end_of(self, uid: str) -> AnyEvent:
        until(lambda: bool(self.errors) or self.log.histories([uid])[0][-1].id == SEAL, timeout_s=20)
        return self.history(uid)[-1]

    def history(self, uid: str) -> list[AnyEvent]:
        return self.scene.history(uid)

    @contextlib.contextmanager
    def _in_slot(self, stage: str, work: Callable[[RedisLog, SlotLease, Stop], object]) -> Iterator[None]:
        log, stop = self.another_log(), Stop()
        owner = log.acquire(slot_name(stage, 0), "n", LEASE_MS)
        assert isinstance(owner, Owner)
        slot_lease = SlotLease(self.another_log(), owner, LEASE_MS)

        def run() -> None:
            try:
                work(log, slot_lease, stop)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, name=stage)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(30)
            slot_lease.leave()

    def _detokenizer(self) -> contextlib.AbstractContextManager[None]:
        def work(log: RedisLog, slot_lease: SlotLease, stop: Stop) -> None:
            serve(log, slot_lease, LETTERS, stop, self.measures[DETOKENIZE])

        return self._in_slot(DETOKENIZE, work)

    def _tokenizer(self) -> contextlib.AbstractContextManager[None]:
        encoder: Any = LetterEncoder()

        def work(log: RedisLog, slot_lease: SlotLease, stop: Stop) -> None:
            worker = TokenizeWorker(log, slot_lease, encoder, self.measures[TOKENIZE])
            follow(log, self.inboxes[0], slot_lease, worker.handle, worker.bury, stop, max_entries=4, look=worker.look)

        return self._in_slot(TOKENIZE, work)


def counted_on(prompt: str, max_tokens: int = 4) -> str:
    """Return the answer to *prompt*."""
    return letters(range(ord(prompt[-1]) + 1, ord(prompt[-1]) + 1 + max_tokens))
