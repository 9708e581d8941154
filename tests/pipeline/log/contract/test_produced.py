"""The contract of the log: produced."""

from __future__ import annotations

import pytest
from log_contract import (
    CANCELLED,
    FINISHED,
    SHORT_MS,
    STEPS,
    Detokenizer,
    accept,
    end,
    events,
    history,
    ids,
    limits,
    own_after,
    replies_after,
    say_end,
    say_tokens,
    told,
)
from redis_servers import until

from pipeline.errors import Fenced
from pipeline.events import Admitted, Mark, TokensProduced
from pipeline.log.entries import REPLY_CAP
from pipeline.log.protocol import Produced, Reply, StreamLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID


def test_produced_writes_histories_and_consumes_the_step(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b")
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1))
    assert detokenizer.say(say_tokens("a", 2), say_end("b", FINISHED))
    assert ids(log, "a") == [SUBMITTED_ID, TOKENIZED_ID, "1-0", "2-0"]
    assert ids(log, "b") == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert events(log, "a")[-1] == say_tokens("a", 2).event
    assert events(log, "b")[-1] == FINISHED
    assert log.pending(STEPS, "detokenize-0") == []


def test_produced_is_fenced(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    entry = detokenizer.read_step()
    own_after(log, detokenizer.owner)
    with pytest.raises(Fenced):
        detokenizer.commit(entry, say_tokens("a", 1))
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID]
    assert log.pending(STEPS, "detokenize-0") == [entry]


def test_a_repeated_produced_is_lost_and_changes_nothing(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    start = log.open_replies("web-0")
    entry = detokenizer.read_step()
    assert detokenizer.commit(entry, say_tokens("a", 1))
    before = history(log)
    assert not detokenizer.commit(entry, say_tokens("a", 1))
    assert history(log) == before
    assert len(replies_after(log, start)) == 1


@pytest.mark.parametrize("refused", ["sealed", "there already", "expired"])
def test_a_refused_row_loses_no_other(log: StreamLog, detokenizer: Detokenizer, refused: str) -> None:
    accept(log, "a", "b", "c")
    match refused:
        case "sealed":
            end(log, "b", CANCELLED)
        case "there already":
            detokenizer.say(say_tokens("b", 1))
        case "expired":
            log.limits = limits(retention_ms=1)
            end(log, "b", CANCELLED)
            until(lambda: history(log, "b") == [])
    before = history(log, "b")
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1), say_tokens("c", 1))
    assert ids(log, "a")[-1] == ids(log, "c")[-1] == "1-0"
    assert history(log, "b") == before


def test_produced_of_an_end_seals_clears_live_and_lets_the_history_expire(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a", "b")
    log.limits = limits(retention_ms=SHORT_MS)
    detokenizer.say(say_end("a", FINISHED))
    assert log.alive(["a", "b"]) == {"b"}
    until(lambda: history(log, "a") == [])
    assert history(log, "b") != []


def test_produced_tells_the_engine_only_of_ends_it_does_not_know(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b", "c")
    end(log, "c", CANCELLED)
    detokenizer.say(
        say_end("a", FINISHED), say_end("b", FINISHED, tell_engine=True), say_end("c", FINISHED, tell_engine=True)
    )
    assert told(log) == ("c", "b")


def test_replies_carry_what_was_said_with_n_and_in_order(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b")
    start = log.open_replies("web-0")
    other = log.open_replies("web-1")
    mark: Mark = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w")
    detokenizer.say(
        Produced("a", "0-3", 0, mark, "web-0"), say_tokens("a", 1), say_tokens("b", 1, frontend="web-1", text="ü\n")
    )
    detokenizer.say(say_tokens("a", 2), say_end("a", FINISHED))
    assert replies_after(log, start) == [
        Reply("a", "1-0", 1, TokensProduced(count=1, tokens=(41,), text="x", step="1-1")),
        Reply("a", "2-0", 2, TokensProduced(count=1, tokens=(42,), text="x", step="1-2")),
        Reply("a", SEAL, 2, FINISHED),
    ]
    assert replies_after(log, other, "web-1") == [
        Reply("b", "1-0", 1, TokensProduced(count=1, tokens=(41,), text="ü\n", step="1-1"))
    ]
    assert events(log, "a")[2] == mark


def test_replies_to_a_frontend_that_is_gone_are_dropped(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    assert detokenizer.say(say_tokens("a", 1))
    assert end(log, "a", CANCELLED)
    assert ids(log)[-2:] == ["1-0", SEAL]
    assert log.read_replies("web-0", "0-0", block_ms=0) == ("0-0", [])


def test_a_replies_stream_keeps_only_the_last_entries(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    start = log.open_replies("web-0")
    for n in range(1, REPLY_CAP + 301):
        detokenizer.say(say_tokens("a", n))
    replies = replies_after(log, start)
    assert REPLY_CAP <= len(replies) + 1 <= REPLY_CAP + 100  # Redis trims whole nodes of 100
    assert replies[-1].n == REPLY_CAP + 300
