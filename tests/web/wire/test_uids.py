"""The names of requests."""

from __future__ import annotations

import time

import pytest

from pipeline.events import new_uid
from web.wire.uids import drawn_ms, uid_of


def test_a_uid_and_the_id_in_an_answer_name_the_same_request() -> None:
    uid = new_uid()
    assert uid_of(uid) == uid_of(f"chatcmpl-{uid}") == uid
    assert uid_of(f"{uid}.12") == uid_of(f"chatcmpl-{uid}.12") == f"{uid}.12"


@pytest.mark.parametrize(
    "name", ["", "chatcmpl-", "resp_", "{uid}.", "{uid}.x", "{uid}0", " {uid}", "{uid}\n", "resp-{uid}"]
)
def test_what_is_no_uid_names_nothing(name: str) -> None:
    assert uid_of(name.format(uid=new_uid())) == ""


@pytest.mark.parametrize(("place", "digit"), [(12, "4"), (16, "7"), (16, "c"), (0, "g"), (31, "A")])
def test_an_id_of_another_version_or_alphabet_names_nothing(place: int, digit: str) -> None:
    uid = new_uid()
    assert uid_of(uid[:place] + digit + uid[place + 1 :]) == ""


def test_a_uid_says_when_it_was_drawn() -> None:
    before_ms = time.time_ns() // 1_000_000
    uid = new_uid()
    assert before_ms <= drawn_ms(uid) == drawn_ms(f"{uid}.3") <= time.time_ns() // 1_000_000
