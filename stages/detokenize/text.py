"""Turns token ids into text as they come. No character or special token is ever split, and no text is shown that a stop
string may still remove. Knows one request at a time, and not the log.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from pipeline.spelling import Spelling, steps_of, text_of

TokenText = Callable[[int], str]
"""Token id -> its text, as `pipeline.spelling.text_of` returns it."""


def token_text_of(tokenizer: Tokenizer) -> TokenText:
    """Return the function from token to text of *tokenizer*. An unknown token has an empty text."""
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    spelling = Spelling.of(_decoder_of(tokenizer))

    @functools.lru_cache(maxsize=65_536)
    def piece(token_id: int) -> str:
        written = tokenizer.id_to_token(token_id)
        if written is None or token_id in added:
            return added.get(token_id, "")
        return text_of(spelling.bytes_of(written))

    return piece


CONTEXT_FREE = (["ByteLevel"], ["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
"""Decoders in which most tokens have the same text everywhere but at the beginning: of Qwen, of Gemma, of Llama 2."""


def fixed_text_of(tokenizer: Tokenizer) -> TokenText:
    """Return the function from a token to its text, if that is the same after any other text; else to an empty text."""
    steps = list(steps_of(_decoder_of(tokenizer)))
    if [step.get("type") for step in steps] not in CONTEXT_FREE or any(step.get("stop") for step in steps):
        return no_text

    @functools.lru_cache(maxsize=65_536)
    def fixed(token_id: int) -> str:
        once, twice = tokenizer.decode([token_id]), tokenizer.decode([token_id] * 2)
        is_byte = str(tokenizer.id_to_token(token_id)).startswith("<0x")  # one wrong byte beside it would spoil it
        return "" if is_byte or REPLACEMENT in twice else twice[len(once) :]

    return fixed


def no_text(_: int) -> str:
    """Return no text: for a decoder with which a token's text depends on those before it."""
    return ""


def _decoder_of(tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Return the `decoder` of tokenizer.json."""
    return {} if tokenizer.decoder is None else dict(orjson.loads(tokenizer.decoder.__getstate__()))


Decode = Callable[[Sequence[int]], str]
"""Token ids -> text; bytes that are not UTF-8 become U+FFFD."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The functions from the tokens of a model to text."""

    plain: Decode
    """Decoder without special tokens."""
    special: Decode
    """Decoder with special tokens."""
    piece: TokenText
    """Text of a single token."""
    special_ids: frozenset[int] = frozenset()
    """Ids of the special tokens."""
    fixed: TokenText = no_text
    """Text of a token that is the same after any other text; empty: the tokens before it must be decoded, too."""

    def keeping(self, kept: Collection[int]) -> Decode:
        """Return the function that drops special tokens, except those in *kept*."""
        dropped = self.special_ids.difference(kept)
        return lambda token_ids: self.special([token for token in token_ids if token not in dropped])


PROMPT_TAIL = 5
"""Fewest prompt tokens that are decoded with the first output token: some tokenizers write a space only between tokens.
"""
LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character (RFC 3629), so also the most tokens of one."""
BYTES_KEPT = 32
"""Number of the last tokens shown as bytes that are decoded with the next one."""
REPLACEMENT = "\ufffd"
_NOTHING = 2**32 - 1
"""No code point."""
_UNKNOWN = -1


class IncrementalText:
    """The text of one growing list of tokens. The sum of all deltas and the tail is the text of all tokens at once.

    The text of a token depends on the tokens before it, so the tokens since the last but one whole character are kept.
    The kept tokens always have some text once there was any, because some decoders remove a space at the beginning.

    | from | to | |
    |---|---|---|
    | 0 | whole | shown; ended on a whole character |
    | whole | shown | shown as bytes that are not a character |
    | shown | end | held back: may still become a character |

    No part grows with the text. Of tokens that are shown as bytes only the first ones are kept, because some decoders
    let one wrong byte spoil all bytes beside it, and the last ones, which the next character may follow.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], fixed: TokenText = no_text) -> None:
        """*fixed*: see Decoder. It is ten times as fast as *decode*, and most tokens need nothing else."""
        self._decode = decode
        self._fixed = fixed
        self._is_whole = False
        """Whether the last token had text and ended a character, so a fixed text may follow."""
        self._ids = list(prompt_ids[-(PROMPT_TAIL + LONGEST_CHARACTER - 1) :])
        while len(self._ids) > PROMPT_TAIL and decode(self._ids).startswith(REPLACEMENT):
            del self._ids[0]  # the end of a character: with byte pieces a decoder would spoil the next one
        self._whole = self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """Return the text that is certain with *token*: empty while a character is incomplete."""
        if self._is_whole and (fixed := self._fixed(token)):
            self._ids, self._whole, self._shown = [token], 1, 1
            return fixed
        self._is_whole = False
        self._ids.append(token)
        text = self._text(len(self._ids))
        if not text.endswith(REPLACEMENT):
            delta = self._show_all(text)
            self._is_whole = bool(delta)
            return delta
        if self._is_silent(token):
            del self._ids[-1]
            return ""
        if len(self._ids) - self._shown < LONGEST_CHARACTER:
            return ""
        # These are more tokens than one character needs, so the oldest is not part of one that can still be completed.
        # If the oldest ends inside a character, the whole text has that character by now.
        delta = text[len(self._text(self._shown)) : len(self._text(self._shown + 1))]
        if self._shown - self._whole < LONGEST_CHARACTER + BYTES_KEPT:
            self._shown += 1
        else:
            del self._ids[self._whole + LONGEST_CHARACTER]
        return delta

    @property
    def holds(self) -> bool:
        """Whether tokens are held back because they may become a character."""
        return self._shown < len(self._ids)

    def flush(self) -> str:
        """Return the text that is held back, complete or not."""
        return self._show_all(self._text(len(self._ids)))

    def _text(self, end: int) -> str:
        return self._decode(self._ids[:end])

    def _is_silent(self, token: int) -> bool:
        """Return whether *token* has no text anywhere, like a special token. A space has none only at a beginning."""
        return not self._decode([token] * 3)

    def _show_all(self, text: str) -> str:
        before = self._text(self._shown)
        delta = text[len(before) :]
        if delta:
            del self._ids[: self._whole]
            self._whole = len(self._ids)
        elif text == before and (text or (self._ids and self._is_silent(self._ids[-1]))):
            del self._ids[self._shown :]  # special tokens: many in a row must not pile up
        self._shown = len(self._ids)
        return delta


class StopAutomaton:
    """Follows all stop strings at once through a text, in amortised O(1) a character (Aho and Corasick 1975).

    A state is the longest end of the text that is a beginning of a stop string; 0 is the empty one. The states of one
    stop string follow each other, so only the places where two stop strings part are in a dictionary. All beginnings of
    64 stop strings of 1,024 characters take 800 KB. What a state ends with is computed when a text reaches it first:
    for all states it would take 0.1 s, and a text seldom gets far into a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.firsts = frozenset(stop[0] for stop in stops if stop)
        """First characters of the stop strings. A text without them leaves the state at 0."""
        self.depth = array("H", [0])
        """State -> its length in characters."""
        self.stop_length = array("H", [0])
        """State -> the length of the longest stop string that it ends with; 0: none."""
        self._next = array("I", [_NOTHING])
        """State -> the character that leads to the state with the next number."""
        self._parting: dict[tuple[int, int], int] = {}
        """(State, character) -> the state to which it leads, unless that has the next number."""
        self._shorter = array("i", [0])
        """State -> the longest shorter state that it ends with; _UNKNOWN until a text has reached it."""
        self._growing: dict[int, int] = {}
        """State that is the end of a stop string and cannot grow -> the longest shorter state that can."""
        for stop in stops:
            self._add(stop)
        self._part = {state for state, _ in self._parting}

    def after(self, state: int, character: int) -> int:
        """Return the state after one more *character*, a code point. A text must have reached *state*."""
        while True:
            child = self._child(state, character)
            if child is not None:
                if self._shorter[child] == _UNKNOWN:
                    self._link(state, child, character)
                return child
            if not state:
                return 0
            state = self._shorter[state]

    def held(self, state: int) -> int:
        """Return how many characters at the end of the text may still grow into a longer stop string."""
        return self.depth[self._growing.get(state, state)]

    def _child(self, state: int, character: int) -> int | None:
        return state + 1 if self._next[state] == character else self._parting.get((state, character))

    def _add(self, stop: str) -> None:
        state, place, characters = 0, 0, array("I", map(ord, stop))
        while place < len(stop) and (child := self._child(state, characters[place])) is not None:
            state, place = child, place + 1
        if place < len(stop):  # the rest follows in states of its own
            first, num = len(self.depth), len(stop) - place
            if first == state + 1:
                self._next[state] = characters[place]
            else:
                self._parting[state, characters[place]] = first
            self.depth.extend(range(place + 1, len(stop) + 1))
            self.stop_length.extend([0] * num)
            self._next.extend(characters[place + 1 :])
            self._next.append(_NOTHING)
            self._shorter.extend([_UNKNOWN] * num)
            state = first + num - 1
        self.stop_length[state] = len(stop)

    def _link(self, state: int, child: int, character: int) -> None:
        """Find what *child* ends with, to which *character* leads from *state*, and what that ends with, and so on."""
        found = []
        while self._shorter[child] == _UNKNOWN:
            found.append(child)
            shorter = None
            while state and shorter is None:
                state = self._shorter[state]
                shorter = self._child(state, character)
            self._shorter[child] = child = shorter or 0
        for child in reversed(found):  # the shorter ones first
            shorter = self._shorter[child]
            self.stop_length[child] = self.stop_length[child] or self.stop_length[shorter]
            if self._next[child] == _NOTHING and child not in self._part:
                self._growing[child] = self._growing.get(shorter, shorter)


class StopStrings:
    """Cuts a text at the first stop string, even if the stop string is spread over several deltas."""

    def __init__(self, stops: Sequence[str] | StopAutomaton, *, include: bool = False) -> None:
        """*include*: the stop string is part of the text."""
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include = include
        self._held = ""
        self._state = 0
        self._was_armed = True
        self.met = ""
        """Stop string at which the text was cut; empty: none yet."""

    def push(self, delta: str, *, armed: bool = True) -> tuple[str, bool]:
        """Return the text to show, and whether a stop string was met. Unless *armed*, stop strings are text.

        The stop string that begins first is met, and of several that begin there the shortest.
        """
        automaton = self._automaton
        if not self._state and automaton.firsts.isdisjoint(delta):
            return delta, False
        text, new, state = self._held + delta, delta, self._state
        if armed and not self._was_armed:
            new, state = text, 0  # what is held may have a stop string that did not count then
        self._was_armed = armed
        begin, length = len(text), 0  # of the stop string that was met
        for end, character in enumerate(map(ord, new), start=len(text) - len(new) + 1):
            state = automaton.after(state, character)
            if armed:
                found = automaton.stop_length[state]
                if found and end - found < begin:
                    begin, length = end - found, found
                if length and end - automaton.depth[state] >= begin:
                    break  # no stop string that begins before it can still end
        if length:
            self.flush()
            self.met = text[begin : begin + length]
            return text[: begin + length * self._include], True
        self._state = state
        shown = len(text) - automaton.held(state)
        self._held = text[shown:]
        return text[:shown], False

    def end(self, rest: str, stop: str) -> str:
        """Return the text to show for *rest*, which *stop* follows as a token without text."""
        shown, met = self.push(rest)
        if not met:
            shown += self.flush() + stop * self._include
            self.met = stop
        return shown

    @property
    def holds(self) -> bool:
        """Whether text is held back because a stop string may have begun there."""
        return bool(self._held)

    def flush(self) -> str:
        """Return the text that was held back because a stop string might have begun there."""
        held, self._held, self._state = self._held, "", 0
        return held
