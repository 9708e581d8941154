"""What is counted when a request ends, for whom, and once; limits on tokens, and on requests that wait."""

from __future__ import annotations

from typing import Any

import pytest
from support.log_contract import (
    ACCEPTED,
    CANCELLED,
    FAILED,
    NAMES,
    SUBMITTED,
    Detokenizer,
    Scene,
    say_end,
    say_tokens,
    submitted,
    with_front,
)
from support.redis_servers import command

from pipeline.events import Admitted, Finished, Presentation, Replay, Timings, Tokenized, Usage
from pipeline.log.protocol import Produced, Quota, Submission, Turn, Used
from pipeline.log.redis import RedisLog
from pipeline.names import PROBE

TIMINGS = Timings(admitted_ms=1, first_token_ms=2, total_ms=3)
TOO_FAST, TOO_MANY_WAIT = Submission.TOO_FAST, Submission.TOO_MANY_WAIT


@pytest.fixture
def detokenizer(scene: Scene) -> Detokenizer:
    return Detokenizer(scene)


def sent(log: RedisLog, uid: str, count: int = 1, quota: Quota | None = None, **fields: Any) -> None:
    event = submitted().model_copy(update={"owner": "ann", "model": "demo", **fields})
    assert log.submit(uid, [event] * count, quota=quota).submission is ACCEPTED


def finished(uid: str, n: int, prompt: int, cached: int = 0) -> Produced:
    usage = Usage(prompt_tokens=prompt, completion_tokens=n, cached_tokens=cached)
    return say_end(uid, Finished(n=n, reason="stop", usage=usage, timings=TIMINGS), n=n)


def admitted(uid: str, prompt: int, cached: int) -> Produced:
    event = Admitted(engine="e", epoch=1, step=1, fingerprint="f", prompt_tokens=prompt, cached_tokens=cached)
    return Produced(uid, "0-3", 0, event, "web-0")


def used(log: RedisLog, owner: str = "ann") -> dict[str, Used]:
    """Return what *owner* has used, by model. A test may run over midnight."""
    day = int(command(log.url, "TIME")[0]) // 86_400
    found: dict[str, Used] = {}
    for (_, _, model), one in log.usage([owner], [day - 1, day]).items():
        found[model] = Used(*map(sum, zip(found.get(model, Used()), one, strict=True)))
    return found


def test_an_end_is_counted_for_its_owner_and_model(log: RedisLog, detokenizer: Detokenizer) -> None:
    sent(log, "a")
    sent(log, "b", model="other model")
    sent(log, "c")
    sent(log, "d", owner="")
    for uid, n, prompt, cached in (("a", 5, 30, 16), ("b", 1, 2, 0), ("c", 7, 10, 0), ("d", 3, 4, 0)):
        assert detokenizer.say(finished(uid, n, prompt, cached))
    assert used(log) == {"demo": Used(2, 0, 40, 16, 12), "other model": Used(1, 0, 2, 0, 1)}
    assert used(log, "") == {"demo": Used(1, 0, 4, 0, 3)}
    assert sorted(log.users(0)) == ["", "ann"]


def test_what_did_not_finish_counts_what_was_computed(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    for uid in "abcd":
        sent(log, uid)
    for uid in "ab":
        detokenizer.say(admitted(uid, 30, 16))
        detokenizer.say(say_tokens(uid, 1), say_tokens(uid, 2))
    scene.end("a", CANCELLED)
    detokenizer.say(say_end("b", FAILED.model_copy(update={"n": 2})))
    scene.end("c", CANCELLED)  # before an engine had it
    scene.end("d", FAILED)
    assert used(log) == {"demo": Used(4, 2, 60, 32, 4)}


def test_of_the_choices_of_a_prompt_one_counts_it(log: RedisLog, detokenizer: Detokenizer) -> None:
    sent(log, "a", 4, presentation=Presentation(choices=2))  # two prompts with two choices each
    for index in range(4):
        assert detokenizer.say(finished(f"a.{index}", 5, 30))
    assert used(log) == {"demo": Used(4, 0, 60, 0, 20)}


def test_an_end_is_counted_once_whoever_says_it_again(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    sent(log, "a")
    assert detokenizer.say(finished("a", 5, 30))
    scene.end("a", CANCELLED)
    detokenizer.say(finished("a", 5, 30))
    log.submit("a", [submitted()])
    assert used(log) == {"demo": Used(1, 0, 30, 0, 5)}
    sent(log, "b")
    command(log.url, "DEL", NAMES.request("b"))
    scene.end("b", CANCELLED)
    assert used(log) == {"demo": Used(1, 0, 30, 0, 5)}, "its history is gone"
    assert command(log.url, "EXISTS", NAMES.account("a")) == 0


@pytest.mark.parametrize(
    "fields", [{"endpoint": PROBE}, {"replay": Replay(of="x")}, {"task": "tokenize"}], ids=["probe", "replay", "task"]
)
def test_what_computes_nothing_for_its_owner_is_not_counted(
    log: RedisLog, detokenizer: Detokenizer, fields: dict[str, Any]
) -> None:
    sent(log, "a", **fields)
    assert detokenizer.say(finished("a", 5, 30))
    assert used(log) == {} and log.users(0) == []


def test_usage_is_kept_for_forty_days(log: RedisLog, detokenizer: Detokenizer) -> None:
    sent(log, "a")
    detokenizer.say(finished("a", 5, 30))
    (key,) = command(log.url, "KEYS", NAMES.usage("ann", 0).removesuffix("0") + "*")
    forty_days_ms = 40 * 86_400_000
    for each in (key, NAMES.users):
        assert forty_days_ms - 60_000 < command(log.url, "PTTL", each) <= forty_days_ms


@pytest.mark.parametrize(("period", "period_ms"), [("minute", 60_000), ("day", 86_400_000)])
def test_tokens_are_charged_at_the_end_and_the_next_request_waits_until_they_are_earned(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer, period: str, period_ms: int
) -> None:
    name = f"tokens_per_{period}"
    quota = Quota("ann", **{name: 100})
    sent(log, "a", quota=quota)
    sent(log, "b", quota=quota)
    assert detokenizer.say(finished("a", 70, 40))
    assert detokenizer.say(finished("b", 30, 10))
    refused = scene.submit_as("c", quota)
    assert (refused.submission, refused.limit) == (TOO_FAST, name)
    assert period_ms // 2 - 3000 < refused.again_ms <= period_ms // 2
    ms, bucket = command(log.url, "HMGET", NAMES.balance("ann"), "ms", name)
    command(log.url, "HSET", NAMES.balance("ann"), "ms", int(ms) - period_ms // 2, name, bucket)
    assert scene.submit_as("c", quota).submission is ACCEPTED
    assert scene.submit_as("d", Quota("bob", **{name: 1})).submission is ACCEPTED


def test_a_replay_is_charged_although_it_is_no_usage(log: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    quota = Quota("ann", tokens_per_day=10)
    sent(log, "a", quota=quota, replay=Replay(of="x"))
    assert with_front(log.url, lambda front: front.living_of({"ann"})) == ["a"]
    detokenizer.say(finished("a", 5, 30))
    assert scene.submit_as("b", quota).submission is TOO_FAST
    assert used(log) == {}


def test_a_cancelled_request_is_charged_for_what_was_computed(
    log: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    quota = Quota("ann", tokens_per_day=10)
    sent(log, "a", quota=quota)
    detokenizer.say(admitted("a", 30, 0))
    scene.end("a", CANCELLED)
    assert scene.submit_as("b", quota).submission is TOO_FAST


@pytest.mark.parametrize("others", [False, True])
def test_so_many_requests_of_an_owner_may_wait(log: RedisLog, scene: Scene, others: bool) -> None:
    """They wait for the tokenizer, for an engine, or in the queue of their owner."""
    quota, engine = Quota("ann", queued_requests=3), scene.own("generate-0")

    def tokenize() -> None:
        for entry in log.read(SUBMITTED, "t", max_entries=100, block_ms=0):
            owner = "bob" if entry.fields["uid"].startswith("b") else "ann"
            log.tokenized(entry, Tokenized(token_ids=(5,), fingerprint="t", by="t"), turn=Turn(owner))

    def outcome(uid: str) -> Submission:
        event = submitted().model_copy(update={"owner": "ann"})
        return log.submit(uid, [event], quota=quota).submission

    if others:
        sent(log, "b", owner="bob")
    assert [outcome(f"a{number}") for number in range(4)] == [ACCEPTED] * 3 + [TOO_MANY_WAIT]
    tokenize()
    assert outcome("a3") is TOO_MANY_WAIT
    scene.end("a0")
    assert [outcome("a4"), outcome("a5")] == [ACCEPTED, TOO_MANY_WAIT], "an ended one does not wait"
    tokenize()
    taken = len(scene.take(engine))
    assert taken == 4 + others
    assert [outcome(f"a{number}") for number in range(6, 10)] == [ACCEPTED] * 3 + [TOO_MANY_WAIT]


def test_the_live_requests_of_owners_are_found(log: RedisLog, scene: Scene) -> None:
    sent(log, "a", 2)
    sent(log, "b", owner="bob")
    sent(log, "c", owner="")
    scene.end("a.0")
    assert with_front(log.url, lambda front: front.living_of({"ann", "carl"})) == ["a.1"]
