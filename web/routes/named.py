"""Finds the requests that a path names, for a caller who may see them. For all others they do not exist."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from typing import Final

from pipeline.errors import RequestError
from pipeline.names import parse_id
from pipeline.recording import Recording
from pipeline.views.recorded import History
from pipeline.walk import UNTOLD
from web.http.keys import Caller
from web.live.folding import folded, untold, untold_histories
from web.live.frontend import Frontend
from web.live.lookup import Lookup, find
from web.wire.uids import drawn_ms, uid_of

LARGEST_HALF: Final = 2**64 - 1
"""The largest half of an id in Redis."""
_ID: Final = re.compile(r"(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})")


def is_id(text: str) -> bool:
    """Return whether *text* is the id of an entry, as Redis writes it."""
    return bool(_ID.fullmatch(text)) and max(parse_id(text)) <= LARGEST_HALF


def uid_in(name: str) -> str:
    """Return the uid in a path. Raises RequestError if there is none."""
    uid = uid_of(name)
    if not uid:
        raise _not_found()
    return uid


async def find_of(frontend: Frontend, uid: str, who: Caller) -> Lookup:
    """Return the requests of *who* under *uid*. Raises RequestError if there are none, and as the log does.

    It reads no more of a history than how it begins.
    """
    found = await find(frontend.log, frontend.archived, uid)
    if found is None or not who.may_see(found.submitted.owner):
        raise absent(uid, frontend.limits.retention_s)
    return found


async def history_of(frontend: Frontend, uid: str, who: Caller, what: str) -> History:
    """Return the request *uid* of *who*, from the log or the archive, without what no story tells. Raises as the log
    does. The caller has a turn of `Folding`.

    Raises:
        RequestError: There is none, or there are siblings, of which each has its own *what*.
    """
    found = await find_of(frontend, uid, who)
    if found.uids != (uid,):
        raise several(found.uids, what)
    if found.archived is not None:
        entries = untold(found.archived.entries)
    else:
        entries = (await untold_histories(frontend.log, [uid]))[uid]
    if not entries:  # it has expired since
        raise absent(uid, frontend.limits.retention_s)
    return await folded(len(entries), functools.partial(History, Recording(uid, tuple(entries)), without=UNTOLD))


def several(uids: Sequence[str], what: str = "events") -> RequestError:
    """Return the error for a client that asks siblings for their events, which have no common order, or for stories
    that are too long together."""
    message = f"This uid stands for {len(uids)} requests; ask for the {what} of each, from {uids[0]} to {uids[-1]}."
    return RequestError(message, code="several_requests")


def absent(uid: str, retention_s: float) -> RequestError:
    """Return the error for a request without a history: it has expired, or never was."""
    age_s = time.time() - drawn_ms(uid) / 1000
    if age_s < retention_s:  # too young to have expired, or from the future
        return _not_found()
    message = f"The request has expired: the log keeps it for {retention_s:g} s after its end (--retention)."
    return RequestError(message, code="request_expired", status=404)


def _not_found() -> RequestError:
    message = "There is no such request. The response header x-minisgl-uid has the uid of a request."
    return RequestError(message, code="request_not_found", status=404)
