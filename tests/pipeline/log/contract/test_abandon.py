"""The contract of the log: abandon and reading: requests that their clients left."""

from __future__ import annotations

import pytest
from support.log_contract import ATTACHED_TO_A, CANCELLED, FINISHED, ONCE, Detokenizer, Scene, say_tokens

from pipeline.log.protocol import Once, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, sibling_uids


def test_a_request_that_nobody_reads_is_abandoned_as_it_is_ended(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    cursor = log.open_replies("web-0")
    scene.accept("a")
    detokenizer.say(say_tokens("a", 1))
    assert scene.abandon()
    assert not scene.abandon()
    assert scene.ids() == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert scene.events()[-1] == CANCELLED.model_copy(update={"n": 1})
    assert [(reply.uid, reply.n) for reply in scene.replies_after(cursor)] == [("a", 1), ("a", 1)]
    assert scene.told() == ("a",)
    assert log.alive(["a"]) == set()


def test_a_request_that_somebody_reads_is_not_abandoned_but_can_be_ended(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    log.reading(["a", "b"], "web-1")
    log.reading(["a"], "web-2")
    log.stop_reading("a", "web-1")
    log.stop_reading("a", "web-1")
    log.stop_reading("a", "nobody")
    assert not scene.abandon()
    assert log.alive(["a", "b"]) == {"a", "b"}
    assert log.read_by_others(["a", "b", "c"]) == {"a", "b"}
    log.stop_reading("a", "web-2")
    assert log.read_by_others(["a", "b", "c"]) == {"b"}
    assert log.read_by_others([]) == set()
    assert scene.abandon()
    assert not scene.abandon("b")
    assert scene.end("b")


def test_siblings_are_abandoned_each_and_those_that_somebody_reads_are_not(log: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 4, ONCE)
    scene.end("a.3", FINISHED)
    log.reading(["a.1"], "web-1")
    assert [scene.abandon(uid, once=ONCE) for uid in sibling_uids("a", 4)] == [True, False, True, False]
    assert [scene.abandon(uid, once=ONCE) for uid in sibling_uids("a", 4)] == [False] * 4
    assert [scene.ids(uid)[1:] for uid in sibling_uids("a", 4)] == [[SEAL], [], [SEAL], [SEAL]]
    assert log.living() == ["a.1"]


def test_who_came_to_siblings_abandons_them_only_after_the_client_that_sent_them(log: RedisLog, scene: Scene) -> None:
    uids = sibling_uids("a", 3)
    scene.submit_all("a", 3, ONCE)
    assert [scene.abandon(uid, once=ONCE, attached=True) for uid in uids] == [False] * 3
    log.reading(uids, "web-1")
    for _ in range(2):
        assert [scene.abandon(uid, once=ONCE) for uid in uids] == [False] * 3
    assert scene.submit_all("b", 3, ONCE) == ATTACHED_TO_A
    assert scene.submit_all("b", 3, Once("key", "another")) == SubmitResult(Submission.MISMATCH, "a")
    assert set(log.living()) == set(uids)
    for uid in uids:
        log.stop_reading(uid, "web-1")
        assert scene.abandon(uid, once=ONCE, attached=True)
        assert not scene.abandon(uid, once=ONCE, attached=True)
    assert log.living() == []


def test_who_leaves_one_of_several_siblings_to_its_readers_leaves_them_all(log: RedisLog, scene: Scene) -> None:
    """Whoever came to them leaves before the client that sent them has said that of each, or never does."""
    scene.submit_all("a", 2, ONCE)
    log.reading(["a.0", "a.1"], "web-1")
    log.reading(["a.0"], "web-2")
    assert not scene.abandon("a.0", once=ONCE)
    for uid in ("a.0", "a.1"):
        log.stop_reading(uid, "web-1")
    assert not scene.abandon("a.0", once=ONCE, attached=True)
    assert scene.abandon("a.1", once=ONCE, attached=True)
    assert not scene.abandon("a.1", once=ONCE)
    log.stop_reading("a.0", "web-2")
    assert scene.abandon("a.0", once=ONCE, attached=True)


def test_a_reader_of_one_sibling_keeps_the_others_from_nobody(log: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 2, ONCE)
    log.reading(["a.1"], "web-1")
    assert scene.abandon("a.0", once=ONCE)
    assert not scene.abandon("a.1", once=ONCE)
    log.stop_reading("a.1", "web-1")
    assert scene.abandon("a.1", once=ONCE)


@pytest.mark.parametrize("other", ["aa.0", "a0.0", "aa", "b.0"])
def test_siblings_of_others_are_not_left_with_these(log: RedisLog, scene: Scene, other: str) -> None:
    scene.submit_all("a", 2, ONCE)
    scene.submit_all(other.partition(".")[0], 2 if "." in other else 1)
    log.reading([other], "web-1")
    assert not scene.abandon(other, once=ONCE)  # under a key that is not its own
    assert not scene.abandon("a.0", once=ONCE, attached=True)
    log.reading(["a.0"], "web-1")
    assert not scene.abandon("a.0", once=ONCE)
    log.stop_reading(other, "web-1")
    assert not scene.abandon(other, once=ONCE, attached=True)
    assert scene.abandon(other, once=ONCE)


def test_siblings_that_take_an_idempotency_key_have_not_been_left(log: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 2, ONCE)
    log.reading(["a.0", "a.1"], "web-1")
    for uid in ("a.0", "a.1"):
        scene.abandon(uid, once=ONCE)
    scene.end("a.0")
    scene.submit_all("b", 2, Once("key", "body", instead_of="a"))
    assert [scene.abandon(uid, once=ONCE, attached=True) for uid in ("b.0", "b.1")] == [False] * 2
    log.stop_reading("a.1", "web-1")
    assert not scene.abandon("a.1", once=ONCE, attached=True)  # the key is another's by now
    assert [scene.abandon(uid, once=ONCE) for uid in ("a.1", "b.0", "b.1")] == [True] * 3


def test_a_request_that_has_no_idempotency_key_is_nobodys_to_abandon_but_its_senders(
    log: RedisLog, scene: Scene
) -> None:
    scene.submit()
    log.reading(["a"], "web-1")
    assert not scene.abandon()
    log.stop_reading("a", "web-1")
    assert not scene.abandon(attached=True)
    assert scene.abandon()


def test_an_unknown_request_is_neither_read_nor_abandoned(log: RedisLog, scene: Scene) -> None:
    log.reading(["a"], "web-1")
    assert not scene.abandon()
    scene.accept("a")
    assert scene.abandon()
    assert scene.told() == ("a",)
