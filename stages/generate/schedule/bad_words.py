"""Which tokens would complete a forbidden sequence. The prompt does not count, as in vLLM's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """Sequences of tokens. A look-up compares only the sequences whose second last token was just made."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = tuple(word[0] for word in words if len(word) == 1)
        self._after: dict[int, list[tuple[int, ...]]] = {}
        """Second last token -> the sequences of two or more tokens that have it there."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(tuple(word))

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    def completed_by(self, token_ids: Sequence[int], num_output: int) -> tuple[int, ...]:
        """Return the tokens that complete a sequence after *token_ids*, of which the last *num_output* are output."""
        begun = [
            word
            for word in self._after.get(token_ids[-1], ())
            if len(word) - 1 <= num_output and tuple(token_ids[1 - len(word) :]) == word[:-1]
        ]
        return self._always + tuple(word[-1] for word in begun)
