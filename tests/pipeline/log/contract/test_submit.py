"""The contract of the log: submit, alone and under an idempotency key."""

from __future__ import annotations

import threading

from log_contract import (
    ATTACHED_TO_A,
    CANCELLED,
    FINISHED,
    LONG_MS,
    SHORT_MS,
    SUBMITTED,
    accept,
    another,
    end,
    history,
    ids,
    read_one,
    submit,
    submit_once,
)
from redis_servers import until

from pipeline.events import SamplingParams, Submitted, decode
from pipeline.log.protocol import Once, StreamLog, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID

# submit


def test_submit_begins_a_history_that_reads_as_it_was_said(log: StreamLog) -> None:
    assert submit(log) is Submission.ACCEPTED
    (entry,) = history(log)
    event = decode(entry.fields)
    assert entry.id == SUBMITTED_ID
    assert isinstance(event, Submitted)
    assert (event.prompt, event.frontend, event.sampling.seed) == ("Hi", "web-0", 1)
    assert event.deadline_ms == event.ms + LONG_MS


def test_submit_sets_the_deadline_also_of_an_event_that_brings_an_older_one(log: StreamLog) -> None:
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), deadline_ms=17)
    log.submit("a", [event])
    written = decode(history(log)[0].fields)
    assert isinstance(written, Submitted)
    assert written.deadline_ms == written.ms + LONG_MS


def test_submit_hands_uid_and_frontend_to_the_tokenizers(log: StreamLog) -> None:
    submit(log, "a", frontend="web-3")
    assert read_one(log, SUBMITTED, "tokenize-0").fields == {"uid": "a", "frontend": "web-3"}


def test_a_repeated_submit_is_a_duplicate_and_changes_nothing(log: StreamLog) -> None:
    submit(log)
    before = history(log)
    assert submit(log) is Submission.DUPLICATE
    assert history(log) == before
    assert len(log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)) == 1


def test_submit_is_refused_when_backlog_and_requests_in_flight_reach_the_limit(log: StreamLog) -> None:
    accept(log, "a")
    submit(log, "b")
    assert submit(log, "c", max_queued=2) is Submission.BUSY
    assert history(log, "c") == []
    assert log.alive(["a", "b", "c"]) == {"a", "b"}
    assert submit(log, "c", max_queued=3) is Submission.ACCEPTED


def test_a_busy_submit_of_a_known_uid_is_a_duplicate(log: StreamLog) -> None:
    submit(log)
    assert submit(log, max_queued=1) is Submission.DUPLICATE


def test_a_history_expires_after_deadline_and_retention(log: StreamLog) -> None:
    submit(log, timeout_ms=SHORT_MS, retention_ms=SHORT_MS)
    until(lambda: history(log) == [])
    assert not end(log, "a", CANCELLED)
    assert history(log) == []


# submit under an idempotency key


def test_what_is_submitted_again_under_an_idempotency_key_is_the_first_request(log: StreamLog) -> None:
    assert submit_once(log, "a") == SubmitResult(Submission.ACCEPTED, "a")
    assert submit_once(log, "b") == ATTACHED_TO_A
    end(log, "a", FINISHED)
    assert submit_once(log, "b") == ATTACHED_TO_A
    assert (ids(log, "a"), ids(log, "b")) == ([SUBMITTED_ID, SEAL], [])
    assert len(log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)) == 1
    assert log.alive(["a", "b"]) == set()


def test_another_body_under_an_idempotency_key_is_a_mismatch_whatever_became_of_the_first(log: StreamLog) -> None:
    submit_once(log, "a")
    for once in (Once("key", "another"), Once("key", "another", instead_of="a")):
        assert submit_once(log, "b", once) == SubmitResult(Submission.MISMATCH, "a")
    assert ids(log, "b") == []


def test_other_idempotency_keys_and_none_have_nothing_to_do_with_each_other(log: StreamLog) -> None:
    assert submit_once(log, "a").submission is Submission.ACCEPTED
    assert submit_once(log, "b", Once("another", "body")) == SubmitResult(Submission.ACCEPTED, "b")
    assert submit(log, "c") is Submission.ACCEPTED


def test_a_repeated_submit_under_an_idempotency_key_is_a_duplicate(log: StreamLog) -> None:
    submit_once(log, "a")
    before = history(log)
    assert submit_once(log, "a", max_queued=1) == SubmitResult(Submission.DUPLICATE, "a")
    assert history(log) == before


def test_a_refused_submit_leaves_its_idempotency_key_free(log: StreamLog) -> None:
    submit(log, "first")
    assert submit_once(log, "a", max_queued=1) == SubmitResult(Submission.BUSY, "a")
    assert submit_once(log, "b") == SubmitResult(Submission.ACCEPTED, "b")
    assert submit_once(log, "c", max_queued=1) == SubmitResult(Submission.ATTACH, "b")


def test_an_idempotency_key_is_taken_from_the_request_that_was_named_and_from_no_other(log: StreamLog) -> None:
    instead = Once("key", "body", instead_of="a")
    submit_once(log, "a")
    end(log, "a", CANCELLED)
    assert submit_once(log, "b", instead) == SubmitResult(Submission.ACCEPTED, "b")
    assert submit_once(log, "c", instead) == SubmitResult(Submission.ATTACH, "b")
    assert submit_once(log, "b", instead) == SubmitResult(Submission.DUPLICATE, "b")
    assert ids(log, "c") == []


def test_of_simultaneous_submits_under_an_idempotency_key_one_is_accepted(log: StreamLog) -> None:
    outcomes: list[SubmitResult] = []
    logs = {uid: another(log) for uid in "abcdefgh"}
    start = threading.Barrier(len(logs))

    def ask(uid: str) -> None:
        start.wait()
        outcomes.append(submit_once(logs[uid], uid))

    threads = [threading.Thread(target=ask, args=(uid,)) for uid in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (accepted,) = [outcome.uid for outcome in outcomes if outcome.submission is Submission.ACCEPTED]
    attached = SubmitResult(Submission.ATTACH, accepted)
    assert [outcome for outcome in outcomes if outcome.uid != accepted or outcome == attached] == [attached] * 7
    assert log.alive(list(logs)) == {accepted}
    for each in logs.values():
        if isinstance(each, RedisLog):
            each.close()


def test_an_idempotency_key_lives_as_long_as_its_history_can(log: StreamLog) -> None:
    submit_once(log, "a", timeout_ms=SHORT_MS)
    until(lambda: submit_once(log, "b").submission is Submission.ACCEPTED)
    assert history(log, "a") == []
