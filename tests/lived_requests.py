"""Requests that lived in a log: every commit that the stages would have made, without a stage, a model or a clock."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipeline.events import (
    Admitted,
    End,
    Failed,
    Finished,
    Mark,
    SamplingParams,
    StepCompleted,
    Submitted,
    TakenOver,
    Timings,
    Tokenized,
    TokensProduced,
    Usage,
    new_uid,
)
from pipeline.log.protocol import DeadLetter, Inbox, Produced, StreamLog, Submission
from pipeline.names import SEAL, tokens_id

MINUTE_MS = 60_000
KILLED = Failed(status=500, code="killed_its_worker", message="It killed its worker three times.")


class LivedRequests:
    """Makes requests in *log*, one after the other; nobody else may work on it."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.frontend = "web-0"
        self._steps = itertools.count(1)
        self._marks = itertools.count(3)
        for inbox in self._inboxes():
            log.prepare(inbox)
        engine, detokenizer = (log.acquire(slot, "n", MINUTE_MS) for slot in ("generate-0", "detokenize-0"))
        assert engine is not None and detokenizer is not None
        self._engine, self._detokenizer = engine, detokenizer

    def _inboxes(self) -> tuple[Inbox, Inbox, Inbox]:
        names = self.log.names
        return Inbox.submitted(names), Inbox.tokenized(names), Inbox.steps(names, "generate-0")

    def submitted(self, uid: str = "", *, prompt: str = "Hi", labels: Mapping[str, Any] | None = None) -> str:
        """Begin a request; return its uid."""
        uid = uid or new_uid()
        event = Submitted(
            endpoint="/v1/completions",
            frontend=self.frontend,
            model="nonsense",
            prompt=prompt,
            sampling=SamplingParams(temperature=0.5, seed=7, max_tokens=20),
            labels=dict(labels or {}),
        )
        outcome = self.log.submit(uid, [event]).submission
        assert outcome is Submission.ACCEPTED
        return uid

    def running(self, uid: str = "", *, prompt: str = "Hi", labels: Mapping[str, Any] | None = None) -> str:
        """Begin a request and bring it to an engine; return its uid."""
        uid = self.submitted(uid, prompt=prompt, labels=labels)
        self.taken_in(uid)
        return uid

    def taken_in(self, uid: str) -> None:
        """Bring the one request that waits to an engine."""
        (entry,) = self.log.read(self._inboxes()[0], "tokenize-0", max_entries=1, block_ms=0)
        assert self.log.tokenized(entry, Tokenized(token_ids=(5, 6, 7), fingerprint="t1", by="tokenize-0"))
        self.mark(uid, 0, Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w1", cached_tokens=2))

    def mark(self, uid: str, n: int, event: Mark) -> None:
        """Say something of a request when it had *n* tokens."""
        self._say(Produced(uid, f"{n}-{next(self._marks)}", n, event, self.frontend))

    def tokens(self, uid: str, *texts: str, after: int = 0) -> None:
        """Give a request a token for each text, after the *after* that it has."""
        for n, text in enumerate(texts, after + 1):
            event = TokensProduced(count=1, tokens=(40 + n,), text=text, step=f"1-{n}")
            self._say(Produced(uid, tokens_id(n), n, event, self.frontend))

    def finished(self, uid: str, n: int) -> None:
        """End a request that has *n* tokens."""
        event = Finished(
            n=n,
            reason="stop",
            usage=Usage(prompt_tokens=3, completion_tokens=n, cached_tokens=2),
            timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3),
        )
        self._say(Produced(uid, SEAL, n, event, self.frontend))

    def ended(self, uid: str, event: End, *, dead: DeadLetter | None = None) -> None:
        """End a request from outside its engine."""
        assert self.log.end(uid, event, frontend=self.frontend, dead=dead)

    def dead(self, uid: str = "", *, prompt: str = "Hi", error: str = "exit code -11") -> str:
        """Make a request that killed its engine three times after its first token; return its uid."""
        uid = self.running(uid, prompt=prompt, labels={"user": "u1"})
        self.tokens(uid, "He")
        for epoch in (2, 3, 4):
            self.mark(uid, 1, TakenOver(engine="generate-0", epoch=epoch))
        letter = DeadLetter(stage="generate", entry={"uid": uid, "frontend": self.frontend}, deaths=3, error=error)
        self.ended(uid, KILLED, dead=letter)
        return uid

    def _say(self, *events: Produced) -> None:
        """Commit a step and what follows from it."""
        _, _, steps = self._inboxes()
        step = StepCompleted(rows=())
        self.log.step(self._engine, next(self._steps), step, ended=(), control_cursor="0-0", lease_ms=MINUTE_MS)
        (entry,) = self.log.read(steps, "detokenize-0", max_entries=1, block_ms=0)
        assert self.log.produced(self._detokenizer, entry, "generate-0", events)
