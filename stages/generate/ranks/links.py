"""The links between the ranks of an engine. On CPUs all are over gloo.

On GPUs sums and the bodies of frames go over NCCL. Its kernels spin until all ranks take part. So headers go over gloo,
and a body only after its header: then all ranks take part at once, and no kernel spins without a frame.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import RankLost
from stages.generate.collectives import GlooCollectives, NcclCollectives, finish, told
from stages.generate.ranks.channel import LOOPBACK, connect

NCCL_TIMEOUT_S: Final = 600.0
"""Timeout of NCCL: in its first steps a rank may compile kernels, for which the others wait."""


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Links of a rank to its group. Frames are sent while sums may be awaited, so each has its own link."""

    frames: Any
    sums: Any
    bodies: Bodies | None = None
    """Link for the bodies of frames; None: bodies go with the headers."""

    def collectives(self) -> GlooCollectives:
        """Return the collectives of a rank's engine."""
        return (GlooCollectives if self.bodies is None else NcclCollectives)(self.sums)


def connect_links(store: Any, rank: int, size: int, *, device: torch.device, address: str = LOOPBACK) -> RankLinks:
    """Return the links of the rank with *device* once all *size* ranks are there. *store* is not needed later.

    A GPU becomes the current device of this thread.

    Raises:
        RankLost: Not all ranks came.
    """

    frames = connect(_part(store, "frames"), rank, size, address=address)
    if device.type == "cpu":
        return RankLinks(frames, connect(_part(store, "sums"), rank, size, address=address))
    torch.cuda.set_device(device)
    if address == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # else NCCL listens at the first other interface
    return connect_gpus(store, rank, size, device, frames)


def connect_gpus(store: Any, rank: int, size: int, device: torch.device, frames: Any) -> RankLinks:
    """Return the links as `connect_links` does. Headers go over *frames*, and all else over NCCL."""
    sums = connect_nccl(_part(store, "sums"), rank, size, device)
    bodies = connect_nccl(_part(store, "bodies"), rank, size, device, max_ctas=1)
    return RankLinks(frames, sums, Bodies(bodies, device))


def _part(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch's stubs do not export it


def connect_nccl(store: Any, rank: int, size: int, device: torch.device, *, max_ctas: int = 0) -> Any:
    """Return the NCCL group of *size* ranks once all of them are there. *store* is not needed later.

    *max_ctas*: the largest part of the device that its kernels take; 0: NCCL's own limit.

    Raises:
        RankLost: Not all ranks came, or NCCL cannot connect them.
    """
    nccl: Any = dist.ProcessGroupNCCL  # builds for CPUs lack it
    options = nccl.Options()
    options._timeout = timedelta(seconds=NCCL_TIMEOUT_S)
    if max_ctas:
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
        options.is_high_priority_stream = True  # one CTA beside a forward pass that has the others
    try:
        group = nccl(store, rank, size, options)
        group.allreduce([torch.zeros(1, device=device)]).wait()  # this makes the communicator, by the store
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} did not find the others over NCCL: {told(error)}") from error
    return group


class Bodies:
    """Link for the bodies of frames. It has a communicator and a stream of its own, so it waits for no forward pass."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Use *group* of `connect_nccl`. It stays the caller's."""
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def send(self, ints: np.ndarray) -> None:
        """Send *ints*, int32, as rank 0. The others know their number from the header."""
        with torch.cuda.stream(self._stream):
            self._exchange(torch.from_numpy(ints).to(self._device))

    def receive(self, num_ints: int) -> np.ndarray:
        """Return the ints that rank 0 sends, as another rank."""
        with torch.cuda.stream(self._stream):
            body = torch.empty(num_ints, dtype=torch.int32, device=self._device)
            self._exchange(body)
            ints: np.ndarray = body.cpu().numpy()  # waits for this stream alone
            return ints

    def _exchange(self, body: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        finish([self._group.broadcast([body], options)])
