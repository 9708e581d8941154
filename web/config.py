"""Flags of the web stage: where a frontend listens, what it accepts, and from whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.flags import at_least, flag, port_number, seconds, seconds_or_0
from pipeline.log.config import LogConfig
from pipeline.process.config import WorkerConfig

DEFAULT_PORT: Final = 1919


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Where the frontend listens."""

    host: str = flag("--host", default="127.0.0.1", help="address to listen on")
    port: int = flag("--port", default=DEFAULT_PORT, parse=port_number, help="port to listen on")


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """On what a frontend listens instead of an address."""

    listen_fd: int | None = flag(
        "--listen-fd", default=None, parse=at_least(0), help="an inherited socket to listen on, not --host and --port"
    )


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """What a frontend takes."""

    request_timeout_s: float = flag(
        "--request-timeout", default=600.0, parse=seconds, help="seconds after which a request fails"
    )
    max_queued_requests: int = flag(
        "--max-queued-requests",
        default=1024,
        parse=at_least(1),
        help="requests waiting or running beyond which new ones get 503",
    )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What a frontend does for its clients."""

    disconnect_grace_s: float = flag(
        "--disconnect-grace",
        default=0.0,
        parse=seconds_or_0,
        help="seconds after which a request is cancelled that its client left and nobody reads [0: at once]",
    )


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """Who may send requests, and how many."""

    api_key: tuple[str, ...] = flag(
        "--api-key",
        default=(),
        repeated=True,
        secret=True,
        help="keys that clients must send; rather set MINISGL_API_KEY: everybody here can read a command line [none]",
    )
    limits: str = flag(
        "--limits", default="", help="TOML file of the API keys and how many requests each may send [no limits]"
    )


@dataclass(frozen=True, slots=True)
class WebStageConfig:
    """The flags of `minisgl stage web`."""

    web: WebConfig
    listen: ListenConfig
    worker: WorkerConfig
    log: LogConfig
    requests: RequestConfig
    clients: ClientConfig
    keys: KeysConfig
