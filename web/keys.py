"""API keys and their limits: the flags `--api-key` and `--limits`. Only hashes of keys are kept.

A file of limits, in TOML; every number is optional:

    [default]                     # for all keys, unless their own table says otherwise
    requests_per_minute = 60
    concurrent_requests = 4

    [[key]]                       # one table for each key; keys of --api-key need none
    key = "sk-..."
    requests_per_minute = 600
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from pipeline.log.protocol import Quota

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_EXPECTED: Final = "must be 1 to 255 visible ASCII characters, without a space"
_LIMITS: Final = tuple(item.name for item in dataclasses.fields(Quota) if item.name != "key")
_WORD: Final = re.compile(r"[a-z_]{1,40}")
"""A name that an error may show; other text could be a key in the wrong place."""


class Keys:
    """The keys of a server, and the limits of each. Without keys, any client may send requests."""

    def __init__(self, quotas: Iterable[Quota] = ()) -> None:
        self._quotas = tuple(quotas)

    @property
    def are_needed(self) -> bool:
        return bool(self._quotas)

    def find(self, given: Sequence[str]) -> Quota | None:
        """Return the quota of the first of *given* that is a key, in a time that says nothing about the keys.

        It compares hashes, in constant time, with all keys, also after one that matches.
        """
        found = None
        for text in reversed(given):
            hashed = hash_of(text)
            for quota in self._quotas:
                if hmac.compare_digest(quota.key, hashed):
                    found = quota
        return found


def hash_of(key: str) -> str:
    """Return the name of *key* in the log and in log lines."""
    return hashlib.sha256(b"minisgl api key " + key.encode()).hexdigest()[:32]


def read_keys(api_keys: Sequence[str], limits_file: str) -> Keys:
    """Return the keys that the flags `--api-key` and `--limits` name.

    Raises:
        ConfigError: A key or the file is malformed. No message shows a key.
    """
    for number, key in enumerate(api_keys, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"--api-key: key {number} of {len(api_keys)} {_EXPECTED}")
    default: dict[str, int] = {}
    own: dict[str, dict[str, int]] = {}
    if limits_file:
        default, own = _limits_in(limits_file)
        if not api_keys and not own:
            raise ConfigError(
                f"--limits {limits_file}: limits are per key, and there is none; add a [[key]] or pass --api-key"
            )
    return Keys(Quota(hash_of(key), **(default | own.get(key, {}))) for key in dict.fromkeys([*api_keys, *own]))


def first_key(api_keys: Sequence[str], limits_file: str) -> str:
    """Return one valid key, as `read_keys` reads them; empty if none is needed. Raises ConfigError."""
    own = _limits_in(limits_file)[1] if limits_file else {}
    return next(iter([*api_keys, *own]), "")


def _limits_in(path: str) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return the limits of [default], and key -> the limits of its own table. Raises ConfigError."""
    where = f"--limits {path}"
    document = _read(path, where)
    for name, value in document.items():
        if name not in ("default", "key"):
            raise ConfigError(f"{where}: {_shown(name)} is unknown; expected [default] and [[key]]")
        if not _is_right(name, value):
            raise ConfigError(f"{where}: {name} is no table of its own; write [default] and, for each key, [[key]]")
    own: dict[str, dict[str, int]] = {}
    for number, table in enumerate(document.get("key", ()), 1):
        here = f"{where}: [[key]] {number}"
        key = table.get("key")
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f'{here}: has {"no key" if key is None else "a bad key"}; key = "..." {_EXPECTED}')
        if key in own:
            raise ConfigError(f"{here}: has the key of [[key]] {[*own].index(key) + 1}; write one table for both")
        own[key] = _limits({name: value for name, value in table.items() if name != "key"}, here)
    return _limits(document.get("default", {}), f"{where}: [default]"), own


def _read(path: str, where: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}; pass a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8, as TOML is") from None
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if "'" in reason or '"' in reason:  # the quoted text may be a key; the place says enough
            reason = reason[reason.rfind("(at ") :].strip("()")
        raise ConfigError(f"{where}: is no TOML: {reason}") from None


def _is_right(name: str, value: object) -> bool:
    if name == "default":
        return isinstance(value, dict)
    return isinstance(value, list) and all(isinstance(table, dict) for table in value)


def _limits(table: Mapping[str, Any], here: str) -> dict[str, int]:
    for name, value in table.items():
        if name not in _LIMITS:
            raise ConfigError(f"{here}: {_shown(name)} is unknown; expected {' and '.join(_LIMITS)}")
        if type(value) is not int or value < 1:  # True is an int, too
            seen = value if isinstance(value, int | float) else "something else"
            raise ConfigError(f"{here}: {name}: {seen} given, expected a whole number of at least 1")
    return dict(table)


def _shown(name: str) -> str:
    return name if _WORD.fullmatch(name) else "a name"
