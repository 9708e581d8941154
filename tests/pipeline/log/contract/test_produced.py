"""The contract of the log: produced."""

from __future__ import annotations

from typing import Any

import pytest
from support.log_contract import FINISHED, SHORT_MS, STEPS, Detokenizer, Scene, limits, say_end, say_tokens
from support.redis_servers import until

from pipeline.errors import Fenced
from pipeline.events import Admitted, Mark, Markup, Preempted, TokensProduced, decode
from pipeline.log.entries import REPLY_CAP
from pipeline.log.protocol import Entry, Produced, Reply
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, parse_id, tokens_id


def test_produced_writes_histories_and_consumes_the_step(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b")
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1))
    assert detokenizer.say(say_tokens("a", 2), say_end("b", FINISHED))
    assert scene.ids("a") == [SUBMITTED_ID, TOKENIZED_ID, "1-0", "2-0"]
    assert scene.ids("b") == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert scene.events("a")[-1] == say_tokens("a", 2).event
    assert scene.events("b")[-1] == FINISHED
    assert log.pending(STEPS, "detokenize-0") == []


def test_tokens_with_more_and_without_are_in_their_histories_in_the_order_of_the_step(
    scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a", "b", "c")
    entry = detokenizer.read_step()

    def said(uid: str, n: int, **more: Any) -> Produced:
        event = TokensProduced(**{"tokens": (40 + n,), "text": "", "step": entry.id} | more)
        return Produced(uid, tokens_id(n), n, event, "web-0")

    mark = Produced("b", "1-1", 1, Preempted(engine="generate-0", epoch=1, step=1), "web-0")
    rows = [said("a", 1), said("b", 1), mark, said("b", 2), said("c", 1, chunks=2, text="ü"), said("c", 2, step="7-7")]
    rows += [said("a", 2, tokens=(1, 2), count=2), said("a", 3)]
    rows += [said("a", 4, markup=Markup(tools="hermes"))]
    assert detokenizer.commit(entry, *rows)
    for uid in ("a", "b", "c"):
        mine = [row for row in rows if row.uid == uid]
        assert scene.ids(uid) == [SUBMITTED_ID, TOKENIZED_ID, *(row.entry_id for row in mine)]
        assert scene.events(uid)[2:] == [row.event for row in mine]


def test_tokens_say_how_long_before_their_commit_the_engine_had_made_them(
    scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a", "b")
    old, fresh, unknown = (detokenizer.read_step() for _ in range(3))
    made_ms = {"1-0": int(old.fields["ms"]) - 250, "2-0": int(fresh.fields["ms"]), "3-0": None}
    entries = [
        Entry(old.id, {**old.fields, "made_ms": str(int(old.fields["ms"]) - 250)}),
        fresh,
        Entry(unknown.id, {"ms": "none"}),
    ]
    rows = [
        Produced(uid, f"{n}-0", n, TokensProduced(tokens=(n,), text="x", step=entry.id, chunks=chunks), "web-0")
        for n, entry in enumerate(entries, 1)
        for uid, chunks in (("a", 0), ("b", 2))
    ]
    assert scene.log.produced(detokenizer.owner, entries, "generate-0", rows)
    for uid in ("a", "b"):
        told: dict[str, int | None] = {}
        for entry in scene.history(uid)[2:]:
            event = decode(entry.fields)
            assert isinstance(event, TokensProduced)
            told[entry.id] = None if event.age_ms is None else event.ms - event.age_ms
        assert told == made_ms


def test_several_steps_are_consumed_in_one_commit_and_told_in_one_reply(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    cursor = log.open_replies("web-0")
    scene.accept("a", "b", "c")
    entries = [detokenizer.read_step() for _ in range(3)]

    def said(uid: str, n: int, at: int, **more: Any) -> Produced:
        event = TokensProduced(**{"tokens": (40 + n,), "text": "x", "step": entries[at].id} | more)
        return Produced(uid, tokens_id(n), n, event, "web-0")

    mark = Produced("b", "1-1", 1, Preempted(engine="generate-0", epoch=1, step=1), "web-0")
    rows = [said("a", 1, 0), said("b", 1, 0), said("a", 2, 1), mark, said("c", 1, 1), said("a", 3, 2), said("b", 2, 2)]
    rows += [said("c", 2, 2, chunks=2), say_end("c", FINISHED)]
    assert log.produced(detokenizer.owner, entries, "generate-0", rows)
    for uid in ("a", "b", "c"):
        mine = [row for row in rows if row.uid == uid]
        assert scene.ids(uid) == [SUBMITTED_ID, TOKENIZED_ID, *(row.entry_id for row in mine)]
        assert scene.events(uid)[2:] == [row.event for row in mine]
    assert log.pending(STEPS, "detokenize-0") == [] and log.backlog(STEPS) == 0
    _, replies = log.read_replies("web-0", cursor, block_ms=0)
    assert [(reply.uid, reply.n) for reply in replies] == [(row.uid, row.n) for row in rows if row is not mark]
    assert put_in_one_entry(log, cursor)


def put_in_one_entry(log: RedisLog, cursor: str) -> bool:
    """Return whether all that a frontend was told came as one entry, for which it wakes once."""
    last, replies = log.read_replies("web-0", cursor, block_ms=0)
    return bool(replies) and log.read_replies("web-0", before(last), block_ms=0)[1] == replies


def before(entry_id: str) -> str:
    ms, number = parse_id(entry_id)
    return f"{ms}-{number - 1}" if number else f"{ms - 1}-9"


def test_several_steps_are_consumed_together_or_not_at_all(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    """The second try of a commit whose answer was late may find that one of them was consumed alone meanwhile."""
    scene.accept("a")
    first, second = detokenizer.read_step(), detokenizer.read_step()
    assert detokenizer.commit(first, say_tokens("a", 1))
    both = [say_tokens("a", 1), say_tokens("a", 2)]
    assert not log.produced(detokenizer.owner, [first, second], "generate-0", both)
    assert not log.produced(detokenizer.owner, [second, first], "generate-0", both)
    assert scene.ids() == [SUBMITTED_ID, TOKENIZED_ID, "1-0"] and log.pending(STEPS, "detokenize-0") == [second]
    assert detokenizer.commit(second, say_tokens("a", 2))


def test_a_part_of_a_step_is_written_once_and_counts_its_tries(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a", "b")
    cursor = log.open_replies("web-0")
    entry = detokenizer.read_step()

    def say(*events: Produced, tries: int) -> bool:
        return log.produced(detokenizer.owner, [entry], "generate-0", events, tries=tries)

    assert say(say_tokens("a", 1), tries=7)
    assert log.pending(STEPS, "detokenize-0") == [entry] and log.backlog(STEPS) == 1
    assert log.retry(STEPS, detokenizer.owner, entry) == 8
    for tries in (7, 8):
        assert not say(say_tokens("b", 1), tries=tries)
    assert say(say_tokens("b", 1), tries=9) and log.retry(STEPS, detokenizer.owner, entry) == 10
    assert [scene.ids(uid)[2:] for uid in ("a", "b")] == [["1-0"], ["1-0"]]
    assert detokenizer.commit(entry)
    assert not say(say_tokens("a", 2), tries=20)
    assert log.backlog(STEPS) == 0 and scene.ids("a")[2:] == ["1-0"]
    assert [reply.uid for reply in scene.replies_after(cursor)] == ["a", "b"]


def test_produced_is_fenced(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a")
    entry = detokenizer.read_step()
    scene.own_after(detokenizer.owner)
    with pytest.raises(Fenced):
        detokenizer.commit(entry, say_tokens("a", 1))
    assert scene.ids() == [SUBMITTED_ID, TOKENIZED_ID]
    assert log.pending(STEPS, "detokenize-0") == [entry]


def test_a_repeated_produced_is_lost_and_changes_nothing(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a")
    start = log.open_replies("web-0")
    entry = detokenizer.read_step()
    assert detokenizer.commit(entry, say_tokens("a", 1))
    before = scene.history()
    assert not detokenizer.commit(entry, say_tokens("a", 1))
    assert scene.history() == before
    assert len(scene.replies_after(start)) == 1


@pytest.mark.parametrize("refused", ["sealed", "there already", "expired"])
def test_a_refused_row_loses_no_other(log: RedisLog, scene: Scene, detokenizer: Detokenizer, refused: str) -> None:
    scene.accept("a", "b", "c")
    match refused:
        case "sealed":
            scene.end("b")
        case "there already":
            detokenizer.say(say_tokens("b", 1))
        case "expired":
            log.limits = limits(retention_ms=1)
            scene.end("b")
            until(lambda: scene.history("b") == [])
    before = scene.history("b")
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1), say_tokens("c", 1))
    assert scene.ids("a")[-1] == scene.ids("c")[-1] == "1-0"
    assert scene.history("b") == before


def test_produced_of_an_end_seals_clears_live_and_lets_the_history_expire(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a", "b")
    log.limits = limits(retention_ms=SHORT_MS)
    detokenizer.say(say_end("a", FINISHED))
    assert log.alive(["a", "b"]) == {"b"}
    until(lambda: scene.history("a") == [])
    assert scene.history("b") != []


def test_produced_tells_the_engine_only_of_ends_it_does_not_know(scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b", "c")
    scene.end("c")
    detokenizer.say(
        say_end("a", FINISHED), say_end("b", FINISHED, tell_engine=True), say_end("c", FINISHED, tell_engine=True)
    )
    assert scene.told() == ("c", "b")


def test_replies_carry_what_was_said_with_n_and_in_order(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b")
    start = log.open_replies("web-0")
    other = log.open_replies("web-1")
    mark: Mark = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w")
    detokenizer.say(
        Produced("a", "0-3", 0, mark, "web-0"), say_tokens("a", 1), say_tokens("b", 1, frontend="web-1", text="ü\n")
    )
    detokenizer.say(say_tokens("a", 2), say_end("a", FINISHED))
    assert scene.replies_after(start) == [
        Reply("a", "1-0", 1, TokensProduced(count=1, tokens=(41,), text="x", step="1-1")),
        Reply("a", "2-0", 2, TokensProduced(count=1, tokens=(42,), text="x", step="1-2")),
        Reply("a", SEAL, 2, FINISHED),
    ]
    assert scene.replies_after(other, "web-1") == [
        Reply("b", "1-0", 1, TokensProduced(count=1, tokens=(41,), text="ü\n", step="1-1"))
    ]
    assert scene.events("a")[2] == mark


def test_replies_to_a_frontend_that_is_gone_are_dropped(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a")
    assert detokenizer.say(say_tokens("a", 1))
    assert scene.end()
    assert scene.ids()[-2:] == ["1-0", SEAL]
    assert log.read_replies("web-0", "0-0", block_ms=0) == ("0-0", [])


def test_a_replies_stream_keeps_only_the_last_entries(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a")
    start = log.open_replies("web-0")
    for n in range(1, REPLY_CAP + 301):
        detokenizer.say(say_tokens("a", n))
    replies = scene.replies_after(start)
    assert REPLY_CAP <= len(replies) + 1 <= REPLY_CAP + 100  # Redis trims whole nodes of 100
    assert replies[-1].n == REPLY_CAP + 300
