"""Large bodies and the event loop: one step after the other, and others between the steps."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.web_site import Site, chat

from web.http.turns import HOLDERS_AT_ONCE, LARGE_BODY, RoundRobin
from web.wire.openai.schemas import parse_chat
from web.wire.submit import chat_events

STEP_S = 0.005


async def test_between_the_steps_with_large_bodies_others_have_as_long_and_a_small_body_never_waits(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[float, float]] = []
    asked: list[int] = []

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(given: Any, **more: Any) -> Any:
            began_s = time.monotonic()
            result = step(given, **more)
            if isinstance(given, bytes):
                asked.append(len(given))
            if len(str(given)) > LARGE_BODY:
                time.sleep(STEP_S)
                steps.append((began_s, time.monotonic()))
            return result

        return run

    monkeypatch.setattr("web.routes.generations.parse_chat", watched(parse_chat))
    monkeypatch.setattr("web.routes.generations.chat_events", watched(chat_events))
    words = "a" * LARGE_BODY
    answers = await asyncio.gather(*(here.post(chat(f"hello {more}")) for more in (words, words, words, "")))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(steps) == 6
    for (began_s, ended_s), (next_s, _) in itertools.pairwise(steps):
        assert next_s - ended_s >= ended_s - began_s
    assert min(asked) in asked[:2]


async def test_in_a_turn_of_the_loop_one_of_each_holder_goes_on_and_only_a_few_holders() -> None:
    turns, went_on = RoundRobin(asyncio.get_running_loop()), list[tuple[int, str]]()
    num_turns = 0

    async def go_on(holder: str) -> None:
        if (turn := turns.ask(holder)) is not None:
            await turn
        went_on.append((num_turns, holder))

    many = [f"holder {number}" for number in range(2 * HOLDERS_AT_ONCE)]
    going = [asyncio.create_task(go_on(holder)) for holder in ["a"] * 5 + ["b"] * 2 + many]
    await asyncio.sleep(0)
    assert len(went_on) == HOLDERS_AT_ONCE
    for each in going[2:3] + going[-2:]:  # they take no turn
        each.cancel()
    while num_turns < 9:
        num_turns += 1
        await asyncio.sleep(0)
    assert len(set(went_on)) == len(went_on) == len(going) - 3, "in no turn two of a holder"
    assert max(Counter(turn for turn, _ in went_on).values()) == HOLDERS_AT_ONCE
    assert sorted(holder for _, holder in went_on).count("a") == 4
    for holder in "ba":
        num_turns += 1
        await go_on(holder)
    assert went_on[-2:] == [(10, "b"), (11, "a")], "at once"
