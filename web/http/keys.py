"""API keys, their limits and what they own: `--api-key`, `--limits` and `--admin-key`. Only hashes of keys are kept.

A file of limits, in TOML; every number is optional:

    [default]                     # for all keys, unless their own table says otherwise
    requests_per_minute = 60
    concurrent_requests = 4
    log_bytes = 500_000_000       # what it may submit within the retention

    [[key]]                       # one table for each key; keys of --api-key need none
    key = "sk-..."
    requests_per_minute = 600
    name = "team-a"               # owns its requests, instead of the key: a new key of this name may go on with them
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from pipeline.log.protocol import Quota

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_EXPECTED: Final = "must be 1 to 255 visible ASCII characters, without a space"
_LIMITS: Final = tuple(item.name for item in dataclasses.fields(Quota) if item.name != "key")
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

    @classmethod
    def of(cls, hashed: str, name: str = "", /, **limits: int) -> Caller:
        """Return the caller of this hash. Keys of one *name* own the same requests and are counted together."""
        owner = name or hashed
        return cls(hashed, owner, Quota(owner, **limits))

    @property
    def scope(self) -> str:
        """The owner of its idempotency keys."""
        return self.owner or self.hashed

    def may_see(self, owner: str) -> bool:
        """Return whether it may read and cancel the requests of *owner*. A key that got a name still owns what it sent
        without one."""
        return self.is_admin or (bool(owner) and owner in (self.owner, self.hashed))


class Keys:
    """The keys of a server. Without API keys, any client may send requests; without any key, it may do everything."""

    def __init__(self, callers: Iterable[Caller] = ()) -> None:
        """Of two *callers* with the same key, the last one counts."""
        self._callers = tuple(callers)
        are_needed = not all(caller.is_admin for caller in self._callers)
        self._without_key = None if are_needed else Caller(is_admin=not self._callers)

    @property
    def exist(self) -> bool:
        """Return whether there is any key."""
        return bool(self._callers)

    @property
    def are_several(self) -> bool:
        """Return whether they belong to several clients."""
        return len({caller.scope for caller in self._callers}) > 1

    def find(self, given: Sequence[str]) -> Caller | None:
        """Return who has the first of *given* that is a key, or who needs none; None: a key is needed.

        It compares hashes, in constant time, with all keys, also after one that matches; the time tells nothing.
        """
        found = self._without_key
        for text in reversed(given):
            hashed = hash_of(text)
            for caller in self._callers:
                if hmac.compare_digest(caller.hashed, hashed):
                    found = caller
        return found


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
    api_keys: Sequence[str], limits_file: str, admin_key: str | None = None, *, max_log_bytes: int = 0
) -> Keys:
    """Return the keys that the flags `--api-key`, `--limits` and `--admin-key` name. If several share a log of
    *max_log_bytes*, none may fill more than half of it, unless the file says otherwise.

    Raises:
        ConfigError: A key or the file is malformed. No message shows a key.
    """
    for number, key in enumerate(api_keys, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"--api-key: key {number} of {len(api_keys)} {_EXPECTED}")
    if admin_key is not None and not _KEY.fullmatch(admin_key):
        raise ConfigError(f"--admin-key: {_EXPECTED}")
    limits, tables = _limits_in(limits_file) if limits_file else ({}, {})
    where = f"--limits {limits_file}"
    if limits_file and not api_keys and not tables:
        raise ConfigError(f"{where}: limits are per key, and there is none; add a [[key]] or pass --api-key")
    if admin_key in tables:
        raise ConfigError(f"{where}: has the key of --admin-key, which has no limits; remove its [[key]]")
    keys = {*api_keys, *tables, admin_key}
    if any(table.name in keys for table in tables.values()):
        raise ConfigError(f"{where}: a name is one of the keys, and names are no secret; take another name")
    all_tables = dict.fromkeys(api_keys, _Table()) | tables
    owners = {table.name or key for key, table in all_tables.items()}
    if max_log_bytes and len(owners) > 1:
        limits = {"log_bytes": max_log_bytes // 2} | limits
    callers = (Caller.of(hash_of(key), table.name, **(limits | table.limits)) for key, table in all_tables.items())
    return Keys([*callers, *([Caller(hash_of(admin_key), is_admin=True)] if admin_key else [])])


def first_key(api_keys: Sequence[str], limits_file: str, admin_key: str | None = None) -> str:
    """Return one valid key, as `read_keys` reads them; empty if there is none. Raises ConfigError."""
    tables = _limits_in(limits_file)[1] if limits_file else {}
    return next(iter([*api_keys, *tables]), admin_key or "")


@dataclass(frozen=True, slots=True)
class _Table:
    """A [[key]]."""

    limits: dict[str, int] = field(default_factory=dict)
    name: str = ""


def _limits_in(path: str) -> tuple[dict[str, int], dict[str, _Table]]:
    """Return the limits of [default], and key -> its own table. Raises ConfigError."""
    where = f"--limits {path}"
    document = _read(path, where)
    for name, value in document.items():
        if name not in ("default", "key"):
            raise ConfigError(f"{where}: {_shown(name)} is unknown; expected [default] and [[key]]")
        if not _is_right(name, value):
            raise ConfigError(f"{where}: {name} is no table of its own; write [default] and, for each key, [[key]]")
    own: dict[str, _Table] = {}
    for number, table in enumerate(document.get("key", ()), 1):
        here = f"{where}: [[key]] {number}"
        key = table.get("key")
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f'{here}: has {"no key" if key is None else "a bad key"}; key = "..." {_EXPECTED}')
        if key in own:
            raise ConfigError(f"{here}: has the key of [[key]] {[*own].index(key) + 1}; write one table for both")
        limits = _limits({name: value for name, value in table.items() if name not in ("key", "name")}, here)
        own[key] = _Table(limits, _name_in(table, here))
        for other, each in enumerate(own.values(), 1):
            if each.name and each.name == own[key].name and each.limits != limits:
                raise ConfigError(
                    f"{here}: has the name of [[key]] {other}, so they are counted together; give both the same limits"
                )
    return _limits(document.get("default", {}), f"{where}: [default]"), own


def _name_in(table: Mapping[str, Any], here: str) -> str:
    """Return the name in a [[key]]; "" if it has none. Raises ConfigError."""
    name: str = table.get("name", "")
    if "name" in table and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(f"{here}: has a bad name; {_NAME_EXPECTED}")
    return name


def _read(path: str, where: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}; pass a TOML file") from None
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
        if type(value) is not int or value < 1:  # True is an int, too
            seen = value if isinstance(value, int | float) else "something else"
            raise ConfigError(f"{here}: {name}: {seen} given, expected a whole number of at least 1")
    return dict(table)


def _shown(name: str) -> str:
    return name if _WORD.fullmatch(name) else "a name"
