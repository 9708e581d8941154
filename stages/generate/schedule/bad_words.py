"""Tokens that would complete a forbidden sequence. The prompt does not count, as in vLLM's `bad_words`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter


class BadWords:
    """Sequences of tokens. A look-up follows all of them at once, from the last token of the output backwards."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.reach = max((len(word) - 1 for word in words), default=0)
        """Number of tokens at the end of the output that a look-up needs."""
        sequences = sorted((tuple(word[-2::-1]), word[-1]) for word in words if word)
        self._before = [before for before, _ in sequences]
        """The tokens of each sequence before its last one, backwards. Sequences with the same end follow each other."""
        self._last = tuple(last for _, last in sequences)

    def __bool__(self) -> bool:
        return bool(self._last)

    def completed_by(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that complete a sequence after *output_ids*: the last `reach` tokens of the output."""
        found: tuple[int, ...] = ()
        before, first, end, depth = self._before, 0, len(self._before), 0
        while first < end:  # first .. end agree with the last *depth* tokens of the output, shortest first
            if len(before[first]) == depth:
                longer = bisect_right(before, depth, first, end, key=len)
                found, first = found + self._last[first:longer], longer
            if first == end or depth == len(output_ids):
                break
            token = output_ids[-1 - depth]
            if not before[first][depth] == before[end - 1][depth] == token:
                first = bisect_left(before, token, first, end, key=itemgetter(depth))
                end = bisect_right(before, token, first, end, key=itemgetter(depth))
            depth += 1
        return found
