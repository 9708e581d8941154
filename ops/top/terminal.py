"""The live screen: it redraws after each read, each key, and each change of the terminal's size."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from rich.console import Console
from rich.live import Live

from ops.top.screen import Screenful
from pipeline.views.pipeline import PipelineView
from pipeline.views.reader import Reader

LEAVE: Final = frozenset(b"qQ\x03")
"""q and Ctrl-C."""
PAUSE: Final = ord(" ")
TICK_S: Final = 0.2
"""How often the terminal's size is checked."""
LATE_S: Final = 2.0
"""Redis counts as silent if a view is this late."""
LAST_WORD_S: Final = 0.2
EXIT_TERMINATED: Final = 128 + signal.SIGTERM


class Watch:
    """A thread that reads views and signals each one through a pipe."""

    def __init__(self, reader: Reader, interval_s: float, first: PipelineView) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self.view = first
        """The last view, with the error if the log does not answer."""
        self.made_s = time.monotonic()
        """When the log last answered."""
        self.broke: BaseException | None = None
        """An unexpected error of the thread, which `show` raises."""
        self.wakes, self._wake = os.pipe()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(LAST_WORD_S)  # one that waits for Redis is left to end with the process
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self.wakes)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self.view = self._reader.view_after(self.view)
                if not self.view.error:
                    self.made_s = time.monotonic()
                os.write(self._wake, b".")
        except BaseException as error:
            self.broke = error
            os.write(self._wake, b".")


def show(reader: Reader, interval_s: float, first: PipelineView, console: Console) -> None:
    """Show views until the user quits."""
    with (
        _keys() as keys,
        Watch(reader, interval_s, first) as watch,
        Live(console=console, screen=True, auto_refresh=False) as live,
        _ended_by_sigterm(),
    ):
        paused: PipelineView | None = None
        listened = [watch.wakes, *keys]
        shown: object = None
        while watch.broke is None:
            silent_s = time.monotonic() - watch.made_s
            is_silent = bool(watch.view.error) or silent_s > interval_s + LATE_S
            view = watch.view if paused is None else replace(paused, error=watch.view.error)
            screenful = Screenful(view, round(silent_s) if is_silent else 0, paused is not None, interval_s)
            if shown != (screenful, console.size):
                shown = screenful, console.size
                live.update(screenful, refresh=True)
            ready, _, _ = select.select(listened, [], [], TICK_S)
            if watch.wakes in ready:
                os.read(watch.wakes, 1024)
            for key in os.read(keys[0], 64) if keys and keys[0] in ready else b"":
                if key in LEAVE:
                    return
                if key == PAUSE:
                    paused = watch.view if paused is None else None
    if watch.broke is not None:
        raise watch.broke


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Give the file descriptor for single, unechoed keys; none without a terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    ours = termios.tcgetattr(source)
    # Ctrl-C is a key like q, and Ctrl-Z, which would leave the shell with this screen, is none.
    ours[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    ours[6][termios.VMIN], ours[6][termios.VTIME] = 1, 0
    termios.tcsetattr(source, termios.TCSADRAIN, ours)
    try:
        yield [source]
    finally:
        termios.tcsetattr(source, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM restore the terminal, too."""

    def leave(*_: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
