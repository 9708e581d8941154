"""The contract of the log: what is read: histories, who lives, and the replies to a frontend."""

from __future__ import annotations

from support.log_contract import LONG_MS, Detokenizer, Scene, say_tokens

from pipeline.events import decode, encode
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, TOKENIZED_ID

# histories and alive


def test_histories_are_read_side_by_side_and_after_an_id(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept("a", "b")
    detokenizer.say(say_tokens("a", 1))
    found = log.histories(["b", "nobody", "a"])
    assert [len(entries) for entries in found] == [2, 0, 3]
    assert [[e.id for e in entries] for entries in log.histories(["a", "b"], after=TOKENIZED_ID)] == [["1-0"], []]
    assert log.histories([]) == []


def test_after_the_seal_a_history_has_nothing(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    scene.end()
    assert log.histories(["a"], after=SEAL) == [[]]


def test_entries_have_text_fields_and_begin_with_their_moment(scene: Scene) -> None:
    scene.submit()
    fields = scene.history()[0].fields
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in fields.items())
    assert next(iter(fields)) == "ms"
    assert encode(decode(fields)).items() <= fields.items()


def test_alive_says_who_has_not_ended(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.submit("b")
    scene.end("b")
    assert log.alive(["a", "b", "nobody"]) == {"a"}
    assert log.alive([]) == set()


# frontends


def test_open_replies_drops_what_was_read_before(log: RedisLog, scene: Scene) -> None:
    start = log.open_replies("web-0")
    for uid in "abc":
        scene.submit(uid)
        scene.end(uid)
    cursor, _ = log.read_replies("web-0", start, block_ms=0)
    scene.submit("d")
    scene.end("d")
    last = log.open_replies("web-0", read=cursor)
    assert [reply.uid for reply in scene.replies_after(start)] == ["c", "d"]
    assert log.open_replies("web-0", read=last) == last
    assert [reply.uid for reply in scene.replies_after(start)] == ["d"]
    assert log.open_replies("web-1", read=cursor) == log.open_replies("web-1")


def test_open_replies_makes_the_stream_once_and_returns_where_to_go_on(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a")
    start = log.open_replies("web-0")
    assert log.open_replies("web-0") == start
    assert log.read_replies("web-0", start, block_ms=0) == (start, [])
    detokenizer.say(say_tokens("a", 1))
    cursor, replies = log.read_replies("web-0", start, block_ms=0)
    assert [reply.n for reply in replies] == [1]
    assert log.open_replies("web-0") == cursor
    assert log.read_replies("web-0", cursor, block_ms=1) == (cursor, [])


def test_a_waiting_frontend_hears_what_is_said(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    start = log.open_replies("web-0")
    _, found = scene.meanwhile(lambda log: log.read_replies("web-0", start, block_ms=LONG_MS), scene.end)
    assert [reply.uid for reply in found] == ["a"]
