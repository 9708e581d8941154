"""The `Idempotency-Key` header: a client that lost an answer sends its request again, and still it is one request."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from pipeline.errors import RequestError
from pipeline.log.protocol import Once

HEADER: Final = "Idempotency-Key"
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
SCHEMA: Final = {"description": "Requests with the same key are one request.", "pattern": f"^{_KEY.pattern}$"}


def once_of(key: str | None, endpoint: str, body: bytes, *, scope: str = "") -> Once | None:
    """Return what the header *key* asks for; None without one. The same key in two *scopes* means two requests.

    Raises:
        RequestError: The header is not a valid key.
    """
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise RequestError(f"{HEADER}: should be 1 to 255 visible ASCII characters", param=HEADER, code="invalid_value")
    return Once(key=_digest(scope.encode(), key.encode()), digest=_digest(endpoint.encode(), body))


def _digest(*parts: bytes) -> str:
    """Return a hash of the parts and of their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:%s" % (len(part), part))
    return digest.hexdigest()[:32]
