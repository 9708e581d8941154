"""Where replays get recorded requests from: the log of a running server, an archive, and dead letters; and which."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self, TypeAlias, get_args

import orjson

from ops.config import ConnectConfig
from ops.connection import learn_retention, log_and_archive, uid_in
from ops.dead import letters_in
from ops.replay.formats import CUSTOM_ID, IMPORTED_FROM, about_of
from ops.trace import absent, removed_of, when
from pipeline.archive.reader import SKEW_S, Archive, Where
from pipeline.errors import ConfigError, UndecodableEvent
from pipeline.events import Submitted, decode
from pipeline.flags import flag
from pipeline.log.protocol import DEFAULT_LIMITS, Entry, HistoryLog, RequestLimits, is_between
from pipeline.names import PROBE, sibling_uids
from pipeline.recording import Recording
from pipeline.views import recorded
from pipeline.views.history import REQUEUED_FROM, State, copied_history, state_of
from pipeline.walk import PROMPT
from web.wire import fields
from web.wire.copies import COPY_OF
from web.wire.uids import drawn_ms, uid_of

SIBLINGS_PER_LOOK: Final = 16


class Source:
    """Finds requests: first in a log, then in an archive, if there is one. What both lack may be in a dead letter."""

    def __init__(self, log: HistoryLog, archive: Archive | None = None) -> None:
        self.log = log
        self._archive = archive
        self._archived: dict[str, Where] = {}
        """Where requests are that were listed, so that nobody has to search for them again."""
        self.removed: set[str] = set()
        """Requests that `histories` did not find because they were removed with `minisgl replay forget`."""

    def recordings(self, names: Sequence[str]) -> list[Recording]:
        """Return the requests that *names* mean, in this order: uids, or ids of answers. The uid of a body that made
        several requests means all of them.

        Raises:
            NotThere: One is not there; the message says why.
        """
        found: list[Recording] = []
        for name in names:
            uid = uid_in(name)
            here = self._family(uid)
            if not here:
                raise absent(uid, self.log, self._archive)
            found += here
        return found

    def histories(self, uids: Sequence[str]) -> list[Sequence[Entry]]:
        """Return the history of each of *uids*; an empty one where there is none."""
        found: dict[str, Sequence[Entry]] = dict(zip(uids, self.log.histories(uids), strict=True))
        if missing := [uid for uid in uids if not found[uid]]:
            self.removed |= removed_of(self.log, missing)
        for look in (self._in_archive, self._in_letters):
            if missing := [uid for uid in uids if not found[uid] and uid not in self.removed]:
                found |= look(missing)
        return [found[uid] for uid in uids]

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        """Return the uids of the requests that were made from *since_ms* to before *until_ms*, the oldest first."""
        uids = set(self.log.made_between(since_ms, until_ms))
        if self._archive is not None:  # it goes by the clock of Redis, and uids by that of the process that drew them
            self._archived = self._archive.located(since_ms - SKEW_S * 1000, until_ms + SKEW_S * 1000)
        dead = (letter.fields.get("uid", "") for letter in self._letters())
        return sorted(uids.union(uid for uid in (*self._archived, *dead) if is_between(uid, since_ms, until_ms)))

    def dead_letter(self, uid: str) -> Entry | None:
        """Return the dead letter of a request that killed its workers; None if there is none."""
        letters = (letter for letter in letters_in(self.log) if letter.fields.get("uid") == uid)
        return next((letter for letter in letters if "stream" not in letter.fields), None)

    def _in_archive(self, uids: Sequence[str]) -> Mapping[str, Sequence[Entry]]:
        found = self._archive.read(uids, self._archived) if self._archive is not None else {}
        return {uid: recording.entries for uid, recording in found.items()}

    def _in_letters(self, uids: Sequence[str]) -> Mapping[str, Sequence[Entry]]:
        found: dict[str, Sequence[Entry]] = {}
        for letter in self._letters():
            uid = letter.fields.get("uid", "")
            if uid in uids and uid not in found:
                found[uid] = copied_history(letter)
        return found

    def _letters(self) -> Iterator[Entry]:
        """Give the dead letters that have the whole history of a request, the newest first."""
        return (letter for letter in letters_in(self.log) if not {"stream", "history_cut"} & letter.fields.keys())

    def _family(self, uid: str) -> list[Recording]:
        (entries,) = self.histories([uid])
        return [Recording(uid, tuple(entries))] if entries else self._siblings(uid)

    def _siblings(self, uid: str) -> list[Recording]:
        """Return the requests of the body *uid* that are still there."""
        uids = sibling_uids(uid, SIBLINGS_PER_LOOK)
        found = dict(zip(uids, self.histories(uids), strict=True))
        first = next((decode(entries[0].fields, without=PROMPT) for entries in found.values() if entries), None)
        if isinstance(first, Submitted):
            more = sibling_uids(uid, first.siblings)[SIBLINGS_PER_LOOK:]
            found |= zip(more, self.histories(more), strict=True)
        return [Recording(each, tuple(entries)) for each, entries in found.items() if entries]


@contextlib.contextmanager
def open_source(
    connect: ConnectConfig,
    archive: str,
    retention_s: float | None = None,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> Iterator[Source]:
    """Give the requests of a server, and of the *archive* in a folder, if one is named.

    *retention_s* is that of the server; None: its workers tell it. Raises as `log_and_archive`.
    """
    with log_and_archive(connect, archive, limits) as (log, files):
        learn_retention(log, retention_s)
        yield Source(log, files)


class History(recorded.History):
    """One recorded request."""

    @classmethod
    def open(cls, name: str, *, archive: str = "", **where: Any) -> Self:
        """Return the request *name*, a uid or the id of an answer, from the log of a running server or an archive.

        *where*: the server, as `minisgl trace` takes it: `port`, `data_dir`, `redis_url`, `namespace`. *archive*: the
        folder of archived requests; with it, no server need run.

        Raises:
            NotThere: It is not there; the message says why.
            ConfigError: The folder is no archive.
            LogUnavailable: There is no such server, and no archive is named.
            UndecodableEvent: The history is damaged.
        """
        from ops.config import ConnectConfig
        from ops.connection import NotThere
        from ops.replay.source import open_source

        with open_source(ConnectConfig(**where), archive) as source:
            found = source.recordings([name])
        if len(found) > 1:
            raise NotThere(f"{name}: {len(found)} requests of one body; open one of them, such as {found[0].uid}")
        return cls(found[0])


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

Conditions: TypeAlias = tuple[tuple[str, str], ...]


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


def conditions(text: str) -> Conditions:
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


def matches(history: Sequence[Entry], where: Conditions) -> bool:
    """Say whether a history fulfils all conditions; one that cannot be read fulfils none."""
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
