"""Operations on the usage of owners."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.events import Submitted
from pipeline.log.operation import Batch, Command, LogContext, Script, Words, commit
from pipeline.log.protocol import Used
from pipeline.log.replies import as_text, pairs_of
from pipeline.names import PROBE

DAY_MS: Final = 86_400_000
KEPT_DAYS: Final = 40
"""Days for which usage is kept; commits/lib.lua has the number, too."""


def today() -> int:
    """Return the day by the clock of this machine, in UTC, counted from 1970."""
    return int(time.time() * 1000) // DAY_MS


def is_counted(event: Submitted) -> bool:
    """Return whether a request is in the usage of its owner."""
    return event.replay is None and event.endpoint != PROBE and event.task == "generate"


def counts_prompt(event: Submitted, index: int) -> bool:
    """Return whether the prompt of sibling *index* counts: of the choices of a prompt, the first one has it."""
    return index % max(event.presentation.choices, 1) == 0


def usage(log: LogContext, owners: Sequence[str], days: Sequence[int]) -> Batch[dict[tuple[str, int, str], Used]]:
    """Return what *owners* have used on *days*, each counted from 1970: (owner, day, model) -> usage."""
    asked = [(owner, day) for owner in owners for day in days]

    def parse(replies: list[Any]) -> dict[tuple[str, int, str], Used]:
        found: dict[tuple[str, int, str], Used] = {}
        for (owner, day), reply in zip(asked, replies, strict=True):
            for field, figure in pairs_of(reply):
                what, _, model = field.partition(" ")
                before = found.get((owner, day, model), Used())
                found[owner, day, model] = before._replace(**{what: int(figure)})
        return found

    return Batch([["HGETALL", log.names.usage(owner, day)] for owner, day in asked], parse)


def users(log: LogContext, since_day: int) -> Command[list[str]]:
    """Return the owners that have usage since a day."""
    words: Words = ["ZRANGEBYSCORE", log.names.users, since_day, "+inf"]
    return Command(words, lambda reply: [as_text(owner) for owner in reply])


def recount(log: LogContext, owner: str, day: int, used: Mapping[str, Used]) -> Script[None]:
    """Raise the figures of an owner's usage on a day to those of *used*, by model. Figures that are larger stay, so
    requests that were counted before are not counted again."""
    names = log.names
    keys = {"usage": names.usage(owner, day), "users": names.users}
    figures = [(f"{what} {model}", figure) for model, one in used.items() for what, figure in one._asdict().items()]
    words = [word for pair in figures for word in pair]
    return commit("recount", lambda _: None, keys, *words, owner=owner, day=day)
