"""On GPUs, headers go over gloo, bodies and sums over NCCL. A double of NCCL says in which order, where and how large.

No machine of these tests has two GPUs. So nothing here says that NCCL itself agrees.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import gloo_rank
from support.checkpoints import make_checkpoint
from support.gloo_rank import fail, plan_of
from support.ranks import Meeting
from torch import Tensor

from pipeline.errors import RankLost
from stages.generate.collectives import ALONE, NcclCollectives
from stages.generate.model.config import read_spec
from stages.generate.ranks.channel import Follower, Leader
from stages.generate.ranks.frame import HEADER, LONG_LIST, NOTHING, ROW, SIZE, Kind
from stages.generate.ranks.links import RankLinks, connect_gpus, connect_nccl


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


SUMS, BODIES = 0, 1
CPU = torch.device("cpu")


PLANS = (plan_of(1, 1, 0), plan_of(2, 2 * SIZE, 3), plan_of(3, 1, 2 * LONG_LIST))
BODY_SIZES = (ROW + 1, ROW + 2 * SIZE + 3, ROW + 2 * LONG_LIST, ROW + 1)
"""Ints of the frames but their headers. The long list goes ahead in a frame of its own."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint, made before there is a double of NCCL: transformers imports more, and names what that replaces."""
    return make_checkpoint(tmp_path, "odd")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    return Nccl(monkeypatch)


class Doorbell:
    """A gloo group that notes when a header is on its way, among the calls of NCCL."""

    def __init__(self, group: Any, rank: int, nccl: Nccl) -> None:
        self._group, self._rank, self._nccl = group, rank, nccl

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        work = self._group.broadcast(tensors, options)
        self._nccl.note(-1, self._rank, "header", tuple(tensors[0].shape))
        return work


def connected(size: int, nccl: Nccl) -> list[RankLinks]:
    """Return the links of all ranks."""
    store, doorbells = gloo_rank.memory_store(), gloo_rank.connected(size)

    def connect(rank: int) -> RankLinks:
        return connect_gpus(store, rank, size, CPU, Doorbell(doorbells[rank], rank, nccl))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(connect, range(size)))


def test_a_body_follows_its_header_on_a_communicator_and_a_stream_of_its_own(nccl: Nccl) -> None:
    first, second = connected(2, nccl)
    sums, bodies = nccl.options
    assert (bodies.config.max_ctas, bodies.is_high_priority_stream) == (1, True)
    assert (sums.config.max_ctas, sums.is_high_priority_stream) == (None, False)
    nccl.calls.clear()
    follower = Follower(second.frames, bodies=second.bodies)
    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(lambda: [follower.receive() for _ in range(len(PLANS) + 1)])
        leader = Leader(first.frames, fail, bodies=first.bodies)
        for plan in PLANS:
            with leader.computing(plan):
                pass
        leader.leave()
        assert heard.result(20) == [*((Kind.STEP, plan) for plan in PLANS), (Kind.STOP, NOTHING)]
    for rank in (0, 1):
        calls = [call for call in nccl.calls if call.rank == rank]
        (stream,) = {call.stream for call in calls if call.communicator == BODIES}
        assert stream != 0, "not that of the forward pass"
        header = Call(-1, rank, "header", (HEADER,), 0)
        frames = ([header, Call(BODIES, rank, "broadcast", (size,), stream)] for size in BODY_SIZES)
        assert calls == [*chain.from_iterable(frames), header], "the last one says that rank 0 leaves, and has no body"


def test_engines_with_sums_over_nccl_compute_what_one_computes(folder: Path, nccl: Nccl) -> None:
    """On the stream of the forward pass: two sums a layer and one for the embeddings, and the logits of both."""
    alone = gloo_rank.logits_of(ALONE, folder, "torch")
    links = connected(2, nccl)
    nccl.calls.clear()

    def compute(rank: int) -> list[torch.Tensor]:
        return gloo_rank.logits_of(NcclCollectives(links[rank].sums), folder, "torch")

    with ThreadPoolExecutor(2) as threads:
        together, _ = threads.map(compute, range(2))
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    assert {(call.communicator, call.stream) for call in nccl.calls} == {(SUMS, 0)}
    shard = read_spec(folder).sharded(0, 2)
    expected: list[tuple[str, tuple[int, ...]]] = []
    for num_tokens, num_sampled in ((30, 0), (10, 1), (1, 1)):
        expected += [("allreduce", (num_tokens, shard.hidden_size))] * (1 + 2 * shard.num_layers)
        expected.append(("gather", (num_sampled, shard.vocab_rows)))
    for rank in (0, 1):
        assert [(call.what, call.shape) for call in nccl.calls if call.rank == rank] == expected


def test_ranks_that_do_not_find_each_other_over_nccl_say_so(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("[/src/NCCLUtils.cpp:94] NCCL error: unhandled system error")

    monkeypatch.setattr(Nccl, "__call__", refuse)
    with pytest.raises(RankLost, match=r"rank 1 of 2 .*NCCL error"):
        connect_nccl(gloo_rank.memory_store(), 1, 2, CPU)
