"""All stages in threads on one log, without a model: answers are known before, and a worker that dies is seen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.engine_rig import LEASE_MS, LIMITS, Scene
from support.redis_servers import until

from pipeline.events import AnyEvent, Finished, SamplingParams, Submitted, TokensProduced, new_uid
from pipeline.log.protocol import Inbox, Owner, StreamLog
from pipeline.metrics.counters import Measures
from pipeline.names import DETOKENIZE, GENERATE, SEAL, TOKENIZE, slot_name
from pipeline.stage.slots import SlotLease, read_statuses
from pipeline.stage.worker import Stop, follow
from stages.detokenize.text import Decoder
from stages.detokenize.worker import serve
from stages.generate.schedule.schedule import ScheduleLimits
from stages.tokenize.prompts import Rendered
from stages.tokenize.worker import TokenizeWorker

CONTEXT = 64


def letters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


LETTERS = Decoder(letters, letters, chr)


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

    def __init__(self, another_log: Callable[[], StreamLog]) -> None:
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
    def _in_slot(self, stage: str, work: Callable[[StreamLog, SlotLease, Stop], object]) -> Iterator[None]:
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
        def work(log: StreamLog, slot_lease: SlotLease, stop: Stop) -> None:
            serve(log, slot_lease, LETTERS, stop, self.measures[DETOKENIZE])

        return self._in_slot(DETOKENIZE, work)

    def _tokenizer(self) -> contextlib.AbstractContextManager[None]:
        encoder: Any = LetterEncoder()

        def work(log: StreamLog, slot_lease: SlotLease, stop: Stop) -> None:
            worker = TokenizeWorker(log, slot_lease, encoder, self.measures[TOKENIZE])
            follow(log, self.inboxes[0], slot_lease, worker.handle, worker.bury, stop, max_entries=4, look=worker.look)

        return self._in_slot(TOKENIZE, work)


def counted_on(prompt: str, max_tokens: int = 4) -> str:
    """Return the answer to *prompt*."""
    return letters(range(ord(prompt[-1]) + 1, ord(prompt[-1]) + 1 + max_tokens))
