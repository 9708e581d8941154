"""Texts that siblings share. They are kept once, under the base uid, and the siblings' histories refer to them.

In an entry, a field `<name>@` stands for a field `<name>`: its value is a beginning of its own, and then the digest of
the rest of the text. commits/lib.lua reads it the same way. Knows no Redis, and of the fields of a request only the
seed, in which the choices of one prompt differ.
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
DIGEST_CHARS: Final = 32
"""Number of hex digits of a digest; commits/lib.lua has the same."""
SHARED_FROM_BYTES: Final = 64
"""Length below which texts stay in the histories: a reference takes half of it."""
REFERRING_IDS: Final = (SUBMITTED_ID, TOKENIZED_ID)
"""Ids of the events of a history that may refer to shared texts."""
NEVER_SHARED: Final = frozenset({"kind", "endpoint", "frontend"})
"""Short fields, which some readers read without the rest."""
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


def digests_in(history: Sequence[Entry]) -> list[str]:
    """Return the digests that the entries of a history refer to."""
    first = [entry for entry in history if entry.id in REFERRING_IDS]
    return [text[-DIGEST_CHARS:] for entry in first for name, text in entry.fields.items() if name[-1:] == MARK]


def whole_history(history: Sequence[Entry], texts: Mapping[str, str]) -> list[Entry] | None:
    """Return entries of a history with complete texts, given digest -> text; None if a text is missing."""
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
