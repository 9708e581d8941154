"""The exception tree. An error of one request becomes its `Failed` event; an error of the process ends the process."""

from __future__ import annotations


class MiniSGLError(Exception):
    """Anything that MiniSGL raises on purpose."""


class ConfigError(MiniSGLError):
    """The user asked for something impossible. The process prints this one line and exits with 2."""


class RequestError(MiniSGLError):
    """One request is wrong or cannot be served. Its client gets *status* and an OpenAI error body."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status


class RankLost(MiniSGLError):
    """A rank of the engine died or stands still. The others cannot go on without it, so all of them end."""


class DeviceFull(MiniSGLError):
    """The device had no memory left for a step. The engine ends, and its successor begins with free memory."""


class LogError(MiniSGLError):
    """The log did not do what was asked."""


class Fenced(LogError):
    """The slot has another owner now; nothing was written."""


class DoesNotFit(LogError):
    """The living workers of the namespace serve something else than this one; it got no slot."""


class GroupLost(LogError):
    """A stream or its consumer group is gone: Redis lost its data."""


class LogUnavailable(LogError):
    """Redis cannot be reached, is loading, or takes no writes at the moment."""


class LogNotThere(LogUnavailable):
    """No server is at the address of the log."""


class LogReadOnly(LogUnavailable):
    """Redis takes no writes. Perhaps another server has the log since a failover, so the address is looked up again."""


class LogFull(LogError):
    """Redis is at its memory limit and takes no new work."""


class UndecodableEvent(LogError):
    """An entry of a stream is not an event of the vocabulary."""


class NewerVersion(UndecodableEvent):
    """An entry of a stream has a newer *version* than this code reads."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it is of version {version}, which is newer than this worker reads")
        self.version = version
