"""The contract of the log: submit of several requests together."""

from __future__ import annotations

import pytest
from support.log_contract import (
    ACCEPTED,
    ATTACHED_TO_A,
    BUSY,
    DUPLICATE,
    FAILED,
    FINISHED,
    KILLED,
    LONG_MS,
    ONCE,
    SUBMITTED,
    TOO_FAST,
    TOO_MANY,
    Detokenizer,
    Scene,
    limits,
    say_end,
    say_tokens,
)
from support.redis_servers import until

from pipeline.errors import LogError
from pipeline.events import SamplingParams, Submitted, Tokenized, decode, encode
from pipeline.log.protocol import DeadLetter, Once, Quota, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, sibling_uids
from pipeline.views.history import copied_history


def submitted_of(scene: Scene, uid: str) -> Submitted:
    """Return the only event of a history."""
    (entry,) = scene.history(uid)
    assert entry.id == SUBMITTED_ID
    event = decode(entry.fields)
    assert isinstance(event, Submitted)
    return event


def test_several_that_are_submitted_together_have_each_a_history_of_their_own(log: RedisLog, scene: Scene) -> None:
    assert scene.submit_all("a", 3) == SubmitResult(ACCEPTED, "a")
    said = [submitted_of(scene, uid) for uid in sibling_uids("a", 3)]
    assert [(event.prompt, event.sampling.seed, event.siblings) for event in said] == [
        ("Hi 0", 0, 3),
        ("Hi 1", 1, 3),
        ("Hi 2", 2, 3),
    ]
    assert {(event.ms, event.deadline_ms) for event in said} == {(said[0].ms, said[0].ms + LONG_MS)}
    assert scene.history("a") == []
    assert log.alive(["a", "a.0", "a.1", "a.2", "a.3"]) == {"a.0", "a.1", "a.2"}


def test_siblings_are_handed_to_the_tokenizers_in_their_order_and_together(log: RedisLog, scene: Scene) -> None:
    scene.submit("first")
    scene.submit_all("a", 12)
    scene.submit_all("b", 2)
    entries = log.read(SUBMITTED, "tokenize-0", max_entries=100, block_ms=0)
    uids = ["first", *sibling_uids("a", 12), *sibling_uids("b", 2)]
    assert [entry.fields for entry in entries] == [{"uid": uid, "frontend": "web-0"} for uid in uids]


def test_siblings_go_each_their_own_way(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.submit_all("a", 4)
    refused, *others = log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)
    assert scene.end("a.0", FAILED, consume=refused)
    assert all(scene.tokenize(entry) for entry in others)
    taken = log.take(detokenizer.engine, 8, control_cursor="0-0")
    assert [entry.fields["uid"] for entry in taken.entries] == ["a.1", "a.2", "a.3"]
    assert taken.ended == ("a.0",)
    assert detokenizer.say(say_tokens("a.1", 1), say_tokens("a.2", 1), say_end("a.2", FINISHED))
    assert scene.end("a.3")
    assert [scene.ids(uid)[2:] for uid in ("a.1", "a.2", "a.3")] == [["1-0"], ["1-0", SEAL], [SEAL]]
    assert log.living() == ["a.1"]
    assert log.frontends_of(["a.0", "a.1", "a"]) == {"a.0": "web-0", "a.1": "web-0", "a": ""}


def test_siblings_are_overdue_each(log: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 3, timeout_ms=1)
    scene.submit("b")
    until(lambda: log.overdue(9) == ["a.0", "a.1", "a.2"])
    assert log.overdue(2) == ["a.0", "a.1"]
    scene.end("a.1", FAILED)
    assert log.overdue(9) == ["a.0", "a.2"]


def test_a_single_one_in_a_sequence_is_submitted_as_by_itself(scene: Scene) -> None:
    assert scene.submit_all("a", 1) == SubmitResult(ACCEPTED, "a")
    assert (submitted_of(scene, "a").siblings, scene.history("a.0")) == (1, [])
    assert scene.submit("a") is DUPLICATE


def test_how_many_siblings_there_are_is_said_by_the_commit(log: RedisLog, scene: Scene) -> None:
    """A request that is sent again alone may have had siblings."""
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), siblings=9)
    log.submit("a", [event])
    assert submitted_of(scene, "a").siblings == 1
    assert "siblings" not in scene.history("a")[0].fields


def test_a_repeated_submit_of_siblings_is_a_duplicate_and_changes_nothing(log: RedisLog, scene: Scene) -> None:
    scene.submit_all("a", 3)
    before = log.histories(sibling_uids("a", 3))
    for max_queued in (3, 100):
        assert scene.submit_all("a", 3, max_queued=max_queued) == SubmitResult(DUPLICATE, "a")
    assert log.histories(sibling_uids("a", 3)) == before
    assert scene.waiting() == ["a.0", "a.1", "a.2"]


@pytest.mark.parametrize("gone", [0, 2])
def test_a_repeated_submit_of_siblings_of_which_one_is_gone_is_a_duplicate_too(
    log: RedisLog, scene: Scene, gone: int
) -> None:
    scene.submit_all("a", 3)
    log.limits = limits(retention_ms=1)
    scene.end(f"a.{gone}")
    until(lambda: scene.history(f"a.{gone}") == [])
    before = log.histories(sibling_uids("a", 3))
    outcome: object
    try:
        outcome = scene.submit_all("a", 3)
    except LogError as error:  # raised in the middle of it: a broken promise, not a broken test
        outcome = error
    assert outcome == SubmitResult(DUPLICATE, "a")
    assert log.histories(sibling_uids("a", 3)) == before
    assert len(scene.waiting()) == 3


def test_siblings_are_refused_when_there_is_no_room_for_all(log: RedisLog, scene: Scene) -> None:
    scene.accept("first")
    scene.submit("second")
    assert scene.submit_all("a", 4, max_queued=5) == SubmitResult(BUSY, "a")
    assert log.histories(sibling_uids("a", 4)) == [[]] * 4
    assert log.living() == ["first", "second"]
    assert scene.submit_all("a", 3, max_queued=5) == SubmitResult(ACCEPTED, "a")
    assert scene.submit_all("b", 1, max_queued=5) == SubmitResult(BUSY, "b")
    assert scene.waiting() == ["second", "a.0", "a.1", "a.2"]


def test_more_siblings_than_may_wait_at_all_are_always_refused(scene: Scene) -> None:
    assert scene.submit_all("a", 4, max_queued=3) == SubmitResult(BUSY, "a")
    assert scene.submit_all("a", 3, max_queued=3) == SubmitResult(ACCEPTED, "a")


def test_siblings_have_one_idempotency_key_under_the_uid_as_which_they_were_submitted(scene: Scene) -> None:
    assert scene.submit_all("a", 3, ONCE) == SubmitResult(ACCEPTED, "a")
    assert scene.submit_all("b", 3, ONCE) == ATTACHED_TO_A
    assert scene.submit_all("b", 3, Once("key", "another")) == SubmitResult(Submission.MISMATCH, "a")
    assert scene.submit_all("b", 3, Once("key", "body", instead_of="a.0")) == ATTACHED_TO_A
    assert scene.submit_all("a", 3, ONCE) == SubmitResult(DUPLICATE, "a")
    assert scene.waiting() == ["a.0", "a.1", "a.2"]
    assert scene.submit_all("b", 3, Once("key", "body", instead_of="a")) == SubmitResult(ACCEPTED, "b")
    assert scene.submit_all("c", 3, ONCE) == SubmitResult(Submission.ATTACH, "b")
    assert scene.waiting() == ["b.0", "b.1", "b.2"]


def test_of_simultaneous_submits_of_siblings_under_an_idempotency_key_one_is_accepted_whole(scene: Scene) -> None:
    outcomes = scene.at_once(lambda one, uid: one.submit_all(uid, 5, ONCE))
    (accepted,) = [outcome.uid for outcome in outcomes if outcome.submission is ACCEPTED]
    assert outcomes.count(SubmitResult(Submission.ATTACH, accepted)) == 7
    assert scene.waiting() == list(sibling_uids(accepted, 5))


def test_siblings_count_once_for_their_minute(scene: Scene) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=2)
        return [scene.submit_all(f"{key}{i}", 5, None, quota).submission for i in range(3)]

    assert act("key") == [ACCEPTED, ACCEPTED, TOO_FAST]


def test_siblings_run_each_for_itself_but_are_accepted_where_one_would_be(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", concurrent_requests=4)
    scene.submit_all("a", 3, None, quota)
    assert scene.submit_all("b", 8, None, quota) == SubmitResult(ACCEPTED, "b")
    for uid in ("a.0", "a.1", "a.2", "b.0", "b.1", "b.2", "b.3"):
        assert scene.submit_all("c", 2, None, quota) == SubmitResult(TOO_MANY, "c")
        scene.end(uid)
    assert scene.submit_as("c", quota).submission is TOO_MANY  # four are left
    scene.end("b.4")
    assert [scene.submit_all(uid, 2, None, quota).submission for uid in "cd"] == [ACCEPTED, TOO_MANY]
    assert sorted(log.living()) == ["b.5", "b.6", "b.7", "c.0", "c.1"]


def test_siblings_that_were_refused_are_not_counted(scene: Scene) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=1, concurrent_requests=1)
        return [
            scene.submit_all(key, 3, None, quota, max_queued=2).submission,
            scene.submit_all(key, 3, None, quota).submission,
            scene.submit_all(key, 3, None, quota).submission,
            scene.submit_all(f"{key}'", 3, None, quota).submission,
        ]

    assert act("key") == [BUSY, ACCEPTED, DUPLICATE, TOO_FAST]


# what they share is kept once, and every reader sees whole requests

LONG = "all work and no play " * 20
LETTER = DeadLetter(stage="tokenize", entry={}, deaths=3, error="exit code -11")


def choices(count: int, prompt: str = LONG) -> list[Submitted]:
    """Return choices of one prompt, which differ in their seeds alone."""
    return [
        Submitted(
            endpoint="e",
            frontend="web-0",
            messages=({"role": "user", "content": prompt},),
            sampling=SamplingParams(seed=i, stop=(LONG,)),
            labels={"user": LONG},
        )
        for i in range(count)
    ]


def test_siblings_read_as_they_were_said(log: RedisLog, scene: Scene) -> None:
    events = [*choices(3, "one"), *choices(3, LONG)]
    log.submit("a", events)
    said = [event.model_copy(update={"siblings": 6}) for event in events]
    histories = log.histories(sibling_uids("a", 6))
    read = [decode(entry.fields) for (entry,) in histories]
    assert [event.model_copy(update={"ms": 0, "deadline_ms": 0}) for event in read] == said
    assert [set(entry.fields) for (entry,) in histories] == [set(encode(said[0])) | {"ms", "deadline_ms"}] * 6
    assert log.histories(["a.1", "a.0", "a.1", "b.0"]) == [histories[1], histories[0], histories[1], []]


def test_the_tokens_of_siblings_read_as_they_were_said(log: RedisLog, scene: Scene) -> None:
    log.submit("a", choices(3))
    events = [Tokenized(token_ids=tuple(range(first, 100)), fingerprint="f", by="tokenize-0") for first in (0, 0, 1)]
    for entry, event in zip(log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0), events, strict=True):
        assert log.tokenized(entry, event)
    assert [scene.events(uid)[1] for uid in sibling_uids("a", 3)] == events
    (tail,) = log.histories(["a.2"], after=SUBMITTED_ID)
    assert [entry.id for entry in tail] == [TOKENIZED_ID] and decode(tail[0].fields).kind == "tokenized"


def test_a_dead_letter_of_a_sibling_holds_the_whole_request_and_can_be_sent_again(log: RedisLog, scene: Scene) -> None:
    events = choices(3)
    log.submit("a", events)
    refused, other, _ = log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)
    scene.tokenize(other)
    assert scene.bury("a.1") and log.end("a.0", KILLED, frontend="web-0", consume=refused, dead=LETTER)
    for letter, uid, seed in zip(log.dead_letters(9), ("a.0", "a.1"), (0, 1), strict=True):
        copy = copied_history(letter)
        assert copy == scene.history(uid) and "history_cut" not in letter.fields
        again = decode(copy[0].fields)
        assert isinstance(again, Submitted) and again.sampling.seed == seed
        assert log.submit(f"again{seed}", [again]) == SubmitResult(ACCEPTED, f"again{seed}")
        alone = submitted_of(scene, f"again{seed}")
        assert alone.model_copy(update={"ms": 0, "deadline_ms": 0}) == events[seed]


def test_siblings_read_whole_after_the_others_have_ended_and_expired(log: RedisLog, scene: Scene) -> None:
    log.submit("a", choices(3))
    log.limits = limits(retention_ms=1)
    scene.end("a.0")
    scene.end("a.2")
    until(lambda: log.histories(["a.0", "a.2"]) == [[], []])
    assert submitted_of(scene, "a.1").messages == choices(1)[0].messages
    log.limits = limits(retention_ms=LONG_MS)
    scene.end("a.1")
    assert [entry.id for entry in scene.history("a.1")] == [SUBMITTED_ID, SEAL]
