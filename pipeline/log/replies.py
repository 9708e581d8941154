"""Parses raw replies of Redis, in RESP2 and RESP3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from pipeline.errors import Fenced
from pipeline.log.protocol import Depth, Entry, Lease, Owner
from pipeline.names import UNREADABLE, WAITING


def as_text(value: bytes | str) -> str:
    """Return text; bytes that are not UTF-8 are written as `\\x..`."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def texts(raw: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(as_text(item) for item in raw)


def nothing(_: Any) -> None:
    """Ignore a reply without content."""


def is_ok(reply: bytes | str) -> bool:
    """Return whether a commit took place; any other word is the reason why it did not."""
    return as_text(reply) == "OK"


def entries_of(raw: Sequence[Any]) -> list[Entry]:
    """Return the entries of [id, [name, value, ...]] pairs. One deleted meanwhile has no fields and is left out."""
    return [Entry(as_text(entry_id), _fields_of(parts)) for entry_id, parts in raw if parts]


def _fields_of(parts: Sequence[bytes]) -> dict[str, str]:
    """Return the fields of an entry. Fields that are not text are left out, and UNREADABLE names them."""
    try:
        texts = [item.decode() for item in parts]
        return dict(zip(texts[::2], texts[1::2], strict=True))
    except UnicodeDecodeError:
        pass
    fields, spoilt = {}, []
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        try:
            fields[name.decode()] = value.decode()
        except UnicodeDecodeError:
            spoilt.append(as_text(name))
    return fields | {UNREADABLE: f"it is not text: expected UTF-8 in the field {', '.join(spoilt)}"}


def history_of(raw: Sequence[Any] | None) -> list[Entry]:
    """Return the entries of a history, as `entries_of` does; None: its key is of another type."""
    return [NO_STREAM] if raw is None else entries_of(raw)


def letters_of(raw: Sequence[Any]) -> list[Entry]:
    """Return dead letters. They may hold bytes that are not UTF-8 in JSON: each such byte becomes `\\x..` there."""
    letters = []
    for entry_id, parts in raw:
        texts = [_SPOILT.sub(_written, item.decode(errors="surrogateescape")) for item in parts]
        letters.append(Entry(as_text(entry_id), dict(zip(texts[::2], texts[1::2], strict=True))))
    return letters


def _written(found: re.Match[str]) -> str:
    return f"\\\\x{ord(found[0]) - 0xDC00:02x}"


_SPOILT = re.compile("[\udc80-\udcff]")
NO_STREAM: Final = Entry(f"{2**64 - 1}-0", {UNREADABLE: "its key is of another type, expected a stream"})
"""Entry that is read if the key of a history is of another type: it comes after every event but the end."""


def streams_of(raw: Any) -> dict[str, list[Entry]]:
    """Return key -> entries of a reply to XREAD or XREADGROUP: pairs in RESP2, a map in RESP3, or None."""
    pairs = raw.items() if isinstance(raw, dict) else raw or ()
    return {as_text(key): entries_of(entries) for key, entries in pairs}


def first_pairs(raw: Any) -> Sequence[Any]:
    """Return the raw entries of the only stream in such a reply, for `entries_of`."""
    if not raw:
        return ()
    return next(iter(raw.values())) if isinstance(raw, dict) else raw[0][1]


def first_stream(raw: Any) -> list[Entry]:
    """Return the entries of the only stream in such a reply."""
    return next(iter(streams_of(raw).values()), [])


def texts_there(keys: Iterable[str], values: Sequence[bytes | None]) -> dict[str, str]:
    """Return key -> text of those *keys* that exist; *values* is the reply to their MGET or HMGET."""
    return {key: as_text(value) for key, value in zip(keys, values, strict=True) if value is not None}


def lease_of(holder: bytes | None, ttl_ms: int) -> Lease:
    """Return the lease from the replies to GET and PTTL of its key."""
    return Lease(as_text(holder), max(ttl_ms, 0)) if holder is not None else Lease("", 0)


def depths_of(replies: Sequence[Any]) -> list[Depth | None]:
    """Return the depth of each stream from the replies to its XLEN and XPENDING; None if it has no such group."""
    pairs = zip(replies[::2], replies[1::2], strict=True)
    return [None if held is None else Depth(length, sum(pending_of(held).values())) for length, held in pairs]


def pending_of(reply: Sequence[Any] | None) -> dict[str, int]:
    """Return consumer -> entries it has pending, from the reply to XPENDING of a group. What waits, no worker has."""
    found = {as_text(name): int(count) for name, count in (reply[3] if reply else None) or ()}
    found.pop(WAITING, None)
    return found


def pairs_of(reply: Any) -> list[tuple[str, str]]:
    """Return the fields of a reply to HGETALL: a map in RESP3, a list in RESP2."""
    words = [as_text(word) for word in (chain(*reply.items()) if isinstance(reply, dict) else reply)]
    return list(zip(words[::2], words[1::2], strict=True))


def clock_ms(reply: Sequence[Any]) -> int:
    """Return the time in a reply to TIME, in ms."""
    seconds, microseconds = reply
    return int(seconds) * 1000 + int(microseconds) // 1000


def info_of(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO."""
    return dict(line.split(":", 1) for line in as_text(reply).splitlines() if ":" in line)


def server_of(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and version of the server from the fields of INFO. Every Valkey has 7.2.4 in `redis_version`."""
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "?"))


def unless_fenced(owner: Owner, reply: Any) -> Any:
    """Return *reply*. Raise Fenced if it shows that *owner* has lost its slot."""
    if reply == b"FENCED":
        raise Fenced(f"{owner.slot} has another owner than {owner}")
    return reply
