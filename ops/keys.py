"""`minisgl keys ACTION`: the API keys in the file of `--limits`. A server that runs reads it again by itself.

The file gets hashes of keys. A new key is printed once, alone on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final, TypeAlias

from ops.connection import columns, one_line, split_named
from ops.limits_file import LimitsText, edited
from pipeline.errors import ConfigError
from pipeline.flags import age_or_0, at_least, flag, parse_flags, yes_or_no
from web.http.keys import content_of, expiry_in, hash_in, hash_of, limits_in

USAGE: Final = """\
usage: minisgl keys add NAME [flags]       make a key and print it
       minisgl keys ls [flags]             the keys, by name and hash
       minisgl keys revoke NAME [flags]    remove the keys of a name, or one by the first digits of its hash
       minisgl keys rotate NAME [flags]    make another key of a name and print it; the old ones end

Each explains its flags with --help.
"""
DIGITS_SHOWN: Final = 8
_PREFIX: Final = re.compile(rf"[0-9a-f]{{{DIGITS_SHOWN},32}}")

Action: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], None]


def expiry(text: str) -> date:
    """Parse when a key expires: a date, or a time from now on, such as 30d."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        return from_now(text)


def from_now(text: str) -> datetime:
    """Parse a time from now on, such as 30d."""
    try:
        return datetime.fromtimestamp(int(time.time() + age_or_0(text)), UTC)
    except (ValueError, OverflowError, argparse.ArgumentTypeError):
        expected = "must be a time from now on, such as 30d or 12h; --expires also takes a date, such as 2027-01-31"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from None


def limit(text: str) -> tuple[str, int]:
    """Parse `name=number`. The file of limits knows the names."""
    name, _, number = text.partition("=")
    return name, at_least(1)(number)


@dataclass(frozen=True, slots=True)
class FileConfig:
    """Where the keys are."""

    limits: str = flag("--limits", default="", help="TOML file with the keys, as the server has it; `add` creates it")


@dataclass(frozen=True, slots=True)
class ExpiryConfig:
    """When a new key ends."""

    expires: date | None = flag(  # noqa: RUF009  # dates are immutable
        "--expires", default=None, parse=expiry, help="when the new key ends: in 30d (s, m, h, d), or after 2027-01-31"
    )


@dataclass(frozen=True, slots=True)
class AddConfig:
    """What a new key may do."""

    limit: tuple[tuple[str, int], ...] = flag(
        "--limit",
        default=(),
        parse=limit,
        repeated=True,
        help="its limits, such as requests_per_minute=60 [the default]",
    )
    weight: int | None = flag(
        "--weight", default=None, parse=at_least(1), help="its share of the engines beside other owners, up to 1000 [1]"
    )
    priority: bool = flag(
        "--priority",
        default=False,
        parse=yes_or_no,
        help="the `priority` of its requests also counts against requests of other owners",
    )


@dataclass(frozen=True, slots=True)
class GraceConfig:
    """How long old keys go on."""

    until: datetime | None = flag(  # noqa: RUF009
        "--grace", default=None, parse=from_now, help="how long the old keys go on, such as 1h [they are removed]"
    )


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Do one action; return the exit code.

    Raises:
        ConfigError: There is no such action, key or file, or its flags cannot work.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(USAGE)
        return 0
    if arguments[0] not in ACTIONS:
        raise ConfigError(f"keys: {one_line(arguments[0])} given, expected one of {', '.join(ACTIONS)}")
    ACTIONS[arguments[0]](arguments[1:], environment)
    return 0


def add(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Add a key, and print it."""
    about = "Makes an API key and prints it. The file gets its hash."
    owners = (FileConfig, ExpiryConfig, AddConfig)
    name, (file, expiring, may) = _parsed("add", arguments, environment, owners, about, "the name of the owner")
    key = _new_key()
    values = {"name": name, "hash": hash_of(key), "expires": expiring.expires, **dict(may.limit)}
    values |= {"weight": may.weight, "priority": may.priority or None}
    with edited(file.limits, _where(file)) as text:
        text.append({name: value for name, value in values.items() if value is not None})
    _tell(f"added a key of {name}, hash {_shown(hash_of(key))}")
    sys.stdout.write(f"{key}\n")


def ls(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print all keys in the order of the file."""
    about = "Lists the API keys of a file of limits."
    (file,) = parse_flags("keys ls", (FileConfig,), arguments, environment, about=about)
    where = _where(file)
    content = content_of(file.limits, where)
    found, said = limits_in(content, where), LimitsText(content, where).keys
    rows = [("name", "hash", "expires", "weight", "limits")]
    for (hashed, table), each in zip(found.tables.items(), said, strict=True):
        limits = found.default | table.limits
        weight = str(limits.pop("weight", 1))
        expires = f"{each.get('expires', 'never')}{' (expired)' if table.expires_s <= time.time() else ''}"
        told = " ".join(f"{name}={str(value).lower()}" for name, value in limits.items())
        rows.append((table.name or "-", _shown(hashed), expires, weight, told or "-"))
    sys.stdout.write("\n".join(columns(rows, right=(3,))) + "\n" if said else "no keys\n")


def revoke(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Remove keys."""
    about = "Removes API keys. Within two seconds a server refuses them and ends the requests of their owner."
    what = "a name, or at least 8 digits of a hash"
    named, (file,) = _parsed("revoke", arguments, environment, (FileConfig,), about, what)
    with edited(file.limits, _where(file)) as text:
        numbers = _numbers(text, named)
        for number in reversed(numbers):
            text.remove(number)
    _tell(f"removed {'1 key' if len(numbers) == 1 else f'{len(numbers)} keys'} of {named}")
    if not text.keys:
        _tell("no key is left: a server that runs lets in the admin key and keys of --api-key alone")


def rotate(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Add a key of a name, and end the old ones."""
    about = "Makes another API key of a name, with the same limits, and prints it."
    owners = (FileConfig, ExpiryConfig, GraceConfig)
    name, (file, expiring, grace) = _parsed("rotate", arguments, environment, owners, about, "the name of an owner")
    key, where = _new_key(), _where(file)
    with edited(file.limits, where) as text:
        numbers = _numbers(text, name, hashes=False)
        text.copy(numbers[0])
        text.change(numbers[0], key=None, hash=hash_of(key), expires=expiring.expires)
        for number in reversed(numbers):
            if grace.until is None:
                text.remove(number + 1)
            elif grace.until.timestamp() < expiry_in(text.keys[number + 1], where):
                text.change(number + 1, expires=grace.until)
    ended = "are removed" if grace.until is None else f"end at {grace.until:%Y-%m-%d %H:%M:%S} UTC"
    _tell(f"added a key of {name}, hash {_shown(hash_of(key))}; the old ones {ended}")
    sys.stdout.write(f"{key}\n")


ACTIONS: Final[Mapping[str, Action]] = {"add": add, "ls": ls, "revoke": revoke, "rotate": rotate}


def _parsed(
    action: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    owners: Sequence[type[Any]],
    about: str,
    what: str,
) -> tuple[str, Sequence[Any]]:
    """Return what the action is about, and its flags. Raises ConfigError."""
    named, flags = split_named(f"keys {action}", arguments, what, owners)
    parsed = parse_flags(f"keys {action} NAME", owners, flags, environment, about=about)
    return named, parsed


def _where(file: FileConfig) -> str:
    """Return the beginning of error messages about the file. Raises ConfigError without --limits."""
    if not file.limits:
        raise ConfigError("keys: --limits is missing; pass the file of limits that the server has")
    return f"--limits {file.limits}"


def _new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


def _numbers(text: LimitsText, named: str, *, hashes: bool = True) -> list[int]:
    """Return which tables have the name or, with *hashes*, a hash that begins so. Raises ConfigError if none has."""
    found = [number for number, table in enumerate(text.keys) if table.get("name") == named]
    if hashes and not found and _PREFIX.fullmatch(named):
        found = [number for number, table in enumerate(text.keys) if hash_in(table, "").startswith(named)]
    if not found:
        raise ConfigError(f"keys: {one_line(named)}: no such key; `minisgl keys ls` shows names and hashes")
    return found


def _shown(hashed: str) -> str:
    return hashed[:DIGITS_SHOWN]


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
