"""Key names are a contract with operators and other languages: they are pinned here."""

from __future__ import annotations

import fnmatch

import pytest

from pipeline.names import (
    LASTING,
    SEAL,
    STAGES,
    Names,
    base_uid,
    parse_id,
    rank_stage,
    sibling_uids,
    slot_index,
    slot_name,
    slot_stage,
    tokens_id,
)


def all_keys(names: Names) -> dict[str, str]:
    return {
        "submitted": names.submitted,
        "tokenized": names.tokenized,
        "control": names.control,
        "live": names.live,
        "dead": names.dead,
        "ended": names.ended,
        "archive": names.archive,
        "text:cd": names.text("cd"),
        "stored": names.stored,
        "stored_bytes": names.stored_bytes,
        "steps:generate-0": names.steps("generate-0"),
        "journal:generate-0": names.journal("generate-0"),
        "request:ab": names.request("ab"),
        "shared:ab": names.shared("ab"),
        "replies:web-0": names.replies("web-0"),
        "reader:ab": names.reader("ab"),
        "copy:01": names.copy("01"),
        "copies": names.copies,
        "idempotency:ef": names.idempotency("ef"),
        "limit:ef:bytes": names.limit("ef"),
        "balance:ef": names.balance("ef"),
        "users": names.users,
        "usage:ef:20000": names.usage("ef", 20000),
        "account:ab": names.account("ab"),
        "waiting": names.waiting,
        "queue:ef": names.queue("ef"),
        "full": names.full,
        "running:ef": names.running("ef"),
        "ranks:g": names.ranks("g"),
        "lease:web-0": names.lease("web-0"),
        "owner:web-0": names.owner("web-0"),
        "status:web-0": names.status("web-0"),
        "serving:generate": names.serving("generate"),
        "last_engine": names.last_engine,
    }


def test_every_key_begins_with_namespace_and_shard_in_braces() -> None:
    for name, key in all_keys(Names()).items():
        assert key == "{minisgl:0}:" + name
    for name, key in all_keys(Names("blue", 3)).items():
        assert key == "{blue:3}:" + name


def test_the_examples_are_all_the_keys_there_are() -> None:
    kinds = {name for name in vars(Names) if not name.startswith("_")} - {"namespace", "shard"}
    assert kinds == {name.partition(":")[0] for name in all_keys(Names())}


def test_the_lasting_keys_are_these() -> None:
    lasting = {name for name in all_keys(Names()) if any(fnmatch.fnmatchcase(name, pattern) for pattern in LASTING)}
    ever = {"submitted", "tokenized", "control", "live", "steps:generate-0", "owner:web-0", "dead"}
    assert lasting == ever | {"ended", "archive", "stored", "stored_bytes", "waiting", "queue:ef", "last_engine"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_slot_name_is_stage_and_number(stage: str) -> None:
    assert slot_name(stage, 12) == f"{stage}-12"
    assert slot_index(slot_name(stage, 12)) == 12


def test_a_rank_is_a_stage_of_its_own() -> None:
    slot = slot_name(rank_stage(1), 12)
    assert slot == "rank-1-12"
    assert (slot_stage(slot), slot_index(slot)) == ("rank-1", 12)


def test_siblings_are_numbered_from_0_and_a_single_one_is_not() -> None:
    assert sibling_uids("ab", 1) == ("ab",)
    assert sibling_uids("ab", 3) == ("ab.0", "ab.1", "ab.2")
    for count in (1, 12):
        assert {base_uid(uid) for uid in sibling_uids("ab", count)} == {"ab"}


def test_ids_of_a_history_are_ordered_as_things_happen() -> None:
    ids = ["0-1", "0-2", "0-3", tokens_id(1), "1-1", tokens_id(2), tokens_id(10), SEAL]
    assert sorted(ids, key=parse_id) == ids
    assert parse_id(tokens_id(7)) == (7, 0)


def test_the_seal_is_the_largest_id_that_redis_has() -> None:
    assert parse_id(SEAL) == (2**64 - 1, 2**64 - 1)
