"""The contract of the log: submit under a quota."""

from __future__ import annotations

import threading

from log_contract import (
    ACCEPTED,
    CANCELLED,
    FINISHED,
    TOO_FAST,
    TOO_MANY,
    Detokenizer,
    another,
    end,
    ids,
    in_one_minute,
    say_end,
    submit,
    submit_as,
    submit_once,
)

from pipeline.log.protocol import Once, Quota, StreamLog, Submission, SubmitResult
from pipeline.log.redis import RedisLog


def test_a_key_has_so_many_requests_accepted_in_a_minute(log: StreamLog) -> None:
    def act(key: str) -> list[SubmitResult]:
        return [submit_as(log, f"{key}{i}", Quota(key, requests_per_minute=3)) for i in range(5)]

    outcomes = in_one_minute(act)
    assert [outcome.submission for outcome in outcomes] == [ACCEPTED] * 3 + [TOO_FAST] * 2
    assert [outcome.again_ms for outcome in outcomes[:3]] == [0] * 3
    assert all(0 < outcome.again_ms <= 60_000 for outcome in outcomes[3:])
    for outcome in outcomes[3:]:
        assert ids(log, outcome.uid) == []
    assert log.alive([outcome.uid for outcome in outcomes]) == {outcome.uid for outcome in outcomes[:3]}


def test_what_has_ended_still_counts_for_its_minute(log: StreamLog) -> None:
    def act(key: str) -> Submission:
        submit_as(log, f"{key}a", Quota(key, requests_per_minute=1))
        end(log, f"{key}a", FINISHED)
        return submit_as(log, f"{key}b", Quota(key, requests_per_minute=1)).submission

    assert in_one_minute(act) is TOO_FAST


def test_a_key_has_so_many_requests_that_have_not_ended(log: StreamLog) -> None:
    quota = Quota("key", concurrent_requests=2)
    assert [submit_as(log, uid, quota).submission for uid in "abc"] == [ACCEPTED, ACCEPTED, TOO_MANY]
    assert (submit_as(log, "c", quota).again_ms, ids(log, "c")) == (0, [])
    end(log, "a", CANCELLED)
    assert [submit_as(log, uid, quota).submission for uid in "cd"] == [ACCEPTED, TOO_MANY]
    end(log, "b", CANCELLED)
    end(log, "c", CANCELLED)
    assert [submit_as(log, uid, quota).submission for uid in "def"] == [ACCEPTED, ACCEPTED, TOO_MANY]


def test_a_request_that_the_detokenizer_ends_leaves_its_place_to_the_next(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    quota = Quota("key", concurrent_requests=1)
    submit_as(log, "a", quota)
    assert detokenizer.say(say_end("a", FINISHED))
    assert submit_as(log, "b", quota).submission is ACCEPTED


def test_keys_do_not_count_for_one_another(log: StreamLog) -> None:
    for key in ("k", "ke", "key"):
        assert submit_as(log, key, Quota(key, 1, 1)).submission is ACCEPTED
    assert submit(log, "nobody's") is ACCEPTED


def test_a_key_without_limits_is_not_held_up(log: StreamLog) -> None:
    for i in range(5):
        assert submit_as(log, f"r{i}", Quota("key")) == SubmitResult(ACCEPTED, f"r{i}")


def test_what_is_refused_for_another_reason_is_not_counted(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota, other = Quota(key, 1, 1), Quota(f"{key}'", 1, 1)
        held = Once(key, "body")
        submit_as(log, f"{key}held", Quota("another"), held)
        return [
            submit_as(log, f"{key}a", quota, max_queued=1).submission,
            submit_as(log, f"{key}a", quota, held).submission,
            submit_as(log, f"{key}a", quota, Once(key, "another")).submission,
            submit_as(log, f"{key}a", quota).submission,
            submit_as(log, f"{key}a", quota).submission,
            submit_as(log, f"{key}a", quota, held).submission,
            submit_as(log, f"{key}b", quota).submission,
            submit_as(log, f"{key}b", other).submission,
        ]

    assert in_one_minute(act) == [
        Submission.BUSY,
        Submission.ATTACH,
        Submission.MISMATCH,
        ACCEPTED,
        Submission.DUPLICATE,
        Submission.DUPLICATE,
        TOO_FAST,
        ACCEPTED,
    ]


def test_a_submit_that_is_refused_for_one_limit_is_not_counted_for_the_other(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=2, concurrent_requests=1)
        outcomes = [submit_as(log, f"{key}{i}", quota).submission for i in range(3)]
        end(log, f"{key}0", CANCELLED)
        return [*outcomes, *(submit_as(log, f"{key}{i}", quota).submission for i in (3, 4))]

    assert in_one_minute(act) == [ACCEPTED, TOO_MANY, TOO_MANY, ACCEPTED, TOO_FAST]


def test_who_is_past_the_quota_is_told_so_by_a_full_server_too_and_its_idempotency_key_stays_free(
    log: StreamLog,
) -> None:
    def act(key: str) -> list[Submission]:
        once = Once(key, "body")
        submit_as(log, f"{key}a", Quota(key, 1))
        refused = submit_as(log, f"{key}b", Quota(key, 1), once, max_queued=1)
        return [refused.submission, submit_once(log, f"{key}c", once).submission]

    assert in_one_minute(act) == [TOO_FAST, ACCEPTED]


def test_of_simultaneous_submits_no_more_are_accepted_than_may_be(log: StreamLog) -> None:
    logs = {uid: another(log) for uid in "abcdefgh"}
    outcomes: list[Submission] = []
    start = threading.Barrier(len(logs))

    def ask(uid: str) -> None:
        start.wait()
        outcomes.append(submit_as(logs[uid], uid, Quota("key", concurrent_requests=3)).submission)

    threads = [threading.Thread(target=ask, args=(uid,)) for uid in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count(ACCEPTED), outcomes.count(TOO_MANY)) == (3, 5)
    for each in logs.values():
        if isinstance(each, RedisLog):
            each.close()
