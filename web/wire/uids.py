"""The names by which clients know requests. A uid begins with the moment at which it was drawn (UUID version 7)."""

from __future__ import annotations

import re
from typing import Final

PREFIXES: Final = ("chatcmpl-", "cmpl-")
"""What an endpoint puts before the uid to make the id in its answers."""

_UID: Final = re.compile(r"[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}(\.[0-9]{1,4})?")
"""With a point and a number it is one of several that were submitted together."""


def uid_of(name: str) -> str:
    """Return the uid that *name*, a uid or the id in an answer, stands for; empty when it is no such thing."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name if _UID.fullmatch(name) else ""


def drawn_ms(uid: str) -> int:
    """Return when *uid* was drawn, in milliseconds since 1970: what an answer says as `created`."""
    return int(uid[:12], 16)


def family_of(uid: str) -> str:
    """Return what the uids of siblings have in common; of a single request its own."""
    return uid.partition(".")[0]


def index_of(uid: str) -> int:
    """Return which of its siblings *uid* is; 0 for a single request."""
    return int(uid.partition(".")[2] or 0)
