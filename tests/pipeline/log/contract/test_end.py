"""The contract of the log: end, and the dead letter that it can write."""

from __future__ import annotations

import json

import pytest
from support.log_contract import (
    ACCEPTED,
    CANCELLED,
    FAILED,
    FINISHED,
    KILLED,
    SHORT_MS,
    SUBMITTED,
    TOKENIZED,
    Detokenizer,
    Scene,
    limits,
    say_end,
    say_tokens,
)
from support.redis_servers import until

from pipeline.events import Admitted, Answered, End, SamplingParams, Submitted
from pipeline.log import entries
from pipeline.log.protocol import Entry, Produced, Reply, Submission, SubmitResult
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID
from pipeline.views.history import copied_history

# end


def test_the_first_seal_wins(scene: Scene) -> None:
    scene.submit()
    assert scene.end()
    before = scene.history()
    assert not scene.end()
    assert not scene.end("a", FAILED)
    assert scene.history() == before
    assert before[-1].id == SEAL


def test_nothing_is_appended_after_the_seal(scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a")
    scene.end()
    before = scene.history()
    detokenizer.say(say_tokens("a", 1), say_end("a", FINISHED), Produced("a", "18446744073709551615-1", 1, FAILED, ""))
    assert scene.history() == before


def test_end_reads_the_number_of_tokens_off_the_history(scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b", "c")
    detokenizer.say(say_tokens("a", 1))
    detokenizer.say(say_tokens("a", 2), say_tokens("b", 1))
    detokenizer.say(Produced("a", "2-1", 2, Admitted(engine="g", epoch=1, step=1, fingerprint="w"), "web-0"))
    scene.end()
    scene.end("b", FINISHED)
    scene.end("c", FAILED)
    assert scene.events("a")[-1] == CANCELLED.model_copy(update={"n": 2})
    assert scene.events("b")[-1] == FINISHED.model_copy(update={"n": 1})
    assert scene.events("c")[-1] == FAILED


def test_end_tells_frontend_and_engines_and_clears_live(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    start = log.open_replies("web-0")
    scene.end("a", FAILED)
    scene.end()
    ((_, replies),) = [log.read_replies("web-0", start, block_ms=0)]
    assert [(r.uid, r.entry_id, r.n, r.event.model_copy(update={"ms": 0})) for r in replies] == [("a", SEAL, 0, FAILED)]
    assert scene.told() == ("a",)
    assert log.alive(["a", "b"]) == {"b"}


def test_an_answer_of_the_tokenizer_ends_a_request_and_reaches_its_frontend_whole(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.submit()
    scene.submit("b")
    start = log.open_replies("web-0")
    answered = Answered(token_ids=(5, 6), pieces=("a,b", "bytes:\\xe4"), text='{"a": "ü\\n"}', by="tokenize-0")
    assert scene.end("a", answered, consume=scene.read_one(SUBMITTED, "tokenize-0"))
    assert scene.events("a")[-1] == answered and log.alive(["a", "b"]) == {"b"}
    assert log.backlog(SUBMITTED) == 1 and log.backlog(TOKENIZED) == 0
    detokenizer.say(say_end("b", answered))  # nobody does, but whoever seals says what can be read
    replies = [r._replace(event=r.event.model_copy(update={"ms": 0})) for r in scene.replies_after(start)]
    assert replies == [Reply("a", SEAL, 0, answered), Reply("b", SEAL, 2, answered)]


def test_end_consumes_the_entry_that_it_answers(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert scene.end("a", FAILED, consume=entry)
    assert not scene.end("a", FAILED, consume=entry)
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert scene.submit("b", max_queued=1) is ACCEPTED


def test_end_of_a_request_that_ended_elsewhere_still_consumes_the_entry(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    scene.end()
    assert not scene.end("a", FAILED, consume=entry)
    assert log.pending(SUBMITTED, "tokenize-0") == []


def test_end_for_an_entry_that_is_not_there_ends_nothing(log: RedisLog, scene: Scene) -> None:
    """A worker may still have entries of a Redis that lost all. Its frontend submits the request again."""
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert not scene.end("a", FAILED, consume=Entry("1-1", entry.fields))
    assert log.alive(["a"]) == {"a"} and log.pending(SUBMITTED, "tokenize-0") == [entry]


def test_end_lets_the_history_expire_after_the_retention(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.submit("b")
    log.limits = limits(retention_ms=SHORT_MS)
    scene.end()
    until(lambda: scene.history("a") == [])
    assert scene.history("b") != []


def test_refused_requests_and_large_answers_of_a_tokenizer_are_kept_briefly(
    scene: Scene, detokenizer: Detokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "BRIEF_MS", SHORT_MS)
    too_large = FAILED.model_copy(update={"status": 413})
    brief: dict[str, End] = {"refused": FAILED, "too large": too_large, "large": answered(64)}
    long: dict[str, End] = {"broke": KILLED, "small": answered(63), "cancelled": CANCELLED}
    siblings = ("sibling", "late sibling", "left")
    scene.accept(*brief, *long, *siblings, "late", "refused by the engine", "late by the engine")
    detokenizer.say(*(say_tokens(uid, 1) for uid in ("late", "late by the engine", "late sibling")))
    assert [scene.abandon(uid, refused=uid != "left") for uid in siblings] == [True, True, True]
    for uid, event in (brief | long | {"late": FAILED}).items():
        assert scene.end(uid, event)
    refused = FAILED.model_copy(update={"n": 1})
    detokenizer.say(say_end("refused by the engine", FAILED, n=0), say_end("late by the engine", refused, n=1))
    until(lambda: not any(scene.history(uid) for uid in (*brief, "refused by the engine", "sibling")))
    kept = (*long, "late", "late by the engine", "late sibling", "left")
    assert all(scene.ids(uid)[-1] == SEAL for uid in kept)


def answered(kib: int) -> Answered:
    return Answered(text="x" * (kib << 10), by="tokenize-0")


def test_a_refused_request_is_not_kept_for_longer_than_the_retention(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    log.limits = limits(retention_ms=SHORT_MS)
    scene.end("a", FAILED)
    until(lambda: scene.history() == [])


def test_end_of_an_unknown_request_makes_no_history(scene: Scene) -> None:
    assert not scene.end("nobody")
    assert scene.history("nobody") == []
    assert scene.told() == ()


# dead letters


def test_a_dead_letter_says_what_happened_and_brings_a_copy_of_the_sealed_history(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a")
    detokenizer.say(say_tokens("a", 1, text='"ü\n'))
    assert scene.bury()
    (letter,) = log.dead_letters(9)
    assert {name: letter.fields[name] for name in ("uid", "stage", "deaths", "error")} == {
        "uid": "a",
        "stage": "generate",
        "deaths": "3",
        "error": "exit code -11",
    }
    assert json.loads(letter.fields["entry"]) == {"uid": "a", "frontend": "web-0"}
    assert copied_history(letter) == scene.history()
    assert letter.fields["ms"] == scene.history()[-1].fields["ms"]
    assert "history_cut" not in letter.fields
    assert scene.ids() == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert scene.events()[-1] == KILLED.model_copy(update={"n": 1})


def test_only_the_first_end_writes_its_letter(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.submit("b")
    assert scene.bury("a") and scene.end("b")
    assert not any(scene.bury(uid) for uid in ("a", "b", "nobody"))
    assert [letter.fields["uid"] for letter in log.dead_letters(9)] == ["a"]


def test_dead_letters_come_newest_first_and_page_by_page(log: RedisLog, scene: Scene) -> None:
    for uid in ("a", "b", "c"):
        scene.submit(uid)
        scene.bury(uid)
    first = log.dead_letters(2)
    assert [letter.fields["uid"] for letter in first] == ["c", "b"]
    rest = log.dead_letters(2, before=first[-1].id)
    assert [letter.fields["uid"] for letter in rest] == ["a"]
    assert log.dead_letters(2, before=rest[-1].id) == []


def test_a_dead_letter_is_dropped_once_and_alone(log: RedisLog, scene: Scene) -> None:
    for uid in ("a", "b"):
        scene.submit(uid)
        scene.bury(uid)
    newest, oldest = log.dead_letters(9)
    assert log.drop_dead(oldest.id)
    assert not log.drop_dead(oldest.id)
    assert log.dead_letters(9) == [newest]


def test_a_submit_that_sends_a_dead_letter_again_drops_it_and_a_second_one_is_refused(
    log: RedisLog, scene: Scene
) -> None:
    for uid in ("a", "b"):
        scene.submit(uid)
        scene.bury(uid)
    newest, oldest = log.dead_letters(9)
    event = Submitted(endpoint="e", frontend="", sampling=SamplingParams())
    assert log.submit("c", [event], letter=oldest.id).submission is Submission.ACCEPTED
    assert log.submit("c", [event], letter=oldest.id).submission is Submission.DUPLICATE
    assert log.submit("d", [event], letter=oldest.id) == SubmitResult(Submission.GONE, "d")
    assert log.alive(["c", "d"]) == {"c"} and log.dead_letters(9) == [newest]


def test_a_dead_letter_stays_whose_request_is_not_taken(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.bury("a")
    scene.submit("b", max_queued=1)
    (letter,) = log.dead_letters(9)
    event = Submitted(endpoint="e", frontend="", sampling=SamplingParams())
    assert log.submit("c", [event], letter=letter.id).submission is Submission.BUSY
    assert log.dead_letters(9) == [letter]


def test_a_copy_is_cut_to_its_first_entry_and_as_many_of_the_last_as_fit(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a")
    for n in range(1, 41):
        detokenizer.say(say_tokens("a", n, text="x" * 4000))
    assert scene.bury()
    (letter,) = log.dead_letters(1)
    whole, copy = scene.history(), copied_history(letter)
    assert copy == [whole[0], *whole[-len(copy) + 1 :]]
    assert int(letter.fields["history_cut"]) == len(whole) - len(copy) > 0
    assert 65536 - 5000 < len(letter.fields["history"].encode()) <= 65536


def test_a_copy_goes_without_the_first_entry_when_that_alone_is_too_large(log: RedisLog, scene: Scene) -> None:
    event = Submitted(endpoint="e", frontend="web-0", prompt="x" * 65536, sampling=SamplingParams())
    log.submit("a", [event])
    assert scene.bury()
    (letter,) = log.dead_letters(1)
    assert copied_history(letter) == scene.history()[1:]
    assert letter.fields["history_cut"] == "1" and "labels" not in letter.fields


@pytest.mark.parametrize(("user", "kept"), [("ann", True), ("ann" * 2000, False)])
def test_a_letter_without_the_first_entry_has_its_labels_unless_these_are_large(
    log: RedisLog, scene: Scene, user: str, kept: bool
) -> None:
    labels = {"user": user}
    event = Submitted(endpoint="e", frontend="web-0", prompt="x" * 65536, sampling=SamplingParams(), labels=labels)
    log.submit("a", [event, event])
    assert scene.bury("a.0")
    (letter,) = log.dead_letters(1)
    assert json.loads(letter.fields.get("labels", "{}")) == ({"user": user} if kept else {})
