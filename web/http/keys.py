"""API keys, their limits and what they own: `--api-key`, `--limits` and `--admin-key`. Only hashes of keys are kept.

A file of limits, in TOML; every limit is optional, and docs/keys.md explains each:

    [default]                     # for all keys, unless their own table says otherwise
    requests_per_minute = 60
    concurrent_requests = 4

    [[key]]                       # one table for each key; keys of --api-key need none
    hash = "0123.."               # what `hash_of` makes of the key; or key = "sk-..", in plain text
    requests_per_minute = 600
    name = "team-a"               # owns its requests, instead of the key: a new key of this name may go on with them
    expires = 2027-01-31          # at the end of this day in UTC; or a time
"""

from __future__ import annotations

import calendar
import dataclasses
import hashlib
import hmac
import math
import re
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from pipeline.events import MOST_COUNT
from pipeline.log.protocol import Quota

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_EXPECTED: Final = "must be 1 to 255 visible ASCII characters, without a space"
_QUOTAS: Final = tuple(item.name for item in dataclasses.fields(Quota) if item.name != "key")
_RANGES: Final = {**dict.fromkeys(_QUOTAS, (1, MOST_COUNT)), "weight": (1, 1000), "viewers": (0, MOST_COUNT)}
_PRIORITY: Final = "priority"
_LIMITS: Final = (*_RANGES, _PRIORITY)
_HASH: Final = re.compile(r"[0-9a-f]{32}")
_NAME: Final = re.compile(rf"(?!{_HASH.pattern}\Z)[A-Za-z0-9][A-Za-z0-9_.@-]{{0,63}}")
_NAME_EXPECTED: Final = 'name = "..." must be 1 to 64 letters, digits and _.@-, and not 32 hex digits, as a hash has'
_WORD: Final = re.compile(r"[a-z_]{1,40}")
"""A name that an error may show. Any other text may be a key in the wrong place."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of an HTTP request, by its key."""

    hashed: str = ""
    """The hash of the key; "" without a key of this server."""
    owner: str = ""
    """Whose requests it sends: the name of the key, or its hash. "" for the admin key, and without a key."""
    quota: Quota | None = None
    """What it may submit; None: as much as it wants."""
    is_admin: bool = False
    """It may do everything."""
    weight: int = 1
    """Its share of the engines beside other owners, when requests wait."""
    overtakes: bool = False
    """Whether the `priority` of its requests also counts against those of other owners."""
    viewers: int = 0
    """Most open streams of events; 0: a share of the connections, as for all."""
    expires_s: float = math.inf
    """When its key ends, by the wall clock."""

    @classmethod
    def of(cls, hashed: str, name: str = "", expires_s: float = math.inf, /, **limits: int) -> Caller:
        """Return the caller of this hash. Keys of one *name* own the same requests and are counted together."""
        owner = name or hashed
        quota = Quota(owner, **{each: limits[each] for each in _QUOTAS if each in limits})
        return cls(
            hashed,
            owner,
            quota,
            weight=limits.get("weight", 1),
            overtakes=bool(limits.get(_PRIORITY)),
            viewers=limits.get("viewers", 0),
            expires_s=expires_s,
        )

    @property
    def scope(self) -> str:
        """The owner of its idempotency keys."""
        return self.owner or self.hashed

    def may_see(self, owner: str) -> bool:
        """Return whether it may read and cancel the requests of *owner*. A key that got a name still owns what it sent
        without one."""
        return self.is_admin or (bool(owner) and owner in (self.owner, self.hashed))


class Keys:
    """The keys of a server. Without API keys, any client may send requests; without any key, it may do everything.

    Once API keys are needed they stay needed: a file that loses its last one opens nothing.
    """

    def __init__(
        self,
        callers: Iterable[Caller] = (),
        *,
        are_needed: bool = False,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Of two *callers* with the same key, the last one counts. *are_needed*: even if there are none."""
        self._clock_s = clock_s
        self._callers = tuple(callers)
        self._are_needed = are_needed or not all(caller.is_admin for caller in self._callers)
        self.are_several = len({caller.scope for caller in self._callers}) > 1
        """Whether they belong to several clients."""

    @property
    def exist(self) -> bool:
        """Return whether there is any key, or one is needed."""
        return bool(self._callers) or self._are_needed

    @property
    def num(self) -> int:
        """Number of API keys, without the admin key."""
        return sum(not caller.is_admin for caller in self._callers)

    @property
    def owners(self) -> frozenset[str]:
        """Whose requests the API keys send."""
        return frozenset(caller.owner for caller in self._callers if caller.owner)

    def replace(self, other: Keys) -> frozenset[str]:
        """Have the keys of *other* from now on. Return the owners that have lost their last key."""
        before = self.owners
        self._callers, self.are_several = other._callers, other.are_several
        self._are_needed |= other._are_needed
        return (
            before - self.owners - {caller.hashed for caller in self._callers}
        )  # a key that got a name is still there

    def find(self, given: Sequence[str]) -> Caller | None:
        """Return who has the first of *given* that is a key, or who needs none; None: a key is needed.

        It compares hashes, in constant time, with all keys, also after one that matches; the time tells nothing.
        """
        found = None if self._are_needed else Caller(is_admin=not self._callers)
        now_s = self._clock_s()
        for text in reversed(given):
            hashed = hash_of(text)
            for caller in self._callers:
                if hmac.compare_digest(caller.hashed, hashed) and now_s < caller.expires_s:
                    found = caller
        return found

    def had(self, given: Sequence[str]) -> bool:
        """Return whether one of *given* is a key that has expired, if `find` finds none."""
        hashes = [hash_of(text) for text in given]
        return any(hmac.compare_digest(caller.hashed, each) for caller in self._callers for each in hashes)

    def has(self, caller: Caller) -> bool:
        """Return whether *caller*, who came in, would come in now: its key may have been removed, or have expired."""
        now_s = self._clock_s()
        return not caller.hashed or any(
            each.hashed == caller.hashed and now_s < each.expires_s for each in self._callers
        )


def keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the keys in the *headers* of a request, whose names are in lower case."""
    decoded = [(name, value.decode("latin1")) for name, value in headers if name in (b"authorization", b"x-api-key")]
    first = next((value for name, value in decoded if name == b"authorization"), "")
    scheme, _, bearer = first.strip().partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [*given, *(value for name, value in decoded if name == b"x-api-key")]


def hash_of(key: str) -> str:
    """Return the name of *key* in the log and in log lines."""
    return hashlib.sha256(b"minisgl api key " + key.encode()).hexdigest()[:32]


def shown(owner: str) -> str:
    """Return *owner* as log lines show it: a name, or the first digits of a hash."""
    return owner[:8] if _HASH.fullmatch(owner) else owner


def read_keys(
    api_keys: Sequence[str],
    limits_file: str,
    admin_key: str | None = None,
    *,
    max_log_bytes: int = 0,
    may_lack_keys: bool = False,
) -> Keys:
    """Return the keys that the flags `--api-key`, `--limits` and `--admin-key` name. If several share a log of
    *max_log_bytes*, none may fill more than half of it, unless the file says otherwise. *may_lack_keys*: a file may
    have lost its last key, and then only the admin key lets in.

    Raises:
        ConfigError: A key or the file is malformed. No message shows a key.
    """
    for number, key in enumerate(api_keys, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"--api-key: key {number} of {len(api_keys)} {_EXPECTED}")
    if admin_key is not None and not _KEY.fullmatch(admin_key):
        raise ConfigError(f"--admin-key: {_EXPECTED}")
    where = f"--limits {limits_file}"
    file = limits_in(content_of(limits_file, where), where) if limits_file else Limits()
    if limits_file and not (api_keys or file.tables or may_lack_keys):
        raise ConfigError(f"{where}: limits are per key, and there is none; add a [[key]] or pass --api-key")
    hashes = [hash_of(key) for key in api_keys]
    admin_hash = hash_of(admin_key) if admin_key else ""
    if admin_hash in file.tables:
        raise ConfigError(f"{where}: has the key of --admin-key, which has no limits; remove its [[key]]")
    _check_names(file.tables, {*hashes, *file.tables, admin_hash}, where)
    tables = dict.fromkeys(hashes, Table()) | file.tables
    limits = file.default
    if max_log_bytes and len({table.name or hashed for hashed, table in tables.items()}) > 1:
        limits = {"log_bytes": max_log_bytes // 2} | limits
    callers = [
        Caller.of(hashed, table.name, table.expires_s, **(limits | table.limits)) for hashed, table in tables.items()
    ]
    admins = [Caller(admin_hash, is_admin=True)] if admin_hash else []
    return Keys([*callers, *admins], are_needed=bool(api_keys or limits_file))


@dataclass(frozen=True, slots=True)
class Table:
    """A [[key]]."""

    limits: dict[str, int] = field(default_factory=dict)
    name: str = ""
    expires_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Limits:
    """A file of limits."""

    default: dict[str, int] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    """Hash of a key -> its own table."""


def content_of(path: str, where: str) -> bytes:
    """Return what is in the file. Raises ConfigError."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}; pass a TOML file") from None


def limits_in(content: bytes, where: str) -> Limits:
    """Return what a file of limits says. *where* begins the message of an error. Raises ConfigError."""
    document = _parsed(content, where)
    for name, value in document.items():
        if name not in ("default", "key"):
            raise ConfigError(f"{where}: {_shown(name)} is unknown; expected [default] and [[key]]")
        if not _is_right(name, value):
            raise ConfigError(f"{where}: {name} is no table of its own; write [default] and, for each key, [[key]]")
    own: dict[str, Table] = {}
    for number, table in enumerate(document.get("key", ()), 1):
        here = f"{where}: [[key]] {number}"
        hashed = hash_in(table, here)
        if hashed in own:
            raise ConfigError(f"{here}: has the key of [[key]] {[*own].index(hashed) + 1}; write one table for both")
        others = {name: value for name, value in table.items() if name not in ("key", "hash", "name", "expires")}
        limits = _limits(others, here)
        own[hashed] = Table(limits, _name_in(table, here), expiry_in(table, here))
        for other, each in enumerate(own.values(), 1):
            if each.name and each.name == own[hashed].name and each.limits != limits:
                raise ConfigError(
                    f"{here}: has the name of [[key]] {other}, so they are counted together; give both the same limits"
                )
    _check_names(own, own, where)
    return Limits(_limits(document.get("default", {}), f"{where}: [default]"), own)


def _check_names(tables: Mapping[str, Table], hashes: Collection[str], where: str) -> None:
    if any(hash_of(table.name) in hashes for table in tables.values() if table.name):
        raise ConfigError(f"{where}: a name is one of the keys, and names are no secret; take another name")


def hash_in(table: Mapping[str, Any], here: str) -> str:
    """Return the hash of the key of a [[key]]. Raises ConfigError."""
    key, hashed = table.get("key"), table.get("hash")
    if key is not None and hashed is not None:
        raise ConfigError(f"{here}: has key and hash; keep one of them")
    if hashed is not None:
        if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
            raise ConfigError(f"{here}: has a bad hash; take the 32 hex digits that `minisgl keys add` writes")
        return hashed
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(f'{here}: has {"no key" if key is None else "a bad key"}; key = "..." {_EXPECTED}')
    return hash_of(key)


def expiry_in(table: Mapping[str, Any], here: str) -> float:
    """Return when a [[key]] expires, by the wall clock in seconds. Raises ConfigError."""
    match table.get("expires"):
        case None:
            return math.inf
        case datetime() as moment:
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        case date() as day:
            return calendar.timegm(day.timetuple()) + 86400.0
    raise ConfigError(f"{here}: has a bad expiry; write expires = 2027-01-31, or 2027-01-31T18:00:00Z, without quotes")


def _name_in(table: Mapping[str, Any], here: str) -> str:
    """Return the name in a [[key]]; "" if it has none. Raises ConfigError."""
    name: str = table.get("name", "")
    if "name" in table and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(f"{here}: has a bad name; {_NAME_EXPECTED}")
    return name


def _parsed(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8, as TOML is") from None
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if "'" in reason or '"' in reason:  # no quoted text: it may be a key, and the place says enough
            reason = reason[reason.rfind("(at ") :].strip("()")
        raise ConfigError(f"{where}: is no TOML: {reason}") from None


def _is_right(name: str, value: object) -> bool:
    if name == "default":
        return isinstance(value, dict)
    return isinstance(value, list) and all(isinstance(table, dict) for table in value)


def _limits(table: Mapping[str, Any], here: str) -> dict[str, int]:
    for name, value in table.items():
        if name not in _LIMITS:
            raise ConfigError(f"{here}: {_shown(name)} is unknown; expected one of {', '.join(_LIMITS)}")
        if name == _PRIORITY:
            is_right, expected = isinstance(value, bool), "true or false"
        else:
            least, most = _RANGES[name]
            is_right = type(value) is int and least <= value <= most  # True is an int, too
            expected = f"a whole number of at least {least}" + (f" and at most {most}" if most < MOST_COUNT else "")
        if not is_right:
            is_short = isinstance(value, int | float) and abs(value) <= MOST_COUNT
            seen = value if is_short else "something else"
            raise ConfigError(f"{here}: {name}: {seen} given, expected {expected}")
    return dict(table)


def _shown(name: str) -> str:
    return name if _WORD.fullmatch(name) else "a name"
