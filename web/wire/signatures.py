"""Thoughts as opaque texts, which clients keep and send back: Anthropic's signatures, OpenAI's encrypted content.

They carry the text itself: a version byte, and the text, deflated. It is no secret.
"""

from __future__ import annotations

import base64
import zlib
from typing import Final

MOST_THOUGHT: Final = 4 << 20
"""Most bytes that the signatures of a body may unpack to."""
_VERSION: Final = b"\x01"


def signature_of(thought: str) -> str:
    """Return the signature of a thought."""
    return base64.b64encode(_VERSION + zlib.compress(thought.encode(), 6)).decode()


class Signatures:
    """Reads the signatures of one body, up to the bound."""

    def __init__(self) -> None:
        self._left = MOST_THOUGHT

    def thought_of(self, signature: str) -> str | None:
        """Return the thought in a *signature*; None if it cannot be read."""
        unpacking = zlib.decompressobj()
        try:
            packed = base64.b64decode(signature, validate=True)
            has_left = packed[:1] == _VERSION and self._left > 0
            text = unpacking.decompress(packed[1:], self._left) if has_left else b""
            self._left -= len(text)
            return text.decode() if unpacking.eof else None  # else it is cut, too long, or none of ours
        except (ValueError, zlib.error):
            return None
