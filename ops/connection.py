"""How a tool finds the log of a server that runs, and what every such tool says when it cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ops.config import ConnectConfig
from pipeline.archive.reader import Archive, open_archive
from pipeline.errors import ConfigError, LogNotThere, LogUnavailable, MiniSGLError
from pipeline.flags import flags_of, split_names
from pipeline.log.protocol import DEFAULT_LIMITS, Entry, HistoryLog, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import STAGES, Names
from pipeline.process.redis_server import socket_of, url_of
from pipeline.stage.slots import read_statuses
from web.wire.uids import uid_of


class NotThere(MiniSGLError):
    """The log does not hold what the user named."""


class EmptyLog:
    """The log of a server that does not run."""

    def __init__(self, names: Names, limits: RequestLimits) -> None:
        self.names, self.limits = names, limits

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        return [[] for _ in uids]

    def begins(self, uids: Sequence[str]) -> dict[str, Entry]:
        return {}

    def alive(self, uids: Sequence[str]) -> set[str]:
        return set()

    def statuses(self, stage: str) -> dict[str, str]:
        return {}

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        return []

    def journal(
        self, engine: str, *, first: str = "-", last: str = "+", max_entries: int = 0, newest: bool = False
    ) -> list[Entry]:
        return []

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        return []


@contextlib.contextmanager
def running_log(config: ConnectConfig, limits: RequestLimits = DEFAULT_LIMITS) -> Iterator[RedisLog]:
    """Give the log of the server that *config* means.

    Raises:
        ConfigError: The URL is none.
        LogNotThere: There is no such server.
        LogUnavailable: Its Redis does not answer, now or at a later call.
    """
    socket = socket_of(config.folder)
    if not config.redis_url and not socket.exists():
        raise LogNotThere(
            f"no server runs in {config.folder}; name it with --port or --data-dir, or its Redis with --redis-url"
        )
    url, names = config.redis_url or url_of(socket), Names(config.namespace)
    limits = dataclasses.replace(limits, drops_ended=False)
    with contextlib.closing(RedisLog(url, names, limits)) as log:
        try:
            yield log
        except LogUnavailable as error:
            where = "the Redis of --redis-url" if config.redis_url else f"the Redis of the server in {config.folder}"
            raise type(error)(f"{where} cannot be used: {error}") from error


@contextlib.contextmanager
def log_and_archive(
    config: ConnectConfig, folder: str, limits: RequestLimits = DEFAULT_LIMITS
) -> Iterator[tuple[HistoryLog, Archive | None]]:
    """Give the log of the server that *config* means, and the archive in *folder*, if that is not empty.

    With an archive, the server need not run: then the log is empty, and a line on stderr says so.

    Raises:
        ConfigError: The URL is none, or the folder is no archive.
        LogUnavailable: There is no such server, and no archive is named; or its Redis refuses the user or is busy.
    """
    archive = open_archive(folder) if folder else None
    with contextlib.ExitStack() as stack:
        try:
            if archive is not None:
                with running_log(config, limits) as asked:
                    asked.histories([""])
            log: HistoryLog = stack.enter_context(running_log(config, limits))
        except LogNotThere as error:
            if archive is None:
                raise
            sys.stderr.write(f"minisgl: only the archive is read, because {error}\n")
            log = EmptyLog(Names(config.namespace), limits)
        yield log, archive


def learn_retention(log: HistoryLog, given_s: float | None) -> None:
    """Have *log* keep what ends for as long as the server does: for *given_s*, or else for what its workers say.

    Without either, the retention of *log* does not change. Raises LogUnavailable.
    """
    told_s = (status.retention_s for stage in STAGES for status in read_statuses(log, stage))
    retention_s = given_s or max(told_s, default=0) or log.limits.retention_s
    log.limits = dataclasses.replace(log.limits, retention_s=retention_s)


def split_named(
    command: str, arguments: Sequence[str], what: str, owners: Sequence[type[Any]]
) -> tuple[str, Sequence[str]]:
    """Return what the command is about, and its flags, those of *owners*.

    The first is empty where help is asked for, or where a flag is unknown: `parse_flags` says so.

    Raises:
        ConfigError: It is not there, or there are several.
    """
    names, flags = split_names(arguments, owners)
    if len(names) == 1:
        return names[0], flags
    known = {name for item in flags_of(owners) for name in item.metadata["flags"]}
    if asks_for_help(arguments) or any(flag.partition("=")[0] not in known for flag in flags if flag.startswith("-")):
        return "", flags
    seen = " ".join(map(one_line, names)) or "nothing"
    raise ConfigError(f"{command}: {seen} given, expected {what} (see minisgl {command} --help)")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(arguments)


def uid_in(text: str) -> str:
    """Return the uid in what a user names a request by; what holds none, as it is."""
    return uid_of(text.strip().lower()) or text


def one_line(text: str) -> str:
    """Return *text* as a terminal may show it in one line: what does not print is escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def counted(count: int, noun: str) -> str:
    """Return how many there are, for people: `1 request`, `2,000 replies`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return *rows* as aligned lines, the columns *right* to the right; the last is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
