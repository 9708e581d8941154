"""Flags of the web stage: where a frontend listens, what it accepts, and from whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.flags import at_least, flag, port_number, seconds, seconds_or_0, size_or_0, yes_or_no
from pipeline.log.config import LogConfig
from pipeline.process.config import WorkerConfig

DEFAULT_PORT: Final = 1919
DEFAULT_BODY_BYTES: Final = 4 << 20
"""Any body up to this size holds other requests up for less than 50 ms."""
LEAST_LOG_BYTES: Final = 16 << 20
"""An empty Redis uses one or two MiB, and a few requests must have room."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Where the frontend listens."""

    host: str = flag("--host", default="127.0.0.1", help="address of the HTTP server")
    port: int = flag("--port", default=DEFAULT_PORT, parse=port_number, help="port of the HTTP server")


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """What a frontend listens on instead of an address."""

    listen_fd: int | None = flag(
        "--listen-fd",
        default=None,
        parse=at_least(0),
        help="inherited socket to listen on, instead of --host and --port",
    )


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """What a frontend accepts."""

    request_timeout_s: float = flag(
        "--request-timeout", default=600.0, parse=seconds, help="seconds after which an unfinished request fails"
    )
    max_queued_requests: int = flag(
        "--max-queued-requests",
        default=1024,
        parse=at_least(1),
        help="maximum requests waiting for an engine; above that, new ones get 503",
    )
    acks: int = flag(
        "--acks",
        default=0,
        parse=at_least(0),
        help=(
            "replicas of Redis that must have a request before its client is answered; if they do not have it within "
            "1 s, the client gets 503"
        ),
    )
    acks_disk: bool = flag(
        "--acks-disk",
        default=False,
        parse=yes_or_no,
        help=(
            "Redis, and the replicas of --acks, must also have the request in their append-only files on disk, within "
            "2.5 s; needs Redis 7.2 or Valkey"
        ),
    )


@dataclass(frozen=True, slots=True)
class BackgroundConfig:
    """What a frontend accepts of requests that go on without a client."""

    background_timeout_s: float = flag(
        "--background-timeout",
        default=3600.0,
        parse=seconds,
        help="seconds after which an unfinished response with `background: true` fails",
    )
    max_background: int = flag(
        "--max-background",
        default=64,
        parse=at_least(1),
        help="maximum responses of one API key that run in the background; above that, new ones get 429",
    )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What a frontend does for its clients."""

    disconnect_grace_s: float = flag(
        "--disconnect-grace",
        default=0.0,
        parse=seconds_or_0,
        help=(
            "seconds between a client's disconnect and the end of its request, if no other client reads it [0: at once]"
        ),
    )
    max_body_bytes: int = flag(
        "--max-body-bytes",
        default=DEFAULT_BODY_BYTES,
        parse=at_least(1024),
        help=(
            "largest request body in bytes; larger ones get 413. One body can take 10 times its size in memory and "
            "delay other requests by 50 ms for each 4 MiB"
        ),
    )
    strict_model_names: bool = flag(
        "--strict-model-names",
        default=False,
        parse=yes_or_no,
        help=(
            "return 404 for a `model` that is not served; without the flag, the served model answers, and the header "
            "x-minisgl-model names it"
        ),
    )
    trusted_proxies: tuple[str, ...] = flag(
        "--trusted-proxies",
        default=(),
        repeated=True,
        help=(
            "addresses or networks of proxies, such as 10.0.0.5 or 10.0.0.0/8, whose X-Forwarded-For header names the "
            "client; connections count for that client's address [none]"
        ),
    )
    pages: bool = flag(
        "--pages",
        default=True,
        parse=yes_or_no,
        help="serve the pages: a playground at /, the live pipeline at /pipeline, timelines at /requests/<uid>",
    )
    max_log_bytes: int | None = flag(
        "--max-log-bytes",
        default=None,
        parse=size_or_0(LEAST_LOG_BYTES),
        help=(
            "memory that Redis may use before new requests get 503, such as 2G; 0: no limit "
            "[a tenth of the machine's memory for the embedded server, no limit for --redis-url]"
        ),
    )


@dataclass(frozen=True, slots=True)
class OriginConfig:
    """The web pages that may send requests, and the names by which clients may call the server."""

    allow_host: tuple[str, ...] = flag(
        "--allow-host",
        default=(),
        repeated=True,
        help=(
            "names that clients may use for the server, besides localhost and its own address, or *; without API keys, "
            "another name in the Host header gets 403 [none; all with --host 0.0.0.0]"
        ),
    )
    allow_origin: tuple[str, ...] = flag(
        "--allow-origin",
        default=(),
        repeated=True,
        help=(
            "origins of web pages that may use the server, such as https://chat.example.com, or *; without API keys, "
            "pages of other origins get 403 [none]"
        ),
    )


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """The keys of clients, their limits, and the admin key."""

    api_key: tuple[str, ...] = flag(
        "--api-key",
        default=(),
        repeated=True,
        secret=True,
        help=(
            "keys that clients must send; prefer MINISGL_API_KEY, because other users of this "
            "machine can read a command line [none]"
        ),
    )
    limits: str = flag(
        "--limits",
        default="",
        help="TOML file with API keys, their limits, and each one's share of the log [no limits]",
    )
    admin_key: str | None = flag(
        "--admin-key",
        default=None,
        secret=True,
        help=(
            "key that may do everything; only it may flush the cache, abort all requests and read those of others; "
            "prefer MINISGL_ADMIN_KEY [none]"
        ),
    )


@dataclass(frozen=True, slots=True)
class ArchivedConfig:
    """Where to find requests that Redis no longer keeps."""

    archive: str = flag(
        "--archive",
        default="",
        help=(
            "folder of archived requests, which are found as if they were in Redis; `serve` also archives every "
            "request there when it ends [none]"
        ),
    )


@dataclass(frozen=True, slots=True)
class DemandConfig:
    """Whether engines may be away."""

    engines_on_demand: bool = flag(
        "--engines-on-demand",
        default=False,
        parse=yes_or_no,
        help=(
            "serve while no engine is there, because something else starts one when a request waits, as KEDA does; "
            "/ready does not wait for engines and sends no request"
        ),
    )


@dataclass(frozen=True, slots=True)
class WebStageConfig:
    """The flags of `minisgl stage web`."""

    web: WebConfig
    listen: ListenConfig
    worker: WorkerConfig
    log: LogConfig
    requests: RequestConfig
    background: BackgroundConfig
    clients: ClientConfig
    origins: OriginConfig
    keys: KeysConfig
    archived: ArchivedConfig
    demand: DemandConfig
