"""Finds where the last whole transaction of Redis' append-only file ends. Reads bytes; knows no server and no folder.

    file         = [snapshot] (transaction | annotation)*
    transaction  = command | MULTI command* EXEC
    command      = *<words> CR LF ($<bytes> CR LF <word> CR LF)+
    annotation   = #TS:<seconds> CR LF

A commit is a script, and a script that writes more than once is MULTI .. EXEC here. By itself, a server may cut an
unfinished transaction between two of its commands and append to it: the next start then applies half of a commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Final

SNAPSHOTS: Final = (b"REDIS", b"VALKEY")
"""Beginnings of a snapshot. One snapshot may come before the commands."""
CUT_SHORT: Final = "it ends within a command"
LONGEST_LINE: Final = len(b"*1234567890\r\n")
_NUM_WORDS: Final = re.compile(rb"\*([1-9]\d{0,9})\r\n")
_NUM_BYTES: Final = re.compile(rb"\$(\d{1,10})\r\n")
_ANNOTATION: Final = re.compile(rb"#TS:\d{1,20}\r\n")


@dataclass(frozen=True, slots=True)
class Damage:
    """The place from which a file cannot be read, and the part that can be kept."""

    whole: int
    """Number of bytes up to the end of the last whole transaction."""
    at: int
    """Position of the first unexpected byte."""
    reason: str


class _Unreadable(Exception):
    """There is no whole command here; the arguments are the position and the reason."""


def has_snapshot(data: bytes | mmap) -> bool:
    """Return whether a file begins with a snapshot."""
    return bytes(data[:6]).startswith(SNAPSHOTS)


def find_damage(data: bytes | mmap, begin: int, arities: Mapping[bytes, int]) -> Damage | None:
    """Return the first damage of a file whose commands begin at byte *begin*; None if it is whole.

    *arities* has every command of the server in lower case, with names such as `xgroup|create` for subcommands, and its
    number of words, name included; -3 means at least three. A changed byte within a word cannot be seen: the file has
    no checksums.
    """
    whole = before = position = begin
    is_open = False  # between MULTI and EXEC
    last_word = b""
    while position < len(data):
        if annotation := _ANNOTATION.match(data, position):
            position = annotation.end()
            whole = whole if is_open else position
            continue
        start = position
        try:
            name, last_word, position = _read_command(data, start, arities)
            if name == (b"multi" if is_open else b"exec"):
                raise _Unreadable(start, f"{name.decode().upper()} is in the wrong place")
        except _Unreadable as found:
            at, reason = found.args
            is_cut = reason == CUT_SHORT
            if at == start and not is_open and not is_cut and (data[at] == ord("$") or b"\r\n" in last_word):
                whole = before  # the command before may lack words, or its last word may be too long
            return Damage(whole, at, reason)
        is_open = name == b"multi" or (is_open and name != b"exec")
        if not is_open:
            before, whole = (start if name != b"exec" else position), position
    return Damage(whole, position, "it ends within a transaction") if is_open else None


def _read_command(data: bytes | mmap, start: int, arities: Mapping[bytes, int]) -> tuple[bytes, bytes, int]:
    """Return the name of the command at *start*, its last word, and its end. Raise _Unreadable."""
    count = _NUM_WORDS.match(data, start)
    if count is None:
        raise _Unreadable(start, _ends_within(data, start) or "here is no command")
    num_words, position = int(count[1]), count.end()
    words: list[bytes] = []
    begin, end = position, position
    for _ in range(num_words):
        length = _NUM_BYTES.match(data, position)
        if length is None:
            raise _Unreadable(position, _ends_within(data, position) or "here is no word of a command")
        begin, end = length.end(), length.end() + int(length[1])
        if end + 2 > len(data):
            raise _Unreadable(position, CUT_SHORT)
        if data[end : end + 2] != b"\r\n":
            raise _Unreadable(end, "here is no end of a word")
        if len(words) < 2:
            words.append(bytes(data[begin:end]).lower())
        position = end + 2
    if not _is_known(words, num_words, arities):
        raise _Unreadable(start, "the server does not know this command")
    return words[0], bytes(data[begin:end]), position


def _ends_within(data: bytes | mmap, position: int) -> str:
    """Return the reason if the file ends in the line at *position*, else ""."""
    return CUT_SHORT if len(data) - position < LONGEST_LINE and data.find(b"\n", position) < 0 else ""


def _is_known(words: list[bytes], num_words: int, arities: Mapping[bytes, int]) -> bool:
    """Return whether the server has a command of this name with so many words: with too few of them it may crash."""
    arity = arities.get(words[0], arities.get(b"|".join(words), 0))
    return num_words == arity if arity >= 0 else num_words >= -arity
