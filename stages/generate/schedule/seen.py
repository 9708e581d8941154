"""The tokens that a request has had, each once, for its penalties.

Each step counts only the tokens that are new, because hundreds of rows may have thousands of tokens each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class Seen:
    """The content of a request's list of tokens, up to some position."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._length = 0
        """Number of tokens of the list that are counted."""
        self._places: dict[int, int] = {}
        """Token -> its index in `output_ids`."""
        self.prompt_ids = array("i")
        """The distinct tokens of the prompt, in rising order: their logits are then read in the order of memory."""
        self.output_ids = array("i")
        """The distinct tokens of the output. The prompt may have them, too."""
        self.counts = array("f")
        """Number of times that the output has each of `output_ids`: float32, as the logits, and exact below 2**24."""

    def follow(self, token_ids: Sequence[int], length: int) -> Seen:
        """Count the first *length* of *token_ids*, prompt and output, and return this record.

        Tokens that were counted must still be the same. If *length* is smaller than before, the output is counted anew.
        A token below 0 is not a token (NOT_A_NUMBER): its request has left.
        """
        if length < self._length:
            self._places, self.output_ids, self.counts = {}, array("i"), array("f")
            self._length = self._prompt_length
        elif self._length < self._prompt_length:
            self.prompt_ids = array("i", sorted(set(token_ids[: self._prompt_length])))
            self._length = self._prompt_length
        for token in token_ids[self._length : length]:
            place = self._places.get(token)
            if place is not None:
                self.counts[place] += 1
            elif token >= 0:
                self._places[token] = len(self.output_ids)
                self.output_ids.append(token)
                self.counts.append(1)
        self._length = length
        return self

    def ahead(self, token_ids: Sequence[int], length: int) -> Seen:
        """Return another record, with the first *length* of *token_ids*: this one has counted all but the last few."""
        other = Seen(self._prompt_length)
        other._length, other._places = self._length, dict(self._places)
        other.prompt_ids, other.output_ids, other.counts = self.prompt_ids, self.output_ids[:], self.counts[:]
        return other.follow(token_ids, length)
