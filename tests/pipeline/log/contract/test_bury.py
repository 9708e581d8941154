"""The contract of the log: entries that cannot be read are buried, or left to a worker of a newer version."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from support.log_contract import CANCELLED, STEPS, SUBMITTED, TOKENIZED, Detokenizer, Scene, put, say_tokens

from pipeline import names
from pipeline.errors import Fenced, LogUnavailable, NewerVersion, UndecodableEvent
from pipeline.events import Failed
from pipeline.log.entries import request_of
from pipeline.log.protocol import Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, UNREADABLE

DAMAGED = Failed(status=500, code="log_damaged", message="It could not be read.")
INBOXES = {"submitted": SUBMITTED, "tokenized": TOKENIZED, "steps": STEPS}
CONSUMERS = {"submitted": "tokenize-0", "tokenized": "generate-0", "steps": "detokenize-0"}


def read_bad(log: RedisLog, scene: Scene, where: str, fields: Mapping[str, str]) -> Entry:
    """Put an entry into a stream and read it as its stage does."""
    put(log, INBOXES[where].stream, fields)
    if where == "tokenized":
        (entry,) = scene.take(scene.own("generate-0"))
    else:
        entry = scene.read_one(INBOXES[where], CONSUMERS[where])
    return entry


def bury(log: RedisLog, inbox: Inbox, entry: Entry, **requests: str) -> tuple[str, ...] | None:
    return log.bury(inbox, entry, "it says nothing", DAMAGED, requests)


@pytest.fixture(params=INBOXES)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_burial_consumes_the_entry_and_keeps_it_as_it_is(log: RedisLog, scene: Scene, where: str) -> None:
    entry = read_bad(log, scene, where, {"gar": "b\u00fc", "age": '"'})
    inbox = INBOXES[where]
    assert bury(log, inbox, entry) == ()
    assert log.backlog(inbox) == 0 and log.pending(inbox, CONSUMERS[where]) == []
    (letter,) = log.dead_letters(9)
    assert json.loads(letter.fields["entry"]) == [entry.id, "gar", "b\u00fc", "age", '"']
    assert {name: letter.fields[name] for name in ("stage", "stream", "deaths", "error")} == {
        "stage": inbox.group,
        "stream": inbox.stream,
        "deaths": "0",
        "error": "it says nothing",
    }
    assert int(letter.fields["ms"]) > 0 and "uid" not in letter.fields and "history" not in letter.fields


def test_a_burial_ends_its_request_in_the_same_commit(log: RedisLog, scene: Scene, where: str) -> None:
    start = log.open_replies("web-0")
    scene.accept("a", "b")
    scene.take(scene.own("generate-0"))
    entry = read_bad(log, scene, where, {"uid": "a"})
    assert bury(log, INBOXES[where], entry, a="web-0") == ("a",)
    assert scene.events()[-1] == DAMAGED and scene.ids()[-1] == SEAL
    assert log.alive(["a", "b"]) == {"b"} and scene.told() == ("a",)
    assert [(reply.uid, reply.event.kind) for reply in scene.replies_after(start)] == [("a", "failed")]
    assert [letter.fields["uid"] for letter in log.dead_letters(9)] == ["a"]


def test_an_entry_is_buried_once(log: RedisLog, scene: Scene, where: str) -> None:
    scene.accept("a")
    scene.take(scene.own("generate-0"))
    entry = read_bad(log, scene, where, {"uid": "a"})
    assert bury(log, INBOXES[where], entry) == ()
    assert bury(log, INBOXES[where], entry, a="web-0") is None
    assert log.alive(["a"]) == {"a"} and len(log.dead_letters(9)) == 1


def test_what_nobody_has_read_is_not_buried(log: RedisLog, scene: Scene, where: str) -> None:
    unread = put(log, INBOXES[where].stream, {"uid": "b"})
    assert bury(log, INBOXES[where], Entry(unread, {"uid": "b"})) is None
    assert log.backlog(INBOXES[where]) == 1 and log.dead_letters(9) == []


def test_a_burial_ends_several_requests_but_those_that_have_ended_or_are_gone(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a", "b", "c")
    detokenizer.say(say_tokens("b", 1))
    scene.end("c")
    put(log, STEPS.stream, {"rows": "?"})
    entry = scene.read_one(STEPS, "detokenize-0")
    assert bury(log, STEPS, entry, a="web-0", b="web-0", c="web-0", nobody="") == ("a", "b")
    assert scene.events("b")[-1] == DAMAGED.model_copy(update={"n": 1})
    assert scene.events("c")[-1] == CANCELLED and scene.history("nobody") == []
    (letter,) = log.dead_letters(9)
    assert "uid" not in letter.fields


def test_a_burial_for_an_owner_is_fenced(log: RedisLog, scene: Scene) -> None:
    zombie = scene.own("detokenize-0")
    owner = scene.own_after(zombie)
    entry = read_bad(log, scene, "steps", {"uid": "a"})
    with pytest.raises(Fenced):
        log.bury(STEPS, entry, "", DAMAGED, {"a": "web-0"}, zombie)
    assert log.pending(STEPS, "detokenize-0") == [entry] and log.dead_letters(9) == []
    assert log.bury(STEPS, entry, "", DAMAGED, {}, owner) == ()


# a newer version


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Call `setattr(names, "VERSION", 3)` of it to become a newer worker."""
    return monkeypatch


def test_what_was_left_is_claimed_by_a_newer_worker_alone(
    log: RedisLog, scene: Scene, newer: pytest.MonkeyPatch
) -> None:
    old, other = scene.own("tokenize-0"), scene.own("tokenize-1")
    entry = read_bad(log, scene, "submitted", {"v": "3", "uid": "a"})
    assert log.leave(SUBMITTED, old.slot, entry, 3)
    assert not log.leave(SUBMITTED, old.slot, entry, 3)
    assert log.pending(SUBMITTED, old.slot) == log.claim(SUBMITTED, other, 9) == []
    assert log.forsaken(SUBMITTED) == []
    assert log.left(SUBMITTED, 9) == [entry] and log.left(SUBMITTED, 0) == [] and log.backlog(SUBMITTED) == 1
    newer.setattr(names, "VERSION", 3)
    assert log.left(SUBMITTED, 9) == []
    assert log.forsaken(SUBMITTED) == ["tokenize-v3"]
    assert log.claim(SUBMITTED, other, 9) == [entry] == log.pending(SUBMITTED, other.slot)
    assert log.retry(SUBMITTED, other, entry) == 2


def test_what_was_left_can_be_buried_by_any_worker(log: RedisLog, scene: Scene, where: str) -> None:
    entry = read_bad(log, scene, where, {"v": "3", "uid": "a"})
    assert log.leave(INBOXES[where], CONSUMERS[where], entry, 3)
    assert [bury(log, INBOXES[where], left) for left in log.left(INBOXES[where], 9)] == [()]
    assert log.backlog(INBOXES[where]) == 0 and len(log.dead_letters(9)) == 1


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"uid": "a"}, UndecodableEvent, "fields uid, expected uid and frontend"),
        ({"frontend": "web-0"}, UndecodableEvent, "fields frontend, expected uid and frontend"),
        ({"uid": "", "frontend": "web-0"}, UndecodableEvent, "expected uid and frontend"),
        ({"uid": "a", "frontend": "web-0", "v": "3"}, NewerVersion, "version 3, which is newer"),
        ({"v": "12"}, NewerVersion, "version 12"),
        ({"uid": "a", "frontend": "web-0", "v": "0"}, UndecodableEvent, "its version is '0'"),
        ({"uid": "a", "frontend": "web-0", "v": "9999999"}, UndecodableEvent, "whole number"),
        ({"uid": "a", "frontend": "web-0", "v": "two"}, UndecodableEvent, "'two'"),
        ({"uid": "a", "frontend": "web-0", UNREADABLE: "it is not text"}, UndecodableEvent, "not text"),
    ],
)
def test_what_names_no_request_says_why(fields: Mapping[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        request_of(Entry("1-1", fields))
    assert type(raised.value) is error


def test_an_entry_names_its_request_whatever_else_it_says() -> None:
    assert request_of(Entry("1-1", {"uid": "a", "frontend": "", "v": "1", "more": "x"})) == ("a", "")


# ids that are not the engine's


@pytest.mark.parametrize("entry_id", ["*", "1-9", f"{2**64 - 1}-{2**64 - 1}"])
def test_a_step_waits_for_an_entry_beyond_it_and_loses_nothing(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer, entry_id: str
) -> None:
    engine = detokenizer.engine
    scene.step(engine, 1)
    put(log, STEPS.stream, {"gar": "bage"}, entry_id)
    for _ in range(2):
        with pytest.raises(LogUnavailable):
            scene.step(engine, 2)
    first, bad = log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0)
    assert bury(log, STEPS, bad) == ()
    with pytest.raises(LogUnavailable):  # Redis knows the last id still
        scene.step(engine, 2)
    assert detokenizer.commit(first)
    assert scene.step(engine, 2).steps_length == scene.step(engine, 2).steps_length == 1
    assert scene.read_one(STEPS, "detokenize-0").id == "1-2"
    assert scene.step(engine, 3).steps_length == 2


def test_an_entry_of_many_fields_is_buried(log: RedisLog, scene: Scene) -> None:
    """Lua cannot unpack as many."""
    entry = read_bad(log, scene, "submitted", {f"field{i}": "x" for i in range(9000)})
    assert bury(log, SUBMITTED, entry) == ()
    (letter,) = log.dead_letters(9)
    assert len(json.loads(letter.fields["entry"])) == 18_001
