"""Makes text of others safe for a terminal."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that control a terminal, and surrogates, which cannot be encoded."""


def printable(text: str) -> str:
    """Return *text* with every control character but newline and tab escaped."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Like `printable`, with newlines and tabs escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
