"""The contract of the log: submit under a quota."""

from __future__ import annotations

import dataclasses

from support.log_contract import (
    ACCEPTED,
    BUSY,
    DUPLICATE,
    FINISHED,
    TOO_FAST,
    TOO_MANY,
    TOO_MUCH,
    Detokenizer,
    Scene,
    say_end,
    submitted,
)

from pipeline.log.protocol import Once, Quota, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.log.shared import REQUEST_BYTES, submitted_bytes, submitted_words


def test_a_key_has_so_many_requests_accepted_in_a_minute(log: RedisLog, scene: Scene) -> None:
    def act(key: str) -> list[SubmitResult]:
        return [scene.submit_as(f"{key}{i}", Quota(key, requests_per_minute=3)) for i in range(5)]

    outcomes = act("key")
    assert [outcome.submission for outcome in outcomes] == [ACCEPTED] * 3 + [TOO_FAST] * 2
    assert [outcome.again_ms for outcome in outcomes[:3]] == [0] * 3
    assert all(0 < outcome.again_ms <= 60_000 for outcome in outcomes[3:])
    for outcome in outcomes[3:]:
        assert scene.ids(outcome.uid) == []
    assert log.alive([outcome.uid for outcome in outcomes]) == {outcome.uid for outcome in outcomes[:3]}


def test_what_has_ended_still_counts_for_its_minute(scene: Scene) -> None:
    def act(key: str) -> Submission:
        scene.submit_as(f"{key}a", Quota(key, requests_per_minute=1))
        scene.end(f"{key}a", FINISHED)
        return scene.submit_as(f"{key}b", Quota(key, requests_per_minute=1)).submission

    assert act("key") is TOO_FAST


def test_a_key_has_so_many_requests_that_have_not_ended(scene: Scene) -> None:
    quota = Quota("key", concurrent_requests=2)
    assert [scene.submit_as(uid, quota).submission for uid in "abc"] == [ACCEPTED, ACCEPTED, TOO_MANY]
    assert (scene.submit_as("c", quota).again_ms, scene.ids("c")) == (0, [])
    scene.end()
    assert [scene.submit_as(uid, quota).submission for uid in "cd"] == [ACCEPTED, TOO_MANY]
    scene.end("b")
    scene.end("c")
    assert [scene.submit_as(uid, quota).submission for uid in "def"] == [ACCEPTED, ACCEPTED, TOO_MANY]


def test_a_request_that_the_detokenizer_ends_leaves_its_place_to_the_next(
    scene: Scene, detokenizer: Detokenizer
) -> None:
    quota = Quota("key", concurrent_requests=1)
    scene.submit_as("a", quota)
    assert detokenizer.say(say_end("a", FINISHED))
    assert scene.submit_as("b", quota).submission is ACCEPTED


def test_keys_do_not_count_for_one_another(scene: Scene) -> None:
    for key in ("k", "ke", "key"):
        assert scene.submit_as(key, Quota(key, 1, 1)).submission is ACCEPTED
    assert scene.submit("nobody's") is ACCEPTED


def test_a_key_without_limits_is_not_held_up(scene: Scene) -> None:
    for i in range(5):
        assert scene.submit_as(f"r{i}", Quota("key")) == SubmitResult(ACCEPTED, f"r{i}")


def test_what_is_refused_for_another_reason_is_not_counted(scene: Scene) -> None:
    def act(key: str) -> list[Submission]:
        quota, other = Quota(key, 1, 1), Quota(f"{key}'", 1, 1)
        held = Once(key, "body")
        scene.submit_as(f"{key}held", Quota("another"), held)
        return [
            scene.submit_as(f"{key}a", quota, max_queued=1).submission,
            scene.submit_as(f"{key}a", quota, held).submission,
            scene.submit_as(f"{key}a", quota, Once(key, "another")).submission,
            scene.submit_as(f"{key}a", quota).submission,
            scene.submit_as(f"{key}a", quota).submission,
            scene.submit_as(f"{key}a", quota, held).submission,
            scene.submit_as(f"{key}b", quota).submission,
            scene.submit_as(f"{key}b", other).submission,
        ]

    assert act("key") == [
        BUSY,
        Submission.ATTACH,
        Submission.MISMATCH,
        ACCEPTED,
        DUPLICATE,
        DUPLICATE,
        TOO_FAST,
        ACCEPTED,
    ]


def test_a_submit_that_is_refused_for_one_limit_is_not_counted_for_the_other(scene: Scene) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=2, concurrent_requests=1)
        outcomes = [scene.submit_as(f"{key}{i}", quota).submission for i in range(3)]
        scene.end(f"{key}0")
        return [*outcomes, *(scene.submit_as(f"{key}{i}", quota).submission for i in (3, 4))]

    assert act("key") == [ACCEPTED, TOO_MANY, TOO_MANY, ACCEPTED, TOO_FAST]


def test_who_is_past_the_quota_is_told_so_by_a_full_server_too_and_its_idempotency_key_stays_free(scene: Scene) -> None:
    def act(key: str) -> list[Submission]:
        once = Once(key, "body")
        scene.submit_as(f"{key}a", Quota(key, 1))
        refused = scene.submit_as(f"{key}b", Quota(key, 1), once, max_queued=1)
        return [refused.submission, scene.submit_once(f"{key}c", once).submission]

    assert act("key") == [TOO_FAST, ACCEPTED]


def test_of_simultaneous_submits_no_more_are_accepted_than_may_be(scene: Scene) -> None:
    quota = Quota("key", concurrent_requests=3)
    outcomes = scene.at_once(lambda one, uid: one.submit_as(uid, quota).submission)
    assert (outcomes.count(ACCEPTED), outcomes.count(TOO_MANY)) == (3, 5)


ONE_BYTES = submitted_bytes(*submitted_words([submitted()]))
"""What one request of a scene counts."""


def test_a_key_submits_no_more_than_its_share_of_the_log(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", log_bytes=3 * ONE_BYTES - 1)
    outcomes = [scene.submit_as(uid, quota) for uid in "abcde"]
    assert [outcome.submission for outcome in outcomes] == [ACCEPTED] * 3 + [TOO_MUCH] * 2
    assert [outcome.used_bytes for outcome in outcomes] == [0] * 3 + [3 * ONE_BYTES] * 2
    assert all(0 < outcome.again_ms <= 17 / 16 * log.limits.retention_ms + 1 for outcome in outcomes[3:])
    assert log.alive(list("abcde")) == set("abc") and scene.ids("d") == []
    scene.end("a")
    assert scene.submit_as("d", quota).submission is TOO_MUCH, "its history is kept"


def test_a_share_is_free_again_when_the_retention_is_over(scene: Scene) -> None:
    quota, retention_ms = Quota("key", log_bytes=1), 160
    assert scene.submit_as("a", quota, retention_ms=retention_ms).submission is ACCEPTED
    refused = scene.submit_as("b", quota, retention_ms=10_000)
    assert (refused.submission, refused.used_bytes) == (TOO_MUCH, ONE_BYTES)
    while (last := scene.submit_as("b", quota, retention_ms=retention_ms)).submission is TOO_MUCH:
        assert 0 < last.again_ms <= retention_ms + 10
    assert last.submission is ACCEPTED
    refused = scene.submit_as("c", quota, retention_ms=retention_ms)
    assert (refused.submission, refused.used_bytes) == (TOO_MUCH, ONE_BYTES)


def test_a_request_counts_its_texts_those_of_siblings_once_and_each_what_a_history_takes(scene: Scene) -> None:
    def used(key: str, prompt: str, count: int) -> int:
        events = [submitted(prompt=prompt, number=0)] * count
        scene.log.submit(key, events, quota=Quota(key, log_bytes=1))
        return scene.submit_as(f"{key}'", Quota(key, log_bytes=1)).used_bytes

    short, long, siblings = used("a", "é", 1), used("b", "é" * 5001, 1), used("c", "é" * 5001, 8)
    assert long - short == 10_000, "bytes of UTF-8"
    assert 7 * REQUEST_BYTES < siblings - long < 7 * REQUEST_BYTES + 5000


def test_shares_of_keys_are_apart_and_what_is_refused_takes_nothing_of_them(scene: Scene) -> None:
    quota, once = Quota("key", concurrent_requests=2, log_bytes=2 * ONE_BYTES), Once("k", "body")
    assert scene.submit_as("a", quota, once).submission is ACCEPTED
    outcomes = [
        scene.submit_as("a", quota).submission,
        scene.submit_as("b", quota, once).submission,
        scene.submit_as("b", quota, max_queued=1).submission,
        scene.submit_as("b", Quota("another", log_bytes=1)).submission,
        scene.submit_as("c", quota).submission,
        scene.submit_as("d", quota).submission,
    ]
    assert outcomes == [DUPLICATE, Submission.ATTACH, BUSY, ACCEPTED, ACCEPTED, TOO_MANY]
    scene.end("a")
    assert scene.submit_as("d", quota, max_queued=1).used_bytes == 2 * ONE_BYTES, "a full server says it, too"
    assert scene.submit("nobody's") is ACCEPTED


def test_so_many_of_one_owner_run_in_the_background(log: RedisLog, scene: Scene) -> None:
    log.limits = dataclasses.replace(log.limits, max_background=2)

    def submit(uid: str, owner: str = "ann") -> Submission:
        event = submitted().model_copy(update={"background": True, "owner": owner})
        return log.submit(uid, [event]).submission

    assert [submit(uid) for uid in "abc"] == [ACCEPTED, ACCEPTED, Submission.TOO_MANY_IN_BACKGROUND]
    assert submit("d", "bob") is log.submit("e", [submitted()]).submission is ACCEPTED
    scene.end("a", FINISHED)
    assert [submit(uid) for uid in "fg"] == [ACCEPTED, Submission.TOO_MANY_IN_BACKGROUND]
