"""One contract for every StreamLog: MemoryLog, and RedisLog on both versions of Redis."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from redis_servers import PLACES, Servers, until

from pipeline.errors import Fenced, GroupLost, LogError
from pipeline.events import (
    Admitted,
    Answered,
    Cancelled,
    End,
    Event,
    Failed,
    Finished,
    Mark,
    SamplingParams,
    StepCompleted,
    Submitted,
    Timings,
    Tokenized,
    TokenRow,
    TokensProduced,
    Usage,
    decode,
    encode,
)
from pipeline.log.entries import REPLY_CAP
from pipeline.log.memory import MemoryLog
from pipeline.log.protocol import (
    GUEST,
    DeadLetter,
    Entry,
    Inbox,
    Once,
    Owner,
    Produced,
    Quota,
    Reply,
    RequestLimits,
    StepCommitted,
    StreamLog,
    Submission,
    SubmitResult,
)
from pipeline.log.redis import RedisLog
from pipeline.names import (
    SEAL,
    SUBMITTED_ID,
    TOKENIZED_ID,
    Names,
    parse_id,
    sibling_uids,
    slot_name,
    tokens_id,
)
from pipeline.views.history import copied_history

T = TypeVar("T")

NAMES = Names("test")
LIMITS = RequestLimits(timeout_s=60, retention_s=60, max_queued=100)
SUBMITTED = Inbox.submitted(NAMES)
TOKENIZED = Inbox.tokenized(NAMES)
STEPS = Inbox.steps(NAMES, "generate-0")
LONG_MS = 60_000
SHORT_MS = 20

FINISHED = Finished(
    n=2,
    reason="stop",
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3),
)
CANCELLED = Cancelled(by="client")
FAILED = Failed(status=400, code="invalid_value", message="No.")


@pytest.fixture(params=["memory", *PLACES])
def log(request: pytest.FixtureRequest) -> Iterator[StreamLog]:
    """An empty log with the groups that a server makes at its start."""
    log: StreamLog
    if request.param == "memory":
        log = MemoryLog(NAMES, LIMITS)
    else:
        servers: Servers = request.getfixturevalue("redis_servers")
        log = RedisLog(servers.url(request.param), NAMES, LIMITS)
    for inbox in (SUBMITTED, TOKENIZED, STEPS):
        log.prepare(inbox)
    yield log
    if isinstance(log, RedisLog):
        log.close()


def another(log: StreamLog) -> StreamLog:
    """Return the same log for another thread."""
    return log.another() if isinstance(log, RedisLog) else log


def limits(*, timeout_ms: int = LONG_MS, retention_ms: int = LONG_MS, max_queued: int = 100) -> RequestLimits:
    return RequestLimits(timeout_ms / 1000, retention_ms / 1000, max_queued)


def submit(
    log: StreamLog,
    uid: str = "a",
    *,
    frontend: str = "web-0",
    timeout_ms: int = LONG_MS,
    retention_ms: int = LONG_MS,
    max_queued: int = 100,
) -> Submission:
    event = Submitted(endpoint="/v1/completions", frontend=frontend, prompt="Hi", sampling=SamplingParams(seed=1))
    log.limits = limits(timeout_ms=timeout_ms, retention_ms=retention_ms, max_queued=max_queued)
    return log.submit(uid, [event]).submission


def read_one(log: StreamLog, inbox: Inbox, consumer: str) -> Entry:
    entries = log.read(inbox, consumer, max_entries=1, block_ms=0)
    assert len(entries) == 1
    return entries[0]


def tokenize(log: StreamLog, entry: Entry) -> bool:
    return log.tokenized(entry, Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0"))


def accept(log: StreamLog, *uids: str, frontend: str = "web-0") -> None:
    """Bring requests as far as the engines."""
    for uid in uids:
        assert submit(log, uid, frontend=frontend) is Submission.ACCEPTED
        assert tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))


def own(log: StreamLog, slot: str, *, nonce: str = "n", lease_ms: int = LONG_MS) -> Owner:
    owner = log.acquire(slot, nonce, lease_ms)
    assert owner is not None
    return owner


def own_after(log: StreamLog, before: Owner) -> Owner:
    """Take the slot over from *before*."""
    log.release(before)
    return own(log, before.slot, nonce="later")


def step_of(uid: str = "a", n: int = 1) -> StepCompleted:
    return StepCompleted(rows=(TokenRow(uid=uid, n=n, token=40 + n),))


def step(log: StreamLog, owner: Owner, number: int, *ended: str, cursor: str = "0-0") -> StepCommitted:
    return log.step(owner, number, step_of(n=number), ended=ended, control_cursor=cursor, lease_ms=LONG_MS)


def say_tokens(uid: str, n: int, *, frontend: str = "web-0", text: str = "x") -> Produced:
    event = TokensProduced(count=1, tokens=(40 + n,), text=text, step=f"1-{n}")
    return Produced(uid, tokens_id(n), n, event, frontend)


def say_end(uid: str, event: End, *, n: int = 2, tell_engine: bool = False) -> Produced:
    return Produced(uid, SEAL, n, event, "web-0", tell_engine)


class Detokenizer:
    """Commits what follows from the steps of generate-0, one step for each call."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.engine = own(log, "generate-0")
        self.owner = own(log, "detokenize-0")
        self._numbers = itertools.count(1)

    def read_step(self) -> Entry:
        step(self.log, self.engine, next(self._numbers))
        return read_one(self.log, STEPS, self.owner.slot)

    def commit(self, entry: Entry, *events: Produced) -> bool:
        return self.log.produced(self.owner, entry, "generate-0", events)

    def say(self, *events: Produced) -> bool:
        return self.commit(self.read_step(), *events)


@pytest.fixture
def detokenizer(log: StreamLog) -> Detokenizer:
    return Detokenizer(log)


def end(log: StreamLog, uid: str, event: End, *, consume: Entry | None = None) -> bool:
    return log.end(uid, event, frontend="web-0", consume=consume)


def history(log: StreamLog, uid: str = "a") -> list[Entry]:
    return log.histories([uid])[0]


def ids(log: StreamLog, uid: str = "a") -> list[str]:
    return [entry.id for entry in history(log, uid)]


def events(log: StreamLog, uid: str = "a") -> list[Event]:
    """Return the events of a history, without the moment of their commit."""
    return [decode(entry.fields).model_copy(update={"ms": 0}) for entry in history(log, uid)]


def replies_after(log: StreamLog, cursor: str, frontend: str = "web-0") -> list[Reply]:
    found: list[Reply] = []
    while True:
        cursor, replies = log.read_replies(frontend, cursor, block_ms=0)
        if not replies:
            return found
        found += replies


def told(log: StreamLog, cursor: str = "0-0") -> tuple[str, ...]:
    """Return which ends `control` told the engines."""
    watcher = own(log, "generate-9")
    taken = log.take(watcher, 0, control_cursor=cursor)
    log.release(watcher)
    return taken.ended


# submit


def test_submit_begins_a_history_that_reads_as_it_was_said(log: StreamLog) -> None:
    assert submit(log) is Submission.ACCEPTED
    (entry,) = history(log)
    event = decode(entry.fields)
    assert entry.id == SUBMITTED_ID
    assert isinstance(event, Submitted)
    assert (event.prompt, event.frontend, event.sampling.seed) == ("Hi", "web-0", 1)
    assert event.deadline_ms == event.ms + LONG_MS


def test_submit_sets_the_deadline_also_of_an_event_that_brings_an_older_one(log: StreamLog) -> None:
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), deadline_ms=17)
    log.submit("a", [event])
    written = decode(history(log)[0].fields)
    assert isinstance(written, Submitted)
    assert written.deadline_ms == written.ms + LONG_MS


def test_submit_hands_uid_and_frontend_to_the_tokenizers(log: StreamLog) -> None:
    submit(log, "a", frontend="web-3")
    assert read_one(log, SUBMITTED, "tokenize-0").fields == {"uid": "a", "frontend": "web-3"}


def test_a_repeated_submit_is_a_duplicate_and_changes_nothing(log: StreamLog) -> None:
    submit(log)
    before = history(log)
    assert submit(log) is Submission.DUPLICATE
    assert history(log) == before
    assert len(log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)) == 1


def test_submit_is_refused_when_backlog_and_requests_in_flight_reach_the_limit(log: StreamLog) -> None:
    accept(log, "a")
    submit(log, "b")
    assert submit(log, "c", max_queued=2) is Submission.BUSY
    assert history(log, "c") == []
    assert log.alive(["a", "b", "c"]) == {"a", "b"}
    assert submit(log, "c", max_queued=3) is Submission.ACCEPTED


def test_a_busy_submit_of_a_known_uid_is_a_duplicate(log: StreamLog) -> None:
    submit(log)
    assert submit(log, max_queued=1) is Submission.DUPLICATE


def test_a_history_expires_after_deadline_and_retention(log: StreamLog) -> None:
    submit(log, timeout_ms=SHORT_MS, retention_ms=SHORT_MS)
    until(lambda: history(log) == [])
    assert not end(log, "a", CANCELLED)
    assert history(log) == []


# submit under an idempotency key


ONCE = Once("key", "body")
ATTACHED_TO_A = SubmitResult(Submission.ATTACH, "a")


def submit_once(
    log: StreamLog, uid: str, once: Once = ONCE, *, timeout_ms: int = LONG_MS, max_queued: int = 100
) -> SubmitResult:
    event = Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams())
    log.limits = limits(timeout_ms=timeout_ms, retention_ms=timeout_ms, max_queued=max_queued)
    return log.submit(uid, [event], once)


def test_what_is_submitted_again_under_an_idempotency_key_is_the_first_request(log: StreamLog) -> None:
    assert submit_once(log, "a") == SubmitResult(Submission.ACCEPTED, "a")
    assert submit_once(log, "b") == ATTACHED_TO_A
    end(log, "a", FINISHED)
    assert submit_once(log, "b") == ATTACHED_TO_A
    assert (ids(log, "a"), ids(log, "b")) == ([SUBMITTED_ID, SEAL], [])
    assert len(log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)) == 1
    assert log.alive(["a", "b"]) == set()


def test_another_body_under_an_idempotency_key_is_a_mismatch_whatever_became_of_the_first(log: StreamLog) -> None:
    submit_once(log, "a")
    for once in (Once("key", "another"), Once("key", "another", instead_of="a")):
        assert submit_once(log, "b", once) == SubmitResult(Submission.MISMATCH, "a")
    assert ids(log, "b") == []


def test_other_idempotency_keys_and_none_have_nothing_to_do_with_each_other(log: StreamLog) -> None:
    assert submit_once(log, "a").submission is Submission.ACCEPTED
    assert submit_once(log, "b", Once("another", "body")) == SubmitResult(Submission.ACCEPTED, "b")
    assert submit(log, "c") is Submission.ACCEPTED


def test_a_repeated_submit_under_an_idempotency_key_is_a_duplicate(log: StreamLog) -> None:
    submit_once(log, "a")
    before = history(log)
    assert submit_once(log, "a", max_queued=1) == SubmitResult(Submission.DUPLICATE, "a")
    assert history(log) == before


def test_a_refused_submit_leaves_its_idempotency_key_free(log: StreamLog) -> None:
    submit(log, "first")
    assert submit_once(log, "a", max_queued=1) == SubmitResult(Submission.BUSY, "a")
    assert submit_once(log, "b") == SubmitResult(Submission.ACCEPTED, "b")
    assert submit_once(log, "c", max_queued=1) == SubmitResult(Submission.ATTACH, "b")


def test_an_idempotency_key_is_taken_from_the_request_that_was_named_and_from_no_other(log: StreamLog) -> None:
    instead = Once("key", "body", instead_of="a")
    submit_once(log, "a")
    end(log, "a", CANCELLED)
    assert submit_once(log, "b", instead) == SubmitResult(Submission.ACCEPTED, "b")
    assert submit_once(log, "c", instead) == SubmitResult(Submission.ATTACH, "b")
    assert submit_once(log, "b", instead) == SubmitResult(Submission.DUPLICATE, "b")
    assert ids(log, "c") == []


def test_of_simultaneous_submits_under_an_idempotency_key_one_is_accepted(log: StreamLog) -> None:
    outcomes: list[SubmitResult] = []
    logs = {uid: another(log) for uid in "abcdefgh"}
    start = threading.Barrier(len(logs))

    def ask(uid: str) -> None:
        start.wait()
        outcomes.append(submit_once(logs[uid], uid))

    threads = [threading.Thread(target=ask, args=(uid,)) for uid in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (accepted,) = [outcome.uid for outcome in outcomes if outcome.submission is Submission.ACCEPTED]
    attached = SubmitResult(Submission.ATTACH, accepted)
    assert [outcome for outcome in outcomes if outcome.uid != accepted or outcome == attached] == [attached] * 7
    assert log.alive(list(logs)) == {accepted}
    for each in logs.values():
        if isinstance(each, RedisLog):
            each.close()


def test_an_idempotency_key_lives_as_long_as_its_history_can(log: StreamLog) -> None:
    submit_once(log, "a", timeout_ms=SHORT_MS)
    until(lambda: submit_once(log, "b").submission is Submission.ACCEPTED)
    assert history(log, "a") == []


# submit under a quota

ACCEPTED, TOO_FAST, TOO_MANY = Submission.ACCEPTED, Submission.TOO_FAST, Submission.TOO_MANY


def submit_as(
    log: StreamLog, uid: str, quota: Quota, once: Once | None = None, *, max_queued: int = 100
) -> SubmitResult:
    event = Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams())
    log.limits = limits(max_queued=max_queued)
    return log.submit(uid, [event], once, quota=quota)


def in_one_minute(act: Callable[[str], T]) -> T:
    """Return what *act* brings with a fresh key, done again when a minute ended on its way."""
    for attempt in itertools.count():
        minute = int(time.time()) // 60
        brought = act(f"key{attempt}")
        if int(time.time()) // 60 == minute:
            return brought
    raise AssertionError


def test_a_key_has_so_many_requests_accepted_in_a_minute(log: StreamLog) -> None:
    def act(key: str) -> list[SubmitResult]:
        return [submit_as(log, f"{key}{i}", Quota(key, requests_per_minute=3)) for i in range(5)]

    outcomes = in_one_minute(act)
    assert [outcome.submission for outcome in outcomes] == [ACCEPTED] * 3 + [TOO_FAST] * 2
    assert [outcome.again_ms for outcome in outcomes[:3]] == [0] * 3
    assert all(0 < outcome.again_ms <= 60_000 for outcome in outcomes[3:])
    for outcome in outcomes[3:]:
        assert ids(log, outcome.uid) == []
    assert log.alive([outcome.uid for outcome in outcomes]) == {outcome.uid for outcome in outcomes[:3]}


def test_what_has_ended_still_counts_for_its_minute(log: StreamLog) -> None:
    def act(key: str) -> Submission:
        submit_as(log, f"{key}a", Quota(key, requests_per_minute=1))
        end(log, f"{key}a", FINISHED)
        return submit_as(log, f"{key}b", Quota(key, requests_per_minute=1)).submission

    assert in_one_minute(act) is TOO_FAST


def test_a_key_has_so_many_requests_that_have_not_ended(log: StreamLog) -> None:
    quota = Quota("key", concurrent_requests=2)
    assert [submit_as(log, uid, quota).submission for uid in "abc"] == [ACCEPTED, ACCEPTED, TOO_MANY]
    assert (submit_as(log, "c", quota).again_ms, ids(log, "c")) == (0, [])
    end(log, "a", CANCELLED)
    assert [submit_as(log, uid, quota).submission for uid in "cd"] == [ACCEPTED, TOO_MANY]
    end(log, "b", CANCELLED)
    end(log, "c", CANCELLED)
    assert [submit_as(log, uid, quota).submission for uid in "def"] == [ACCEPTED, ACCEPTED, TOO_MANY]


def test_a_request_that_the_detokenizer_ends_leaves_its_place_to_the_next(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    quota = Quota("key", concurrent_requests=1)
    submit_as(log, "a", quota)
    assert detokenizer.say(say_end("a", FINISHED))
    assert submit_as(log, "b", quota).submission is ACCEPTED


def test_keys_do_not_count_for_one_another(log: StreamLog) -> None:
    for key in ("k", "ke", "key"):
        assert submit_as(log, key, Quota(key, 1, 1)).submission is ACCEPTED
    assert submit(log, "nobody's") is ACCEPTED


def test_a_key_without_limits_is_not_held_up(log: StreamLog) -> None:
    for i in range(5):
        assert submit_as(log, f"r{i}", Quota("key")) == SubmitResult(ACCEPTED, f"r{i}")


def test_what_is_refused_for_another_reason_is_not_counted(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota, other = Quota(key, 1, 1), Quota(f"{key}'", 1, 1)
        held = Once(key, "body")
        submit_as(log, f"{key}held", Quota("another"), held)
        return [
            submit_as(log, f"{key}a", quota, max_queued=1).submission,
            submit_as(log, f"{key}a", quota, held).submission,
            submit_as(log, f"{key}a", quota, Once(key, "another")).submission,
            submit_as(log, f"{key}a", quota).submission,
            submit_as(log, f"{key}a", quota).submission,
            submit_as(log, f"{key}a", quota, held).submission,
            submit_as(log, f"{key}b", quota).submission,
            submit_as(log, f"{key}b", other).submission,
        ]

    assert in_one_minute(act) == [
        Submission.BUSY,
        Submission.ATTACH,
        Submission.MISMATCH,
        ACCEPTED,
        Submission.DUPLICATE,
        Submission.DUPLICATE,
        TOO_FAST,
        ACCEPTED,
    ]


def test_a_submit_that_is_refused_for_one_limit_is_not_counted_for_the_other(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=2, concurrent_requests=1)
        outcomes = [submit_as(log, f"{key}{i}", quota).submission for i in range(3)]
        end(log, f"{key}0", CANCELLED)
        return [*outcomes, *(submit_as(log, f"{key}{i}", quota).submission for i in (3, 4))]

    assert in_one_minute(act) == [ACCEPTED, TOO_MANY, TOO_MANY, ACCEPTED, TOO_FAST]


def test_who_is_past_the_quota_is_told_so_by_a_full_server_too_and_its_idempotency_key_stays_free(
    log: StreamLog,
) -> None:
    def act(key: str) -> list[Submission]:
        once = Once(key, "body")
        submit_as(log, f"{key}a", Quota(key, 1))
        refused = submit_as(log, f"{key}b", Quota(key, 1), once, max_queued=1)
        return [refused.submission, submit_once(log, f"{key}c", once).submission]

    assert in_one_minute(act) == [TOO_FAST, ACCEPTED]


def test_of_simultaneous_submits_no_more_are_accepted_than_may_be(log: StreamLog) -> None:
    logs = {uid: another(log) for uid in "abcdefgh"}
    outcomes: list[Submission] = []
    start = threading.Barrier(len(logs))

    def ask(uid: str) -> None:
        start.wait()
        outcomes.append(submit_as(logs[uid], uid, Quota("key", concurrent_requests=3)).submission)

    threads = [threading.Thread(target=ask, args=(uid,)) for uid in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count(ACCEPTED), outcomes.count(TOO_MANY)) == (3, 5)
    for each in logs.values():
        if isinstance(each, RedisLog):
            each.close()


# several submitted together


def submit_all(
    log: StreamLog,
    uid: str,
    count: int,
    once: Once | None = None,
    quota: Quota | None = None,
    *,
    timeout_ms: int = LONG_MS,
    max_queued: int = 100,
) -> SubmitResult:
    events = [
        Submitted(endpoint="e", frontend="web-0", prompt=f"prompt {i}", sampling=SamplingParams(seed=i))
        for i in range(count)
    ]
    log.limits = limits(timeout_ms=timeout_ms, max_queued=max_queued)
    return log.submit(uid, events, once, quota=quota)


def submitted_of(log: StreamLog, uid: str) -> Submitted:
    """Return the only event of a history."""
    (entry,) = history(log, uid)
    assert entry.id == SUBMITTED_ID
    event = decode(entry.fields)
    assert isinstance(event, Submitted)
    return event


def waiting(log: StreamLog) -> list[str]:
    """Return whom the tokenizers are handed, in order."""
    return [entry.fields["uid"] for entry in log.read(SUBMITTED, "tokenize-0", max_entries=2000, block_ms=0)]


def test_several_that_are_submitted_together_have_each_a_history_of_their_own(log: StreamLog) -> None:
    assert submit_all(log, "a", 3) == SubmitResult(ACCEPTED, "a")
    said = [submitted_of(log, uid) for uid in sibling_uids("a", 3)]
    assert [(event.prompt, event.sampling.seed, event.siblings) for event in said] == [
        ("prompt 0", 0, 3),
        ("prompt 1", 1, 3),
        ("prompt 2", 2, 3),
    ]
    assert {(event.ms, event.deadline_ms) for event in said} == {(said[0].ms, said[0].ms + LONG_MS)}
    assert history(log, "a") == []
    assert log.alive(["a", "a.0", "a.1", "a.2", "a.3"]) == {"a.0", "a.1", "a.2"}


def test_siblings_are_handed_to_the_tokenizers_in_their_order_and_together(log: StreamLog) -> None:
    submit(log, "first")
    submit_all(log, "a", 12)
    submit_all(log, "b", 2)
    entries = log.read(SUBMITTED, "tokenize-0", max_entries=100, block_ms=0)
    uids = ["first", *sibling_uids("a", 12), *sibling_uids("b", 2)]
    assert [entry.fields for entry in entries] == [{"uid": uid, "frontend": "web-0"} for uid in uids]


def test_siblings_go_each_their_own_way(log: StreamLog, detokenizer: Detokenizer) -> None:
    submit_all(log, "a", 4)
    refused, *others = log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0)
    assert end(log, "a.0", FAILED, consume=refused)
    assert all(tokenize(log, entry) for entry in others)
    taken = log.take(detokenizer.engine, 8, control_cursor="0-0")
    assert [entry.fields["uid"] for entry in taken.entries] == ["a.1", "a.2", "a.3"]
    assert taken.ended == ("a.0",)
    assert detokenizer.say(say_tokens("a.1", 1), say_tokens("a.2", 1), say_end("a.2", FINISHED))
    assert end(log, "a.3", CANCELLED)
    assert [ids(log, uid)[2:] for uid in ("a.1", "a.2", "a.3")] == [["1-0"], ["1-0", SEAL], [SEAL]]
    assert log.living() == ["a.1"]
    assert log.frontends_of(["a.0", "a.1", "a"]) == {"a.0": "web-0", "a.1": "web-0", "a": ""}


def test_siblings_are_overdue_each(log: StreamLog) -> None:
    submit_all(log, "a", 3, timeout_ms=1)
    submit(log, "b")
    until(lambda: log.overdue(9) == ["a.0", "a.1", "a.2"])
    assert log.overdue(2) == ["a.0", "a.1"]
    end(log, "a.1", FAILED)
    assert log.overdue(9) == ["a.0", "a.2"]


def test_a_single_one_in_a_sequence_is_submitted_as_by_itself(log: StreamLog) -> None:
    assert submit_all(log, "a", 1) == SubmitResult(ACCEPTED, "a")
    assert (submitted_of(log, "a").siblings, history(log, "a.0")) == (1, [])
    assert submit(log, "a") is Submission.DUPLICATE


def test_how_many_siblings_there_are_is_said_by_the_commit(log: StreamLog) -> None:
    """A request that is sent again alone may have had siblings."""
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), siblings=9)
    log.submit("a", [event])
    assert submitted_of(log, "a").siblings == 1
    assert "siblings" not in history(log, "a")[0].fields


def test_a_repeated_submit_of_siblings_is_a_duplicate_and_changes_nothing(log: StreamLog) -> None:
    submit_all(log, "a", 3)
    before = log.histories(sibling_uids("a", 3))
    for max_queued in (3, 100):
        assert submit_all(log, "a", 3, max_queued=max_queued) == SubmitResult(Submission.DUPLICATE, "a")
    assert log.histories(sibling_uids("a", 3)) == before
    assert waiting(log) == ["a.0", "a.1", "a.2"]


@pytest.mark.parametrize("gone", [0, 2])
def test_a_repeated_submit_of_siblings_of_which_one_is_gone_is_a_duplicate_too(log: StreamLog, gone: int) -> None:
    submit_all(log, "a", 3)
    log.limits = limits(retention_ms=1)
    end(log, f"a.{gone}", CANCELLED)
    until(lambda: history(log, f"a.{gone}") == [])
    before = log.histories(sibling_uids("a", 3))
    outcomes: list[object] = []
    try:
        outcomes.append(submit_all(log, "a", 3))
    except LogError as error:  # said in the middle of it
        outcomes.append(error)
    assert outcomes == [SubmitResult(Submission.DUPLICATE, "a")]
    assert log.histories(sibling_uids("a", 3)) == before
    assert len(waiting(log)) == 3


def test_siblings_are_refused_when_there_is_no_room_for_all(log: StreamLog) -> None:
    accept(log, "first")
    submit(log, "second")
    assert submit_all(log, "a", 4, max_queued=5) == SubmitResult(Submission.BUSY, "a")
    assert log.histories(sibling_uids("a", 4)) == [[]] * 4
    assert log.living() == ["first", "second"]
    assert submit_all(log, "a", 3, max_queued=5) == SubmitResult(ACCEPTED, "a")
    assert submit_all(log, "b", 1, max_queued=5) == SubmitResult(Submission.BUSY, "b")
    assert waiting(log) == ["second", "a.0", "a.1", "a.2"]


def test_more_siblings_than_may_wait_at_all_are_always_refused(log: StreamLog) -> None:
    assert submit_all(log, "a", 4, max_queued=3) == SubmitResult(Submission.BUSY, "a")
    assert submit_all(log, "a", 3, max_queued=3) == SubmitResult(ACCEPTED, "a")


def test_siblings_have_one_idempotency_key_under_the_uid_as_which_they_were_submitted(log: StreamLog) -> None:
    assert submit_all(log, "a", 3, ONCE) == SubmitResult(ACCEPTED, "a")
    assert submit_all(log, "b", 3, ONCE) == ATTACHED_TO_A
    assert submit_all(log, "b", 3, Once("key", "another")) == SubmitResult(Submission.MISMATCH, "a")
    assert submit_all(log, "b", 3, Once("key", "body", instead_of="a.0")) == ATTACHED_TO_A
    assert submit_all(log, "a", 3, ONCE) == SubmitResult(Submission.DUPLICATE, "a")
    assert waiting(log) == ["a.0", "a.1", "a.2"]
    assert submit_all(log, "b", 3, Once("key", "body", instead_of="a")) == SubmitResult(ACCEPTED, "b")
    assert submit_all(log, "c", 3, ONCE) == SubmitResult(Submission.ATTACH, "b")
    assert waiting(log) == ["b.0", "b.1", "b.2"]


def test_refused_siblings_leave_their_idempotency_key_free(log: StreamLog) -> None:
    assert submit_all(log, "a", 3, ONCE, max_queued=2) == SubmitResult(Submission.BUSY, "a")
    assert submit_once(log, "b") == SubmitResult(ACCEPTED, "b")


def test_of_simultaneous_submits_of_siblings_under_an_idempotency_key_one_is_accepted_whole(log: StreamLog) -> None:
    logs = {uid: another(log) for uid in "abcdefgh"}
    outcomes: list[SubmitResult] = []
    start = threading.Barrier(len(logs))

    def ask(uid: str) -> None:
        start.wait()
        outcomes.append(submit_all(logs[uid], uid, 5, ONCE))

    threads = [threading.Thread(target=ask, args=(uid,)) for uid in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (accepted,) = [outcome.uid for outcome in outcomes if outcome.submission is ACCEPTED]
    assert outcomes.count(SubmitResult(Submission.ATTACH, accepted)) == 7
    assert waiting(log) == list(sibling_uids(accepted, 5))
    for each in logs.values():
        if isinstance(each, RedisLog):
            each.close()


def test_siblings_count_once_for_their_minute(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=2)
        return [submit_all(log, f"{key}{i}", 5, None, quota).submission for i in range(3)]

    assert in_one_minute(act) == [ACCEPTED, ACCEPTED, TOO_FAST]


def test_siblings_run_each_for_itself_but_are_accepted_where_one_would_be(log: StreamLog) -> None:
    quota = Quota("key", concurrent_requests=4)
    submit_all(log, "a", 3, None, quota)
    assert submit_all(log, "b", 8, None, quota) == SubmitResult(ACCEPTED, "b")
    for uid in ("a.0", "a.1", "a.2", "b.0", "b.1", "b.2", "b.3"):
        assert submit_all(log, "c", 2, None, quota) == SubmitResult(TOO_MANY, "c")
        end(log, uid, CANCELLED)
    assert submit_as(log, "c", quota).submission is TOO_MANY  # four are left
    end(log, "b.4", CANCELLED)
    assert [submit_all(log, uid, 2, None, quota).submission for uid in "cd"] == [ACCEPTED, TOO_MANY]
    assert sorted(log.living()) == ["b.5", "b.6", "b.7", "c.0", "c.1"]


def test_siblings_that_were_refused_are_not_counted(log: StreamLog) -> None:
    def act(key: str) -> list[Submission]:
        quota = Quota(key, requests_per_minute=1, concurrent_requests=1)
        return [
            submit_all(log, key, 3, None, quota, max_queued=2).submission,
            submit_all(log, key, 3, None, quota).submission,
            submit_all(log, key, 3, None, quota).submission,
            submit_all(log, f"{key}'", 3, None, quota).submission,
        ]

    assert in_one_minute(act) == [Submission.BUSY, ACCEPTED, Submission.DUPLICATE, TOO_FAST]


# tokenized


def test_tokenized_writes_the_tokens_and_hands_the_request_to_the_engines(log: StreamLog) -> None:
    submit(log, frontend="web-3")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert tokenize(log, entry)
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID]
    assert events(log)[1] == Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0")
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    assert [entry.fields for entry in taken.entries] == [{"uid": "a", "frontend": "web-3"}]


def test_a_repeated_tokenized_is_lost_and_changes_nothing(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert tokenize(log, entry)
    before = history(log)
    assert not tokenize(log, entry)
    assert history(log) == before
    assert len(log.take(own(log, "generate-0"), 8, control_cursor="0-0").entries) == 1


def test_tokenized_consumes_its_entry(log: StreamLog) -> None:
    accept(log, "a")
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert submit(log, "b", max_queued=2) is Submission.ACCEPTED


def test_tokenized_of_an_entry_that_nobody_read_is_lost_and_the_entry_stays(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=2, block_ms=0)
    submit(log, "c")
    unread = Entry(f"{parse_id(second.id)[0] + 10**9}-0", first.fields)
    assert not tokenize(log, unread)
    assert read_one(log, SUBMITTED, "tokenize-0").fields["uid"] == "c"


def test_tokenized_after_a_cancel_consumes_the_entry_and_writes_nothing(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    end(log, "a", CANCELLED)
    assert not tokenize(log, entry)
    assert ids(log) == [SUBMITTED_ID, SEAL]
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert log.take(own(log, "generate-0"), 8, control_cursor="0-0").entries == ()


# take and wait


def test_take_gives_at_most_so_many_and_in_order(log: StreamLog) -> None:
    accept(log, "a", "b", "c")
    owner = own(log, "generate-0")
    assert [e.fields["uid"] for e in log.take(owner, 2, control_cursor="0-0").entries] == ["a", "b"]
    assert [e.fields["uid"] for e in log.take(owner, 2, control_cursor="0-0").entries] == ["c"]


def test_take_of_none_takes_nothing(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    assert log.take(owner, 0, control_cursor="0-0").entries == ()
    assert len(log.take(owner, 1, control_cursor="0-0").entries) == 1


def test_taken_entries_stay_pending_until_a_step_ends_them(log: StreamLog) -> None:
    accept(log, "a", "b")
    owner = own(log, "generate-0")
    first, second = log.take(owner, 8, control_cursor="0-0").entries
    assert log.pending(TOKENIZED, "generate-0") == [first, second]
    step(log, owner, 1, first.id)
    assert log.pending(TOKENIZED, "generate-0") == [second]


def test_take_is_fenced_and_leaves_the_entries_to_the_next_owner(log: StreamLog) -> None:
    accept(log, "a")
    zombie = own(log, "generate-0")
    owner = own_after(log, zombie)
    with pytest.raises(Fenced):
        log.take(zombie, 8, control_cursor="0-0")
    assert log.pending(TOKENIZED, "generate-0") == []
    assert len(log.take(owner, 8, control_cursor="0-0").entries) == 1


def test_owners_of_two_slots_never_take_the_same_entry(log: StreamLog) -> None:
    uids = [f"r{i}" for i in range(20)]
    accept(log, *uids)
    owners = [own(log, "generate-0"), own(log, "generate-1")]
    shares: dict[str, list[str]] = {owner.slot: [] for owner in owners}

    def take_all(owner: Owner, mine: StreamLog) -> None:
        while entries := mine.take(owner, 1, control_cursor="0-0").entries:
            shares[owner.slot] += [entry.fields["uid"] for entry in entries]

    threads = [threading.Thread(target=take_all, args=(owner, another(log))) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*shares.values())) == sorted(uids)


def test_the_cursor_of_take_does_not_pass_over_what_was_left(log: StreamLog) -> None:
    accept(log, "a", "b")
    owner = own(log, "generate-0")
    nothing = log.take(owner, 0, control_cursor="0-0")
    first = log.take(owner, 1, control_cursor="0-0")
    second = log.take(owner, 1, control_cursor="0-0")
    assert parse_id(nothing.cursor) < parse_id(first.entries[0].id)
    assert first.cursor == first.entries[0].id
    assert second.cursor == second.entries[0].id
    assert log.take(owner, 1, control_cursor="0-0").cursor == second.cursor


def test_take_and_step_say_once_who_was_ended_elsewhere(log: StreamLog) -> None:
    accept(log, "a", "b")
    owner = own(log, "generate-0")
    end(log, "a", CANCELLED)
    taken = log.take(owner, 8, control_cursor="0-0")
    assert taken.ended == ("a",)
    assert log.take(owner, 8, control_cursor=taken.control_cursor).ended == ()
    end(log, "b", CANCELLED)
    committed = step(log, owner, 1, cursor=taken.control_cursor)
    assert committed.ended == ("b",)
    assert step(log, owner, 2, cursor=committed.control_cursor).ended == ()


@pytest.mark.parametrize("what", ["a new request", "an end"])
def test_wait_returns_when_something_new_is_there(log: StreamLog, what: str) -> None:
    accept(log, "a")
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    waiting = another(log)
    thread = threading.Thread(target=lambda: waiting.wait(taken.cursor, taken.control_cursor, block_ms=LONG_MS))
    thread.start()
    if what == "an end":
        end(log, "a", CANCELLED)
    else:
        accept(log, "b")
    thread.join(1.5)  # less than the longest block
    assert not thread.is_alive()


@pytest.mark.parametrize("block_ms", [0, 1])
def test_wait_returns_when_its_time_is_over(log: StreamLog, block_ms: int) -> None:
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    waiting = another(log)
    thread = threading.Thread(target=lambda: waiting.wait(taken.cursor, taken.control_cursor, block_ms=block_ms))
    thread.start()
    thread.join(1.5)
    assert not thread.is_alive()


# step


def test_a_step_reads_as_it_was_said_under_epoch_and_number(log: StreamLog) -> None:
    owner = own_after(log, own(log, "generate-0"))
    step(log, owner, 7)
    entry = read_one(log, STEPS, "detokenize-0")
    assert entry.id == "2-7"
    assert decode(entry.fields).model_copy(update={"ms": 0}) == step_of(n=7)
    assert int(entry.fields["ms"]) > 0


def test_a_step_is_fenced(log: StreamLog) -> None:
    accept(log, "a")
    zombie = own(log, "generate-0")
    (entry,) = log.take(zombie, 8, control_cursor="0-0").entries
    own_after(log, zombie)
    with pytest.raises(Fenced):
        step(log, zombie, 1, entry.id)
    assert log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0) == []
    assert log.pending(TOKENIZED, "generate-0") == [entry]


def test_a_retried_step_leaves_one_entry_and_answers_the_same(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    (entry,) = log.take(owner, 8, control_cursor="0-0").entries
    end(log, "a", CANCELLED)
    first = step(log, owner, 1, entry.id)
    assert step(log, owner, 1, entry.id) == first
    assert len(log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0)) == 1


def test_a_step_of_an_older_number_is_not_appended(log: StreamLog) -> None:
    owner = own(log, "generate-0")
    step(log, owner, 2)
    assert step(log, owner, 1).steps_length == 1


def test_a_step_deletes_the_entries_that_ended(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    (entry,) = log.take(owner, 8, control_cursor="0-0").entries
    assert submit(log, "b", max_queued=1) is Submission.BUSY
    step(log, owner, 1, entry.id)
    assert submit(log, "b", max_queued=1) is Submission.ACCEPTED


def test_a_step_returns_how_many_wait_for_the_detokenizer(log: StreamLog, detokenizer: Detokenizer) -> None:
    entry = detokenizer.read_step()
    assert step(log, detokenizer.engine, 2).steps_length == 2
    detokenizer.commit(entry)
    assert step(log, detokenizer.engine, 3).steps_length == 2


def test_a_step_says_whether_there_may_be_something_to_take(log: StreamLog) -> None:
    owner = own(log, "generate-0")
    assert step(log, owner, 1).newest == "0-0"
    accept(log, "a", "b")
    taken = log.take(owner, 8, control_cursor="0-0")
    assert step(log, owner, 2).newest == taken.cursor == taken.entries[-1].id
    accept(log, "c")
    assert parse_id(step(log, owner, 3).newest) > parse_id(taken.cursor)
    entries = [*taken.entries, *log.take(owner, 8, control_cursor="0-0").entries]
    assert step(log, owner, 4, *(entry.id for entry in entries)).newest == "0-0"


def test_a_step_keeps_the_lease(log: StreamLog) -> None:
    owner = own(log, "generate-0", lease_ms=LONG_MS)
    log.step(owner, 1, step_of(), ended=(), control_cursor="0-0", lease_ms=10 * LONG_MS)
    assert log.lease("generate-0").ttl_ms > LONG_MS


# flush


def test_take_and_step_say_once_that_a_flush_was_asked_for(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    assert log.take(owner, 0, control_cursor="0-0").flush == ""
    first = log.flush("web-0")
    taken = log.take(owner, 8, control_cursor="0-0")
    assert (taken.flush, taken.ended) == (first, ())
    assert log.take(owner, 8, control_cursor=taken.control_cursor).flush == ""
    second = log.flush("web-0")
    committed = step(log, owner, 1, cursor=taken.control_cursor)
    assert (committed.flush, committed.ended) == (second, ())
    assert step(log, owner, 2, cursor=committed.control_cursor).flush == ""


def test_every_engine_hears_of_a_flush_and_the_last_one_stands_for_all(log: StreamLog) -> None:
    flushes = [log.flush("web-0") for _ in range(3)]
    assert [parse_id(flush) for flush in flushes] == sorted({parse_id(flush) for flush in flushes})
    for slot in ("generate-0", "generate-1"):
        assert log.take(own(log, slot), 0, control_cursor="0-0").flush == flushes[-1]


def test_a_flush_among_ends_hides_none_of_them(log: StreamLog) -> None:
    accept(log, "a", "b")
    end(log, "a", CANCELLED)
    flush = log.flush("web-0")
    end(log, "b", CANCELLED)
    taken = log.take(own(log, "generate-0"), 0, control_cursor="0-0")
    assert (taken.ended, taken.flush) == (("a", "b"), flush)


def test_wait_returns_when_a_flush_was_asked_for(log: StreamLog) -> None:
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    waiting = another(log)
    thread = threading.Thread(target=lambda: waiting.wait(taken.cursor, taken.control_cursor, block_ms=LONG_MS))
    thread.start()
    log.flush("web-0")
    thread.join(1.5)  # less than the longest block
    assert not thread.is_alive()


# produced


def test_produced_writes_histories_and_consumes_the_step(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b")
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1))
    assert detokenizer.say(say_tokens("a", 2), say_end("b", FINISHED))
    assert ids(log, "a") == [SUBMITTED_ID, TOKENIZED_ID, "1-0", "2-0"]
    assert ids(log, "b") == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert events(log, "a")[-1] == say_tokens("a", 2).event
    assert events(log, "b")[-1] == FINISHED
    assert log.pending(STEPS, "detokenize-0") == []


def test_produced_is_fenced(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    entry = detokenizer.read_step()
    own_after(log, detokenizer.owner)
    with pytest.raises(Fenced):
        detokenizer.commit(entry, say_tokens("a", 1))
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID]
    assert log.pending(STEPS, "detokenize-0") == [entry]


def test_a_repeated_produced_is_lost_and_changes_nothing(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    start = log.open_replies("web-0")
    entry = detokenizer.read_step()
    assert detokenizer.commit(entry, say_tokens("a", 1))
    before = history(log)
    assert not detokenizer.commit(entry, say_tokens("a", 1))
    assert history(log) == before
    assert len(replies_after(log, start)) == 1


@pytest.mark.parametrize("refused", ["sealed", "there already", "expired"])
def test_a_refused_row_loses_no_other(log: StreamLog, detokenizer: Detokenizer, refused: str) -> None:
    accept(log, "a", "b", "c")
    match refused:
        case "sealed":
            end(log, "b", CANCELLED)
        case "there already":
            detokenizer.say(say_tokens("b", 1))
        case "expired":
            log.limits = limits(retention_ms=1)
            end(log, "b", CANCELLED)
            until(lambda: history(log, "b") == [])
    before = history(log, "b")
    assert detokenizer.say(say_tokens("a", 1), say_tokens("b", 1), say_tokens("c", 1))
    assert ids(log, "a")[-1] == ids(log, "c")[-1] == "1-0"
    assert history(log, "b") == before


def test_produced_of_an_end_seals_clears_live_and_lets_the_history_expire(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a", "b")
    log.limits = limits(retention_ms=SHORT_MS)
    detokenizer.say(say_end("a", FINISHED))
    assert log.alive(["a", "b"]) == {"b"}
    until(lambda: history(log, "a") == [])
    assert history(log, "b") != []


def test_produced_tells_the_engine_only_of_ends_it_does_not_know(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b", "c")
    end(log, "c", CANCELLED)
    detokenizer.say(
        say_end("a", FINISHED), say_end("b", FINISHED, tell_engine=True), say_end("c", FINISHED, tell_engine=True)
    )
    assert told(log) == ("c", "b")


def test_replies_carry_what_was_said_with_n_and_in_order(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b")
    start = log.open_replies("web-0")
    other = log.open_replies("web-1")
    mark: Mark = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w")
    detokenizer.say(
        Produced("a", "0-3", 0, mark, "web-0"), say_tokens("a", 1), say_tokens("b", 1, frontend="web-1", text="ü\n")
    )
    detokenizer.say(say_tokens("a", 2), say_end("a", FINISHED))
    assert replies_after(log, start) == [
        Reply("a", "1-0", 1, TokensProduced(count=1, tokens=(41,), text="x", step="1-1")),
        Reply("a", "2-0", 2, TokensProduced(count=1, tokens=(42,), text="x", step="1-2")),
        Reply("a", SEAL, 2, FINISHED),
    ]
    assert replies_after(log, other, "web-1") == [
        Reply("b", "1-0", 1, TokensProduced(count=1, tokens=(41,), text="ü\n", step="1-1"))
    ]
    assert events(log, "a")[2] == mark


def test_replies_to_a_frontend_that_is_gone_are_dropped(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    assert detokenizer.say(say_tokens("a", 1))
    assert end(log, "a", CANCELLED)
    assert ids(log)[-2:] == ["1-0", SEAL]
    assert log.read_replies("web-0", "0-0", block_ms=0) == ("0-0", [])


def test_a_replies_stream_keeps_only_the_last_entries(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    start = log.open_replies("web-0")
    for n in range(1, REPLY_CAP + 301):
        detokenizer.say(say_tokens("a", n))
    replies = replies_after(log, start)
    assert REPLY_CAP <= len(replies) + 1 <= REPLY_CAP + 100  # Redis trims whole nodes of 100
    assert replies[-1].n == REPLY_CAP + 300


# end


def test_the_first_seal_wins(log: StreamLog) -> None:
    submit(log)
    assert end(log, "a", CANCELLED)
    before = history(log)
    assert not end(log, "a", CANCELLED)
    assert not end(log, "a", FAILED)
    assert history(log) == before
    assert before[-1].id == SEAL


def test_nothing_is_appended_after_the_seal(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    end(log, "a", CANCELLED)
    before = history(log)
    detokenizer.say(say_tokens("a", 1), say_end("a", FINISHED), Produced("a", "18446744073709551615-1", 1, FAILED, ""))
    assert history(log) == before


def test_end_reads_the_number_of_tokens_off_the_history(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b", "c")
    detokenizer.say(say_tokens("a", 1))
    detokenizer.say(say_tokens("a", 2), say_tokens("b", 1))
    detokenizer.say(Produced("a", "2-1", 2, Admitted(engine="g", epoch=1, step=1, fingerprint="w"), "web-0"))
    end(log, "a", CANCELLED)
    end(log, "b", FINISHED)
    end(log, "c", FAILED)
    assert events(log, "a")[-1] == CANCELLED.model_copy(update={"n": 2})
    assert events(log, "b")[-1] == FINISHED.model_copy(update={"n": 1})
    assert events(log, "c")[-1] == FAILED


def test_end_tells_frontend_and_engines_and_clears_live(log: StreamLog) -> None:
    accept(log, "a", "b")
    start = log.open_replies("web-0")
    end(log, "a", FAILED)
    end(log, "a", CANCELLED)
    ((_, replies),) = [log.read_replies("web-0", start, block_ms=0)]
    assert [(r.uid, r.entry_id, r.n, r.event.model_copy(update={"ms": 0})) for r in replies] == [("a", SEAL, 0, FAILED)]
    assert told(log) == ("a",)
    assert log.alive(["a", "b"]) == {"b"}


def test_an_answer_of_the_tokenizer_ends_a_request_and_reaches_its_frontend_whole(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    submit(log)
    submit(log, "b")
    start = log.open_replies("web-0")
    answered = Answered(token_ids=(5, 6), pieces=("a,b", "bytes:\\xe4"), text='{"a": "ü\\n"}', by="tokenize-0")
    assert end(log, "a", answered, consume=read_one(log, SUBMITTED, "tokenize-0"))
    assert events(log, "a")[-1] == answered and log.alive(["a", "b"]) == {"b"}
    assert log.backlog(SUBMITTED) == 1 and log.backlog(TOKENIZED) == 0
    detokenizer.say(say_end("b", answered))  # nobody does, but whoever seals says what can be read
    replies = [dataclasses.replace(r, event=r.event.model_copy(update={"ms": 0})) for r in replies_after(log, start)]
    assert replies == [Reply("a", SEAL, 0, answered), Reply("b", SEAL, 2, answered)]


def test_end_consumes_the_entry_that_it_answers(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert end(log, "a", FAILED, consume=entry)
    assert not end(log, "a", FAILED, consume=entry)
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert submit(log, "b", max_queued=1) is Submission.ACCEPTED


def test_end_of_a_request_that_ended_elsewhere_still_consumes_the_entry(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    end(log, "a", CANCELLED)
    assert not end(log, "a", FAILED, consume=entry)
    assert log.pending(SUBMITTED, "tokenize-0") == []


def test_end_lets_the_history_expire_after_the_retention(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    log.limits = limits(retention_ms=SHORT_MS)
    end(log, "a", CANCELLED)
    until(lambda: history(log, "a") == [])
    assert history(log, "b") != []


def test_end_of_an_unknown_request_makes_no_history(log: StreamLog) -> None:
    assert not end(log, "nobody", CANCELLED)
    assert history(log, "nobody") == []
    assert told(log) == ()


# readers, and requests that their clients left


def abandon(log: StreamLog, uid: str = "a", *, once: Once | None = None, attached: bool = False) -> bool:
    return log.abandon(uid, CANCELLED, frontend="web-0", once=once, attached=attached)


def test_a_request_that_nobody_reads_is_abandoned_as_it_is_ended(log: StreamLog, detokenizer: Detokenizer) -> None:
    cursor = log.open_replies("web-0")
    accept(log, "a")
    detokenizer.say(say_tokens("a", 1))
    assert abandon(log)
    assert not abandon(log)
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert events(log)[-1] == CANCELLED.model_copy(update={"n": 1})
    assert [(reply.uid, reply.n) for reply in replies_after(log, cursor)] == [("a", 1), ("a", 1)]
    assert told(log) == ("a",)
    assert log.alive(["a"]) == set()


def test_a_request_that_somebody_reads_is_not_abandoned_but_can_be_ended(log: StreamLog) -> None:
    accept(log, "a", "b")
    log.reading(["a", "b"], "web-1")
    log.reading(["a"], "web-2")
    log.stop_reading("a", "web-1")
    log.stop_reading("a", "web-1")
    log.stop_reading("a", "nobody")
    assert not abandon(log, "a")
    assert log.alive(["a", "b"]) == {"a", "b"}
    assert log.read_by_others(["a", "b", "c"]) == {"a", "b"}
    log.stop_reading("a", "web-2")
    assert log.read_by_others(["a", "b", "c"]) == {"b"}
    assert log.read_by_others([]) == set()
    assert abandon(log, "a")
    assert not abandon(log, "b")
    assert end(log, "b", CANCELLED)


def test_who_came_to_a_request_abandons_it_only_after_the_client_that_sent_it(log: StreamLog) -> None:
    submit_once(log, "a")
    log.reading(["a"], "web-1")
    assert not abandon(log, once=ONCE, attached=True)
    log.stop_reading("a", "web-1")
    assert not abandon(log, once=ONCE, attached=True)
    log.reading(["a"], "web-1")
    for _ in range(2):
        assert not abandon(log, once=ONCE)
    assert submit_once(log, "b") == ATTACHED_TO_A
    assert submit_once(log, "b", Once("key", "another")).submission is Submission.MISMATCH
    assert not abandon(log, once=ONCE, attached=True)
    assert log.alive(["a"]) == {"a"}
    log.stop_reading("a", "web-1")
    assert not abandon(log, "b", once=ONCE, attached=True)
    assert abandon(log, once=ONCE, attached=True)
    assert ids(log) == [SUBMITTED_ID, SEAL]


def test_who_takes_an_idempotency_key_has_not_left(log: StreamLog) -> None:
    submit_once(log, "a")
    log.reading(["a"], "web-1")
    abandon(log, once=ONCE)
    end(log, "a", CANCELLED)
    submit_once(log, "b", Once("key", "body", instead_of="a"))
    assert not abandon(log, "b", once=ONCE, attached=True)
    assert abandon(log, "b", once=ONCE)


def test_siblings_are_abandoned_each_and_those_that_somebody_reads_are_not(log: StreamLog) -> None:
    submit_all(log, "a", 4, ONCE)
    end(log, "a.3", FINISHED)
    log.reading(["a.1"], "web-1")
    assert [abandon(log, uid, once=ONCE) for uid in sibling_uids("a", 4)] == [True, False, True, False]
    assert [abandon(log, uid, once=ONCE) for uid in sibling_uids("a", 4)] == [False] * 4
    assert [ids(log, uid)[1:] for uid in sibling_uids("a", 4)] == [[SEAL], [], [SEAL], [SEAL]]
    assert log.living() == ["a.1"]


def test_who_came_to_siblings_abandons_them_only_after_the_client_that_sent_them(log: StreamLog) -> None:
    uids = sibling_uids("a", 3)
    submit_all(log, "a", 3, ONCE)
    assert [abandon(log, uid, once=ONCE, attached=True) for uid in uids] == [False] * 3
    log.reading(uids, "web-1")
    for _ in range(2):
        assert [abandon(log, uid, once=ONCE) for uid in uids] == [False] * 3
    assert submit_all(log, "b", 3, ONCE) == ATTACHED_TO_A
    assert submit_all(log, "b", 3, Once("key", "another")) == SubmitResult(Submission.MISMATCH, "a")
    assert set(log.living()) == set(uids)
    for uid in uids:
        log.stop_reading(uid, "web-1")
        assert abandon(log, uid, once=ONCE, attached=True)
        assert not abandon(log, uid, once=ONCE, attached=True)
    assert log.living() == []


def test_who_leaves_one_of_several_siblings_to_its_readers_leaves_them_all(log: StreamLog) -> None:
    """Whoever came to them leaves before the client that sent them has said that of each, or never does."""
    submit_all(log, "a", 2, ONCE)
    log.reading(["a.0", "a.1"], "web-1")
    log.reading(["a.0"], "web-2")
    assert not abandon(log, "a.0", once=ONCE)
    for uid in ("a.0", "a.1"):
        log.stop_reading(uid, "web-1")
    assert not abandon(log, "a.0", once=ONCE, attached=True)
    assert abandon(log, "a.1", once=ONCE, attached=True)
    assert not abandon(log, "a.1", once=ONCE)
    log.stop_reading("a.0", "web-2")
    assert abandon(log, "a.0", once=ONCE, attached=True)


def test_a_reader_of_one_sibling_keeps_the_others_from_nobody(log: StreamLog) -> None:
    submit_all(log, "a", 2, ONCE)
    log.reading(["a.1"], "web-1")
    assert abandon(log, "a.0", once=ONCE)
    assert not abandon(log, "a.1", once=ONCE)
    log.stop_reading("a.1", "web-1")
    assert abandon(log, "a.1", once=ONCE)


@pytest.mark.parametrize("other", ["aa.0", "a0.0", "aa", "b.0"])
def test_siblings_of_others_are_not_left_with_these(log: StreamLog, other: str) -> None:
    submit_all(log, "a", 2, ONCE)
    submit_all(log, other.partition(".")[0], 2 if "." in other else 1)
    log.reading([other], "web-1")
    assert not abandon(log, other, once=ONCE)  # under a key that is not its own
    assert not abandon(log, "a.0", once=ONCE, attached=True)
    log.reading(["a.0"], "web-1")
    assert not abandon(log, "a.0", once=ONCE)
    log.stop_reading(other, "web-1")
    assert not abandon(log, other, once=ONCE, attached=True)
    assert abandon(log, other, once=ONCE)


def test_siblings_that_take_an_idempotency_key_have_not_been_left(log: StreamLog) -> None:
    submit_all(log, "a", 2, ONCE)
    log.reading(["a.0", "a.1"], "web-1")
    for uid in ("a.0", "a.1"):
        abandon(log, uid, once=ONCE)
    end(log, "a.0", CANCELLED)
    submit_all(log, "b", 2, Once("key", "body", instead_of="a"))
    assert [abandon(log, uid, once=ONCE, attached=True) for uid in ("b.0", "b.1")] == [False] * 2
    log.stop_reading("a.1", "web-1")
    assert not abandon(log, "a.1", once=ONCE, attached=True)  # the key is another's by now
    assert [abandon(log, uid, once=ONCE) for uid in ("a.1", "b.0", "b.1")] == [True] * 3


def test_a_request_that_has_no_idempotency_key_is_nobodys_to_abandon_but_its_senders(log: StreamLog) -> None:
    submit(log)
    log.reading(["a"], "web-1")
    assert not abandon(log)
    log.stop_reading("a", "web-1")
    assert not abandon(log, attached=True)
    assert abandon(log)


def test_an_unknown_request_is_neither_read_nor_abandoned(log: StreamLog) -> None:
    log.reading(["a"], "web-1")
    assert not abandon(log)
    accept(log, "a")
    assert abandon(log)
    assert told(log) == ("a",)


# dead letters


KILLED = Failed(status=500, code="killed_its_worker", message="It killed its worker three times.")


def bury(log: StreamLog, uid: str = "a", *, deaths: int = 3, error: str = "exit code -11") -> bool:
    letter = DeadLetter(stage="generate", entry={"uid": uid, "frontend": "web-0"}, deaths=deaths, error=error)
    return log.end(uid, KILLED, frontend="web-0", dead=letter)


def test_a_dead_letter_says_what_happened_and_brings_a_copy_of_the_sealed_history(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a")
    detokenizer.say(say_tokens("a", 1, text='"ü\n'))
    assert bury(log)
    (letter,) = log.dead_letters(9)
    assert {name: letter.fields[name] for name in ("uid", "stage", "deaths", "error")} == {
        "uid": "a",
        "stage": "generate",
        "deaths": "3",
        "error": "exit code -11",
    }
    assert json.loads(letter.fields["entry"]) == {"uid": "a", "frontend": "web-0"}
    assert copied_history(letter) == history(log)
    assert letter.fields["ms"] == history(log)[-1].fields["ms"]
    assert "history_cut" not in letter.fields
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID, "1-0", SEAL]
    assert events(log)[-1] == KILLED.model_copy(update={"n": 1})


def test_a_repeated_end_writes_no_second_letter(log: StreamLog) -> None:
    submit(log)
    assert bury(log)
    assert not bury(log)
    assert len(log.dead_letters(9)) == 1


def test_an_end_that_comes_too_late_writes_no_letter(log: StreamLog) -> None:
    submit(log)
    end(log, "a", CANCELLED)
    assert not bury(log, "a")
    assert not bury(log, "nobody")
    assert log.dead_letters(9) == []


def test_an_end_without_a_letter_writes_none(log: StreamLog) -> None:
    submit(log)
    assert end(log, "a", FAILED)
    assert log.dead_letters(9) == []


def test_dead_letters_come_newest_first_and_page_by_page(log: StreamLog) -> None:
    for uid in ("a", "b", "c"):
        submit(log, uid)
        bury(log, uid)
    first = log.dead_letters(2)
    assert [letter.fields["uid"] for letter in first] == ["c", "b"]
    rest = log.dead_letters(2, before=first[-1].id)
    assert [letter.fields["uid"] for letter in rest] == ["a"]
    assert log.dead_letters(2, before=rest[-1].id) == []


def test_a_dead_letter_is_dropped_once_and_alone(log: StreamLog) -> None:
    for uid in ("a", "b"):
        submit(log, uid)
        bury(log, uid)
    newest, oldest = log.dead_letters(9)
    assert log.drop_dead(oldest.id)
    assert not log.drop_dead(oldest.id)
    assert log.dead_letters(9) == [newest]


def test_a_copy_is_cut_to_its_first_entry_and_as_many_of_the_last_as_fit(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a")
    for n in range(1, 41):
        detokenizer.say(say_tokens("a", n, text="x" * 4000))
    assert bury(log)
    (letter,) = log.dead_letters(1)
    whole, copy = history(log), copied_history(letter)
    assert copy == [whole[0], *whole[-len(copy) + 1 :]]
    assert int(letter.fields["history_cut"]) == len(whole) - len(copy) > 0
    assert 65536 - 5000 < len(letter.fields["history"].encode()) <= 65536


def test_a_copy_goes_without_the_first_entry_when_that_alone_is_too_large(log: StreamLog) -> None:
    event = Submitted(endpoint="e", frontend="web-0", prompt="x" * 65536, sampling=SamplingParams())
    log.submit("a", [event])
    assert bury(log)
    (letter,) = log.dead_letters(1)
    assert copied_history(letter) == history(log)[1:]
    assert letter.fields["history_cut"] == "1"


# histories and alive


def test_histories_are_read_side_by_side_and_after_an_id(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a", "b")
    detokenizer.say(say_tokens("a", 1))
    found = log.histories(["b", "nobody", "a"])
    assert [len(entries) for entries in found] == [2, 0, 3]
    assert [[e.id for e in entries] for entries in log.histories(["a", "b"], after=TOKENIZED_ID)] == [["1-0"], []]
    assert log.histories([]) == []


def test_after_the_seal_a_history_has_nothing(log: StreamLog) -> None:
    submit(log)
    end(log, "a", CANCELLED)
    assert log.histories(["a"], after=SEAL) == [[]]


def test_entries_have_text_fields_and_begin_with_their_moment(log: StreamLog) -> None:
    submit(log)
    fields = history(log)[0].fields
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in fields.items())
    assert next(iter(fields)) == "ms"
    assert encode(decode(fields)).items() <= fields.items()


def test_alive_says_who_has_not_ended(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    end(log, "b", CANCELLED)
    assert log.alive(["a", "b", "nobody"]) == {"a"}
    assert log.alive([]) == set()


# groups


def test_backlog_counts_what_is_unread_and_what_is_worked_on(log: StreamLog) -> None:
    assert log.backlog(SUBMITTED) == 0
    submit(log, "a")
    submit(log, "b")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert log.backlog(SUBMITTED) == 2
    tokenize(log, entry)
    assert (log.backlog(SUBMITTED), log.backlog(TOKENIZED)) == (1, 1)
    assert log.backlog(Inbox.steps(NAMES, "generate-7")) == 0


def test_a_group_created_after_the_first_append_reads_it(log: StreamLog) -> None:
    engine = own(log, "generate-5")
    step(log, engine, 1)
    inbox = Inbox.steps(NAMES, "generate-5")
    log.prepare(inbox)
    assert read_one(log, inbox, "detokenize-5").id == "1-1"


def test_prepare_again_changes_nothing(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    log.prepare(SUBMITTED)
    assert log.read(SUBMITTED, "tokenize-0", max_entries=9, block_ms=0) == []
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]


def test_a_read_without_a_group_says_that_the_group_is_lost(log: StreamLog) -> None:
    inbox = Inbox.steps(NAMES, "generate-7")
    owner = own(log, "detokenize-7")
    with pytest.raises(GroupLost):
        log.read(inbox, "detokenize-7", max_entries=1, block_ms=0)
    with pytest.raises(GroupLost):
        log.pending(inbox, "detokenize-7")
    with pytest.raises(GroupLost):
        log.claim(inbox, owner, 8)


@pytest.mark.parametrize("block_ms", [0, 1])
def test_read_returns_nothing_when_its_time_is_over(log: StreamLog, block_ms: int) -> None:
    assert log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=block_ms) == []


def test_a_waiting_read_gets_what_is_appended(log: StreamLog) -> None:
    reader, found = another(log), []

    def read() -> None:
        found.extend(reader.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=LONG_MS))

    thread = threading.Thread(target=read)
    thread.start()
    submit(log)
    thread.join(1.5)
    assert [entry.fields["uid"] for entry in found] == ["a"]


def test_two_consumers_never_read_the_same_entry(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    assert read_one(log, SUBMITTED, "tokenize-0").fields["uid"] == "a"
    assert read_one(log, SUBMITTED, "tokenize-1").fields["uid"] == "b"
    assert log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=0) == []


def test_pending_is_in_order_and_no_delivery(log: StreamLog) -> None:
    uids = [f"r{i}" for i in range(120)]  # more than one page of XPENDING
    for uid in uids:
        submit(log, uid, max_queued=1000)
    entries = log.read(SUBMITTED, "tokenize-0", max_entries=1000, block_ms=0)
    assert log.pending(SUBMITTED, "tokenize-0") == entries
    assert log.pending(SUBMITTED, "tokenize-0") == entries
    assert log.pending(SUBMITTED, "tokenize-1") == []
    assert [entry.fields["uid"] for entry in entries] == uids


# claim


def test_claim_takes_from_slots_without_a_lease_only(log: StreamLog) -> None:
    for uid in ("a", "b", "c"):
        submit(log, uid)
    own(log, "tokenize-0")
    me = own(log, "tokenize-2")
    living = read_one(log, SUBMITTED, "tokenize-0")
    left = read_one(log, SUBMITTED, "tokenize-1")
    mine = read_one(log, SUBMITTED, "tokenize-2")
    assert log.claim(SUBMITTED, me, 8) == [left]
    assert log.claim(SUBMITTED, me, 8) == []
    assert log.pending(SUBMITTED, "tokenize-0") == [living]
    assert log.pending(SUBMITTED, "tokenize-1") == []
    assert log.pending(SUBMITTED, "tokenize-2") == [left, mine]


def test_claim_takes_at_most_so_many_and_from_several_slots(log: StreamLog) -> None:
    uids = ["a", "b", "c", "d"]
    for uid in uids:
        submit(log, uid)
    for slot in ("tokenize-0", "tokenize-0", "tokenize-1", "tokenize-1"):
        read_one(log, SUBMITTED, slot)
    me = own(log, "tokenize-2")
    assert [entry.fields["uid"] for entry in log.claim(SUBMITTED, me, 3)] == ["a", "b", "c"]
    assert [entry.fields["uid"] for entry in log.claim(SUBMITTED, me, 3)] == ["d"]


def test_claim_is_fenced(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    zombie = own(log, "tokenize-1")
    own_after(log, zombie)
    with pytest.raises(Fenced):
        log.claim(SUBMITTED, zombie, 8)
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]


def test_a_claimed_entry_is_committed_once(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    (claimed,) = log.claim(SUBMITTED, own(log, "tokenize-1"), 8)
    assert tokenize(log, claimed)
    assert not tokenize(log, entry)


def test_claim_takes_nothing_from_a_slot_that_a_guest_looks_after(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    be_guest(log, "tokenize-0")
    assert log.claim(SUBMITTED, own(log, "tokenize-1"), 8) == []
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]


# claim_from and forsaken


def take_all(log: StreamLog, owner: Owner, *uids: str) -> list[Entry]:
    """Bring requests as far as an engine that has them in hand."""
    accept(log, *uids)
    return list(log.take(owner, 8, control_cursor="0-0").entries)


def test_forsaken_slots_have_entries_pending_and_no_worker(log: StreamLog) -> None:
    owners = [own(log, slot_name("generate", index)) for index in range(4)]
    for owner, uid in zip(owners, "abcd", strict=True):
        (entry,) = take_all(log, owner, uid)
    step(log, owners[3], 1, entry.id)
    assert log.forsaken(TOKENIZED) == []
    for owner in (owners[0], owners[2], owners[3]):  # the last has nothing in hand
        log.release(owner)
    be_guest(log, "generate-2")
    assert sorted(log.forsaken(TOKENIZED)) == ["generate-0", "generate-2"]


def test_how_much_a_slot_has_in_hand_is_counted_without_reading_it(log: StreamLog) -> None:
    owner, other = own(log, "generate-0"), own(log, "generate-1")
    (entry, *_) = take_all(log, owner, "a", "b")
    take_all(log, other, "c")
    assert [log.num_pending(TOKENIZED, slot) for slot in ("generate-0", "generate-1", "generate-2")] == [2, 1, 0]
    step(log, owner, 1, entry.id)
    assert log.num_pending(TOKENIZED, "generate-0") == 1


def test_the_owner_of_a_guest_claims_what_the_slot_had_in_hand_in_order_and_at_most_so_many(log: StreamLog) -> None:
    dead, me = own(log, "generate-0"), own(log, "generate-1")
    entries = take_all(log, dead, "a", "b", "c")
    (mine,) = take_all(log, me, "d")
    log.release(dead)
    guest = be_guest(log, "generate-0")
    assert log.claim_from(TOKENIZED, me, guest, 2) == entries[:2]
    assert log.claim_from(TOKENIZED, me, guest, 2) == entries[2:]
    assert log.claim_from(TOKENIZED, me, guest, 2) == []
    assert log.pending(TOKENIZED, "generate-0") == []
    assert log.pending(TOKENIZED, "generate-1") == [*entries, mine]


def test_nothing_is_claimed_from_a_slot_once_its_guest_has_lost_it(log: StreamLog) -> None:
    dead, me = own(log, "generate-0"), own(log, "generate-1")
    entries = take_all(log, dead, "a")
    log.release(dead)
    guest = be_guest(log, "generate-0")
    own(log, "generate-0", nonce="worker")
    assert log.claim_from(TOKENIZED, me, guest, 8) == []
    assert log.pending(TOKENIZED, "generate-0") == entries


def test_who_lost_the_own_slot_claims_nothing_as_a_guest(log: StreamLog) -> None:
    dead, zombie = own(log, "generate-0"), own(log, "generate-1")
    entries = take_all(log, dead, "a")
    log.release(dead)
    guest = be_guest(log, "generate-0")
    own_after(log, zombie)
    with pytest.raises(Fenced):
        log.claim_from(TOKENIZED, zombie, guest, 8)
    assert log.pending(TOKENIZED, "generate-0") == entries


# retry


def test_retry_counts_how_often_an_entry_was_worked_on_and_the_read_is_the_first_time(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    owner = own(log, "tokenize-0")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=2, block_ms=0)
    log.pending(SUBMITTED, "tokenize-0")
    assert [log.retry(SUBMITTED, owner, first) for _ in range(3)] == [2, 3, 4]
    assert log.retry(SUBMITTED, owner, second) == 2


def test_a_claim_counts_as_no_try(log: StreamLog) -> None:
    accept(log, "a")
    submit(log, "b")
    read_one(log, SUBMITTED, "tokenize-1")
    tokenizer = own(log, "tokenize-0")
    (claimed,) = log.claim(SUBMITTED, tokenizer, 8)
    assert log.retry(SUBMITTED, tokenizer, claimed) == 2
    dead, me = own(log, "generate-0"), own(log, "generate-1")
    log.take(dead, 8, control_cursor="0-0")
    log.release(dead)
    (taken_over,) = log.claim_from(TOKENIZED, me, be_guest(log, "generate-0"), 8)
    assert log.retry(TOKENIZED, me, taken_over) == 2


def test_who_does_not_hold_an_entry_counts_nothing(log: StreamLog) -> None:
    submit(log)
    owner, other = own(log, "tokenize-0"), own(log, "tokenize-1")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert log.retry(SUBMITTED, other, entry) == 0
    assert log.pending(SUBMITTED, "tokenize-0") == [entry]
    assert log.retry(SUBMITTED, owner, entry) == 2
    assert tokenize(log, entry)
    assert log.retry(SUBMITTED, owner, entry) == 0


def test_retry_is_fenced(log: StreamLog) -> None:
    submit(log)
    zombie = own(log, "tokenize-0")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    owner = own_after(log, zombie)
    with pytest.raises(Fenced):
        log.retry(SUBMITTED, zombie, entry)
    assert log.retry(SUBMITTED, owner, entry) == 2


# slots


def test_acquire_gives_rising_epochs_and_refuses_a_held_slot(log: StreamLog) -> None:
    first = own(log, "generate-0", nonce="x")
    assert (first.slot, first.epoch, first.nonce) == ("generate-0", 1, "x")
    assert log.acquire("generate-0", "y", LONG_MS) is None
    assert log.release(first)
    second = own(log, "generate-0", nonce="y")
    assert second == Owner("generate-0", 2, "y")
    assert own(log, "generate-1", nonce="y").epoch == 1


def test_acquire_repeated_by_the_same_process_answers_the_same(log: StreamLog) -> None:
    owner = own(log, "generate-0", nonce="x")
    assert log.acquire("generate-0", "x", LONG_MS) == owner


def test_a_slot_is_free_when_its_lease_ran_out(log: StreamLog) -> None:
    own(log, "generate-0", lease_ms=SHORT_MS)
    until(lambda: log.lease("generate-0").holder == "")
    assert own(log, "generate-0", nonce="y").epoch == 2


def test_renew_after_the_lease_ran_out_takes_it_again_under_the_same_epoch(log: StreamLog) -> None:
    owner = own(log, "generate-0", lease_ms=SHORT_MS)
    until(lambda: log.lease("generate-0").holder == "")
    assert log.renew(owner, LONG_MS, "{}")
    assert log.lease("generate-0").holder == str(owner)
    assert step(log, owner, 1).steps_length == 1


def test_renew_after_the_acquire_of_another_is_refused(log: StreamLog) -> None:
    zombie = own(log, "generate-0", lease_ms=SHORT_MS)
    until(lambda: log.lease("generate-0").holder == "")
    owner = own(log, "generate-0", nonce="y")
    assert not log.renew(zombie, LONG_MS, "zombie")
    assert log.lease("generate-0").holder == str(owner)
    assert log.statuses("generate") == {}


def test_release_is_the_owners_alone(log: StreamLog) -> None:
    zombie = own(log, "generate-0")
    owner = own_after(log, zombie)
    log.renew(owner, LONG_MS, "mine")
    assert not log.release(zombie)
    assert log.lease("generate-0").holder == str(owner)
    assert log.statuses("generate") == {"generate-0": "mine"}
    assert log.release(owner)
    assert not log.release(owner)
    assert log.lease("generate-0").holder == ""
    assert log.statuses("generate") == {}


def test_lease_says_who_holds_a_slot_and_for_how_long(log: StreamLog) -> None:
    assert (log.lease("generate-0").holder, log.lease("generate-0").ttl_ms) == ("", 0)
    owner = own(log, "generate-0")
    lease = log.lease("generate-0")
    assert lease.holder == str(owner) == f"1:{owner.nonce}"
    assert LONG_MS / 2 < lease.ttl_ms <= LONG_MS


def test_statuses_are_by_slot_of_one_stage_also_past_the_first_sixteen(log: StreamLog) -> None:
    for index in range(20):
        log.renew(own(log, slot_name("generate", index)), LONG_MS, f"{{{index}}}")
    log.renew(own(log, "tokenize-0"), LONG_MS, "another stage")
    assert list(log.statuses("generate").items()) == [(f"generate-{i}", f"{{{i}}}") for i in range(20)]
    assert log.statuses("detokenize") == {}


# guests, who look after a slot while its worker is away


def be_guest(log: StreamLog, slot: str, *, nonce: str = "x") -> Owner:
    return own(log, slot, nonce=GUEST + nonce)


def test_a_guest_gets_no_slot_that_a_worker_or_another_guest_holds(log: StreamLog) -> None:
    worker = own(log, "generate-0")
    assert log.acquire("generate-0", f"{GUEST}x", LONG_MS) is None
    assert log.lease("generate-0").holder == str(worker)
    log.release(worker)
    guest = be_guest(log, "generate-0", nonce="x")
    assert (guest.epoch, guest.is_guest, worker.is_guest) == (2, True, False)
    assert log.acquire("generate-0", f"{GUEST}y", LONG_MS) is None
    assert be_guest(log, "generate-0", nonce="x") == guest


def test_for_a_worker_a_slot_is_free_while_a_guest_looks_after_it(log: StreamLog) -> None:
    guest = be_guest(log, "generate-0")
    assert log.lease("generate-0").is_free and log.lease("generate-0").holder == str(guest)
    worker = own(log, "generate-0", nonce="worker")
    assert worker.epoch == guest.epoch + 1
    assert not log.lease("generate-0").is_free
    assert not log.renew(guest, LONG_MS, "")
    assert not log.release(guest)
    assert log.lease("generate-0").holder == str(worker)


def test_once_a_slot_has_a_guest_its_former_worker_writes_and_takes_nothing(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a", "b")
    engine = detokenizer.engine
    (entry,) = log.take(engine, 1, control_cursor="0-0").entries
    unsaid = detokenizer.read_step()
    for slot in (engine, detokenizer.owner):
        log.release(slot)
        be_guest(log, slot.slot)
    with pytest.raises(Fenced):
        step(log, engine, 2, entry.id)
    with pytest.raises(Fenced):
        log.take(engine, 8, control_cursor="0-0")
    with pytest.raises(Fenced):
        detokenizer.commit(unsaid, say_tokens("a", 1))
    assert not log.renew(engine, LONG_MS, "zombie")
    assert log.pending(TOKENIZED, "generate-0") == [entry]
    assert log.backlog(STEPS) == 1
    assert ids(log, "a") == [SUBMITTED_ID, TOKENIZED_ID]
    (other,) = log.take(own(log, "generate-1"), 8, control_cursor="0-0").entries
    assert other.fields["uid"] == "b"


def test_a_guest_writes_for_the_slot_until_a_worker_has_it(log: StreamLog, detokenizer: Detokenizer) -> None:
    accept(log, "a")
    log.release(detokenizer.owner)
    detokenizer.owner = be_guest(log, "detokenize-0")
    assert detokenizer.say(say_tokens("a", 1))
    unsaid = detokenizer.read_step()
    own(log, "detokenize-0", nonce="worker")
    with pytest.raises(Fenced):
        detokenizer.commit(unsaid, say_tokens("a", 2))
    assert ids(log, "a") == [SUBMITTED_ID, TOKENIZED_ID, "1-0"]


def test_renew_without_a_status_keeps_the_lease_and_publishes_nothing(log: StreamLog) -> None:
    guest = own(log, "generate-0", nonce=f"{GUEST}x", lease_ms=SHORT_MS)
    assert log.renew(guest, LONG_MS, "")
    assert log.lease("generate-0").ttl_ms > SHORT_MS
    assert log.statuses("generate") == {}
    worker = own(log, "generate-0")
    log.renew(worker, LONG_MS, "said")
    assert log.renew(worker, LONG_MS, "")
    assert log.statuses("generate") == {"generate-0": "said"}


def test_who_waits_for_a_slot_announces_itself_there_unless_somebody_holds_it(log: StreamLog) -> None:
    assert log.announce("generate-0", "first")
    assert log.announce("generate-0", "second")
    assert log.statuses("generate") == {"generate-0": "second"}
    owner = own(log, "generate-0")
    log.renew(owner, LONG_MS, "holder")
    assert not log.announce("generate-0", "third")
    assert log.statuses("generate") == {"generate-0": "holder"}
    log.release(owner)
    assert log.announce("generate-0", "third")
    assert log.statuses("generate") == {"generate-0": "third"}


def test_an_announcement_takes_no_slot(log: StreamLog) -> None:
    log.announce("generate-0", "coming")
    assert log.lease("generate-0").holder == ""
    assert own(log, "generate-0").epoch == 1


# engines without a detokenizer


def test_unattended_engines_live_or_have_steps_waiting_and_no_worker_listens_to_them(log: StreamLog) -> None:
    engines = [own(log, slot_name("generate", index)) for index in range(4)]
    for engine in engines[1:]:
        log.prepare(Inbox.steps(NAMES, engine.slot))
    step(log, engines[2], 1)
    step(log, engines[3], 1)
    log.release(engines[1])  # nobody lives there, and nothing waits
    log.release(engines[2])  # nobody lives there, but a step waits
    own(log, "detokenize-3")
    be_guest(log, "detokenize-2")
    assert log.unattended() == ["generate-0", "generate-2"]
    own(log, "detokenize-0")
    own(log, "detokenize-2")
    assert log.unattended() == []


def test_unattended_engines_are_found_also_past_the_first_sixteen(log: StreamLog) -> None:
    for index in range(18):
        own(log, slot_name("generate", index))
        if index != 17:
            own(log, slot_name("detokenize", index))
    assert log.unattended() == ["generate-17"]


# frontends


def test_open_replies_makes_the_stream_once_and_returns_where_to_go_on(
    log: StreamLog, detokenizer: Detokenizer
) -> None:
    accept(log, "a")
    start = log.open_replies("web-0")
    assert log.open_replies("web-0") == start
    assert log.read_replies("web-0", start, block_ms=0) == (start, [])
    detokenizer.say(say_tokens("a", 1))
    cursor, replies = log.read_replies("web-0", start, block_ms=0)
    assert [reply.n for reply in replies] == [1]
    assert log.open_replies("web-0") == cursor
    assert log.read_replies("web-0", cursor, block_ms=1) == (cursor, [])


def test_a_waiting_frontend_hears_what_is_said(log: StreamLog) -> None:
    submit(log)
    start = log.open_replies("web-0")
    reader, found = another(log), []

    def read() -> None:
        found.extend(reader.read_replies("web-0", start, block_ms=LONG_MS)[1])

    thread = threading.Thread(target=read)
    thread.start()
    end(log, "a", CANCELLED)
    thread.join(1.5)
    assert [reply.uid for reply in found] == ["a"]
