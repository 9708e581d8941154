"""The place of a worker: which slot it gets, how it keeps it, and how it loses it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars
from support.memory_log.log import MemoryLog
from support.redis_servers import until

from pipeline.errors import ConfigError, LogError, LogFull, LogUnavailable, UndecodableEvent
from pipeline.log.protocol import Owner
from pipeline.metrics.counters import Measures, read_snapshot
from pipeline.metrics.families import PROMPT_TOKENS
from pipeline.names import Names
from pipeline.process.observe import EXIT_BROKEN
from pipeline.process.parent import EXIT_REPLACE
from pipeline.serving import Serving
from pipeline.stage.slots import (
    EXIT_STUCK,
    Announcement,
    SlotLease,
    Status,
    acquire_guest,
    acquire_slot,
    known_statuses,
    parse_status,
    progress_reporter,
    read_statuses,
    slot_leases,
    wait_until_it_fits,
)
from pipeline.stage.worker import Stop

REPOSITORY = Path(__file__).parents[3]
LONG_MS = 60_000
SHORT_MS = 60


class CountingLog(MemoryLog):
    """Counts the renewals, and can be cut off, or fail for a while."""

    def __init__(self) -> None:
        super().__init__(Names("test"))
        self.renewals = 0
        self.cut_off = False
        self.errors: list[LogError] = []
        """What the next attempts to acquire or announce meet."""
        self.published: list[str] = []

    def renew(self, owner: Owner, lease_ms: int, status: str, serving: Serving | None = None) -> bool:
        self.renewals += 1
        if self.cut_off:
            raise LogUnavailable("cut off")
        self.published.append(status)
        return super().renew(owner, lease_ms, status, serving)

    def release(self, owner: Owner) -> bool:
        if self.cut_off:
            raise LogUnavailable("cut off")
        return super().release(owner)

    def acquire(self, slot: str, nonce: str, lease_ms: int, serving: Serving | None = None) -> Owner | None:
        if self.errors:
            raise self.errors.pop()
        return super().acquire(slot, nonce, lease_ms, serving)

    def announce(self, slot: str, status: str) -> bool:
        if self.errors:
            raise self.errors.pop()
        return super().announce(slot, status)


@pytest.fixture
def log() -> CountingLog:
    return CountingLog()


@pytest.fixture
def slot_lease(log: CountingLog) -> Iterator[SlotLease]:
    held = SlotLease(log, acquire_slot(log, "generate", SHORT_MS), SHORT_MS)
    yield held
    held.leave()


def renewed(log: CountingLog, *, times: int = 1) -> None:
    """Wait until the lease has been renewed so many times more."""
    before = log.renewals
    until(lambda: log.renewals >= before + times)


def test_a_worker_gets_the_lowest_free_slot(log: CountingLog) -> None:
    owners = [acquire_slot(log, "generate", LONG_MS) for _ in range(3)]
    assert [owner.slot for owner in owners] == ["generate-0", "generate-1", "generate-2"]
    log.release(owners[1])
    assert acquire_slot(log, "generate", LONG_MS).slot == "generate-1"
    assert acquire_slot(log, "tokenize", LONG_MS).slot == "tokenize-0"


def test_a_preferred_slot_is_taken_at_once_when_it_is_free(log: CountingLog) -> None:
    assert acquire_slot(log, "generate", LONG_MS, preferred=2).slot == "generate-2"


def test_a_preferred_slot_is_waited_for_when_its_holder_is_dead(log: CountingLog) -> None:
    assert log.acquire("generate-1", "dead", SHORT_MS) is not None
    owner = acquire_slot(log, "generate", LONG_MS, preferred=1)
    assert (owner.slot, owner.epoch) == ("generate-1", 2)


def test_a_preferred_slot_is_not_waited_for_when_its_holder_lives(log: CountingLog, slot_lease: SlotLease) -> None:
    owner = acquire_slot(log, "generate", SHORT_MS, preferred=0)
    assert owner.slot == "generate-1"
    assert log.lease("generate-0").holder == str(slot_lease.owner)


def test_a_place_keeps_its_lease(log: CountingLog, slot_lease: SlotLease) -> None:
    renewed(log, times=8)  # a third of the lease apart
    assert log.lease("generate-0").holder == str(slot_lease.owner)
    assert slot_lease.owner.epoch == 1
    assert not slot_lease.lost.is_set()


def test_a_place_publishes_what_its_worker_says(log: CountingLog, slot_lease: SlotLease) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 1.0}
    slot_lease.say(phase="ready", models=("a", "b"), context=4096, sampling_defaults=recommended)
    until(lambda: read_statuses(log, "generate")[0].phase == "ready")
    (status,) = read_statuses(log, "generate")
    assert status == slot_lease.status
    assert (status.slot, status.owner) == ("generate-0", str(slot_lease.owner))
    assert (status.models, status.context) == (("a", "b"), 4096)
    assert status.sampling_defaults == recommended
    assert [type(value) for value in status.sampling_defaults.values()] == [float, int, float]


def test_a_status_of_a_worker_that_recommends_nothing_is_understood() -> None:
    before = '{"slot": "generate-0", "owner": "1:a", "pid": 1, "host": "h", "phase": "ready", "models": ["m"]}'
    assert parse_status(before).sampling_defaults == {}


def test_a_place_publishes_what_its_process_has_measured_at_each_renewal(log: CountingLog) -> None:
    measures = Measures()

    def published() -> float:
        (status,) = read_statuses(log, "generate")
        tokens = read_snapshot(status.metrics).get(PROMPT_TOKENS, {}).get((), 0)
        assert isinstance(tokens, int)
        return tokens

    slot_lease = SlotLease(log, acquire_slot(log, "generate", SHORT_MS), SHORT_MS, measures)
    renewed(log, times=2)
    assert published() == 0
    for tokens in (3, 5):
        measures.add(PROMPT_TOKENS, amount=tokens)
        renewed(log, times=2)
        assert published() == 8 - 5 * (tokens == 3)
    assert slot_lease.status.metrics == ""  # what was said before is not said again by whoever changes something else
    slot_lease.leave()


def test_what_a_process_has_measured_is_told_from_each_of_its_places(log: CountingLog, stop: Stop) -> None:
    measures = Measures()
    held = slot_leases(log, log, "generate", SHORT_MS, preferred=0, stop=stop, measures=measures)
    first = next(held)
    measures.add(PROMPT_TOKENS, amount=3)
    lose(log, first, lease_ms=SHORT_MS)
    next(held)
    renewed(log, times=2)
    (status,) = read_statuses(log, "generate")
    assert read_snapshot(status.metrics)[PROMPT_TOKENS] == {(): 3}
    held.close()


def test_a_place_says_that_it_is_lost_after_the_acquire_of_another(log: CountingLog, slot_lease: SlotLease) -> None:
    log.cut_off = True
    until(lambda: log.lease("generate-0").holder == "")
    owner = acquire_slot(log, "generate", LONG_MS, preferred=0)
    assert not slot_lease.lost.is_set()
    log.cut_off = False
    assert slot_lease.lost.wait(10)
    slot_lease.leave()
    assert log.lease("generate-0").holder == str(owner)


def test_a_place_takes_its_lease_again_when_nobody_else_did(log: CountingLog, slot_lease: SlotLease) -> None:
    log.cut_off = True
    until(lambda: log.lease("generate-0").holder == "")
    log.cut_off = False
    until(lambda: log.lease("generate-0").holder == str(slot_lease.owner))
    assert not slot_lease.lost.is_set()


def test_a_place_that_is_left_is_free_and_silent(log: CountingLog, slot_lease: SlotLease) -> None:
    renewed(log)
    slot_lease.leave()
    assert log.lease("generate-0").holder == ""
    assert log.statuses("generate") == {}
    assert acquire_slot(log, "generate", LONG_MS).slot == "generate-0"


def test_a_place_can_be_left_without_a_log(log: CountingLog, slot_lease: SlotLease) -> None:
    log.cut_off = True
    slot_lease.leave()
    assert log.lease("generate-0").holder == str(slot_lease.owner)


# who has no slot yet


def test_a_worker_without_a_slot_announces_itself_and_holds_nothing(log: CountingLog) -> None:
    with Announcement(log, "generate", SHORT_MS, preferred=1) as announcement:
        announcement.say(phase="loading", detail="weights", progress=0.5)
        until(lambda: [status.progress for status in read_statuses(log, "generate")] == [0.5])
        (status,) = read_statuses(log, "generate")
        assert (status.slot, status.owner, status.phase) == ("generate-1", "", "loading")
        assert log.lease("generate-1").holder == "" and log.renewals == 0
    assert acquire_slot(log, "generate", LONG_MS, preferred=1).epoch == 1


def test_a_worker_announces_itself_under_the_next_slot_when_its_own_is_held(log: CountingLog) -> None:
    held = acquire_slot(log, "generate", LONG_MS)
    log.renew(held, LONG_MS, Status(slot="generate-0", owner=str(held), pid=1, host="h").model_dump_json())
    with Announcement(log, "generate", SHORT_MS) as announcement:
        announcement.say(phase="loading")
        until(lambda: [status.phase for status in read_statuses(log, "generate")] == ["starting", "loading"])
        acquire_slot(log, "generate", LONG_MS, preferred=1)  # and somebody takes this one while it loads
        until(lambda: [status.slot for status in read_statuses(log, "generate")][-1] == "generate-2")
        assert announcement.status.slot == "generate-2"
        assert read_statuses(log, "generate")[0].owner == str(held)


def test_a_place_says_how_its_worker_is_where_that_had_announced_itself(log: CountingLog) -> None:
    with Announcement(log, "generate", SHORT_MS) as announcement:
        announcement.say(phase="loading")
        until(lambda: [status.phase for status in read_statuses(log, "generate")] == ["loading"])
    slot_lease = SlotLease(log, acquire_slot(log, "generate", SHORT_MS, preferred=0), SHORT_MS)
    slot_lease.say(phase="ready")
    until(lambda: [status.phase for status in read_statuses(log, "generate")] == ["ready"])
    slot_lease.leave()
    assert log.statuses("generate") == {}


def test_an_announcement_outlives_a_log_that_is_away(log: CountingLog) -> None:
    log.errors = [LogUnavailable("connection refused"), LogUnavailable("connection refused")]
    with Announcement(log, "generate", SHORT_MS):
        until(lambda: read_statuses(log, "generate"))
    assert log.errors == []


# one place after another


@pytest.fixture
def stop() -> Iterator[Stop]:
    with bound_contextvars(slot=""):  # `slot_leases` binds it for the lines of its process
        yield Stop()


def lose(log: CountingLog, slot_lease: SlotLease, *, lease_ms: int) -> Owner:
    """Have somebody else take the slot of *place*, for so long, while that cannot reach the log."""
    log.cut_off = True
    until(lambda: log.lease(slot_lease.owner.slot).holder == "")
    owner = log.acquire(slot_lease.owner.slot, "another", lease_ms)
    assert owner is not None
    log.cut_off = False
    assert slot_lease.lost.wait(10)
    return owner


def lease_threads(before: Sequence[threading.Thread]) -> list[str]:
    """Return the threads that keep a lease and were not there before."""
    started = [thread for thread in threading.enumerate() if thread not in before]
    return [thread.name for thread in started if thread.name.startswith("lease ")]


def test_who_lost_a_slot_gets_it_again_in_the_same_process_once_it_is_free(log: CountingLog, stop: Stop) -> None:
    before = threading.enumerate()
    held = slot_leases(log, log, "generate", SHORT_MS, preferred=1, stop=stop)
    first = next(held)
    another = lose(log, first, lease_ms=SHORT_MS)
    second = next(held)
    assert (first.owner.slot, first.owner.epoch, another.epoch) == ("generate-1", 1, 2)
    assert (second.owner.slot, second.owner.epoch) == ("generate-1", 3)
    assert not second.lost.is_set() and lease_threads(before) == ["lease generate-1"]
    held.close()


def test_who_lost_a_slot_to_a_living_worker_gets_the_lowest_free_one(log: CountingLog, stop: Stop) -> None:
    held = slot_leases(log, log, "generate", SHORT_MS, preferred=1, stop=stop)
    another = SlotLease(log, lose(log, next(held), lease_ms=10 * SHORT_MS), 10 * SHORT_MS)
    assert next(held).owner.slot == "generate-0"
    assert log.lease("generate-1").holder == str(another.owner)
    held.close()
    another.leave()


def test_who_was_given_no_preference_prefers_the_slot_that_it_had(log: CountingLog, stop: Stop) -> None:
    other = acquire_slot(log, "generate", LONG_MS)
    held = slot_leases(log, log, "generate", SHORT_MS, preferred=None, stop=stop)
    first = next(held)
    log.release(other)
    lose(log, first, lease_ms=SHORT_MS)
    assert [first.owner.slot, next(held).owner.slot] == ["generate-1", "generate-1"]
    held.close()


def test_a_slot_is_waited_for_while_the_log_is_away(
    log: CountingLog, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stage.slots.AGAIN_S", 0.001)
    log.errors = [LogUnavailable("connection refused"), LogFull("Redis is at its maxmemory")]
    held = slot_leases(log, log, "generate", SHORT_MS, preferred=0, stop=stop)
    assert next(held).owner.slot == "generate-0" and log.errors == []
    held.close()


def test_a_stop_ends_the_wait_for_a_slot(log: CountingLog, stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(slot: str, nonce: str, lease_ms: int, serving: Serving | None) -> Owner | None:
        stop.set()
        raise LogUnavailable("connection refused")

    monkeypatch.setattr(log, "acquire", away)
    assert list(slot_leases(log, log, "generate", SHORT_MS, preferred=0, stop=stop)) == []


def test_a_stop_ends_the_places_and_the_last_one_is_free(log: CountingLog, stop: Stop) -> None:
    given, before = [], threading.enumerate()
    for slot_lease in slot_leases(log, log, "generate", SHORT_MS, preferred=0, stop=stop):
        given.append(slot_lease.owner.epoch)
        renewed(log)
        stop.set()
    assert given == [1] and lease_threads(before) == []
    assert log.lease("generate-0").holder == "" and log.statuses("generate") == {}


# guests


def test_a_guest_looks_after_a_slot_that_nobody_holds_and_says_nothing_there(log: CountingLog) -> None:
    owner = acquire_guest(log, "generate-0", SHORT_MS)
    assert owner is not None and owner.is_guest
    slot_lease = SlotLease(log, owner, SHORT_MS)
    renewed(log, times=8)
    assert log.lease("generate-0").holder == str(owner)
    assert log.statuses("generate") == {} and set(log.published) == {""}
    assert acquire_guest(log, "generate-0", SHORT_MS) is None
    slot_lease.leave()
    assert log.lease("generate-0").holder == ""


def test_a_worker_gets_its_slot_from_a_guest_at_once_and_the_guest_learns_it(log: CountingLog) -> None:
    owner = acquire_guest(log, "generate-0", LONG_MS)
    assert owner is not None
    guest = SlotLease(log, owner, SHORT_MS)
    worker = acquire_slot(log, "generate", LONG_MS, preferred=0)
    assert (worker.slot, worker.epoch) == ("generate-0", 2)
    assert guest.lost.wait(10)
    guest.leave()
    assert log.lease("generate-0").holder == str(worker)


# what is said


def test_a_status_that_cannot_be_read_says_so() -> None:
    with pytest.raises(UndecodableEvent, match="phase"):
        parse_status('{"slot": "a", "owner": "b", "pid": 1, "host": "h", "phase": "asleep"}')


def test_progress_is_published_in_steps(log: CountingLog, slot_lease: SlotLease) -> None:
    said: list[float] = []
    slot_lease.say = lambda **changes: said.append(float(str(changes["progress"])))  # type: ignore[method-assign]
    report = progress_reporter(slot_lease, "weights")
    for percent in range(101):
        report(percent / 100)
    assert said[0] == 0
    assert said[-1] == 1
    assert 15 <= len(said) <= 22


def run_worker(body: str) -> subprocess.CompletedProcess[str]:
    """Run a worker of which the watchdog expects a sign of life every 0.2 s."""
    program = """
        import sys, threading, time
        sys.path.append("tests")
        from pipeline.stage import slots
        from support.memory_log.log import MemoryLog
        from pipeline.names import Names

        slots.WATCHDOG_S = 0.2
        log = MemoryLog(Names("test"))
        slot_lease = slots.SlotLease(log, slots.acquire_slot(log, "generate", 60), 60)
    """
    text = textwrap.dedent(program) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", text], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_watchdog_ends_a_process_whose_loop_is_stuck() -> None:
    done = run_worker("threading.Event().wait(30)")
    assert done.returncode == EXIT_STUCK == 3
    assert "stuck" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("limit", "work", "is_log_away"),
    [
        ("patience_s=0.1", "threading.Event().wait(30)", False),
        ("patience_s=30, cpu_s=0.1", "any(False for _ in iter(int, 1))", True),
    ],
)
def test_the_watchdog_gives_up_the_request_that_keeps_its_worker_and_has_the_process_replaced(
    limit: str, work: str, is_log_away: bool
) -> None:
    done = run_worker(f"""
        from pipeline.errors import LogUnavailable

        def give_up(to):
            print("given up by", threading.current_thread().name, to is log, flush=True)
            if {is_log_away}:
                raise LogUnavailable("connection refused")

        slot_lease.report_progress({limit}, give_up=give_up)
        {work}
    """)
    assert done.returncode == EXIT_REPLACE == 4
    assert done.stdout.startswith("given up by lease generate-0 True\n")
    assert ("connection refused" in done.stdout + done.stderr) == is_log_away


def test_a_round_that_comes_in_time_gives_up_nothing_also_under_a_long_lease() -> None:
    done = run_worker("""
        slots.WATCH_EVERY_S = 0.05
        slot_lease.leave()
        slot_lease = slots.SlotLease(log, slots.acquire_slot(log, "generate", 60_000), 60_000)
        for _ in range(5):
            slot_lease.report_progress(cpu_s=5, give_up=lambda log: print("the first is given up"))
            time.sleep(0.1)
        slot_lease.report_progress(patience_s=0.1, give_up=lambda log: print("given up", flush=True))
        time.sleep(20)
    """)
    assert (done.returncode, done.stdout) == (EXIT_REPLACE, "given up\n")


@pytest.mark.parametrize(
    "body",
    [
        """
        until_s = time.monotonic() + 0.6
        while time.monotonic() < until_s:
            slot_lease.report_progress(patience_s=0.2)
            time.sleep(0.01)
        sys.exit(7)
        """,
        """
        slot_lease.report_progress(patience_s=30)
        time.sleep(0.6)
        sys.exit(7)
        """,
    ],
    ids=["its loop comes round", "it asked for more patience"],
)
def test_the_watchdog_leaves_a_process_alone(body: str) -> None:
    done = run_worker(body)
    assert done.returncode == 7, done.stderr


def test_an_exception_in_the_thread_that_keeps_the_slot_ends_the_process_with_a_line_that_names_it() -> None:
    done = run_worker("""
        from pipeline.process.observe import configure_logging, end_with_any_thread

        class Measures(slots.Measures):
            def snapshot(self):
                raise ZeroDivisionError("of the measures")

        configure_logging()
        end_with_any_thread()
        slot_lease.leave()
        slot_lease = slots.SlotLease(log, slots.acquire_slot(log, "generate", 60), 60, Measures())
        while True:
            slot_lease.report_progress()
            time.sleep(0.01)
    """)
    assert done.returncode == EXIT_BROKEN == 1
    for part in ("thread_broke", "lease generate-0", "ZeroDivisionError: of the measures"):
        assert part in done.stderr


def test_a_status_of_a_newer_version_is_read_and_one_that_is_none_breaks_no_reader() -> None:
    status = Status(slot="generate-0", owner="1:x", pid=1, host="h")
    newer = '{"slot": "generate-1", "owner": "1:x", "pid": 1, "host": "h", "something": "new"}'
    read = known_statuses({"generate-0": status.model_dump_json(), "generate-1": newer, "generate-2": '{"pid": 1}'})
    assert read == [status, status.model_copy(update={"slot": "generate-1"})]


# what the workers of a namespace serve together

MINE = Serving("qwen", "w1", "t1", 4096, "--max-seq-len")
OTHER = Serving("other", "w2", "t2", 128, "--max-seq-len")


def serve(log: CountingLog, serving: Serving, stop: Stop, lease_ms: int = SHORT_MS) -> Generator[SlotLease, None, None]:
    return slot_leases(log, log, "generate", lease_ms, preferred=None, stop=stop, serving=serving)


def refusals(log: CountingLog, other: Serving, stop: Stop) -> list[str]:
    """Return how *other* is refused while a worker lives that serves MINE: when it asks for a slot, and before."""
    with closing(serve(log, MINE, stop, 10 * SHORT_MS)) as living:  # a busy machine must not end its lease
        next(living)
        with pytest.raises(ConfigError) as refused:
            next(serve(log, other, stop))
        with pytest.raises(ConfigError) as before:
            wait_until_it_fits(log, other, stop)
    return [str(refused.value), str(before.value)]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(MINE, model="copy", weights="w2"), "serve qwen (weights w1), but this worker has copy (weights w2)"),
        (replace(MINE, tokenizer="t2"), "serve qwen (tokenizer t1), but this worker has qwen (tokenizer t2)"),
    ],
    ids=["weights", "tokenizer"],
)
def test_a_worker_with_another_model_than_a_living_one_is_refused_with_both(
    log: CountingLog, stop: Stop, other: Serving, what: str
) -> None:
    line = f"--namespace test: its generate workers {what}; pass another --namespace, or stop them first"
    assert refusals(log, other, stop) == [line] * 2


@pytest.mark.parametrize(("flag", "step", "least"), [("--max-seq-len", 1, 4096), ("--num-pages", 60, 69)])
def test_a_worker_with_less_context_than_a_living_one_is_refused_with_the_flag(
    log: CountingLog, stop: Stop, flag: str, step: int, least: int
) -> None:
    line = (
        f"{flag}: gives a context of 1024 tokens, but the generate workers of --namespace test serve 4096; "
        f"pass {flag} {least} or more, or stop them first"
    )
    less = replace(MINE, context=1024, context_flag=flag, context_step=step)
    assert refusals(log, less, stop) == [line] * 2


def test_after_the_last_worker_has_stopped_or_died_another_model_starts(log: CountingLog, stop: Stop) -> None:
    with closing(serve(log, MINE, stop)) as stopped:
        next(stopped)
    assert log.acquire("generate-1", "dead", 2 * SHORT_MS, MINE) is not None
    with closing(serve(log, OTHER, stop)) as another:
        assert next(another).serving == OTHER


def test_a_stop_ends_the_wait_for_what_dead_workers_served(log: CountingLog, stop: Stop) -> None:
    assert log.acquire("generate-0", "dead", LONG_MS, MINE) is not None
    threading.Timer(0.05, stop.set).start()
    assert list(serve(log, OTHER, stop)) == []


def test_a_worker_with_more_context_serves_the_context_of_the_others_also_under_its_next_lease(
    log: CountingLog, stop: Stop
) -> None:
    """Else the others would be refused when all ask again, after Redis lost its data."""
    larger = replace(MINE, context=8192)
    with closing(serve(log, larger, stop)) as later:
        with closing(serve(log, MINE, stop)) as first:
            next(first)
            second = next(later)
            assert second.serving == MINE
        lose(log, second, lease_ms=SHORT_MS)
        until(lambda: log.serving() == {})
        third = next(later)
        assert third.serving == MINE and log.serving()["generate"].serving == MINE
        lose(log, third, lease_ms=SHORT_MS)
        until(lambda: log.serving() == {})
        assert log.acquire("generate-7", "n", LONG_MS, replace(MINE, context=6000)) is not None
        assert next(later).serving == replace(MINE, context=6000)


def test_of_two_models_that_start_at_once_one_is_refused(log: CountingLog, stop: Stop) -> None:
    ready, outcomes = threading.Barrier(2), list[str]()

    def start(serving: Serving) -> None:
        ready.wait(10)
        try:
            for _ in serve(log, serving, stop, 10 * SHORT_MS):
                outcomes.append(f"{serving.model} serves")
                until(lambda: len(outcomes) == 2)
                stop.set()
        except ConfigError as error:
            outcomes.append(str(error))

    models = [Serving(f"model-{number}", f"w{number}", "t1", 128) for number in (1, 2)]
    threads = [threading.Thread(target=start, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (winner,) = (text.partition(" ")[0] for text in outcomes if text.endswith(" serves"))
    (refusal,) = (text for text in outcomes if not text.endswith(" serves"))
    assert f"generate workers serve {winner} (weights " in refusal


def test_a_worker_that_slept_while_another_model_took_its_place_is_refused(log: CountingLog, stop: Stop) -> None:
    with closing(serve(log, MINE, stop)) as slept:
        first = next(slept)
        log.cut_off = True
        until(lambda: log.serving() == {})
        owner = acquire_slot(log, "generate", 10 * SHORT_MS, preferred=1, serving=OTHER)
        log.cut_off = False
        assert first.lost.wait(10)
        another = SlotLease(log, owner, 10 * SHORT_MS, serving=OTHER)
        with pytest.raises(ConfigError, match=r"serve other \(weights w2\), but this worker has qwen"):
            next(slept)
        another.leave()
