"""Probabilities of tokens, and what clients get of them and of their prompt: values in events.

A prompt can have a million pairs of token and log-probability. `Scores`, `Logprobs`, events and the log hold them in
arrays: 12 bytes for each pair, where an object takes 500.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar, overload

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pipeline.sampling import Value


class Score(Value):
    """The probability of a token by the model's own logits: before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of the probability."""
    top: tuple[tuple[int, float], ...] = ()
    """Most probable tokens and their log-probabilities, the most probable one first."""


class TokenText(Value):
    """A token for clients."""

    token: int
    text: str
    """Text of the token. If its bytes are not UTF-8: `bytes:` and each byte as `\\x..`, as OpenAI writes it."""


class TopLogprob(TokenText):
    """A token and its log-probability in one place."""

    logprob: float


class Logprob(TopLogprob):
    """A token of the prompt or the answer, and the most probable tokens in its place."""

    top: tuple[TopLogprob, ...] = ()


class Pair(NamedTuple):
    """The content of a TopLogprob, or of a TokenText, which has no log-probability."""

    token: int
    text: str
    logprob: float | None


Row = tuple[Pair, list[Pair]]
"""The content of a Logprob: a token, and the most probable ones in its place."""

S = TypeVar("S", Score, Logprob)


N = TypeVar("N", int, float)

DECODED_AT_ONCE: Final = 3 << 10


class _Encoded(Sequence[N]):
    """Numbers in an event's base64. Reading one decodes it and some after it: a million pairs at a time would stop an
    event loop for 40 ms."""

    def __init__(self, kind: str, text: str) -> None:
        self._kind, self._text = kind, text
        self._num_bytes = array(kind).itemsize
        self._len = (len(text) // 4 * 3 - text[-2:].count("=")) // self._num_bytes
        self._first = 0
        self._decoded: array[N] = array(kind)

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, at: int) -> N: ...
    @overload
    def __getitem__(self, at: slice) -> array[N]: ...
    def __getitem__(self, at: int | slice) -> N | array[N]:
        if isinstance(at, slice):
            first, end, _ = at.indices(self._len)
        else:
            first, end = at, at + 1
        if not self._first <= first <= end <= self._first + len(self._decoded):
            self._decode(first, end)
        first, end = first - self._first, end - self._first
        if isinstance(at, slice):
            return self._decoded[first:end]
        return self._decoded[first]

    def _decode(self, first: int, end: int) -> None:
        """Decode from *first* to *end*, and some after that. Three numbers are whole groups of four characters."""
        first -= first % 3
        end = max(end + -end % 3, first + DECODED_AT_ONCE)
        characters = self._text[first * self._num_bytes // 3 * 4 : end * self._num_bytes // 3 * 4]
        self._first, self._decoded = first, _decoded(self._kind, characters)

    @property
    def base64(self) -> str:
        return self._text


def _decoded(kind: str, text: str) -> array[Any]:
    numbers = array(kind)
    numbers.frombytes(b64decode(text, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _encoded(numbers: array[int] | array[float] | _Encoded[int] | _Encoded[float]) -> str:
    if isinstance(numbers, _Encoded):
        return numbers.base64
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return b64encode(numbers).decode()


class _Packed(Sequence[S], Generic[S]):
    """Scores in arrays. Scores of one place are next to each other: the token itself, then the most probable ones."""

    item: ClassVar[type[Value]]

    def __init__(self, items: Iterable[S] = ()) -> None:
        self._ends = array("i")
        """Ends of the pairs of each place."""
        self._tokens: array[int] | _Encoded[int] = array("i")
        self._logprobs: array[float] | _Encoded[float] = array("d")
        self._texts: dict[int, str] = {}
        self.extend(items)

    @abstractmethod
    def extend(self, items: Iterable[S]) -> None:
        """Append scores. Only the creator of these scores may do that."""

    @abstractmethod
    def _at(self, first: int, end: int) -> S:
        """Return the score with the pairs from *first* to *end*."""

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a token and its log-probability."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> list[S]: ...
    def __getitem__(self, index: int | slice) -> S | list[S]:
        if isinstance(index, slice):
            return [self._at(*self._span(place)) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._at(*self._span(index % len(self)))

    def __iter__(self) -> Iterator[S]:
        first = 0
        for end in self._ends:
            yield self._at(first, end)
            first = end

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            other = type(self)(other)
        return type(other) is type(self) and self._parts == other._parts

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    @property
    def _parts(self) -> tuple[object, ...]:
        return self._ends, self._tokens[:], self._logprobs[:], self._texts

    def _arrays(self) -> tuple[array[int], array[float]]:
        """Return the tokens and log-probabilities as arrays that can grow."""
        if isinstance(self._tokens, _Encoded):
            self._tokens = self._tokens[:]
        if isinstance(self._logprobs, _Encoded):
            self._logprobs = self._logprobs[:]
        return self._tokens, self._logprobs

    def _span(self, place: int) -> tuple[int, int]:
        return self._ends[place - 1] if place else 0, self._ends[place]

    # in events

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[object], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._of, serialization=core_schema.plain_serializer_function_ser_schema(cls._plain)
        )

    @classmethod
    def _of(cls, said: object) -> _Packed[S]:
        """Return the scores of an event. Raise ValueError. Older events have a list of objects."""
        if isinstance(said, cls):
            return said
        try:
            if not isinstance(said, Mapping):
                return cls([cls.item.model_validate(each, extra="ignore") for each in said])  # type: ignore
            return cls._unpacked(said)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"these are no scores: {error!r}") from error

    @classmethod
    def _unpacked(cls, said: Mapping[str, Any]) -> _Packed[S]:
        packed = cls()
        ends, tokens, logprobs = said["ends"], said["tokens"], said["logprobs"]
        if not (isinstance(tokens, str) and isinstance(logprobs, str)):
            raise TypeError("their tokens and logprobs are not in base64")
        packed._ends = _decoded("i", ends)
        packed._tokens, packed._logprobs = _Encoded("i", tokens), _Encoded("d", logprobs)
        packed._texts = {int(token): str(text) for token, text in said.get("texts", {}).items()}
        lengths = {len(packed._tokens), len(packed._logprobs), packed._ends[-1] if packed._ends else 0}
        begin = 0
        for end in packed._ends:
            if end <= begin:
                raise ValueError("scores of a place end before they begin")
            begin = end
        if len(lengths) > 1:
            raise ValueError(f"scores have parts of different lengths: {sorted(lengths)}")
        return packed

    def _plain(self) -> dict[str, Any] | list[S]:
        if not self:
            return []
        parts = (("ends", self._ends), ("tokens", self._tokens), ("logprobs", self._logprobs))
        plain: dict[str, Any] = {name: _encoded(numbers) for name, numbers in parts}
        return plain | ({"texts": {str(token): text for token, text in self._texts.items()}} if self._texts else {})


class Scores(_Packed[Score]):
    """Scores of an engine. They do not name their tokens: the tokens of a prompt are known."""

    item = Score

    def extend(self, items: Iterable[Score]) -> None:
        tokens, logprobs = self._arrays()
        for score in items:
            tokens.append(0)
            logprobs.append(score.logprob)
            for token, logprob in score.top:
                tokens.append(token)
                logprobs.append(logprob)
            self._ends.append(len(tokens))

    def _at(self, first: int, end: int) -> Score:
        return Score(
            logprob=self._logprobs[first],
            top=tuple(zip(self._tokens[first + 1 : end], self._logprobs[first + 1 : end], strict=True)),
        )

    def with_texts(self, token_ids: Sequence[int], text_of: Callable[[int], str]) -> Logprobs:
        """Return the scores of *token_ids*, with the texts of all tokens."""
        found = Logprobs()
        found._ends = self._ends[: len(token_ids)]
        num_pairs = found._ends[-1] if found._ends else 0
        tokens, found._logprobs = self._tokens[:num_pairs], self._logprobs[:num_pairs]
        first = 0
        for token, end in zip(token_ids, found._ends, strict=False):
            tokens[first] = token
            first = end
        found._tokens = tokens
        found._texts = {token: text_of(token) for token in sorted(set(tokens))}
        return found


class Logprobs(_Packed[Logprob]):
    """Scores for a client. A token has one text, wherever it is."""

    item = Logprob

    def extend(self, items: Iterable[Logprob]) -> None:
        tokens, logprobs = self._arrays()
        for score in items:
            for each in (score, *score.top):
                tokens.append(each.token)
                logprobs.append(each.logprob)
                self._texts[each.token] = each.text
            self._ends.append(len(tokens))

    def _at(self, first: int, end: int) -> Logprob:
        one, *top = (
            TopLogprob(token=token, text=self._texts.get(token, ""), logprob=logprob)
            for token, logprob in zip(self._tokens[first:end], self._logprobs[first:end], strict=True)
        )
        return Logprob(token=one.token, text=one.text, logprob=one.logprob, top=tuple(top))

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Yield the contents from place *start* on, faster than as Logprob."""
        first = self._ends[start - 1] if 0 < start <= len(self) else 0
        for end in self._ends[start:]:
            yield self._row(first, end)
            first = end

    def tokens(self, start: int = 0) -> Iterator[Pair]:
        """Yield the tokens themselves from place *start* on."""
        first = self._ends[start - 1] if 0 < start <= len(self) else 0
        for end in self._ends[start:]:
            token = self._tokens[first]
            yield Pair(token, self._texts.get(token, ""), self._logprobs[first])
            first = end

    def _row(self, first: int, end: int) -> Row:
        texts = self._texts
        pairs = [
            Pair(token, texts.get(token, ""), logprob)
            for token, logprob in zip(self._tokens[first:end], self._logprobs[first:end], strict=True)
        ]
        return pairs[0], pairs[1:]


class PromptInfo(Value):
    """Facts about its prompt that a client asked for."""

    num_tokens: int
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """Token ids, if it asked for them."""
    text: str = ""
    """Text of the prompt, if it asked for that before the answer (`echo`)."""
    scores: Logprobs = Logprobs()
    """Scores of all tokens but the first, if it asked for them."""
    first: TokenText | None = None
    """First token, which has no score, if the others have one."""
