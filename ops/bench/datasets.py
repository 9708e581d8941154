"""What is asked: conversations as pieces of so many tokens. The same seed gives the same pieces, the same piece gives
the same text, and what shares pieces shares a prefix. Knows nothing of HTTP, nor of time but when a request is due.

A piece becomes words when it is sent: traces are long, and how many tokens a word is depends on the server's tokenizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from pipeline.errors import ConfigError

_VOCABULARY: Final = (
    "able back ball bank base bird blue boat body book call city cold corn dark deep door down duty east edge face "
    "fact farm fast feet film fire fish five food foot form four free full game girl gold good hair half hall hand "
    "hard head help high hold home hope hour idea iron keep king lake land last late left life line list"
)
WORDS: Final = tuple(_VOCABULARY.split())
"""64 words of four letters: with the blank before it each is one token in every large vocabulary, and where letters are
tokens all have as many."""
MOONCAKE_BLOCK: Final = 512
QWEN_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from *lowest* to *highest*, both included."""

    lowest: int
    highest: int

    def draw(self, generator: random.Random) -> int:
        """Return one of them."""
        return generator.randint(self.lowest, self.highest)

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest}-{self.highest}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A text of about *num_tokens* tokens; of two pieces with one name the shorter is the start of the longer."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer should be."""

    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of what is said in this turn alone."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation: each is sent with all that came before it, once the answer before it is there."""

    turns: tuple[Turn, ...]
    due_s: float = 0.0
    """When its first turn is sent, from the start of the run; of no meaning under a fixed concurrency."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Turns pieces into words, for a tokenizer of which is known how many tokens it makes of a word."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    """What a turn costs beside its words: the chat template's."""

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
    """Return *count* words. Less digest is the start of more, and this is much faster than seeding a generator."""
    digest = hashlib.shake_128(name.encode()).digest(count)
    return " ".join([WORDS[byte % len(WORDS)] for byte in digest])


def drawn(count: int, seed: int, inputs: Span, outputs: Span) -> list[Session]:
    """Return *count* prompts that share nothing."""
    generator = random.Random(seed)
    return [_single(f"{seed}/{index}", (), generator, inputs, outputs) for index in range(count)]


def shared_prefix(
    count: int, seed: int, inputs: Span, outputs: Span, *, groups: int, prefix_tokens: int
) -> list[Session]:
    """Return *count* prompts in *groups* of equal size, give or take one, that begin alike; their order is drawn."""
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
    """Return conversations of *turns* turns, *count* requests in all; the last one is shorter where it must be."""
    generator = random.Random(seed)
    sessions = []
    for start in range(0, count, turns):
        sessions.append(
            Session(
                tuple(
                    Turn((Piece(f"{seed}/{index}", inputs.draw(generator)),), outputs.draw(generator))
                    for index in range(start, min(start + turns, count))
                )
            )
        )
    return sessions


def poisson(sessions: Sequence[Session], rate: float, seed: int) -> list[Session]:
    """Return *sessions*, due one after another with exponential gaps: *rate* a second on average."""
    generator = random.Random(f"arrivals {seed}")
    due_s, due = 0.0, []
    for session in sessions:
        due.append(dataclasses.replace(session, due_s=due_s))
        due_s += generator.expovariate(rate)
    return due


def mooncake_trace(path: Path, scale: float) -> list[Session]:
    """Return the requests of a Mooncake trace, their times multiplied by *scale*.

    A line has timestamp (ms), input_length, output_length and hash_ids, one for each block of 512 tokens; equal ids are
    equal text.

    Raises:
        ConfigError: The file cannot be read, or a line of it is not of that form.
    """
    return _trace(path, MOONCAKE_BLOCK, scale / 1000)


def qwen_trace(path: Path, scale: float) -> list[Session]:
    """Return the requests of a Qwen-Bailian trace, their times multiplied by *scale*.

    A line has chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn and hash_ids, one for
    each block of 16 tokens. A later turn repeats the ids of the turn before, so it is sent at its time as any other.

    Raises:
        ConfigError: The file cannot be read, or a line of it is not of that form.
    """
    checks = {"chat_id": _whole(-(2**63)), "parent_chat_id": _whole(-1), "type": _text, "turn": _whole(0)}
    return _trace(path, QWEN_BLOCK, scale, checks)


Check = Callable[[Any], str]
"""Says what a value must be; nothing where it is that."""


def _whole(lowest: int) -> Check:
    def check(value: Any) -> str:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
        return "" if fits else f"must be a whole number of at least {lowest}"

    return check


def _time(value: Any) -> str:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return "" if fits else "must be a number of at least 0"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "must be a text"


def _hashes(value: Any) -> str:
    fits = isinstance(value, list) and all(isinstance(one, int | str) and not isinstance(one, bool) for one in value)
    return "" if fits else "must be a list of block ids"


COMMON: Final[Mapping[str, Check]] = {
    "timestamp": _time,
    "input_length": _whole(1),
    "output_length": _whole(0),
    "hash_ids": _hashes,
}


def _trace(path: Path, block: int, unit_s: float, checks: Mapping[str, Check] | None = None) -> list[Session]:
    """Return the requests of a JSONL file, earliest first; a timestamp is *unit_s* seconds."""
    rows = list(_rows(path, {**COMMON, **(checks or {})}))
    if not rows:
        raise ConfigError(f"{path}: no request is in it; pass a trace in JSON, one request a line")
    start = min(row["timestamp"] for _, row in rows)
    sessions = [
        Session(
            (Turn(tuple(_blocks(number, row, block)), max(row["output_length"], 1)),),  # no server writes nothing
            (row["timestamp"] - start) * unit_s,
        )
        for number, row in rows
    ]
    return sorted(sessions, key=lambda session: session.due_s)


def _rows(path: Path, checks: Mapping[str, Check]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; pass a file in JSON, one request a line") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, _row(f"{path}, line {number}", line, checks)


def _row(place: str, line: bytes, checks: Mapping[str, Check]) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON ({error}); mend or remove the line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: {_shown(row)} is not a JSON object; mend or remove the line")
    for name, check in checks.items():
        if name not in row:
            raise ConfigError(f"{place}: {name} is missing; has the trace the form that --dataset names?")
        if wrong := check(row[name]):
            raise ConfigError(f"{place}: {name} is {_shown(row[name])}, {wrong}; mend or remove the line")
    return row


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}.."


def _blocks(number: int, row: Mapping[str, Any], block: int) -> Iterable[Piece]:
    """Yield the pieces of a prompt: its blocks, the last one cut; what no id is given for is text of its own."""
    left = row["input_length"]
    for name in row["hash_ids"]:
        if left <= 0:
            return
        yield Piece(f"block {name}", min(block, left))
        left -= block
    if left > 0:
        yield Piece(f"line {number}", left)
