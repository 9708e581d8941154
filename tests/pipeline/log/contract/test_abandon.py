"""The contract of the log: abandon and reading: requests that their clients left."""

from __future__ import annotations

import pytest
from log_contract import (
    ATTACHED_TO_A,
    CANCELLED,
    FINISHED,
    ONCE,
    Detokenizer,
    accept,
    end,
    events,
    ids,
    replies_after,
    say_tokens,
    submit,
    submit_all,
    submit_once,
    told,
)

from pipeline.log.protocol import Once, StreamLog, Submission, SubmitResult
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, sibling_uids


def abandon(log: StreamLog, uid: str = "a", *, once: Once | None = None, attached: bool = False) -> bool:
    return log.abandon(uid, CANCELLED, frontend="web-0", once=once, attached=attached)


def test_a_request_that_nobody_reads_is_abandoned_as_it_is_ended(log: StreamLog, detokenizer: Detokenizer) -> None:
    cursor = log.open_replies("web-0")
    accept(log, "a")
    detokenizer.say(say_tokens("a", 1))
    assert abandon(log)
    assert not abandon(log)
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert events(log)[-1] == CANCELLED.model_copy(update={"n": 1})
    assert [(reply.uid, reply.n) for reply in replies_after(log, cursor)] == [("a", 1), ("a", 1)]
    assert told(log) == ("a",)
    assert log.alive(["a"]) == set()


def test_a_request_that_somebody_reads_is_not_abandoned_but_can_be_ended(log: StreamLog) -> None:
    accept(log, "a", "b")
    log.reading(["a", "b"], "web-1")
    log.reading(["a"], "web-2")
    log.stop_reading("a", "web-1")
    log.stop_reading("a", "web-1")
    log.stop_reading("a", "nobody")
    assert not abandon(log, "a")
    assert log.alive(["a", "b"]) == {"a", "b"}
    assert log.read_by_others(["a", "b", "c"]) == {"a", "b"}
    log.stop_reading("a", "web-2")
    assert log.read_by_others(["a", "b", "c"]) == {"b"}
    assert log.read_by_others([]) == set()
    assert abandon(log, "a")
    assert not abandon(log, "b")
    assert end(log, "b", CANCELLED)


def test_who_came_to_a_request_abandons_it_only_after_the_client_that_sent_it(log: StreamLog) -> None:
    submit_once(log, "a")
    log.reading(["a"], "web-1")
    assert not abandon(log, once=ONCE, attached=True)
    log.stop_reading("a", "web-1")
    assert not abandon(log, once=ONCE, attached=True)
    log.reading(["a"], "web-1")
    for _ in range(2):
        assert not abandon(log, once=ONCE)
    assert submit_once(log, "b") == ATTACHED_TO_A
    assert submit_once(log, "b", Once("key", "another")).submission is Submission.MISMATCH
    assert not abandon(log, once=ONCE, attached=True)
    assert log.alive(["a"]) == {"a"}
    log.stop_reading("a", "web-1")
    assert not abandon(log, "b", once=ONCE, attached=True)
    assert abandon(log, once=ONCE, attached=True)
    assert ids(log) == [SUBMITTED_ID, SEAL]


def test_who_takes_an_idempotency_key_has_not_left(log: StreamLog) -> None:
    submit_once(log, "a")
    log.reading(["a"], "web-1")
    abandon(log, once=ONCE)
    end(log, "a", CANCELLED)
    submit_once(log, "b", Once("key", "body", instead_of="a"))
    assert not abandon(log, "b", once=ONCE, attached=True)
    assert abandon(log, "b", once=ONCE)


def test_siblings_are_abandoned_each_and_those_that_somebody_reads_are_not(log: StreamLog) -> None:
    submit_all(log, "a", 4, ONCE)
    end(log, "a.3", FINISHED)
    log.reading(["a.1"], "web-1")
    assert [abandon(log, uid, once=ONCE) for uid in sibling_uids("a", 4)] == [True, False, True, False]
    assert [abandon(log, uid, once=ONCE) for uid in sibling_uids("a", 4)] == [False] * 4
    assert [ids(log, uid)[1:] for uid in sibling_uids("a", 4)] == [[SEAL], [], [SEAL], [SEAL]]
    assert log.living() == ["a.1"]


def test_who_came_to_siblings_abandons_them_only_after_the_client_that_sent_them(log: StreamLog) -> None:
    uids = sibling_uids("a", 3)
    submit_all(log, "a", 3, ONCE)
    assert [abandon(log, uid, once=ONCE, attached=True) for uid in uids] == [False] * 3
    log.reading(uids, "web-1")
    for _ in range(2):
        assert [abandon(log, uid, once=ONCE) for uid in uids] == [False] * 3
    assert submit_all(log, "b", 3, ONCE) == ATTACHED_TO_A
    assert submit_all(log, "b", 3, Once("key", "another")) == SubmitResult(Submission.MISMATCH, "a")
    assert set(log.living()) == set(uids)
    for uid in uids:
        log.stop_reading(uid, "web-1")
        assert abandon(log, uid, once=ONCE, attached=True)
        assert not abandon(log, uid, once=ONCE, attached=True)
    assert log.living() == []


def test_who_leaves_one_of_several_siblings_to_its_readers_leaves_them_all(log: StreamLog) -> None:
    """Whoever came to them leaves before the client that sent them has said that of each, or never does."""
    submit_all(log, "a", 2, ONCE)
    log.reading(["a.0", "a.1"], "web-1")
    log.reading(["a.0"], "web-2")
    assert not abandon(log, "a.0", once=ONCE)
    for uid in ("a.0", "a.1"):
        log.stop_reading(uid, "web-1")
    assert not abandon(log, "a.0", once=ONCE, attached=True)
    assert abandon(log, "a.1", once=ONCE, attached=True)
    assert not abandon(log, "a.1", once=ONCE)
    log.stop_reading("a.0", "web-2")
    assert abandon(log, "a.0", once=ONCE, attached=True)


def test_a_reader_of_one_sibling_keeps_the_others_from_nobody(log: StreamLog) -> None:
    submit_all(log, "a", 2, ONCE)
    log.reading(["a.1"], "web-1")
    assert abandon(log, "a.0", once=ONCE)
    assert not abandon(log, "a.1", once=ONCE)
    log.stop_reading("a.1", "web-1")
    assert abandon(log, "a.1", once=ONCE)


@pytest.mark.parametrize("other", ["aa.0", "a0.0", "aa", "b.0"])
def test_siblings_of_others_are_not_left_with_these(log: StreamLog, other: str) -> None:
    submit_all(log, "a", 2, ONCE)
    submit_all(log, other.partition(".")[0], 2 if "." in other else 1)
    log.reading([other], "web-1")
    assert not abandon(log, other, once=ONCE)  # under a key that is not its own
    assert not abandon(log, "a.0", once=ONCE, attached=True)
    log.reading(["a.0"], "web-1")
    assert not abandon(log, "a.0", once=ONCE)
    log.stop_reading(other, "web-1")
    assert not abandon(log, other, once=ONCE, attached=True)
    assert abandon(log, other, once=ONCE)


def test_siblings_that_take_an_idempotency_key_have_not_been_left(log: StreamLog) -> None:
    submit_all(log, "a", 2, ONCE)
    log.reading(["a.0", "a.1"], "web-1")
    for uid in ("a.0", "a.1"):
        abandon(log, uid, once=ONCE)
    end(log, "a.0", CANCELLED)
    submit_all(log, "b", 2, Once("key", "body", instead_of="a"))
    assert [abandon(log, uid, once=ONCE, attached=True) for uid in ("b.0", "b.1")] == [False] * 2
    log.stop_reading("a.1", "web-1")
    assert not abandon(log, "a.1", once=ONCE, attached=True)  # the key is another's by now
    assert [abandon(log, uid, once=ONCE) for uid in ("a.1", "b.0", "b.1")] == [True] * 3


def test_a_request_that_has_no_idempotency_key_is_nobodys_to_abandon_but_its_senders(log: StreamLog) -> None:
    submit(log)
    log.reading(["a"], "web-1")
    assert not abandon(log)
    log.stop_reading("a", "web-1")
    assert not abandon(log, attached=True)
    assert abandon(log)


def test_an_unknown_request_is_neither_read_nor_abandoned(log: StreamLog) -> None:
    log.reading(["a"], "web-1")
    assert not abandon(log)
    accept(log, "a")
    assert abandon(log)
    assert told(log) == ("a",)
