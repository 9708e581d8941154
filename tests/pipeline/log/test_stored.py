"""Stored responses: what they share is kept once, they are kept for long, and go in time, the oldest first."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.log_contract import FAILED, FINISHED, NAMES, Detokenizer, Scene, limits, say_end, submitted
from support.redis_servers import command, until

import pipeline.log.entries
from pipeline.events import Submitted, Tokenized, as_plain, as_words, decode
from pipeline.log.protocol import DeadLetter, Entry
from pipeline.log.redis import RedisLog
from pipeline.log.shared import CHAINED, chained, chains_in, whole_history
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID, new_uid

LONG_MS = 60_000
LIMITS = replace(limits(), response_retention_s=600)
TOOLS = "find " * 100

Turns = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _kept_for_long(scene: Scene) -> None:
    scene.log.limits = LIMITS


def turns(count: int, num_bytes: int = 500) -> Turns:
    """Return a conversation. Each is the beginning of a longer one."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{i} " + "ä\"}, {'" + "word " * (num_bytes // 5)} for i in range(count)]


def response(messages: Turns) -> Submitted:
    return submitted().model_copy(update={"messages": tuple(messages), "stored": True, "labels": {"user": TOOLS}})


def ids(count: int) -> tuple[int, ...]:
    return tuple(range(10_000, 10_000 + count))


def say(log: RedisLog, scene: Scene, messages: Turns, num_tokens: int = 10, *, ends: bool = True) -> str:
    uid = new_uid()
    assert log.submit(uid, [response(messages)]).submission.value == "ACCEPTED"
    (entry,) = log.read(scene.submitted, "tokenize-0", max_entries=8, block_ms=0)
    event = Tokenized(token_ids=ids(num_tokens), fingerprint="t", by="tokenize-0")
    assert log.tokenized(entry, event, stored=True)
    if ends:
        assert log.end(uid, FINISHED, frontend="web-0")
    return uid


def read(log: RedisLog, uid: str) -> tuple[Any, Any]:
    """Return the messages and the tokens of a history, as they are read."""
    (history,) = log.histories([uid])
    assert len(history) > 1, "it has texts, and they are there"
    first, second = decode(history[0].fields), decode(history[1].fields)
    assert isinstance(first, Submitted) and isinstance(second, Tokenized)
    return list(first.messages), second.token_ids


def pieces(log: RedisLog) -> list[bytes]:
    return list(command(log.url, "KEYS", NAMES.text("*")))


def counted(log: RedisLog) -> int:
    return int(command(log.url, "HGET", NAMES.stored_bytes, "all") or 0)


@given(st.lists(st.builds(dict, role=st.sampled_from(("user", "tool")), content=st.text(max_size=2000)), max_size=8))
def test_texts_read_as_they_were_written_and_a_longer_conversation_has_the_pieces_of_a_shorter(said: Turns) -> None:
    found: dict[str, bytes] = {}
    for count in range(len(said) + 1):
        words = as_words(Submitted, as_plain(response(said[:count])))
        own, new = chained(words)
        assert {name for name in found if b"role" in found[name]} <= set(new)
        found |= new
        entry = Entry(SUBMITTED_ID, {name: text.decode() for name, text in own.items()})
        texts = {digest: _chain(found, digest) for digest in chains_in([entry])}
        whole = whole_history([entry], texts)
        assert whole is not None and {**whole[0].fields, "v": ""} == {
            name: text.decode() for name, text in words.items()
        } | {"v": ""}
    assert "labels" + CHAINED in entry.fields and whole_history([entry], {}) is None


def _chain(found: dict[str, bytes], digest: str) -> str:
    text = ""
    while digest in found:
        digest, text = found[digest][:32].decode(), found[digest][32:].decode() + text
    return text


def test_a_chain_of_responses_reads_whole_and_takes_what_is_new(log: RedisLog, scene: Scene) -> None:
    uids = [say(log, scene, turns(count), 300 * count) for count in range(1, 12)]
    for count, uid in enumerate(uids, 1):
        assert read(log, uid) == (turns(count), ids(300 * count))
    before = len(pieces(log))
    again = say(log, scene, turns(11), 3300)
    assert len(pieces(log)) == before and read(log, again) == (turns(11), ids(3300))
    other = say(log, scene, [*turns(5), *turns(1)], 100)
    assert read(log, other) == ([*turns(5), *turns(1)], ids(100))


def test_an_entry_with_texts_elsewhere_is_for_workers_that_know_them(log: RedisLog, scene: Scene) -> None:
    uid = say(log, scene, turns(9), 900)
    for entry_id in (SUBMITTED_ID, TOKENIZED_ID):
        ((_, raw),) = command(log.url, "XRANGE", NAMES.request(uid), entry_id, entry_id)
        fields = dict(zip(raw[::2], raw[1::2], strict=True))
        assert fields[b"v"] == b"2" and any(name.endswith(b"~") for name in fields)
    (letter,) = [log.begins([uid])[uid]]
    assert "messages" in letter.fields


def test_a_dead_letter_has_whole_texts(log: RedisLog, scene: Scene) -> None:
    uid = say(log, scene, turns(9), 900, ends=False)
    log.end(uid, FINISHED, frontend="web-0", dead=DeadLetter("generate", {"uid": uid}, 3, "killed"))
    (letter,) = log.dead_letters(1)
    first = json.loads(letter.fields["history"])[0]
    assert json.loads(first[first.index("messages") + 1]) == turns(9)


@pytest.mark.parametrize("each_redis_url", ["embedded"], indirect=True)
def test_100_turns_of_200_kb_take_less_than_one_and_a_half_times_their_texts(log: RedisLog, scene: Scene) -> None:
    """Each turn sends all that was said, a call and its result more; its tokens are a quarter of its characters."""
    said = turns(300, 2000)
    sent = 0
    for turn in range(100):
        messages = said[: 102 + 2 * turn]
        sent += len(json.dumps(messages))
        say(log, scene, messages, len(json.dumps(messages)) // 4)
    took = sum(command(log.url, "MEMORY", "USAGE", key, "SAMPLES", 0) for key in command(log.url, "KEYS", "*"))
    assert sent > 100 * 200_000
    texts = len(json.dumps(said, ensure_ascii=False).encode())
    numbers = sum(len(f"{number},") for number in ids(len(json.dumps(said)) // 4))
    assert took < 1.5 * (texts + numbers), f"{took} bytes for {texts} of texts and {numbers} of tokens"


def test_a_stored_response_outlives_others_whoever_ends_it(log: RedisLog, scene: Scene) -> None:
    detokenizer = Detokenizer(scene)
    by_web, by_detokenizer = say(log, scene, turns(3)), say(log, scene, turns(3), ends=False)
    detokenizer.say(say_end(by_detokenizer, FINISHED))
    for uid in (by_web, by_detokenizer):
        assert command(log.url, "PTTL", NAMES.request(uid)) > 600_000
    scene.submit("plain")
    scene.end("plain")
    assert command(log.url, "PTTL", NAMES.request("plain")) <= LONG_MS


def test_when_the_time_of_responses_is_over_they_go_with_what_only_they_had(log: RedisLog, scene: Scene) -> None:
    old = say(log, scene, turns(5), 600)
    of_old = set(pieces(log))
    young = say(log, scene, turns(4), 300)
    command(log.url, "ZADD", NAMES.stored, 1, old)
    assert log.retire(0) == 0
    assert log.histories([old]) == [[]] and read(log, young) == (turns(4), ids(300))
    left = set(pieces(log))
    assert left < of_old
    assert counted(log) > sum(command(log.url, "STRLEN", key) for key in left) > 0
    command(log.url, "ZADD", NAMES.stored, 1, young)
    log.retire(0)
    assert not pieces(log) and not command(log.url, "EXISTS", NAMES.stored_bytes)


def test_above_the_limit_the_oldest_go_that_have_ended_longer_ago_than_others_are_kept(
    log: RedisLog, scene: Scene
) -> None:
    running, old, young = [say(log, scene, turns(3, 5000 + i), 10, ends=bool(i)) for i in range(3)]
    assert log.retire(1) == 0, "they have just ended"
    log.limits = replace(LIMITS, retention_s=0.05)
    time.sleep(0.06)
    assert log.retire(counted(log)) == 0
    assert log.retire(counted(log) - 1) == 1
    assert log.histories([old]) == [[]]
    assert read(log, running)[0] == turns(3, 5000) and read(log, young)[0] == turns(3, 5002)
    assert log.retire(1) == 1 and read(log, running)[0] == turns(3, 5000)


@pytest.mark.parametrize("first_is_first", [True, False])
def test_responses_that_share_texts_may_be_tokenized_and_go_in_any_order(
    log: RedisLog, scene: Scene, first_is_first: bool
) -> None:
    uids = [new_uid(), new_uid()]
    for uid in uids:
        log.submit(uid, [response(turns(4))])
    entries = log.read(scene.submitted, "tokenize-0", max_entries=8, block_ms=0)
    for entry in reversed(entries):
        assert log.tokenized(entry, Tokenized(token_ids=ids(600), fingerprint="t", by="tokenize-0"), stored=True)
    going, staying = uids if first_is_first else reversed(uids)
    log.end(going, FINISHED, frontend="web-0")
    assert log.erase(going)
    assert read(log, staying) == (turns(4), ids(600))
    log.end(staying, FINISHED, frontend="web-0")
    assert log.erase(staying)
    assert not pieces(log) and not uncounted(log)


def uncounted(log: RedisLog) -> bool:
    """Return whether something is still counted."""
    return counted(log) != 0


def test_a_refused_response_is_kept_briefly_with_its_texts(
    log: RedisLog, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.log.entries, "BRIEF_MS", 100)
    kept, refused = say(log, scene, turns(2)), new_uid()
    before = counted(log)
    log.submit(refused, [response(turns(9))])
    log.end(refused, FAILED, frontend="web-0")
    log.retire(0)
    assert len(log.histories([refused])[0]) == 2
    time.sleep(0.11)
    log.retire(0)
    assert log.histories([refused]) == [[]] and counted(log) == before and read(log, kept)[0] == turns(2)


def test_what_is_counted_is_what_is_there(log: RedisLog, scene: Scene) -> None:
    """Whatever comes, goes and comes again."""
    chance, there = random.Random(5), list[str]()
    for _ in range(60):
        if there and chance.random() < 0.4:
            assert log.erase(there.pop(chance.randrange(len(there))))
        else:
            there.append(say(log, scene, turns(chance.randrange(1, 9)), chance.randrange(900)))
    told = command(log.url, "HGETALL", NAMES.stored_bytes)
    found = dict(zip(told[::2], told[1::2], strict=True))
    own = sum(int(text.split()[0]) for name, text in found.items() if name != b"all")
    texts = sum(command(log.url, "STRLEN", key) - 8 + 168 for key in pieces(log))
    assert set(found) == {b"all", *(uid.encode() for uid in there)} and int(found[b"all"]) == own + texts
    for uid in there:
        assert read(log, uid)[0]
        assert log.erase(uid)
    assert not pieces(log) and not uncounted(log)


def test_siblings_that_are_stored_go_with_what_they_share(log: RedisLog, scene: Scene) -> None:
    event = submitted(prompt=TOOLS).model_copy(update={"stored": True})
    log.submit("a", [event] * 2)
    for uid in ("a.0", "a.1"):
        log.end(uid, FINISHED, frontend="web-0")
        command(log.url, "ZADD", NAMES.stored, 1, uid)
    log.limits = replace(LIMITS, retention_s=0.05)
    assert log.retire(0) == 0 and not uncounted(log)
    until(lambda: not command(log.url, "EXISTS", NAMES.shared("a"), NAMES.request("a.0"), NAMES.request("a.1")))


def test_a_history_of_another_type_goes_like_others(log: RedisLog, scene: Scene) -> None:
    uid = say(log, scene, turns(4))
    command(log.url, "DEL", NAMES.request(uid))
    command(log.url, "SET", NAMES.request(uid), "what?")
    assert log.retire(1) == 0
    command(log.url, "ZADD", NAMES.stored, 1, uid)
    assert log.retire(0) == 0
    assert not pieces(log) and not command(log.url, "EXISTS", NAMES.request(uid))


def test_what_is_erased_takes_along_what_only_it_had(log: RedisLog, scene: Scene) -> None:
    old, gone = say(log, scene, turns(4), 300), say(log, scene, [*turns(4), *turns(1, 5000)], 600)
    before = set(pieces(log))
    assert log.erase(gone)
    assert read(log, old) == (turns(4), ids(300))
    assert 0 < len(pieces(log)) < len(before)
    assert log.erase(old)
    assert not pieces(log)
