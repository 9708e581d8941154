"""Why a token of a recorded request took long: from the journal of its engine, as long as that has the steps."""

from __future__ import annotations

from typing import Final

from pipeline.journal import outline
from pipeline.log.protocol import StreamLog
from pipeline.views.waits import Wait, why_waited

READ_AT_ONCE: Final = 500
MOST_READ: Final = 20_000
"""Steps. A wait of more is told from its end alone."""


def why(log: StreamLog, engine: str, step_id: str, uid: str, n: int, since_ms: int) -> Wait | None:
    """Return why token *n* of *uid* waited from *since_ms* on, until step *step_id* of *engine* made it.

    None: the journal does not have that step, or no longer.

    Raises:
        UndecodableEvent: The journal is damaged.
    """
    steps = [outline(entry) for entry in log.journal(engine, first=step_id, last=step_id)]
    while steps and len(steps) < MOST_READ and steps[0].ms > since_ms:
        entries = log.journal(engine, last=f"({steps[0].id}", max_entries=READ_AT_ONCE, newest=True)
        if not entries:
            break
        steps[:0] = map(outline, entries)
    between = [step for step in steps if step.ms > since_ms or step.id == step_id]
    return why_waited(between, uid, n, since_ms) if between else None
