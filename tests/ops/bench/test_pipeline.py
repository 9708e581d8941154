"""`minisgl bench pipeline`: every figure is there, and nothing of it stays in the Redis that was given."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.memory_log.log import MemoryLog
from support.redis_servers import Servers, command
from support.servers import run_command

from ops.bench import pipeline_clients
from ops.bench.pipeline import STEPS_OF_A_LIFE, TABLES, Lives, median_of
from ops.bench.pipeline_clients import Unanswered, carry_out
from ops.bench.pipeline_way import IdleEngine, added_us, step_times_alone
from ops.bench.report import Spread
from pipeline.events import SamplingParams
from pipeline.log.protocol import Inbox
from pipeline.names import Names
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample


def test_a_life_has_every_commit_and_leaves_no_work_behind() -> None:
    log = MemoryLog(Names("bench"))
    times_us = Lives(log, 10).times_us(2 * STEPS_OF_A_LIFE)
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
        lives = Lives(log, rows)
        assert len(lives.times_us(1)["step"]) == STEPS_OF_A_LIFE
        lives.close()


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = [sys.executable, "-P", pipeline_clients.__file__, str(server.getsockname()[1]), "1"]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            server.accept()[0].close()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
            assert said == b"" and process.returncode == 0


WHOLE = b'HTTP/1.1 200 \r\nContent-Length: 26\r\n\r\n{"finish_reason":"length"}'
STREAMED = b'HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n1b\r\n{"finish_reason":"length"}\n\r\n0\r\n\r\n'


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (WHOLE, ""),
        (STREAMED, ""),
        (STREAMED.replace(b"length", b"stop"), '"finish_reason":"stop"'),
        (WHOLE.replace(b"200", b"503"), "503"),
        (WHOLE[:-1], "bytes read"),
        (STREAMED[:-1], "bytes read"),
    ],
)
def test_clients_that_cost_little_still_see_that_every_answer_is_right(answer: bytes, error: str) -> None:
    async def scenario() -> int:
        num_requests = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_requests
            while head := await reader.read(65536):
                assert head.startswith(b"POST /v1/chat/completions ") and b'"max_tokens": 3' in head
                num_requests += 1
                writer.write(answer)
                if error:
                    break
            writer.close()
            await writer.wait_closed()
            closed.release()

        closed = asyncio.Semaphore(0)
        async with await asyncio.start_server(serve, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            try:
                await carry_out({"max_tokens": 3}, 4, connections)
            finally:
                for _, writer in connections:
                    writer.close()
                    await writer.wait_closed()
                    await closed.acquire()
        return num_requests

    if error:
        with pytest.raises(Unanswered, match=error):
            asyncio.run(scenario())
    else:
        assert asyncio.run(scenario()) == 2 * 4


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
