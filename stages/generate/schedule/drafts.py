"""Drafts of a request's next tokens: what followed its last ones when they came before. A pure function of token ids.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), with an index instead of a search, and with
memory of where it copies from: as long as the output goes on like its source, the source goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

LENGTHS: Final = (4, 3, 2)
"""Lengths of the runs of tokens that are looked up, longest first."""
FEWEST_SLOTS: Final = 2**10
MOST_SLOTS: Final = 2**17
"""Bounds of the number of slots for runs of each length. Beyond that many tokens, new runs replace old ones."""
SURE: Final = 4
"""After this many tokens of a source, one that differs is taken as replaced: the source goes on behind it."""
SEPARATOR: Final = -1
"""Stands between a prediction and the prompt: no token."""

_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_WORD: Final = 2**64 - 1


class Drafts:
    """The runs of tokens in the prediction, prompt and output of a request, and where its output copies from."""

    def __init__(self, prompt_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """*prediction*: what the client expects as output."""
        self._ids = array("i", (*prediction, SEPARATOR, *prompt_ids) if prediction else prompt_ids)
        self._num_predicted = len(prediction)
        self._offset = len(self._ids) - len(prompt_ids)
        """Place of the prompt's first token in `_ids`."""
        self._index()
        self._source = 0 if prediction else self._found()
        """Place in `_ids` of what should come next; -1: unknown."""
        self._num_copied = SURE
        """Number of tokens that were those of the source, since it was found."""
        self._num_lost = SURE
        """Number of tokens since a source was known."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens of *token_ids*, prompt and output, that are new since the last call."""
        for token in token_ids[len(self._ids) - self._offset :]:
            self._push(token)

    @property
    def is_lost(self) -> bool:
        """Whether the output has copied nothing for a while."""
        return self._num_lost >= SURE

    def propose(self, most: int) -> tuple[Sequence[int], bool]:
        """Return up to *most* tokens that may come next, and whether the client's prediction has them."""
        first = self._source
        if first < 0:
            return (), False
        if first < self._num_predicted:
            return self._ids[first : min(first + most, self._num_predicted)], True
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
            self._insert(len(self._ids) - 1)
        if is_copied:
            self._source = source + 1
        else:
            was_sure = source >= 0 and self._num_copied > SURE
            found = self._found()
            self._source = source + 1 if found < 0 and was_sure else found
            self._num_copied = 0
        if self._source >= 0 and self._ids[self._source] == SEPARATOR:
            self._source = self._found()  # the prediction is over
        self._num_lost = 0 if self._source >= 0 else self._num_lost + 1

    def _index(self) -> None:
        """Index all runs anew, for up to twice as many tokens."""
        num_slots = FEWEST_SLOTS
        while num_slots < min(2 * len(self._ids), MOST_SLOTS):
            num_slots *= 2
        self._most_indexed = num_slots if num_slots < MOST_SLOTS else 2**62
        self._shift = 64 - num_slots.bit_length() + 1
        self._ends = {length: np.zeros(num_slots, np.int32) for length in LENGTHS}
        """For runs of each length: the place behind the last run with the slot's hash; 0: there is none."""
        ids = np.frombuffer(self._ids, np.int32)
        for length, ends in self._ends.items():
            if len(ids) > length:  # the last run of all is left out: nothing follows it
                hashes = np.zeros(len(ids) - length, np.uint64)
                for at in range(length):
                    hashes = (hashes + ids[at : at + len(hashes)].astype(np.uint64) + np.uint64(1)) * np.uint64(
                        _MULTIPLIER
                    )
                ends[hashes >> np.uint64(self._shift)] = np.arange(length, len(ids), dtype=np.int32)

    def _slot(self, end: int, length: int) -> int:
        """Return the slot of the run of *length* tokens before the place *end*."""
        number = 0
        for token in self._ids[end - length : end]:
            number = (number + token + 1) * _MULTIPLIER & _WORD
        return number >> self._shift

    def _insert(self, end: int) -> None:
        """Index the runs that end before the place *end*, where a token is now."""
        for length, ends in self._ends.items():
            if end >= length:
                ends[self._slot(end, length)] = end

    def _found(self) -> int:
        """Return the place behind the last earlier occurrence of the longest run with which all tokens end, or -1."""
        length_of_all = len(self._ids)
        for length, ends in self._ends.items():
            if length_of_all > length:
                end = int(ends[self._slot(length_of_all, length)])
                is_same = end and self._ids[end - length : end] == self._ids[-length:]
                if is_same and self._ids[end] != SEPARATOR:
                    return end
        return -1
