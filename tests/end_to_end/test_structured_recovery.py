"""Answers that are bound to a grammar: an engine is killed under them, and grammars try to kill one beside others."""

from __future__ import annotations

import time
from typing import Any, Final

import httpx
import pytest
from support.bodies_within_limits import EVILS, REFUSED_AS
from support.selection import by_night
from support.servers import Server
from support.streams import Stream, ask_all, begun, events_of, num_of
from support.tool import Tool

from pipeline.events import TakenOver
from pipeline.names import GENERATE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

NUM_EVILS: Final = by_night(3, len(EVILS))
AT_ONCE: Final = 5
"""Evil grammars that are sent one after the other beside the same streams."""
NUM_ASKED: Final = by_night(1, 2)
"""How many times each of the four prompts is asked beside them."""
BESIDE: Final = 300
"""Tokens of the answers beside them."""
MOST_S: Final = by_night(50.0, 10.0)
"""How long one may take. Beside other tests, that says little."""
LETTERS: Final = {"structured_outputs": {"regex": "([a-z]{3} ){80,90}"}, "temperature": 1, "max_tokens": 500}


@pytest.mark.night  # by day chaos kills engines, and test_grammar_deaths follows grammars through deaths
def test_a_killed_engine_costs_a_bound_answer_nothing(plain_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> list[Stream]:
        return [Stream(plain_server, f"Letters {seed}", seed=seed, ignore_eos=True, **LETTERS) for seed in range(4)]

    expected = [stream.answer for stream in ask()]
    assert all(reason == "stop" for _, reason in expected)
    streams = [stream.begun() for stream in ask()]
    (engine,) = plain_server.command.workers(GENERATE)
    engine.kill()
    assert [stream.answer for stream in streams] == expected
    with plain_server.log() as log:
        taken_over = [num_of(events_of(log, stream.uid), TakenOver) for stream in streams]
    assert any(taken_over), "all had ended before the engine was killed"
    replayed = Tool("replay run", plain_server.redis_url, capsys).json(*(stream.uid for stream in streams))
    assert [told["identical"] for told in replayed] == [1] * len(streams)


def test_evil_grammars_end_neither_an_engine_nor_the_answers_beside_them(plain_server: Server) -> None:
    def ask(kind: str, what: Any) -> httpx.Response:
        body = {"prompt": "Do harm", "structured_outputs": {kind: what}, "max_tokens": 20}
        return httpx.post(f"{plain_server.url}/v1/completions", json=body, timeout=60)

    expected = {stream.prompt: stream.answer for stream in ask_all(plain_server, max_tokens=BESIDE)}
    (engine,) = plain_server.command.workers(GENERATE)
    with plain_server.log() as log:
        num_dead = len(log.dead_letters(99))
        for first in range(0, NUM_EVILS, AT_ONCE):
            streams = [stream for _ in range(NUM_ASKED) for stream in begun(plain_server, max_tokens=BESIDE)]
            for kind, what in EVILS[first : min(first + AT_ONCE, NUM_EVILS)]:
                began_s = time.monotonic()
                answer = ask(kind, what)
                assert answer.status_code == 200 or answer.json()["error"]["code"] in REFUSED_AS, (kind, what)
                assert time.monotonic() - began_s < MOST_S, (kind, what)
            assert {stream.prompt: stream.answer for stream in streams} == expected
        assert len(log.dead_letters(99)) == num_dead
    assert plain_server.command.workers(GENERATE) == [engine]
