"""Frames between ranks: rank 0 broadcasts them over gloo, the other ranks receive them.

A receive that times out breaks gloo's connection for good. So rank 0 sends a frame every second while it computes
nothing, whatever it waits for. Every error of gloo ends the ranks of the engine: see `RankLost`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import structlog
import torch
import torch.distributed as dist

from pipeline.errors import RankLost
from pipeline.process.private import open_private
from stages.generate.collectives import finish, told
from stages.generate.ranks.frame import HEADER, SIZE, Kind, Reader, frames_of, num_beyond, num_used, signal
from stages.generate.schedule.plan import BatchPlan

logger = structlog.get_logger()

IDLE_S: Final = 1.0
"""Longest pause between two frames while rank 0 computes nothing."""
TIMEOUT_S: Final = 60.0
"""Longest wait for a frame, or for another rank to receive one."""
PATIENCE_S: Final = 60.0
"""Longest wait of the ranks for each other at the start."""
LOOPBACK: Final = "127.0.0.1"


def file_store(path: Path, size: int) -> Any:
    """Return the store where *size* ranks of this machine find each other: a file that only its owner may read.

    Raises:
        OSError: The file cannot be made.
    """
    os.close(open_private(path, os.O_CREAT | os.O_WRONLY))
    return dist.FileStore(str(path), size)  # type: ignore[attr-defined]  # torch's stubs do not export it


def connect(store: Any, rank: int, size: int, *, address: str = LOOPBACK, patience_s: float = PATIENCE_S) -> Any:
    """Return the gloo group of *size* ranks once all of them are there. It listens only at *address*.

    Raises:
        RankLost: Not all ranks came within *patience_s*.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]  # else it listens where the host's name points
    options._timeout = timedelta(seconds=patience_s)
    store.set_timeout(timedelta(seconds=patience_s))
    try:
        return gloo(store, rank, size, options)
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank} of {size} did not find the others within {patience_s:g} s: {told(error)}"
        ) from error


class BodyWay(Protocol):
    """Another transport for all of a frame but its header."""

    def send(self, ints: np.ndarray) -> None: ...

    def receive(self, num_ints: int) -> np.ndarray: ...


class Leader:
    """Rank 0's end of the channel."""

    def __init__(
        self,
        group: Any,
        on_lost: Callable[[RankLost], object],
        *,
        bodies: BodyWay | None = None,
        idle_s: float = IDLE_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """*on_lost* is called in another thread if a rank is found gone while nothing is computed.

        With *bodies*, only the headers go over *group*.
        """
        self._group, self._on_lost, self._idle_s, self._timeout_s = group, on_lost, idle_s, timeout_s
        self._bodies = bodies
        self._turn = threading.Lock()
        """Held while a frame is sent, and while the ranks compute: then no rank receives."""
        self._sent_s = time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="ranks", daemon=True)
        self._thread.start()

    @contextmanager
    def computing(self, plan: BatchPlan, kind: Kind = Kind.STEP) -> Iterator[None]:
        """Send *plan*, or NOTHING for a *kind* that is a signal. In this context all ranks do the work of the frame.

        Rank 0 enters the context while the frames are being sent. An error of rank 0 alone must not leave it.

        Raises:
            RankLost: A rank is gone, or rank 0 failed at its part. This may be known only at the end.
        """
        with self._turn:
            sent = [work for ints in frames_of(plan, kind) for work in self._send(ints)]
            try:
                yield
            except RankLost:
                raise
            except Exception as error:  # the others may wait for what rank 0 never computes
                logger.exception("step_failed", step=plan.step, rows=len(plan.rows))
                reason = f"rank 0 failed at a step, which ends all ranks of the engine: {error!r}"
                raise RankLost(reason) from error
            finish(sent)
            self._sent_s = time.monotonic()

    def tell_tokens(self, num_tokens: int, token_ids: Sequence[int] | None) -> None:
        """Send the tokens for the placeholders of the plan that is being computed, as many as its NEXT draws.

        None: rank 0 could not draw them, so the ranks drop the plan.

        Raises:
            RankLost: A rank is gone.
        """
        ints = np.zeros(1 + num_tokens, np.int32)
        if token_ids is not None:
            ints[0], ints[1:] = 1, token_ids
        finish([broadcast(self._group, ints, self._timeout_s)])

    def leave(self) -> None:
        """Let the other ranks leave. Nothing may be sent after that."""
        with self._turn:
            self._left.set()
            finish(self._send(signal(Kind.STOP)))
        self._thread.join()

    def _keep_alive(self) -> None:
        idle = signal(Kind.IDLE)
        while not self._left.wait(max(0.0, self._sent_s + self._idle_s - time.monotonic())):
            with self._turn:
                if self._left.is_set() or time.monotonic() < self._sent_s + self._idle_s:
                    continue
                try:
                    finish(self._send(idle))
                except Exception as error:
                    lost = error if isinstance(error, RankLost) else RankLost(f"the ranks cannot be reached: {error!r}")
                    self._on_lost(lost)
                    return

    def _send(self, ints: np.ndarray) -> list[dist.Work]:
        self._sent_s = time.monotonic()
        if self._bodies is None:
            parts = [ints[:SIZE], ints[SIZE:]] if len(ints) > SIZE else [ints]
            return [broadcast(self._group, part, self._timeout_s) for part in parts]
        header = broadcast(self._group, ints[:HEADER], self._timeout_s)
        if (num_ints := num_used(ints)) > HEADER:
            self._bodies.send(ints[HEADER:num_ints])
        return [header]


class Follower:
    """The end of the channel of any other rank."""

    def __init__(
        self,
        group: Any,
        *,
        bodies: BodyWay | None = None,
        timeout_s: float = TIMEOUT_S,
        heard: Callable[[], object] = lambda: None,
    ) -> None:
        """*heard* is called at each frame. *bodies*: see `Leader`."""
        self._group, self._bodies, self._timeout_s, self._heard = group, bodies, timeout_s, heard
        self._reader = Reader()
        self._first = np.empty(SIZE if bodies is None else HEADER, np.int32)

    def receive(self) -> tuple[Kind, BatchPlan]:
        """Wait until rank 0 sends a job; return its kind and its plan, which is empty for a signal.

        Raises:
            RankLost: Rank 0 is gone, or was silent for as long as the group waits.
            ConfigError: Rank 0 has another version of the frames.
        """
        while True:
            ints = self._first
            finish([broadcast(self._group, ints, self._timeout_s)])
            self._heard()
            beyond = num_beyond(ints)
            if self._bodies is not None:
                ints = np.zeros(SIZE + beyond, np.int32)
                ints[:HEADER] = self._first
                if (num_ints := num_used(ints)) > HEADER:
                    ints[HEADER:num_ints] = self._bodies.receive(num_ints - HEADER)
            elif beyond:
                ints = np.empty(SIZE + beyond, np.int32)
                ints[:SIZE] = self._first
                finish([broadcast(self._group, ints[SIZE:], self._timeout_s)])
            kind, plan = self._reader.read(ints)
            if kind not in (Kind.PAGES, Kind.IDLE):
                return kind, plan

    def receive_tokens(self, num_tokens: int) -> list[int] | None:
        """Wait for the tokens that rank 0 sends with `Leader.tell_tokens`, and return them.

        Raises:
            RankLost: Rank 0 is gone.
        """
        ints = np.empty(1 + num_tokens, np.int32)
        finish([broadcast(self._group, ints, self._timeout_s)])
        return ints[1:].tolist() if ints[0] else None


def least(group: Any, number: int, timeout_s: float) -> int:
    """Return the least of the numbers of all ranks. They wait *timeout_s* for each other.

    Raises:
        RankLost: A rank is gone, or did not come in time.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    options.timeout = timedelta(seconds=timeout_s)
    number_1 = torch.tensor([number])
    finish([group.allreduce([number_1], options)])
    return int(number_1)


def broadcast(group: Any, ints: np.ndarray, timeout_s: float) -> dist.Work:
    """Begin to send *ints* as rank 0, or to receive into *ints* as another rank. It fails after *timeout_s*."""
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
    work: dist.Work = group.broadcast([torch.from_numpy(ints)], options)
    return work
