"""The three stages of a server as threads of this process, over the log in memory.

What is true for the server is true here, because it is the same code; only who starts it differs, and who ends it:
nothing here may end the process, which is somebody else's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeAlias

from pipeline.config import Config
from pipeline.errors import MiniSGLError
from pipeline.log.memory import MemoryLog
from pipeline.log.protocol import Inbox, RequestLimits
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, Names, parse_id, slot_name
from pipeline.slots import WATCHDOG_S, SlotLease, acquire_slot, read_statuses
from pipeline.worker import Stop, follow
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.worker import MOST_READ as MOST_STEPS_READ
from stages.detokenize.worker import DetokenizeWorker, load_decoder
from stages.generate.log_thread import LogThread
from stages.generate.model.checkpoint import model_id
from stages.generate.model.spec import read_spec
from stages.generate.resolve import resolve
from stages.generate.worker import Forward, GenerateWorker, Loaded, load
from stages.tokenize.prompts import PromptEncoder
from stages.tokenize.worker import MOST_READ as MOST_PROMPTS_READ
from stages.tokenize.worker import TokenizeWorker

LEASE_MS: Final = 3000
LIMITS: Final = RequestLimits(timeout_s=365 * 24 * 3600, retention_s=24 * 3600, max_queued=sys.maxsize)
"""Nobody else waits for these requests: they take as long as they take."""
"""The longest that a history is kept; it is forgotten as soon as its completion is made."""
POLL_S: Final = 0.005
ASK_AGAIN_S: Final = 1.0

Wrap: TypeAlias = Callable[[Forward], Forward]
"""Puts something around the engine, such as a clock."""


class UnwatchedPlace(SlotLease):
    """A slot whose watchdog never barks: it would end the caller's process."""

    def came_round(self, *, patience_s: float = WATCHDOG_S) -> None:
        super().came_round(patience_s=math.inf)


class Stages:
    """One model's tokenize, generate and detokenize, each in a thread; and what a caller needs to talk to them."""

    def __init__(self, config: Config, folder: Path, wrap: Wrap) -> None:
        """Start them, and wait until the model is loaded.

        Raises:
            ConfigError: The folder, the options and the machine do not go together.
        """
        self.log = MemoryLog(Names(), LIMITS)
        self.encoder = PromptEncoder(folder)
        self.error: BaseException | None = None
        """What ended a thread; then all of them end."""
        self._stop = Stop()
        for inbox in self._inboxes():
            self.log.prepare(inbox)
        decoder = load_decoder(folder)
        loaded: Future[Loaded] = Future()
        self._threads = [
            self._start("generate", lambda: self._generate(config, folder, wrap, loaded)),
            self._start("tokenize", lambda: self._tokenize(loaded)),
            self._start("detokenize", lambda: self._detokenize(DetokenizeFold(decoder))),
        ]
        try:
            self.loaded = loaded.result()
        except BaseException:
            self._stop.set()  # a load that goes on is not waited for
            raise

    def close(self) -> None:
        """Stop the threads and wait for them. A call that still waits for tokens hears of it."""
        self.stop_soon()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def stop_soon(self) -> None:
        """Tell the threads to stop, and wait for nobody: a garbage collector may call this in any of them."""
        self.error = self.error or MiniSGLError("it was closed")
        self._stop.set()

    def flush_cache(self) -> None:
        """Have the engine forget the prefixes that no running request uses, and wait until it has.

        Raises:
            MiniSGLError: The engine has ended.
        """
        flush_id, asked_s = self.log.flush("caller"), time.monotonic()

        def is_done() -> bool:
            done = [status.flushed for status in read_statuses(self.log, GENERATE) if status.flushed]
            return any(parse_id(control_id) >= parse_id(flush_id) for control_id in done)

        while not is_done():
            if self.error is not None:
                raise MiniSGLError(f"the engine has ended ({self.error!r}); make a new LLM") from self.error
            self._stop.wait(POLL_S)
            if time.monotonic() - asked_s > ASK_AGAIN_S:  # it may have been lost, and a later one counts as well
                self.log.flush("caller")
                asked_s = time.monotonic()

    def _inboxes(self) -> tuple[Inbox, Inbox, Inbox]:
        names = self.log.names
        return Inbox.submitted(names), Inbox.tokenized(names), Inbox.steps(names, slot_name(GENERATE, 0))

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
                if not self._stop:
                    raise MiniSGLError(f"the {name} thread has left its loop")
            except BaseException as error:  # whoever waits for tokens must hear of it
                self.error = self.error or error
                self._stop.set()

        thread = threading.Thread(target=run, name=f"minisgl {name}", daemon=True)
        thread.start()
        return thread

    @contextlib.contextmanager
    def _place(self, stage: str) -> Iterator[SlotLease]:
        place = UnwatchedPlace(self.log, acquire_slot(self.log, stage, LEASE_MS), LEASE_MS)
        place.came_round()
        try:
            yield place
        finally:
            place.leave()

    def _generate(self, config: Config, folder: Path, wrap: Wrap, loaded: Future[Loaded]) -> None:
        """Load here: how many threads torch uses is a matter of the thread that asks."""
        with self._place(GENERATE) as place:
            try:
                model = load(unhurried(config, folder), folder, _say_nothing)
                wrapped = wrap(model.engine)
            except BaseException as error:
                loaded.set_exception(error)
                return
            place.say(
                phase="ready",
                models=(model_id(folder),),
                context=model.settings.limits.context,
                fingerprint=model.fingerprint,
            )
            courier = LogThread(self.log, place.owner, lease_ms=LEASE_MS, came_round=place.came_round)
            courier.start()
            loaded.set_result(model)
            try:
                GenerateWorker(wrapped, model.schedule(place.owner), courier, place).run(self._stop)
            finally:
                courier.stop()

    def _tokenize(self, loaded: Future[Loaded]) -> None:
        inbox, _, _ = self._inboxes()
        context = loaded.result().settings.limits.context
        with self._place(TOKENIZE) as place:
            worker = TokenizeWorker(self.log, place, self.encoder)
            worker.context = context  # the engine's status has it as well, but maybe after the first prompts
            follow(self.log, inbox, place, worker.handle, worker.bury, self._stop, max_entries=MOST_PROMPTS_READ)

    def _detokenize(self, fold: DetokenizeFold) -> None:
        *_, inbox = self._inboxes()
        with self._place(DETOKENIZE) as place:
            worker = DetokenizeWorker(self.log, place, fold, slot_name(GENERATE, 0))
            follow(self.log, inbox, place, worker.handle, worker.bury, self._stop, max_entries=MOST_STEPS_READ)


def _say_nothing(progress: float) -> None:
    """Tell nobody how far a load is: whoever made the LLM waits for it."""


def unhurried(config: Config, folder: Path) -> Config:
    """Return *config* with one prefill budget for all steps, unless the caller chose the one beside running streams.

    That one is small because people watch those streams. Here nobody does, and the sooner all prompts are in, the more
    rows share each read of the weights.
    """
    engine = config.engine
    if engine.mixed_prefill_length:
        return config
    limits = resolve(engine, read_spec(folder)).limits
    return dataclasses.replace(
        config, engine=dataclasses.replace(engine, mixed_prefill_length=limits.max_prefill_length)
    )
