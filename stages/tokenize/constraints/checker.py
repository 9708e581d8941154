"""The tokenizer's side of the process that makes and checks grammars: asks it, and replaces it when it dies.

A thread talks to the process, so that the tokenizer waits for nothing. The process bounds each check itself, by CPU
time and memory; this side ends it only if it stands still.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

import orjson
import structlog

from pipeline.errors import RequestError
from pipeline.process.parent import SUPERVISOR_VARIABLE
from stages.tokenize.constraints.asked import Asked
from stages.tokenize.constraints.frames import read_frame, write_frame

logger = structlog.get_logger()

CHECK_CPU_S: Final = 1.0
"""CPU time of one check. Honest grammars take up to 0.2 s (64 KiB of schema), most of them 0.01 s."""
CHECK_BYTES: Final = 64 << 20
"""Memory of one check, beyond that of its process. Honest grammars take up to 15 MB. An engine takes as much for the
same grammar."""
STILL_S: Final = 300.0
"""Time without an answer after which the process is ended. Another one does the check again. On a busy machine, a
second of CPU time can take half a minute."""
MOST_TRIES: Final = 3
"""Largest number of processes that may end during one check for another reason than the check."""
MOST_KNOWN: Final = 64
"""Number of results that are kept for the next request that asks the same."""
OWN_ENDS: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end the process if a check gets no more memory: llguidance aborts, or its stack is full."""
ROOT: Final = Path(__file__).resolve().parents[3]
PROGRAM: Final = (sys.executable, "-P", "-m", "stages.tokenize.constraints.grammar_process")

Checked = str | RequestError
"""A grammar, or the error of the request that asked for it."""


class GrammarChecker:
    """Checks one grammar after the other. Its methods are for the tokenizer's thread."""

    def __init__(self, dialect: bytes, *, limit_cpu_s: float = CHECK_CPU_S, limit_bytes: int = CHECK_BYTES) -> None:
        """*dialect*: `Dialect.written`. No process starts before `start` or the first check."""
        self._dialect, self._limit_cpu_s, self._limit_bytes = dialect, limit_cpu_s, limit_bytes
        self._known: OrderedDict[bytes, Checked] = OrderedDict()
        self._questions: queue.SimpleQueue[tuple[int, Asked, bytes] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, bytes, Checked]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._number = 0
        """Number of the last question. Results of earlier ones are ignored."""

    def known(self, asked: Asked) -> Checked | None:
        """Return the result of a recent check; None: there is none."""
        key = _key(asked.model_dump_json().encode())
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def begin(self, asked: Asked) -> None:
        """Let the process make and check a grammar."""
        self._number += 1
        self._questions.put((self._number, asked, asked.model_dump_json().encode()))
        self.start()

    def start(self) -> None:
        """Start the process, so that the first check does not wait for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._check_all, name="grammar checks", daemon=True)
            self._thread.start()

    def result(self, timeout_s: float) -> Checked | None:
        """Return the result of the last question; None: it did not come within *timeout_s*."""
        while True:
            try:
                number, key, checked = self._results.get(timeout=timeout_s) if timeout_s else self._results.get_nowait()
            except queue.Empty:
                return None
            self._known[key] = checked
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            if number == self._number:
                return checked

    def close(self) -> None:
        """End the process, also in the middle of a check."""
        self._is_closed = True
        self._questions.put(None)
        if (process := self._process) is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()

    # in the thread

    def _check_all(self) -> None:
        try:
            self._process = self._start()
            while (question := self._questions.get()) is not None and not self._is_closed:
                number, asked, message = question
                self._results.put((number, _key(message), self._check(asked, message)))
        finally:
            self._end()

    def _check(self, asked: Asked, message: bytes) -> Checked:
        code = 0
        for _ in range(MOST_TRIES):
            answer = self._answer(message)
            if answer is not None:
                return _checked(answer)
            code = self._end()
            if self._is_closed:
                break
            logger.warning("grammar_process_ended", code=code)
            self._process = self._start()  # no request waits for this start
            if code == -signal.SIGPROF:
                return self._too_complex(asked, f"takes more than {self._limit_cpu_s:g} s of CPU time")
            if -code in OWN_ENDS:
                return self._too_complex(asked, f"takes more than {self._limit_bytes >> 20} MiB of memory")
        told = f"{asked.param}: {MOST_TRIES} processes ended while they checked its grammar, the last one with {code}"
        return RequestError(f"{told}; send it again.", code="tokenizer_error", param=asked.param, status=500)

    def _too_complex(self, asked: Asked, what: str) -> RequestError:
        message = f"{asked.param}: its grammar is too complex: the check {what}, which is the limit; ask for less"
        return RequestError(f"{message} repetition, depth or choice.", code="grammar_too_complex", param=asked.param)

    def _answer(self, message: bytes) -> bytes | None:
        """Return the answer of the process; None: it ended."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        watch = threading.Timer(STILL_S, process.kill)
        watch.daemon = True
        watch.start()
        try:
            write_frame(process.stdin, message)
            return read_frame(process.stdout)
        except OSError:  # the process ended before it read all
            return None
        finally:
            watch.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [*PROGRAM, str(self._limit_cpu_s), str(self._limit_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": path, SUPERVISOR_VARIABLE: str(os.getpid())},
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the first question finds out that the process has ended
            write_frame(process.stdin, self._dialect)
        return process

    def _end(self) -> int:
        """End the process, which may have ended by itself; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # closing writes what was not written
                if pipe is not None:
                    pipe.close()
        return process.wait()


def _key(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=16).digest()


def _checked(answer: bytes) -> Checked:
    said = orjson.loads(answer)
    if "grammar" in said:
        return str(said["grammar"])
    return RequestError(said["message"], code=said["code"], param=said["param"], status=said["status"])
