"""The address of the log's Redis (--redis-url), and the clients that connect to it. Knows no command of the log.

Beyond redis-py's URLs, a URL can name Sentinels or nodes of a cluster to ask for the server, and files that hold
passwords. They are asked, and a file is read, at each connect, so that the server and its password can change while the
processes run. An address is shown without its passwords.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.exceptions
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from pipeline.errors import ConfigError

FORMS: Final = (
    "redis://[user:password@]host:6379/0, rediss://.. for TLS, unix:///path/to.sock, "
    "redis+sentinel://host:26379,host2:26379/service/0, or redis+cluster://host:6379,host2:6379"
)
SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
CONNECT_TIMEOUT_S: Final = 2.0
ASKED_TIMEOUT_S: Final = 1.0
"""Time for one Sentinel, or one node of a cluster, to answer before the next one is asked."""


@dataclass(frozen=True, slots=True)
class Secret:
    """User and password, or the file that holds the password."""

    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""

    def options(self) -> dict[str, Any]:
        """Return the options with which a client logs in; {} without user and password."""
        return {"credential_provider": _Credentials(self)} if self != Secret() else {}

    def read(self) -> str:
        """Return the password.

        Raises:
            OSError, UnicodeDecodeError: The file cannot be read.
        """
        return Path(self.password_file).read_text().strip() if self.password_file else self.password


class _Credentials(CredentialProvider):
    """Returns user and password to redis-py at each connect."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._secret.read()
        except (OSError, UnicodeDecodeError) as error:  # the file was there at the start: perhaps it is being replaced
            raise redis.exceptions.ConnectionError(f"password_file={self._secret.password_file}: {error}") from error
        return (self._secret.user, password) if self._secret.user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


@dataclass(frozen=True, slots=True)
class Address:
    """A Redis server, or the Sentinels or the nodes of a cluster that know which server it is now."""

    shown: str
    """The URL without passwords: for logs, errors and people."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Hosts of the server, of the Sentinels or of the nodes; empty if the server has a socket."""
    socket: str = ""
    service: str = ""
    """Name of the server for the Sentinels; empty without Sentinels."""
    is_cluster: bool = False
    """Whether the hosts are nodes of a cluster, any of which knows which node has a key."""
    database: int = 0
    secret: Secret = Secret()
    sentinel_secret: Secret = Secret()
    protocol: int = 2
    tls: Mapping[str, Any] | None = None
    """Options of redis-py's SSL connections; None: no TLS."""

    @property
    def is_looked_up(self) -> bool:
        """Whether the hosts are asked at each connect which server it is."""
        return self.is_cluster or bool(self.service)

    def address_here(self) -> str:
        """Return this machine's IP address on the route to the (first) host; empty if the server has a socket.

        Raises:
            OSError: The host is not known, or there is no route to it.
        """
        for host, port in self.hosts[:1]:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as way:
                way.connect(address)  # sends nothing
                return str(way.getsockname()[0])
        return ""

    def client(self, key: str, *, retry: Retry, **options: Any) -> redis.Redis:
        """Return a client for threads; *options* are redis-py's. In a cluster it is one of the node that has *key*."""
        options |= self._greeting(_ping)
        if not self.is_looked_up:
            return redis.Redis(retry=retry, **self._server(), **options)
        # "None of them answers" is an error of its own. Then the caller tries again.
        kind = _LookedUp if self.tls is None else _LookedUpSSL
        options |= self._common() | {"connection_class": kind, "retry": retry}
        client = self.asked().master_for(self.service or key, **options)
        assert isinstance(client, redis.Redis)
        return client

    def async_client(self, key: str, *, retry: AsyncRetry, **options: Any) -> redis.asyncio.Redis:
        """Return a client for asyncio, without a limit on its connections."""
        options |= self._greeting(_ping_async)
        if not self.is_looked_up:
            return redis.asyncio.Redis(retry=retry, **self._server(), **options)
        return self._master(key, redis.asyncio.sentinel.SentinelConnectionPool, retry=retry, **options)

    def bounded_async_client(
        self, key: str, *, retry: AsyncRetry, max_connections: int, wait_s: float, **options: Any
    ) -> redis.asyncio.Redis:
        """Return a client for asyncio with a limit on its connections. A task waits up to *wait_s* for a free one."""
        options |= self._greeting(_ping_async)
        bounds: dict[str, Any] = {"max_connections": max_connections, "timeout": wait_s}
        if self.is_looked_up:
            return self._master(key, _BoundedMasterPool, retry=retry, **bounds, **options)
        server = self._server()
        if self.socket:
            server["path"] = server.pop("unix_socket_path")
            server["connection_class"] = redis.asyncio.UnixDomainSocketConnection
        elif server.pop("ssl", False):
            server["connection_class"] = redis.asyncio.SSLConnection
        pool = redis.asyncio.BlockingConnectionPool(retry=retry, **bounds, **server, **options)
        return redis.asyncio.Redis(connection_pool=pool)

    def _master(
        self, key: str, pool: type[redis.asyncio.sentinel.SentinelConnectionPool], **options: Any
    ) -> redis.asyncio.Redis:
        kind = _AsyncLookedUp if self.tls is None else _AsyncLookedUpSSL
        options |= self._common() | {"connection_class": kind, "connection_pool_class": pool}
        client = _InThreads(self.asked()).master_for(self.service or key, **options)
        assert isinstance(client, redis.asyncio.Redis)
        return client

    def asked(self) -> _Asked:
        """Return whom to ask which server it is."""
        common = {"socket_timeout": ASKED_TIMEOUT_S, "socket_connect_timeout": ASKED_TIMEOUT_S}
        common |= {"retry": Retry(NoBackoff(), 0)} | self._greeting(_ping)
        if self.is_cluster:
            return _Nodes(self.hosts, self._common() | common)
        return _Sentinels(self.hosts, self.sentinel_secret.options() | self._tls() | common)

    def _common(self) -> dict[str, Any]:
        """Return the options of every connection to the server."""
        options: dict[str, Any] = {
            "db": self.database,
            "protocol": self.protocol,
            "driver_info": None,  # two commands less at each connect
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
        }
        if not self.socket:
            # These notifications switch off the check for unread data, and cost a refused command per connect.
            options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
        return options | self.secret.options() | self._tls()

    def _server(self) -> dict[str, Any]:
        if self.socket:
            return {"unix_socket_path": self.socket} | self._common()
        ((host, port),) = self.hosts
        return {"host": host, "port": port} | self._common()

    def _tls(self) -> dict[str, Any]:
        return {"ssl": True, **self.tls} if self.tls is not None else {}

    def _greeting(self, function: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the option that makes a TLS connection begin with a reply.

        A server sends session tickets after the handshake (RFC 8446, 4.6.1). Until something is read after them, the
        connection counts as one with unread data and is thrown away.
        """
        return {"redis_connect_func": function} if self.tls is not None else {}


def _ping(connection: redis.Connection) -> None:
    connection.on_connect()
    connection.send_command("PING", check_health=False)
    connection.read_response()


async def _ping_async(connection: redis.asyncio.Connection) -> None:
    await connection.on_connect()
    await connection.send_command("PING", check_health=False)
    await connection.read_response()


class _Asked(redis.sentinel.Sentinel):
    """Hosts that know which server it is. They are asked one after the other, the last one that answered first."""

    def __init__(self, hosts: Sequence[tuple[str, int]], options: Mapping[str, Any]) -> None:
        super().__init__(())  # type: ignore[no-untyped-call]  # without clients, which several threads would share
        self._hosts = tuple(hosts)
        self._options = dict(options)

    def discover_master(self, service_name: str) -> tuple[str, int]:
        is_down: redis.exceptions.RedisError | None = None
        last = ""
        for host in self._hosts:
            try:
                found = self._ask(host, service_name)
            except redis.exceptions.ClusterDownError as error:  # it says so as long as it knows of no owner
                is_down = error
            except redis.sentinel.MasterNotFoundError as error:
                last = str(error)
            else:
                self._hosts = (host, *(each for each in self._hosts if each != host))
                return found
        raise is_down or redis.sentinel.MasterNotFoundError(self._none(service_name, last))

    def _ask(self, host: tuple[str, int], service: str) -> tuple[str, int]:
        """Return where the server is.

        Raises:
            MasterNotFoundError: *host* does not answer, or does not know.
        """
        raise NotImplementedError

    def _none(self, service: str, last: str) -> str:
        """Return what to say if no host knows. *last*: the error of the last one."""
        raise NotImplementedError


class _Sentinels(_Asked):
    """Sentinels, asked for the server with a name."""

    def _ask(self, host: tuple[str, int], service: str) -> tuple[str, int]:
        one = redis.sentinel.Sentinel((host,), sentinel_kwargs=self._options)
        try:
            found: tuple[str, int] = one.discover_master(service)
            return found
        finally:
            one.sentinels[0].close()

    def _none(self, service: str, last: str) -> str:
        num = len(self._hosts)
        asked = "the Sentinel does not name" if num == 1 else f"none of {num} Sentinels names"
        return f"{asked} a server that is up for {service!r}"


class _Nodes(_Asked):
    """Nodes of a cluster, asked for the node that has a key."""

    def _ask(self, host: tuple[str, int], service: str) -> tuple[str, int]:
        with redis.Redis(*host, **self._options) as node:
            try:
                node.exists(service)
            except redis.exceptions.AskError as error:  # or MOVED. After an ASK the other node has the log soon.
                return error.host or host[0], error.port
            except redis.exceptions.AuthenticationError:
                raise
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                raise redis.sentinel.MasterNotFoundError(str(error)) from error
        return host

    def _none(self, service: str, last: str) -> str:
        num = len(self._hosts)
        asked = "the node of the cluster does not say" if num == 1 else f"none of {num} nodes of the cluster says"
        return f"{asked} which one has {service!r}: {last}"


class _InThreads(redis.asyncio.sentinel.Sentinel):
    """The same for asyncio: a thread asks them."""

    def __init__(self, asked: _Asked) -> None:
        super().__init__(())  # type: ignore[no-untyped-call]
        self._asked = asked

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        return await asyncio.to_thread(self._asked.discover_master, service_name)


class _LookedUp(redis.sentinel.SentinelManagedConnection):
    """A connection that looks the server up whenever it connects.

    redis-py's connects to the last address when a command is sent on a closed connection. There may be a master again
    that another one has replaced.
    """

    def connect_to(self, address: tuple[str, int]) -> None:
        self.host, self.port = address
        super().connect_check_health(retry_socket_connect=False)

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        self.connect_to(self.connection_pool.get_master_address())


class _LookedUpSSL(_LookedUp, redis.sentinel.SentinelManagedSSLConnection):
    """The same with TLS."""


class _AsyncLookedUp(redis.asyncio.sentinel.SentinelManagedConnection):
    """The same for asyncio."""

    async def connect_to(self, address: tuple[str, int]) -> None:
        self.host, self.port = address
        await super().connect_check_health(retry_socket_connect=False)

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        await self.connect_to(await self.connection_pool.get_master_address())


class _AsyncLookedUpSSL(_AsyncLookedUp, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    """The same with TLS."""


class _BoundedMasterPool(redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Connections to the server that was asked for, in a bounded number."""


def parse_address(url: str) -> Address:
    """Return the address of *url*.

    Raises:
        ConfigError: The URL is wrong, has an unknown option, or names a file that cannot be read. The message has no
            password.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        seen = f"{scheme}://.." if separator else "no scheme://"
        raise ConfigError(f"--redis-url: {seen} given; expected {FORMS}")
    try:
        parts = urlsplit(url)
        options = _options(parts)
        user_info, at, hosts = parts.netloc.rpartition("@")
        user, _, password = user_info.partition(":")
        secret = Secret(unquote(user), unquote(password), options.pop("password_file", ""))
        if secret.password and secret.password_file:
            raise ValueError("a password and password_file= are given; expected one of them")
        asked = Secret(
            options.pop("sentinel_username", ""),
            options.pop("sentinel_password", ""),
            options.pop("sentinel_password_file", ""),
        )
        database, protocol = options.pop("db", None), options.pop("protocol", 2)
        tls = {name: options.pop(name) for name in list(options) if name.startswith("ssl_")}
        shown = f"{parts.scheme}://{'***@' if at else ''}{hosts}{parts.path}"
        common: dict[str, Any] = {"shown": shown, "secret": secret, "protocol": protocol}
        if tls and not parts.scheme.startswith("rediss"):
            raise ValueError(f"{next(iter(tls))}= is given, but TLS needs rediss://")
        if asked != Secret() and not parts.scheme.endswith("+sentinel"):
            raise ValueError("sentinel_..= is given, but Sentinels need redis+sentinel://")
        if parts.scheme == "unix":
            if hosts or not parts.path.strip("/"):
                raise ValueError(f"{shown} names no socket; expected unix:///path/to.sock")
            return Address(socket=unquote(parts.path), database=database or 0, **common)
        common["tls"] = tls if parts.scheme.startswith("rediss") else None
        path = parts.path.strip("/").split("/")
        if parts.scheme.endswith("+sentinel"):
            service = unquote(path[0])
            if not service or len(path) > 2:
                raise ValueError(f"{shown} names no service; expected redis+sentinel://host:26379/service/0")
            found = tuple(_host(host, DEFAULT_SENTINEL_PORT) for host in hosts.split(","))
            number = _database(path[1] if len(path) > 1 else "", database)
            return Address(hosts=found, service=service, database=number, sentinel_secret=asked, **common)
        if len(path) > 1:
            raise ValueError(f"/{parts.path.strip('/')}: must be the number of a database")
        number = _database(path[0], database)
        if parts.scheme.endswith("+cluster"):
            if number:
                raise ValueError(f"database {number}: a cluster has the log in database 0")
            nodes = tuple(_host(host, DEFAULT_PORT) for host in hosts.split(","))
            return Address(hosts=nodes, is_cluster=True, **common)
        return Address(hosts=(_host(hosts, DEFAULT_PORT),), database=number, **common)
    except ValueError as error:
        raise ConfigError(f"--redis-url: {error}") from error


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise ValueError(f"{text!r}: must be host:port")
    return parts.hostname, parts.port or default_port  # `port` raises ValueError for what is not a port


def _database(text: str, option: int | None) -> int:
    if text and option is not None:
        raise ValueError("a database is named twice: by the path and by db=")
    return _number(text) if text else option or 0


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r}: must be the number of a database")
    return int(text)


def _protocol(text: str) -> int:
    if text not in ("2", "3"):
        raise ValueError(f"{text!r}: must be 2 or 3")
    return int(text)


def _file(text: str) -> str:
    try:
        Path(text).read_bytes()
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror}") from error
    return text


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError(f"{text}: no such folder")
    return text


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise ValueError(f"{text!r}: must be yes or no")
    return text.lower() in ("yes", "true", "1")


def _verify(text: str) -> ssl.VerifyMode:
    modes = {"required": ssl.CERT_REQUIRED, "none": ssl.CERT_NONE}
    if text not in modes:
        raise ValueError(f"{text!r}: must be required or none")
    return modes[text]


OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "db": _number,
    "protocol": _protocol,
    "password_file": _file,
    "ssl_ca_certs": _file,
    "ssl_ca_path": _folder,
    "ssl_certfile": _file,
    "ssl_keyfile": _file,
    "ssl_check_hostname": _yes_or_no,
    "ssl_cert_reqs": _verify,
    "sentinel_username": str,
    "sentinel_password": str,
    "sentinel_password_file": _file,
}
"""Options after the `?` of a URL, under redis-py's names if it has one."""


def _options(parts: SplitResult) -> dict[str, Any]:
    if parts.fragment:
        raise ValueError("the URL has a #; write it as %23")
    options: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name}=; expected {', '.join(f'{each}=' for each in OPTIONS)}")
        if name in options:
            raise ValueError(f"{name}= is given twice")
        try:
            options[name] = OPTIONS[name](text)
        except ValueError as error:
            raise ValueError(f"{name}={error}") from error
    if options.get("ssl_cert_reqs") is ssl.CERT_NONE:
        if options.get("ssl_check_hostname"):
            raise ValueError(
                "ssl_check_hostname=yes needs ssl_cert_reqs=required: an unverified certificate has no name to check"
            )
        options["ssl_check_hostname"] = False
    return options


def connect(url: str, key: str = "", **options: Any) -> redis.Redis:
    """Return a client of the Redis at *url* that does not retry. In a cluster it is one of the node that has *key*.

    Raises:
        ConfigError: The URL is wrong.
    """
    return parse_address(url).client(key, retry=Retry(NoBackoff(), 0), **options)


def without_password(text: str) -> str:
    """Return *text*, a URL or an argument with one, without its passwords."""
    before, separator, rest = text.partition("://")
    if not separator:
        return text
    rest, question, query = rest.partition("?")
    _, at, hosts = rest.rpartition("@")
    kept = "&".join(part for part in query.split("&") if not part.startswith("sentinel_password="))
    return f"{before}://{'***@' if at else ''}{hosts}{question if kept else ''}{kept}"
