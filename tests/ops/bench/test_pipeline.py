"""`minisgl bench pipeline`: every figure is there, and nothing of it stays in the Redis that was given."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.memory_log.log import MemoryLog
from support.openai_stand_in import DONE, Body, Frames, OpenAIStandIn, data, usage_chunk, whole
from support.redis_servers import Servers, command
from support.servers import ROOT, run_command

from ops.bench.pipeline import STEPS_OF_A_LIFE, TABLES, commit_times, median_of
from ops.bench.pipeline_way import PROMPT, IdleEngine, PipelineStuck, added_us, step_times_alone, web_times
from ops.bench.report import Spread
from ops.bench.targets import program
from pipeline.events import SamplingParams
from pipeline.log.protocol import Inbox
from pipeline.names import Names
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample


def test_a_life_has_every_commit_and_leaves_no_work_behind() -> None:
    log = MemoryLog(Names("bench"))
    times_us = commit_times(log, 2 * STEPS_OF_A_LIFE, 10)
    assert {name: len(times) for name, times in times_us.items()} == {
        "submit": 20,
        "tokenized": 20,
        "take": 4,  # eight at most
        "step": 8,
        "produced": 8,
        "end": 20,
    }
    assert all(time_us > 0 for times in times_us.values() for time_us in times)
    names = log.names
    for inbox in (Inbox.submitted(names), Inbox.tokenized(names), Inbox.steps(names, "generate-0")):
        assert log.backlog(inbox) == 0


def test_another_number_of_rows_can_follow() -> None:
    log = MemoryLog(Names("bench"))
    for rows in (1, 3):
        assert len(commit_times(log, 1, rows)["step"]) == STEPS_OF_A_LIFE


STOPPED = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def row(table: int) -> PlanRow:
    sample = Sample(SamplingParams(), 1, ())
    return PlanRow(table=table, start=1, token_ids=(1,), new_pages=(), first_page=1, sample=sample)


def test_only_steps_in_which_everybody_decodes_are_compared() -> None:
    engine = IdleEngine(0.0)
    for num_rows, num_decodes in ((2, 1), (2, 2), (2, 2), (1, 1), (2, 2), (2, 2), (2, 2)):
        rows = tuple(map(row, range(num_rows)))
        assert engine.forward(BatchPlan(1, rows, num_decodes)).token_ids == [65] * num_rows
    assert len(engine.intervals_us(2)) == 3


def test_a_schedule_alone_decodes_all_but_the_first_token_together() -> None:
    assert len(step_times_alone(3, 10, IdleEngine(0.0))) == 8  # from the second to the tenth


def test_the_median_is_taken_of_each_figure() -> None:
    spreads = [Spread(9, 1.0, 5.0, 3.0, 9.0), Spread(7, 2.0, 6.0, 1.0, 7.0), Spread(8, 3.0, 1.0, 2.0, 8.0)]
    assert median_of(spreads) == Spread(7, 2.0, 5.0, 2.0, 8.0)


def test_what_is_added_is_the_difference_to_the_schedule_alone() -> None:
    figures = added_us(4, [10.0, 10.0], [14.0, 22.0])
    assert (figures["added to a step"], figures["added to a token"]) == ([8.0], [2.0])


def test_ctrl_c_does_not_reach_the_clients() -> None:
    command = program("pipeline_way:web_clients", os.getpid(), 1)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and float(process.stdout.readline()) < 100  # it was watched at rest
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 0


def asked_of_web(url: str) -> dict[str, list[float]]:
    return asyncio.run(web_times(os.getpid(), url, 0.0, 2, 4, 16, 6))


def test_every_request_to_the_web_process_has_the_length_that_it_needs(stand_in: OpenAIStandIn) -> None:
    assert set(asked_of_web(stand_in.url)) == {"streamed token", "streamed request", "other request"}
    assert Counter(body["max_tokens"] for body in stand_in.bodies) == {8: 50, 1: 6, 4: 4}  # those that are streamed
    assert all(body["ignore_eos"] and body["prompt"] == PROMPT for body in stand_in.bodies)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (lambda body: [*whole(body)[:-3], STOPPED, usage_chunk(1, body["max_tokens"]), DONE], "stop"),
        (lambda body: (503, {"error": {"message": "full"}}), "503"),
        (lambda body: whole(body)[:2], "finish_reason"),
    ],
)
def test_an_answer_that_is_wrong_or_torn_ends_the_measurement(
    script: Callable[[Body], Frames | tuple[int, object]], says: str, stand_in: OpenAIStandIn
) -> None:
    stand_in.script = script
    with pytest.raises(PipelineStuck, match=says):
        asked_of_web(stand_in.url)


def test_a_whole_answer_of_another_end_ends_it_too(stand_in: OpenAIStandIn) -> None:
    stand_in.reason = "stop"
    with pytest.raises(PipelineStuck, match="stop"):
        asked_of_web(stand_in.url)


def bench(folder: Path, *flags: str) -> tuple[int, str]:
    running = run_command(["bench", "pipeline", *flags], folder)
    return running.process.wait(240), running.output


@pytest.mark.slow
@pytest.mark.night
def test_a_small_run_gives_every_figure_and_leaves_no_key(redis_servers: Servers, tmp_path: Path) -> None:
    url = redis_servers.url("embedded")
    command(url, "SET", "somebody else's", "1")
    words = "--rows 1 3 --way-rows 1 2 --samples 4 --tokens 16 --step-time 0.001 --runs 2 "
    flags = (words + "--web-requests 8 --web-tokens 32").split(" ")
    output = tmp_path / "figures.json"
    code, printed = bench(tmp_path, "--redis-url", url, *flags, "--output", str(output))
    assert code == 0, printed
    assert command(url, "KEYS", "*") == [b"somebody else's"]

    figures: dict[str, Any] = json.loads(output.read_text())
    assert set(figures["commits"]) == {"submit", "tokenized", "take", "step", "produced", "end"}
    ways = {f"{rows}, {step} ms" for rows in ("1 row", "2 rows") for step in (0, 1)}
    loads = {name: {"1 row", "3 rows"} for name in ("host", "frames", "commits")} | {"way": ways, "web": ways}
    for name in TABLES:
        for figure, of_load in figures[name].items():
            assert set(of_load) == loads[name]
            assert all(each["count"] and each["p50"] <= each["p99"] for each in of_load.values())
            assert figure.startswith("added") or all(each["p50"] > 0 for each in of_load.values())
    assert all(us["p50"] >= 1000 for load, us in figures["way"]["plain loop"].items() if load.endswith("1 ms"))
    for load, token in figures["web"]["streamed token"].items():
        assert token["p50"] < figures["web"]["streamed request"][load]["p50"]
    request = figures["finished_request"]
    assert (request["prompt_tokens"], request["output_tokens"]) == (32, 200)
    assert request["num_entries"] == 2 + 1 + 200 + 1  # submitted, tokenized; admitted; tokens; finished
    assert 5_000 < request["history_bytes"] < 50_000
    assert figures["setup"]["redis"]["redis_version"] and figures["setup"]["versions"]["hiredis"]
    assert figures["setup"]["cpu"] and figures["options"]["runs"] == 2
    for words in (*(title for title, _ in TABLES.values()), f"{request['history_bytes']:,} bytes in"):
        assert words in printed
