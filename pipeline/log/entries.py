"""Content of the entries that commits write, besides events, and how to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import orjson
import structlog
from pydantic import Field, TypeAdapter

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Answered,
    End,
    Failed,
    Mark,
    TokensProduced,
    as_plain,
    as_words,
    decode,
)
from pipeline.log.protocol import DeadLetter, Entry, Inbox, Produced, Reply
from pipeline.log.replies import entries_of
from pipeline.names import SEAL, check_readable

logger = structlog.get_logger()

REPLY_CAP: Final = 200
"""MAXLEN ~ of a replies stream. An entry holds a whole step, and a frontend that lags further reads the histories."""
REPLIES_TTL_MS: Final = 60_000
READER_TTL_MS: Final = 60_000
STATUS_TTL_MS: Final = 10_000
CONTROL_CAP: Final = 1000
"""MAXLEN ~ of `control`, and how many of its entries one commit reads; commits/*.lua have the same number."""
BRIEF_MS: Final = 60_000
"""Time for which the history of a refused request is kept, unless the retention is shorter: a reply may be lost."""
LARGE_ANSWER_BYTES: Final = 64 * 1024
"""Size of a tokenizer's answer above which its history is kept as briefly."""
DEAD_CAP: Final = 10_000
"""MAXLEN ~ of the dead letters."""
COPY_TTL_MS: Final = 60_000
"""Lifetime of the copy of a stream that is being purged. A run that stands still for longer begins again."""
JOURNAL_CAP: Final = 100_000
"""MAXLEN ~ of a journal, whose bytes are bounded, too. Each entry takes a little more than its bytes."""
DEAD_HISTORY_BYTES: Final = 64 * 1024
"""Largest size of the copy of a history in a dead letter."""
LONGEST_TIME: Final = 15
"""Largest number of digits of a time in milliseconds."""
LONGEST_REASON: Final = 300
"""Largest number of characters of the reason why an entry could not be read."""

Skipped: TypeAlias = Callable[[str, str], None]
"""Called with the id of an entry that was skipped, and the reason."""


def request_of(entry: Entry) -> tuple[str, str]:
    """Return uid and frontend of an entry of `submitted` or `tokenized`. Other fields have no effect.

    Raises:
        UndecodableEvent: One of both is missing, or the entry cannot be read; NewerVersion: it is of a newer version.
    """
    check_readable(entry.fields)
    uid, frontend = entry.fields.get("uid", ""), entry.fields.get("frontend")
    if not uid or frontend is None:
        raise UndecodableEvent(f"it has the fields {', '.join(sorted(entry.fields))}, expected uid and frontend")
    return uid, frontend


def burial_fields(inbox: Inbox, reason: str, uids: Sequence[str]) -> dict[str, str]:
    """Return the fields of the dead letter of an entry that cannot be read; the commit adds time and entry."""
    uid = {"uid": uids[0]} if len(uids) == 1 else {}
    return uid | {"stage": inbox.group, "stream": inbox.stream, "deaths": "0", "error": reason}


def letter_fields(dead: DeadLetter) -> dict[str, str]:
    """Return the fields of a dead letter; the commit adds uid, time and history."""
    entry = orjson.dumps(dict(dead.entry)).decode()
    return {"stage": dead.stage, "deaths": str(dead.deaths), "error": dead.error, "entry": entry}


def brief_ms(
    event: TokensProduced | End | Mark, n: int, fields: Mapping[str, str] | Mapping[str, bytes], retention_ms: int
) -> int | None:
    """Return the time for which a history is kept if *event*, with these *fields*, seals it after *n* tokens; None: as
    long as its submit said.

    Refused requests and large answers of a tokenizer are kept briefly: there may be many, each as large as a body.
    """
    refused = isinstance(event, Failed) and 400 <= event.status < 500
    large = isinstance(event, Answered) and sum(map(len, fields.values())) > LARGE_ANSWER_BYTES
    return refused_ms(retention_ms) if n == 0 and (refused or large) else None


def refused_ms(retention_ms: int) -> int:
    """Return the time for which the history of a refused request is kept."""
    return min(retention_ms, BRIEF_MS)


OneToken: TypeAlias = tuple[int, str, str]
"""Token, text and step of an event that has one token, and nothing else. Most events are like this."""
_OF_ONE_TOKEN: Final = frozenset(("kind", "count", "tokens", "text", "step"))
"""Fields that such an event may have."""


def produced_words(events: Sequence[Produced]) -> tuple[list[dict[str, bytes] | OneToken], dict[str, str]]:
    """Return the fields of each of *events* for its history, in UTF-8, and frontend -> its reply, in JSON.

    Marks are not sent to clients. Each event is turned into plain values only once, because this is the largest commit.
    """
    histories: list[dict[str, bytes] | OneToken] = []
    replies: dict[str, list[dict[str, Any]]] = {}
    for uid, entry_id, n, event, frontend, _ in events:
        if (
            type(event) is TokensProduced
            and event.__pydantic_fields_set__ <= _OF_ONE_TOKEN
            and len(tokens := event.tokens) == event.count == 1
        ):  # this takes a third of the time of the other branch
            text, step = event.text, event.step
            plain = {"kind": "tokens", "tokens": tokens, "text": text, "step": step}
            histories.append((tokens[0], text, step))
        else:
            plain = as_plain(event)
            histories.append(as_words(type(event), plain))
            if not isinstance(event, TokensProduced) and isinstance(event, Mark):  # isinstance with a union takes long
                continue
        reply = {"uid": uid, "id": entry_id, "n": n, "event": plain}
        if frontend in replies:
            replies[frontend].append(reply)
        else:
            replies[frontend] = [reply]
    return histories, {frontend: orjson.dumps(items).decode() for frontend, items in replies.items()}


def words_of(one: OneToken) -> dict[str, bytes]:
    """Return the fields of an event of one token, in UTF-8."""
    token, text, step = one
    return {"kind": b"tokens", "tokens": b"%d" % token, "text": text.encode(), "step": step.encode()}


def made_ms_of(step: Entry) -> int:
    """Return the time when a step was computed, or else committed, in ms of Redis' clock; 0: its entry has neither."""
    made, committed = step.fields.get("made_ms", "0"), step.fields.get("ms", "")
    made_ms = int(made) if made.isdecimal() and len(made) <= LONGEST_TIME else 0
    ms = int(committed) if committed.isdecimal() and len(committed) <= LONGEST_TIME else 0
    return min(made_ms, ms) if made_ms and ms else made_ms or ms


def is_tombstone(history: Sequence[Entry]) -> bool:
    """Return whether *history*, read from its start, is the tombstone of an erased request: only an end."""
    return len(history) == 1 and history[0].id == SEAL


def say_skipped(entry_id: str, error: str) -> None:
    """Log that an entry of a replies stream could not be read."""
    logger.error("reply_skipped", id=entry_id, error=error)


def replies_of(entries: Sequence[Entry], skipped: Skipped = say_skipped) -> list[Reply]:
    """Return the replies in entries of a replies stream: a list in JSON from `produced`, plain fields from `end`.

    Skip an entry that has something else: call `skipped` once with its id and the reason.
    """
    replies: list[Reply] = []
    for entry in entries:
        try:
            check_readable(entry.fields)
            replies += _said(entry.fields["events"]) if "events" in entry.fields else [_end_said(entry.fields)]
        except Exception as error:  # whatever the entry holds
            skipped(entry.id, clipped(repr(error)))
    return replies


def told_of(pairs: Sequence[Any], skipped: Skipped = say_skipped) -> list[Reply]:
    """Return replies as `replies_of` does, from Redis' raw pairs. There is one for every step, so no Entry is made."""
    replies: list[Reply] = []
    for pair in pairs:
        said = _said_in_bytes(pair[1])
        replies += replies_of(entries_of((pair,)), skipped) if said is None else said
    return replies


def _said_in_bytes(parts: Sequence[bytes] | None) -> list[Reply] | None:
    """Return the replies in the raw fields of an entry by `produced`; None if it is another entry or cannot be read:
    then `replies_of` finds the reason."""
    if not parts or len(parts) != 2 or parts[0] != b"events":
        return None
    try:
        return list(_said(parts[1]))
    except Exception:
        return None


def clipped(text: str) -> str:
    """Return *text* in one line, short enough for a log line or a client."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}.."


def _said(events: str | bytes) -> Iterator[Reply]:
    items = orjson.loads(events)
    told = _REPLY_EVENTS.validate_python([item["event"] for item in items], extra="ignore")
    for item, event in zip(items, told, strict=True):
        uid, entry_id, n = item["uid"], item["id"], item["n"]
        if not (isinstance(uid, str) and isinstance(entry_id, str) and isinstance(n, int)):
            raise UndecodableEvent(f"a reply has uid {uid!r}, id {entry_id!r} and n {n!r}")
        yield Reply(uid, entry_id, n, event)


def _end_said(entry: Mapping[str, str]) -> Reply:
    fields = dict(entry)
    uid = fields.pop("uid")
    ended = decode(fields)
    if not isinstance(ended, End):
        raise UndecodableEvent(f"a reply is of kind {ended.kind}, expected the end of a request")
    return Reply(uid, SEAL, ended.n, ended)


_REPLY_EVENTS: TypeAdapter[list[TokensProduced | End]] = TypeAdapter(
    list[Annotated[TokensProduced | End, Field(discriminator="kind")]]
)
"""Validates the events of a whole step: a call for each event would take half as long again."""
