"""A plan as numbers, which rank 0 broadcasts, and back. Knows no transport and no tensors.

    ints        a frame
    16          version, kind, step (low and high 31 bits), rows, decode rows, tokens, pages, ints beyond SIZE; zeros
    8 a row     table, start, first page, tokens, new pages, 1 if it samples + 2 * scored tokens, first local, new local
    tokens      of all rows
    pages       of all rows: for each row its new pages, then its new local parts

The first SIZE ints are always sent. Zeros fill them up, and what does not fit follows in a second part.
A token below 0 is not drawn yet: -1 - i stands for the token i of those that the step before draws.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from itertools import chain
from typing import Final

import numpy as np

from pipeline.errors import ConfigError
from pipeline.events import SamplingParams
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample, Scoring

VERSION: Final = 3
"""A rank reads only frames of its own version."""
SIZE: Final = 8192
"""Ints of the part that every frame has."""
HEADER: Final = 16
ROW: Final = 8
LONG_LIST: Final = 1024
"""Largest number of a row's new pages in the step's own frame. Longer lists are sent before, in frames of their own."""

_LOW: Final = 2**31 - 1

SAMPLED: Final = Sample(SamplingParams(temperature=0), 0, ())
"""A follower's sample: it knows only that the row is sampled."""
NOTHING: Final = BatchPlan(0, (), 0)


class Kind(IntEnum):
    """Purpose of a frame. With overlap, frames from BEGIN on are used: different frames begin and draw a step."""

    STEP = 1
    """Compute this plan, draw its tokens and score them."""
    PAGES = 2
    """Long page lists of the step that comes next."""
    IDLE = 3
    """Rank 0 is alive and has nothing to compute."""
    STOP = 4
    """Rank 0 leaves."""
    BEGIN = 5
    """Compute only the forward pass of this plan."""
    NEXT = 6
    """Draw the tokens of the newest step, which follow. Then as BEGIN, with these tokens for the placeholders."""
    LAND = 7
    """Draw the tokens of the newest step, and score it."""
    SCORE = 8
    """Score the newest step. Its tokens are drawn."""
    SCORE_BEFORE = 9
    """Score the step before the newest one. Its tokens are drawn."""


def signal(kind: Kind) -> np.ndarray:
    """Return a frame that has only a header."""
    return _frame(kind, NOTHING)


def frames_of(plan: BatchPlan, kind: Kind = Kind.STEP) -> Iterator[np.ndarray]:
    """Yield the frames of *plan*, int32, in the order in which they must be sent. The last one is of this *kind*."""
    long = [row for row in plan.rows if len(row.new_pages) > LONG_LIST]
    for row in long:
        most = SIZE - HEADER - ROW
        for first in range(0, len(row.new_pages), most):
            part = PlanRow(row.table, row.start, (), row.new_pages[first : first + most], row.first_page, None)
            yield _frame(Kind.PAGES, replace(plan, rows=(part,)))
    if long:
        rows = (replace(row, new_pages=()) if len(row.new_pages) > LONG_LIST else row for row in plan.rows)
        plan = replace(plan, rows=tuple(rows))
    yield _frame(kind, plan)


def num_beyond(ints: np.ndarray) -> int:
    """Return the number of ints after the first SIZE ones of a frame.

    Raises:
        ConfigError: The frame is of another version.
    """
    version = int(ints[0])
    if version != VERSION:
        raise ConfigError(
            f"rank 0 sends frames of version {version}, but this rank reads version {VERSION}: "
            "start all ranks with the same version of MiniSGL"
        )
    return int(ints[8])


def num_used(ints: np.ndarray) -> int:
    """Return the number of ints of a frame before the zeros that fill it up. *ints* may be its header alone."""
    num_rows, _, num_tokens, num_pages = ints[4:8].tolist()
    return HEADER + ROW * int(num_rows) + int(num_tokens) + int(num_pages)


class Reader:
    """Reads frames in the order in which they were sent. Remembers the pages that come before their step."""

    def __init__(self) -> None:
        self._ahead: dict[int, tuple[int, ...]] = {}
        """Pages by table."""

    def read(self, ints: np.ndarray) -> tuple[Kind, BatchPlan]:
        """Return the kind of a whole frame, and its plan, which is empty for PAGES and the kinds that are signals.

        The plan has what a follower needs of rank 0's: for each sample SAMPLED, for each `Scoring` the number of
        targets.

        Raises:
            ConfigError: The frame is of another version.
        """
        beyond = num_beyond(ints)
        header: list[int] = ints[:HEADER].tolist()
        _, number, low, high, num_rows, num_decode_rows, num_tokens, num_pages, *_ = header
        kind = Kind(number)
        first_token = HEADER + ROW * num_rows
        first_page = first_token + num_tokens
        end = first_page + num_pages
        assert len(ints) == SIZE + beyond and beyond == max(0, end - SIZE), f"a frame of {len(ints)} ints: {header}"
        numbers: list[int] = ints[:end].tolist()
        rows = []
        token, page = first_token, first_page
        for at in range(HEADER, first_token, ROW):
            table, start, first, tokens, pages, flags, first_local, local = numbers[at : at + ROW]
            new_pages = tuple(numbers[page : page + pages])
            new_local = tuple(numbers[page + pages : page + pages + local])
            token_ids = tuple(numbers[token : token + tokens])
            token, page = token + tokens, page + pages + local
            if kind is Kind.PAGES:
                self._ahead[table] = self._ahead.get(table, ()) + new_pages
                continue
            if table in self._ahead:
                new_pages = self._ahead.pop(table)
            scored, samples = divmod(flags, 2)
            scoring = Scoring((0,) * scored, 0) if scored else None
            sample = SAMPLED if samples else None
            rows.append(PlanRow(table, start, token_ids, new_pages, first, sample, scoring, new_local, first_local))
        assert (token, page) == (first_page, end), f"the rows of a frame do not fit its header: {header}"
        return kind, BatchPlan(low | high << 31, tuple(rows), num_decode_rows)


def _frame(kind: Kind, plan: BatchPlan) -> np.ndarray:
    rows = plan.rows
    num_tokens = sum(len(row.token_ids) for row in rows)
    num_pages = sum(len(row.new_pages) + len(row.new_local) for row in rows)
    beyond = max(0, HEADER + ROW * len(rows) + num_tokens + num_pages - SIZE)
    header = (VERSION, kind, plan.step & _LOW, plan.step >> 31, len(rows), plan.num_decode_rows, num_tokens, num_pages)
    numbers = array("i", header)
    numbers.extend((beyond, *[0] * (HEADER - len(header) - 1)))
    for row in rows:
        flags = (row.sample is not None) + 2 * (len(row.scoring.targets) if row.scoring is not None else 0)
        numbers.extend((row.table, row.start, row.first_page, len(row.token_ids), len(row.new_pages), flags))
        numbers.extend((row.first_local, len(row.new_local)))
    numbers.extend(chain.from_iterable(row.token_ids for row in rows))
    numbers.extend(chain.from_iterable(chain(row.new_pages, row.new_local) for row in rows))
    numbers.frombytes(bytes(numbers.itemsize * (SIZE + beyond - len(numbers))))
    return np.frombuffer(numbers, np.int32)
