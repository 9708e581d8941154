"""The contract of the log: submit of several requests together."""

from __future__ import annotations

import threading

import pytest
from log_contract import (
    ACCEPTED,
    ATTACHED_TO_A,
    CANCELLED,
    FAILED,
    FINISHED,
    LONG_MS,
    ONCE,
    SUBMITTED,
    TOO_FAST,
    TOO_MANY,
    Detokenizer,
    accept,
    another,
    end,
    history,
    ids,
    in_one_minute,
    limits,
    say_end,
    say_tokens,
    submit,
    submit_all,
    submit_as,
    submit_once,
    tokenize,
    waiting,
)
from redis_servers import until

from pipeline.errors import LogError
from pipeline.events import SamplingParams, Submitted, decode
from pipeline.log.protocol import Once, Quota, StreamLog, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, sibling_uids


def submitted_of(log: StreamLog, uid: str) -> Submitted:
    """Return the only event of a history."""
    (entry,) = history(log, uid)
    assert entry.id == SUBMITTED_ID
    event = decode(entry.fields)
    assert isinstance(event, Submitted)
    return event


def test_several_that_are_submitted_together_have_each_a_history_of_their_own(log: StreamLog) -> None:
    assert submit_all(log, "a", 3) == SubmitResult(ACCEPTED, "a")
    said = [submitted_of(log, uid) for uid in sibling_uids("a", 3)]
    assert [(event.prompt, event.sampling.seed, event.siblings) for event in said] == [
        ("prompt 0", 0, 3),
        ("prompt 1", 1, 3),
        ("prompt 2", 2, 3),
    ]
    assert {(event.ms, event.deadline_ms) for event in said} == {(said[0].ms, said[0].ms + LONG_MS)}
    assert history(log, "a") == []
    assert log.alive(["a", "a.0", "a.1", "a.2", "a.3"]) == {"a.0", "a.1", "a.2"}


def test_siblings_are_handed_to_the_tokenizers_in_their_order_and_together(log: StreamLog) -> None:
    submit(log, "first")
    submit_all(log, "a", 12)
    submit_all(log, "b", 2)
    entries = log.read(SUBMITTED, "tokenize-0", max_entries=100, block_ms=0)
    uids = ["first", *sibling_uids("a", 12), *sibling_uids("b", 2)]
    assert [entry.fields for entry in entries] == [{"uid": uid, "frontend": "web-0"} for uid in uids]


def test_siblings_go_each_their_own_way(log: StreamLog, detokenizer: Detokenizer) -> None:
    submit_all(log, "a", 4)
    refused, *others = log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)
    assert end(log, "a.0", FAILED, consume=refused)
    assert all(tokenize(log, entry) for entry in others)
    taken = log.take(detokenizer.engine, 8, control_cursor="0-0")
    assert [entry.fields["uid"] for entry in taken.entries] == ["a.1", "a.2", "a.3"]
    assert taken.ended == ("a.0",)
    assert detokenizer.say(say_tokens("a.1", 1), say_tokens("a.2", 1), say_end("a.2", FINISHED))
    assert end(log, "a.3", CANCELLED)
    assert [ids(log, uid)[2:] for uid in ("a.1", "a.2", "a.3")] == [["1-0"], ["1-0", SEAL], [SEAL]]
    assert log.living() == ["a.1"]
    assert log.frontends_of(["a.0", "a.1", "a"]) == {"a.0": "web-0", "a.1": "web-0", "a": ""}


def test_siblings_are_overdue_each(log: StreamLog) -> None:
    submit_all(log, "a", 3, timeout_ms=1)
    submit(log, "b")
    until(lambda: log.overdue(9) == ["a.0", "a.1", "a.2"])
    assert log.overdue(2) == ["a.0", "a.1"]
    end(log, "a.1", FAILED)
    assert log.overdue(9) == ["a.0", "a.2"]


def test_a_single_one_in_a_sequence_is_submitted_as_by_itself(log: StreamLog) -> None:
    assert submit_all(log, "a", 1) == SubmitResult(ACCEPTED, "a")
    assert (submitted_of(log, "a").siblings, history(log, "a.0")) == (1, [])
    assert submit(log, "a") is Submission.DUPLICATE


def test_how_many_siblings_there_are_is_said_by_the_commit(log: StreamLog) -> None:
    """A request that is sent again alone may have had siblings."""
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), siblings=9)
    log.submit("a", [event])
    assert submitted_of(log, "a").siblings == 1
    assert "siblings" not in history(log, "a")[0].fields


def test_a_repeated_submit_of_siblings_is_a_duplicate_and_changes_nothing(log: StreamLog) -> None:
    submit_all(log, "a", 3)
    before = log.histories(sibling_uids("a", 3))
    for max_queued in (3, 100):
        assert submit_all(log, "a", 3, max_queued=max_queued) == SubmitResult(Submission.DUPLICATE, "a")
    assert log.histories(sibling_uids("a", 3)) == before
    assert waiting(log) == ["a.0", "a.1", "a.2"]


@pytest.mark.parametrize("gone", [0, 2])
def test_a_repeated_submit_of_siblings_of_which_one_is_gone_is_a_duplicate_too(log: StreamLog, gone: int) -> None:
    submit_all(log, "a", 3)
    log.limits = limits(retention_ms=1)
    end(log, f"a.{gone}", CANCELLED)
    until(lambda: history(log, f"a.{gone}") == [])
    before = log.histories(sibling_uids("a", 3))
    outcomes: list[object] = []
    try:
        outcomes.append(submit_all(log, "a", 3))
    except LogError as error:  # said in the middle of it
        outcomes.append(error)
    assert outcomes == [SubmitResult(Submission.DUPLICATE, "a")]
    assert log.histories(sibling_uids("a", 3)) == before
    assert len(waiting(log)) == 3


def test_siblings_are_refused_when_there_is_no_room_for_all(log: StreamLog) -> None:
    accept(log, "first")
    submit(log, "second")
    assert submit_all(log, "a", 4, max_queued=5) == SubmitResult(Submission.BUSY, "a")
    assert log.histories(sibling_uids("a", 4)) == [[]] * 4
    assert log.living() == ["first", "second"]
    assert submit_all(log, "a", 3, max_queued=5) == SubmitResult(ACCEPTED, "a")
    assert submit_all(log, "b", 1, max_queued=5) == SubmitResult(Submission.BUSY, "b")
    assert waiting(log) == ["second", "a.0", "a.1", "a.2"]


def test_more_siblings_than_may_wait_at_all_are_always_refused(log: StreamLog) -> None:
    assert submit_all(log, "a", 4, max_queued=3) == SubmitResult(Submission.BUSY, "a")
    assert submit_all(log, "a", 3, max_queued=3) == SubmitResult(ACCEPTED, "a")


def test_siblings_have_one_idempotency_key_under_the_uid_as_which_they_were_submitted(log: StreamLog) -> None:
    assert submit_all(log, "a", 3, ONCE) == SubmitResult(ACCEPTED, "a")
    assert submit_all(log, "b", 3, ONCE) == ATTACHED_TO_A
    assert submit_all(log, "b", 3, Once("key", "another")) == SubmitResult(Submission.MISMATCH, "a")
    assert submit_all(log, "b", 3, Once("key", "body", instead_of="a.0")) == ATTACHED_TO_A
    assert submit_all(log, "a", 3, ONCE) == SubmitResult(Submission.DUPLICATE, "a")
    assert waiting(log) == ["a.0", "a.1", "a.2"]
    assert submit_all(log, "b", 3, Once("key", "body", instead_of="a")) == SubmitResult(ACCEPTED, "b")
    assert submit_all(log, "c", 3, ONCE) == SubmitResult(Submission.ATTACH, "b")
    assert waiting(log) == ["b.0", "b.1", "b.2"]


def test_refused_siblings_leave_their_idempotency_key_free(log: StreamLog) -> None:
    assert submit_all(log, "a", 3, ONCE, max_queued=2) == SubmitResult(Submission.BUSY, "a")
    assert submit_once(log, "b") == SubmitResult(ACCEPTED, "b")


def test_of_simultaneous_submits_of_siblings_under_an_idempotency_key_one_is_accepted_whole(log: StreamLog) -> None:
    logs = {uid: another(log) for uid in "abcdefgh"}
    outcomes: list[SubmitResult] = []
    start = threading.Barrier(len(logs))

    def ask(uid: str) -> None:
        start.wait()
        outcomes.append(submit_all(logs[uid], uid, 5, ONCE))

    threads = [threading.Thread(target=ask, args=(uid,)) for uid in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (accepted,) = [outcome.uid for outcome in outcomes if outcome.submission is ACCEPTED]
    assert outcomes.count(SubmitResult(Submission.ATTACH, accepted)) == 7
    assert waiting(log) == list(sibling_uids(accepted, 5))
    for each in logs.values():
        if isinstance(each, RedisLog):
            each.close()


def test_siblings_count_once_for_their_minute(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=2)
        return [submit_all(log, f"{key}{i}", 5, None, quota).submission for i in range(3)]

    assert in_one_minute(act) == [ACCEPTED, ACCEPTED, TOO_FAST]


def test_siblings_run_each_for_itself_but_are_accepted_where_one_would_be(log: StreamLog) -> None:
    quota = Quota("key", concurrent_requests=4)
    submit_all(log, "a", 3, None, quota)
    assert submit_all(log, "b", 8, None, quota) == SubmitResult(ACCEPTED, "b")
    for uid in ("a.0", "a.1", "a.2", "b.0", "b.1", "b.2", "b.3"):
        assert submit_all(log, "c", 2, None, quota) == SubmitResult(TOO_MANY, "c")
        end(log, uid, CANCELLED)
    assert submit_as(log, "c", quota).submission is TOO_MANY  # four are left
    end(log, "b.4", CANCELLED)
    assert [submit_all(log, uid, 2, None, quota).submission for uid in "cd"] == [ACCEPTED, TOO_MANY]
    assert sorted(log.living()) == ["b.5", "b.6", "b.7", "c.0", "c.1"]


def test_siblings_that_were_refused_are_not_counted(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=1, concurrent_requests=1)
        return [
            submit_all(log, key, 3, None, quota, max_queued=2).submission,
            submit_all(log, key, 3, None, quota).submission,
            submit_all(log, key, 3, None, quota).submission,
            submit_all(log, f"{key}'", 3, None, quota).submission,
        ]

    assert in_one_minute(act) == [Submission.BUSY, ACCEPTED, Submission.DUPLICATE, TOO_FAST]
