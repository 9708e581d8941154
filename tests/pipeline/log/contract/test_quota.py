"""The contract of the log: submit under a quota."""

from __future__ import annotations

from log_contract import (
    ACCEPTED,
    BUSY,
    DUPLICATE,
    FINISHED,
    TOO_FAST,
    TOO_MANY,
    Detokenizer,
    Scene,
    in_one_minute,
    say_end,
)

from pipeline.log.protocol import Once, Quota, StreamLog, Submission, SubmitResult


def test_a_key_has_so_many_requests_accepted_in_a_minute(log: StreamLog, scene: Scene) -> None:
    def act(key: str) -> list[SubmitResult]:
        return [scene.submit_as(f"{key}{i}", Quota(key, requests_per_minute=3)) for i in range(5)]

    outcomes = in_one_minute(act)
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

    assert in_one_minute(act) is TOO_FAST


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

    assert in_one_minute(act) == [
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

    assert in_one_minute(act) == [ACCEPTED, TOO_MANY, TOO_MANY, ACCEPTED, TOO_FAST]


def test_who_is_past_the_quota_is_told_so_by_a_full_server_too_and_its_idempotency_key_stays_free(scene: Scene) -> None:
    def act(key: str) -> list[Submission]:
        once = Once(key, "body")
        scene.submit_as(f"{key}a", Quota(key, 1))
        refused = scene.submit_as(f"{key}b", Quota(key, 1), once, max_queued=1)
        return [refused.submission, scene.submit_once(f"{key}c", once).submission]

    assert in_one_minute(act) == [TOO_FAST, ACCEPTED]


def test_of_simultaneous_submits_no_more_are_accepted_than_may_be(scene: Scene) -> None:
    quota = Quota("key", concurrent_requests=3)
    outcomes = scene.at_once(lambda one, uid: one.submit_as(uid, quota).submission)
    assert (outcomes.count(ACCEPTED), outcomes.count(TOO_MANY)) == (3, 5)
