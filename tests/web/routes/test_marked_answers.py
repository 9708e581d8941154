"""Answers with calls and reasoning over HTTP: whole, streamed, resumed anywhere, and sent again."""

from __future__ import annotations

import itertools
import re
from typing import Any, Final

import pytest
from support.chunks import documents, put_together, split
from support.marked_texts import FAMILIES, written
from support.selection import by_night, rest_at_night
from support.stand_in_stages import StandIn
from support.web_site import IDS, Site, chat

from pipeline.markup import ToolFormat
from web.wire.idempotency import HEADER

NUM_RESUMED: Final = by_night(1, 20)
"""Texts of each family whose streams are resumed."""


def say(stand_in: StandIn, family: ToolFormat, number: int = 0) -> dict[str, Any]:
    """Have a text of *family* said, three characters in a token; return what is asked."""
    answers = (written(family, seed) for seed in itertools.count())
    telling = (each for each in answers if each.reasoning and len(each.calls) > 1)
    answer = next(itertools.islice(telling, number, None))
    texts = [answer.text[place : place + 3] for place in range(0, len(answer.text), 3)]
    stand_in.marked = (answer.markup, texts)
    return chat("marked", tools=list(answer.tools), stream_options={"include_usage": True}, stream=True)


def after(stream: bytes, n: int) -> bytes:
    """Return the frames that come after those of token number *n*. The last frame of an event has its id."""
    frames = split(stream)
    ids = [re.match(rb"id: (\d+)-", frame) for frame in frames]
    seen = [place for place, found in enumerate(ids, 1) if found and int(found[1]) <= n]
    return b"".join(frames[max(seen) :])


@pytest.mark.parametrize("family", rest_at_night(FAMILIES, first=4))
async def test_a_stream_with_calls_goes_on_after_any_event_byte_by_byte(
    here: Site, there: Site, stand_in: StandIn, family: ToolFormat
) -> None:
    for number in range(NUM_RESUMED):
        body, key = say(stand_in, family, number), {HEADER: f"{family}-{number}", **IDS}
        response = await here.post(body, headers=key)
        uid, full = response.headers["x-minisgl-uid"], await response.get_data(as_text=False)
        assert b'"tool_calls":[{"index":0,"id"' in full
        for n in range(1, len(stand_in.marked[1]) + 1, by_night(5, 1)):
            rest = await there.read(f"/v1/requests/{uid}/events", **{"Last-Event-ID": f"{n}-0"})
            assert rest == after(full, n), (number, n)
        again = await there.post(body, headers=key)
        assert await again.get_data(as_text=False) == full, "the same key gets the same answer"


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_answer_with_calls_says_the_same_whole_and_streamed(
    here: Site, stand_in: StandIn, family: ToolFormat
) -> None:
    body = say(stand_in, family)
    response = await here.post(body | {"stream": False, "stream_options": None, "n": 2})
    answer = await response.get_json()
    assert response.status_code == 200, answer
    for index, choice in enumerate(answer["choices"]):
        stream = await here.read(f"/v1/requests/{response.headers['x-minisgl-uid']}.{index}/events")
        said, message = put_together(documents(stream), index), choice["message"]
        assert choice["finish_reason"] == said["reason"] == "tool_calls"
        assert (said["content"], said["reasoning"]) == (message["content"] or "", message["reasoning"])
        assert said["calls"] == [
            [call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]
        ]
    first, second = ({call["id"] for call in choice["message"]["tool_calls"]} for choice in answer["choices"])
    assert family == "kimi_k2" or not first & second, "its ids count the calls of a conversation"


async def test_a_replay_reads_calls_and_reasoning_from_its_answer_as_the_recorded_request_did(
    here: Site, stand_in: StandIn
) -> None:
    body = say(stand_in, FAMILIES[0])
    response = await here.post(body)
    recorded = put_together(documents(await response.get_data(as_text=False)))
    answer = await here.client.post(f"/v1/requests/{response.headers['x-minisgl-uid']}/replay")
    now = put_together(documents(await here.read(f"/v1/requests/{(await answer.get_json())['uid']}/events")))
    assert recorded["calls"] and recorded["reasoning"]
    for name in ("content", "reasoning", "reason"):
        assert now[name] == recorded[name]
    assert [call[1:] for call in now["calls"]] == [call[1:] for call in recorded["calls"]]
