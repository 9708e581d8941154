"""How a tool finds the log of a server that runs, and what every such tool says when it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ops.config import ConnectConfig
from pipeline.errors import ConfigError, LogUnavailable, MiniSGLError
from pipeline.log.protocol import DEFAULT_LIMITS, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process.redis_server import socket_of, url_of
from web.wire.uids import uid_of


class NotThere(MiniSGLError):
    """The log does not hold what the user named."""


@contextlib.contextmanager
def running_log(config: ConnectConfig, limits: RequestLimits = DEFAULT_LIMITS) -> Iterator[RedisLog]:
    """Give the log of the server that *config* means.

    Raises:
        ConfigError: The URL is none.
        LogUnavailable: There is no such server, or its Redis does not answer, now or at a later call.
    """
    socket = socket_of(config.folder)
    if not config.redis_url and not socket.exists():
        raise LogUnavailable(
            f"no server runs in {config.folder}; name it with --port or --data-dir, or its Redis with --redis-url"
        )
    url, names = config.redis_url or url_of(socket), Names(config.namespace)
    with contextlib.closing(RedisLog(url, names, limits)) as log:
        try:
            yield log
        except LogUnavailable as error:
            where = "the Redis of --redis-url" if config.redis_url else f"the Redis of the server in {config.folder}"
            raise LogUnavailable(f"{where} cannot be used: {error}") from error


def named_first(command: str, arguments: Sequence[str], what: str) -> tuple[str, Sequence[str]]:
    """Take what the command is about off the front of its arguments; empty where help is asked for.

    Raises:
        ConfigError: It is not there.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if "--help" in arguments or "-h" in arguments:
        return "", arguments
    seen = arguments[0] if arguments else "nothing"
    raise ConfigError(f"minisgl {command}: {seen} given, expected {what} first (see minisgl {command} --help)")


def uid_in(text: str) -> str:
    """Return the uid in what a user names a request by; what holds none, as it is."""
    return uid_of(text.strip().lower()) or text


def one_line(text: str) -> str:
    """Return *text* as a terminal may show it in one line: what does not print is escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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
