"""A double of Triton for CPUs without it: the part that our kernels use, one program after the other, with numpy.
It has no bfloat16, because numpy has none.

Numpy fuses no products with sums and rounds quotients to nearest, as our kernels want of Triton. Types follow numpy's
rules, which for these kernels are Triton's: a Python number takes the type of what it meets.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

KERNELS: Final = (
    "stages.generate.attention.heads",
    "stages.generate.model.layers.fixed_products",
    "stages.generate.sampling.fused",
)
"""Our modules with kernels."""


class Block:
    """A block of numbers, or of pointers into the flat *memory*."""

    def __init__(self, values: Any, memory: np.ndarray | None = None) -> None:
        self.values, self.memory = np.asarray(values), memory

    def to(self, kind: Any, bitcast: bool = False) -> Block:
        with np.errstate(all="ignore"):
            return Block(self.values.view(kind) if bitcast else self.values.astype(kind))

    @property
    def dtype(self) -> Any:
        return self.values.dtype if self.memory is None else SimpleNamespace(element_ty=self.memory.dtype)

    def __getitem__(self, where: Any) -> Block:
        return Block(self.values[where], self.memory)

    def __index__(self) -> int:
        return int(self.values)

    def __bool__(self) -> bool:
        if self.values.ndim:
            raise TypeError("a kernel cannot branch on a block")
        return bool(self.values)


def _operate(name: str) -> None:
    act = getattr(operator, name)

    def forward(self: Block, other: Any) -> Block:
        with np.errstate(all="ignore"):
            return Block(act(self.values, _plain(other)), self.memory)

    def backward(self: Block, other: Any) -> Block:
        with np.errstate(all="ignore"):
            return Block(act(_plain(other), self.values), self.memory)

    setattr(Block, f"__{name.strip('_')}__", forward)
    setattr(Block, f"__r{name.strip('_')}__", backward)


for _name in (
    *("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and_", "or_", "eq", "lt", "le", "gt", "ge"),
):
    _operate(_name)


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, Block) else value


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    return jit if function is None else Kernel(function)


class Kernel:
    """A function that other kernels call, or that is launched for each program of a grid: `kernel[grid](..)`."""

    programs: Sequence[int] = ()
    enqueue: Callable[[Callable[[], None]], None] = staticmethod(lambda compute: compute())
    """What a device does with a launched kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *words: Any) -> Any:
        return self._function(*words)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(
            *words: Any, num_warps: int = 4, num_stages: int = 3, enable_fp_fusion: bool = True, **constants: Any
        ) -> None:
            assert not enable_fp_fusion, "products fused with sums round once, and choose other tokens"
            given = [_pointer(word) if isinstance(word, torch.Tensor) else word for word in words]

            def compute() -> None:
                for Kernel.programs in itertools.product(*map(range, grid)):
                    self._function(*given, **constants)

            Kernel.enqueue(compute)

        return launch


def _pointer(tensor: torch.Tensor) -> Block:
    tensor = getattr(tensor, "held", tensor)  # of a pretended device
    assert tensor.is_contiguous()
    readable = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
    return Block(0, readable.view(-1).numpy())


def _load(pointer: Block, mask: Any = True, other: Any = 0) -> Block:
    assert pointer.memory is not None
    places, is_read = np.broadcast_arrays(pointer.values, _plain(mask))
    assert ((places >= 0) & (places < len(pointer.memory)))[is_read].all(), "a read outside of the tensor"
    read = pointer.memory[np.where(is_read, places, 0)]
    return Block(np.where(is_read, read, np.asarray(other, read.dtype)))


def _store(pointer: Block, value: Any, mask: Any = True) -> None:
    assert pointer.memory is not None
    places, value, is_written = np.broadcast_arrays(pointer.values, _plain(value), _plain(mask))
    assert ((places >= 0) & (places < len(pointer.memory)))[is_written].all(), "a write outside of the tensor"
    assert value.dtype == pointer.memory.dtype
    pointer.memory[places[is_written]] = value[is_written]


def _dot(one: np.ndarray, other: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Add one product after the other. With numpy's `matmul`, the bits of a row depend on its place."""
    for part, row in zip(one.astype(np.float32).T, other.astype(np.float32), strict=True):
        total = total + part[:, None] * row
    return total


def _atomic_add(pointer: Block, value: Block, mask: Block, sem: str) -> None:
    assert pointer.memory is not None and sem == "relaxed" and value.values.dtype == pointer.memory.dtype
    np.add.at(pointer.memory, pointer.values[mask.values], value.values[mask.values])


def _of(function: Callable[..., Any]) -> Callable[..., Block]:
    def call(*words: Any) -> Block:
        with np.errstate(all="ignore"):
            return Block(function(*map(_plain, words)))

    return call


def load(name: str, device: torch.device) -> ModuleType:
    """Return the module *name* with this double if it computes on a CPU, with Triton on a GPU. No other module sees it
    with the double.
    """
    if device.type != "cpu":
        return importlib.import_module(name)
    with triton():
        return importlib.import_module(name)


def modules() -> dict[str, ModuleType]:
    """Return the double's modules, by name."""
    module, language = ModuleType("triton"), ModuleType("triton.language")
    for name, value in {
        "jit": jit,
        "cdiv": lambda count, size: -(-count // size),
        "next_power_of_2": lambda count: 1 << (count - 1).bit_length(),
        "language": language,
    }.items():
        setattr(module, name, value)
    for name, value in {
        "constexpr": int,  # a number that is known when a kernel is compiled
        "program_id": lambda axis: Block(np.int32(Kernel.programs[axis])),
        "arange": lambda start, end: Block(np.arange(start, end, dtype=np.int32)),
        "load": _load,
        "store": _store,
        "atomic_add": _atomic_add,
        "max": _of(lambda block, axis: np.fmax.reduce(block, axis)),  # ignores NaN
        "min": _of(lambda block, axis: np.fmin.reduce(block, axis)),
        "sum": _of(lambda block, axis: block.sum(axis, dtype=block.dtype)),
        "cumsum": _of(lambda block, axis: block.cumsum(axis, dtype=block.dtype)),
        "minimum": _of(lambda one, other: np.fmin(one, other)),
        "maximum": _of(lambda one, other: np.fmax(one, other)),
        "where": _of(lambda which, one, other: np.where(which, one, other)),
        "div_rn": _of(lambda one, other: one / other),
        "rsqrt": _of(lambda block: 1 / np.sqrt(block)),
        "zeros": lambda shape, kind: Block(np.zeros(shape, kind)),
        "dot": _of(_dot),
        "static_range": range,
        **{name: getattr(np, name) for name in ("float32", "int32", "int64")},
    }.items():
        setattr(language, name, value)
    module.__spec__ = ModuleSpec("triton", None)
    return {"triton": module, "triton.language": language}


@contextmanager
def triton() -> Iterator[None]:
    """Let `import triton` find the double, also for our kernels. Afterwards they are imported anew."""
    made = modules()
    before = {name: sys.modules.pop(name, None) for name in (*made, *KERNELS)}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, known in before.items():
            sys.modules.pop(name, None)
            if known is not None:
                sys.modules[name] = known
