"""Forgetting in Redis: no byte is left of what was purged, times to live stay, and two who purge do not meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from support.log_contract import NAMES, put
from support.redis_servers import command

from pipeline.events import new_uid
from pipeline.log.drivers import Driver
from pipeline.log.forgetting import of_letters
from pipeline.log.operations import forgetting
from pipeline.log.redis import RedisLog

PIECE = 3
"""Entries that are looked at together."""


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.log.operations.forgetting.ENTRIES_PER_LOOK", PIECE)


def letters(log: RedisLog) -> list[str]:
    return [letter.fields["n"] for letter in log.dead_letters(100)][::-1]


def write(log: RedisLog, count: int, *uids: str) -> None:
    for number in range(count):
        put(log, NAMES.dead, {"uid": uids[number % len(uids)], "n": str(number), "text": f"text of {number}."})


def test_no_byte_is_left_of_what_was_purged_or_had_been_dropped_before(log: RedisLog) -> None:
    uid, other = new_uid(), new_uid()
    command(log.url, "CONFIG", "SET", "rdbcompression", "no")
    write(log, 10, uid, other)
    log.drop_dead(log.dead_letters(10)[2].id)
    dumped = command(log.url, "DUMP", NAMES.dead)
    assert b"text of 7." in dumped, "what is deleted stays beside its neighbours"
    assert log.purge([uid]).letters == 5
    dumped = command(log.url, "DUMP", NAMES.dead)
    assert [number for number in range(10) if f"text of {number}.".encode() in dumped] == [1, 3, 5, 9]
    assert letters(log) == ["1", "3", "5", "9"]


def test_streams_keep_their_times_to_live_and_no_copy_is_left(log: RedisLog) -> None:
    uid = new_uid()
    log.open_replies("web-0")
    for key in (NAMES.dead, NAMES.control, NAMES.replies("web-0")):
        put(log, key, {"uid": uid})
        put(log, key, {"uid": new_uid()})
    command(log.url, "PEXPIRE", NAMES.replies("web-0"), 50_000)
    log.purge([uid])
    assert [command(log.url, "PTTL", key) for key in (NAMES.dead, NAMES.control)] == [-1, -1]
    assert 40_000 < command(log.url, "PTTL", NAMES.replies("web-0")) <= 50_000
    assert command(log.url, "KEYS", NAMES.copy("*")) == []
    assert 0 < command(log.url, "PTTL", NAMES.copies) <= 60_000


def test_the_copy_of_a_run_that_died_is_removed_by_the_next(log: RedisLog, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = new_uid()
    write(log, 10, uid, new_uid())
    send = Driver._send

    def dying(driver: Driver, operation: Any) -> Any:
        reply = send(driver, operation)
        assert getattr(operation, "name", "") != "purge", "died"
        return reply

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "_send", dying)
        with pytest.raises(AssertionError, match="died"):
            log.purge([uid])
    (copy,) = command(log.url, "KEYS", NAMES.copy("*"))
    assert 0 < command(log.url, "PTTL", copy) <= 60_000 and len(letters(log)) == 10
    assert log.purge([uid]).letters == 5
    assert command(log.url, "EXISTS", copy) == 0


def between_pieces(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do *act* once, after the first piece of a purge was copied."""
    send, is_first = Driver._send, True

    def interrupted(driver: Driver, operation: Any) -> Any:
        nonlocal is_first
        reply = send(driver, operation)
        if is_first and getattr(operation, "name", "") == "purge":
            is_first = False
            act()
        return reply

    monkeypatch.setattr(Driver, "_send", interrupted)


def test_who_purges_while_another_one_did_begins_again(log: RedisLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def purge_others() -> None:
        with closing(log.another()) as another:  # which had begun before
            assert another._run(forgetting._purged(another, NAMES.dead, lambda: of_letters([others]))) == 4

    mine, others, kept = new_uid(), new_uid(), new_uid()
    write(log, 12, mine, others, kept)
    between_pieces(monkeypatch, purge_others)
    assert log.purge([mine]).letters == 4
    assert letters(log) == ["2", "5", "8", "11"]


def test_a_letter_that_is_dropped_while_others_are_purged_does_not_come_back(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, kept = new_uid(), new_uid()
    write(log, 10, mine, kept)
    dropped = log.dead_letters(10)[-2]
    between_pieces(monkeypatch, lambda: log.drop_dead(dropped.id))
    assert log.purge([mine]).letters == 5
    assert letters(log) == ["3", "5", "7", "9"]


@pytest.mark.parametrize(
    ("words", "left"),
    [(("XTRIM", NAMES.dead, "MAXLEN", "4"), ["7", "9"]), (("DEL", NAMES.dead), [])],
    ids=["trimmed", "gone"],
)
def test_what_is_trimmed_while_others_are_purged_does_not_come_back(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], left: list[str]
) -> None:
    mine, kept = new_uid(), new_uid()
    write(log, 10, mine, kept)
    between_pieces(monkeypatch, lambda: command(log.url, *words))
    log.purge([mine])
    assert letters(log) == left
    assert command(log.url, "KEYS", NAMES.copy("*")) == []


def test_a_stream_that_began_again_while_it_was_purged_has_nothing_from_before(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> None:
        command(log.url, "DEL", NAMES.dead)
        put(log, NAMES.dead, {"uid": kept, "n": "new"})

    mine, kept = new_uid(), new_uid()
    write(log, 10, mine, kept)
    between_pieces(monkeypatch, again)
    log.purge([mine])
    assert letters(log) == ["new"]
