"""A CUDA device without a GPU: its tensors say that they are there, and a CPU computes them.

An operation on tensors of both raises, as it would. So does whatever waits for the device: to read a number, to make a
tensor whose shape depends on numbers, to copy to the host, and to copy memory that is not pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA: Final = torch.device("cuda", 0)
WAITING: Final = ("_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero")


COMPOSED: Final = ("item", "to")
PINNING: Final = ("_pin_memory", "pin_memory")


class Waited(Exception):
    """The host would wait for the device."""


class OnDevice(Tensor):
    """A tensor of the device, which a CPU holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device("meta"),
            )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:  # type: ignore[override]
        return _computed(function, arguments, named or {})


class Pretended(TorchDispatchMode):  # type: ignore[no-untyped-call]
    num_copies = 0
    """From the host to the device."""
    may_wait = False
    """As while weights are loaded."""
    num_replays = 0
    num_operations = 0
    """On the device, beside replays; a view and memory are no operations."""
    num_launched = 0
    """Kernels of libraries."""
    recorded: list[int]
    """Operations and kernels of each recording."""
    _tape: list[Callable[[], object]] | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name, named = function.__name__.partition(".")[0], dict(named or {})
        if name in COMPOSED:  # in inference mode they come whole
            with self:
                return function.decompose(*arguments, **named)
        if self._tape is not None and (name in PINNING or named.get("pin_memory")):
            raise RuntimeError("memory of the host is allocated in a recording")
        result = _computed(function, arguments, dict(named), may_wait=self.may_wait)
        self.num_operations += isinstance(result, OnDevice) and not (function.is_view or name.startswith("empty"))
        is_theirs = any(isinstance(each, OnDevice) for each in arguments[-2:])
        if name in ("_to_copy", "copy_") and isinstance(result, OnDevice) and not (is_theirs and name == "_to_copy"):
            from_host = not isinstance(arguments[1 if name == "copy_" else 0], OnDevice)
            self.num_copies += from_host
            if from_host and self._tape is not None:
                raise RuntimeError("a tensor of the host is copied in a recording")
        if self._tape is not None:
            self._tape.append(lambda: _again(function, arguments, named, result))
        return result

    def launch(self, work: Callable[[], object]) -> None:
        """Do what a library does on the device."""
        tape, self._tape = self._tape, None
        self.num_launched += 1
        work()
        if tape is not None:
            tape.append(work)
        self._tape = tape

    def record(
        self, call: Callable[[], Tensor], device: torch.device, pool: object = None
    ) -> tuple[Callable[[], object], Tensor, object]:
        """As `graphs.record`: the operations of *call* are done again on the tensors that they had."""
        call()
        before = self.num_operations + self.num_launched
        may_wait, self.may_wait = self.may_wait, False
        self._tape = tape = list[Callable[[], object]]()
        try:
            result = call()
        finally:
            self._tape, self.may_wait = None, may_wait

        self.recorded.append(self.num_operations + self.num_launched - before)

        def replay() -> None:
            self.num_replays += 1
            for work in tape:
                work()

        return replay, result, pool


def _again(function: Any, arguments: Any, named: Any, result: Any) -> None:
    """Do an operation again, and write to the tensors that it had made."""
    made = [each for each in tree_flatten(result)[0] if isinstance(each, OnDevice)]
    anew = [each for each in tree_flatten(_computed(function, arguments, dict(named)))[0] if isinstance(each, OnDevice)]
    for old, new in zip(made, anew, strict=True):
        if old.held.data_ptr() != new.held.data_ptr():
            old.held.copy_(new.held)


@contextlib.contextmanager
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Let this process have a CUDA device."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with torch.no_grad(), Pretended() as device:
        yield device


def _computed(function: Any, arguments: Any, named: Any, *, may_wait: bool = False) -> Any:
    name = function.__name__.partition(".")[0]
    flat = [*arguments, *named.values()]
    tensors = [each for part in flat for each in (part if isinstance(part, (list, tuple)) else [part])]
    tensors = [each for each in tensors if isinstance(each, Tensor)]
    theirs = [each for each in tensors if isinstance(each, OnDevice)]
    ours = [each for each in tensors if not isinstance(each, OnDevice) and each.dim()]
    pinned = named.pop("pin_memory", None)
    if name in PINNING:
        return _pin(arguments[0].clone())
    device = None if named.get("device") is None else torch.device(named["device"])
    to_device = device is not None and device.type != "cpu"
    waits_for = [] if may_wait else theirs
    if waits_for and name in WAITING:
        raise Waited(f"{name} waits for the device")
    if (
        waits_for
        and name in ("index", "index_put_", "index_put")
        and any(each is not None and each.dtype == torch.bool for each in arguments[1])
    ):
        raise Waited("an index of booleans waits for the device")
    if name in ("_to_copy", "copy_") and not may_wait:
        source = arguments[0] if name == "_to_copy" else arguments[1]
        target_is_theirs = to_device or (isinstance(arguments[0], OnDevice) and device is None)
        if isinstance(source, OnDevice) != target_is_theirs and source.dim():
            host = arguments[0] if isinstance(source, OnDevice) and name == "copy_" else source
            non_blocking = named.get("non_blocking") or (name == "copy_" and len(arguments) > 2 and arguments[2])
            if isinstance(host, OnDevice) or not non_blocking or not getattr(host, "is_pretended_pinned", False):
                raise Waited(f"{name} between host and device waits, unless it is non_blocking and of pinned memory")
    elif theirs and ours and name not in ("_to_copy", "copy_"):
        raise RuntimeError(f"{name}: tensors of the host and of the device")
    if device is not None:
        named = {**named, "device": torch.device("cpu")}
    unwrap = lambda each: each.held if isinstance(each, OnDevice) else each  # noqa: E731
    result = function(*tree_map(unwrap, arguments), **tree_map(unwrap, named))
    stays = theirs and device is not None and not to_device
    if not (theirs or to_device) or stays or (name == "copy_" and not isinstance(arguments[0], OnDevice)):
        shares = isinstance(result, Tensor) and any(
            getattr(each, "is_pretended_pinned", False)
            and each.data_ptr() <= result.data_ptr() < each.data_ptr() + each.nbytes
            for each in ours
        )
        return _pin(result) if pinned or shares else result

    def wrap(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        same = [one for one in theirs if one.held is each]
        return same[0] if same else OnDevice(each)

    return tree_map(wrap, result)


def _pin(tensor: Tensor) -> Tensor:
    tensor.is_pretended_pinned = True  # type: ignore[attr-defined]
    return tensor
