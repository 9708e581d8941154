"""The stages as four commands of their own around one Redis: in whatever order they come, they find each other."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis_servers import find_servers, running_server
from selection import by_night
from servers import STOP_TIMEOUT_S, Command, eventually, free_port, run_command, wait_until_ready

from ops.bench import nonsense
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB

pytestmark = pytest.mark.slow

ON_THE_WAY = (TOKENIZE, GENERATE, DETOKENIZE, WEB)
"""In the order in which a request passes them."""


def _shuffled(seed: int) -> tuple[str, ...]:
    order = list(ON_THE_WAY)
    random.Random(seed).shuffle(order)
    return tuple(order)


ORDERS: dict[str, tuple[str, ...]] = {"reverse": ON_THE_WAY[::-1]} | by_night(
    {}, {"all at once": (WEB, GENERATE, TOKENIZE, DETOKENIZE), "forward": ON_THE_WAY, "shuffled": _shuffled(4)}
)
"""By day test_takeover starts all at once."""
REQUEST = {
    "messages": [{"role": "user", "content": "What is the order of things?"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@dataclass
class Run:
    """What came of one order."""

    answer: Any = None
    waited_for: dict[str, list[str]] = field(default_factory=dict)
    """stage -> the stages that it said it waits for, each in the order first said."""
    exit_codes: dict[str, int] = field(default_factory=dict)


def _said_to_wait_for(command: Command) -> list[str]:
    """Return whom the stage said that it waits for; the frontend's own probe is nobody."""
    lines = command.log_lines("waiting_for")
    named = [name for line in lines for name in line["stages"] if name != "probe"]
    return list(dict.fromkeys(name.partition("-")[0] for name in named))


def _has_settled(stage: str, command: Command) -> bool:
    """Whether the stage is ready, or has said for whom it waits: an engine and a detokenizer need nobody for that."""
    assert command.process.poll() is None, command.output
    waits = stage in (TOKENIZE, WEB) and bool(command.log_lines("waiting_for"))
    return waits or _is_ready(command)


def _is_ready(command: Command) -> bool:
    return bool(command.log_lines("stage_ready"))


def _start(stage: str, port: int, redis_url: str, folder: Path) -> Command:
    where = ["--port", str(port)] if stage == WEB else []
    model = {GENERATE: folder / nonsense.MODEL_ID, WEB: None}.get(stage, folder / "text")
    which = ["--model", str(model)] if model else []
    return run_command(["stage", stage, "--redis-url", redis_url, *which, *where], folder / stage)


def _models(folder: Path) -> None:
    """Make the model in *folder*, and beside it what the text stages need of it: they may live elsewhere."""
    model = nonsense.ensure(folder)
    (folder / "text").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "text" / name).write_bytes((model / name).read_bytes())


@contextlib.contextmanager
def _stages(order: Sequence[str], redis_url: str, folder: Path, *, at_once: bool) -> Iterator[tuple[str, Run]]:
    port = free_port()
    commands: dict[str, Command] = {}
    run = Run()
    try:
        for stage in order:
            commands[stage] = _start(stage, port, redis_url, folder)
            if not at_once:
                eventually(partial(_has_settled, stage, commands[stage]), f"{stage} is ready or says why it is not")
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, list(commands.values()))
        yield url, run
        for stage, command in commands.items():
            eventually(partial(_is_ready, command), f"{stage} is ready")
        run.waited_for = {stage: _said_to_wait_for(commands[stage]) for stage in ON_THE_WAY}
    finally:
        for command in commands.values():
            command.process.send_signal(signal.SIGTERM)
        with contextlib.ExitStack() as stack:
            for stage, command in commands.items():
                stack.callback(command.stop)  # of one that does not end, the processes are ended
                run.exit_codes[stage] = command.process.wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All orders, each with a Redis of its own and the same request."""
    runs: dict[str, Run] = {}
    for name, order in ORDERS.items():
        folder = tmp_path_factory.mktemp("stages")
        _models(folder)
        binary = next(iter(find_servers().values()))
        with (
            running_server(binary, folder) as redis,
            _stages(order, redis.url, folder, at_once=name == "all at once") as (url, run),
        ):
            runs[name] = run
            run.answer = httpx.post(f"{url}/v1/chat/completions", json=REQUEST, timeout=120).json()
    return runs


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_the_orders_are_different_ones() -> None:
    assert len(set(ORDERS.values())) == len(ORDERS)


def test_the_same_request_gets_the_same_answer_in_every_order(order: str, runs: Mapping[str, Run]) -> None:
    answer, expected = runs[order].answer, runs["reverse"].answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"]
    assert choice == expected["choices"][0]
    assert answer["usage"] == expected["usage"]


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "all at once"])
def test_a_stage_says_for_whom_it_waits_and_only_where_it_has_to(name: str, runs: Mapping[str, Run]) -> None:
    order = ORDERS[name]
    missing = {stage: set(order[order.index(stage) + 1 :]) for stage in order}
    expected = {
        TOKENIZE: missing[TOKENIZE] & {GENERATE},  # which says how long a prompt may be
        GENERATE: missing[GENERATE] & {DETOKENIZE},  # which reads its steps
        DETOKENIZE: missing[DETOKENIZE] & {GENERATE},  # whose steps it reads
        WEB: missing[WEB],
    }
    if TOKENIZE not in missing[WEB] and GENERATE in missing[TOKENIZE] & missing[WEB]:
        expected[WEB] |= {TOKENIZE}  # it is there, but waits itself
    assert {stage: set(said) for stage, said in runs[name].waited_for.items()} == expected


def test_every_stage_ends_well_by_itself(order: str, runs: Mapping[str, Run]) -> None:
    assert runs[order].exit_codes == dict.fromkeys(ORDERS[order], 0)
