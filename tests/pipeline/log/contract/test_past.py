"""The contract of the log: which requests there were between two moments, and histories that come in from elsewhere."""

from __future__ import annotations

import pytest
from support.log_contract import CANCELLED, FINISHED, LONG_MS, SHORT_MS, Detokenizer, Scene, limits, say_end, say_tokens
from support.redis_servers import until

from pipeline.events import new_uid
from pipeline.log.protocol import Entry, NotWhole
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID

ODD = 'a "quoted"\nline,\x00 a tab\t, \\u0000 and \U0001f600 \u2028'
WHOLE = (
    Entry(SUBMITTED_ID, {"ms": "1", "kind": "submitted", "prompt": ODD, "empty": ""}),
    Entry(TOKENIZED_ID, {"ms": "2", "kind": "tokenized", "token_ids": "5,6,7"}),
    *(Entry(f"{n}-0", {"ms": "3", "kind": "tokens", "tokens": str(n)}) for n in range(1, 30)),
    Entry(SEAL, {"ms": "4", "kind": "finished"}),
)


# made_between


def uid_of(moment_ms: int, number: int = 0) -> str:
    return f"{moment_ms:012x}7000800000000000{number:04x}"


def test_requests_are_found_by_the_moment_at_which_they_were_made(log: RedisLog, scene: Scene) -> None:
    uids = [uid_of(ms, number) for number, ms in enumerate((5000, 1000, 3000, 2000, 4000))]
    for uid in uids:
        assert scene.submit(uid).value == "ACCEPTED"
    scene.end(uids[2])
    assert log.made_between(0, 9000) == sorted(uids)
    assert log.made_between(2000, 4000) == [uids[3], uids[2]]
    assert log.made_between(4001, 5000) == []
    assert log.made_between(-5, 10**20) == sorted(uids)


def test_each_sibling_is_found_and_what_they_share_is_not_a_request(log: RedisLog, scene: Scene) -> None:
    uid = new_uid()
    scene.submit_all(uid, 3)
    assert log.made_between(0, 10**20) == [f"{uid}.{index}" for index in range(3)]


def test_of_more_requests_than_one_look_brings_each_is_found_once(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.log.operations.past.KEYS_PER_LOOK", 7)
    uids = [uid_of(1000 + number, number) for number in range(60)]
    for uid in uids:
        log.import_history(uid, WHOLE[-1:])
    assert log.made_between(1010, 2500) == uids[10:]


def test_what_has_no_uid_was_made_at_no_moment(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.submit("x" * 40)
    assert log.made_between(0, 10**20) == []


# import


def test_an_imported_history_reads_as_it_was_written(log: RedisLog, scene: Scene) -> None:
    assert log.import_history("a", WHOLE)
    assert scene.history() == list(WHOLE)


def test_nobody_works_on_what_is_imported(log: RedisLog, scene: Scene) -> None:
    log.import_history("a", WHOLE)
    assert log.alive(["a"]) == set()
    assert log.living() == []
    assert scene.waiting() == []
    assert scene.told() == ()
    assert not scene.end()
    assert scene.history() == list(WHOLE)


def test_an_import_leaves_the_history_that_is_there(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b")
    detokenizer.say(say_tokens("a", 1))
    detokenizer.say(say_end("a", FINISHED))
    ended, running = scene.history("a"), scene.history("b")
    assert not log.import_history("b", WHOLE[-1:])
    assert not log.import_history("b", WHOLE)
    assert not log.import_history("a", WHOLE)
    assert (scene.history("a"), scene.history("b")) == (ended, running)
    assert scene.end("b")


def test_an_import_that_is_repeated_changes_nothing(log: RedisLog, scene: Scene) -> None:
    assert log.import_history("a", WHOLE)
    assert not log.import_history("a", WHOLE)
    assert scene.history() == list(WHOLE)


def test_a_request_that_is_imported_cannot_be_submitted(log: RedisLog, scene: Scene) -> None:
    log.import_history("a", WHOLE)
    assert scene.submit("a").value == "DUPLICATE"


@pytest.mark.parametrize(
    "entries",
    [
        (),
        WHOLE[:-1],
        (WHOLE[1], WHOLE[0], WHOLE[-1]),
        (WHOLE[0], WHOLE[0], WHOLE[-1]),
        (WHOLE[-1], WHOLE[-1]),
        (Entry("0-0", {"a": "b"}), WHOLE[-1]),
        (Entry("what", {"a": "b"}), WHOLE[-1]),
        (Entry("1-99999999999999999999", {"a": "b"}), WHOLE[-1]),
        (Entry("01-1", {"a": "b"}), WHOLE[-1]),
        (Entry("1-1", {}), WHOLE[-1]),
    ],
)
def test_what_is_no_whole_history_is_not_imported(log: RedisLog, scene: Scene, entries: tuple[Entry, ...]) -> None:
    with pytest.raises(NotWhole, match="a: "):
        log.import_history("a", entries)
    assert scene.history() == []


def test_an_imported_history_is_kept_for_the_retention_of_who_imports_it(log: RedisLog, scene: Scene) -> None:
    log.limits = limits(retention_ms=SHORT_MS)
    log.import_history("a", WHOLE)
    log.limits = limits(retention_ms=LONG_MS)
    log.import_history("b", WHOLE)
    until(lambda: scene.history("a") == [])
    assert scene.history("b") == list(WHOLE)


def test_an_imported_sibling_needs_no_others(log: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 2)
    for uid in ("a.0", "a.1"):
        scene.end(uid, CANCELLED)
    whole = scene.history("a.1")
    assert log.import_history("b.1", whole)
    assert scene.history("b.1") == whole
