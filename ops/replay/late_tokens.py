"""What the journal of an engine tells of a token of a recorded request, as long as it has the steps.

In whose company it was made, and why it took long.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from pipeline.log.journal import outline, steps
from pipeline.log.protocol import StreamLog
from pipeline.names import parse_id
from pipeline.views.company import Company
from pipeline.views.recorded import History, Token
from pipeline.views.waits import Wait, why_waited

READ_AT_ONCE: Final = 500
MOST_READ: Final = 20_000
"""Steps. A wait of more is told from its end alone."""
MOST_BEFORE: Final = 2_000
"""Steps that are read back to the last snapshot of the schedule. An engine writes one every 1,000 steps."""


def company_at(log: StreamLog, history: History, token: Token) -> dict[str, Any]:
    """Return the batch that made *token* and the pages after it, as plain data; nothing if the journal lacks its step.

    Raises:
        UndecodableEvent: The journal is damaged.
    """
    entries = log.journal(token.by.engine, first=token.step, last=token.step)
    while entries and len(entries) < MOST_BEFORE and not any("schedule" in entry.fields for entry in entries):
        before = log.journal(token.by.engine, last=f"({entries[0].id}", max_entries=READ_AT_ONCE, newest=True)
        if not before:
            break
        entries = [*before, *entries]
    step = next((step for step in steps(entries) if step.id == token.step), None)
    if step is None or all((row.uid, row.n) != (history.uid, token.n) for row in step.rows):
        return {}  # it may be a step of another server, from which the request was imported
    company = Company(history)
    company.take(token.by.engine, step)
    (told,) = company.plain(str)["steps"]
    snapshots = [entry for entry in entries if "schedule" in entry.fields]
    pages = {"free": told["pages_free"]}
    if snapshots and parse_id(snapshots[-1].id)[0] == step.epoch:
        pages["all"] = orjson.loads(snapshots[-1].fields["schedule"])["num_pages"]
    batch = {"rows": told["rows"], "prompt_tokens": step.figures.prefill_tokens, "others": told["companions"]}
    return {"batch": batch, "pages": pages}


def why(
    log: StreamLog, engine: str, step_id: str, uid: str, n: int, since_ms: int, until_ms: int | None = None
) -> Wait | None:
    """Return why token *n* of *uid* waited from *since_ms* on, until step *step_id* of *engine* made it.

    *until_ms* is as for `why_waited`.

    None: the journal does not have that step, or no longer.

    Raises:
        UndecodableEvent: The journal is damaged.
    """
    steps = [outline(entry) for entry in log.journal(engine, first=step_id, last=step_id)]
    while steps and len(steps) < MOST_READ and steps[0].made_ms > since_ms:
        entries = log.journal(engine, last=f"({steps[0].id}", max_entries=READ_AT_ONCE, newest=True)
        if not entries:
            break
        steps[:0] = map(outline, entries)
    between = [step for step in steps if step.made_ms > since_ms or step.id == step_id]
    return why_waited(between, uid, n, since_ms, until_ms) if between else None
