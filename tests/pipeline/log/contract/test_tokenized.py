"""The contract of the log: tokenized."""

from __future__ import annotations

import pytest
from support.log_contract import ACCEPTED, SUBMITTED, Scene

from pipeline.events import Tokenized
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, parse_id


@pytest.mark.parametrize("frontend", ["web-3", ""])
def test_tokenized_writes_the_tokens_and_hands_the_request_to_the_engines(
    log: RedisLog, scene: Scene, frontend: str
) -> None:
    scene.submit(frontend=frontend)
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert scene.tokenize(entry)
    assert scene.ids() == [SUBMITTED_ID, TOKENIZED_ID]
    assert scene.events()[1] == Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0")
    taken = log.take(scene.own("generate-0"), 8, control_cursor="0-0")
    assert [entry.fields for entry in taken.entries] == [{"uid": "a", "frontend": frontend}]


def test_a_repeated_tokenized_is_lost_and_changes_nothing(scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert scene.tokenize(entry)
    before = scene.history()
    assert not scene.tokenize(entry)
    assert scene.history() == before
    assert len(scene.take(scene.own("generate-0"))) == 1


def test_tokenized_consumes_its_entry(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert scene.submit("b", max_queued=2) is ACCEPTED


def test_tokenized_of_an_entry_that_nobody_read_is_lost_and_the_entry_stays(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.submit("b")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=2, block_ms=0)
    scene.submit("c")
    unread = Entry(f"{parse_id(second.id)[0] + 10**9}-0", first.fields)
    assert not scene.tokenize(unread)
    assert scene.read_one(SUBMITTED, "tokenize-0").fields["uid"] == "c"


def test_tokenized_after_a_cancel_consumes_the_entry_and_writes_nothing(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    scene.end()
    assert not scene.tokenize(entry)
    assert scene.ids() == [SUBMITTED_ID, SEAL]
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert scene.take(scene.own("generate-0")) == []
