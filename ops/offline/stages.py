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

from pipeline.errors import MiniSGLError
from pipeline.log.memory.log import MemoryLog
from pipeline.log.protocol import Inbox, RequestLimits
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, Names, parse_id, slot_name
from pipeline.stage.slots import WATCHDOG_S, GiveUp, SlotLease, acquire_slot, read_statuses
from pipeline.stage.worker import Stop, follow
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.worker import MOST_READ as MOST_STEPS_READ
from stages.detokenize.worker import DetokenizeWorker, load_decoder
from stages.generate.loop.flights import Forward
from stages.generate.loop.log_thread import LogThread
from stages.generate.loop.worker import GenerateWorker, Loaded, load, serving_of
from stages.generate.model.checkpoint import model_id
from stages.generate.model.spec import read_spec
from stages.generate.ranks.children import loaded_with_ranks
from stages.generate.setup.config import GenerateConfig
from stages.generate.setup.resolve import resolve
from stages.tokenize.constraints.checker import GrammarChecker
from stages.tokenize.prompts import PromptEncoder
from stages.tokenize.worker import MOST_READ as MOST_PROMPTS_READ
from stages.tokenize.worker import TokenizeWorker

LEASE_MS: Final = 3000
LIMITS: Final = RequestLimits(timeout_s=365 * 24 * 3600, retention_s=24 * 3600, max_queued=sys.maxsize)
"""Practically no timeout. A history is dropped as soon as its completion is made, at the latest after the retention."""
POLL_S: Final = 0.005
ASK_AGAIN_S: Final = 1.0

Wrap: TypeAlias = Callable[[Forward], Forward]
"""Wraps the engine, for example with a clock. With overlap it should launch steps, as the engine does (`Launches`)."""


class UnwatchedSlot(SlotLease):
    """A slot without a watchdog, which would end the caller's process."""

    def report_progress(
        self, *, patience_s: float = WATCHDOG_S, cpu_s: float = math.inf, give_up: GiveUp | None = None
    ) -> None:
        super().report_progress(patience_s=math.inf)

    def _keep(self) -> None:
        try:
            super()._keep()
        except BaseException:  # a worker has nothing without its lease, and the caller's process goes on
            self.lost.set()
            raise


class Stages:
    """The three stages of one model, each in a thread."""

    def __init__(self, config: GenerateConfig, folder: Path, wrap: Wrap) -> None:
        """Start them, and wait until the model is loaded.

        Raises:
            ConfigError: The folder, the options and the machine do not go together.
        """
        self.log = MemoryLog(Names(), LIMITS)
        self.encoder = PromptEncoder(folder)
        self.serving = serving_of(folder, model_id(folder), dummy=config.engine.dummy_weight)
        self.error: BaseException | None = None
        """The error that ended a thread; then all threads end."""
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
        """Stop the threads and wait for them. A running call fails."""
        self.stop_soon()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def stop_soon(self) -> None:
        """Ask the threads to stop, without waiting: a garbage collector may call this in any of them."""
        self.error = self.error or MiniSGLError("it was closed")
        self._stop.set()

    def flush_cache(self) -> None:
        """Let the engine clear the prefix cache, except prefixes of running requests, and wait for it.

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
                self._end_with(error)

        thread = threading.Thread(target=run, name=f"minisgl {name}", daemon=True)
        thread.start()
        return thread

    def _end_with(self, error: BaseException) -> None:
        self.error = self.error or error
        self._stop.set()

    @contextlib.contextmanager
    def _slot_lease(self, stage: str) -> Iterator[SlotLease]:
        slot_lease = UnwatchedSlot(self.log, acquire_slot(self.log, stage, LEASE_MS), LEASE_MS)
        slot_lease.report_progress()
        try:
            yield slot_lease
        finally:
            slot_lease.leave()

    def _generate(self, config: GenerateConfig, folder: Path, wrap: Wrap, loaded: Future[Loaded]) -> None:
        """Load in this thread: torch sets its number of threads per calling thread. Other ranks end with it."""
        with self._slot_lease(GENERATE) as slot_lease, contextlib.ExitStack() as until_the_end:
            try:
                model = until_the_end.enter_context(self._loading(unhurried(config, folder), folder))
                wrapped = wrap(model.engine)
            except BaseException as error:
                loaded.set_exception(error)
                return
            serving = model.can_serve(self.serving)
            said = {"models": (serving.model,), "context": serving.context, "fingerprint": serving.weights}
            slot_lease.say(phase="ready", **said, **model.said())
            log_thread = LogThread(
                self.log,
                slot_lease.owner,
                lease_ms=LEASE_MS,
                report_progress=slot_lease.report_progress,
                commit_interval_s=model.settings.commit_interval_s,
            )
            log_thread.start()
            loaded.set_result(model)
            grammars = model.grammars(folder)
            try:
                schedule, overlap = model.schedule(slot_lease.owner, serving), model.settings.overlap
                worker = GenerateWorker(wrapped, schedule, log_thread, slot_lease, grammars=grammars, overlap=overlap)
                worker.run(self._stop)
            finally:
                grammars.close()
                log_thread.stop()

    def _loading(self, config: GenerateConfig, folder: Path) -> contextlib.AbstractContextManager[Loaded]:
        if config.engine.tp > 1:
            return loaded_with_ranks(config, folder, self._end_with)
        return contextlib.nullcontext(load(config, folder, lambda progress: None))

    def _tokenize(self, loaded: Future[Loaded]) -> None:
        inbox, _, _ = self._inboxes()
        context = loaded.result().settings.limits.context
        checker = GrammarChecker(self.encoder.dialect.written())
        with self._slot_lease(TOKENIZE) as slot_lease, contextlib.closing(checker):
            worker = TokenizeWorker(self.log, slot_lease, self.encoder, checker=checker)
            worker.context = context  # the engine's status has it as well, but maybe after the first prompts
            follow(
                self.log,
                inbox,
                slot_lease,
                worker.handle,
                worker.bury,
                self._stop,
                max_entries=MOST_PROMPTS_READ,
                held=worker.held,
            )

    def _detokenize(self, fold: DetokenizeFold) -> None:
        *_, inbox = self._inboxes()
        with self._slot_lease(DETOKENIZE) as slot_lease:
            worker = DetokenizeWorker(self.log, slot_lease, fold, slot_name(GENERATE, 0))
            follow(self.log, inbox, slot_lease, worker.handle, worker.bury, self._stop, max_entries=MOST_STEPS_READ)


def unhurried(config: GenerateConfig, folder: Path) -> GenerateConfig:
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
