"""What the commits write besides events under their own names, and how it reads: the same in Redis and in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from pipeline.events import (
    Answered,
    Cancelled,
    End,
    Failed,
    Finished,
    Mark,
    Submitted,
    TokensProduced,
    as_fields,
    as_plain,
    decode,
    encode_large,
)
from pipeline.log.protocol import DeadLetter, Entry, Produced, Reply
from pipeline.names import SEAL

REPLY_CAP: Final = 200
"""MAXLEN ~ of a replies stream. An entry holds a whole step, and a frontend that lags further reads the histories."""
REPLIES_TTL_MS: Final = 60_000
READER_TTL_MS: Final = 60_000
STATUS_TTL_MS: Final = 10_000
MINUTE_MS: Final = 60_000
CONTROL_CAP: Final = 1000
"""MAXLEN ~ of `control`, and how many of its entries one commit reads; commits/*.lua have the same number."""
BRIEF_MS: Final = 60_000
"""For how long the history of a refused request is kept, unless the retention is shorter: a reply may be lost."""
LARGE_ANSWER_BYTES: Final = 64 * 1024
"""A history with a larger answer of a tokenizer is kept as briefly."""
DEAD_CAP: Final = 10_000
"""MAXLEN ~ of the dead letters."""
DEAD_HISTORY_BYTES: Final = 64 * 1024
"""The copy of a history in a dead letter takes no more."""


def submitted_fields(event: Submitted, count: int) -> dict[str, str]:
    """Return the fields of one of *count* requests that are submitted together; the commit adds the deadline."""
    return {name: text.decode() for name, text in submitted_words(event, count).items()}


def submitted_words(event: Submitted, count: int) -> dict[str, bytes]:
    """As `submitted_fields`, in UTF-8: prompts are long."""
    fields = encode_large(event)
    for name in ("deadline_ms", "siblings"):
        fields.pop(name, None)
    return fields if count == 1 else fields | {"siblings": b"%d" % count}


def letter_fields(dead: DeadLetter) -> dict[str, str]:
    """Return the fields of a dead letter; the commit adds uid, moment and history."""
    entry = orjson.dumps(dict(dead.entry)).decode()
    return {"stage": dead.stage, "deaths": str(dead.deaths), "error": dead.error, "entry": entry}


def kept_ms(event: TokensProduced | End | Mark, n: int, fields: Mapping[str, str], retention_ms: int) -> int:
    """Return for how long a history is kept that *event*, with these *fields*, seals after *n* tokens.

    Refused requests and large answers of a tokenizer are kept briefly: they can be many, each as large as a body.
    """
    refused = isinstance(event, Failed) and 400 <= event.status < 500
    large = isinstance(event, Answered) and sum(map(len, fields.values())) > LARGE_ANSWER_BYTES
    return brief_ms(retention_ms) if n == 0 and (refused or large) else retention_ms


def brief_ms(retention_ms: int) -> int:
    """Return for how long a history is kept whose request was refused."""
    return min(retention_ms, BRIEF_MS)


def produced_fields(events: Sequence[Produced]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the fields of each of *events*, for its history, and frontend -> its reply, in JSON.

    Clients do not hear of marks. An event is turned into plain values once, because this is the largest commit.
    """
    histories: list[dict[str, str]] = []
    replies: dict[str, list[dict[str, Any]]] = {}
    for item in events:
        plain = as_plain(item.event)
        histories.append(as_fields(type(item.event), plain))
        if isinstance(item.event, TokensProduced | End):
            said = {"uid": item.uid, "id": item.entry_id, "n": item.n, "event": plain}
            replies.setdefault(item.frontend, []).append(said)
    return histories, {frontend: orjson.dumps(items).decode() for frontend, items in replies.items()}


def replies_of(entries: Sequence[Entry]) -> list[Reply]:
    """Return what entries of a replies stream say: a list in JSON from `produced`, plain fields from `end`."""
    replies = []
    for entry in entries:
        if "events" in entry.fields:
            for item in orjson.loads(entry.fields["events"]):
                event = _REPLY_EVENTS[item["event"]["kind"]].model_validate(item["event"])
                replies.append(Reply(item["uid"], item["id"], item["n"], event))
        else:
            fields = dict(entry.fields)
            uid = fields.pop("uid")
            ended = decode(fields)
            assert isinstance(ended, End)
            replies.append(Reply(uid, SEAL, ended.n, ended))
    return replies


_REPLY_EVENTS: Mapping[str, type[TokensProduced | End]] = {
    "tokens": TokensProduced,
    "finished": Finished,
    "failed": Failed,
    "cancelled": Cancelled,
    "answered": Answered,
}


def copied_fields(history: Sequence[Entry]) -> dict[str, str]:
    """Return the copy of a history that a dead letter holds: the first entry, then as many of the last as fit.

    In Redis, end.lua makes it.
    """
    texts = [orjson.dumps([entry.id, *itertools.chain(*entry.fields.items())]) for entry in history]
    room = DEAD_HISTORY_BYTES - 2
    first = texts[:1] if len(texts[0]) + 1 <= room else []
    room -= sum(len(text) + 1 for text in first)
    last: list[bytes] = []
    for text in reversed(texts[1:]):
        room -= len(text) + 1
        if room < 0:
            break
        last.append(text)
    kept = first + last[::-1]
    copy = {"history": (b"[" + b",".join(kept) + b"]").decode()}
    return copy | ({"history_cut": str(len(texts) - len(kept))} if len(kept) < len(texts) else {})
