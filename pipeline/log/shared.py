"""Texts that requests share. They are kept once, and the histories refer to them.

Siblings share theirs under the base uid. In an entry, a field `<name>@` stands for a field `<name>`: its value is a
beginning of its own, and then the digest of the rest of the text.

Stored responses share beginnings: a conversation that goes on repeats all that was said. Such a text is a chain of
pieces, each under its digest and with that of the piece before it. A field `<name>~` stands for a field `<name>`: its
value is the digest of the last piece, and then the rest of the text. An entry with such a field has version 2.

commits/lib.lua reads both the same way. Knows no Redis, and of the fields of a request only the seed, in which the
choices of one prompt differ, and those that grow from one response to the next.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from pipeline.events import SamplingParams, Submitted, as_plain, as_words
from pipeline.log.protocol import Entry
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID

MARK: Final = "@"
"""End of the name of a field whose text is elsewhere; commits/lib.lua has the same."""
CHAINED: Final = "~"
"""End of a field's name: its text begins with a chain; commits/lib.lua has the same."""
DIGEST_CHARS: Final = 32
"""Number of hex digits of a digest; commits/lib.lua has the same."""
SHARED_FROM_BYTES: Final = 64
"""Length below which texts stay in the histories: a reference takes half of it."""
REFERRING_IDS: Final = (SUBMITTED_ID, TOKENIZED_ID)
"""Ids of the events of a history that may refer to shared texts."""
NEVER_SHARED: Final = frozenset({"kind", "endpoint", "frontend"})
"""Short fields, which some readers read without the rest."""
CHAINED_FROM_BYTES: Final = 256
"""Length below which texts of stored responses stay in the histories: a piece takes about as much beside its text."""
PIECE_BYTES: Final = 1024
"""Least length of a piece of a conversation. It ends with a message."""
PIECE_NUMBERS: Final = 256
"""Numbers in a piece of a list of them."""
NO_PIECE: Final = DIGEST_CHARS * b"-"
"""In place of the digest of the piece before the first one."""
BETWEEN_MESSAGES: Final = b',{"role":'
"""No text within a message has this: it would have backslashes before the quotes."""
SEED: Final = b'"seed":%d'
"""The seed in the text of `sampling`. Large parameters come after it."""

REQUEST_BYTES: Final = 2048
"""Size of a request in Redis beside its texts: its keys, the names of fields, its other events without tokens."""

Words: TypeAlias = dict[str, bytes]
"""Fields of an entry, or digest -> shared text, in UTF-8."""


def submitted_words(events: Sequence[Submitted]) -> tuple[list[Words], Words]:
    """Return the fields of requests that are submitted together, and the texts that several of them refer to. The
    commit adds the deadline.
    """
    if len(events) == 1:
        return [as_words(Submitted, as_plain(events[0], without=("siblings", "deadline_ms")))], {}
    rows = _rows(events)
    times = Counter(rest for row in rows for _, rest in row.values())
    digests = {text: _digest(text) for text, count in times.items() if count > 1 and len(text) >= SHARED_FROM_BYTES}
    fields = []
    for row in rows:
        own: Words = {}
        for name, (beginning, rest) in row.items():
            if rest in digests and name not in NEVER_SHARED:
                own[name + MARK] = beginning + digests[rest]
            else:
                own[name] = beginning + rest
        fields.append(own)
    return fields, {digest.decode(): text for text, digest in digests.items()}


def submitted_bytes(histories: Sequence[Words], shared: Words) -> int:
    """Return the size of requests that are submitted together; *histories* and *shared* come from `submitted_words`."""
    texts = sum(len(text) for fields in (*histories, shared) for text in fields.values())
    return REQUEST_BYTES * len(histories) + texts


def submitted_fields(events: Sequence[Submitted]) -> list[dict[str, str]]:
    """Return the complete fields of requests that are submitted together. Equal texts are the same object."""
    rows = _rows(events)
    texts = {rest: rest.decode() for rest in {rest for row in rows for _, rest in row.values()}}
    return [{name: own.decode() + texts[rest] for name, (own, rest) in row.items()} for row in rows]


def referring(words: Words) -> tuple[Words, Words]:
    """Return *words* of one of several siblings with references for its long texts, and those texts."""
    digests = {name: _digest(text) for name, text in words.items() if len(text) >= SHARED_FROM_BYTES}
    own = {name: text for name, text in words.items() if name not in digests}
    own |= {name + MARK: digest for name, digest in digests.items()}
    return own, {digest.decode(): words[name] for name, digest in digests.items()}


def chained(words: Words) -> tuple[Words, Words]:
    """Return *words* of a stored response with references for its long texts, and the pieces of those, by digest."""
    own, pieces = Words(), Words()
    for name, text in words.items():
        parts, rest = _pieces(name, text)
        last = NO_PIECE
        for part in parts:
            piece = last + part
            last = _digest(piece)
            pieces[last.decode()] = piece
        own |= {name + CHAINED: last + rest} if parts else {name: text}
    return own | ({"v": b"2"} if pieces else {}), pieces


def _pieces(name: str, text: bytes) -> tuple[list[bytes], bytes]:
    """Return the pieces of a field, which depend on what is before them alone, and the rest."""
    if len(text) < CHAINED_FROM_BYTES or name in NEVER_SHARED:
        return [], text
    if name == "token_ids":
        numbers = text.split(b",")
        cuts = range(0, len(numbers) - PIECE_NUMBERS, PIECE_NUMBERS)
        pieces = [b",".join(numbers[first : first + PIECE_NUMBERS]) + b"," for first in cuts]
        return pieces, b",".join(numbers[len(pieces) * PIECE_NUMBERS :])
    if name != "messages":
        return [text], b""
    first, *others = text[:-1].split(BETWEEN_MESSAGES)
    pieces, rest = [], first
    for other in others:
        if len(rest) >= PIECE_BYTES:
            pieces.append(rest)
            rest = b""
        rest += BETWEEN_MESSAGES + other
    return ([*pieces, rest], text[-1:]) if len(rest) >= PIECE_BYTES else (pieces, rest + text[-1:])


def chains_in(history: Sequence[Entry]) -> list[str]:
    """Return the digests of the last pieces of chains that the entries of a history refer to."""
    first = [entry for entry in history if entry.id in REFERRING_IDS]
    return [text[:DIGEST_CHARS] for entry in first for name, text in entry.fields.items() if name[-1:] == CHAINED]


def digests_in(history: Sequence[Entry]) -> list[str]:
    """Return the digests that the entries of a history refer to."""
    first = [entry for entry in history if entry.id in REFERRING_IDS]
    return [text[-DIGEST_CHARS:] for entry in first for name, text in entry.fields.items() if name[-1:] == MARK]


def whole_history(history: Sequence[Entry], texts: Mapping[str, str]) -> list[Entry] | None:
    """Return entries of a history with complete texts, given digest -> text, of chains all of it; None if one is
    missing."""
    try:
        return [_whole(entry, texts) if entry.id in REFERRING_IDS else entry for entry in history]
    except KeyError:
        return None


def _whole(entry: Entry, texts: Mapping[str, str]) -> Entry:
    fields = {}
    for name, text in entry.fields.items():
        if name[-1:] == MARK:
            beginning, rest = text[:-DIGEST_CHARS], texts[text[-DIGEST_CHARS:]]
            name, text = name[:-1], beginning + rest if beginning else rest
        elif name[-1:] == CHAINED:
            name, text = name[:-1], texts[text[:DIGEST_CHARS]] + text[DIGEST_CHARS:]
        fields[name] = text
    return Entry(entry.id, fields)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_CHARS // 2).hexdigest().encode()


def _rows(events: Sequence[Submitted]) -> list[dict[str, tuple[bytes, bytes]]]:
    """Return the fields of each of *events*, each text in two parts: a beginning of its own, and a rest that others may
    have, too. The commit adds the deadline.

    Fields that are equal in one event and the next are written once, as one object: all events come from one body,
    where `1` and `true` are not in the same place.
    """
    rows: list[dict[str, tuple[bytes, bytes]]] = []
    last, texts, before_seed = dict[str, Any](), Words(), b""
    for event in (events[0].model_copy(update={"siblings": len(events)}), *events[1:]):
        fields = vars(event)
        same = {name for name, value in last.items() if value is fields[name] or value == fields[name]}
        if last:
            same.add("siblings")
            if _seedless(event.sampling) == _seedless(last["sampling"]):
                same.add("sampling")
        new = as_words(Submitted, as_plain(event, without={*same, "deadline_ms"}))
        if "sampling" in new:
            before_seed, _, new["sampling"] = new["sampling"].partition(SEED % event.sampling.seed)
        last, texts = fields, {name: text for name, text in texts.items() if name in same} | new
        parts = {name: (b"", text) for name, text in texts.items()}
        parts["sampling"] = (before_seed + SEED % event.sampling.seed, texts["sampling"])
        rows.append(parts)
    return rows


def _seedless(sampling: SamplingParams) -> dict[str, Any]:
    return {**vars(sampling), "seed": 0}
