"""Operations of detokenizers, and the journals of engines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain, count

from pipeline.events import TokensProduced
from pipeline.log.entries import (
    JOURNAL_CAP,
    REPLY_CAP,
    brief_ms,
    made_ms_of,
    produced_words,
    words_of,
)
from pipeline.log.operation import Command, LogContext, Script, Steps, Words
from pipeline.log.operations.requests import flat, shared_by
from pipeline.log.operations.slots import SLOTS_PER_LOOK, slots_of
from pipeline.log.protocol import Entry, Journalled, Owner, Produced
from pipeline.log.replies import (
    entries_of,
    is_ok,
    unless_fenced,
)
from pipeline.names import (
    GENERATE,
    SEAL,
    Names,
)


@functools.cache
def _keys_of_produced(names: Names, slot: str, engine: str) -> tuple[str, ...]:
    """Return the keys of every commit of a detokenizer. There is a commit for each token, so they are cached."""
    keys = (names.owner(slot), names.steps(engine), names.live, names.control)
    return (*keys, names.ended, names.archive, names.journal(engine), names.stored, names.stored_bytes)


def produced(
    log: LogContext,
    owner: Owner,
    entries: Sequence[Entry],
    engine: str,
    events: Sequence[Produced],
    journal: Journalled = (),
    *,
    tries: int = 0,
) -> Script[bool]:
    """Consume steps and write the events that follow to the histories and the replies. Raise Fenced.

    Nothing is written unless all *entries* are pending. *journal* goes into the engine's journal, with the ids of
    the steps, and the oldest entries leave it. If memory is short, the whole journal is deleted instead.

    With *tries* the single step is not consumed: *events* are a part of what follows from it, and *tries* becomes
    its number of tries. Nothing is written if it already had as many.
    """
    names, limits = log.names, log.limits
    keys = [*_keys_of_produced(names, owner.slot, engine)]
    histories, replies = produced_words(events)
    made_ms = {entry.id: made_ms_of(entry) for entry in entries}
    tokens: dict[str, list[str | int]] = {entry.id: [] for entry in entries}
    histories_of: dict[str, list[str]] = {step: [] for step in tokens}
    others: list[tuple[Produced, dict[str, bytes]]] = []
    others_of = set[str]()
    request = names.request("")
    for item, fields in zip(events, histories, strict=True):
        if isinstance(fields, tuple):
            token, text, step = fields
            if step in tokens and item[0] not in others_of:  # produced.lua has the names of the fields
                histories_of[step].append(request + item[0])
                tokens[step] += (item[1], token, text)
                continue
            fields = words_of(fields)
        others.append((item, fields))
        others_of.add(item.uid)
    keys += chain.from_iterable(histories_of.values())
    index: dict[str, int] = {}

    def key_index(key: str) -> int:
        if key not in index:
            keys.append(key)
            index[key] = len(keys)
        return index[key]

    writes: list[str | int | bytes] = []
    for item, fields in others:
        history, brief, shared = key_index(names.request(item.uid)), 0, 0
        if item.entry_id == SEAL:
            brief = brief_ms(item.event, item.n, fields, limits.retention_ms) or 0
            shared = key_index(texts_key) if (texts_key := shared_by(names, item.uid)) else 0
        made = made_ms.get(item.event.step, 0) if isinstance(item.event, TokensProduced) else 0
        writes += (history, item.entry_id, item.uid, int(item.tell_engine), brief, shared, made, 2 * len(fields))
        writes += chain.from_iterable(fields.items())
    payloads: list[str | int] = []
    for frontend, payload in replies.items():
        payloads += [key_index(names.replies(frontend)), payload]
    noted = [flat(fields) for fields in journal] if journal and limits.journal_bytes else [[] for _ in entries]
    steps: list[str | int | bytes] = []
    for entry, words, of_step in zip(entries, noted, tokens.values(), strict=True):
        steps += (entry.id, made_ms[entry.id], len(words), *words, len(of_step) // 3, *of_step)
    kept: Words = [limits.retention_ms, limits.response_retention_ms, limits.ended_ms, limits.journal_bytes]
    args: Words = [str(owner), REPLY_CAP, *kept, JOURNAL_CAP, tries, len(entries)]
    args = [*args, *steps, len(replies), *payloads, *writes]
    return Script("produced", keys, args, lambda reply: is_ok(unless_fenced(owner, reply)), once=True)


def journal(
    log: LogContext, engine: str, *, first: str = "-", last: str = "+", max_entries: int = 0, newest: bool = False
) -> Command[list[Entry]]:
    limit: Words = ["COUNT", max_entries] if max_entries else []
    bounds = ["XREVRANGE", last, first] if newest else ["XRANGE", first, last]
    words: Words = [bounds[0], log.names.journal(engine), *bounds[1:], *limit]
    return Command(words, lambda reply: entries_of(reply[::-1] if newest else reply))


def drop_journals(log: LogContext) -> Steps[None]:
    """Delete the journals of all engines."""
    for first in count(0, SLOTS_PER_LOOK):
        gone = yield from Command(["DEL", *map(log.names.journal, slots_of(GENERATE, first))], int)
        if not gone:
            break
