"""Finds the library of kernels, and which of its variants run on this CPU, or why none does. No torch.

The library is made when MiniSGL is installed (`build.py`). Nothing is compiled here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

from stages.generate.kernels import build


class Format(IntEnum):
    """Format of the numbers of an array: `Format` of kernels.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q4_K = 5
    Q8_0 = 6
    Q5_1 = 7
    Q5_K = 8
    Q6_K = 9
    INT4_32 = 10
    INT4_64 = 11
    INT4_128 = 12


class Matrix(ctypes.Structure):
    """`Matrix` of kernels.h. Pointers are addresses, such as those of numpy arrays; the caller keeps the arrays."""

    _fields_: ClassVar = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("format", c_int),
        ("order", c_void_p),
    ]


class Pages(ctypes.Structure):
    """`Pages` of kernels.h."""

    _fields_: ClassVar = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("window", c_int64),
        ("format", c_int),
        ("scale", c_float),
        ("cap", c_float),
    ]


_MATRIX = POINTER(Matrix)
_PAGES = POINTER(Pages)


class Variant(ctypes.Structure):
    """`Variant` of kernels.h: one function for each entry, called without the GIL. Arrays are passed as addresses."""

    _fields_: ClassVar = [
        ("name", c_char_p),
        ("panel_bytes", ctypes.CFUNCTYPE(c_int64, c_int, c_int64)),
        ("pack", ctypes.CFUNCTYPE(None, c_int, c_void_p, c_int, c_int64, c_void_p)),
        ("activation_bytes", ctypes.CFUNCTYPE(c_int64, c_int, c_int64)),
        ("prepare", ctypes.CFUNCTYPE(None, c_int, c_void_p, c_int64, c_void_p)),
        ("multiply", ctypes.CFUNCTYPE(None, _MATRIX, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64)),
        ("tile", ctypes.CFUNCTYPE(None, _MATRIX, c_int64, c_int, POINTER(c_int64), POINTER(c_int64))),
        ("queries", ctypes.CFUNCTYPE(c_int64, _PAGES)),
        ("attend_scratch", ctypes.CFUNCTYPE(c_int64, _PAGES)),
        (
            "attend",
            ctypes.CFUNCTYPE(
                *(None, _PAGES, c_void_p, c_int64, c_int64, c_int64),
                *(c_void_p, c_int64, c_void_p, c_int64, c_void_p),
            ),
        ),
        ("part_floats", ctypes.CFUNCTYPE(c_int64, _PAGES)),
        (
            "attend_segment",
            ctypes.CFUNCTYPE(None, _PAGES, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
        ),
        ("merge", ctypes.CFUNCTYPE(None, _PAGES, c_void_p, c_int64, c_void_p)),
    ]
    name: bytes
    panel_bytes: Callable[..., int]
    pack: Callable[..., None]
    activation_bytes: Callable[..., int]
    prepare: Callable[..., None]
    multiply: Callable[..., None]
    tile: Callable[..., None]
    queries: Callable[..., int]
    attend_scratch: Callable[..., int]
    attend: Callable[..., None]
    part_floats: Callable[..., int]
    attend_segment: Callable[..., None]
    merge: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Library:
    """The library of kernels and what it can do here."""

    functions: ctypes.CDLL
    compiler: str
    """Compiler that made it, such as "cc (gcc 12.2.0)"."""
    compiled: tuple[str, ...]
    """Variants that it has, best first."""
    cpu: tuple[str, ...]
    """Variants that this CPU runs, best first."""

    @property
    def usable(self) -> tuple[str, ...]:
        """Variants that it has and this CPU runs, best first."""
        return tuple(name for name in self.cpu if name in self.compiled)

    def reason(self, name: str) -> str:
        """Return why the variant *name* is not `usable`; "": it is."""
        if name in self.usable:
            return ""
        if name not in self.cpu:
            return f"this CPU can run {' and '.join(self.cpu)}"
        return f"{self.compiler} could compile {' and '.join(self.compiled)}"

    def variant(self, name: str) -> Variant:
        """Return the functions of a variant that is `usable`."""
        assert name in self.usable, f"{name} is not one of {self.usable}"
        return self.functions.kernels_variant(name.encode()).contents  # type: ignore[no-any-return]


def load(path: Path = build.HERE / build.LIBRARY) -> Library | str:
    """Return the library at *path*, or the reason why it cannot be used, one line.

    A library that was not built from the sources beside it is not used: its functions may take other arguments. A wheel
    has no sources, and its library is never out of date.
    """
    kind = build.machine()
    if kind not in build.VARIANTS:
        return f"there are no kernels for {kind}, only for Linux on {' and '.join(build.VARIANTS)}"
    if not path.exists():
        note = path.with_name(build.NOTE)
        if note.exists():
            reason = note.read_text().splitlines()[0]
            return f"they could not be built when MiniSGL was installed: {reason}; all of it is in {note}"
        return f"{path} is missing; {_how_to_get_it()}"
    there, now = build.origin_of(path)[0], build.hash_of(path.parent)
    if now and there != now:
        return f"{path} was built from other sources ({there or 'unknown'}, now {now}); {_how_to_get_it()}"
    try:
        functions = ctypes.CDLL(str(path.absolute()))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    functions.cpu_variants.restype = c_char_p
    functions.kernels_variant.argtypes = [c_char_p]
    functions.kernels_variant.restype = POINTER(Variant)
    names = tuple(build.VARIANTS[kind])[::-1]
    library = Library(
        functions,
        ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(functions, "kernels_compiler"))).decode(),
        tuple(name for name in names if functions.kernels_variant(name.encode())),
        tuple(functions.cpu_variants().decode().split()),
    )
    if not library.cpu:
        return "this CPU has no AVX2, FMA and F16C"
    if not library.usable:
        return f"{path} has no kernels for this CPU: it has {', '.join(library.compiled) or 'none'}"
    return library


def _how_to_get_it() -> str:
    """Return what the user can do to get a library that fits."""
    return "run `make venv`" if build.hash_of() else "install MiniSGL again"


@functools.cache
def library() -> Library | str:
    """Return the library of this installation, or the reason why it cannot be used. It is looked up once."""
    return load()


def available() -> tuple[str, ...]:
    """Return the variants that can be used here, best first."""
    found = library()
    return () if isinstance(found, str) else found.usable


def variant(name: str) -> Variant:
    """Return the functions of a variant that is `available`."""
    found = library()
    assert not isinstance(found, str), found
    return found.variant(name)


def reason(name: str = "") -> str:
    """Return why the variant *name* cannot be used here; without a name: why none can. "": it can."""
    found = library()
    return found if isinstance(found, str) else found.reason(name) if name else ""
