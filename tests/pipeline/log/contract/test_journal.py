"""The contract of the log: an engine's journal, which `produced` writes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.log_contract import LIMITS, SHORT_MS, Detokenizer, Scene, put, say_tokens
from support.redis_servers import command, until

from pipeline.log.redis import RedisLog

JOURNAL_BYTES = 1000
NOTE: dict[str, str] = {}
"""A step as it is kept; of the moment at which a test begins, because old steps are not kept."""


@pytest.fixture(autouse=True)
def limited(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    NOTE.update({"ms": str(int(time.time() * 1000)), "tokens": "41"})
    log.limits = replace(LIMITS, journal_bytes=JOURNAL_BYTES)


def note(detokenizer: Detokenizer, text: str = "41") -> str:
    """Commit one more step and its note; return its id."""
    entry = detokenizer.read_step()
    log = detokenizer.scene.log
    assert log.produced(detokenizer.owner, [entry], "generate-0", [say_tokens("a", 1)], [NOTE | {"tokens": text}])
    return entry.id


def ids(log: RedisLog) -> list[str]:
    return [entry.id for entry in log.journal("generate-0")]


def test_a_step_is_kept_in_the_journal_of_its_engine(log: RedisLog, detokenizer: Detokenizer) -> None:
    assert log.journal("generate-0") == []
    first, second = note(detokenizer), note(detokenizer, "42")
    kept = log.journal("generate-0")
    assert [entry.id for entry in kept] == [first, second]
    assert dict(kept[1].fields) == NOTE | {"bytes": kept[1].fields["bytes"], "tokens": "42"}
    assert int(kept[1].fields["bytes"]) == 2 * int(kept[0].fields["bytes"]) > 0
    assert log.journal("generate-1") == []


def test_a_part_of_a_journal_can_be_read(log: RedisLog, detokenizer: Detokenizer) -> None:
    one, two, three, four = (note(detokenizer) for _ in range(4))
    for asked, found in (
        ({"first": two}, [two, three, four]),
        ({"first": f"({two}", "last": three}, [three]),
        ({"last": f"({two}"}, [one]),
        ({"max_entries": 2}, [one, two]),
        ({"max_entries": 2, "newest": True}, [three, four]),
        ({"last": three, "max_entries": 1, "newest": True}, [three]),
        ({"first": f"({four}"}, []),
    ):
        assert [entry.id for entry in log.journal("generate-0", **asked)] == found


def test_the_oldest_steps_leave_a_journal_that_is_full(log: RedisLog, detokenizer: Detokenizer) -> None:
    said = [note(detokenizer, "7" * 100) for _ in range(20)]
    kept = ids(log)
    assert kept == said[-len(kept) :]
    assert 5 <= len(kept) < JOURNAL_BYTES // 100
    large = note(detokenizer, "7" * 900)
    assert ids(log) == [large]
    assert note(detokenizer, "7" * JOURNAL_BYTES) and ids(log) == []
    assert ids(log) == [] and note(detokenizer) == ids(log)[0]


def test_a_step_is_kept_no_longer_than_histories_are(log: RedisLog, detokenizer: Detokenizer) -> None:
    old = str(int(NOTE["ms"]) - int(LIMITS.retention_ms) - 1000)
    entry = detokenizer.read_step()
    assert log.produced(detokenizer.owner, [entry], "generate-0", [], [NOTE | {"ms": old}])
    assert note(detokenizer) in ids(log) and entry.id not in ids(log)


def test_without_a_limit_no_journal_is_written(log: RedisLog, detokenizer: Detokenizer) -> None:
    log.limits = LIMITS
    note(detokenizer)
    assert log.journal("generate-0") == []


def test_a_journal_is_gone_when_its_last_step_is_as_old_as_histories_get(
    log: RedisLog, detokenizer: Detokenizer
) -> None:
    log.limits = replace(log.limits, retention_s=SHORT_MS / 1000)
    note(detokenizer)
    until(lambda: log.journal("generate-0") == [])


def test_steps_that_are_consumed_together_are_in_the_journal_in_order(log: RedisLog, detokenizer: Detokenizer) -> None:
    entries = [detokenizer.read_step() for _ in range(3)]
    notes = [NOTE | {"tokens": text} for text in ("41", "42", "43")]
    assert log.produced(detokenizer.owner, entries, "generate-0", [], notes)
    kept = log.journal("generate-0")
    assert [(entry.id, entry.fields["tokens"]) for entry in kept] == [
        (entry.id, text) for entry, text in zip(entries, ("41", "42", "43"), strict=True)
    ]


def test_a_step_that_is_committed_again_is_in_the_journal_once(log: RedisLog, detokenizer: Detokenizer) -> None:
    entry = detokenizer.read_step()
    for done in (True, False):
        assert log.produced(detokenizer.owner, [entry], "generate-0", [], [NOTE]) is done
    assert ids(log) == [entry.id]


def test_a_journal_that_cannot_be_written_stops_no_step(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    put(log, log.names.journal("generate-0"), {"foreign": "entry"}, "99-1")
    note(detokenizer)
    assert ids(log) == ["99-1"]
    assert scene.ids("a")[-1] == "1-0"


def test_where_memory_is_short_the_journal_goes_and_the_step_is_committed(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    if not isinstance(log, RedisLog):
        pytest.skip("the memory of a process has no limit of its own")
    note(detokenizer)
    entry = detokenizer.read_step()
    command(log.url, "CONFIG", "SET", "maxmemory", "1")
    try:
        assert log.produced(detokenizer.owner, [entry], "generate-0", [say_tokens("a", 2)], [NOTE])
    finally:
        command(log.url, "CONFIG", "SET", "maxmemory", "0")
    assert log.journal("generate-0") == []
    assert scene.ids("a")[-1] == "2-0"
