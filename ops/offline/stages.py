"""The three stages of a server as threads of this process, over a log in its memory.

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
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeAlias

from ops.offline.local_log import LocalLog
from pipeline.errors import MiniSGLError
from pipeline.log.protocol import Entry, RequestLimits
from pipeline.names import TOKENIZE, parse_id, slot_name
from pipeline.stage.slots import WATCHDOG_S, GiveUp, Status
from pipeline.stage.worker import Stop
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.worker import load_decoder
from stages.generate.loop.flights import Forward
from stages.generate.loop.worker import GenerateWorker, Loaded, load, serving_of
from stages.generate.model.checkpoint import check_folder, model_id
from stages.generate.ranks.children import loaded_with_ranks
from stages.generate.setup.config import GenerateConfig
from stages.generate.setup.resolve import resolve
from stages.tokenize.constraints.checker import GrammarChecker
from stages.tokenize.prompts import PromptEncoder
from stages.tokenize.worker import MOST_READ, TokenizeWorker

LIMITS: Final = RequestLimits(timeout_s=365 * 24 * 3600, retention_s=24 * 3600, max_queued=sys.maxsize)
"""Practically no timeout."""
LOOK_S: Final = 0.2
"""How long the tokenizer's thread waits for a prompt before it looks whether it should stop."""
POLL_S: Final = 0.005

Wrap: TypeAlias = Callable[[Forward], Forward]
"""Wraps the engine, for example with a clock. With overlap it should launch steps, as the engine does (`Launches`)."""


class OwnReports:
    """A `Reporter` within this process. No watchdog looks at it: nothing may end the caller's process."""

    def __init__(self, slot: str, publish: Callable[[Status], None] = lambda status: None) -> None:
        self.status = Status(slot=slot, owner="", pid=0, host="")
        self.lost = threading.Event()
        self._publish = publish

    def say(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)
        self._publish(self.status)

    def report_progress(
        self, *, patience_s: float = WATCHDOG_S, cpu_s: float = math.inf, give_up: GiveUp | None = None
    ) -> None:
        pass


class Stages:
    """The three stages of one model, each in a thread."""

    def __init__(self, config: GenerateConfig, folder: Path, wrap: Wrap) -> None:
        """Start them, and wait until the model is loaded.

        Raises:
            ConfigError: The folder, the options and the machine do not go together.
        """
        self.log = LocalLog(LIMITS)
        self.encoder = PromptEncoder(folder)
        self.serving = serving_of(folder, model_id(folder), dummy=config.engine.dummy_weight)
        self.error: BaseException | None = None
        """The error that ended a thread; then all threads end."""
        self._stop = Stop()
        self._owner = self.log.begin(self._stop)
        fold = DetokenizeFold(load_decoder(folder))
        loaded: Future[Loaded] = Future()
        self._threads = [
            self._start("generate", lambda: self._generate(config, folder, wrap, loaded)),
            self._start("tokenize", lambda: self._tokenize(loaded)),
            self._start("detokenize", lambda: self.log.fold_steps(fold)),
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
        flush_id = self.log.flush()
        while parse_id(self.log.status.flushed or "0-0") < parse_id(flush_id):
            if self.error is not None:
                raise MiniSGLError(f"the engine has ended ({self.error!r}); make a new LLM") from self.error
            time.sleep(POLL_S)

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

    def _generate(self, config: GenerateConfig, folder: Path, wrap: Wrap, loaded: Future[Loaded]) -> None:
        """Load in this thread: torch sets its number of threads per calling thread. Other ranks end with it."""
        with contextlib.ExitStack() as until_the_end:
            try:
                model = until_the_end.enter_context(self._loading(unhurried(config, folder), folder))
                wrapped = wrap(model.engine)
            except BaseException as error:
                loaded.set_exception(error)
                return
            reports = OwnReports(self._owner.slot, self.log.publish)
            serving = model.can_serve(self.serving)
            said = {"models": (serving.model,), "context": serving.context, "fingerprint": serving.weights}
            reports.say(phase="ready", **said, **model.said())
            loaded.set_result(model)
            grammars = until_the_end.enter_context(contextlib.closing(model.grammars(folder)))
            schedule, overlap = model.schedule(self._owner, serving), model.settings.overlap
            drafts = model.settings.drafts
            worker = GenerateWorker(
                wrapped, schedule, self.log, reports, grammars=grammars, overlap=overlap, drafts=drafts
            )
            worker.run(self._stop)

    def _loading(self, config: GenerateConfig, folder: Path) -> contextlib.AbstractContextManager[Loaded]:
        if config.engine.tp > 1:
            return loaded_with_ranks(config, folder, self._end_with)
        return contextlib.nullcontext(load(config, folder, lambda progress: None))

    def _tokenize(self, loaded: Future[Loaded]) -> None:
        context = loaded.result().settings.limits.context
        with contextlib.closing(GrammarChecker(self.encoder.dialect.written())) as checker:
            worker = TokenizeWorker(self.log, OwnReports(slot_name(TOKENIZE, 0)), self.encoder, checker=checker)
            worker.context = context
            put_off: list[Entry] = []
            while not self._stop:
                timeout_s = 0.0 if put_off or worker.held() else LOOK_S
                entries = [*put_off, *self.log.prompts(MOST_READ, timeout_s)]
                put_off = worker.handle(entries) if entries or worker.held() else []


def unhurried(config: GenerateConfig, folder: Path) -> GenerateConfig:
    """Return *config* with one prefill budget for all steps, unless the caller chose the one beside running streams.

    That one is small because people watch those streams. Here nobody does, and the sooner all prompts are in, the more
    rows share each read of the weights.
    """
    engine = config.engine
    if engine.mixed_prefill_length or engine.target_itl_ms:
        return config
    limits = resolve(engine, check_folder(folder, engine.loading)).limits
    return dataclasses.replace(
        config, engine=dataclasses.replace(engine, mixed_prefill_length=limits.max_prefill_length)
    )
