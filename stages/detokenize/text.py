"""Turns token ids into text as they come. No character or special token is ever split, and no text is shown that a stop
string may still remove. Knows one request at a time, and nothing of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from stages.detokenize.token_text import TokenText

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text; bytes that are not UTF-8 become U+FFFD."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The functions from the tokens of a model to text."""

    plain: Decode
    """Without special tokens."""
    special: Decode
    """With them."""
    piece: TokenText
    """Of a single token."""
    special_ids: frozenset[int] = frozenset()
    """The special tokens."""

    def keeping(self, kept: Collection[int]) -> Decode:
        """Return the function without special tokens, but with those that are *kept*."""
        dropped = self.special_ids.difference(kept)
        return lambda token_ids: self.special([token for token in token_ids if token not in dropped])


PROMPT_TAIL = 5
"""At least this many prompt tokens are decoded with the first output token: some tokenizers write a space only between
tokens."""
LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character (RFC 3629), so also the most tokens of one."""
REPLACEMENT = "\ufffd"


class IncrementalText:
    """The text of one growing list of tokens. The sum of all deltas and the tail is the text of all tokens at once.

    The text of a token depends on the tokens before it, so the tokens since the last but one whole character are kept.
    The kept tokens always have some text once there was any, because some decoders remove a space at the beginning.

    | from | to | |
    |---|---|---|
    | 0 | whole | shown; ended on a whole character |
    | whole | shown | shown as bytes that are not a character |
    | shown | end | held back: may still become a character |
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-(PROMPT_TAIL + LONGEST_CHARACTER - 1) :])
        while len(self._ids) > PROMPT_TAIL and decode(self._ids).startswith(REPLACEMENT):
            del self._ids[0]  # the end of a character: with byte pieces a decoder would spoil the next one
        self._whole = self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """Return the text that is certain with *token*: empty while a character is incomplete."""
        self._ids.append(token)
        text = self._text(len(self._ids))
        if not text.endswith(REPLACEMENT):
            return self._show_all(text)
        held = [held for held in self._ids[self._shown :] if self._decode([held])]  # a special token has no text
        if len(held) < LONGEST_CHARACTER:
            return ""
        # These are more tokens than one character needs, so the oldest is not part of one that can still be completed.
        # If the oldest ends inside a character, the whole text has that character by now.
        before = self._text(self._shown)
        self._shown += 1
        return text[len(before) : len(self._text(self._shown))]

    @property
    def holds(self) -> bool:
        """Whether tokens are held back because they may become a character."""
        return self._shown < len(self._ids)

    def flush(self) -> str:
        """Return the text that is held back, complete or not."""
        return self._show_all(self._text(len(self._ids)))

    def _text(self, end: int) -> str:
        return self._decode(self._ids[:end])

    def _show_all(self, text: str) -> str:
        before = self._text(self._shown)
        delta = text[len(before) :]
        if delta:
            del self._ids[: self._whole]
            self._whole = len(self._ids)
        elif text and text == before:
            del self._ids[self._shown :]  # special tokens: many in a row must not pile up
        self._shown = len(self._ids)
        return delta


class StopStrings:
    """Cuts a text at the first stop string, even if the stop string is spread over several deltas."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With *include* the stop string is part of the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.met = ""
        """The stop string at which the text was cut."""

    def push(self, delta: str, *, armed: bool = True) -> tuple[str, bool]:
        """Return the text to show, and whether a stop string was met. Unless *armed*, stop strings are text."""
        if not self._stops:
            return delta, False
        text = self._held + delta
        if armed:
            met = [(place, len(stop), stop) for stop in self._stops if (place := text.find(stop)) >= 0]
            if met:
                place, length, self.met = min(met)
                self._held = ""
                return text[: place + length * self._include], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    @property
    def holds(self) -> bool:
        """Whether text is held back because a stop string may have begun there."""
        return bool(self._held)

    def flush(self) -> str:
        """Return the text that was held back because a stop string might have begun there."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of *text* that is a beginning of *stop*, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
