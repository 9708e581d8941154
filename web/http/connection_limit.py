"""The open connections of a process: how many each client may hold, which one has to go, and what all of them hold.

A connection counts for the API key of its last request, or else for the address of its client. Knows no HTTP.

    a share is full       a new connection takes the place of the client's own that is spare; else it is refused
    every place is taken  who holds most loses first: a spare connection, then a viewer's; never for one of its own
    too many bytes        who holds most bytes loses its largest unfinished request, or its largest unread answer

Spare is a connection that waits for a request, or else for the rest of a body.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import structlog

from pipeline.errors import ConfigError, RequestError
from web.http.log_limiter import LogLimiter

logger = structlog.get_logger()

KEPT: Final = 16
"""Places beyond the limit, each for one probe: so probes are answered when all other places are taken."""
LEAST_BYTES: Final = 64 << 20
BODIES_BYTES: Final = 16
"""All connections together may hold this many bodies of the largest size, but always LEAST_BYTES."""
FORWARDED_SHOWN: Final = 64

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class Member(Protocol):
    """A connection, as the connection limit sees it."""

    holder: str
    """Who it counts for: a key or an address."""

    @property
    def is_exempt(self) -> bool:
        """Whether its holder has no limit: it comes from a trusted proxy or through a Unix socket."""

    def cut(self) -> None:
        """Close it at once."""

    def released(self, error: RequestError) -> None:
        """Free its bytes: refuse its request with *error*, or close it if an answer has begun."""


@dataclass(slots=True)
class _Holding:
    """The connections of one holder, the oldest first."""

    open: dict[Member, None] = field(default_factory=dict)
    idle: dict[Member, None] = field(default_factory=dict)
    """Those that wait for a request, the one that waits longest first."""
    receiving: dict[Member, None] = field(default_factory=dict)
    """Those that wait for the rest of a body."""
    viewers: dict[Member, None] = field(default_factory=dict)
    """Those whose answer has no end of its own."""

    def spare(self, but: Member | None = None) -> Member | None:
        """Return the connection that can be closed with the least harm, if there is one."""
        return next((one for several in (self.idle, self.receiving) for one in several if one is not but), None)

    def remove(self, one: Member) -> None:
        for several in (self.open, self.idle, self.receiving, self.viewers):
            several.pop(one, None)


class ConnectionLimit:
    """The open connections of a process, of which there are never too many, and which never hold too much."""

    def __init__(
        self,
        most: int,
        log_limiter: LogLimiter,
        *,
        has_several_keys: Callable[[], bool] = bool,
        most_bytes: int = LEAST_BYTES,
    ) -> None:
        self.most = most
        self.share = most * 3 // 4
        """Most connections of an address, or of a key that is the only one."""
        self._has_several_keys = has_several_keys
        self.viewers_share = max(most // 4, 1)
        self.most_bytes = most_bytes
        self._log_limiter = log_limiter
        self._holdings: dict[str, _Holding] = {}
        self._num_open = 0
        self._kept: dict[Member, None] = {}
        self._bytes: dict[Member, int] = {}
        self._num_bytes = 0

    @property
    def key_share(self) -> int:
        """Most connections of a key."""
        return self.most // 2 if self._has_several_keys() else self.share

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def num_bytes(self) -> int:
        """What all connections hold."""
        return self._num_bytes

    # places

    def enter(self, one: Member) -> RequestError | None:
        """Take *one* in, and close another if there are too many; or return why there is no room. It is not spare until
        it `waits`."""
        share = self.most if one.is_exempt else self.share
        error = self._share_is_full(one, one.holder, share) or self._all_is_full(one)
        if error is None:
            self._num_open += 1
            self._holdings.setdefault(one.holder, _Holding()).open[one] = None
        return error

    def keep(self, one: Member) -> bool:
        """Take *one* in beyond the most, for a probe; say whether there was such a place."""
        if len(self._kept) < KEPT:
            self._kept[one] = None
            return True
        return False

    def belongs(self, one: Member, holder: str, share: int) -> None:
        """Count *one* for *holder* from now on, who may have *share* of them.

        Raises:
            RequestError: The holder has its share already, and no connection of it is spare.
        """
        if one.holder == holder or one in self._kept:
            return
        if error := self._share_is_full(one, holder, share):
            raise error
        before = self._holdings.get(one.holder)
        if before is None or one not in before.open:  # it was closed meanwhile
            return
        is_idle = one in before.idle
        self._forget(one)
        one.holder = holder
        self._holdings.setdefault(holder, _Holding()).open[one] = None
        if is_idle:
            self.waits(one)

    def waits(self, one: Member) -> None:
        """Note that *one* waits for a request now."""
        holding = self._holdings.get(one.holder)
        if holding is not None and one in holding.open:
            for several in (holding.viewers, holding.receiving, holding.idle):
                several.pop(one, None)
            holding.idle[one] = None

    def receives(self, one: Member) -> None:
        """Note that *one* waits for the rest of its request."""
        holding = self._holdings.get(one.holder)
        if holding is not None and one in holding.open:
            holding.receiving[one] = None

    def works(self, one: Member) -> None:
        """Note that *one* has a request, complete or not."""
        if holding := self._holdings.get(one.holder):
            holding.idle.pop(one, None)
            holding.receiving.pop(one, None)

    def views(self, one: Member, most: int = 0) -> None:
        """Note that the answer to *one* has no end of its own. *most*: what its key may have; 0: a share, as all have.

        Raises:
            RequestError: Its holder has its share of those.
        """
        holding = self._holdings.get(one.holder)
        if holding is None or one not in holding.open or one in holding.viewers:
            return
        if (num := len(holding.viewers)) >= (most or self.viewers_share):
            of_most = (
                f"{most} (its limit `viewers`)"
                if most
                else f"{self.viewers_share} (a quarter of {self.most} connections)"
            )
            raise self._refused(
                f"{_named(one.holder)} has {num} open streams of events, of at most {of_most}; close one of them."
            )
        holding.viewers[one] = None

    def leave(self, one: Member) -> None:
        """Forget *one*."""
        self.hold(one, 0)
        self._kept.pop(one, None)
        holding = self._holdings.get(one.holder)
        if holding is not None and one in holding.open:
            self._num_open -= 1
            self._forget(one)

    def _forget(self, one: Member) -> None:
        holding = self._holdings[one.holder]
        holding.remove(one)
        if not holding.open:
            del self._holdings[one.holder]

    def _share_is_full(self, one: Member, holder: str, share: int) -> RequestError | None:
        """Return the error for one more of *holder*, unless there is room or one of its own can be closed."""
        holding = self._holdings.get(holder)
        if holding is None or (num := len(holding.open)) < share:
            return None
        if spare := holding.spare(but=one):
            self._close(spare)
            return None
        return self._refused(
            f"{_named(holder)} has {num} open connections with requests, of at most {share} of {self.most}; "
            "close some, or send several requests on one connection, one after the other."
        )

    def _all_is_full(self, one: Member) -> RequestError | None:
        """Return the error for one more, unless there is room or a holder of at least as many loses one."""
        if self._num_open < self.most:
            return None
        own = self._holdings.get(one.holder)
        for holding in sorted(self._holdings.values(), key=lambda each: len(each.open), reverse=True):
            loser = holding.spare() or (next(iter(holding.viewers), None) if holding is not own else None)
            if loser is not None:
                self._close(loser)
                return None
            if holding is own:
                break
        if times := self._log_limiter.times("too_many_connections refused"):
            logger.warning("too_many_connections", most=self.most, refused=True, times=times)
        message = f"All {self.most} connections of this server are in use; send it again later."
        return RequestError(message, code="overloaded", status=503)

    def _close(self, one: Member) -> None:
        if times := self._log_limiter.times("too_many_connections closed"):
            logger.warning("too_many_connections", most=self.most, refused=False, times=times)
        self.leave(one)
        one.cut()

    def _refused(self, message: str) -> RequestError:
        if times := self._log_limiter.times("share_of_connections"):
            logger.warning("share_of_connections", reason=message, times=times)
        return RequestError(message, code="too_many_connections", status=429)

    # bytes

    def hold(self, one: Member, num_bytes: int) -> None:
        """Note what *one* holds now: requests that were not read whole, and answers that its client has not read. If
        all hold too much, the largest of those who hold most let go."""
        self._num_bytes += num_bytes - self._bytes.pop(one, 0)
        if num_bytes:
            self._bytes[one] = num_bytes
        while self._num_bytes > self.most_bytes:
            loser, its_bytes, of_holder = self._largest()
            self.hold(loser, 0)
            if times := self._log_limiter.times("too_many_bytes"):
                logger.warning("too_many_bytes", most=self.most_bytes, times=times)
            loser.released(
                RequestError(
                    f"{_named(loser.holder)} has {of_holder} bytes in requests that wait to be read, this one has "
                    f"{its_bytes}; all clients together may have {self.most_bytes}. Send fewer of them at once.",
                    code="overloaded",
                    status=503,
                )
            )

    def _largest(self) -> tuple[Member, int, int]:
        """Return the largest connection of the largest holder, and how many bytes each of the two holds."""
        sums = Counter[str]()
        for one, num_bytes in self._bytes.items():
            sums[one.holder] += num_bytes
        holder, of_holder = max(sums.items(), key=lambda item: item[1])
        its_bytes, loser = max(((num, one) for one, num in self._bytes.items() if one.holder == holder), key=_first)
        return loser, its_bytes, of_holder


class Proxies:
    """The peers that are believed when they say for whom they send a request."""

    def __init__(self, networks: Sequence[Network] = ()) -> None:
        self._networks = tuple(networks)

    def trust(self, address: str) -> bool:
        """Return whether *address* is one of them."""
        if not self._networks:
            return False
        parsed = _address_of(address)
        return parsed is not None and any(parsed in network for network in self._networks)

    def client_of(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the address that sent a request to the trusted *peer*: the last one in its X-Forwarded-For headers
        that is no proxy itself; *peer* if they are missing or malformed."""
        for text in reversed(",".join(forwarded).split(",")):
            parsed = _address_of(text.strip())
            if parsed is None:
                return peer
            if not any(parsed in network for network in self._networks):
                return str(parsed)
        return peer


def read_proxies(given: Sequence[str]) -> Proxies:
    """Return the proxies that `--trusted-proxies` names. Raises ConfigError."""
    try:
        return Proxies([ipaddress.ip_network(text) for text in given])
    except ValueError as error:
        raise ConfigError(
            f"--trusted-proxies: {error}: must be addresses or networks, such as 10.0.0.5 or 10.0.0.0/8"
        ) from error


@functools.lru_cache(maxsize=1024)
def address_of(address: str) -> str:
    """Return the holder of connections from *address*. For IPv6 it is the /64 network, because each client has one."""
    parsed = _address_of(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return f"address {ipaddress.ip_network((parsed, 64), strict=False)}"
    return f"address {parsed or address}"


def _address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return *text* as an address; an IPv4 address that is mapped to IPv6 becomes IPv4 again."""
    try:
        parsed = ipaddress.ip_address(text[:FORWARDED_SHOWN])
    except ValueError:
        return None
    return (isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped) or parsed


def _named(holder: str) -> str:
    return "This API key" if holder.startswith("key ") else f"Your {holder}"


def _first(item: tuple[int, Member]) -> int:
    return item[0]
