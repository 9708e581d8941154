"""The requests of a benchmark: conversations made of pieces with a number of tokens each.

The same seed gives the same pieces, and the same piece the same text; requests with common first pieces share a prefix.
A piece becomes words only when it is sent: traces are long, and the tokens per word depend on the server's tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field, ValidationError

from pipeline.errors import ConfigError
from pipeline.flags import flag

_VOCABULARY: Final = (
    "able back ball bank base bird blue boat body book call city cold corn dark deep door down duty east edge face "
    "fact farm fast feet film fire fish five food foot form four free full game girl gold good hair half hall hand "
    "hard head help high hold home hope hour idea iron keep king lake land last late left life line list"
)
WORDS: Final = tuple(_VOCABULARY.split())
"""64 words of four letters: each is one token behind a space in every large vocabulary. Where letters are tokens, all
words have equally many."""


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers from *lowest* to *highest*, both included."""

    lowest: int
    highest: int

    def draw(self, generator: random.Random) -> int:
        """Return one of them."""
        return generator.randint(self.lowest, self.highest)

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest}-{self.highest}"


def span(text: str) -> Span:
    """Parse `MIN-MAX`, or one number that is both."""
    lowest, dash, highest = text.partition("-")
    numbers = [lowest, highest if dash else lowest]
    if all(number.isdecimal() for number in numbers) and 1 <= int(numbers[0]) <= int(numbers[1]):
        return Span(int(numbers[0]), int(numbers[1]))
    raise argparse.ArgumentTypeError(f"{text!r}: must be MIN-MAX with 1 <= MIN <= MAX, or one number")


def length_flag(name: str, what: str) -> Any:
    """Declare a field that a flag fills with a Span of tokens."""
    return flag(name, default=Span(32, 256), parse=span, help=f"tokens per {what}, MIN-MAX")


@dataclass(frozen=True, slots=True)
class Piece:
    """A text of about *num_tokens* tokens. A piece begins like every longer piece of the same name."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message, and the length of its answer."""

    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of this message alone."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation. Each is sent after the answer before it, together with all earlier messages."""

    turns: tuple[Turn, ...]
    due_s: float = 0.0
    """When its first turn is sent, from the start of the run; unused with a fixed concurrency."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Turns pieces into words, for a tokenizer with a known number of tokens per word."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    """Tokens of a turn beside its words: the chat template's."""

    def write(self, turn: Turn) -> str:
        """Return the text of *turn*."""
        last = len(turn.pieces) - 1
        return " ".join(
            _words(piece.name, self._num_words(piece.num_tokens - (self.overhead_tokens if place == last else 0)))
            for place, piece in enumerate(turn.pieces)
        )

    def _num_words(self, num_tokens: float) -> int:
        return max(1, round(num_tokens / self.tokens_per_word))


def _words(name: str, count: int) -> str:
    """Return *count* words. A shorter digest is the start of a longer one. Seeding a generator is much slower."""
    digest = hashlib.shake_128(name.encode()).digest(count)
    return " ".join([WORDS[byte % len(WORDS)] for byte in digest])


def drawn(count: int, seed: int, inputs: Span, outputs: Span) -> list[Session]:
    """Return *count* prompts that share nothing."""
    generator = random.Random(seed)
    return [_single(f"{seed}/{index}", (), generator, inputs, outputs) for index in range(count)]


def shared_prefix(
    count: int, seed: int, inputs: Span, outputs: Span, *, groups: int, prefix_tokens: int
) -> list[Session]:
    """Return *count* prompts in *groups* of about equal size with a common prefix each, in random order."""
    generator = random.Random(seed)
    members = [index % groups for index in range(count)]
    generator.shuffle(members)
    prefixes = [Piece(f"{seed}/group {group}", prefix_tokens) for group in range(groups)]
    return [
        _single(f"{seed}/{index}", (prefixes[group],), generator, inputs, outputs)
        for index, group in enumerate(members)
    ]


def _single(name: str, before: tuple[Piece, ...], generator: random.Random, inputs: Span, outputs: Span) -> Session:
    piece = Piece(name, inputs.draw(generator))
    return Session((Turn((*before, piece), outputs.draw(generator)),))


def multi_turn(count: int, seed: int, inputs: Span, outputs: Span, *, turns: int) -> list[Session]:
    """Return conversations of *turns* turns, *count* requests in all; the last one may be shorter."""
    generator = random.Random(seed)
    single = [_single(f"{seed}/{index}", (), generator, inputs, outputs).turns[0] for index in range(count)]
    return [Session(tuple(single[start : start + turns])) for start in range(0, count, turns)]


def poisson(sessions: Sequence[Session], rate: float, seed: int) -> list[Session]:
    """Return *sessions* with random due times: *rate* per second on average, with exponential gaps."""
    generator = random.Random(f"arrivals {seed}")
    due_s, due = 0.0, []
    for session in sessions:
        due.append(dataclasses.replace(session, due_s=due_s))
        due_s += generator.expovariate(rate)
    return due


class MooncakeRow(BaseModel, strict=True):
    """A line of a Mooncake trace. Equal ids in `hash_ids`, one for each block of 512 tokens, mean equal text."""

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    """Milliseconds."""
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=0)
    hash_ids: list[int | str]


class QwenRow(MooncakeRow):
    """A line of a Qwen-Bailian trace: timestamps are seconds, blocks have 16 tokens.

    A later turn repeats the ids of the turn before, so it is sent at its time like any other line.
    """

    chat_id: int
    parent_chat_id: int = Field(ge=-1)
    type: str
    turn: int = Field(ge=0)


TRACES: Final[Mapping[str, tuple[int, float, type[MooncakeRow]]]] = {
    "mooncake": (512, 0.001, MooncakeRow),
    "qwen": (16, 1.0, QwenRow),
}
"""Tokens of a block, seconds of a unit of time, and the form of a line."""


def trace(name: str, path: Path, scale: float) -> list[Session]:
    """Return the requests of a JSONL file, earliest first; their times are multiplied by *scale*.

    Raises:
        ConfigError: The file cannot be read, or a line is wrong.
    """
    block, unit_s, kind = TRACES[name]
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; pass a file with one JSON object per line") from None
    rows = [(n, _row(f"{path}, line {n}", line, kind)) for n, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: no request is in it; pass a trace with one JSON object per line")
    start = min(row.timestamp for _, row in rows)
    sessions = [
        Session(
            (Turn(tuple(_blocks(number, row, block)), max(row.output_length, 1)),),  # every server writes something
            (row.timestamp - start) * unit_s * scale,
        )
        for number, row in rows
    ]
    return sorted(sessions, key=lambda session: session.due_s)


def _row(place: str, line: bytes, kind: type[MooncakeRow]) -> MooncakeRow:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        wrong = error.errors()[0]
    what = f"{wrong['loc'][0]} of {wrong['input']!s:.60}: " if wrong["loc"] else ""
    raise ConfigError(f"{place}: {what}{wrong['msg']}; does the trace have the form that --dataset names?")


def _blocks(number: int, row: MooncakeRow, block: int) -> Iterable[Piece]:
    """Yield the pieces of a prompt: its blocks, the last one cut. A rest without an id is text of its own."""
    left = row.input_length
    for name in row.hash_ids:
        if left <= 0:
            return
        yield Piece(f"block {name}", min(block, left))
        left -= block
    if left > 0:
        yield Piece(f"line {number}", left)
