"""Whether a request would be answered: every stage says that it is ready, and one token went through all of them.

Polls the statuses of the workers; also knows from them which model names are served, and with what context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import structlog

from pipeline.errors import LogError, RequestError
from pipeline.events import Finished, SamplingParams, Submitted, new_uid
from pipeline.log import Submission
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE
from pipeline.redis_log import AsyncRedisLog
from pipeline.slots import Status, known_statuses
from web.tail import Tail

logger = structlog.get_logger()

POLL_LOADING_S = 0.1
POLL_READY_S = 2.0
PROBE_RETRY_S = 1.0
PROBE: Final = "probe"
"""Endpoint of the request that tries the way, and what is waited for while it is under way."""
STAGES: Final = (TOKENIZE, GENERATE, DETOKENIZE)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may take."""

    timeout_s: float = 600.0
    retention_s: float = 900.0
    max_queued: int = 1024


class Say(Protocol):
    """`Place.say`: publish how this process is."""

    def __call__(self, **changes: object) -> None: ...


class Readiness:
    """What the stages say, as of the last poll."""

    def __init__(self, log: AsyncRedisLog, tail: Tail, frontend: str, limits: Limits, say: Say) -> None:
        self._log = log
        self._tail = tail
        self._frontend = frontend
        self._limits = limits
        self._say = say
        self._statuses: Mapping[str, Sequence[Status]] = dict.fromkeys(STAGES, ())
        self._said: tuple[str, ...] | None = None
        self.probed = False
        """A token went through every stage: from then on the log keeps what a stage that is down cannot take."""
        self.models: tuple[str, ...] = ()
        """The served names, the first is the default; kept while no engine is there."""
        self.context = 0

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The stages without a ready worker, or the probe; empty when ready."""
        missing = tuple(stage for stage in STAGES if not any(s.phase == "ready" for s in self._statuses[stage]))
        return missing or (() if self.probed else (PROBE,))

    def stages(self) -> dict[str, dict[str, object]]:
        """Return how far the furthest worker of each stage is."""
        return {stage: _furthest(self._statuses[stage]) for stage in STAGES}

    def resolve(self, model: str | None) -> str:
        """Return the served name that a client's *model* means; none and `default` mean the first.

        Raises:
            RequestError: It is not served here, or nothing is known of any engine yet.
        """
        if not self.models:
            raise RequestError("The server is loading: no engine has said what it serves.", code="loading", status=503)
        if model in self.models:
            return model
        if not model or model == "default":
            return self.models[0]
        names = ", ".join(self.models)
        raise RequestError(
            f"There is no such model here; served: {names}", code="model_not_found", param="model", status=404
        )

    async def run(self) -> NoReturn:
        """Poll, and try the way once when everybody is there; never ends."""
        while True:
            try:
                await self._poll()
                if self.waiting_for == (PROBE,):
                    self._publish()
                    await self._probe()
            except LogError as error:
                logger.warning("statuses_unreadable", error=str(error))
                self._statuses = dict.fromkeys(STAGES, ())
            self._publish()
            await asyncio.sleep(POLL_LOADING_S if self.waiting_for else POLL_READY_S)

    async def _poll(self) -> None:
        texts = await asyncio.gather(*(self._log.statuses(stage) for stage in STAGES))
        self._statuses = {stage: known_statuses(found) for stage, found in zip(STAGES, texts, strict=True)}
        engines = [status for status in self._statuses[GENERATE] if status.phase == "ready" and status.models]
        if engines:
            self.models = tuple(dict.fromkeys(name for status in engines for name in status.models))
            self.context = min(status.context for status in engines)

    def _publish(self) -> None:
        waiting_for = self.waiting_for
        if waiting_for != self._said:
            self._said = waiting_for
            self._say(phase="waiting" if waiting_for else "ready", detail=", ".join(waiting_for))
            logger.info("waiting_for" if waiting_for else "ready", stages=list(waiting_for))

    async def _probe(self) -> None:
        """Send one token through every stage; no other request is accepted before it arrived."""
        uid = new_uid()
        event = Submitted(
            endpoint=PROBE,
            frontend=self._frontend,
            prompt="a",
            sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        )
        with closing(self._tail.listen(uid)) as listener:
            submission = await self._log.submit(
                uid,
                event,
                timeout_ms=int(self._limits.timeout_s * 1000),
                retention_ms=int(self._limits.retention_s * 1000),
                max_queued=self._limits.max_queued,
            )
            outcome: object = submission
            if submission is not Submission.BUSY:
                async for reply in listener:
                    outcome = reply.event
        self.probed = isinstance(outcome, Finished)
        if self.probed:
            return
        logger.warning("probe_failed", uid=uid, outcome=repr(outcome))
        await asyncio.sleep(PROBE_RETRY_S)


def _furthest(statuses: Sequence[Status]) -> dict[str, object]:
    if not statuses:
        return {"phase": "absent", "detail": "", "progress": 0.0}
    furthest = max(statuses, key=lambda status: (status.phase == "ready", status.phase == "loading", status.progress))
    return {"phase": furthest.phase, "detail": furthest.detail, "progress": furthest.progress}
