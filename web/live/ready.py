"""Readiness: every stage says that it is ready, and one token, the probe, went through all of them.

Polls the statuses of the workers. They also say which model names are served, the longest context, and the defaults of
sampling. The probe decides what /ready answers and nothing else: requests are taken as soon as a model is served.
/health_generate sends a probe whenever it is asked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, Literal, NoReturn

import structlog

from pipeline.errors import LogError, RequestError
from pipeline.events import Cancelled, Failed, Finished, SamplingParams, Submitted, new_uid
from pipeline.log.protocol import Submission
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import REJECTIONS
from pipeline.names import DETOKENIZE, GENERATE, PROBE, TOKENIZE, rank_stage
from pipeline.stage.slots import Offer, Status, known_statuses
from web.live.tail import Tail

logger = structlog.get_logger()

POLL_LOADING_S = 0.05
POLL_READY_S = 2.0
LOOK_PATIENCE_S = 1.0
PROBE_PATIENCE_S = 10.0
"""How long the first probe may take. Each next one may take twice as long: behind much work it is slow, not lost."""
PROBE_RETRY_S = 1.0
TRIAL_PATIENCE_S = 5.0
"""How long the probe of /health_generate may take."""
TRIAL_LOG_PATIENCE_S = 1.0
"""How much longer its client waits if the log does not answer."""
TRIAL_COUNTS_S = 1.0
"""How long its answer counts for later clients: they need no key, and must not fill the log."""
STAGES: Final = (TOKENIZE, GENERATE, DETOKENIZE)


Say = Callable[..., None]
"""`SlotLease.say`: publishes changes of the status of this process."""
Spawn = Callable[[Coroutine[Any, Any, str]], "asyncio.Task[str]"]
"""`Frontend.spawn`: runs in a task of its own."""


class Readiness:
    """The statuses of the stages at the last poll."""

    def __init__(
        self,
        log: AsyncRedisLog,
        tail: Tail,
        say: Say,
        measures: Measures | None = None,
        *,
        engines_on_demand: bool = False,
    ) -> None:
        self._log = log
        self._tail = tail
        self._say = say
        self._measures = measures or Measures()
        self._on_demand = engines_on_demand
        self._last = Offer()
        """What the engines offered that were there last."""
        self._statuses: dict[str, Sequence[Status]] = dict.fromkeys(STAGES, ())
        self._ranks: dict[str, Sequence[Status]] = {}
        self._said: tuple[str, ...] | None = None
        self._was_ready = False
        self.probed = False
        """Whether a token went through every stage. From then on the log keeps requests for a stage that is down."""
        self._unheard = bool(log.limits.acks or log.limits.acks_disk)
        """Whether too few servers had the last probe, or none was sent. Its token may come all the same."""
        self.probe_failure = ""
        """Why the last probe before that failed; for clients."""
        self.models: tuple[str, ...] = ()
        """The served names; the first is the default. Once `probed`, they are kept while no engine is there."""
        self.batch_invariant = False
        """Whether every engine computes the same tokens again, whatever else it computes; kept like `models`."""
        self.context = 0
        self.bos = ""
        """The text of the token that the tokenizers put before a prompt."""
        self.has_chat_template = True
        self.sampling_defaults: Mapping[str, int | float] = {}
        """The sampling parameters of a request that leaves them out, as the first engine says: all have one model."""
        self._trial: asyncio.Task[str] | None = None
        self._tried_s = -math.inf

    @property
    def missing(self) -> tuple[str, ...]:
        """The stages without a ready worker."""
        return tuple(stage for stage in STAGES if not any(s.phase == "ready" for s in self._statuses[stage]))

    @property
    def ready_engines(self) -> Sequence[Status]:
        return [status for status in self._statuses[GENERATE] if status.phase == "ready"]

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The stages without a ready worker, or the probe; empty when ready. Without an engine, also missing ranks."""
        missing = self.missing
        if self._on_demand:  # a tokenizer that waits for the first engine takes what starts it
            waits = any(status.phase == "waiting" for status in self._statuses[TOKENIZE])
            return tuple(stage for stage in missing if stage != GENERATE and not (stage == TOKENIZE and waits))
        if GENERATE in missing:
            missing += tuple(role for role, found in self._ranks.items() if not any(s.phase == "ready" for s in found))
        return missing or (() if self.probed else (PROBE,))

    @property
    def takes_requests(self) -> bool:
        """Whether a request is taken now: also while an engine starts again."""
        return not self.waiting_for if self._on_demand else bool(self.models)

    @property
    def _pipeline_works(self) -> bool:
        """Whether tokens of any request have come, and a probe would be accepted."""
        return self._tail.has_seen_tokens and not self._unheard

    def stages(self) -> dict[str, dict[str, object]]:
        """Return, for each stage and for each rank of an engine, the status of the worker that is closest to ready."""
        return {role: _furthest(found) for role, found in (self._statuses | self._ranks).items()}

    def engines(self) -> list[dict[str, object]]:
        """Return, for each ready engine, how it computes."""
        told = ("slot", "numerics", "batch_invariant", "why_torch")
        return [{name: value for name in told if (value := getattr(each, name)) != ""} for each in self.ready_engines]

    def resolve(self, model: str | None, *, strict: bool = True) -> str:
        """Return the served name that a client's *model* means; none and `default` mean the first.

        Unless *strict*, so does any other name: all served names are those of one model.

        Raises:
            RequestError: It is not served here, or no engine has said yet which models it serves.
        """
        if not self.takes_requests:
            stages = ", ".join(self.missing)
            self._measures.add(REJECTIONS, "loading")
            raise RequestError(
                f"The server is still loading: {stages}; send it again later.", code="loading", status=503
            )
        if model in self.models:
            return model
        if not self.models:  # the engine that this request starts will tell
            return model or "default"
        if not strict or not model or model == "default":
            return self.models[0]
        names = ", ".join(self.models)
        raise RequestError(
            f"There is no such model here; served: {names}", code="model_not_found", param="model", status=404
        )

    async def try_now(self, spawn: Spawn) -> str:
        """Return the reason why the pipeline is unhealthy, or "" if a token went through it within the last second.

        Clients that ask at the same time share one probe, in a task of its own that *spawn* runs. None waits longer
        than 6 s.
        """
        if self._on_demand:  # a token would start an engine, or keep one
            return ""
        now_s, token_s, trial = time.monotonic(), self._tail.last_token_s, self._trial
        if not self._unheard and token_s > self._tried_s and now_s - token_s < TRIAL_COUNTS_S:
            return ""
        if trial is None or (trial.done() and now_s - self._tried_s >= TRIAL_COUNTS_S):
            self._trial = trial = spawn(self._try_once())
        done, _ = await asyncio.wait({trial}, timeout=TRIAL_PATIENCE_S + TRIAL_LOG_PATIENCE_S)
        return trial.result() if done else "the log does not answer"

    async def _try_once(self) -> str:
        began_s = time.monotonic()
        try:
            failure = await self._probe(TRIAL_PATIENCE_S)
        finally:
            self._tried_s = time.monotonic()
        # Behind much work the probe is late; then the tokens of other requests show that the pipeline works.
        return "" if self._tail.last_token_s > began_s and not self._unheard else failure

    async def look(self) -> None:
        """Read the statuses before the first client asks: beside stages that are ready, a new process is ready, too.

        Takes a second at most. If it fails, `run` reads them.
        """
        looking = asyncio.create_task(self._poll())
        looking.add_done_callback(lambda task: task.cancelled() or task.exception())  # `run` logs the error
        await asyncio.wait({looking}, timeout=LOOK_PATIENCE_S)

    async def run(self) -> NoReturn:
        """Poll, and send probes once every stage is there; never ends.

        No probe where engines come on demand: it would wait for one that has just left, and so start another.
        """
        trying = asyncio.create_task(self._probe_until_one_arrives())
        if self._on_demand:
            trying.cancel()
        try:
            while True:
                arrived = self._pipeline_works or (trying.done() and not trying.cancelled() and trying.result())
                try:
                    await self._poll()
                except LogError as error:
                    logger.warning("statuses_unreadable", error=str(error))
                    self._statuses = dict.fromkeys(STAGES, ())
                self.probed = arrived  # after another poll: the statuses of dead workers stay for 10 s
                self._publish()
                await asyncio.sleep(POLL_LOADING_S if self.waiting_for else POLL_READY_S)
        finally:
            trying.cancel()

    async def _poll(self) -> None:
        texts = await asyncio.gather(*(self._log.statuses(stage) for stage in STAGES))
        ranks = await statuses_of_ranks(self._log)
        statuses: dict[str, Sequence[Status]] = {}
        for stage, found in zip(STAGES, texts, strict=True):
            statuses[stage] = known_statuses(found)
        engines = [status for status in statuses[GENERATE] if status.phase == "ready" and status.models]
        # Living engines have the same weights. Others are left over from dead ones; the next model got the lowest slot.
        engines = [status for status in engines if status.fingerprint == engines[0].fingerprint]
        offer = Offer.of(engines)
        if self._on_demand:
            offer = await self._kept_or_last(offer, statuses[TOKENIZE])
        # All at once: a request in between sees the last poll, not half of this one.
        self._statuses, self._ranks = statuses, ranks
        for status in self._statuses[TOKENIZE]:
            if status.phase == "ready":
                self.bos, self.has_chat_template = status.bos, status.has_chat_template
        if self._on_demand or engines or not self.probed:  # before that, they may be left over from an earlier server
            self.models, self.context, self.batch_invariant = offer.models, offer.context, offer.batch_invariant
            self.sampling_defaults = offer.sampling_defaults

    async def _kept_or_last(self, offer: Offer, tokenizers: Sequence[Status]) -> Offer:
        """Return *offer*, and keep it in the log; if it is empty, return what the last engines offered.

        Tokenizers of another model cannot use it: nobody knows then what the next engine offers. While there are
        tokenizers of two models, nobody knows whose the engines are, and nothing is kept.
        """
        prints = {status.fingerprint for status in tokenizers} - {""}
        try:
            kept = await self._log.last_engine()
            if offer.models and len(prints) == 1 and any(status.phase == "ready" for status in tokenizers):
                text = offer.model_copy(update={"tokenizer": min(prints)}).model_dump_json()
                if text != kept:  # a failover may have lost it
                    await self._log.remember_engine(text)
            self._last = Offer.parse(kept)
        except LogError as error:  # such as a full log, or a user without this right; the next poll tries again
            logger.warning("last_engine_unknown", error=str(error))
        if offer.models:
            return offer
        return self._last if not prints or self._last.tokenizer in prints else Offer()

    def _publish(self) -> None:
        waiting_for = self.waiting_for
        if waiting_for != self._said:
            self._said = waiting_for
            self._say(phase="waiting" if waiting_for else "ready", detail=", ".join(waiting_for))
            log = logger.info if self._was_ready else logger.debug  # at the start the supervisor says who is ready
            self._was_ready |= not waiting_for
            log("waiting_for" if waiting_for else "ready", stages=list(waiting_for))

    async def _probe_until_one_arrives(self) -> Literal[True]:
        """Send probes, whenever every stage is there, until one arrives.

        Behind many requests the probe is late; then their tokens show that the pipeline works.
        """
        patience_s = PROBE_PATIENCE_S
        while True:
            if self._pipeline_works:
                return True
            if self.missing:
                await asyncio.sleep(POLL_LOADING_S)
                continue
            self.probe_failure = await self._probe(min(patience_s, self._log.limits.timeout_s))
            if not self.probe_failure:
                return True
            patience_s *= 2
            await asyncio.sleep(PROBE_RETRY_S)

    async def _probe(self, patience_s: float) -> str:
        """Send one token through every stage. Return "" if it arrived; else cancel the probe and return the reason."""
        uid = new_uid()
        event = Submitted(
            endpoint=PROBE,
            frontend=self._tail.frontend,
            prompt="a",
            sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        )
        outcome: object = None
        try:
            with closing(self._tail.listen(uid)) as listener:
                submitted = await self._log.submit(uid, [event])
                outcome = submitted.submission
                self._unheard = outcome is Submission.UNACKNOWLEDGED
                if self._unheard:
                    outcome = f"only {submitted.acks} have it"
                elif outcome is not Submission.BUSY:
                    async with asyncio.timeout(patience_s):
                        async for news in listener:
                            outcome = news.event
        except TimeoutError:
            outcome = f"nothing within {patience_s:g} s"
        except LogError as error:  # it may have got through all the same
            outcome = error
        if isinstance(outcome, Finished):
            return ""
        logger.warning("probe_failed", uid=uid, outcome=str(outcome))
        try:
            await self._log.end(uid, Cancelled(by="web"), frontend=self._tail.frontend)
        except LogError as error:
            logger.warning("request_not_ended", uid=uid, event_kind="cancelled", error=str(error))
        return _public(outcome)


async def statuses_of_ranks(log: AsyncRedisLog) -> dict[str, Sequence[Status]]:
    """Return the statuses of the ranks of all engines, by role. Those of rank 0 say how many there should be."""
    try:
        first = known_statuses(await log.statuses(rank_stage(0)))
    except LogError:  # an older list of users, without rights for the statuses of ranks: most servers have none
        return {}
    roles = [rank_stage(rank) for rank in range(max((status.num_ranks for status in first), default=0))]
    texts = await asyncio.gather(*(log.statuses(role) for role in roles[1:]))
    return dict(zip(roles, (first, *map(known_statuses, texts)), strict=False))


def _public(outcome: object) -> str:
    """Return the part of the reason of a failed probe that any client may know; the log line has all of it."""
    match outcome:
        case str():
            return outcome
        case Submission.BUSY:
            return "too many requests are waiting"
        case Failed(code=code):
            return f"it failed: {code}"
        case Cancelled(by=by):
            return f"it was cancelled by {by}"
        case _:
            return "the log does not answer"


def _furthest(statuses: Sequence[Status]) -> dict[str, object]:
    if not statuses:
        return {"phase": "absent", "detail": "", "progress": 0.0}
    furthest = max(statuses, key=lambda status: (status.phase == "ready", status.phase == "loading", status.progress))
    return {"phase": furthest.phase, "detail": furthest.detail, "progress": furthest.progress}
