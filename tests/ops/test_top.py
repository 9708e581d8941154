"""`minisgl top` on a real Redis: one snapshot as text and as JSON, and the live screen on a terminal of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support.lived_requests import LivedRequests
from support.redis_servers import Servers, command, running_server
from support.selection import rest_at_night
from support.servers import ROOT
from support.stand_in_stages import StandIn
from support.terminal import on_a_terminal
from support.tool import Tool

from ops.top.screen import Screenful, age, lines_of, shares
from pipeline.events import (
    Cancelled,
    Chunk,
    EventRow,
    Failed,
    Preempted,
    SamplingParams,
    StepCompleted,
    StepStats,
    Submitted,
    encode,
)
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.log.snapshot import RedisFacts
from pipeline.names import Names
from pipeline.views.pipeline import MOST_REQUESTS, EngineView, PipelineView, SlotView, StreamView, view_of
from pipeline.views.reader import SCANNED_AT_START, Reader, as_json
from pipeline.views.requests import RequestView

SOON = ("--interval", "0.05")
EVENT = Submitted(endpoint="/v1/completions", frontend="web-0", prompt="endless", sampling=SamplingParams())


@pytest.fixture
def top(redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.delenv("COLUMNS", raising=False)  # a terminal that the tests are run from may have set it
    return Tool("top --interval 0.05", redis_url, capsys)


# one snapshot


@pytest.mark.parametrize("arguments", [("--once",), ()], ids=["--once", "the output is no terminal"])
def test_a_snapshot_shows_stages_streams_engines_and_requests(
    lived: LivedRequests, top: Tool, arguments: tuple[str, ...]
) -> None:
    uid = lived.running()
    lived.tokens(uid, "a", "b")
    lived.finished(uid, 2)
    queued = lived.submitted()
    lines = top(*arguments)
    assert lines[0].startswith("no server listens  Valkey 9.")
    words = [line.split() for line in lines]
    assert ["generate-0", "held", "1", "60,000", "ms", "0"] in [[*row[:3], "60,000", *row[4:]] for row in words if row]
    assert ["submitted", "1", "0", "1", "live", "requests", "1"] in words
    assert ["tokenized", "1", "0", "1", "dead", "letters", "0"] in words
    requests = [row for row in words if row and row[0] in (uid, queued)]
    assert [row[:3] for row in requests] == [[queued, "queued", requests[0][2]], [uid, "finished", "stop"]]
    assert requests[1][-6:] == ["3", "2", "2", "1,000", "generate-0", "/v1/completions"]
    assert all(line == line.rstrip() and line.isprintable() for line in lines)


def test_as_json_it_is_one_object_on_one_line(lived: LivedRequests, top: Tool) -> None:
    failed, cancelled = sorted((lived.submitted(), lived.submitted()))  # two of one millisecond have any order
    lived.ended(failed, Failed(status=500, code="oops", message="It broke."))
    lived.ended(cancelled, Cancelled(by="client"))
    (line,) = top("--once", "--json")
    view = json.loads(line)
    assert [(each["uid"], each["state"], each["reason"]) for each in view["requests"]] == [
        (cancelled, "cancelled", "by client"),
        (failed, "failed", "oops"),
    ]
    assert [slot["slot"] for slot in view["slots"]] == ["generate-0", "detokenize-0"]
    assert [each["stream"] for each in view["streams"]] == ["submitted", "tokenized", "steps:generate-0"]
    assert view["redis"]["name"] == "Valkey" and view["redis"]["version"].startswith("9.")
    assert view["error"] == ""
    assert [engine["output_tokens_per_s"] for engine in view["engines"]] == [None]


def test_running_stages_are_shown_as_they_are(redis_url: str, log: RedisLog, top: Tool) -> None:
    stand_in = StandIn(redis_url, renews=True)
    try:
        uids = [f"{number:032x}" for number in range(3)]
        for uid in uids:
            log.submit(uid, [EVENT])
        view: dict[str, Any] = {}
        while len([each for each in view.get("requests", []) if each["tokens_per_s"]]) < 3:
            view = top.json("--once")
    finally:
        stand_in.close()
    by_slot = {slot["slot"]: slot for slot in view["slots"]}
    assert {slot: (each["phase"], each["host"]) for slot, each in by_slot.items()} == dict.fromkeys(
        ("tokenize-0", "generate-0", "detokenize-0"), ("ready", "here")
    )
    assert by_slot["generate-0"]["pending"] == 3 and view["num_live"] == 3
    assert [(each["model"], each["context"]) for each in view["engines"]] == [("org/demo", 128)]
    seen = [(each["uid"], each["state"], each["engine"], each["prompt_tokens"]) for each in view["requests"]]
    assert seen == [(uid, "running", "generate-0", 5) for uid in reversed(uids)]


def test_the_last_steps_of_an_engine_and_what_waits_there_come_from_its_journal(
    lived: LivedRequests, log: RedisLog, top: Tool
) -> None:
    lived.submitted()
    assert not any(line.startswith("last steps") for line in top("--once"))
    for number, forward_ms in enumerate((10, 1500, 20), 1):
        chunks = (Chunk(uid="a", start=0, count=500), Chunk(uid=f"b{number}", start=0, count=250))
        preempted = EventRow(uid="c", n=3, event=Preempted(engine="generate-0", epoch=1, step=number))
        figures = StepStats(forward_ms=forward_ms, waiting=7 - number, free_pages=number, decode_rows=number)
        step = StepCompleted(rows=(preempted,), chunks=chunks if number > 1 else (), figures=figures)
        entry = Entry(f"1-{number}", {"ms": str(number)} | encode(step))
        fields = itertools.chain(*JournalWriter().fields(entry, step).items())
        command(log.url, "XADD", Names().journal("generate-0"), entry.id, *fields)
    lines = top("--once")
    at = next(place for place, line in enumerate(lines) if line.startswith("last steps"))
    name, _, *words = lines[at + 1].split()
    assert name == "generate-0"
    assert words == ["3", "20.0", "ms", "1.50", "s", "3", "1,500", "(3)", "3", "4", "3"]
    (steps,) = top.json("--once")["steps"]
    assert (steps["longest_ms"], steps["prompt_tokens"], steps["waiting"]) == (1500, 1500, 4)
    command(log.url, "XADD", Names().journal("generate-0"), "2-1", "rows", "of a newer version")
    assert top.json("--once")["steps"] == []


def test_another_namespace_is_another_log(lived: LivedRequests, top: Tool) -> None:
    lived.submitted()
    lines = top("--once", "--namespace", "blue")
    assert "no workers: none has registered under this --namespace" in lines
    assert "no requests" in lines


def test_of_many_that_live_the_newest_are_shown(lived: LivedRequests, top: Tool) -> None:
    uids = sorted((lived.submitted() for _ in range(MOST_REQUESTS + 30)), reverse=True)
    view = top.json("--once")
    assert [each["uid"] for each in view["requests"]] == uids[:MOST_REQUESTS]
    assert view["num_live"] == len(uids)


def test_a_request_that_came_and_went_between_two_looks_is_found(lived: LivedRequests, log: RedisLog) -> None:
    reader = Reader(log)
    reader.read()
    uid = lived.running()
    lived.tokens(uid, "a")
    lived.finished(uid, 1)
    assert [(each.uid, each.state) for each in view_of(reader.read()).requests] == [(uid, "finished")]


def test_a_long_prompt_is_read_once_and_the_tokens_of_an_answer_are_not(lived: LivedRequests, log: RedisLog) -> None:
    def sent() -> int:
        said = command(log.url, "INFO", "stats").decode()
        return int(said.partition("total_net_output_bytes:")[2].split()[0])

    def read() -> int:
        before = sent()
        (shown,) = view_of(reader.read()).requests
        assert shown.output_tokens == 300
        return sent() - before

    uid = lived.running(prompt="x" * 200_000)
    lived.tokens(uid, *("y" * 100 for _ in range(300)))
    reader = Reader(log)
    first, second = read(), read()
    assert first > 200_000 > 25_000 > second
    assert first < 230_000


def test_at_the_start_a_bounded_number_of_keys_is_looked_at(log: RedisLog, lived: LivedRequests) -> None:
    for first in range(0, 2 * SCANNED_AT_START, 1000):
        command(log.url, "MSET", *(word for number in range(first, first + 1000) for word in (f"k{number}", "")))
    command(log.url, "CONFIG", "RESETSTAT")
    Reader(log).read()
    said = command(log.url, "INFO", "commandstats").decode()
    scans = int(said.partition("cmdstat_scan:calls=")[2].partition(",")[0])
    assert scans == SCANNED_AT_START // 1000


# a program reads it


@contextlib.contextmanager
def program(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run it as a program that prints snapshots until the block ends."""
    command = [sys.executable, str(ROOT / "minisgl.py"), "top", "--redis-url", url, *SOON, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def views_of(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    return (json.loads(line) for line in process.stdout)


def test_as_json_it_goes_on_and_ends_quietly_when_its_reader_does(lived: LivedRequests, redis_url: str) -> None:
    with program(redis_url) as process:
        moments = [view["at_ms"] for view in itertools.islice(views_of(process), 3)]
        assert moments[0] < moments[1] < moments[2]
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_as_json_it_says_that_redis_does_not_answer_and_goes_on(redis_servers: Servers, tmp_path: Path) -> None:
    binary = redis_servers.binary("embedded")
    with contextlib.ExitStack() as stack:
        with running_server(binary, tmp_path) as server:
            views = views_of(stack.enter_context(program(server.url)))
            last = next(views)
            assert last["error"] == ""
        while not (silent := next(views))["error"]:
            last = silent
        assert silent["redis"] == last["redis"]
        with running_server(binary, tmp_path):
            assert next(view for view in views if not view["error"])["at_ms"] > silent["at_ms"]


# what stands on a screen

HOSTILE = "\x1b[2J\n漢字" * 9
SNAPSHOT = PipelineView(
    at_ms=1,
    redis=RedisFacts("Redis", "7.0.15", 90_000, 3_200_000, 10**10),
    slots=tuple(
        SlotView(f"generate-{index}", "away" if index % 2 else "loading", "d", 0.5, "h" * 30, 7, 1, 0, 0, "", 0)
        for index in range(30)
    ),
    streams=tuple(StreamView(f"steps:generate-{index}", 1, 1, 0) for index in range(30)),
    num_live=1,
    num_dead=2,
    engines=tuple(EngineView(f"generate-{index}", "m", 128) for index in range(30)),
    requests=tuple(
        RequestView(f"{index:032}.{index}", "running", "", "/v1", 1, None, 1, 0, 1, 0.5, "generate-0")
        for index in range(50)
    ),
)
SPOILT = replace(
    SNAPSHOT,
    error=HOSTILE,
    redis=replace(SNAPSHOT.redis, version=HOSTILE),
    slots=tuple(replace(slot, detail=HOSTILE, host=HOSTILE, address=HOSTILE) for slot in SNAPSHOT.slots),
    engines=(EngineView("generate-0", HOSTILE, 128),),
    requests=tuple(replace(each, uid=HOSTILE, reason=HOSTILE, endpoint=HOSTILE) for each in SNAPSHOT.requests),
)
EMPTY = replace(SNAPSHOT, slots=(), streams=(), engines=(), requests=())


@pytest.mark.parametrize("view", [SNAPSHOT, SPOILT, EMPTY], ids=["full", "spoilt", "empty"])
def test_a_screenful_is_never_larger_than_its_terminal_and_sends_it_nothing_but_text(view: PipelineView) -> None:
    for width, height in itertools.product((1, 20, 80, 110, 200, 400), (1, 2, 5, 10, 24, 40, 300)):
        lines = [line.plain for line in Screenful(view, silent_s=3, paused=True).lines(width, height)]
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        assert all(line.isprintable() for line in lines)


def test_as_text_nothing_is_left_out() -> None:
    lines = [line.plain for line in lines_of(SNAPSHOT)]
    assert [sum(line.startswith(name) for line in lines) for name in ("generate-", "steps:", "0000")] == [60, 30, 50]
    assert not any("…" in line for line in lines)
    assert all(line.plain.isprintable() for line in lines_of(SPOILT))


def test_what_a_log_holds_is_escaped_in_json_too() -> None:
    assert as_json(SPOILT).count(b"\n") == 1 and b"\x1b" not in as_json(SPOILT)


def test_on_a_small_screen_every_part_has_its_share_says_that_there_is_more_and_leaves_out_empty_slots_first() -> None:
    lines = [line.plain for line in Screenful(SNAPSHOT).lines(80, 24)]
    assert len(lines) == 24
    cut = [line for line in lines if line.startswith("…")]
    assert cut == ["… and 27 more", "… and 27 more", "… and 26 more", "… and older ones"]
    heads = [line.split()[0] for line in lines if line.split()[0] in ("stage", "stream", "engine", "request")]
    assert heads == ["stage", "stream", "engine", "request"]
    assert [line.split()[0] for line in lines[2:5]] == ["generate-0", "generate-2", "generate-4"], (
        "who is away is left out"
    )


@pytest.mark.parametrize(
    ("room", "wants", "given"),
    [
        (10, [2, 3], [2, 3]),
        (10, [2, 30], [2, 8]),
        (9, [5, 50, 50], [3, 3, 3]),
        (2, [5, 5, 5], [0, 1, 1]),
        (0, [1], [0]),
        (5, [0, 9], [0, 5]),
    ],
    ids=str,
)
def test_room_is_shared(room: int, wants: list[int], given: list[int]) -> None:
    assert shares(room, wants) == given


def test_a_span_of_time_is_short() -> None:
    spans = [0, 1_234, 59_999, 60_000, 3_599_000, 3_600_000, 172_800_000]
    assert [age(ms) for ms in spans] == ["0.0 s", "1.2 s", "59 s", "1m00s", "59m59s", "1h00m", "2d00h"]


def test_a_uid_is_whole_at_80_columns_so_that_trace_takes_it(lived: LivedRequests, log: RedisLog) -> None:
    uid = lived.submitted()
    view = view_of(Reader(log).read())
    assert any(line.plain.split()[:1] == [uid] for line in Screenful(view).lines(80, 24))


# on a terminal


@pytest.fixture
def watched(redis_url: str, tmp_path: Path) -> Callable[..., Any]:
    """Open a terminal on which it runs."""

    def opened(columns: int = 80, rows: int = 24, *, url: str = redis_url, **environment: str) -> Any:
        words = ("top", "--redis-url", url, *SOON)
        return on_a_terminal(words, tmp_path, environment, columns=columns, rows=rows)

    return opened


def assert_whole(lines: list[str]) -> None:
    """See that each part is there once, in its place."""
    assert "Valkey 9." in lines[0] or "Redis has not answered" in lines[0]
    heads = ["stage", "stream", "engine", "request"]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in heads] == heads
    assert [line for line in lines if line][-1].startswith("q quits  space pauses")
    assert sum("q quits" in line for line in lines) == 1


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), pytest.param(120, 40, marks=pytest.mark.night)])
def test_the_screen_is_whole_while_it_changes_and_q_leaves_it(
    lived: LivedRequests, watched: Callable[..., Any], columns: int, lines: int
) -> None:
    uids = [lived.running() for _ in range(45)]
    with watched(columns, lines) as screen:
        shown = screen.shows(max(uids), "and older ones")
        assert_whole(shown)
        assert b"\x1b[32m" in screen.sent, "colors, which test_no_color_is_heeded misses"
        assert len([line for line in shown if line]) >= lines - 4
        new = lived.submitted()
        assert_whole(screen.shows(new))
        screen.press("q")
        assert screen.ended() == 0
        assert screen.sent.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")  # the cursor, and what was there before


def test_it_follows_the_size_of_its_terminal(lived: LivedRequests, watched: Callable[..., Any]) -> None:
    uids = [lived.running() for _ in range(45)]
    with watched(120, 40) as screen:
        screen.shows(max(uids), "took")
        screen.resize(80, 24)
        assert_whole(screen.shows(max(uids), "tok/s eng", without="took"))
        screen.resize(140, 50)
        assert_whole(screen.shows(max(uids), "endpoint", "took"))


def test_space_holds_the_snapshot_and_lets_it_go_on(lived: LivedRequests, watched: Callable[..., Any]) -> None:
    with watched() as screen:
        screen.shows("no requests", "space pauses")
        screen.press(" ")
        _, *held = screen.shows("paused", "space continues")
        uid = lived.submitted()
        deadline_s = time.monotonic() + 0.5  # many snapshots long
        while time.monotonic() < deadline_s:
            assert screen.shows("paused")[1:] == held  # the head also says if Redis is slow, on a busy machine
        screen.press(" ")
        screen.shows(uid, "space pauses", without="paused")


@pytest.mark.parametrize("end", rest_at_night([signal.SIGTERM, "\x03", "q"]), ids=["SIGTERM", "Ctrl-C", "q"])
def test_however_it_ends_it_leaves_the_terminal_as_it_was(
    watched: Callable[..., Any], end: str | signal.Signals
) -> None:
    with watched() as screen:
        screen.shows("q quits")
        assert not screen.child.getecho()
        # Ctrl-Z would leave the shell with this screen.
        assert not termios.tcgetattr(screen.child.child_fd)[3] & termios.ISIG
        screen.press(end) if isinstance(end, str) else screen.child.kill(end)
        assert screen.ended() == (0 if isinstance(end, str) else 143) and screen.child.getecho()
        assert screen.sent.rstrip().endswith(b"\x1b[?1049l")


def test_it_says_that_redis_is_gone_and_goes_on_when_it_is_back(
    redis_servers: Servers, tmp_path: Path, watched: Callable[..., Any]
) -> None:
    binary = redis_servers.binary("embedded")
    with contextlib.ExitStack() as stack:
        with running_server(binary, tmp_path) as server:
            log = stack.enter_context(contextlib.closing(RedisLog(server.url, Names())))
            uid = LivedRequests(log).submitted()
            dimmed = b"\x1b[2m" + uid.encode()
            screen = stack.enter_context(watched(url=server.url))
            screen.shows(uid)
            assert dimmed not in screen.sent
            server.process.kill()
            assert_whole(screen.shows("Redis has not answered for", uid))
            assert dimmed in screen.sent
        with running_server(binary, tmp_path):
            screen.shows("Valkey 9.", "no requests", without="has not answered")
            screen.press("q")
            assert screen.ended() == 0


def test_a_redis_that_hangs_does_not_hold_the_keys(
    redis_servers: Servers, tmp_path: Path, watched: Callable[..., Any]
) -> None:
    with running_server(redis_servers.binary("embedded"), tmp_path) as server, watched(url=server.url) as screen:
        screen.shows("no requests")
        server.process.send_signal(signal.SIGSTOP)
        try:
            screen.shows("Redis has not answered for")
            screen.press("q")
            assert screen.ended() == 0
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_on_a_terminal_that_has_no_screen_it_is_one_snapshot(lived: LivedRequests, watched: Callable[..., Any]) -> None:
    uid = lived.submitted()
    with watched(TERM="dumb") as screen:
        assert screen.ended() == 0
        assert uid in screen.text and b"\x1b" not in screen.sent


def test_no_color_is_heeded(lived: LivedRequests, watched: Callable[..., Any]) -> None:
    lived.running()
    with watched(NO_COLOR="1") as screen:
        screen.shows("running")
        assert b"\x1b[32m" not in screen.sent
