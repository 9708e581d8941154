"""Requests that lived in a log: every commit that the stages would have made, without a stage, a model or a clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from support.log_contract import FINISHED, Detokenizer, Scene, say_end, say_tokens

from pipeline.events import Admitted, End, Mark, SamplingParams, Submitted, TakenOver, Usage, new_uid
from pipeline.log.protocol import DeadLetter, Produced, Submission
from pipeline.log.redis import RedisLog


class LivedRequests:
    """Makes requests in *log*, one after the other; nobody else may work on it."""

    def __init__(self, log: RedisLog) -> None:
        self.log = log
        self.frontend = "web-0"
        self.owner = ""
        self._scene = Scene(log)
        self._scene.prepare()
        self._detokenizer = Detokenizer(self._scene)
        self._marks = itertools.count(3)

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
            owner=self.owner,
        )
        assert self.log.submit(uid, [event]).submission is Submission.ACCEPTED
        return uid

    def running(self, uid: str = "", *, prompt: str = "Hi", labels: Mapping[str, Any] | None = None) -> str:
        """Begin a request and bring it to an engine; return its uid."""
        uid = self.submitted(uid, prompt=prompt, labels=labels)
        self.taken_in(uid)
        return uid

    def taken_in(self, uid: str) -> None:
        """Bring the one request that waits to an engine."""
        assert self._scene.tokenize(self._scene.read_one(self._scene.submitted, "tokenize-0"))
        self.mark(uid, 0, Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w1", cached_tokens=2))

    def mark(self, uid: str, n: int, event: Mark) -> None:
        """Say something of a request when it had *n* tokens."""
        assert self._detokenizer.say(Produced(uid, f"{n}-{next(self._marks)}", n, event, self.frontend))

    def tokens(self, uid: str, *texts: str, after: int = 0) -> None:
        """Give a request a token for each text, after the *after* that it has."""
        for n, text in enumerate(texts, after + 1):
            assert self._detokenizer.say(say_tokens(uid, n, frontend=self.frontend, text=text))

    def finished(self, uid: str, n: int) -> None:
        """End a request that has *n* tokens."""
        usage = Usage(prompt_tokens=3, completion_tokens=n, cached_tokens=2)
        end = FINISHED.model_copy(update={"n": n, "usage": usage})
        assert self._detokenizer.say(say_end(uid, end, n=n, frontend=self.frontend))

    def answered(self, *texts: str, **how: Any) -> str:
        """Make a request that is answered with *texts*, a token for each; return its uid."""
        uid = self.running(**how)
        self.tokens(uid, *texts)
        self.finished(uid, len(texts))
        time.sleep(0.002)  # uids of one millisecond have no order
        return uid

    def ended(self, uid: str, event: End, *, dead: DeadLetter | None = None) -> None:
        """End a request from outside its engine."""
        assert self.log.end(uid, event, frontend=self.frontend, dead=dead)

    def dead(self, uid: str = "", *, prompt: str = "Hi", error: str = "exit code -11") -> str:
        """Make a request that killed its engine three times after its first token; return its uid."""
        uid = self.running(uid, prompt=prompt, labels={"user": "u1"})
        self.tokens(uid, "He")
        for epoch in (2, 3, 4):
            self.mark(uid, 1, TakenOver(engine="generate-0", epoch=epoch))
        assert self._scene.bury(uid, error=error, frontend=self.frontend)
        return uid

    def released(self) -> None:
        """Have the engine let all requests go that it was given."""
        taken = self._scene.take(self._detokenizer.engine, 1000)
        assert self._detokenizer.commit(self._detokenizer.read_step(*(entry.id for entry in taken)))
