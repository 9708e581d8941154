"""Which recorded requests a command is about: from one moment to another, and by what was asked. Reads them."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, get_args

import orjson

from ops.connection import uid_in
from ops.replay.origin import CUSTOM_ID, IMPORTED_FROM, about_of
from ops.replay.source import Source
from ops.trace import when
from pipeline.errors import ConfigError, UndecodableEvent
from pipeline.events import Submitted, decode
from pipeline.flags import flag
from pipeline.log.protocol import Entry
from pipeline.names import PROBE
from pipeline.recording import Recording
from pipeline.views.history import State, state_of
from pipeline.views.letters import REQUEUED_FROM
from pipeline.walk import PROMPT
from web.wire import fields
from web.wire.copies import COPY_OF
from web.wire.uids import drawn_ms, uid_of

SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOMENT: Final = "2026-11-23T09:00 (UTC, or with an offset such as +01:00), -10m, -2h, or a uid"
AHEAD_S: Final = 60
"""The clock of a user may be so far ahead of ours."""
READ_AT_ONCE: Final = 32
"""Histories in one read."""
LOOK_EVERY_S: Final = 0.1
"""Where it waits for requests that still run: how often it looks for those that have ended."""
STATES: Final = tuple(state for state in get_args(State) if state not in ("queued", "tokenized", "running"))
NAMES: Final = (
    *("model", "endpoint", "owner", "state"),
    *fields.LABELS,
    *(COPY_OF, REQUEUED_FROM, CUSTOM_ID, IMPORTED_FROM),
)
"""What conditions may be about: the fields of a request, and its labels, those of tools last."""

Where: TypeAlias = tuple[tuple[str, str], ...]


def since(text: str) -> int:
    """Return the moment that *text* means, in milliseconds since 1970. Raises ArgumentTypeError."""
    moment_ms, now_s = _moment_ms(text), time.time()
    if moment_ms > (now_s + AHEAD_S) * 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: is in the future; it is {when(int(now_s * 1000))} now")
    return moment_ms


def until(text: str) -> int:
    """As `since`; the request of a uid is meant, too. It may be in the future: then all are meant that are there."""
    return _moment_ms(text) + bool(uid_of(uid_in(text)))


def _moment_ms(text: str) -> int:
    if uid_of(uid_in(text)):
        return drawn_ms(uid_in(text))
    ago = re.fullmatch(r"-?([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if ago:
        return int(max(time.time() - float(ago[1]) * SECONDS[ago[2]], 0) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a moment: {MOMENT}") from None
    return int(max((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp(), 0) * 1000)


def conditions(text: str) -> Where:
    """Return the conditions `NAME=VALUE,..`. Raises ArgumentTypeError."""
    pairs = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or (name == "state" and value not in STATES):
            expected = f"NAME=VALUE,.., where NAME is model, endpoint, owner, state ({', '.join(STATES)}) or a label"
            raise argparse.ArgumentTypeError(f"{text!r}: must be {expected}")
        if name not in NAMES:
            raise argparse.ArgumentTypeError(
                f"{text!r}: no request has {name!r}; NAME must be one of {', '.join(NAMES)}"
            )
        pairs.append((name, value))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class ChoiceConfig:
    """Which requests."""

    since_ms: int | None = flag(
        "--since", default=None, parse=since, help=f"requests made at or after this moment: {MOMENT}"
    )
    until_ms: int | None = flag(
        "--until", default=None, parse=until, help="requests made before this moment, or up to a uid"
    )
    where: tuple[tuple[str, str], ...] = flag(
        "--where",
        default=(),
        parse=conditions,
        help="only requests with NAME=VALUE,..: model, endpoint, owner, state, or a label such as user",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError if there is no moment between the two."""
        if self.since_ms is not None and self.until_ms is not None and self.until_ms <= self.since_ms:
            raise ConfigError(f"--until: {when(self.until_ms)} is not later than --since, {when(self.since_ms)}")

    @property
    def names_moments(self) -> bool:
        return self.since_ms is not None or self.until_ms is not None


class Past:
    """Reads requests that have ended, and counts those that it leaves out."""

    def __init__(self, source: Source, choice: ChoiceConfig, *, wait: bool = False) -> None:
        """With *wait*, `recordings` waits until those that run have ended."""
        self._source = source
        self._choice = choice
        self._wait = wait
        self.num_running = 0
        self.num_gone = 0

    def chosen(self) -> Iterator[Recording]:
        """As `recordings`, of the requests that were made between the two moments."""
        since_ms, until_ms = self._choice.since_ms or 0, self._choice.until_ms
        uids = self._source.made_between(since_ms, 2**48 if until_ms is None else until_ms)
        yield from self.recordings(uids)

    def recordings(self, uids: Sequence[str]) -> Iterator[Recording]:
        """Yield those of *uids* that fulfil all conditions."""
        running = yield from self._ended(uids)
        while running and self._wait:
            time.sleep(LOOK_EVERY_S)
            living = self._source.log.alive(running)
            over = [uid for uid in running if uid not in living]
            running = [uid for uid in running if uid in living]
            self.num_running += len((yield from self._ended(over)))
        self.num_running += len(running)

    def _ended(self, uids: Sequence[str]) -> Generator[Recording, None, list[str]]:
        """Yield those that have ended; return those that have not."""
        running: list[str] = []
        for first in range(0, len(uids), READ_AT_ONCE):
            some = uids[first : first + READ_AT_ONCE]
            for uid, history in zip(some, self._source.histories(some), strict=True):
                recording = Recording(uid, tuple(history), about_of(history))
                if not history:
                    self.num_gone += uid not in self._source.removed
                elif history[0].fields.get("endpoint") == PROBE or not matches(history, self._choice.where):
                    continue
                elif recording.is_sealed:
                    yield recording
                else:
                    running.append(uid)
        return running


def matches(history: Sequence[Entry], where: Where) -> bool:
    """Return whether a history fulfils all conditions; one that cannot be read fulfils none."""
    if not where:
        return True
    if not history:
        return False
    try:
        submitted = decode(history[0].fields, without=PROMPT)
    except UndecodableEvent:
        return False
    if not isinstance(submitted, Submitted):
        return False
    told = submitted.labels | {"model": submitted.model, "endpoint": submitted.endpoint, "owner": submitted.owner}
    told |= {"state": state_of(history)}
    return all(name in told and _text(told[name]) == value for name, value in where)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
