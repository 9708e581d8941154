"""The contract of the log: submit, alone and under an idempotency key."""

from __future__ import annotations

from support.log_contract import (
    ACCEPTED,
    ATTACHED_TO_A,
    BUSY,
    DUPLICATE,
    FINISHED,
    LONG_MS,
    SHORT_MS,
    SUBMITTED,
    Scene,
    submitted,
)
from support.redis_servers import until

from pipeline.events import SamplingParams, Submitted, decode
from pipeline.log.protocol import Once, Quota, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID

# submit


def test_submit_begins_a_history_that_reads_as_it_was_said(scene: Scene) -> None:
    assert scene.submit() is ACCEPTED
    (entry,) = scene.history()
    event = decode(entry.fields)
    assert entry.id == SUBMITTED_ID
    assert isinstance(event, Submitted)
    assert (event.prompt, event.frontend, event.sampling.seed) == ("Hi 0", "web-0", 0)
    assert event.deadline_ms == event.ms + LONG_MS


def test_submit_sets_the_deadline_also_of_an_event_that_brings_an_older_one(log: RedisLog, scene: Scene) -> None:
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), deadline_ms=17)
    log.submit("a", [event])
    written = decode(scene.history()[0].fields)
    assert isinstance(written, Submitted)
    assert written.deadline_ms == written.ms + LONG_MS


def test_submit_hands_uid_and_frontend_to_the_tokenizers(scene: Scene) -> None:
    scene.submit("a", frontend="web-3")
    assert scene.read_one(SUBMITTED, "tokenize-0").fields == {"uid": "a", "frontend": "web-3"}


def test_submit_is_refused_when_as_many_wait_as_may(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    scene.submit("b")
    assert scene.submit("c", max_queued=2) is BUSY
    assert scene.history("c") == []
    assert log.alive(["a", "b", "c"]) == {"a", "b"}
    assert scene.submit("c", max_queued=3) is ACCEPTED


def test_what_a_tokenizer_has_in_hand_waits(scene: Scene) -> None:
    scene.submit("a")
    assert scene.waiting() == ["a"]
    assert scene.submit("b", max_queued=1) is BUSY


def test_what_an_engine_has_taken_does_not_wait(scene: Scene) -> None:
    scene.take_all(scene.own("generate-0"), "a", "b")
    assert outcomes(scene, "cde", 2) == [ACCEPTED, ACCEPTED, BUSY]


def test_what_ended_while_it_waited_does_not_wait_though_no_worker_has_seen_that(scene: Scene) -> None:
    scene.accept("a", "b")
    scene.submit("c")
    assert scene.waiting() == ["c"]
    scene.submit("d")
    for uid in "abcd":
        scene.end(uid)
    assert outcomes(scene, "efg", 2) == [ACCEPTED, ACCEPTED, BUSY]


def test_what_ended_while_an_engine_had_it_makes_no_room_for_more_to_wait(scene: Scene) -> None:
    owner = scene.own("generate-0")
    entries = scene.take_all(owner, "a", "b", "c")
    for uid in "ab":
        scene.end(uid)
    assert outcomes(scene, "def", 2) == [ACCEPTED, ACCEPTED, BUSY]
    scene.step(owner, 1, *(entry.id for entry in entries))
    assert scene.submit("f", max_queued=2) is BUSY


def test_those_that_wait_are_counted_among_those_that_ended_and_those_that_run(scene: Scene) -> None:
    scene.take_all(scene.own("generate-0"), "a", "b", "c")
    scene.accept("d", "e")
    scene.submit("f")
    for uid in "ad":
        scene.end(uid)
    assert [scene.submit("g", max_queued=2), scene.submit("g", max_queued=3)] == [BUSY, ACCEPTED]


def outcomes(scene: Scene, uids: str, max_queued: int) -> list[Submission]:
    return [scene.submit(uid, max_queued=max_queued) for uid in uids]


def test_a_history_expires_after_deadline_and_retention(scene: Scene) -> None:
    scene.submit(timeout_ms=SHORT_MS, retention_ms=SHORT_MS)
    until(lambda: scene.history() == [])
    assert not scene.end()
    assert scene.history() == []


# submit under an idempotency key


def test_what_is_submitted_again_under_an_idempotency_key_is_the_first_request(log: RedisLog, scene: Scene) -> None:
    assert scene.submit_once("a") == SubmitResult(ACCEPTED, "a")
    assert scene.submit_once("b") == ATTACHED_TO_A
    scene.end("a", FINISHED)
    assert scene.submit_once("b") == ATTACHED_TO_A
    assert (scene.ids("a"), scene.ids("b")) == ([SUBMITTED_ID, SEAL], [])
    assert len(log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)) == 1
    assert log.alive(["a", "b"]) == set()


def test_another_body_under_an_idempotency_key_is_a_mismatch_whatever_became_of_the_first(scene: Scene) -> None:
    scene.submit_once("a")
    for once in (Once("key", "another"), Once("key", "another", instead_of="a")):
        assert scene.submit_once("b", once) == SubmitResult(Submission.MISMATCH, "a")
    assert scene.ids("b") == []


def test_other_idempotency_keys_and_none_have_nothing_to_do_with_each_other(scene: Scene) -> None:
    assert scene.submit_once("a").submission is ACCEPTED
    assert scene.submit_once("b", Once("another", "body")) == SubmitResult(ACCEPTED, "b")
    assert scene.submit("c") is ACCEPTED


def test_a_refused_submit_leaves_its_idempotency_key_free(scene: Scene) -> None:
    scene.submit("first")
    assert scene.submit_once("a", max_queued=1) == SubmitResult(BUSY, "a")
    assert scene.submit_once("b") == SubmitResult(ACCEPTED, "b")
    assert scene.submit_once("c", max_queued=1) == SubmitResult(Submission.ATTACH, "b")


def test_an_idempotency_key_is_taken_from_the_request_that_was_named_and_from_no_other(scene: Scene) -> None:
    instead = Once("key", "body", instead_of="a")
    scene.submit_once("a")
    scene.end()
    assert scene.submit_once("b", instead) == SubmitResult(ACCEPTED, "b")
    assert scene.submit_once("c", instead) == SubmitResult(Submission.ATTACH, "b")
    assert scene.submit_once("b", instead) == SubmitResult(DUPLICATE, "b")
    assert scene.ids("c") == []


def test_an_idempotency_key_lives_as_long_as_its_history_can(scene: Scene) -> None:
    scene.submit_once("a", timeout_ms=SHORT_MS, retention_ms=SHORT_MS)
    until(lambda: scene.submit_once("b").submission is ACCEPTED)
    assert scene.history("a") == []


# what was accepted and lost


def test_what_begins_again_is_refused_by_no_limit_and_keeps_its_deadline(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", requests_per_minute=1, concurrent_requests=1)
    assert scene.submit_as("a", quota).submission is ACCEPTED
    assert scene.submit("b", max_queued=1) is BUSY
    assert log.submit("b", [submitted()], quota=quota, left_ms=5000).submission is ACCEPTED
    (entry,) = scene.history("b")
    event = decode(entry.fields)
    assert isinstance(event, Submitted) and event.deadline_ms == event.ms + 5000
    assert scene.waiting() == ["a", "b"]
    # It counts, because what it counted before is lost with it.
    scene.end("a")
    assert scene.submit_as("c", Quota("key", concurrent_requests=1)).submission is Submission.TOO_MANY


def test_what_is_there_does_not_begin_again(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.end("a")
    assert log.submit("a", [submitted()], left_ms=5000).submission is DUPLICATE
    assert scene.history()[-1].id == SEAL


def test_what_begins_again_takes_its_idempotency_key_unless_another_request_has_it(log: RedisLog, scene: Scene) -> None:
    one, two, three = (Once(f"key {number}", "digest") for number in range(3))
    assert log.submit("a", [submitted()], one, left_ms=5000) == SubmitResult(ACCEPTED, "a")
    assert scene.submit_once("b", one) == ATTACHED_TO_A
    scene.submit_once("c", two)
    assert log.submit("d", [submitted()], Once("key 1", "other"), left_ms=5000).submission is ACCEPTED
    assert scene.submit_once("e", two).uid == "c"
    assert scene.submit_once("f", three).submission is ACCEPTED
    assert log.submit("g", [submitted()], three, left_ms=5000).submission is ACCEPTED
    assert scene.submit_once("h", three).uid == "f"


def test_siblings_begin_again_together(log: RedisLog, scene: Scene) -> None:
    assert log.submit("a", [submitted(), submitted(number=1)], left_ms=5000).submission is ACCEPTED
    assert scene.waiting() == ["a.0", "a.1"]
