"""What only Redis can hold: fields that are not text, and keys of another type where a history should be."""

from __future__ import annotations

import json

import pytest
from support.log_contract import NAMES, STEPS, SUBMITTED, TOKENIZED, Detokenizer, Scene, put, say_tokens
from support.redis_servers import command

from pipeline.errors import UndecodableEvent
from pipeline.events import Failed
from pipeline.log.entries import request_of
from pipeline.log.operations import slots
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.log.snapshot import HistoryQuery
from pipeline.names import SERVING_STAGES, UNREADABLE
from pipeline.serving import Served, Serving

DAMAGED = Failed(status=500, code="log_damaged", message="It could not be read.")


@pytest.mark.parametrize("inbox", [SUBMITTED, TOKENIZED, STEPS], ids=lambda inbox: inbox.group)
def test_what_is_not_text_is_read_and_kept_byte_by_byte(log: RedisLog, scene: Scene, inbox: Inbox) -> None:
    slot = f"{inbox.group}-0"
    command(log.url, "XADD", inbox.stream, "*", b"uid", b"a", b"\xff", b"x", b"frontend", b"\xc3\x28\\")
    put(log, inbox.stream, {"uid": "b"})
    is_taken = inbox == TOKENIZED
    entries = scene.take(scene.own(slot)) if is_taken else log.read(inbox, slot, max_entries=9, block_ms=0)
    bad, good = entries
    assert good.fields == {"uid": "b"}
    assert bad.fields["uid"] == "a" and "UTF-8 in the field \\xff, frontend" in bad.fields[UNREADABLE]
    assert log.pending(inbox, slot) == entries
    assert log.bury(inbox, bad, "it is not text", DAMAGED, {}) == ()
    ((_, parts),) = command(log.url, "XRANGE", NAMES.dead, "-", "+")
    raw = dict(zip(parts[::2], parts[1::2], strict=True))[b"entry"]
    assert raw == b'["%s","uid","a","\xff","x","frontend","\xc3(\\\\"]' % bad.id.encode()
    (letter,) = log.dead_letters(9)
    assert json.loads(letter.fields["entry"]) == [bad.id, "uid", "a", "\\xff", "x", "frontend", "\\xc3(\\"]


@pytest.fixture
def spoilt(log: RedisLog, scene: Scene) -> RedisLog:
    """A log in which the history of the running request `a` was replaced by another type of key."""
    scene.accept("a", "b")
    command(log.url, "SET", NAMES.request("a"), "not a history")
    return log


@pytest.fixture
def detokenizer(scene: Scene) -> Detokenizer:
    return Detokenizer(scene)


def test_a_key_that_is_no_history_hides_no_other_history(spoilt: RedisLog, scene: Scene) -> None:
    bad, good, none = spoilt.histories(["a", "b", "c"])
    with pytest.raises(UndecodableEvent, match="another type"):
        request_of(bad[0])
    assert len(good) == 2 and none == []
    assert [len(found) for found in spoilt.histories(["a", "b"], after="0-1")] == [1, 1]
    assert spoilt.frontends_of(["a", "b"]) == {"a": "", "b": "web-0"}
    spoilt.reading(["a", "b"], "web-1")
    assert spoilt.read_by_others(["a", "b"]) == {"b"}
    peeked = spoilt.peek({uid: HistoryQuery("", True) for uid in ("a", "b")})
    assert UNREADABLE in peeked["a"].head[0].fields and len(peeked["b"].head) == 2


def test_a_request_whose_key_is_no_history_ends_without_one(spoilt: RedisLog, scene: Scene) -> None:
    assert not scene.end("a") and not scene.abandon("a")
    assert spoilt.alive(["a", "b"]) == {"b"}
    put(spoilt, SUBMITTED.stream, {"uid": "a", "frontend": "web-0"})
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert spoilt.bury(SUBMITTED, entry, "no history", DAMAGED, {"a": "web-0", "b": "web-0"}) == ("b",)


def test_a_row_for_a_key_that_is_no_history_loses_no_other(
    spoilt: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1))
    assert scene.ids("b")[-1] == "1-0"


@pytest.mark.parametrize("words", [("SET", "garbage"), ("SET", "[]"), ("SET", "5"), ("RPUSH", "x")], ids=str)
def test_what_is_no_record_of_what_a_stage_serves_refuses_nobody_and_is_replaced(
    log: RedisLog, words: tuple[str, str]
) -> None:
    mine = Serving("qwen", "w1", "t1", 4096)
    command(log.url, words[0], NAMES.serving("generate"), words[1])
    assert log.serving().get("generate", Served(Serving(), -1)).serving == Serving()
    assert log.acquire("generate-0", "n", 60_000, mine) is not None
    assert log.serving()["generate"].serving == mine and log.serving()["generate"].ttl_ms > 0


def test_a_record_that_expires_while_it_is_read_is_no_record(log: RedisLog) -> None:
    """Else it would read as one that never expires, and another model would be refused."""
    batch, text = slots.serving(log), Serving("qwen", "w1").text().encode()
    assert batch.parse([text, slots.EXPIRED, None, slots.EXPIRED, text, 5]) == {
        SERVING_STAGES[2]: Served(Serving("qwen", "w1"), 5)
    }
