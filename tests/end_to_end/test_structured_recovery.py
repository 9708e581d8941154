"""Answers that are bound to a grammar while an engine is killed under them."""

from __future__ import annotations

from typing import Final

import pytest
from servers import Server, eventually
from streams import Stream, events_of, num_of

from pipeline.events import TakenOver
from pipeline.names import GENERATE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

LETTERS: Final = {"structured_outputs": {"regex": "([a-z]{3} ){80,90}"}, "temperature": 1, "max_tokens": 500}


def test_a_killed_engine_costs_a_bound_answer_nothing(plain_server: Server) -> None:
    def ask() -> list[Stream]:
        return [Stream(plain_server, f"Letters {seed}", seed=seed, ignore_eos=True, **LETTERS) for seed in range(4)]

    expected = [stream.answer for stream in ask()]
    assert all(reason == "stop" for _, reason in expected)
    streams = ask()
    eventually(lambda: all(stream.num_frames > 5 for stream in streams), "all streams have begun")
    (engine,) = plain_server.command.workers(GENERATE)
    engine.kill()
    assert [stream.answer for stream in streams] == expected
    with plain_server.log() as log:
        assert all(num_of(events_of(log, stream.uid), TakenOver) for stream in streams)
