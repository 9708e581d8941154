"""The supervisor over small stand-in workers: readiness, restart, backoff, drain, and what it says of a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs
from support.redis_servers import until
from support.selection import rest_at_night

from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.stage.slots import Status, acquire_slot, read_statuses
from pipeline.stage.supervisor import ChildFailed, Job, StartFailed, Supervisor

WORKER = """
import gc, os, signal, sys, threading, time
from pathlib import Path

stage, mode, folder = sys.argv[2], sys.argv[3], Path(sys.argv[4])
after = lambda flag: sys.argv[sys.argv.index(flag) + 1]
slot = int(after("--slot"))
if "--rank" in sys.argv:
    rank, group = after("--rank"), after("--group")
    stage = f"rank-{rank}" if rank != "0" else stage
    with (folder / "groups").open("a") as groups:
        groups.write(f"{rank} {group} {os.getpid()}\\n")
with (folder / "starts").open("a") as starts:
    starts.write(f"{os.getpid()} {time.monotonic()}\\n")
num_starts = len((folder / "starts").read_text().splitlines())
if mode == "misconfigured" or (mode == "refused once" and num_starts == 2):
    sys.exit(2)
if mode == "broken":
    sys.exit(1)
if mode == "refused late":
    time.sleep(0.1)
    sys.exit(2)

gc.disable()  # a third of the imports below, which dozens of workers pay
import pipeline.process.observe  # first: without it structlog would import rich
from pipeline.names import Names
from pipeline.log.redis import RedisLog
from pipeline.stage.slots import Announcement, SlotLease, acquire_slot

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set() if mode != "deaf" else None)
log = RedisLog(os.environ["MINISGL_REDIS_URL"], Names())
if mode == "announcing":
    with Announcement(RedisLog(os.environ["MINISGL_REDIS_URL"], Names()), stage, 3000, preferred=slot) as announcement:
        announcement.say(phase="loading", detail="weights")
        while announcement.status.slot == f"{stage}-{slot}":
            time.sleep(0.01)
owner = acquire_slot(log, stage, 3000, preferred=slot)
slot_lease = SlotLease(RedisLog(os.environ["MINISGL_REDIS_URL"], Names()), owner, 3000)
if sys.argv[7:9] == ["--rank", "0"]:
    first = acquire_slot(log, "rank-0", 60_000, preferred=slot)
    SlotLease(RedisLog(os.environ["MINISGL_REDIS_URL"], Names()), first, 60_000)
if mode == "slow":
    slot_lease.say(phase="loading", detail="weights", progress=0.4)
else:
    slot_lease.say(phase="ready")
if mode in ("crashing", "replaced"):
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        slot_lease.report_progress()
    os._exit(7 if mode == "crashing" else 4)
while not stop.wait(0.05):
    slot_lease.report_progress()
with (folder / "ends").open("a") as ends:
    ends.write(f"{stage}\\n")
slot_lease.leave()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisLog]:
    with contextlib.closing(RedisLog(redis_url, Names())) as log:
        yield log


@contextlib.contextmanager
def supervised(folder: Path, log: RedisLog, *jobs: Job) -> Iterator[Supervisor]:
    environment = os.environ | {"MINISGL_REDIS_URL": log.url, "PYTHONPATH": str(Path(__file__).parents[3])}
    supervisor = Supervisor(
        lambda: log,
        jobs,
        program=(sys.executable, str(folder / "worker.py")),
        environment=environment,
        watch_redis=lambda: None,
    )
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.kill()


def job(folder: Path, stage: str, mode: str = "good", drain_s: float = 10.0) -> Job:
    return Job(stage, (mode, str(folder)), drain_s=drain_s)


def starts(folder: Path) -> list[tuple[int, float]]:
    """Return pid and time of every start of a worker."""
    file = folder / "starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(pid), float(at)) for pid, at in (line.split() for line in lines)]


def watch_until(supervisor: Supervisor, condition: object) -> None:
    assert callable(condition)

    def look() -> bool:
        supervisor.watch()
        return bool(condition())

    until(look, timeout_s=20)


def test_workers_of_one_stage_get_slots_of_their_own(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, *(job(folder, "tokenize") for _ in range(2))) as supervisor:
        assert supervisor.wait_until_ready(30)
        assert [status.slot for status in read_statuses(log, "tokenize")] == ["tokenize-0", "tokenize-1"]


def test_the_terminal_signals_no_worker_and_all_share_the_cores_by_niceness(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, job(folder, "generate")) as supervisor:
        assert supervisor.wait_until_ready(30)
        ((pid, _),) = starts(folder)
        assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)


def test_what_a_worker_announced_elsewhere_does_not_hide_that_it_is_ready(folder: Path, log: RedisLog) -> None:
    """While the slot that it waits for is held it announces itself under the next one, and that outlives its wait."""
    held = acquire_slot(log, "tokenize", 60_000)
    with supervised(folder, log, job(folder, "tokenize", "announcing")) as supervisor:
        until(lambda: [status.slot for status in read_statuses(log, "tokenize")] == ["tokenize-1"])
        log.release(held)
        assert supervisor.wait_until_ready(5)
        assert read_statuses(log, "tokenize")[0].phase == "ready"


def test_what_a_former_run_said_under_the_same_pid_counts_for_nothing(folder: Path, log: RedisLog) -> None:
    """In a container that starts again, its name and the process ids are those of the time before."""
    with supervised(folder, log, job(folder, "generate", "announcing")) as supervisor:
        until(lambda: bool(starts(folder)))
        (pid, _), *_ = starts(folder)
        former = Status(
            slot="generate-1", owner="1:former", pid=pid, host=os.uname().nodename, phase="ready", run="one"
        )
        owner = acquire_slot(log, "generate", 60_000, preferred=1)
        log.renew(owner, 60_000, former.model_dump_json())
        with pytest.raises(StartFailed, match="generate-0"):
            supervisor.wait_until_ready(1.0)


def test_who_is_late_is_named_with_what_it_does_once_in_the_log_and_in_the_error(
    folder: Path, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stage.supervisor.TELL_LATE_S", 0.0)
    with (
        capture_logs() as lines,
        supervised(folder, log, job(folder, "generate", "slow"), job(folder, "tokenize")) as supervisor,
        pytest.raises(StartFailed, match=r"generate-0 \(loading weights 40%\)"),
    ):
        supervisor.wait_until_ready(3)
    assert [line["worker"] for line in lines if line["event"] == "worker_ready"] == ["tokenize-0"]
    late = [line["workers"] for line in lines if line["event"] == "not_ready_yet"]
    assert late[0] == "generate-0 (starting), tokenize-0 (starting)"
    assert late.count("generate-0 (loading weights 40%)") == 1 and late[-1] == "generate-0 (loading weights 40%)"


def test_a_worker_that_dies_at_every_start_is_given_up_and_named(folder: Path, log: RedisLog) -> None:
    with (
        supervised(folder, log, job(folder, "generate", "broken")) as supervisor,
        pytest.raises(StartFailed, match="generate-0 ended 5 times"),
    ):
        supervisor.wait_until_ready(60)


def test_a_worker_that_cannot_be_configured_is_not_restarted(folder: Path, log: RedisLog) -> None:
    with (
        supervised(folder, log, job(folder, "generate", "misconfigured")) as supervisor,
        pytest.raises(ChildFailed, match="generate-0"),
    ):
        supervisor.wait_until_ready(30)
    assert len(starts(folder)) == 1


def test_a_worker_that_was_ready_and_is_refused_when_it_comes_back_is_tried_again(folder: Path, log: RedisLog) -> None:
    """As an engine that finds less memory than before: the others serve on."""
    with supervised(folder, log, job(folder, "generate", "refused once")) as supervisor:
        assert supervisor.wait_until_ready(30)
        os.kill(starts(folder)[0][0], signal.SIGKILL)
        watch_until(supervisor, lambda: len(starts(folder)) == 3)
        assert supervisor.wait_until_ready(30)


def test_a_killed_worker_is_back_in_its_slot_without_waiting_for_the_lease(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, job(folder, "tokenize")) as supervisor:
        assert supervisor.wait_until_ready(30)
        ((first, _),) = starts(folder)
        os.kill(first, signal.SIGKILL)
        watch_until(supervisor, lambda: len(starts(folder)) == 2)
        assert supervisor.wait_until_ready(30)
        (status,) = read_statuses(log, "tokenize")
        assert status.slot == "tokenize-0" and status.pid != first


def test_a_worker_that_keeps_dying_is_started_ever_more_rarely(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, job(folder, "tokenize", "crashing")) as supervisor:
        watch_until(supervisor, lambda: len(starts(folder)) == 5)
    at = [when for _, when in starts(folder)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert pauses[3] > pauses[1] + 0.5  # 0, 0.4, 0.8, 1.6 s and the same start-up in each


def test_a_worker_that_wants_to_be_replaced_is_replaced_at_once_however_often(
    folder: Path, log: RedisLog, capsys: pytest.CaptureFixture[str]
) -> None:
    with supervised(folder, log, job(folder, "tokenize", "replaced")) as supervisor:
        watch_until(supervisor, lambda: len(starts(folder)) == 3)
    assert capsys.readouterr().out.count("restart_in_s=0.0") == 2


def ranks(folder: Path, mode: str = "good", *, group: str = "0") -> list[Job]:
    return [dataclasses.replace(job(folder, "generate", mode), rank=rank, group=group) for rank in range(2)]


def groups(folder: Path) -> list[tuple[str, str, int]]:
    """Return rank, group and pid of every start of a rank."""
    file = folder / "groups"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(rank, group, int(pid)) for rank, group, pid in map(str.split, lines)]


@pytest.mark.parametrize("victim", rest_at_night(["0", "1"]))
def test_the_ranks_of_an_engine_end_and_start_together_under_a_new_name(
    folder: Path, log: RedisLog, capsys: pytest.CaptureFixture[str], victim: str
) -> None:
    """The other one them stands still: it ends all the same. No slot waits for its lease."""
    with supervised(folder, log, *ranks(folder), *ranks(folder, group="1")) as supervisor:
        assert supervisor.wait_until_ready(30)
        before = groups(folder)
        assert len({group for _, group, _ in before}) == 2 and len(before) == 4
        group = before[0][1]
        pids = {rank: pid for rank, other, pid in before if other == group}
        supervisor._looked_s = 0.0  # look now: a second later it would by itself
        supervisor.watch()
        os.kill(pids["1" if victim == "0" else "0"], signal.SIGSTOP)
        os.kill(pids[victim], signal.SIGKILL)
        watch_until(supervisor, lambda: len(groups(folder)) == 6)
        assert supervisor.wait_until_ready(10)
        assert not any(map(psutil.pid_exists, pids.values()))
        (rank, after, _), (other_rank, same, _) = groups(folder)[4:]
        assert after == same and after not in {group for _, group, _ in before}
        assert {rank, other_rank} == {"0", "1"}
        assert [status.slot for status in read_statuses(log, "rank-1")] == ["rank-1-0", "rank-1-1"]
    assert capsys.readouterr().out.count("worker_died") == 1


def test_ranks_whose_engine_spans_machines_start_again_under_the_name_in_their_flags(
    folder: Path, log: RedisLog
) -> None:
    jobs = [
        dataclasses.replace(each, arguments=(*each.arguments, "--group", "name"), spans_machines=True)
        for each in ranks(folder)[1:]
    ]
    with supervised(folder, log, *jobs) as supervisor:
        assert supervisor.wait_until_ready(30)
        os.kill(groups(folder)[0][2], signal.SIGKILL)
        watch_until(supervisor, lambda: len(groups(folder)) == 2)
    assert [(rank, group) for rank, group, _ in groups(folder)] == [("1", "name")] * 2


def test_the_ranks_of_an_engine_that_keep_dying_count_as_one(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, *ranks(folder, "broken")) as supervisor:
        with pytest.raises(StartFailed, match="5 times"):
            supervisor.wait_until_ready(60)
        assert len({group for _, group, _ in groups(folder)}) == 5


@pytest.mark.parametrize(
    ("modes", "error", "says"),
    [
        (("broken", "refused late"), ChildFailed, "rank-1-0 cannot run with this configuration"),
        (("slow", "broken"), StartFailed, "rank-1-0 ended 5 times before it was ready, with 1;"),
    ],
)
def test_the_rank_that_ended_first_is_named(
    folder: Path, log: RedisLog, modes: tuple[str, str], error: type[Exception], says: str
) -> None:
    jobs = [ranks(folder, mode)[rank] for rank, mode in enumerate(modes)]
    with supervised(folder, log, *jobs) as supervisor, pytest.raises(error, match=says):
        supervisor.wait_until_ready(60)


def test_workers_that_end_together_have_the_same_time(
    folder: Path, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []
    with supervised(folder, log, *ranks(folder, "slow")) as supervisor:
        until(lambda: len(starts(folder)) == 2)
        monkeypatch.setattr(supervisor, "_end", lambda child, deadline_s: deadlines.append(deadline_s))
        supervisor.stop([["generate"]])
    assert len(deadlines) == 2 and len(set(deadlines)) == 1


def test_stages_end_in_the_order_given(folder: Path, log: RedisLog) -> None:
    stages = ("generate", "tokenize", "web")
    with supervised(folder, log, *(job(folder, stage) for stage in stages)) as supervisor:
        assert supervisor.wait_until_ready(30)
        supervisor.stop([["web"], ["tokenize", "generate"]])
    first, *others = (folder / "ends").read_text().split()
    assert first == "web" and sorted(others) == ["generate", "tokenize"]


def test_a_worker_that_does_not_end_in_time_is_killed(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, job(folder, "web", "deaf", drain_s=0.2)) as supervisor:
        assert supervisor.wait_until_ready(30)
        ((pid, _),) = starts(folder)
        supervisor.stop([["web"]])
        assert not psutil.pid_exists(pid)


def test_a_signal_ends_the_wait_for_readiness(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, job(folder, "generate", "slow")) as supervisor:
        supervisor.signals = 1
        began_s = time.monotonic()
        assert not supervisor.wait_until_ready(60)
        assert time.monotonic() - began_s < 60


def test_the_children_write_where_they_are_told_to(folder: Path, log: RedisLog) -> None:
    (folder / "worker.py").write_text("import os\nos.write(1, b'out ')\nos.write(2, b'err')\nraise SystemExit(2)\n")
    with (folder / "output").open("wb") as output:
        supervisor = Supervisor(
            lambda: log,
            [job(folder, "generate")],
            program=(sys.executable, str(folder / "worker.py")),
            environment=os.environ,
            watch_redis=lambda: None,
            output=output,
        )
        supervisor.start()
        with pytest.raises(ChildFailed):
            supervisor.wait_until_ready(30)
    assert (folder / "output").read_bytes() == b"out err"


def test_who_is_late_is_shown_until_nobody_is(folder: Path, log: RedisLog) -> None:
    shown: list[list[str]] = []
    with supervised(folder, log, job(folder, "tokenize")) as supervisor:
        assert supervisor.wait_until_ready(30, lambda late: shown.append(list(late)))
    assert shown[0] == ["tokenize-0 (starting)"] and shown[-1] == []


def test_it_runs_until_what_it_is_told(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log, job(folder, "tokenize")) as supervisor:
        supervisor.run(until=lambda: len(starts(folder)) == 1)
        assert supervisor.signals == 0


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_as_before")
def test_an_interrupt_of_somebody_else_does_not_count_and_a_termination_does(folder: Path, log: RedisLog) -> None:
    with supervised(folder, log) as supervisor:
        supervisor.listen()
        with supervisor.without_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            assert supervisor.signals == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert supervisor.signals == 1
        os.kill(os.getpid(), signal.SIGINT)
        assert supervisor.signals == 2


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("ends", ["a child", "itself"])
def test_once_all_are_ready_it_sleeps_until_a_signal_comes(
    folder: Path, log: RedisLog, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stage.supervisor.SETTLED_POLL_S", 600.0)
    asleep, killed = select.select, list[int]()

    def killing(heard: list[int], _writable: list[int], _broken: list[int], timeout_s: float) -> object:
        if not killed:
            killed.append(starts(folder)[0][0] if ends == "a child" else os.getpid())
            os.kill(killed[0], signal.SIGKILL if ends == "a child" else signal.SIGTERM)
        return asleep(heard, [], [], timeout_s)

    with supervised(folder, log, job(folder, "tokenize")) as supervisor:
        supervisor.listen()
        assert supervisor.wait_until_ready(30)
        monkeypatch.setattr("pipeline.stage.supervisor.select.select", killing)
        supervisor.run(until=lambda: len(starts(folder)) == 2)
    assert supervisor.signals == (ends == "itself") and killed
