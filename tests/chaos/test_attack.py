"""`make attack`: its clients see what happened, a broken bound is said, and a real server stands it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tokenizers
from chaos.attack import bodies
from chaos.attack.__main__ import AttackConfig, Run, Seen, broken, main, table
from chaos.attack.bodies import LARGEST_BODY, LETTER_A, NO_CHARACTER, giant_bodies
from chaos.attack.clients import Reading, Result, Streams, attacker, health, newcomers, streams
from chaos.attack.kinds import ALONE, KINDS, Attack, Order
from chaos.attack.target import Server, read_deaths
from chaos.attack.wire import ATTACKERS_HOST
from support.openai_stand_in import (
    DONE,
    Body,
    Frames,
    Hold,
    OpenAIStandIn,
    data,
    listening,
    text_chunk,
    usage_chunk,
    whole,
)

from ops.bench.models import nonsense

T = TypeVar("T")
SEEN = Seen(
    length_s=10.0,
    health={"ms": [1.0] * 99 + [50.0], "failures": 0},
    streams={"whole": 9, "early": [], "refused": 0, "longest_pause_ms": 100.0},
    newcomers={"first_ms": [30.0], "answers": {"chats": {"200": 2}}},
    server=Server(web_bytes=100 << 20, redis_bytes=9 << 20, redis_budget_bytes=10 << 20, replaced=3),
    attacks={"viewers": {"answers": {"viewers": {"200": 4}}, "connections": 5, "cpu_s": 1.0}},
)
TOGETHER = Run(SEEN)
ALONE_RUN = Run(SEEN, dataclasses.replace(SEEN, attacks={}))
NUM_TOKENS = 20
CUT_OFF = [text_chunk("a"), usage_chunk(1, NUM_TOKENS)]


@pytest.fixture
def stand_in() -> Iterator[OpenAIStandIn]:
    with listening() as server:
        yield server


def order(stand_in: OpenAIStandIn) -> Order:
    return Order(int(stand_in.url.rpartition(":")[2]), streams=1, tokens=NUM_TOKENS)


def sent(requests: bodies.Requests) -> dict[str, list[dict[str, Any]]]:
    """Return the bodies of requests."""
    return {what: [json.loads(data.partition(b"\r\n\r\n")[2]) for data in of_it] for what, of_it in requests.items()}


async def once_asked(client: Callable[..., Awaitable[T]], stand_in: OpenAIStandIn, num_answers: int) -> T:
    """Return what *client* was told until it had asked for so many answers. It has to say once that it has begun."""
    begun: list[float] = []

    async def play(end: asyncio.Event) -> T:
        return await client(order(stand_in), lambda: begun.append(time.monotonic()), end)

    end = asyncio.Event()
    playing = asyncio.create_task(play(end))
    while len(stand_in.bodies) < num_answers:
        await asyncio.sleep(0.005)
    end.set()
    result = await playing
    assert len(begun) == 1
    return result


def test_a_whole_stream_counts_and_one_that_is_cut_or_short_is_seen(stand_in: OpenAIStandIn) -> None:
    short = [text_chunk("a"), usage_chunk(1, NUM_TOKENS - 1), DONE]
    wrong: list[Frames | tuple[int, object]] = [CUT_OFF, short, (500, {"error": "broken"}), (503, {"error": "full"})]

    def script(body: Body) -> Frames | tuple[int, object]:
        return wrong[len(stand_in.bodies) - 2] if 1 < len(stand_in.bodies) < 6 else whole(body)

    stand_in.script = script
    result = asyncio.run(once_asked(streams, stand_in, 6))
    assert (result.whole, result.refused) == (len(stand_in.bodies) - len(wrong), 1)
    assert [text[:4] for text in result.early] == ["it e", "it e", "EOFE"] and "500" in result.early[2]


def test_health_is_asked_on_new_connections_and_what_is_no_200_is_counted(stand_in: OpenAIStandIn) -> None:
    async def run() -> tuple[list[float], int]:
        end = asyncio.Event()
        asyncio.get_running_loop().call_later(0.12, end.set)
        result = await health(order(stand_in), lambda: None, end)
        return result.ms, result.failures

    times, failures = asyncio.run(run())  # the stand-in has no /health
    assert len(times) == failures > 0 and all(0 < each < 5000 for each in times)


def test_bodies_are_as_large_as_they_may_be_and_one_is_larger() -> None:
    kinds = giant_bodies()
    assert set(kinds) == {"wrong bodies", "legal bodies", "lists of prompts", "tokenizes"}
    for kind, requests in kinds.items():
        sizes = [len(data.partition(b"\r\n\r\n")[2]) for data in requests]
        lengths = [int(data.partition(b"Content-Length: ")[2].partition(b"\r")[0]) for data in requests]
        assert sizes == lengths
        assert sum(size > LARGEST_BODY for size in sizes) == (kind == "wrong bodies")
        assert max(sizes) > 0.9 * 1_000_000
    legal = [data.partition(b"\r\n\r\n")[2] for kind in ("legal bodies", "tokenizes") for data in kinds[kind]]
    assert all(isinstance(json.loads(body), dict) for body in legal)


def test_a_pause_is_measured_from_the_first_token_to_the_end_of_the_measurement() -> None:
    came: list[bool] = []
    times = iter([9.0, 10.0, 10.5, 14.0])
    reading = Reading(lambda: came.append(True), lambda: next(times))
    reading.data_received(b"HTTP/1.1 200 \r\n\r\n")
    assert came == [] and reading.last_s == 0
    reading.data_received(text_chunk("a"))
    reading.data_received(text_chunk("b")[:-9])
    assert (len(came), reading.longest_s, len(reading.frames)) == (2, 0.5, 1)
    reading.stop()
    assert reading.longest_s == 3.5


def test_a_measurement_may_end_in_the_middle_of_streams(stand_in: OpenAIStandIn) -> None:
    hold = Hold()
    stand_in.gate = hold

    async def run() -> Streams:
        end = asyncio.Event()
        cut = dataclasses.replace(order(stand_in), whole=False)
        reading = asyncio.create_task(streams(cut, lambda: None, end))
        await asyncio.to_thread(hold.has_come.wait, 30)
        end.set()
        return await reading

    assert asyncio.run(run()) == Streams()
    hold.may_go_on.set()


def test_newcomers_count_what_each_got(stand_in: OpenAIStandIn) -> None:
    def script(body: Body) -> Frames | tuple[int, object]:
        return [text_chunk("a"), data({"error": {}})] if "guided_regex" in body else whole(body)

    stand_in.script = script
    result = asyncio.run(once_asked(newcomers, stand_in, 2))
    assert result.answers["patterns"] == {"an error after 200": 1} and result.answers["chats"] == {"200": 1}
    assert len(result.first_ms) == 1 and "admin" in result.answers


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_attacks_each_time_until_it_should_end(kind: str) -> None:
    seen: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername")[0])
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\nx-minisgl-uid: 1\r\n\r\n")
        writer.close()

    async def run() -> list[Result]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            asked = Order(server.sockets[0].getsockname()[1], idle=3)
            play = await attacker(kind, asked)
            results: list[Result] = []
            for _ in range(2):
                end, before = asyncio.Event(), len(seen)
                playing = asyncio.create_task(play(asked, lambda: None, end))
                while len(seen) < before + 3:
                    await asyncio.sleep(0.005)
                end.set()
                results.append(await playing)
                came = -1
                while came < len(seen):  # a connection of this time must not count for the next
                    came = len(seen)
                    await asyncio.sleep(0.1)
        return results

    for result in asyncio.run(run()):
        assert isinstance(result, Attack) and (result.answers or result.connections) and result.cpu_s > 0
    assert set(seen) == {ATTACKERS_HOST}


def test_the_kinds_that_are_measured_alone_use_up_nothing_that_all_share() -> None:
    assert set(KINDS) - set(ALONE) == {"bodies", "leavers", "idlers"}


def test_stop_strings_almost_match_the_answer(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(nonsense(tmp_path) / "tokenizer.json"))
    assert tokenizer.decode([LETTER_A]) == "a" and tokenizer.decode([NO_CHARACTER]) == "\ufffd"
    stops = sent(bodies.stops())
    for longest in (1800, 3900, 1024):
        ((body,), most) = stops[f"stops of {longest:,} characters"], longest
        assert len(body["stop"]) == 16 == len(set(body["stop"])) and not {"a" * n for n in range(9)} & {*body["stop"]}
        assert len(body["stop"][0]) == most and body["stop"][0] == "a" * (most - 1) + "b"
    assert max(map(len, stops["stops of 1,024 characters"][0]["stop"])) == 1024


def test_scores_are_as_many_as_their_names_say() -> None:
    for what, of_it in sent(bodies.scores()).items():
        for body in of_it:
            prompt = body.get("prompt") or body["input_ids"]
            lists = prompt if isinstance(prompt[0], list) else [prompt]
            num_tokens = sum(len(each) if isinstance(each, list) else len(prompt) for each in lists)
            alternatives = body.get("prompt_logprobs") or body.get("logprobs") or body["top_logprobs_num"]
            assert f"{num_tokens * alternatives * body.get('n', 1):,} pairs" in what


def test_grammars_schemas_and_labels_have_the_sizes_that_their_names_say() -> None:
    assert bodies.terminals(range(3)) == "start: A\nA: /.*a.{0}/ & /.*b.{1}/ & /.*c.{2}/\n"
    grammars = sent(bodies.grammars())
    assert [body["guided_grammar"].count("&") for body in grammars["60 terminals"]] == [59, 59]
    (body,) = sent(bodies.schemas())["2,000 properties of 200 KB"]
    schema = body["tools"][0]["function"]["parameters"]
    assert len(schema["properties"]) == 2000 and len(schema["$defs"]["d"]["description"]) == 200_000
    labels = bodies.labels()
    assert all(len(data) > 0.99 * LARGEST_BODY for data in labels["labels of 4 MiB"])
    assert all(60_000 < len(data) < 1 << 16 for data in labels["labels of 64 KB"])


def changed(run: Run, **changes: Any) -> Run:
    """Return *run* with other findings beside the attack."""
    return dataclasses.replace(run, attacked=dataclasses.replace(run.attacked, **changes))


@pytest.mark.parametrize("run", [TOGETHER, ALONE_RUN])
def test_no_bound_is_broken_by_a_server_that_stood_it(run: Run) -> None:
    assert broken("viewers", [run] * 3, AttackConfig()) == []
    shown = table({"viewers": [run] * 3}, AttackConfig())
    assert "viewers: 12 x 200" in shown and "chats: 6 x 200" in shown


@pytest.mark.parametrize("run", [TOGETHER, ALONE_RUN])
@pytest.mark.parametrize(
    "changes",
    [
        {"health": {"ms": [1.0] * 9 + [500.0], "failures": 0}},
        {"health": {"ms": [], "failures": 0}},
        {"health": {"ms": [1.0], "failures": 1}},
        {"streams": {**SEEN.streams, "early": ["cut"]}},
        {"server": Server(deaths=["web-0 with 3"])},
        {"server": Server(web_bytes=478 << 20)},
        {"server": Server(redis_bytes=11, redis_budget_bytes=10)},
    ],
)
def test_a_broken_bound_is_said(run: Run, changes: dict[str, object]) -> None:
    assert len(broken("viewers", [changed(run, **changes)], AttackConfig())) == 1


def test_together_a_stream_must_come_whole_and_alone_others_must_be_served_and_streams_go_on() -> None:
    for changes, alone_too in (
        ({"streams": {**SEEN.streams, "whole": 0}}, False),
        ({"streams": {**SEEN.streams, "longest_pause_ms": 500.0}}, True),
        ({"newcomers": {**SEEN.newcomers, "answers": {"chats": {"200": 1, "503": 2}}}}, True),
    ):
        assert len(broken("viewers", [changed(ALONE_RUN, **changes)], AttackConfig())) == alone_too
        assert len(broken("viewers", [changed(TOGETHER, **changes)], AttackConfig())) == (not alone_too)


def test_the_median_of_runs_is_compared_with_a_bound() -> None:
    slow = changed(
        ALONE_RUN, streams={**SEEN.streams, "longest_pause_ms": 500.0}, health={"ms": [101.0], "failures": 0}
    )
    assert broken("viewers", [slow, ALONE_RUN, ALONE_RUN], AttackConfig()) == []
    assert len(broken("viewers", [slow, ALONE_RUN, slow], AttackConfig())) == 2


def test_deaths_are_read_from_the_log_and_a_tokenizer_that_was_to_be_replaced_is_none(tmp_path: Path) -> None:
    lines = [
        {"event": "worker_died", "worker": "web-0", "code": -9},
        {"event": "worker_died", "worker": "tokenize-0", "code": 4},
        {"event": "other", "worker": "web-0"},
    ]
    (tmp_path / "log").write_text("plain text\n" + "\n".join(map(json.dumps, lines)))
    server = Server()
    read_deaths(server, tmp_path / "log")
    assert (server.deaths, server.replaced) == (["web-0 with -9"], 1)


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_server_stands_an_attack(tmp_path: Path) -> None:
    """Other tests share the cores: the bound of /health is wide."""
    assert main(["--health-ms", "5000", "--output", str(tmp_path / "out.json")], {}) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    ((run,),) = document["runs"].values()
    seen = run["attacked"]
    assert document["broken"] == [] and len(seen["health"]["ms"]) > 10
    assert set(seen["attacks"]) == set(KINDS)
    answers = {what: counts for each in seen["attacks"].values() for what, counts in each["answers"].items()}
    assert set(answers) >= {"wrong bodies", "tokenizes", "leavers", "dribblers", "viewers", "stories"}
    assert "200" not in answers["wrong bodies"]  # 400, 413, or whatever an attacker without a place gets
    assert seen["streams"]["whole"] >= document["options"]["streams"] and seen["server"]["web_bytes"] > 1 << 20
    assert sum(each["connections"] for each in seen["attacks"].values()) >= document["options"]["idle"]


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_kind_is_measured_alone(tmp_path: Path) -> None:
    flags = ["--alone", "--runs", "1", "--seconds", "3", "--health-ms", "5000", "--pause", "60", "--kinds", "stories"]
    assert main([*flags, "--output", str(tmp_path / "out.json")], {}) == 0
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]["stories"]
    assert run["attacked"]["attacks"]["stories"]["answers"]["stories"]
    assert run["quiet"]["streams"]["longest_pause_ms"] > 0 and run["attacked"]["server"]["tokenizer_bytes"] > 1 << 20
