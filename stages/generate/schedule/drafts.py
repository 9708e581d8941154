"""Drafts of a request's next tokens: what followed its last ones when they came before. A pure function of token ids.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), with an index instead of a search, and with
memory of where it copies from: as long as the output goes on like its source, the source goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

LENGTHS: Final = (2, 3, 4)
"""Lengths of the runs of tokens that are looked up, the longest first."""
FEWEST_SLOTS: Final = 2**10
MOST_SLOTS: Final = 2**17
"""Bounds of the number of slots for runs of each length. Beyond that many tokens, new runs replace old ones."""
SURE: Final = 4
"""After this many tokens of a source, one that differs is taken as replaced: the source goes on behind it."""
SEPARATOR: Final = -1
"""Stands before the first token, and between a prediction and the prompt: no token."""

_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Random odd numbers, for the last token of a run, the one before it, and so on."""
_WORD: Final = 2**64 - 1


class Drafts:
    """The runs of tokens in the prediction, prompt and output of a request, and where its output copies from."""

    def __init__(self, prompt_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """*prediction*: what the client expects as output."""
        before = [SEPARATOR] * (LENGTHS[-1] - 1)  # so that every token ends a run of each length
        self._ids = array("i", (*before, *prediction, SEPARATOR, *prompt_ids))
        self._end_of_prediction = len(before) + len(prediction)
        self._offset = len(self._ids) - len(prompt_ids)
        """Place of the prompt's first token in `_ids`."""
        self._index()
        self._source = len(before) if prediction else self._found()
        """Place in `_ids` of what should come next; -1: unknown."""
        self._num_copied = SURE
        """Number of tokens that were those of the source, since it was found."""
        self._num_lost = SURE
        """Number of tokens since a source was known."""

    def follow(self, token_ids: Sequence[int], most: int | None = None) -> bool:
        """Take in tokens of *token_ids*, prompt and output, that are new since the last call: the first *most* of them.

        Return whether these were all.
        """
        first = len(self._ids) - self._offset
        for token in token_ids[first : None if most is None else first + most]:
            self._push(token)
        return len(self._ids) - self._offset == len(token_ids)

    @property
    def is_lost(self) -> bool:
        """Whether the output has copied nothing for a while."""
        return self._num_lost >= SURE

    def propose(self, most: int) -> tuple[Sequence[int], bool]:
        """Return up to *most* tokens that may come next, and whether the client's prediction has them."""
        first = self._source
        if first < 0:
            return (), False
        if first < self._end_of_prediction:
            return self._ids[first : min(first + most, self._end_of_prediction)], True
        found = self._ids[first : first + most]
        while len(found) < most:  # the source is what came last, and what repeats itself goes on
            found += found[: most - len(found)]
        return found, False

    def _push(self, token: int) -> None:
        source, self._num_copied = self._source, self._num_copied + 1
        is_copied = source >= 0 and self._ids[source] == token
        self._ids.append(token)
        if len(self._ids) > self._most_indexed:
            self._index()
        else:
            end = len(self._ids) - 1
            for ends, slot in zip(self._ends, self._slots(end), strict=True):
                ends[slot] = end
        if is_copied:
            self._source = source + 1
        else:
            was_sure = source >= 0 and self._num_copied > SURE
            found = self._found()
            self._source = source + 1 if found < 0 and was_sure else found
            self._num_copied = 0
        if self._source == self._end_of_prediction:
            self._source = self._found()
        self._num_lost = 0 if self._source >= 0 else self._num_lost + 1

    def _index(self) -> None:
        """Index all runs anew, for up to twice as many tokens."""
        num_slots = FEWEST_SLOTS
        while num_slots < min(2 * len(self._ids), MOST_SLOTS):
            num_slots *= 2
        self._most_indexed = num_slots if num_slots < MOST_SLOTS else 2**62
        self._shift = 64 - num_slots.bit_length() + 1
        self._ends = tuple(array("i", bytes(4 * num_slots)) for _ in LENGTHS)
        """For runs of each length: the place behind the last run with the slot's hash; 0: there is none."""
        ids = np.frombuffer(self._ids, np.int32).astype(np.uint64)[:-1]  # nothing follows the runs with the last token
        for length, ends in zip(LENGTHS, self._ends, strict=True):
            hashes = np.zeros(max(len(ids) - length + 1, 0), np.uint64)
            for back, multiplier in enumerate(_MULTIPLIERS[:length]):
                first = length - 1 - back
                hashes += ids[first : first + len(hashes)] * np.uint64(multiplier)
            places = np.arange(length, length + len(hashes), dtype=np.int32)
            np.frombuffer(ends, np.int32)[hashes >> np.uint64(self._shift)] = places

    def _slots(self, end: int) -> tuple[int, int, int]:
        """Return the slots of the runs of 2, 3 and 4 tokens before the place *end*."""
        ids, shift = self._ids, self._shift
        one, two, three, four = _MULTIPLIERS
        of_two = ids[end - 1] * one + ids[end - 2] * two
        of_three = of_two + ids[end - 3] * three
        return (of_two & _WORD) >> shift, (of_three & _WORD) >> shift, (of_three + ids[end - 4] * four & _WORD) >> shift

    def _found(self) -> int:
        """Return the place behind the last earlier occurrence of the longest run with which all tokens end, or -1."""
        ids = self._ids
        slots = self._slots(len(ids))
        for length, ends, slot in zip(LENGTHS[::-1], self._ends[::-1], slots[::-1], strict=True):
            end = ends[slot]
            if end and ids[end] != SEPARATOR and ids[end - length : end] == ids[-length:]:
                return end
        return -1
