"""Submitted -> Tokenized | Failed. Reads requests, encodes what one read brings as a batch, commits each by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from pipeline.config import Config
from pipeline.errors import LogUnavailable, RequestError
from pipeline.events import Failed, Submitted, Tokenized, decode
from pipeline.failpoints import failpoint
from pipeline.log import DeadLetter, Entry, Inbox, StreamLog
from pipeline.names import GENERATE, SEAL, TOKENIZE
from pipeline.slots import Announcement, Voice, places, read_statuses
from pipeline.worker import BACKOFF_S, Stop, follow
from stages.tokenize.prompts import PromptEncoder, Rendered, too_long

logger = structlog.get_logger()

MOST_READ = 4
"""Few enough that several tokenizers share a burst, enough to encode as a batch."""
LONGEST_BATCH_S = 120.0
"""Patience of the watchdog while a batch is encoded."""
LEARN_EVERY_S = 1.0
LOAD_TIMEOUT_S = 600.0
"""Patience of the watchdog while the tokenizer is loaded."""
OF_THE_PROCESS = (KeyboardInterrupt, SystemExit)
"""What is no request's fault. All else is, even what is no Exception: so a tokenizer's Rust says that it panicked."""


class TokenizeWorker:
    """The fold of the stage, between two commits of the log."""

    def __init__(self, log: StreamLog, place: Voice, encoder: PromptEncoder, retention_ms: int) -> None:
        self._log = log
        self.place = place
        self._encoder = encoder
        self._retention_ms = retention_ms
        self.context = 0
        """The served context, as the engines said last."""
        self._learnt_s = float("-inf")

    def handle(self, entries: Sequence[Entry]) -> None:
        """Tokenize and commit; what is wrong with one request fails that request alone."""
        failpoint("tokenize.after_read")
        self.place.came_round(patience_s=LONGEST_BATCH_S)
        self.learn_context()
        work: list[tuple[Entry, Rendered]] = []
        for entry, history in zip(entries, self._log.histories([e.fields["uid"] for e in entries]), strict=True):
            if history and history[-1].id == SEAL:
                # This end comes second and is refused, but it consumes the entry.
                self._fail(entry, RequestError("The request has ended before.", code="ended"))
                continue
            try:
                submitted = decode(history[0].fields) if history else None
                if not isinstance(submitted, Submitted):  # it expired, or its history was deleted
                    raise RequestError("The history of the request is gone.", code="log_lost", status=500)
                prompt = self._encoder.render(submitted)
                self._encoder.refuse_too_long(prompt, self.context)
                work.append((entry, prompt))
            except RequestError as error:
                self._fail(entry, error)
            except OF_THE_PROCESS:
                raise
            except BaseException as error:  # whatever a template can raise is this request's end and nobody else's
                logger.exception("render_failed", uid=entry.fields["uid"])
                self._fail(entry, _unexpected(error))
        for (entry, prompt), token_ids in zip(work, self._encode(work), strict=True):
            if isinstance(token_ids, RequestError):
                self._fail(entry, token_ids)
            elif not token_ids:
                self._fail(entry, RequestError("The prompt has no tokens; send some text.", param=prompt.param))
            elif len(token_ids) + 1 > self.context:
                self._fail(entry, too_long(str(len(token_ids)), self.context, prompt.param))
            else:
                failpoint("tokenize.before_commit")
                self._log.tokenized(
                    entry,
                    Tokenized(token_ids=token_ids, fingerprint=self._encoder.fingerprint, by=self.place.status.slot),
                )
                failpoint("tokenize.after_commit")

    def bury(self, entry: Entry, deaths: int) -> None:
        """End a request that killed its tokenizer so often; `dead` keeps what is known of it."""
        message = f"The request ended its tokenizer {deaths} times."
        event = Failed(status=500, code="poisonous", message=message)
        self._log.end(
            entry.fields["uid"],
            event,
            frontend=entry.fields["frontend"],
            retention_ms=self._retention_ms,
            consume=entry,
            dead=DeadLetter(TOKENIZE, entry.fields, deaths, message),
        )

    def learn_context(self) -> None:
        """Look up, once a second, what the engines serve; the last known value stands while none of them is there."""
        if self.context and time.monotonic() - self._learnt_s < LEARN_EVERY_S:
            return
        self._learnt_s = time.monotonic()
        contexts = [status.context for status in read_statuses(self._log, GENERATE) if status.context]
        if contexts:
            self.context = min(contexts)

    def _encode(self, work: Sequence[tuple[Entry, Rendered]]) -> list[tuple[int, ...] | RequestError]:
        prompts = [prompt for _, prompt in work]
        try:
            return list(self._encoder.encode(prompts))
        except OF_THE_PROCESS:
            raise
        except BaseException:  # one of them is at fault: find out which
            logger.exception("batch_not_encoded", requests=len(prompts))
            return [self._encode_one(prompt) for prompt in prompts]

    def _encode_one(self, prompt: Rendered) -> tuple[int, ...] | RequestError:
        try:
            return self._encoder.encode([prompt])[0]
        except OF_THE_PROCESS:
            raise
        except BaseException as error:  # the request's own end
            logger.exception("prompt_not_encoded")
            return _unexpected(error)

    def _fail(self, entry: Entry, error: RequestError) -> None:
        event = Failed(
            status=error.status, code=error.code or "invalid_value", message=error.message, param=error.param or ""
        )
        self._log.end(
            entry.fields["uid"],
            event,
            frontend=entry.fields["frontend"],
            retention_ms=self._retention_ms,
            consume=entry,
        )


def _unexpected(error: BaseException) -> RequestError:
    return RequestError(f"The prompt could not be tokenized: {error}", code="tokenizer_error")


def run(config: Config, open_log: Callable[[], StreamLog], folder: Path) -> int:
    """Be one tokenizer until SIGTERM; return the exit code."""
    stop = Stop().on_signals()
    log, lease_log = open_log(), open_log()
    inbox = Inbox.submitted(log.names)
    lease_ms, wanted = int(config.log.lease_s * 1000), config.worker.slot
    with Announcement(lease_log, TOKENIZE, lease_ms, preferred=wanted) as announcement:
        announcement.came_round(patience_s=LOAD_TIMEOUT_S)
        announcement.say(phase="loading", detail="tokenizer")
        encoder = PromptEncoder(folder)
        worker = TokenizeWorker(log, announcement, encoder, int(config.log.retention_s * 1000))
        _wait_for_context(worker, announcement, stop)
    for place in places(log, lease_log, TOKENIZE, lease_ms, preferred=wanted, stop=stop):
        worker.place = place
        place.say(phase="ready", fingerprint=encoder.fingerprint)
        follow(log, inbox, place, worker.handle, worker.bury, stop, max_entries=MOST_READ)
    return 0


def _wait_for_context(worker: TokenizeWorker, place: Voice, stop: Stop) -> None:
    """Wait for an engine, which alone knows how long a prompt may be."""
    said = False
    while not stop and not worker.context:
        place.came_round()
        try:
            worker.learn_context()
        except LogUnavailable as error:
            logger.warning("log_unavailable", error=str(error))
        if not worker.context:
            if not said:
                logger.info("waiting_for", stages=[GENERATE], reason="it says how long a prompt may be")
                place.say(phase="waiting", detail=GENERATE)
                said = True
            stop.wait(BACKOFF_S / 4)
