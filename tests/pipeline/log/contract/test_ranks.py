"""The contract of the log: rank 0 of an engine says how its ranks form, and each rank joins once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.log_contract import LONG_MS, SHORT_MS, Scene, put
from support.redis_servers import until

from pipeline.errors import Fenced, GroupLost, UndecodableEvent
from pipeline.log.protocol import Entry, Owner
from pipeline.log.ranks import Formation, formation_to_join, ranks_inbox
from pipeline.log.redis import RedisLog
from pipeline.names import rank_stage, slot_stage


@pytest.fixture
def ranks(log: RedisLog) -> RedisLog:
    return log


def formation_of(scene: Scene, nonce: str = "first", *, size: int = 3) -> Formation:
    return Formation(scene.own("rank-0-0"), nonce, size, "file:/somewhere", "f")


def form(log: RedisLog, formation: Formation, *, group: str = "g", ttl_ms: int = LONG_MS) -> str:
    return log.form(group, formation, ttl_ms=ttl_ms)


def to_join(log: RedisLog, owner: Owner, *, group: str = "g") -> tuple[Entry, Formation] | None:
    return formation_to_join(log, owner, group, block_ms=0)


def num_pending(log: RedisLog, owner: Owner) -> int:
    return log.num_pending(ranks_inbox(log.names, "g", slot_stage(owner.slot)), owner.slot)


def test_every_rank_but_0_joins_a_formation_once(ranks: RedisLog, scene: Scene) -> None:
    formation = formation_of(scene)
    entry_id = form(ranks, formation)
    for rank in (1, 2):
        owner = scene.own(f"{rank_stage(rank)}-0")
        found = to_join(ranks, owner)
        assert found is not None
        entry, read = found
        assert (entry.id, read) == (entry_id, formation)
        assert abs(int(entry.fields["ms"]) - int(entry_id.partition("-")[0])) < 1000
        for _ in range(2):
            ranks.joined(owner, "g", [entry])
        assert num_pending(ranks, owner) == 0
        assert to_join(ranks, owner) is None
    for rank in (0, 3):
        with pytest.raises(GroupLost):
            to_join(ranks, scene.own(f"{rank_stage(rank)}-7"))


def test_a_group_has_formations_of_its_own(ranks: RedisLog, scene: Scene) -> None:
    form(ranks, formation_of(scene))
    with pytest.raises(GroupLost):
        to_join(ranks, scene.own("rank-1-0"), group="another")


def test_a_rank_waits_for_the_next_formation(ranks: RedisLog, scene: Scene) -> None:
    formation, owner = formation_of(scene), scene.own("rank-1-0")
    form(ranks, formation)
    found = to_join(ranks, owner)
    assert found is not None
    ranks.joined(owner, "g", [found[0]])

    def wait(log: RedisLog) -> tuple[Entry, Formation] | None:
        return formation_to_join(log, owner, "g", block_ms=LONG_MS)

    later = replace(formation, nonce="later")
    assert scene.meanwhile(wait, lambda: form(ranks, later))[1] == later  # type: ignore[index]


def test_the_same_formation_again_is_the_same_entry(ranks: RedisLog, scene: Scene) -> None:
    formation, owner = formation_of(scene), scene.own("rank-1-0")
    entry_id = form(ranks, formation)
    found = to_join(ranks, owner)
    assert found is not None
    ranks.joined(owner, "g", [found[0]])
    assert form(ranks, formation) == entry_id
    assert to_join(ranks, owner) is None


def test_only_the_newest_formation_is_there(ranks: RedisLog, scene: Scene) -> None:
    formation, early, late = formation_of(scene), scene.own("rank-1-0"), scene.own("rank-2-0")
    form(ranks, formation)
    assert to_join(ranks, early) is not None
    newest = replace(formation, nonce="newest")
    assert form(ranks, newest) == form(ranks, newest)
    for owner in (early, late):
        found = to_join(ranks, owner)
        assert found is not None and found[1] == newest
        assert num_pending(ranks, owner) == 1


def test_a_rank_that_died_before_it_joined_is_followed_by_its_next_owner(ranks: RedisLog, scene: Scene) -> None:
    form(ranks, formation_of(scene))
    died = scene.own("rank-1-0")
    assert to_join(ranks, died) is not None
    ranks.release(died)
    for slot in ("rank-1-0", "rank-1-1"):
        heir = scene.own(slot, nonce="heir")
        assert to_join(ranks, heir) is not None
        ranks.release(heir)


def test_a_living_rank_keeps_its_formation_from_another_of_the_same_number(ranks: RedisLog, scene: Scene) -> None:
    form(ranks, formation_of(scene))
    assert to_join(ranks, scene.own("rank-1-0")) is not None
    assert to_join(ranks, scene.own("rank-1-1")) is None


def test_a_formation_whose_rank_0_is_gone_is_stale(ranks: RedisLog, scene: Scene) -> None:
    formation, early, late = formation_of(scene), scene.own("rank-1-0"), scene.own("rank-2-0")
    form(ranks, formation)
    assert to_join(ranks, early) is not None
    scene.own_after(formation.rank_0)
    for owner in (early, late):
        assert to_join(ranks, owner) is None
        assert num_pending(ranks, owner) == 0


def test_only_who_holds_a_slot_of_rank_0_forms(ranks: RedisLog, scene: Scene) -> None:
    formation = formation_of(scene)
    form(ranks, formation)
    after = scene.own_after(formation.rank_0)
    with pytest.raises(Fenced):
        form(ranks, replace(formation, nonce="zombie"))
    owner = scene.own("rank-1-0")
    assert to_join(ranks, owner) is None
    form(ranks, replace(formation, rank_0=after, nonce="after"))
    found = to_join(ranks, owner)
    assert found is not None and found[1].nonce == "after"


def test_a_rank_that_lost_its_slot_consumes_no_formation(ranks: RedisLog, scene: Scene) -> None:
    form(ranks, formation_of(scene))
    before = scene.own("rank-1-0")
    found = to_join(ranks, before)
    assert found is not None
    after = scene.own_after(before)
    with pytest.raises(Fenced):
        ranks.joined(before, "g", [found[0]])
    assert to_join(ranks, after) == found


def test_a_group_lives_as_long_as_rank_0_last_said(ranks: RedisLog, scene: Scene) -> None:
    formation, owner = formation_of(scene), scene.own("rank-1-0")
    entry_id = form(ranks, formation)
    assert form(ranks, formation, ttl_ms=SHORT_MS) == entry_id
    until(lambda: not ranks.backlog(ranks_inbox(ranks.names, "g", "rank-1")))
    with pytest.raises(GroupLost):
        to_join(ranks, owner)
    ranks.joined(owner, "g", [Entry(entry_id, {})])
    assert form(ranks, formation) != entry_id
    assert to_join(ranks, owner) is not None


def test_an_entry_that_is_no_formation_is_said(ranks: RedisLog, scene: Scene) -> None:
    form(ranks, formation_of(scene))
    put(ranks, ranks.names.ranks("g"), {"nonce": "x", "size": "many"})
    owner = scene.own("rank-1-0")
    found = to_join(ranks, owner)
    assert found is not None
    ranks.joined(owner, "g", [found[0]])
    with pytest.raises(UndecodableEvent):
        to_join(ranks, owner)


def test_ranks_have_slots_with_leases_and_statuses(ranks: RedisLog, scene: Scene) -> None:
    owner = scene.own("rank-1-0")
    assert ranks.renew(owner, LONG_MS, "mine")
    assert ranks.lease("rank-1-0").holder == str(owner)
    assert ranks.statuses("rank-1") == {"rank-1-0": "mine"}
    assert ranks.statuses("rank-11") == ranks.statuses("rank") == {}


def test_a_formation_waits_while_nobody_holds_the_slot_of_its_rank_0(ranks: RedisLog, scene: Scene) -> None:
    formation, owner = formation_of(scene), scene.own("rank-1-0")
    form(ranks, formation)
    ranks.release(formation.rank_0)
    assert to_join(ranks, owner) is None
    assert num_pending(ranks, owner) == 1
