"""A double of NCCL and of CUDA's streams, for ranks that are threads of this process. It notes who does what, where.

As NCCL does, it pairs what the ranks do in the order in which each of them does it, and fails if shapes differ.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Meeting
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank did with a communicator."""

    communicator: int
    rank: int
    what: str
    shape: tuple[int, ...]
    stream: int
    """0: the stream of the forward pass."""


class Done:
    """What is done when it is asked for, as the device sees it."""

    def wait(self) -> None: ...


class Nccl:
    """The library. Called, it makes a rank's end of a communicator, which the ranks' store tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for torch's NCCL and streams."""
        self.calls: list[Call] = []
        self.options: list[Any] = []
        self._meetings: list[Meeting] = []
        self._lock = threading.Lock()
        self._here = threading.local()
        self._num_streams = 0
        monkeypatch.setattr(dist, "ProcessGroupNCCL", self, raising=False)
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self._entered)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def Options(self) -> Any:  # noqa: N802  (torch's name)
        config = SimpleNamespace(min_ctas=None, max_ctas=None)
        return SimpleNamespace(config=config, is_high_priority_stream=False)

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> Communicator:
        with self._lock:
            if not store.check(["number"]):
                store.set("number", str(len(self._meetings)))
                self._meetings.append(Meeting(size))
                self.options.append(options)
            number = int(store.get("number"))
        return Communicator(self, number, self._meetings[number], rank)

    def note(self, communicator: int, rank: int, what: str, shape: tuple[int, ...]) -> None:
        with self._lock:
            self.calls.append(Call(communicator, rank, what, shape, getattr(self._here, "stream", 0)))

    def _new_stream(self, device: torch.device, priority: int = 0) -> int:
        with self._lock:
            self._num_streams += 1
            return self._num_streams

    @contextlib.contextmanager
    def _entered(self, stream: int) -> Iterator[None]:
        self._here.stream = stream
        yield
        self._here.stream = 0


class Communicator:
    """A rank's end of a group."""

    def __init__(self, nccl: Nccl, number: int, meeting: Meeting, rank: int) -> None:
        self._nccl, self._number, self._meeting, self._rank = nccl, number, meeting, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.barrier.parties

    def _exchange(self, what: str, x: Tensor) -> list[Tensor]:
        assert x.is_contiguous()
        shape = tuple(x.shape)
        self._nccl.note(self._number, self._rank, what, shape)
        parts = self._meeting.exchange(self._rank, x)
        assert {(tuple(part.shape), part.dtype) for part in parts} == {(shape, x.dtype)}
        return parts

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Done:
        (x,) = tensors
        x.copy_(self._exchange("broadcast", x)[options.rootRank])
        return Done()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions | None = None) -> Done:
        (x,) = tensors
        x.copy_(torch.stack(self._exchange("allreduce", x)).sum(0))
        return Done()

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: dist.GatherOptions) -> Done:
        (x,) = tensors
        parts = self._exchange("gather", x)
        assert bool(outputs) is (self._rank == options.rootRank)
        for output in outputs:
            for place, part in zip(output, parts, strict=True):
                place.copy_(part)
        return Done()
