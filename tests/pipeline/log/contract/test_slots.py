"""The contract of the log: slots: acquire, renew, release, announce, and guests."""

from __future__ import annotations

import pytest
from support.log_contract import LONG_MS, NAMES, SHORT_MS, STEPS, TOKENIZED, Detokenizer, Scene, say_tokens
from support.redis_servers import until

from pipeline.errors import Fenced
from pipeline.log.protocol import GUEST, Inbox, Owner
from pipeline.log.redis import RedisLog
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID, slot_name

# slots


def test_acquire_gives_rising_epochs_and_refuses_a_held_slot(log: RedisLog, scene: Scene) -> None:
    first = scene.own("generate-0", nonce="x")
    assert (first.slot, first.epoch, first.nonce) == ("generate-0", 1, "x")
    assert log.acquire("generate-0", "y", LONG_MS) is None
    assert log.release(first)
    second = scene.own("generate-0", nonce="y")
    assert second == Owner("generate-0", 2, "y")
    assert scene.own("generate-1", nonce="y").epoch == 1


def test_acquire_repeated_by_the_same_process_answers_the_same(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0", nonce="x")
    assert log.acquire("generate-0", "x", LONG_MS) == owner


def test_a_slot_is_free_when_its_lease_ran_out(log: RedisLog, scene: Scene) -> None:
    scene.own("generate-0", lease_ms=SHORT_MS)
    until(lambda: log.lease("generate-0").holder == "")
    assert scene.own("generate-0", nonce="y").epoch == 2


def test_renew_after_the_lease_ran_out_takes_it_again_under_the_same_epoch(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0", lease_ms=SHORT_MS)
    until(lambda: log.lease("generate-0").holder == "")
    assert log.renew(owner, LONG_MS, "{}")
    assert log.lease("generate-0").holder == str(owner)
    assert scene.step(owner, 1).steps_length == 1


def test_renew_after_the_acquire_of_another_is_refused(log: RedisLog, scene: Scene) -> None:
    zombie = scene.own("generate-0", lease_ms=SHORT_MS)
    until(lambda: log.lease("generate-0").holder == "")
    owner = scene.own("generate-0", nonce="y")
    assert not log.renew(zombie, LONG_MS, "zombie")
    assert log.lease("generate-0").holder == str(owner)
    assert log.statuses("generate") == {}


def test_release_is_the_owners_alone(log: RedisLog, scene: Scene) -> None:
    zombie = scene.own("generate-0")
    owner = scene.own_after(zombie)
    log.renew(owner, LONG_MS, "mine")
    assert not log.release(zombie)
    assert log.lease("generate-0").holder == str(owner)
    assert log.statuses("generate") == {"generate-0": "mine"}
    assert log.release(owner)
    assert not log.release(owner)
    assert log.lease("generate-0").holder == ""
    assert log.statuses("generate") == {}


def test_lease_says_who_holds_a_slot_and_for_how_long(log: RedisLog, scene: Scene) -> None:
    assert (log.lease("generate-0").holder, log.lease("generate-0").ttl_ms) == ("", 0)
    owner = scene.own("generate-0")
    lease = log.lease("generate-0")
    assert lease.holder == str(owner) == f"1:{owner.nonce}"
    assert LONG_MS / 2 < lease.ttl_ms <= LONG_MS


def test_statuses_are_by_slot_of_one_stage_also_past_the_first_sixteen(log: RedisLog, scene: Scene) -> None:
    for index in range(20):
        log.renew(scene.own(slot_name("generate", index)), LONG_MS, f"{{{index}}}")
    log.renew(scene.own("tokenize-0"), LONG_MS, "another stage")
    assert list(log.statuses("generate").items()) == [(f"generate-{i}", f"{{{i}}}") for i in range(20)]
    assert log.statuses("detokenize") == {}


# guests, who look after a slot while its worker is away


def test_a_guest_gets_no_slot_that_a_worker_or_another_guest_holds(log: RedisLog, scene: Scene) -> None:
    worker = scene.own("generate-0")
    assert log.acquire("generate-0", f"{GUEST}x", LONG_MS) is None
    assert log.lease("generate-0").holder == str(worker)
    log.release(worker)
    guest = scene.be_guest("generate-0", nonce="x")
    assert (guest.epoch, guest.is_guest, worker.is_guest) == (2, True, False)
    assert log.acquire("generate-0", f"{GUEST}y", LONG_MS) is None
    assert scene.be_guest("generate-0", nonce="x") == guest


def test_for_a_worker_a_slot_is_free_while_a_guest_looks_after_it(log: RedisLog, scene: Scene) -> None:
    guest = scene.be_guest("generate-0")
    assert log.lease("generate-0").is_free and log.lease("generate-0").holder == str(guest)
    worker = scene.own("generate-0", nonce="worker")
    assert worker.epoch == guest.epoch + 1
    assert not log.lease("generate-0").is_free
    assert not log.renew(guest, LONG_MS, "")
    assert not log.release(guest)
    assert log.lease("generate-0").holder == str(worker)


def test_once_a_slot_has_a_guest_its_former_worker_writes_and_takes_nothing(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a", "b")
    engine = detokenizer.engine
    (entry,) = scene.take(engine, 1)
    unsaid = detokenizer.read_step()
    for slot in (engine, detokenizer.owner):
        log.release(slot)
        scene.be_guest(slot.slot)
    with pytest.raises(Fenced):
        scene.step(engine, 2, entry.id)
    with pytest.raises(Fenced):
        log.take(engine, 8, control_cursor="0-0")
    with pytest.raises(Fenced):
        detokenizer.commit(unsaid, say_tokens("a", 1))
    assert not log.renew(engine, LONG_MS, "zombie")
    assert log.pending(TOKENIZED, "generate-0") == [entry]
    assert log.backlog(STEPS) == 1
    assert scene.ids("a") == [SUBMITTED_ID, TOKENIZED_ID]
    (other,) = scene.take(scene.own("generate-1"))
    assert other.fields["uid"] == "b"


def test_a_guest_writes_for_the_slot_until_a_worker_has_it(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept("a")
    log.release(detokenizer.owner)
    detokenizer.owner = scene.be_guest("detokenize-0")
    assert detokenizer.say(say_tokens("a", 1))
    unsaid = detokenizer.read_step()
    scene.own("detokenize-0", nonce="worker")
    with pytest.raises(Fenced):
        detokenizer.commit(unsaid, say_tokens("a", 2))
    assert scene.ids("a") == [SUBMITTED_ID, TOKENIZED_ID, "1-0"]


def test_renew_without_a_status_keeps_the_lease_and_publishes_nothing(log: RedisLog, scene: Scene) -> None:
    guest = scene.own("generate-0", nonce=f"{GUEST}x", lease_ms=SHORT_MS)
    assert log.renew(guest, LONG_MS, "")
    assert log.lease("generate-0").ttl_ms > SHORT_MS
    assert log.statuses("generate") == {}
    worker = scene.own("generate-0")
    log.renew(worker, LONG_MS, "said")
    assert log.renew(worker, LONG_MS, "")
    assert log.statuses("generate") == {"generate-0": "said"}


def test_who_waits_for_a_slot_announces_itself_there_unless_somebody_holds_it(log: RedisLog, scene: Scene) -> None:
    assert log.announce("generate-0", "first")
    assert log.announce("generate-0", "second")
    assert log.statuses("generate") == {"generate-0": "second"}
    owner = scene.own("generate-0")
    log.renew(owner, LONG_MS, "holder")
    assert not log.announce("generate-0", "third")
    assert log.statuses("generate") == {"generate-0": "holder"}
    log.release(owner)
    assert log.announce("generate-0", "third")
    assert log.statuses("generate") == {"generate-0": "third"}


def test_an_announcement_takes_no_slot(log: RedisLog, scene: Scene) -> None:
    log.announce("generate-0", "coming")
    assert log.lease("generate-0").holder == ""
    assert scene.own("generate-0").epoch == 1


# engines without a detokenizer


def test_unattended_engines_live_or_have_steps_waiting_and_no_worker_listens_to_them(
    log: RedisLog, scene: Scene
) -> None:
    engines = [scene.own(slot_name("generate", index)) for index in range(4)]
    for engine in engines[1:]:
        log.prepare(Inbox.steps(NAMES, engine.slot))
    scene.step(engines[2], 1)
    scene.step(engines[3], 1)
    log.release(engines[1])  # nobody lives there, and nothing waits
    log.release(engines[2])  # nobody lives there, but a step waits
    scene.own("detokenize-3")
    scene.be_guest("detokenize-2")
    assert log.unattended() == ["generate-0", "generate-2"]
    scene.own("detokenize-0")
    scene.own("detokenize-2")
    assert log.unattended() == []


def test_unattended_engines_are_found_also_past_the_first_sixteen(log: RedisLog, scene: Scene) -> None:
    for index in range(18):
        scene.own(slot_name("generate", index))
        if index != 17:
            scene.own(slot_name("detokenize", index))
    assert log.unattended() == ["generate-17"]
