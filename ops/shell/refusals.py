"""Error answers of OpenAI servers, in all their forms, as one sentence."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from ops.shell.text import one_line

LONGEST: Final = 400
"""Characters of a message; some servers send whole pages."""
_TOO_LONG: Final = re.compile(
    r"context[ _]length|maximum context|context window|(prompt|input|request).{0,40} too long", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error message, and whether the conversation is too long."""

    message: str
    is_too_long: bool = False


def refusal_of(status: int, content: bytes) -> Refusal:
    """Return the error in the body of an answer with an error status."""
    text = content.decode(errors="replace")
    try:
        found = refusal_in(json.loads(text))
    except (ValueError, RecursionError):
        found = None
    if found is None:
        found = _refusal(re.sub(r"<[^>]{0,200}>", " ", text))  # a proxy's page
    return Refusal(f"HTTP {status}: {found.message}" if found.message else f"HTTP {status}", found.is_too_long)


def refusal_in(document: Any) -> Refusal | None:
    """Return the error in *document*, however it is nested; None if it is not an error."""
    if not isinstance(document, dict):
        return None
    error = document.get("error") or document.get("detail")
    if not error and document.get("object") == "error":
        error = document
    if not error:
        return None
    code = ""
    while isinstance(error, dict):
        code = str(error.get("code") or error.get("type") or code)
        inner = error.get("error") or error.get("message")
        if not inner:
            break
        error = inner
    text = error if isinstance(error, str) else json.dumps(error)
    return _refusal(text, code)


def _refusal(text: str, code: str = "") -> Refusal:
    line = one_line(" ".join(text.split()))
    shown = line if len(line) <= LONGEST else f"{line[:LONGEST]}.."
    return Refusal(shown, bool(_TOO_LONG.search(code) or _TOO_LONG.search(line)))
