"""The contract of the log: what has ended is named to archivers, once, and only where there are any."""

from __future__ import annotations

import dataclasses
import time

import pytest
from support.log_contract import CANCELLED, FAILED, FINISHED, Detokenizer, Scene, limits, put, say_end, say_tokens

from pipeline.errors import Fenced
from pipeline.log.forgetting import ended_inbox
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog


@pytest.fixture
def archive(log: RedisLog, scene: Scene) -> RedisLog:
    """The log of a namespace that has an archive."""
    found = log
    assert found.open_archive("one") == "one"
    return found


def ended(log: RedisLog, consumer: str = "archive-0") -> list[Entry]:
    return log.read(ended_inbox(log.names), consumer, max_entries=100, block_ms=0)


def uids(entries: list[Entry]) -> list[str]:
    return [entry.fields["uid"] for entry in entries]


def test_without_archivers_nothing_is_kept_for_them(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b", "c")
    detokenizer.say(say_tokens("a", 1), say_end("a", FINISHED))
    scene.end("b")
    scene.abandon("c")
    assert log.backlog(ended_inbox(log.names)) == 0
    assert log.open_archive("one") == "one"
    assert ended(log) == []


def test_whatever_ends_a_request_names_it_once(archive: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b", "c", "d", "e")
    detokenizer.say(say_tokens("a", 1), say_end("a", FINISHED), say_tokens("b", 1))
    for _ in range(2):
        scene.end("b")
        scene.abandon("c")
        scene.bury("d")
    detokenizer.say(say_end("b", FINISHED), say_end("c", FINISHED))
    entry_id = put(archive, archive.names.submitted, {"nonsense": "1"})
    entry = scene.read_one(scene.submitted, "tokenize-0")
    assert entry.id == entry_id
    for _ in range(2):
        archive.bury(scene.submitted, entry, "nonsense", FAILED, {"e": "web-0", "a": "web-0"})
    assert uids(ended(archive)) == ["a", "b", "c", "d", "e"]


def test_siblings_are_named_each(archive: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 3)
    for uid in ("a.2", "a.0", "a.1"):
        scene.end(uid)
    assert uids(ended(archive)) == ["a.2", "a.0", "a.1"]


def test_the_archive_of_a_namespace_is_that_of_its_first_archiver(archive: RedisLog) -> None:
    assert archive.open_archive("one") == "one"
    assert archive.open_archive("another") == "one"
    assert archive.close_archive()
    assert not archive.close_archive()
    assert archive.open_archive("another") == "another"


def test_what_waits_is_dropped_with_the_archive(archive: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    scene.end("a")
    archive.close_archive()
    scene.end("b")
    archive.open_archive("one")
    assert ended(archive) == []


def test_what_is_archived_is_gone_and_nobody_reads_it_again(archive: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b", "c")
    for uid in "abc":
        scene.end(uid)
    owner = scene.own("archive-0")
    read = ended(archive)
    for _ in range(2):
        archive.archived(owner, read[:1], read[1:2])
        assert archive.num_unarchived() == 1
    assert archive.pending(ended_inbox(archive.names), "archive-0") == read[2:]
    assert archive.backlog(ended_inbox(archive.names)) == 1
    archive.archived(owner, read[2:])
    archive.archived(owner, [])
    assert archive.num_unarchived() == 1 and archive.backlog(ended_inbox(archive.names)) == 0


def test_who_lost_its_slot_consumes_nothing(archive: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    scene.end("a")
    before = scene.own("archive-0")
    read = ended(archive)
    after = scene.own_after(before)
    with pytest.raises(Fenced):
        archive.archived(before, read)
    assert archive.pending(ended_inbox(archive.names), "archive-0") == read
    archive.archived(after, read)


def test_what_nobody_has_read_within_the_retention_is_dropped_and_counted(archive: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b", "c", "d")
    archive.limits = limits(retention_ms=30)
    scene.end("a", FAILED)
    scene.end("b", CANCELLED)
    assert uids(ended(archive)) == ["a", "b"], "read, and not archived"
    time.sleep(0.05)
    scene.end("c")
    assert archive.num_unarchived() == 2
    assert archive.pending(ended_inbox(archive.names), "archive-0") == []
    assert uids(ended(archive)) == ["c"]


def test_a_tool_whose_retention_is_shorter_drops_nothing(archive: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b", "c")
    scene.end("a")
    archive.limits = dataclasses.replace(limits(retention_ms=1), drops_ended=False)
    time.sleep(0.01)
    scene.end("b", FAILED)
    assert archive.erase("b")
    assert uids(ended(archive)) == ["a", "b", "b"] and archive.num_unarchived() == 0
