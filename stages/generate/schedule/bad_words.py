"""Which tokens would complete a forbidden sequence. The prompt does not count, as in vLLM's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """Sequences of tokens. A look-up compares only the sequences whose second last token was just made."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.reach = max((len(word) - 1 for word in words), default=0)
        """How many tokens of output, the last ones, a look-up needs."""
        self._always = tuple(word[0] for word in words if len(word) == 1)
        self._after: dict[int, list[tuple[int, ...]]] = {}
        """Second last token -> the sequences of two or more tokens that have it there."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(tuple(word))

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    def completed_by(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that complete a sequence after *output_ids*: the last `reach` tokens of the output."""
        if not output_ids:
            return self._always
        begun = [
            word for word in self._after.get(output_ids[-1], ()) if tuple(output_ids[1 - len(word) :]) == word[:-1]
        ]
        return self._always + tuple(word[-1] for word in begun)
