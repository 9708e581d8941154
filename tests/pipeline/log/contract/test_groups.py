"""The contract of the log: consumer groups: prepare, read, pending, claim and retry."""

from __future__ import annotations

import pytest
from support.log_contract import LONG_MS, NAMES, SUBMITTED, TOKENIZED, Scene

from pipeline.errors import Fenced, GroupLost
from pipeline.log.protocol import Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import slot_name

# groups


def test_backlog_counts_what_is_unread_and_what_is_worked_on(log: RedisLog, scene: Scene) -> None:
    assert log.backlog(SUBMITTED) == 0
    scene.submit("a")
    scene.submit("b")
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert log.backlog(SUBMITTED) == 2
    scene.tokenize(entry)
    assert (log.backlog(SUBMITTED), log.backlog(TOKENIZED)) == (1, 1)
    assert log.backlog(Inbox.steps(NAMES, "generate-7")) == 0


def test_a_group_created_after_the_first_append_reads_it(log: RedisLog, scene: Scene) -> None:
    engine = scene.own("generate-5")
    scene.step(engine, 1)
    inbox = Inbox.steps(NAMES, "generate-5")
    log.prepare(inbox)
    assert scene.read_one(inbox, "detokenize-5").id == "1-1"


def test_prepare_again_changes_nothing(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    log.prepare(SUBMITTED)
    assert log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0) == []
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]


def test_a_read_without_a_group_says_that_the_group_is_lost(log: RedisLog, scene: Scene) -> None:
    inbox = Inbox.steps(NAMES, "generate-7")
    owner = scene.own("detokenize-7")
    with pytest.raises(GroupLost):
        log.read(inbox, "detokenize-7", max_entries=1, block_ms=0)
    with pytest.raises(GroupLost):
        log.pending(inbox, "detokenize-7")
    with pytest.raises(GroupLost):
        log.claim(inbox, owner, 8)


@pytest.mark.parametrize("block_ms", [0, 1])
def test_read_returns_nothing_when_its_time_is_over(scene: Scene, block_ms: int) -> None:
    assert scene.log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=block_ms) == []


def test_a_waiting_read_gets_what_is_appended(scene: Scene) -> None:
    def read(log: RedisLog) -> list[Entry]:
        return log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=LONG_MS)

    assert [entry.fields["uid"] for entry in scene.meanwhile(read, scene.submit)] == ["a"]


def test_two_consumers_never_read_the_same_entry(log: RedisLog, scene: Scene) -> None:
    scene.submit("a")
    scene.submit("b")
    assert scene.read_one(SUBMITTED, "tokenize-0").fields["uid"] == "a"
    assert scene.read_one(SUBMITTED, "tokenize-1").fields["uid"] == "b"
    assert log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=0) == []


def test_pending_is_in_order_and_no_delivery(log: RedisLog, scene: Scene) -> None:
    uids = [f"r{i}" for i in range(120)]  # more than one page of XPENDING
    for uid in uids:
        scene.submit(uid, max_queued=1000)
    entries = log.read(SUBMITTED, "tokenize-0", max_entries=1000, block_ms=0)
    assert log.pending(SUBMITTED, "tokenize-0") == entries
    assert log.pending(SUBMITTED, "tokenize-0") == entries
    assert log.pending(SUBMITTED, "tokenize-1") == []
    assert [entry.fields["uid"] for entry in entries] == uids


# claim


def test_claim_takes_from_slots_without_a_lease_only(log: RedisLog, scene: Scene) -> None:
    for uid in ("a", "b", "c"):
        scene.submit(uid)
    scene.own("tokenize-0")
    me = scene.own("tokenize-2")
    living = scene.read_one(SUBMITTED, "tokenize-0")
    left = scene.read_one(SUBMITTED, "tokenize-1")
    mine = scene.read_one(SUBMITTED, "tokenize-2")
    assert log.claim(SUBMITTED, me, 8) == [left]
    assert log.claim(SUBMITTED, me, 8) == []
    assert log.pending(SUBMITTED, "tokenize-0") == [living]
    assert log.pending(SUBMITTED, "tokenize-1") == []
    assert log.pending(SUBMITTED, "tokenize-2") == [left, mine]


def test_claim_takes_at_most_so_many_and_from_several_slots(log: RedisLog, scene: Scene) -> None:
    uids = ["a", "b", "c", "d"]
    for uid in uids:
        scene.submit(uid)
    for slot in ("tokenize-0", "tokenize-0", "tokenize-1", "tokenize-1"):
        scene.read_one(SUBMITTED, slot)
    me = scene.own("tokenize-2")
    assert [entry.fields["uid"] for entry in log.claim(SUBMITTED, me, 3)] == ["a", "b", "c"]
    assert [entry.fields["uid"] for entry in log.claim(SUBMITTED, me, 3)] == ["d"]


def test_claim_is_fenced(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    zombie = scene.own("tokenize-1")
    scene.own_after(zombie)
    with pytest.raises(Fenced):
        log.claim(SUBMITTED, zombie, 8)
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]


def test_a_claimed_entry_is_committed_once(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    (claimed,) = log.claim(SUBMITTED, scene.own("tokenize-1"), 8)
    assert scene.tokenize(claimed)
    assert not scene.tokenize(entry)


def test_claim_takes_nothing_from_a_slot_that_a_guest_looks_after(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    scene.be_guest("tokenize-0")
    assert log.claim(SUBMITTED, scene.own("tokenize-1"), 8) == []
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]


# claim_from and forsaken


def test_forsaken_slots_have_entries_pending_and_no_worker(log: RedisLog, scene: Scene) -> None:
    owners = [scene.own(slot_name("generate", index)) for index in range(4)]
    for owner, uid in zip(owners, "abcd", strict=True):
        (entry,) = scene.take_all(owner, uid)
    scene.step(owners[3], 1, entry.id)
    assert log.forsaken(TOKENIZED) == []
    for owner in (owners[0], owners[2], owners[3]):  # the last has nothing in hand
        log.release(owner)
    scene.be_guest("generate-2")
    assert sorted(log.forsaken(TOKENIZED)) == ["generate-0", "generate-2"]
    assert log.forsaken(TOKENIZED, but="generate-0") == ["generate-2"]


def test_how_much_a_slot_has_in_hand_is_counted_without_reading_it(log: RedisLog, scene: Scene) -> None:
    owner, other = scene.own("generate-0"), scene.own("generate-1")
    (entry, *_) = scene.take_all(owner, "a", "b")
    scene.take_all(other, "c")
    assert [log.num_pending(TOKENIZED, slot) for slot in ("generate-0", "generate-1", "generate-2")] == [2, 1, 0]
    scene.step(owner, 1, entry.id)
    assert log.num_pending(TOKENIZED, "generate-0") == 1


def test_the_owner_of_a_guest_claims_what_the_slot_had_in_hand_in_order_and_at_most_so_many(
    log: RedisLog, scene: Scene
) -> None:
    dead, me = scene.own("generate-0"), scene.own("generate-1")
    entries = scene.take_all(dead, "a", "b", "c")
    (mine,) = scene.take_all(me, "d")
    log.release(dead)
    guest = scene.be_guest("generate-0")
    assert log.claim_from(TOKENIZED, me, guest, 2) == entries[:2]
    assert log.claim_from(TOKENIZED, me, guest, 2) == entries[2:]
    assert log.claim_from(TOKENIZED, me, guest, 2) == []
    assert log.pending(TOKENIZED, "generate-0") == []
    assert log.pending(TOKENIZED, "generate-1") == [*entries, mine]


def test_nothing_is_claimed_from_a_slot_once_its_guest_has_lost_it(log: RedisLog, scene: Scene) -> None:
    dead, me = scene.own("generate-0"), scene.own("generate-1")
    entries = scene.take_all(dead, "a")
    log.release(dead)
    guest = scene.be_guest("generate-0")
    scene.own("generate-0", nonce="worker")
    assert log.claim_from(TOKENIZED, me, guest, 8) == []
    assert log.pending(TOKENIZED, "generate-0") == entries


def test_who_lost_the_own_slot_claims_nothing_as_a_guest(log: RedisLog, scene: Scene) -> None:
    dead, zombie = scene.own("generate-0"), scene.own("generate-1")
    entries = scene.take_all(dead, "a")
    log.release(dead)
    guest = scene.be_guest("generate-0")
    scene.own_after(zombie)
    with pytest.raises(Fenced):
        log.claim_from(TOKENIZED, zombie, guest, 8)
    assert log.pending(TOKENIZED, "generate-0") == entries


# retry


def test_retry_counts_how_often_an_entry_was_worked_on_and_the_read_is_the_first_time(
    log: RedisLog, scene: Scene
) -> None:
    scene.submit("a")
    scene.submit("b")
    owner = scene.own("tokenize-0")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=2, block_ms=0)
    log.pending(SUBMITTED, "tokenize-0")
    assert [log.retry(SUBMITTED, owner, first) for _ in range(3)] == [2, 3, 4]
    assert log.retry(SUBMITTED, owner, second) == 2


def test_a_claim_counts_as_no_try(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    scene.submit("b")
    scene.read_one(SUBMITTED, "tokenize-1")
    tokenizer = scene.own("tokenize-0")
    (claimed,) = log.claim(SUBMITTED, tokenizer, 8)
    assert log.retry(SUBMITTED, tokenizer, claimed) == 2
    dead, me = scene.own("generate-0"), scene.own("generate-1")
    log.take(dead, 8, control_cursor="0-0")
    log.release(dead)
    (taken_over,) = log.claim_from(TOKENIZED, me, scene.be_guest("generate-0"), 8)
    assert log.retry(TOKENIZED, me, taken_over) == 2


def test_who_does_not_hold_an_entry_counts_nothing(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    owner, other = scene.own("tokenize-0"), scene.own("tokenize-1")
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert log.retry(SUBMITTED, other, entry) == 0
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]
    assert log.retry(SUBMITTED, owner, entry) == 2
    assert scene.tokenize(entry)
    assert log.retry(SUBMITTED, owner, entry) == 0


def test_retry_is_fenced(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    zombie = scene.own("tokenize-0")
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    owner = scene.own_after(zombie)
    with pytest.raises(Fenced):
        log.retry(SUBMITTED, zombie, entry)
    assert log.retry(SUBMITTED, owner, entry) == 2
