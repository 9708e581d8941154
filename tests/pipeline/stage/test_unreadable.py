"""Entries that cannot be read, in each stream of a pipeline that runs: no worker dies, and no other request notices."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.engine_rig import Pipeline, counted_on
from support.log_contract import put
from support.measured import count_of
from support.memory_log.log import MemoryLog
from support.redis_servers import command, until
from support.selection import by_night

from pipeline.errors import NewerVersion
from pipeline.events import Cancelled, Failed, decode
from pipeline.log.protocol import Inbox
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import REFUSALS, REQUEST_SUCCESS, UNREADABLE_ENTRIES
from pipeline.names import Names
from pipeline.stage.unreadable import LEFT_S, UnreadableEntries
from web.live.frontend import run_all
from web.live.tail import Tail

Lines = list[MutableMapping[str, Any]]
SUBMITTED, TOKENIZED, STEPS = range(3)
STREAMS = ("submitted", "tokenized", "steps")
NOBODY = "0" * 32


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("stages.generate.loop.log_thread.BLOCK_MS", 20),
        ("stages.generate.loop.log_thread.BACKOFF_S", 0.01),
        ("stages.generate.loop.log_thread.LIVE_EVERY_S", 0.02),
        ("pipeline.stage.worker.BLOCK_MS", 20),
        ("pipeline.stage.worker.CLAIM_EVERY_S", 0.02),
    ):
        monkeypatch.setattr(name, value)


@pytest.fixture
def pipeline(another_log: Callable[[], RedisLog]) -> Iterator[Pipeline]:
    with Pipeline(another_log).running() as pipeline:
        yield pipeline
    assert not pipeline.errors


@pytest.fixture
def lines() -> Iterator[Lines]:
    with capture_logs() as lines:
        yield lines


def letters(log: RedisLog) -> list[Mapping[str, str]]:
    return [letter.fields for letter in log.dead_letters(999)]


def counts(pipeline: Pipeline) -> dict[str, float]:
    """Return how many entries each stage has buried, by stream."""
    found = {
        stream: sum(count_of(measures, UNREADABLE_ENTRIES, stream) for measures in pipeline.measures.values())
        for stream in STREAMS
    }
    return {stream: count for stream, count in found.items() if count}


def buried(lines: Lines) -> list[str]:
    return [line["id"] for line in lines if line["event"] == "entry_buried"]


def waiting(pipeline: Pipeline) -> int:
    return sum(pipeline.log.backlog(inbox) for inbox in pipeline.inboxes)


BAD: Mapping[str, Mapping[str, str]] = {
    "garbage": {"gar": "bage"},
    "no uid": {"frontend": "web-0"},
    "an empty uid": {"uid": "", "frontend": "web-0"},
    "no version that can be": {"uid": NOBODY, "frontend": "web-0", "v": "-1"},
    "a newer version of nobody's": {"uid": NOBODY, "frontend": "web-0", "kind": "step", "v": "3"},
}


def test_what_cannot_be_read_is_buried_in_each_stream_and_the_work_goes_on(pipeline: Pipeline, lines: Lines) -> None:
    before = pipeline.ask("a", 30)
    for fields in BAD.values():
        for inbox in pipeline.inboxes:
            put(pipeline.log, inbox.stream, fields)
    after = pipeline.ask("b")
    assert pipeline.answer(before) == counted_on("a", 30) and pipeline.answer(after) == counted_on("b")
    until(lambda: waiting(pipeline) == 0)
    assert counts(pipeline) == dict.fromkeys(STREAMS, len(BAD))
    found = letters(pipeline.log)
    kept = [(letter["stream"], json.loads(letter["entry"])) for letter in found]
    told = [(stream, dict(zip(parts[1::2], parts[2::2], strict=True))) for stream, parts in kept]
    assert all((inbox.stream, fields) in told for inbox in pipeline.inboxes for fields in BAD.values())
    assert sorted(entry[0] for _, entry in kept) == sorted(buried(lines)) and len(found) == len(told)


@pytest.mark.parametrize("stream", [SUBMITTED, TOKENIZED, STEPS], ids=STREAMS)
def test_the_request_that_a_bad_entry_names_fails_and_no_other(pipeline: Pipeline, lines: Lines, stream: int) -> None:
    pipeline.gate.clear()
    victim, other = pipeline.ask("a", 40), pipeline.ask("d")
    rows = {"kind": "step", "rows": json.dumps([{"uid": victim, "n": "?"}, 7, {"uid": 5}])}
    put(pipeline.log, pipeline.inboxes[stream].stream, rows if stream == STEPS else {"uid": victim})
    if stream == TOKENIZED:  # which an engine reads between two steps
        pipeline.gate.set()
    failed = pipeline.end_of(victim)
    assert isinstance(failed, Failed) and (failed.status, failed.code) == (500, "log_damaged")
    pipeline.gate.set()
    assert pipeline.answer(other) == counted_on("d") and pipeline.answer(pipeline.ask("e")) == counted_on("e")
    (line,) = [line for line in lines if line["event"] == "entry_buried"]
    assert line["ended"] == [victim] and line["log_level"] == "error"
    assert [letter.get("uid", victim) for letter in letters(pipeline.log)] == [victim]


def test_a_request_in_hand_that_is_handed_over_again_is_computed_once(pipeline: Pipeline) -> None:
    pipeline.gate.clear()
    uid = pipeline.ask("a")
    until(lambda: len(pipeline.scene.in_hand()) == 1)
    for inbox in pipeline.inboxes[:2]:
        put(pipeline.log, inbox.stream, {"uid": uid, "frontend": "web-0"})
    pipeline.gate.set()
    assert pipeline.answer(uid) == counted_on("a")
    until(lambda: waiting(pipeline) == 0)
    assert pipeline.answer(pipeline.ask("b")) == counted_on("b")


# damaged histories


DAMAGE: Mapping[str, Mapping[str, str]] = {
    "garbage": {"gar": "bage"},
    "an unknown kind": {"kind": "dreamt"},
    "a token below 0": {"kind": "tokens", "count": "1", "tokens": "-5", "text": "x", "step": "1-1"},
    "a count below 0": {"kind": "tokens", "count": "-9", "tokens": "5", "text": "x", "step": "1-1"},
    "a step": {"kind": "step", "rows": "[]"},
}


def test_a_request_with_a_damaged_history_fails_alone(another_log: Callable[[], RedisLog], lines: Lines) -> None:
    """It is damaged before the tokenizer reads it, or before an engine does."""
    pipeline, damaged = Pipeline(another_log), list[str]()
    log = pipeline.log
    for inbox in pipeline.inboxes:
        log.prepare(inbox)
    for is_tokenized in (True, False):
        for fields in DAMAGE.values():
            for entry_id in ("0-9", "5-0", "*"):
                damaged.append(pipeline.scene.send(97) if is_tokenized else pipeline.ask("a"))
                put(log, pipeline.names.request(damaged[-1]), fields, entry_id)
    with pipeline.running():
        assert pipeline.answer(pipeline.ask("b")) == counted_on("b")
        for uid in damaged:
            until(lambda uid=uid: pipeline.scene.have_ended(uid))  # type: ignore[misc]  # bound at once
            failed = decode(log.histories([uid])[0][-1].fields)
            assert isinstance(failed, Failed) and failed.code == "log_damaged", failed
        assert len(letters(log)) == len(damaged) == len(buried(lines)) and waiting(pipeline) == 0
        assert {letter["uid"] for letter in letters(log)} == set(damaged)
        half = len(damaged) / 2
        assert counts(pipeline) == {"submitted": half, "tokenized": half}
        assert count_of(pipeline.measures["tokenize"], REFUSALS, "log_damaged") == half
        assert count_of(pipeline.measures["generate"], REQUEST_SUCCESS, "error") == half
    assert not pipeline.errors


def test_a_history_that_is_damaged_while_it_is_written_stops_no_worker(pipeline: Pipeline) -> None:
    pipeline.gate.clear()
    uids = [pipeline.ask("a", 30) for _ in range(3)]
    until(lambda: all(len(history) >= 2 for history in pipeline.log.histories(uids)))
    for uid, (fields, entry_id) in zip(uids, [(BAD["garbage"], "*"), (BAD["garbage"], "9-0"), ({}, "")], strict=True):
        if fields:
            put(pipeline.log, pipeline.names.request(uid), fields, entry_id)
    pipeline.gate.set()
    assert pipeline.answer(uids[2]) == counted_on("a", 30)
    for uid in uids[:2]:
        until(lambda uid=uid: pipeline.scene.have_ended(uid))  # type: ignore[misc]  # bound at once
    assert pipeline.answer(pipeline.ask("b")) == counted_on("b")


def test_a_request_whose_key_is_no_history_is_buried_or_ends_and_no_worker_dies(redis_url: str, lines: Lines) -> None:
    with ExitStack() as stack:
        pipeline = Pipeline(lambda: stack.enter_context(closing(RedisLog(redis_url, Names()))))
        log = pipeline.log
        for inbox in pipeline.inboxes:
            log.prepare(inbox)
        tokenized, queued = pipeline.scene.send(97), pipeline.ask("a")
        for uid in (tokenized, queued):
            command(redis_url, "SET", pipeline.names.request(uid), "not a history")
        with pipeline.running():
            assert pipeline.answer(pipeline.ask("b")) == counted_on("b")
            until(lambda: counts(pipeline) == {"submitted": 1, "tokenized": 1})
            pipeline.gate.clear()
            running, other = pipeline.ask("c"), pipeline.ask("d")
            until(lambda: all(len(history) >= 2 for history in log.histories([running, other])))
            command(redis_url, "DEL", pipeline.names.request(running))
            command(redis_url, "SET", pipeline.names.request(running), "not a history")
            pipeline.gate.set()
            assert pipeline.answer(other) == counted_on("d") and pipeline.answer(pipeline.ask("e")) == counted_on("e")
            until(lambda: waiting(pipeline) == 0 and log.living() == [])
        assert not pipeline.errors and {letter["uid"] for letter in letters(log)} >= {tokenized, queued}
        assert "another type" in letters(log)[-1]["error"]


# a newer version


@pytest.mark.parametrize("stream", [SUBMITTED, TOKENIZED], ids=STREAMS[:2])
@pytest.mark.parametrize("what", ["the entry", "the history"])
def test_what_a_newer_worker_may_read_is_left_until_its_request_has_ended(
    pipeline: Pipeline, lines: Lines, stream: int, what: str
) -> None:
    log, inbox, fields = pipeline.log, pipeline.inboxes[stream], {"uid": NOBODY, "frontend": "web-0"}
    live(log, NOBODY)
    if what == "the history":
        put(log, pipeline.names.request(NOBODY), {"kind": "submitted", "v": "3"}, "0-1")
    else:
        fields["v"] = "3"
    put(log, inbox.stream, fields)
    until(lambda: len(log.left(inbox, 9)) == 1)
    assert pipeline.answer(pipeline.ask("b")) == counted_on("b")
    (entry,) = log.left(inbox, 9)
    assert entry.fields == fields and letters(log) == []
    log.end(NOBODY, Cancelled(by="client"), frontend="web-0")
    until(lambda: buried(lines) == [entry.id] and waiting(pipeline) == 0)  # the line comes after the burial
    assert [letter["uid"] for letter in letters(log)] == [NOBODY]
    (line,) = [line for line in lines if line["event"] == "left_to_newer_worker"]
    assert line["id"] == entry.id and "version 3" in line["reason"] and counts(pipeline) == {STREAMS[stream]: 1}


def live(log: RedisLog, uid: str) -> None:
    """Have a request live that this version cannot submit."""
    if isinstance(log, RedisLog):
        command(log.url, "ZADD", log.names.live, 2**40, uid)
    else:
        assert isinstance(log, MemoryLog)
        log._live[uid] = 2**40


def test_an_entry_of_a_newer_version_that_names_no_request_is_left_for_ten_minutes() -> None:
    log, inbox, now_s = MemoryLog(Names()), Inbox.submitted(Names()), [0.0]
    unreadable = UnreadableEntries(log, inbox, Measures(), clock_s=lambda: now_s[0])
    log.prepare(inbox)
    put(log, inbox.stream, {"v": "3", "request": "a"})
    (entry,) = log.read(inbox, "tokenize-0", max_entries=9, block_ms=0)
    assert not unreadable.refuse(entry, NewerVersion(3), "tokenize-0", ())
    for now_s[0] in (1.0, LEFT_S - 1):
        unreadable.look()
        assert log.left(inbox, 9) == [entry]
    now_s[0] = LEFT_S
    unreadable.look()
    assert log.backlog(inbox) == 0 and letters(log)[0]["error"]


# whatever comes

UID = "uid of a request that lives"
UIDS = st.sampled_from([NOBODY, UID, ""])
NUMBERS = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**63, 2**64, -(2**63), "1", None, 0.5]))
ROWS = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("token"), "uid": UIDS, "n": NUMBERS, "token": NUMBERS},
        optional={"end": st.sampled_from(["stop", "length", "no"]), "chunks": NUMBERS, "more": NUMBERS},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("event"), "uid": UIDS, "n": NUMBERS},
        optional={"event": st.sampled_from([{}, {"kind": "failed", "status": 500, "code": "c", "message": "m"}])},
    ),
    NUMBERS,
)
REPLIES = st.fixed_dictionaries(
    {"uid": UIDS, "id": st.one_of(NUMBERS, st.just("1-0")), "n": NUMBERS},
    optional={"event": st.fixed_dictionaries({"kind": st.sampled_from(["tokens", "cancelled"]), "by": UIDS})},
)
WORDS = st.sampled_from(
    [b"uid", b"frontend", b"kind", b"v", b"rows", b"ms", b"released", b"events", b"n", b"\xff", b""]
)
VALUES = st.one_of(
    st.sampled_from([UID.encode(), b"web-0", b"step", b"tokens", b"failed", b"1", b"2", b"0", b"[]", b"{", b"[{}]"]),
    st.binary(max_size=12),
)


def as_json(values: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    return st.lists(values, max_size=3).map(lambda items: json.dumps(items).encode())


FIELDS = st.one_of(
    st.dictionaries(st.one_of(WORDS, st.binary(max_size=4)), VALUES, min_size=1, max_size=5),
    st.fixed_dictionaries(
        {b"kind": st.just(b"step"), b"rows": as_json(ROWS)},
        optional={b"ms": VALUES, b"released": as_json(UIDS), b"figures": VALUES, b"v": VALUES},
    ),
    st.fixed_dictionaries({b"events": as_json(REPLIES)}, optional={b"v": VALUES}),
    st.fixed_dictionaries({b"uid": UIDS.map(str.encode)}, optional={b"frontend": VALUES, b"v": VALUES}),
)
PLACES = (*STREAMS, "replies", "control")


def is_bad(place: str, fields: Mapping[bytes, bytes]) -> bool:
    """Return whether an entry must not go by unnoticed: none that is neither a request, nor a step, nor a reply."""
    if place == "control":
        return False
    if place == "steps":
        return fields.get(b"kind") != b"step"
    if place == "replies" and b"events" in fields:
        return fields[b"events"][:1] != b"["
    return not {b"uid", b"frontend" if place != "replies" else b"kind"} <= fields.keys() or not fields[b"uid"]


@contextmanager
def tailing(url: str, measures: Measures, broken: list[BaseException]) -> Iterator[None]:
    """Listen as a web process does, in a thread, until the block ends."""
    stopped = threading.Event()

    async def listen() -> None:
        log = AsyncRedisLog(url, Names())
        task = asyncio.create_task(run_all(*Tail(log, "web-0", measures=measures).loops()))
        while not stopped.is_set() and not task.done():
            await asyncio.sleep(0.01)
        broken.extend([error] if task.done() and (error := task.exception()) else [])
        task.cancel()
        await asyncio.wait({task})
        await log.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(30)


def test_whatever_is_written_to_a_stream_no_worker_dies_and_innocents_are_answered(
    redis_url: str, lines: Lines
) -> None:
    broken, of_web, bad = list[BaseException](), Measures(), set[str]()
    with (
        ExitStack() as stack,
        Pipeline(lambda: stack.enter_context(closing(RedisLog(redis_url, Names())))).running() as pipeline,
        tailing(redis_url, of_web, broken),
    ):
        log = pipeline.log
        keys = {stream: inbox.stream for stream, inbox in zip(STREAMS, pipeline.inboxes, strict=True)}
        keys |= {"replies": log.names.replies("web-0"), "control": log.names.control}
        until(lambda: command(redis_url, "EXISTS", keys["replies"]))

        @settings(max_examples=by_night(12, 400), suppress_health_check=list(HealthCheck), database=None)
        @given(st.lists(st.tuples(st.sampled_from(PLACES), FIELDS), min_size=1, max_size=6))
        def story(entries: list[tuple[str, dict[bytes, bytes]]]) -> None:
            """A request that lives may be named, and end with that; the others do not notice. `control` names none:
            engines believe what it says of an end."""
            named, before = pipeline.ask("a", 20), pipeline.ask("b", 20)
            for place, fields in entries:
                uid = (named if place != "control" else NOBODY).encode()
                words = (part.replace(UID.encode(), uid) for pair in fields.items() for part in pair)
                entry_id = command(redis_url, "XADD", keys[place], "*", *words).decode()
                if is_bad(place, fields):
                    bad.add(entry_id)
            after = pipeline.ask("c")
            assert pipeline.answer(before) == counted_on("b", 20) and pipeline.answer(after) == counted_on("c")
            until(lambda: pipeline.errors or pipeline.scene.have_ended(named))
            until(
                lambda: (
                    pipeline.errors or waiting(pipeline) == sum(len(log.left(inbox, 99)) for inbox in pipeline.inboxes)
                )
            )
            assert not pipeline.errors and not broken

        story()
        left = {entry.id for inbox in pipeline.inboxes for entry in log.left(inbox, 99)}
        found, skipped = letters(log), [line["id"] for line in lines if line["event"] == "reply_skipped"]
        assert sorted(json.loads(letter["entry"])[0] for letter in found) == sorted(buried(lines))
        assert bad <= left.union(buried(lines), skipped) and sum(counts(pipeline).values()) == len(found) > 0
        until(lambda: count_of(of_web, UNREADABLE_ENTRIES, "replies") == len(set(skipped)) == len(skipped))
    assert not pipeline.errors
