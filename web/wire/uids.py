"""The names by which clients know requests. A uid begins with the time at which it was made (UUID version 7)."""

from __future__ import annotations

import re
from typing import Final

MESSAGE_PREFIX: Final = "msg_"
RESPONSE_PREFIX: Final = "resp_"
PREFIXES: Final = ("chatcmpl-", "cmpl-", MESSAGE_PREFIX, RESPONSE_PREFIX)
"""What an endpoint puts before the uid to make the id in its answers."""

_UID: Final = re.compile(r"[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}(\.[0-9]{1,4})?")
"""With a point and a number it is one of several siblings."""


def uid_of(name: str) -> str:
    """Return the uid in *name*, which is a uid or the id of an answer; empty if it is neither."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name if _UID.fullmatch(name) else ""


def drawn_ms(uid: str) -> int:
    """Return when *uid* was made, in milliseconds since 1970: the `created` of an answer."""
    return int(uid[:12], 16)


def family_of(uid: str) -> str:
    """Return the uid that siblings share; for a single request, its own."""
    return uid.partition(".")[0]


def index_of(uid: str) -> int:
    """Return which of its siblings *uid* is; 0 for a single request."""
    return int(uid.partition(".")[2] or 0)
