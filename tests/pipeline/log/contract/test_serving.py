"""The contract of the log: what the workers of a namespace serve together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.log_contract import LONG_MS, SHORT_MS, Scene
from support.redis_servers import until

from pipeline.errors import DoesNotFit
from pipeline.log.protocol import GUEST
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE
from pipeline.serving import Serving

MINE = Serving("qwen", "w1", "t1", 4096)
TEXT = Serving("/models/qwen", tokenizer="t1")


def test_a_stage_serves_what_its_first_worker_says(log: RedisLog) -> None:
    assert log.serving() == {}
    assert log.acquire("generate-0", "x", LONG_MS, MINE) is not None
    assert log.acquire("tokenize-0", "x", LONG_MS, TEXT) is not None
    served = log.serving()
    assert {stage: each.serving for stage, each in served.items()} == {GENERATE: MINE, TOKENIZE: TEXT}
    assert all(LONG_MS / 2 < each.ttl_ms <= LONG_MS for each in served.values())


@pytest.mark.parametrize(
    "other", [replace(MINE, weights="w2"), replace(MINE, tokenizer="t2"), replace(MINE, context=4095)]
)
def test_a_worker_that_does_not_fit_gets_no_slot(log: RedisLog, other: Serving) -> None:
    assert log.acquire("generate-0", "x", LONG_MS, MINE) is not None
    with pytest.raises(DoesNotFit):
        log.acquire("generate-1", "y", LONG_MS, other)
    assert log.lease("generate-1").holder == "" and log.serving()[GENERATE].serving == MINE


def test_one_model_under_another_name_and_more_context_fits_and_changes_nothing(log: RedisLog) -> None:
    assert log.acquire("generate-0", "x", LONG_MS, MINE) is not None
    assert log.acquire("generate-1", "y", LONG_MS, replace(MINE, model="copy", context=8192)) is not None
    assert log.serving()[GENERATE].serving == MINE


@pytest.mark.parametrize("stage", [TOKENIZE, GENERATE, DETOKENIZE])
def test_all_stages_have_one_tokenizer(log: RedisLog, stage: str) -> None:
    assert log.acquire(f"{stage}-0", "x", LONG_MS, TEXT) is not None
    for other in (TOKENIZE, GENERATE, DETOKENIZE):
        with pytest.raises(DoesNotFit):
            log.acquire(f"{other}-1", "y", LONG_MS, replace(TEXT, tokenizer="t2"))


def test_a_held_slot_is_held_for_whoever_asks(log: RedisLog) -> None:
    assert log.acquire("generate-0", "x", LONG_MS, MINE) is not None
    assert log.acquire("generate-0", "y", LONG_MS, replace(MINE, weights="w2")) is None


def test_once_all_leases_ran_out_another_model_may_start(log: RedisLog) -> None:
    other = replace(MINE, weights="w2", context=128)
    assert log.acquire("generate-0", "x", SHORT_MS, MINE) is not None
    until(lambda: log.serving() == {})
    assert log.acquire("generate-1", "y", LONG_MS, other) is not None
    assert log.serving()[GENERATE].serving == other


def test_a_living_worker_keeps_what_is_served_and_a_shorter_lease_does_not_cut_it(log: RedisLog) -> None:
    owner = log.acquire("generate-0", "x", SHORT_MS, MINE)
    assert owner is not None and log.renew(owner, LONG_MS, "", MINE)
    assert log.acquire("generate-1", "y", SHORT_MS, MINE) is not None
    assert log.serving()[GENERATE].ttl_ms > LONG_MS / 2


def test_a_lease_that_ran_out_is_not_renewed_once_others_serve_something_else(log: RedisLog) -> None:
    late = log.acquire("generate-0", "x", SHORT_MS, MINE)
    alone = log.acquire("tokenize-0", "x", SHORT_MS, TEXT)
    assert late is not None and alone is not None
    until(lambda: log.serving() == {})
    assert log.acquire("generate-1", "y", LONG_MS, Serving("other", "w2", "t2", 4096)) is not None
    assert not log.renew(late, LONG_MS, "late", MINE)
    assert not log.renew(alone, LONG_MS, "late", TEXT)
    assert log.lease("generate-0").holder == "" and log.statuses("generate") == {}


def test_a_lease_that_ran_out_is_renewed_with_what_it_served(log: RedisLog) -> None:
    owner = log.acquire("generate-0", "x", SHORT_MS, MINE)
    assert owner is not None
    until(lambda: log.serving() == {})
    assert log.renew(owner, LONG_MS, "", MINE)
    assert log.serving()[GENERATE].serving == MINE


def test_a_worker_that_says_nothing_fits(log: RedisLog, scene: Scene) -> None:
    assert log.acquire("generate-0", "x", LONG_MS, MINE) is not None
    scene.own("generate-1")
    scene.own("web-0")
    assert set(log.serving()) == {GENERATE}


def test_a_guest_that_does_not_fit_is_refused(log: RedisLog) -> None:
    assert log.acquire("detokenize-0", "x", LONG_MS, TEXT) is not None
    with pytest.raises(DoesNotFit):
        log.acquire("detokenize-1", f"{GUEST}y", LONG_MS, replace(TEXT, tokenizer="t2"))
