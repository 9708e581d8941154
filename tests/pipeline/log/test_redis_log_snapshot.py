"""RedisLog as who shows the whole log reads it: a bounded piece at a time, on both versions of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support.lived_requests import LivedRequests
from support.log_contract import KILLED, LONG_MS, Scene
from support.redis_servers import command

from pipeline.errors import LogError
from pipeline.events import Cancelled, Preempted, Submitted, decode
from pipeline.log.operations.frontends import HEAD_ENTRIES, LIVING_PER_LOOK
from pipeline.log.operations.slots import SLOTS_PER_LOOK
from pipeline.log.protocol import Depth, Inbox, Occupancy, Owner
from pipeline.log.redis import RedisLog
from pipeline.log.snapshot import HistoryEnds, HistoryQuery
from pipeline.names import JANITOR, SEAL, UNREADABLE, Names, slot_name
from pipeline.stage.slots import Status

NAMES = Names("a*[b]-^c\\")
"""What must be taken literally where keys are looked for by a pattern."""
ALL = HistoryQuery("", last=True)


@pytest.fixture
def log(each_redis_url: str) -> Iterator[RedisLog]:
    with closing(RedisLog(each_redis_url, NAMES)) as log:
        yield log


@pytest.fixture
def lived(log: RedisLog) -> LivedRequests:
    return LivedRequests(log)


def speak(log: RedisLog, owner: Owner) -> str:
    text = Status(slot=owner.slot, owner=str(owner), pid=7, host="h", phase="ready").model_dump_json()
    assert log.renew(owner, LONG_MS, text)
    return text


def test_a_log_that_nobody_used_has_nothing_to_see_but_redis(log: RedisLog) -> None:
    snapshot = log.snapshot()
    assert snapshot.occupancy == Occupancy(Depth(0, 0), Depth(0, 0), {}, 0, 0)
    assert (snapshot.slots, snapshot.pending, snapshot.living, snapshot.held) == ({}, {}, (), {})
    is_valkey = b"valkey_version:" in command(log.url, "INFO", "server")  # what it says as redis_version is 7.2.4
    facts = snapshot.redis
    assert facts.name == ("Valkey" if is_valkey else "Redis")
    assert facts.version.startswith("9.") if is_valkey else facts.version[:2] in ("6.", "7.", "8.")
    assert facts.version.count(".") == 2 and facts.used_bytes > 100_000 and facts.max_bytes == 0
    seconds, _ = command(log.url, "TIME")
    assert int(seconds) - 10 < snapshot.now_ms / 1000 < int(seconds) + 1
    assert log.peek({"a": ALL}) == {"a": HistoryEnds(False)}
    assert log.peek({}) == {}
    assert log.requests("0", 100) == ("0", [])


def test_a_slot_is_seen_with_its_owner_its_lease_and_what_it_said_and_when(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-1")
    said = speak(log, owner)
    before_ms = log.snapshot().now_ms
    command(log.url, "PEXPIRE", NAMES.status("generate-1"), 4000)
    slot = log.snapshot().slots["generate-1"]
    assert (slot.owner, slot.lease.holder, slot.status) == (str(owner), str(owner), said)
    assert LONG_MS - 5000 < slot.lease.ttl_ms <= LONG_MS
    assert abs(before_ms - 6000 - slot.said_ms) < 5000


def test_a_slot_that_nobody_has_any_more_is_seen_and_one_that_nobody_ever_had_is_not(
    log: RedisLog, scene: Scene
) -> None:
    owner = scene.own("tokenize-0")
    speak(log, owner)
    assert log.release(owner)
    assert log.announce("detokenize-2", "{}")
    slots = log.snapshot().slots
    assert set(slots) == {"tokenize-0", "detokenize-2"}
    assert slots["tokenize-0"].lease.is_free and slots["tokenize-0"].lease.ttl_ms == 0
    assert (slots["tokenize-0"].owner, slots["tokenize-0"].status) == (str(owner), "")
    assert (slots["detokenize-2"].owner, slots["detokenize-2"].status) == ("", "{}")


def test_slots_beyond_the_first_look_the_janitor_and_guests_are_seen(log: RedisLog, scene: Scene) -> None:
    for index in range(SLOTS_PER_LOOK + 2):
        scene.own(slot_name("generate", index))
        log.prepare(Inbox.steps(NAMES, slot_name("generate", index)))
    scene.own(slot_name(JANITOR, 0))
    guest = scene.be_guest("detokenize-0")
    snapshot = log.snapshot()
    assert len(snapshot.slots) == SLOTS_PER_LOOK + 4
    assert snapshot.slots["detokenize-0"].lease.holder == str(guest)
    assert set(snapshot.occupancy.steps) == {slot_name("generate", index) for index in range(SLOTS_PER_LOOK + 2)}


def test_what_each_worker_has_pending_and_who_has_a_request_are_seen(
    log: RedisLog, scene: Scene, lived: LivedRequests
) -> None:
    engine = scene.own("generate-3")
    running = lived.running()
    assert [entry.fields["uid"] for entry in log.take(engine, 1, control_cursor="0-0").entries] == [running]
    read, waiting = lived.submitted(), lived.submitted()
    log.read(Inbox.submitted(log.names), "tokenize-4", max_entries=1, block_ms=0)
    snapshot = log.snapshot()
    assert snapshot.pending == {"generate-3": 1, "tokenize-4": 1}
    assert snapshot.held == {running: "generate-3", read: "tokenize-4"}
    assert snapshot.occupancy.submitted == Depth(2, 1) and snapshot.occupancy.tokenized == Depth(1, 1)
    assert set(snapshot.living) == {running, read, waiting} and snapshot.occupancy.num_live == 3


def test_of_many_that_live_the_latest_are_seen_and_all_are_counted(log: RedisLog) -> None:
    pairs = [word for number in range(LIVING_PER_LOOK + 5) for word in (number, f"uid{number}")]
    command(log.url, "ZADD", NAMES.live, *pairs)
    snapshot = log.snapshot()
    assert snapshot.occupancy.num_live == LIVING_PER_LOOK + 5
    assert snapshot.living[0] == f"uid{LIVING_PER_LOOK + 4}" and snapshot.living[-1] == "uid5"


def test_dead_letters_are_counted(log: RedisLog, lived: LivedRequests) -> None:
    lived.dead()
    assert log.snapshot().occupancy.num_dead == 1


def test_a_key_of_another_type_is_an_error(log: RedisLog) -> None:
    command(log.url, "SET", NAMES.dead, "no stream")
    with pytest.raises(LogError, match="WRONGTYPE"):
        log.snapshot()


def kinds(peek: HistoryEnds) -> list[str]:
    return [entry.fields["kind"] for entry in (*peek.head, *((peek.last,) if peek.last is not None else ()))]


def test_a_peek_brings_the_beginning_and_the_last_entry_alone(log: RedisLog, lived: LivedRequests) -> None:
    queued, uid, ended = lived.submitted(), lived.submitted(), lived.submitted()
    (entry,) = log.read(Inbox.submitted(log.names), "tokenize-9", max_entries=1, block_ms=0)
    assert entry.fields["uid"] == queued
    lived.taken_in(uid)
    lived.tokens(uid, "a", "b", "c")
    lived.ended(ended, Cancelled(by="client"))
    seen = log.peek({queued: ALL, uid: ALL, ended: ALL, "none": ALL})
    assert list(map(kinds, seen.values())) == [
        ["submitted"],
        ["submitted", "tokenized", "admitted", "tokens"],
        ["submitted", "cancelled"],
        [],
    ]
    assert [each.exists for each in seen.values()] == [True, True, True, False]
    lasts = {name: each.last.id for name, each in seen.items() if each.last is not None}
    assert lasts == {uid: "3-0", ended: SEAL}
    assert isinstance(decode(seen[queued].head[0].fields), Submitted)


def test_a_peek_brings_what_is_asked_for_and_nothing_twice(log: RedisLog, lived: LivedRequests) -> None:
    uid = lived.running()
    for _ in range(HEAD_ENTRIES):
        lived.mark(uid, 0, Preempted(engine="generate-0", epoch=1, step=3))
    lived.tokens(uid, "a")
    seen = log.peek({uid: HistoryQuery("0-2", last=False)})
    assert kinds(seen[uid]) == ["admitted", *["preempted"] * (HEAD_ENTRIES - 1)]
    assert kinds(log.peek({uid: HistoryQuery(SEAL, last=True)})[uid]) == ["tokens"]
    assert log.peek({uid: HistoryQuery(SEAL, last=False)})[uid] == HistoryEnds(True)


def test_a_history_that_is_no_text_costs_no_other_one(log: RedisLog, lived: LivedRequests) -> None:
    broken, sound = lived.submitted(), lived.submitted()
    command(log.url, "XADD", log.names.request(broken), "0-2", "kind", b"\xff")
    seen = log.peek({broken: ALL, sound: ALL})
    assert [UNREADABLE in entry.fields for entry in seen[broken].head] == [False, True]
    assert kinds(seen[sound]) == ["submitted"]


def test_requests_are_found_in_pieces_and_those_of_another_namespace_are_not(
    log: RedisLog, lived: LivedRequests
) -> None:
    uids = {lived.submitted() for _ in range(60)}
    lived.ended(min(uids), KILLED)
    command(log.url, "SET", Names("aX[b]-^c\\").request("other"), "x")
    command(log.url, "SET", b"not \xff text", "x")
    found: list[str] = []
    cursor, pieces = "0", 0
    while pieces == 0 or cursor != "0":
        cursor, piece = log.requests(cursor, 10)
        found += piece
        pieces += 1
    assert set(found) == uids and pieces > 3
