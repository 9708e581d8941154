"""The journal of an engine: its last steps, with the inputs of its schedule. How a step is written and read.

An entry has the id of its step, `<epoch>-<step>`. Its fields are those of StepCompleted, but for the rows:

| field | |
|---|---|
| `tokens` | the tokens of the rows that have one, in order |
| `rows` | `<n>:<uid>` of each; left out if they are those of the step before that go on, each with its next token |
| `ends`, `pieces` | index of a row -> its end; -> its prefill chunks, if there are any |
| `events` | the other rows |
| `bytes` | added by the commit: how many bytes were written to the journal so far |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import UndecodableEvent
from pipeline.events import Chunk, EventRow, FinishReason, StepCompleted, StepStats, TokenRow
from pipeline.log.protocol import Entry
from pipeline.names import base_uid, parse_id

OLD_NAMES: Final = {"released": "let_go", "inputs": "given"}
"""Fields of steps that an earlier version called otherwise."""
AS_IT_IS: Final = ("ms", "made_ms", "released", "figures", "inputs", "chunks", "schedule", *OLD_NAMES.values())
"""Fields of a step that are copied unchanged."""


class Row(NamedTuple):
    """A row with a token."""

    uid: str
    n: int
    token: int
    end: FinishReason | None
    chunks: int


@dataclass(frozen=True, slots=True)
class JournalStep:
    """A step in the journal."""

    epoch: int
    number: int
    ms: int
    """Time of its commit, by Redis' clock."""
    rows: tuple[Row, ...]
    """Rows with tokens, without log-probabilities."""
    events: tuple[EventRow, ...]
    released: tuple[str, ...]
    figures: StepStats
    inputs: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    schedule: str
    said_made_ms: int = 0
    """`made_ms` of StepCompleted."""

    @property
    def id(self) -> str:
        return f"{self.epoch}-{self.number}"

    @property
    def made_ms(self) -> int:
        """Time when it was computed, by Redis' clock; in older journals, when it was committed."""
        return min(self.said_made_ms or self.ms, self.ms)


class JournalWriter:
    """Writes the steps of one engine, in their order. It remembers the rows of the last one."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._following: tuple[list[str], list[int]] = ([], [])
        """Uids and numbers of the tokens that are expected in the next step."""

    def fields(self, entry: Entry, step: StepCompleted) -> dict[str, str]:
        """Return the journal's entry of *step*, which came as *entry*."""
        before, self._last = self._last, parse_id(entry.id)
        made = [row for row in step.rows if isinstance(row, TokenRow)]
        uids, numbers = [row.uid for row in made], [row.n for row in made]
        fields = {name: entry.fields[name] for name in AS_IT_IS if name in entry.fields}
        fields["tokens"] = ",".join([str(row.token) for row in made])
        if (uids, numbers) != self._following or self._last != (before[0], before[1] + 1) or step.schedule:
            fields["rows"] = " ".join([f"{n}:{uid}" for uid, n in zip(uids, numbers, strict=True)])
        ends = {str(at): row.end for at, row in enumerate(made) if row.end is not None}
        if ends:
            fields["ends"] = orjson.dumps(ends).decode()
        pieces = {str(at): row.chunks for at, row in enumerate(made) if row.chunks}
        if pieces:
            fields["pieces"] = orjson.dumps(pieces).decode()
        if len(made) < len(step.rows):
            others = [row.model_dump(mode="json") for row in step.rows if isinstance(row, EventRow)]
            fields["events"] = orjson.dumps(others).decode()
        following = _following(made)
        self._following = [*following], [*following.values()]
        return fields


class JournalReader:
    """Reads the steps of one engine, in their order. It remembers the rows of the last one."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._following = list[tuple[int, str]]()

    def steps(self, entries: Iterable[Entry]) -> Iterator[JournalStep]:
        """Yield the steps of the next *entries*, from the first one on whose rows are known.

        Raises:
            UndecodableEvent: An entry does not decode.
        """
        for entry in entries:
            before, self._last = self._last, parse_id(entry.id)
            try:
                rows = entry.fields.get("rows")
                if rows is None and self._last != (before[0], before[1] + 1):
                    self._last = (0, 0)
                    continue
                named = self._following if rows is None else [_named(text) for text in rows.split()]
                step = _step(self._last, entry.fields, named)
            except (ValidationError, orjson.JSONDecodeError, KeyError, ValueError) as error:
                raise UndecodableEvent(f"the entry {entry.id} of a journal does not decode: {error}") from error
            self._following = [(n, uid) for uid, n in _following(step.rows).items()]
            yield step


def _following(rows: Iterable[TokenRow | Row]) -> dict[str, int]:
    """Return uid -> number of its next token, for the requests that go on after a step with *rows*."""
    following: dict[str, int] = {}
    for row in rows:
        following[row.uid] = row.n + 1
        if row.end is not None:
            del following[row.uid]
    return following


def steps(entries: Iterable[Entry]) -> Iterator[JournalStep]:
    """Yield the steps of a journal, from the first one on whose rows are known.

    Raises:
        UndecodableEvent: An entry does not decode.
    """
    return JournalReader().steps(entries)


class Mentions:
    """Finds the entries of a journal that are about some requests, or whose requests are unknown. `has` must be called
    with all entries, in their order.
    """

    def __init__(self, bases: Collection[str], uids_in: Callable[[Iterable[str]], set[str]]) -> None:
        """*bases*: base uids of the requests; they begin with the time when the requests were made. *uids_in* finds
        base uids in texts.
        """
        self._made_ms = min((int(base[:12], 16) for base in bases if uids_in([base])), default=0)
        self._bases, self._uids_in = frozenset(bases), uids_in
        self._last = (0, 0)
        self._following: list[str] | None = None
        """Uids whose tokens are expected in the next step; None: unknown."""
        self._has_begun = False

    def has(self, entry: Entry) -> bool:
        before, self._last = self._last, parse_id(entry.id)
        if before == (0, 0):  # if the journal begins later, their steps may have been deleted, but not their pages
            self._has_begun = _moment(entry) >= self._made_ms
        follows = self._last == (before[0], before[1] + 1)
        rows = entry.fields.get("rows")
        uids = [row.partition(":")[2] for row in rows.split()] if rows is not None else None
        uids = self._following if uids is None and follows else uids
        try:
            ends = set(_loaded(entry.fields, "ends", default={}))
        except orjson.JSONDecodeError:
            uids = None
        ended = {uid for at, uid in enumerate(uids or ()) if str(at) in ends}
        self._following = None if uids is None else [uid for uid in dict.fromkeys(uids) if uid not in ended]
        told = self._uids_in(text for name, text in entry.fields.items() if name != "tokens")
        is_about = not self._bases.isdisjoint(told | {base_uid(uid) for uid in uids or ()})
        self._has_begun |= is_about
        return uids is None or is_about or (self._has_begun and "schedule" in entry.fields)


def outline(entry: Entry) -> JournalStep:
    """Return a step without its rows, from its entry alone.

    Raises:
        UndecodableEvent: The entry does not decode.
    """
    try:
        return _step(parse_id(entry.id), {**entry.fields, "tokens": ""}, [])
    except (ValidationError, orjson.JSONDecodeError, KeyError, ValueError) as error:
        raise UndecodableEvent(f"the entry {entry.id} of a journal does not decode: {error}") from error


def _named(text: str) -> tuple[int, str]:
    n, _, uid = text.partition(":")
    return int(n), uid


def _step(step_id: tuple[int, int], fields: Mapping[str, str], named: list[tuple[int, str]]) -> JournalStep:
    tokens = [int(token) for token in fields["tokens"].split(",") if token]
    ends, pieces = _loaded(fields, "ends", default={}), _loaded(fields, "pieces", default={})
    rows = [
        Row(uid, n, token, ends.get(str(at)), pieces.get(str(at), 0))
        for at, ((n, uid), token) in enumerate(zip(named, tokens, strict=True))
    ]
    figures = _loaded(fields, "figures", default={})
    return JournalStep(
        *step_id,
        ms=int(fields["ms"]),
        rows=tuple(rows),
        events=_EVENTS.validate_python(_loaded(fields, "events", default=()), extra="ignore"),
        released=tuple(_loaded(fields, "released", OLD_NAMES["released"], default=())),
        figures=StepStats.model_validate(figures, extra="ignore"),
        inputs=tuple(_loaded(fields, "inputs", OLD_NAMES["inputs"], default=())),
        chunks=_CHUNKS.validate_python(_loaded(fields, "chunks", default=()), extra="ignore"),
        schedule=fields.get("schedule", ""),
        said_made_ms=int(fields.get("made_ms", 0)),
    )


def _moment(entry: Entry) -> float:
    """Return the time when a step was committed, in ms of Redis' clock; infinity if its entry has none."""
    said = entry.fields.get("ms", "")
    return int(said) if said.isdecimal() else math.inf


def _loaded(fields: Mapping[str, str], *names: str, default: Any) -> Any:
    """Return the value of the first of *names* that exists: a field, and its name in older journals."""
    return next((orjson.loads(fields[name]) for name in names if name in fields), default)


_EVENTS: TypeAdapter[tuple[EventRow, ...]] = TypeAdapter(tuple[EventRow, ...])
_CHUNKS: TypeAdapter[tuple[Chunk, ...]] = TypeAdapter(tuple[Chunk, ...])
