"""The checks that a Redis of --redis-url must pass before a server uses it."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from typing import Any, Final

import redis
import redis.exceptions
import redis.sentinel
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.errors import ConfigError
from pipeline.log.address import Address, parse_address
from pipeline.log.drivers import ELSEWHERE, PASSING, code_of
from pipeline.log.operations.requests import DISK_ACK_MS
from pipeline.names import Names
from pipeline.process.redis_server import OLDEST

logger = structlog.get_logger()

CHECK_TIMEOUT_S = 5.0
WITH_WAITAOF: Final = (7, 2)
EARLY_MS: Final = 300
"""A server that syncs once a second has nothing on disk so soon after the last time."""
AGAIN_S = 0.5
"""Pause between two questions to a busy server."""


def check_server(
    url: str, max_log_bytes: int = 0, namespace: str = "", acks_disk: bool = False, patience_s: float = 0.0
) -> None:
    """Make sure that the Redis at *url* can hold the log, which may grow to *max_log_bytes*; 0: without a limit.

    *acks_disk*: it must be able to say what is on its disk. Wait while the server is busy, and up to *patience_s* while
    it cannot be reached.

    Raises:
        ConfigError: It cannot be reached, refuses the user, is older than 6.2, may evict keys, cannot tell *acks_disk*,
            is full before the log has that size, or is a node of a cluster without the log. The message says what to
            do.
    """
    address = parse_address(url)
    names = Names(namespace) if namespace else Names()
    with address.client(names.live, retry=Retry(NoBackoff(), 0), socket_timeout=CHECK_TIMEOUT_S) as client:
        info = _info(client, address, patience_s, "server", "memory", *["persistence"] * acks_disk)
        if not address.is_cluster:
            _check_cluster(client, address, names)
        confirms_early = acks_disk and _confirms_early(client, names)
    # The Redis version that it is compatible with: every Valkey reports 7.2.4.
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST:
        raise ConfigError(f"Redis {info['redis_version']} at {address.shown}: 6.2 or newer is needed; upgrade it")
    if acks_disk and version < WITH_WAITAOF:
        raise ConfigError(
            f"--acks-disk: Redis {info['redis_version']} at {address.shown} cannot say what is on its disk; upgrade it "
            "to 7.2 or to Valkey, or leave the flag out"
        )
    if acks_disk and not int(info.get("aof_enabled", 0)):
        raise ConfigError(
            f"--acks-disk: Redis at {address.shown} has no append-only file; run: redis-cli CONFIG SET appendonly yes"
        )
    if confirms_early:
        raise ConfigError(
            f"--acks-disk: Redis at {address.shown} says that a write is on disk before it is, as Valkey 9.1 and Redis "
            "7.4.0 do with appendfsync everysec; run: redis-cli CONFIG SET appendfsync always, also on its replicas, "
            "and let the user of --redis-url run CONFIG GET"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"Redis at {address.shown} has maxmemory-policy {policy} and would evict live requests; "
            "run: redis-cli CONFIG SET maxmemory-policy noeviction"
        )
    maxmemory = int(info.get("maxmemory", 0))
    if 0 < maxmemory <= max_log_bytes:
        raise ConfigError(
            f"--max-log-bytes {max_log_bytes}: Redis at {address.shown} is full before that, at its maxmemory "
            f"{maxmemory}; pass less, or run: redis-cli CONFIG SET maxmemory {2 * max_log_bytes}"
        )


def _info(client: redis.Redis, address: Address, patience_s: float, *sections: str) -> dict[str, Any]:
    until_s, said = time.monotonic() + patience_s, ""
    while True:
        try:
            # Sections by name: a restricted user may read them, and 6.2 takes one at a time.
            return functools.reduce(operator.or_, map(client.info, sections))
        except redis.exceptions.RedisError as error:
            code, text = code_of(error)
            is_away = isinstance(error, _AWAY) and not isinstance(error, redis.exceptions.AuthenticationError)
            if code not in PASSING - {"NOAUTH"} and not (is_away and time.monotonic() < until_s):
                raise ConfigError(f"--redis-url {address.shown}: {_why_not(error, address)}") from error
            if text != said:
                logger.warning("log_unavailable", error=text)
                said = text
            time.sleep(AGAIN_S)


_AWAY: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""Errors of a server that may come; Sentinels that name none are among them."""


def _check_cluster(client: redis.Redis, address: Address, names: Names) -> None:
    """Read a key of the log: a node of a cluster that does not have the key names the node that does.

    Ignore other errors: the workers wait until those pass.
    """
    try:
        client.exists(names.live)
    except redis.exceptions.RedisError as error:
        code, text = code_of(error)
        if code in ELSEWHERE:
            scheme = "redis" if address.tls is None else "rediss"
            raise ConfigError(
                f"--redis-url {address.shown}: a node of a cluster that does not have the log of --namespace "
                f"{names.namespace} ({text}); use {scheme}+cluster://, "
                "which asks the nodes for the one that has it"
            ) from error


def _confirms_early(client: redis.Redis, names: Names) -> bool:
    """Return whether the server confirms a write at once after another, though it does not sync each write to disk."""
    with contextlib.suppress(redis.exceptions.NoPermissionError):
        if client.config_get("appendfsync").get("appendfsync") == "always":
            return False
    try:
        for timeout_ms in (DISK_ACK_MS, EARLY_MS):
            client.set(names.limit("acks"), 1, px=EARLY_MS)
            (local, _) = client.execute_command("WAITAOF", 1, 0, timeout_ms)
    except redis.exceptions.ResponseError:  # an older server, or one without a file, or without these rights
        return False
    return bool(local)


def _why_not(error: redis.exceptions.RedisError, address: Address) -> str:
    """Return why the server cannot be used, and what to do."""
    text = str(error)
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"{text}; give the user the rights that ops/redis/users.acl has for its role"
    if isinstance(error, redis.exceptions.AuthenticationError) or "NOAUTH" in text:
        return f"{text}; put user and password into the URL, or the password into a file: ?password_file=FILE"
    for part, remedy in _TLS_REMEDIES.items():
        if part in text:
            return f"no TLS connection ({text}); {remedy}"
    if isinstance(error, redis.sentinel.MasterNotFoundError) and address.is_cluster:
        return f"{text}; name nodes that run, several of them"
    if isinstance(error, redis.sentinel.MasterNotFoundError):
        return f"{text}; name the service as they do, and Sentinels that run (sentinel_password= where they want one)"
    if any(part in text for part in _HUNG_UP):
        if address.tls is None:
            return f"it hangs up ({text}); if the server speaks TLS there, use rediss://"
        if "ssl_certfile" not in address.tls:
            return f"it hangs up ({text}); if it wants a client's certificate: ?ssl_certfile=FILE&ssl_keyfile=FILE"
        return f"it hangs up ({text}); does it know the CA of the client's certificate (its tls-ca-cert-file)?"
    if address.tls is not None and isinstance(error, redis.exceptions.TimeoutError):
        return f"no TLS connection ({text}); if the server speaks no TLS at this port, use redis://"
    return (
        f"cannot be reached ({text}); start a redis-server there, or leave the flag out of `serve` for an embedded one"
    )


_HUNG_UP: Final = (
    "Connection closed by server",
    "Connection reset by peer",
    "EOF occurred",
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "Broken pipe",
)
"""Parts of the errors of a connection that the other side closed, sometimes with a reason."""
_TLS_REMEDIES: Final = {
    "Hostname mismatch": "use a name of the server that is in its certificate",
    "IP address mismatch": "use a name of the server that is in its certificate",
    "CERTIFICATE_VERIFY_FAILED": "name the CA that signed the server's certificate: ?ssl_ca_certs=FILE",
    "WRONG_VERSION_NUMBER": "the server speaks no TLS at this port: use redis://",
}
"""Part of OpenSSL's error -> what to do. The first match is used."""
