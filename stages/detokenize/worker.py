"""StepCompleted -> histories and replies. The detokenizer in slot i serves engine i: one step in, one commit out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from pipeline.config import Config
from pipeline.errors import ConfigError, LogError, LogUnavailable, UndecodableEvent
from pipeline.events import AnyEvent, Failed, StepCompleted, decode
from pipeline.log import Entry, Inbox, Produced, StreamLog
from pipeline.names import DETOKENIZE, GENERATE, slot_index, slot_name
from pipeline.slots import Place, acquire_slot
from pipeline.worker import Stop, follow
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.text import Decode

logger = structlog.get_logger()

MOST_READ = 16
LOAD_TIMEOUT_S = 600.0
"""Patience of the watchdog while the tokenizer is loaded."""


class DetokenizeWorker:
    """Feeds the fold with steps and with the histories it asks for, and commits what it says."""

    def __init__(self, log: StreamLog, place: Place, fold: DetokenizeFold, engine: str, retention_ms: int) -> None:
        self._log = log
        self._place = place
        self._fold = fold
        self._engine = engine
        self._retention_ms = retention_ms

    def handle(self, entries: Sequence[Entry]) -> None:
        """Fold and commit each step."""
        for entry in entries:
            self._place.came_round()
            try:
                step = self._step(entry)
            except UndecodableEvent as error:  # whose tokens it had is seen at the hole that they leave
                logger.error("step_undecodable", engine=self._engine, id=entry.id, error=str(error))
                self._commit(entry, [])
                continue
            unknown = self._fold.unknown(step)
            for uid, history in zip(unknown, self._log.histories(unknown), strict=True):
                self._learn(uid, history)
            produced = self._fold.apply(step, entry.id)
            try:
                self._commit(entry, produced)
            except LogError:
                self._fold.forget(step)
                raise

    def _step(self, entry: Entry) -> StepCompleted:
        step = decode(entry.fields)
        if not isinstance(step, StepCompleted):
            raise UndecodableEvent(f"{self._engine} wrote a {step.kind} among its steps")
        return step

    def _learn(self, uid: str, history: Sequence[Entry]) -> None:
        """Give a history to the fold; one that does not decode is its request's end and nobody else's."""
        try:
            self._fold.learn(uid, _events(history))
        except UndecodableEvent as error:
            logger.error("history_undecodable", uid=uid, error=str(error))
            message = f"The history of the request does not decode: {error}"
            event = Failed(status=500, code="log_damaged", message=message)
            frontend = history[0].fields.get("frontend", "")  # as it is: Submitted may be what does not decode
            self._log.end(uid, event, frontend=frontend, retention_ms=self._retention_ms)
            self._fold.learn(uid, [])

    def _commit(self, entry: Entry, produced: Sequence[Produced]) -> None:
        self._log.produced(self._place.owner, entry, self._engine, produced, retention_ms=self._retention_ms)


def _events(history: Sequence[Entry]) -> list[tuple[str, AnyEvent]]:
    return [(entry.id, decode(entry.fields)) for entry in history]


def load_decoder(folder: Path) -> Decode:
    """Return the decoder of a model folder, on the tokenizers library alone.

    Raises:
        ConfigError: tokenizer.json is broken.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for a broken file
        raise ConfigError(f"{folder / 'tokenizer.json'}: not a tokenizer ({error}); copy the model's again") from error

    def decode_ids(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode_ids


def run(config: Config, log: StreamLog, lease_log: StreamLog, folder: Path) -> int:
    """Be one detokenizer until SIGTERM; return the exit code."""
    stop = Stop().on_signals()
    lease_ms = int(config.log.lease_s * 1000)
    place = Place(lease_log, acquire_slot(log, DETOKENIZE, lease_ms, preferred=config.worker.slot), lease_ms)
    engine = slot_name(GENERATE, slot_index(place.owner.slot))
    structlog.contextvars.bind_contextvars(slot=place.owner.slot)
    try:
        place.came_round(patience_s=LOAD_TIMEOUT_S)
        place.say(phase="loading", detail="tokenizer")
        fold = DetokenizeFold(load_decoder(folder))
        inbox = Inbox.steps(log.names, engine)
        log.prepare(inbox)
        try:
            if not log.lease(engine).holder:
                logger.info("waiting_for", stages=[engine])
        except LogUnavailable as error:
            logger.warning("log_unavailable", error=str(error))
        place.say(phase="ready", detail="")
        worker = DetokenizeWorker(log, place, fold, engine, int(config.log.retention_s * 1000))
        follow(log, inbox, place, worker.handle, stop, max_entries=MOST_READ)
    finally:
        place.leave()
    return 0
