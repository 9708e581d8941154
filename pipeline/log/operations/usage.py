"""Operations on what owners have used, and on whose requests live."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from pipeline.log.operation import Batch, Command, LogContext, Script, Words, commit
from pipeline.log.protocol import Used
from pipeline.log.replies import as_text

DAY_MS: Final = 86_400_000
KEPT_DAYS: Final = 40
"""Days for which usage is kept; commits/lib.lua has the number, too."""


def usage(log: LogContext, owners: Sequence[str], days: Sequence[int]) -> Batch[dict[tuple[str, int, str], Used]]:
    """Return what *owners* have used on *days*, each counted from 1970: (owner, day, model) -> usage."""
    asked = [(owner, day) for owner in owners for day in days]

    def parse(replies: list[Any]) -> dict[tuple[str, int, str], Used]:
        found = {}
        for (owner, day), reply in zip(asked, replies, strict=True):
            for model, told in _pairs(reply):
                found[owner, day, model] = Used(*map(int, told.split()))
        return found

    return Batch([["HGETALL", log.names.usage(owner, day)] for owner, day in asked], parse)


def users(log: LogContext, since_day: int) -> Command[list[str]]:
    """Return the owners that have usage since a day."""
    words: Words = ["ZRANGEBYSCORE", log.names.users, since_day, "+inf"]
    return Command(words, lambda reply: [as_text(owner) for owner in reply])


def recount(log: LogContext, owner: str, day: int, used: Mapping[str, Used]) -> Script[None]:
    """Raise each figure of an owner's usage on a day to that of *used*, by model: of what the archive has, nothing is
    lost, and nothing is counted twice."""
    names = log.names
    keys = {"usage": names.usage(owner, day), "users": names.users}
    words = [word for model, one in used.items() for word in (model, one.words())]
    return commit("recount", lambda _: None, keys, *words, owner=owner, day=day)


def living_of(log: LogContext, owners: Collection[str]) -> Command[list[str]]:
    """Return the requests of *owners* that have not ended."""

    def parse(reply: Any) -> list[str]:
        return [uid for uid, account in _pairs(reply) if account[2:].partition("\n")[0] in owners]

    return Command(["HGETALL", log.names.accounts], parse)


def _pairs(reply: Any) -> list[tuple[str, str]]:
    """Return the fields of a reply to HGETALL: a map in RESP3, a list in RESP2."""
    words = [as_text(word) for word in (chain(*reply.items()) if isinstance(reply, dict) else reply)]
    return list(zip(words[::2], words[1::2], strict=True))
