"""How flags are declared and parsed. Each flag is declared beside the code that uses it, and none here.

A flag is a field of a frozen dataclass, its owner. The config of a command is a dataclass of owners. `MINISGL_<FLAG>`
in the environment sets any flag; the command line wins. Abbreviations are off.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, NoReturn, TypeVar, get_type_hints

from pipeline.errors import ConfigError

C = TypeVar("C")
N = TypeVar("N", int, float)


def flag(
    name: str,
    *aliases: str,
    default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    choices: Sequence[Any] | None = None,
    repeated: bool = False,
    secret: bool = False,
) -> Any:
    """Declare a dataclass field that a flag fills. *repeated*: it takes several values. *secret*: it is never shown."""
    metadata = {
        "flags": (name, *aliases),
        "help": help,
        "parse": parse,
        "choices": choices,
        "repeated": repeated,
        "secret": secret,
    }
    return field(default=default, metadata=metadata, repr=not secret)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that refuses numbers below *lowest*."""
    return _number(int, lambda value: value >= lowest, _whole(lowest))


def auto_or(lowest: int, auto: int = 0) -> Callable[[str], int]:
    """Return a parser like `at_least`'s that also reads `auto` as *auto*."""
    number = _number(int, lambda value: value >= lowest, f"auto, or {_whole(lowest)}")
    return lambda text: auto if text == "auto" else number(text)


def _whole(lowest: int) -> str:
    return f"a whole number of at least {lowest}"


def _number(kind: Callable[[str], N], is_allowed: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    """Return a parser of numbers. Other text, and numbers that are not allowed, get an error with *expected*."""

    def number(text: str) -> N:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if is_allowed(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: must be {expected}")

    return number


seconds: Final = _number(float, lambda value: 0 < value < math.inf, "a number of seconds above 0")
seconds_or_0: Final = _number(float, lambda value: 0 <= value < math.inf, "a number of seconds, at least 0")
above_zero: Final = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
temperature: Final = _number(float, lambda value: 0 <= value <= 2, "a number from 0 to 2")
share: Final = _number(float, lambda value: 0 < value <= 1, "a share above 0 and up to 1")


def size_or_0(lowest: int) -> Callable[[str], int]:
    """Return a parser of sizes in bytes, 0 or at least *lowest*, which must be whole MiB. `64M` is 64 MiB."""

    def size(text: str) -> int:
        number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in _UNITS else (text, "")
        return int(number) * _UNITS.get(unit, 1)

    expected = f"0, or at least {lowest >> 20}M ({lowest} bytes); K, M and G stand for KiB, MiB and GiB"
    return _number(size, lambda value: value == 0 or value >= lowest, expected)


def age_or_0(text: str) -> float:
    """Parse an age, as seconds: `90`, `90s`, `15m`, `12h` or `30d`."""
    return _number(_age, lambda value: 0 <= value < math.inf, "0, or a number of s, m, h or d, such as 30d")(text)


def _age(text: str) -> float:
    unit = _AGES.get(text[-1:])
    return float(text[:-1]) * unit if unit else float(text)


_AGES: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def port_number(text: str) -> int:
    """Parse a TCP port."""
    value = at_least(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: a port is at most 65535")
    return value


def yes_or_no(text: str) -> bool:
    """Parse the value of a flag that may also come without a value."""
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be yes or no")
    return text.lower() in ("yes", "true", "1")


def first_word(text: str) -> str:
    """Parse the first word: a server may have many API keys, and a client sends one."""
    return next(iter(text.split()), "")


def page_size(text: str) -> int:
    """Parse a power of two, or `auto` as 0."""
    value = auto_or(1)(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a power of two; use 16, 32 or 64")
    return value


def one_of(choices: Sequence[Any], parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser like *parse* that refuses values which are not among *choices*."""

    def choice(text: str) -> Any:
        value = parse(text)
        if value not in choices:
            expected = f"only {choices[0]} so far" if len(choices) == 1 else f"one of {', '.join(map(str, choices))}"
            raise argparse.ArgumentTypeError(f"{text!r}: must be {expected}")
        return value

    return choice


_COMMAND: Final = re.compile("[a-z-]+")
"""A word of a command. The words after it, such as FILE, are its arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse says: argument --tp/--tensor-parallel-size/--tp-size: '0': must be ..
        message = re.sub(r"^argument (-[\w-]+)[^:]*:(?= ')", r"\1", message)
        message = re.sub(r"^argument (-[\w-]+)[^:]*:", r"\1:", message)
        command = itertools.takewhile(_COMMAND.fullmatch, self.prog.split())
        raise ConfigError(f"{message} (see {' '.join(command)} --help)")


def flags_of(owners: Sequence[type[Any]]) -> list[dataclasses.Field[Any]]:
    """Return the fields of every flag that fills one of *owners*."""
    return [item for owner in owners for item in dataclasses.fields(owner)]


def variable(item: dataclasses.Field[Any]) -> str:
    """Return the environment variable that sets a flag."""
    name: str = item.metadata["flags"][0]
    return "MINISGL_" + name.lstrip("-").replace("-", "_").upper()


def _default_text(item: dataclasses.Field[Any]) -> str:
    if item.default in (None, "", 0, ()) or "[" in item.metadata["help"]:
        return ""
    return f" [{item.default}]"


def build_parser(
    command: str, owners: Sequence[type[Any]], environment: Mapping[str, str], about: str = ""
) -> argparse.ArgumentParser:
    """Return the parser of `minisgl <command>` with the flags of *owners*; the environment sets the defaults."""
    parser = _Parser(prog=f"minisgl {command}", description=about or None, allow_abbrev=False)
    for item in flags_of(owners):
        names, parse = item.metadata["flags"], item.metadata["parse"]
        options: dict[str, Any] = {
            "dest": item.name,
            "type": parse,
            "default": item.default,
            "help": (item.metadata["help"] + _default_text(item)).replace("%", "%%"),
        }
        if item.metadata["repeated"]:
            options |= {"nargs": "+"}
        if isinstance(item.default, bool):
            options |= {"nargs": "?", "const": "yes", "metavar": "yes|no"}
        if item.metadata["choices"] is not None:  # argparse's own choices do not check defaults
            choices = item.metadata["choices"]
            options |= {"type": one_of(choices, parse), "metavar": "{" + ",".join(map(str, choices)) + "}"}
        else:
            options.setdefault("metavar", names[0].lstrip("-").rsplit("-", 1)[-1].upper())
        text = environment.get(variable(item))
        if text is not None:  # argparse parses text defaults, so a bad value gets the flag's own error
            options["default"] = text.split() if item.metadata["repeated"] else text
            if item.metadata["repeated"] and item.metadata["secret"] and not text.split():
                options["default"] = [text]  # no keys would let everybody in, so an empty variable is an error
        parser.add_argument(*names, **options)
    return parser


def parse_flags(
    command: str, owners: Sequence[type[Any]], arguments: Sequence[str], environment: Mapping[str, str], about: str = ""
) -> list[Any]:
    """Return *owners*, filled from the flags of `minisgl <command>`.

    Raises:
        ConfigError: An unknown flag, or a value out of range.
    """
    parsed = build_parser(command, owners, environment, about).parse_args(arguments)
    return [_fill(owner, parsed) for owner in owners]


def split_names(arguments: Sequence[str], owners: Sequence[type[Any]]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that are not flags, and its flags, each with its value.

    A flag takes the word after it, also one such as `-10m`; a yes-or-no flag takes it only if it is `yes` or `no`. A
    flag with several values takes all words up to the next flag.
    """
    known = {name: item for item in flags_of(owners) for name in item.metadata["flags"]}
    names: list[str] = []
    flags: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            names.append(word)
            continue
        if word in known and known[word].metadata["repeated"]:
            flags.append(word)
            while rest and not rest[0].startswith("-"):
                flags.append(rest.pop(0))
            continue
        takes_next = word in known and bool(rest)
        if takes_next and isinstance(known[word].default, bool):
            takes_next = rest[0] in ("yes", "no")
        flags.append(f"{word}={rest.pop(0)}" if takes_next else word)
    return names, flags


def parse_config(command: str, config: type[C], arguments: Sequence[str], environment: Mapping[str, str]) -> C:
    """Return *config*, a dataclass of owners, filled from the flags of `minisgl <command>`. Raise ConfigError."""
    return config(*parse_flags(command, owners_of(config), arguments, environment))


def owners_of(config: type[Any]) -> tuple[type[Any], ...]:
    """Return the types of the fields of *config*, a dataclass of owners."""
    hints = get_type_hints(config)
    return tuple(hints[item.name] for item in dataclasses.fields(config))


def _fill(owner: type[C], parsed: argparse.Namespace) -> C:
    values = {}
    for item in dataclasses.fields(owner):  # type: ignore[arg-type]  # every owner is a dataclass
        value = getattr(parsed, item.name)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return owner(**values)


def flags_for(owners: Iterable[Any]) -> list[str]:
    """Return the flags that pass the config *owners* to another process, without defaults and secrets.

    Every user can read a command line, so secrets go into the environment: see `secrets_of`.
    """
    arguments: list[str] = []
    for owner in owners:
        for item in dataclasses.fields(owner):
            value = getattr(owner, item.name)
            if value == item.default or item.metadata["secret"]:
                continue
            texts = [str(part) for part in value] if item.metadata["repeated"] else [str(value)]
            arguments += [item.metadata["flags"][0], *texts]
    return arguments


def secrets_of(config: Any) -> dict[str, str]:
    """Return the environment variables that pass the secrets in *config*, a dataclass of owners, to another process."""
    secrets: dict[str, str] = {}
    for owner in (getattr(config, item.name) for item in dataclasses.fields(config)):
        for item in dataclasses.fields(owner):
            value = getattr(owner, item.name)
            if item.metadata["secret"] and value != item.default:
                secrets[variable(item)] = " ".join(value) if item.metadata["repeated"] else value
    return secrets


def concealed(arguments: Sequence[str], owners: Iterable[type[Any]]) -> tuple[list[str], dict[str, str]]:
    """Return the command line without secrets, and the environment variables that hold them instead.

    Every user can read a command line, so a process with secrets in its own starts again without them. A URL without a
    password is not a secret. If two *owners* share a flag, the first one decides how many values the flag takes.
    """
    secrets: dict[str, dataclasses.Field[Any]] = {}
    for item in flags_of(tuple(owners)):
        if item.metadata["secret"]:
            for name in item.metadata["flags"]:
                secrets.setdefault(name, item)
    kept: list[str] = []
    variables: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in secrets:
            kept.append(word)
            continue
        item = secrets[name]
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("-") and (item.metadata["repeated"] or not values):
            values.append(rest.pop(0))
        if not values or ("--redis-url" in item.metadata["flags"] and not _has_password(values[0])):
            kept += [word, *values] if not equals else [word]
        else:
            variables[variable(item)] = " ".join(values)
    return kept, variables


def _has_password(url: str) -> bool:
    return "@" in url or "sentinel_password=" in url
