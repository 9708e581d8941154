"""`History.open`: a recorded request, found in the log of a running server or in an archive."""

from __future__ import annotations

from typing import Any, Self

from pipeline.views import recorded


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
