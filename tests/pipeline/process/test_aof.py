"""Where the last whole transaction of an append-only file ends, for files that are cut short or have wrong bytes."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.process.aof import Damage, find_damage

ARITIES = {b"select": 2, b"multi": 1, b"exec": 1, b"set": -3, b"incr": 2, b"xadd": -5, b"xgroup|create": -5}
WORDS = st.binary(max_size=12) | st.sampled_from([b"\r\n", b"$1\r\na\r\n", b"*1\r\n$4\r\nEXEC\r\n", b"#TS:1\r\n"])
"""What anybody may write; also what looks like a part of the file."""


def written(*words: bytes) -> bytes:
    """Return a command as a server writes it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def transaction(*commands: bytes) -> bytes:
    return b"".join([written(b"MULTI"), *commands, written(b"EXEC")])


def units_of(words: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for what is kept whole or not at all, made of *words*."""
    command = st.one_of(
        st.builds(lambda key: written(b"INCR", key), words),
        st.builds(lambda some: written(b"SET", *some), st.lists(words, min_size=2, max_size=4)),
        st.builds(lambda some: written(b"xadd", *some), st.lists(words, min_size=4, max_size=8)),
        st.builds(lambda some: written(b"XGROUP", b"CREATE", *some), st.lists(words, min_size=3, max_size=3)),
    )
    annotation = st.builds(lambda seconds: b"#TS:%d\r\n" % seconds, st.integers(0, 2**40))
    several = st.lists(command | annotation, max_size=4).map(lambda commands: transaction(*commands))
    return st.one_of(command, annotation, several)


FILES = st.lists(units_of(WORDS), min_size=1, max_size=6)


def ends_of(units: Sequence[bytes]) -> list[int]:
    """Return the places between *units*, both ends of the file included."""
    return [0, *itertools.accumulate(map(len, units))]


def kept(data: bytes) -> int:
    """Return how many bytes are kept of *data*."""
    damage = find_damage(data, 0, ARITIES)
    return len(data) if damage is None else damage.whole


@given(FILES)
def test_a_whole_file_is_kept(units: list[bytes]) -> None:
    assert find_damage(b"".join(units), 0, ARITIES) is None


@given(FILES, st.data())
def test_a_file_that_is_cut_short_keeps_all_transactions_before_the_cut(
    units: list[bytes], draw: st.DataObject
) -> None:
    whole, ends = b"".join(units), ends_of(units)
    cut = draw.draw(st.integers(0, len(whole)))
    assert kept(whole[:cut]) == ends[bisect_right(ends, cut) - 1]


@given(st.lists(units_of(WORDS.map(lambda word: word.replace(b"\r", b"."))), min_size=1, max_size=6), st.data())
def test_wrong_bytes_leave_whole_transactions_and_all_that_came_before(units: list[bytes], draw: st.DataObject) -> None:
    """Unless the first wrong byte is a `$` for a `*`: that may be a word which the command before has lost. So may what
    follows a word with an end of line in it: there is none here."""
    whole, ends = b"".join(units), ends_of(units)
    first = draw.draw(st.integers(0, len(whole) - 1))
    wrong = draw.draw(st.binary(min_size=1, max_size=len(whole) - first + 20))
    spoilt = whole[:first] + wrong + draw.draw(st.sampled_from([b"", whole[first + len(wrong) :]]))
    number = kept(spoilt)
    assert find_damage(spoilt[:number], 0, ARITIES) is None
    last = bisect_right(ends, first) - 1
    lowest = ends[max(last - 1, 0)] if spoilt[ends[last] : ends[last] + 1] == b"$" else ends[last]
    assert number >= lowest


@given(FILES, st.data())
def test_one_wrong_byte_leaves_no_part_of_a_transaction(units: list[bytes], draw: st.DataObject) -> None:
    whole = b"".join(units)
    place, byte = draw.draw(st.integers(0, len(whole) - 1)), draw.draw(st.integers(0, 255))
    assert kept(whole[:place] + bytes([byte]) + whole[place + 1 :]) in ends_of(units)


def test_none_of_all_wrong_bytes_leaves_a_part_of_a_transaction() -> None:
    entry = written(b"XADD", b"k", b"1-0", b"a", b"1", b"b", b"2")
    units = [entry, transaction(entry, written(b"INCR", b"12")), b"#TS:12\r\n", entry]
    whole, ends = b"".join(units), ends_of(units)
    for place in range(len(whole)):
        for byte in b"*$#:-0123456789\r\n\0\xff":
            assert kept(whole[:place] + bytes([byte]) + whole[place + 1 :]) in ends, (place, byte)


SET = written(b"SET", b"k", b"v")


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"*", "it ends within a command"),
        (b"*3\r\n$3\r\nSET\r\n$1", "it ends within a command"),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r", "it ends within a command"),
        (written(b"MULTI") + SET, "it ends within a transaction"),
        (written(b"MULTI") + SET + b"*1\r\n$4\r\nEX", "it ends within a command"),
        (bytes(4096), "here is no command"),
        (b"*0\r\n", "here is no command"),
        (b"*-1\r\n", "here is no command"),
        (b"*2\r\n*2\r\n", "here is no word of a command"),
        (b"*2\r\n$-4\r\n", "here is no word of a command"),
        (b"*2\r\n$4\r\nINCR..$1\r\na\r\n", "here is no end of a word"),
        (b"*2\r\n$4000000000\r\nINCR\r\n", "it ends within a command"),
        (b"#AB\r\n", "here is no command"),
        (written(b"INCS", b"k"), "the server does not know this command"),
        (written(b"INCR"), "the server does not know this command"),
        (written(b"SET", b"k"), "the server does not know this command"),
        (written(b"XGROUP"), "the server does not know this command"),
        (written(b"XGROUP", b"CREATF", b"k", b"g", b"0"), "the server does not know this command"),
        (written(b"EXEC"), "EXEC is in the wrong place"),
        (written(b"MULTI") + SET + written(b"MULTI") + SET + written(b"EXEC"), "MULTI is in the wrong place"),
    ],
)
def test_what_is_wrong_is_said_and_what_came_before_is_kept(tail: bytes, reason: str) -> None:
    before = SET + transaction(SET, b"#TS:1\r\n", SET) + b"#TS:2\r\n"
    damage = find_damage(before + tail, 0, ARITIES)
    assert damage is not None and (damage.whole, damage.reason) == (len(before), reason)


def test_a_command_that_says_too_few_words_is_not_kept() -> None:
    shortened = written(b"SET", b"k", b"v", b"EX", b"9").replace(b"*5", b"*3")
    assert find_damage(SET + shortened, 0, ARITIES) == Damage(len(SET), len(SET + SET), "here is no command")


def test_what_comes_before_the_commands_is_not_looked_at() -> None:
    snapshot = b"REDIS0011*1\r\n$4\r\nEXEC\r\n"
    assert find_damage(snapshot + SET, len(snapshot), ARITIES) is None
    assert find_damage(snapshot + b"*", len(snapshot), ARITIES) == Damage(
        len(snapshot), len(snapshot), "it ends within a command"
    )
