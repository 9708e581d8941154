"""Dead letters: what they say, and the request that one becomes when it is sent again. Knows no log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from pipeline.events import Submitted, decode
from pipeline.log.protocol import Entry

REQUEUED_FROM: Final = "requeued_from"
"""The label of a request that was sent again: the uid of the one that died."""


def plain_letter(letter: Entry) -> dict[str, Any]:
    """Return what a letter says, but for the copy of the history."""
    return {"id": letter.id} | {
        name: text if name in ("uid", "stage", "stream", "error") else _value(text)
        for name, text in letter.fields.items()
        if name != "history"
    }


def sent_again(uid: str, history: Sequence[Entry]) -> Submitted | None:
    """Return the request that asks again for what *uid* asked, whose *history* may have its first entry alone.

    None: the history is gone. Raises UndecodableEvent if it is damaged.
    """
    event = decode(history[0].fields) if history else None
    if not isinstance(event, Submitted):
        return None
    return event.model_copy(
        update={"ms": 0, "deadline_ms": 0, "frontend": "", "labels": event.labels | {REQUEUED_FROM: uid}}
    )


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
