"""The stages as four commands of their own around one Redis: in whatever order they come, they find each other."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_servers import find_servers, running_server
from support.servers import STOP_TIMEOUT_S, Command, eventually, free_port, run_command, wait_until_ready

from ops.bench.models import NONSENSE_ID, nonsense
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB

# By day test_takeover.py starts all at once, and tests/web/live/test_ready.py says for whom a frontend waits.
pytestmark = [pytest.mark.slow, pytest.mark.night]

ON_THE_WAY = (TOKENIZE, GENERATE, DETOKENIZE, WEB)
"""In the order in which a request passes them."""


def _shuffled(seed: int) -> tuple[str, ...]:
    order = list(ON_THE_WAY)
    random.Random(seed).shuffle(order)
    return tuple(order)


ORDERS: dict[str, tuple[str, ...]] = {
    "reverse": ON_THE_WAY[::-1],
    "all at once": (WEB, GENERATE, TOKENIZE, DETOKENIZE),
    "forward": ON_THE_WAY,
    "shuffled": _shuffled(4),
}
REQUEST = {
    "messages": [{"role": "user", "content": "What is the order of things?"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


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
    model = {GENERATE: folder / NONSENSE_ID, WEB: None}.get(stage, folder / "text")
    which = ["--model", str(model)] if model else []
    return run_command(["stage", stage, "--redis-url", redis_url, *which, *where], folder / stage)


def _models(folder: Path) -> None:
    """Make the model in *folder*, and beside it what the text stages need of it: they may live elsewhere."""
    model = nonsense(folder)
    (folder / "text").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "text" / name).write_bytes((model / name).read_bytes())


def _expected_to_wait_for(order: Sequence[str]) -> dict[str, set[str]]:
    """Return stage -> the stages that it says it waits for, when each has settled before the next is started."""
    missing = {stage: set(order[order.index(stage) + 1 :]) for stage in order}
    expected = {
        TOKENIZE: missing[TOKENIZE] & {GENERATE},  # which says how long a prompt may be
        GENERATE: missing[GENERATE] & {DETOKENIZE},  # which reads its steps
        DETOKENIZE: missing[DETOKENIZE] & {GENERATE},  # whose steps it reads
        WEB: missing[WEB],
    }
    if TOKENIZE not in missing[WEB] and GENERATE in missing[TOKENIZE] & missing[WEB]:
        expected[WEB] |= {TOKENIZE}  # it is there, but waits itself
    return expected


@pytest.fixture(scope="module")
def answers() -> list[tuple[Any, Any]]:
    """Choice and usage of each order that was tried."""
    return []


@pytest.mark.parametrize("name", ORDERS)
def test_in_any_order_a_stage_says_for_whom_it_waits_answers_the_same_and_ends_by_itself(
    name: str, answers: list[tuple[Any, Any]], tmp_path: Path
) -> None:
    order, at_once = ORDERS[name], name == "all at once"
    _models(tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(running_server(next(iter(find_servers().values())), tmp_path))
        commands: dict[str, Command] = {}
        for stage in order:
            commands[stage] = _start(stage, port, redis.url, tmp_path)
            stack.callback(commands[stage].stop)
            if not at_once:
                eventually(partial(_has_settled, stage, commands[stage]), f"{stage} is ready or says why it is not")
        wait_until_ready(url, list(commands.values()))
        answer = httpx.post(f"{url}/v1/chat/completions", json=REQUEST, timeout=120).json()
        for stage, command in commands.items():
            eventually(partial(_is_ready, command), f"{stage} is ready")
        if not at_once:
            said = {stage: set(_said_to_wait_for(command)) for stage, command in commands.items()}
            assert said == _expected_to_wait_for(order)
        for command in commands.values():
            command.process.send_signal(signal.SIGTERM)
        assert [command.process.wait(STOP_TIMEOUT_S) for command in commands.values()] == [0] * len(commands)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"]
    answers.append((choice, answer["usage"]))
    assert answers[-1] == answers[0]
