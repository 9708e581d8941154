"""Operations for past requests: which ones there were, and how one is imported from a file."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from pipeline.log.operation import LogContext, Script, Steps, commit
from pipeline.log.operations.frontends import requests
from pipeline.log.protocol import Entry, Forgotten, check_whole, is_between
from pipeline.log.replies import is_ok

KEYS_PER_LOOK = 1000


def made_between(log: LogContext, since_ms: int, until_ms: int) -> Steps[list[str]]:
    found, cursor = set[str](), ""
    while cursor != "0":  # SCAN may return a key twice
        cursor, uids = yield from requests(log, cursor or "0", KEYS_PER_LOOK)
        found |= {uid for uid in uids if is_between(uid, since_ms, until_ms)}
    return sorted(found)


def import_history(log: LogContext, uid: str, entries: Sequence[Entry], *, again: bool = False) -> Script[bool]:
    """Write the whole history of an ended request unchanged, and keep it for the retention of this log.

    Return False if there is a history of *uid*, which stays as it is.

    Raises:
        NotWhole: The new history has no seal.
        Forgotten: The request was erased, and *again* is not set.
        LogFull: Redis is at its maxmemory.
    """
    check_whole(uid, entries)
    pairs = [[entry.id, [word for pair in entry.fields.items() for word in pair]] for entry in entries]
    keys, kept_ms = {"history": log.names.request(uid)}, log.limits.retention_ms
    return commit("import", _is_imported, keys, orjson.dumps(pairs), retention_ms=kept_ms, again=again)


def _is_imported(reply: bytes | str | int) -> bool:
    if isinstance(reply, int):
        raise Forgotten(reply)
    return is_ok(reply)
