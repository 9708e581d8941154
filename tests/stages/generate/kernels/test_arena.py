"""Packed weights lie in huge pages, one after the other, and stay as long as somebody uses them."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import numpy as np
import psutil
import pytest

from stages.generate.model.compiled import ALIGNMENT, AT_ONCE, HUGE, Arena, give_back

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    """Return how much of this process lies in huge pages."""
    found = re.search(r"AnonHugePages: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_pieces_begin_at_cache_lines_and_share_nothing() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 64, 1000, AT_ONCE - 100, 5, AT_ONCE + 7, 3)]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % ALIGNMENT == 0
        piece.fill(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces))


def test_a_piece_outlives_its_arena() -> None:
    piece = Arena().take(1000)
    piece.fill(7)
    gc.collect()
    assert (piece == 7).all()


def test_what_nobody_writes_to_is_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    piece = Arena().take(2 * AT_ONCE)
    piece[:HUGE].fill(1)
    assert psutil.Process().memory_info().rss - before < AT_ONCE


def test_freed_memory_between_other_pieces_goes_back_to_the_system() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no function for it")
    freed = []
    kept = []
    for _ in range(500):
        freed.append(bytearray(b"x" * 100_000))
        kept.append(bytearray(1000))
    full = psutil.Process().memory_info().rss
    freed.clear()
    give_back()
    assert full - psutil.Process().memory_info().rss > 30_000_000 and len(kept) == 500


def test_it_lies_in_huge_pages_where_the_system_gives_them() -> None:
    if not SWITCH.exists() or "[never]" in SWITCH.read_text():
        pytest.skip("this system gives no huge pages")
    before = huge_bytes()
    piece = Arena().take(8 * HUGE)
    assert piece.ctypes.data % HUGE == 0
    piece.fill(1)
    assert huge_bytes() - before >= 4 * HUGE  # all of it, unless memory is in pieces
    assert int(np.sum(piece, dtype=np.int64)) == 8 * HUGE
