"""Memory for packed weights in huge pages, where Linux gives them.

A decode step reads all weights once, as fast as memory can be read. With pages of 4 KiB a CPU spends up to half of that
time on looking up pages: more so in a virtual machine, whose tables are nested.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

HUGE: Final = 2**21
"""Bytes of a huge page on x86-64, and on aarch64 where small pages have 4 KiB."""
AT_ONCE: Final = 32 * HUGE
"""Address space that is taken at a time. What is written to becomes memory, a huge page at a time."""
ALIGNMENT: Final = 64


class Arena:
    """Gives out pieces of memory, which stay as long as any of them is used."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return *size* bytes that begin at a cache line."""
        if size > len(self._rest):
            self._rest = _mapped(max(size, AT_ONCE))
        taken, self._rest = self._rest[:size], self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken


def give_back() -> None:
    """Return freed memory to the system. The C library keeps what lies between other pieces, such as matrices that were
    packed; only glibc has a function for it.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _mapped(size: int) -> npt.NDArray[np.uint8]:
    """Return new memory that begins where a huge page can."""
    area = mmap.mmap(-1, -(-size // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
        area.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(area, np.uint8)
    first = -array.ctypes.data % HUGE
    return array[first : len(array) - HUGE + first]
