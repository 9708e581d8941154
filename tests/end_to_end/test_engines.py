"""`serve --dp 2`: two engines share the requests, do each other's when one dies, and a third one comes and goes."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.selection import by_night
from support.servers import Server, eventually, is_alive, run_command, serve
from support.streams import (
    BURST,
    WORDS,
    answer_of,
    answers_of,
    assert_nothing_is_left,
    burst,
    engines_of,
    events_of,
    num_of,
    steady_load,
    uids_of,
)

from ops.bench.models import NONSENSE_ID
from pipeline.events import Admitted, AnyEvent, Finished
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE
from pipeline.stage.slots import read_statuses

pytestmark = [pytest.mark.slow, pytest.mark.night]

ENGINES = ("generate-0", "generate-1")
NUM_BURSTS = by_night(1, 5)
SHORT, LONG = 32, 600
"""Tokens of answers, and of those that are long enough to be disturbed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder, "--dp", "2", "--page-size", "16") as server:
        yield server
        assert server.command.stop(signal.SIGINT) == 0
        assert "Traceback" not in server.command.output


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple[str, str]]:
    with burst(server, LONG) as coming:
        return answers_of(coming)


def in_hand(log: RedisLog, slot: str) -> list[str]:
    return [entry.fields["uid"] for entry in log.pending(Inbox.tokenized(log.names), slot)]


def computed_by(events: list[AnyEvent]) -> list[str]:
    """Return the engines that had a request in hand, one after the other."""
    return [event.engine for event in events if isinstance(event, Admitted)]


def test_each_engine_has_a_detokenizer_and_its_part_of_the_threads(server: Server) -> None:
    assert [len(server.command.workers(stage)) for stage in (GENERATE, DETOKENIZE)] == [2, 2]
    lines = [worker.cmdline() for worker in server.command.workers(GENERATE)]
    assert {line[line.index("--engines") + 1] for line in lines} == {"2"}
    loaded = server.command.log_lines("engine_loaded")
    assert len({(line["threads"], line["pages"]) for line in loaded}) == 1


def test_engines_share_each_burst(server: Server) -> None:
    taken = []
    with server.log() as log:
        for _ in range(NUM_BURSTS):
            with burst(server, SHORT, num_words=WORDS) as coming:
                answers_of(coming)
            found = engines_of(log, uids_of(coming))
            taken.append([found[engine] for engine in ENGINES])
    assert all(sum(each) == BURST and min(each) >= 16 for each in taken), taken
    assert 24 <= statistics.median(first for first, _ in taken) <= 40, taken


def test_the_requests_of_a_killed_engine_end_at_the_other_as_if_nothing_had_happened(
    server: Server, undisturbed: list[tuple[str, str]]
) -> None:
    num_deaths = len(server.command.log_lines("worker_died"))
    with server.log() as log:
        (victim,) = (status for status in read_statuses(log, GENERATE) if status.slot == "generate-1")
        with burst(server, LONG) as coming:
            eventually(lambda: all(len(in_hand(log, slot)) >= 4 for slot in ENGINES), "both have some in hand")
            psutil.Process(victim.pid).kill()
            assert answers_of(coming) == undisturbed
        events = [events_of(log, uid) for uid in uids_of(coming)]
        assert [num_of(each, Finished) for each in events] == [1] * BURST
        assert any(by[0] == "generate-1" != by[-1] for by in map(computed_by, events)), "some have moved"
        assert_nothing_is_left(log, *ENGINES)
        assert len(server.command.log_lines("worker_died")) == num_deaths + 1
        eventually(lambda: len({status.slot for status in read_statuses(log, GENERATE)}) == 2, "it is there again")


def test_an_engine_that_joins_takes_its_share_and_hands_it_over_when_it_leaves(
    server: Server, undisturbed: list[tuple[str, str]], folder: Path
) -> None:
    """It needs no detokenizer of its own: another one serves it as a guest."""
    model = folder / "models" / NONSENSE_ID
    flags = ["--redis-url", server.redis_url, "--model", str(model), "--page-size", "16", "--threads", "1"]
    with server.log() as log:
        with steady_load(server, LONG) as answers:
            joining = run_command(["stage", "generate", *flags], folder / "joining")
            try:
                eventually(lambda: len(in_hand(log, "generate-2")) > 1, "it has its share", timeout_s=120)
                (worker,) = joining.workers(GENERATE)
                assert joining.stop() == 0 and not is_alive(worker)
            finally:
                joining.stop()
        told = [(number, answer) for number, several in answers.items() for answer in several]
        assert [answer_of(answer) for _, answer in told] == [undisturbed[number] for number, _ in told]
        events = [events_of(log, answer.headers["x-minisgl-uid"]) for _, answer in told]
        assert any(by[0] == "generate-2" != by[-1] for by in map(computed_by, events)), "some were handed over"
        assert_nothing_is_left(log, *ENGINES, "generate-2")


def test_two_engines_of_two_ranks_each_share_a_burst(folder: Path) -> None:
    flags = ("--dp", "2", "--tp", "2", "--dtype", "float32", "--page-size", "16", "--threads", "1")
    with serve(folder / "ranks", *flags) as server, server.log() as log:
        assert len(server.command.workers(GENERATE)) == 4
        answers = []
        for _ in range(2):
            with burst(server, SHORT, num_words=WORDS) as coming:
                answers.append(answers_of(coming))
            assert min(engines_of(log, uids_of(coming))[engine] for engine in ENGINES) >= 16
        assert answers[0] == answers[1], "each request has the same bits, whichever engine computes it"
