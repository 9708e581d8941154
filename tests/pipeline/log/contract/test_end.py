"""The contract of the log: end, and the dead letter that it can write."""

from __future__ import annotations

import dataclasses
import json

from log_contract import (
    CANCELLED,
    FAILED,
    FINISHED,
    SHORT_MS,
    SUBMITTED,
    TOKENIZED,
    Detokenizer,
    accept,
    end,
    events,
    history,
    ids,
    limits,
    read_one,
    replies_after,
    say_end,
    say_tokens,
    submit,
    told,
)
from redis_servers import until

from pipeline.events import Admitted, Answered, Failed, SamplingParams, Submitted
from pipeline.log.protocol import DeadLetter, Produced, Reply, StreamLog, Submission
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID
from pipeline.views.history import copied_history

# end


def test_the_first_seal_wins(log: StreamLog) -> None:
    submit(log)
    assert end(log, "a", CANCELLED)
    before = history(log)
    assert not end(log, "a", CANCELLED)
    assert not end(log, "a", FAILED)
    assert history(log) == before
    assert before[-1].id == SEAL


def test_nothing_is_appended_after_the_seal(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    end(log, "a", CANCELLED)
    before = history(log)
    detokenizer.say(say_tokens("a", 1), say_end("a", FINISHED), Produced("a", "18446744073709551615-1", 1, FAILED, ""))
    assert history(log) == before


def test_end_reads_the_number_of_tokens_off_the_history(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b", "c")
    detokenizer.say(say_tokens("a", 1))
    detokenizer.say(say_tokens("a", 2), say_tokens("b", 1))
    detokenizer.say(Produced("a", "2-1", 2, Admitted(engine="g", epoch=1, step=1, fingerprint="w"), "web-0"))
    end(log, "a", CANCELLED)
    end(log, "b", FINISHED)
    end(log, "c", FAILED)
    assert events(log, "a")[-1] == CANCELLED.model_copy(update={"n": 2})
    assert events(log, "b")[-1] == FINISHED.model_copy(update={"n": 1})
    assert events(log, "c")[-1] == FAILED


def test_end_tells_frontend_and_engines_and_clears_live(log: StreamLog) -> None:
    accept(log, "a", "b")
    start = log.open_replies("web-0")
    end(log, "a", FAILED)
    end(log, "a", CANCELLED)
    ((_, replies),) = [log.read_replies("web-0", start, block_ms=0)]
    assert [(r.uid, r.entry_id, r.n, r.event.model_copy(update={"ms": 0})) for r in replies] == [("a", SEAL, 0, FAILED)]
    assert told(log) == ("a",)
    assert log.alive(["a", "b"]) == {"b"}


def test_an_answer_of_the_tokenizer_ends_a_request_and_reaches_its_frontend_whole(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    submit(log)
    submit(log, "b")
    start = log.open_replies("web-0")
    answered = Answered(token_ids=(5, 6), pieces=("a,b", "bytes:\\xe4"), text='{"a": "ü\\n"}', by="tokenize-0")
    assert end(log, "a", answered, consume=read_one(log, SUBMITTED, "tokenize-0"))
    assert events(log, "a")[-1] == answered and log.alive(["a", "b"]) == {"b"}
    assert log.backlog(SUBMITTED) == 1 and log.backlog(TOKENIZED) == 0
    detokenizer.say(say_end("b", answered))  # nobody does, but whoever seals says what can be read
    replies = [dataclasses.replace(r, event=r.event.model_copy(update={"ms": 0})) for r in replies_after(log, start)]
    assert replies == [Reply("a", SEAL, 0, answered), Reply("b", SEAL, 2, answered)]


def test_end_consumes_the_entry_that_it_answers(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert end(log, "a", FAILED, consume=entry)
    assert not end(log, "a", FAILED, consume=entry)
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert submit(log, "b", max_queued=1) is Submission.ACCEPTED


def test_end_of_a_request_that_ended_elsewhere_still_consumes_the_entry(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    end(log, "a", CANCELLED)
    assert not end(log, "a", FAILED, consume=entry)
    assert log.pending(SUBMITTED, "tokenize-0") == []


def test_end_lets_the_history_expire_after_the_retention(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    log.limits = limits(retention_ms=SHORT_MS)
    end(log, "a", CANCELLED)
    until(lambda: history(log, "a") == [])
    assert history(log, "b") != []


def test_end_of_an_unknown_request_makes_no_history(log: StreamLog) -> None:
    assert not end(log, "nobody", CANCELLED)
    assert history(log, "nobody") == []
    assert told(log) == ()


# dead letters


KILLED = Failed(status=500, code="killed_its_worker", message="It killed its worker three times.")


def bury(log: StreamLog, uid: str = "a", *, deaths: int = 3, error: str = "exit code -11") -> bool:
    letter = DeadLetter(stage="generate", entry={"uid": uid, "frontend": "web-0"}, deaths=deaths, error=error)
    return log.end(uid, KILLED, frontend="web-0", dead=letter)


def test_a_dead_letter_says_what_happened_and_brings_a_copy_of_the_sealed_history(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a")
    detokenizer.say(say_tokens("a", 1, text='"ü\n'))
    assert bury(log)
    (letter,) = log.dead_letters(9)
    assert {name: letter.fields[name] for name in ("uid", "stage", "deaths", "error")} == {
        "uid": "a",
        "stage": "generate",
        "deaths": "3",
        "error": "exit code -11",
    }
    assert json.loads(letter.fields["entry"]) == {"uid": "a", "frontend": "web-0"}
    assert copied_history(letter) == history(log)
    assert letter.fields["ms"] == history(log)[-1].fields["ms"]
    assert "history_cut" not in letter.fields
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert events(log)[-1] == KILLED.model_copy(update={"n": 1})


def test_a_repeated_end_writes_no_second_letter(log: StreamLog) -> None:
    submit(log)
    assert bury(log)
    assert not bury(log)
    assert len(log.dead_letters(9)) == 1


def test_an_end_that_comes_too_late_writes_no_letter(log: StreamLog) -> None:
    submit(log)
    end(log, "a", CANCELLED)
    assert not bury(log, "a")
    assert not bury(log, "nobody")
    assert log.dead_letters(9) == []


def test_an_end_without_a_letter_writes_none(log: StreamLog) -> None:
    submit(log)
    assert end(log, "a", FAILED)
    assert log.dead_letters(9) == []


def test_dead_letters_come_newest_first_and_page_by_page(log: StreamLog) -> None:
    for uid in ("a", "b", "c"):
        submit(log, uid)
        bury(log, uid)
    first = log.dead_letters(2)
    assert [letter.fields["uid"] for letter in first] == ["c", "b"]
    rest = log.dead_letters(2, before=first[-1].id)
    assert [letter.fields["uid"] for letter in rest] == ["a"]
    assert log.dead_letters(2, before=rest[-1].id) == []


def test_a_dead_letter_is_dropped_once_and_alone(log: StreamLog) -> None:
    for uid in ("a", "b"):
        submit(log, uid)
        bury(log, uid)
    newest, oldest = log.dead_letters(9)
    assert log.drop_dead(oldest.id)
    assert not log.drop_dead(oldest.id)
    assert log.dead_letters(9) == [newest]


def test_a_copy_is_cut_to_its_first_entry_and_as_many_of_the_last_as_fit(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a")
    for n in range(1, 41):
        detokenizer.say(say_tokens("a", n, text="x" * 4000))
    assert bury(log)
    (letter,) = log.dead_letters(1)
    whole, copy = history(log), copied_history(letter)
    assert copy == [whole[0], *whole[-len(copy) + 1 :]]
    assert int(letter.fields["history_cut"]) == len(whole) - len(copy) > 0
    assert 65536 - 5000 < len(letter.fields["history"].encode()) <= 65536


def test_a_copy_goes_without_the_first_entry_when_that_alone_is_too_large(log: StreamLog) -> None:
    event = Submitted(endpoint="e", frontend="web-0", prompt="x" * 65536, sampling=SamplingParams())
    log.submit("a", [event])
    assert bury(log)
    (letter,) = log.dead_letters(1)
    assert copied_history(letter) == history(log)[1:]
    assert letter.fields["history_cut"] == "1"
