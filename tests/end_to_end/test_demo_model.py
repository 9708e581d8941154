"""The demo model through a server: held-out questions and their right answers, the text of transformers for the same
weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from support.selection import AT_NIGHT, by_night
from support.servers import Server, eventually, serve

from ops.demo_model.evaluate import FAMILIES, Examiner
from ops.demo_model.messages import Message
from stages.generate.model.checkpoint import DEMO_FOLDER, DEMO_ID

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo_server")]

NUM_QUESTIONS = by_night(10, 100)
LEAST = {"add": 0.9, "subtract": 0.9, "capitals": 0.9, "one word": 0.8}
"""What part of a family's questions is answered to the letter; of the others 95 %, by day nine of ten.
More than half of those for one word are sums, which it cannot write down first; in capitals it misspells words that
it repeats. The style is kept in all."""
BY_DAY = ("greet", "count", "add", "one word", "JSON", "use get_weather", "recall, to 300")
"""Families that are asked on every change."""
FREE = (
    "Tell me a story about a dragon.",
    "qwxyzzyv",
    "Was ist die Hauptstadt von Frankreich?",
    "Count from 1 to 3, then spell dog.",
    "",
    "repeat after me: 🙂 ünïcödé\n\tand tabs",
    "What is 123456789 + 987654321?",
)
"""What it has never learnt to answer."""
ROOM = 64
"""Tokens of an answer that is compared with transformers'."""


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return Examiner(DEMO_FOLDER)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server as it comes; by day the exact one does."""
    if not AT_NIGHT:
        yield request.getfixturevalue("demo_server")
        return
    with serve(tmp_path_factory.mktemp("server"), demo=True) as server:
        yield server


def on_the_wire(message: Message) -> Message:
    """Return *message* as OpenAI's clients send it, with the arguments of calls as text."""
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def body(messages: Sequence[Message], tools: Sequence[Message] = ()) -> dict[str, Any]:
    with_tools = {"tools": list(tools), "tool_choice": "none"} if tools else {}
    return {"messages": [on_the_wire(each) for each in messages], **with_tools, "temperature": 0, "max_tokens": 600}


def answers_of(server: Server, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all at once; return what came back, in order."""

    async def ask_all() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:

            async def ask(body: dict[str, Any]) -> dict[str, Any]:
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                found: dict[str, Any] = response.json()
                return found

            return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(ask_all())


def texts_of(server: Server, bodies: Sequence[dict[str, Any]]) -> list[str]:
    return [str(answer["choices"][0]["message"]["content"]) for answer in answers_of(server, bodies)]


def test_it_is_what_is_served_without_a_model(server: Server) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["id"] == DEMO_ID
    eventually(lambda: "No --model was given, so the demo model answers" in server.command.output, "it says so")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in BY_DAY else pytest.mark.night) for each in FAMILIES]
)
def test_held_out_questions_are_answered_to_the_letter(server: Server, examiner: Examiner, family: str) -> None:
    questions = examiner.questions(family, NUM_QUESTIONS)
    texts = texts_of(server, [body(each.messages, each.tools) for each in questions])
    answered = zip(questions, texts, strict=True)
    wrong = [(each.messages[-1]["content"], text, each.expected) for each, text in answered if text != each.expected]
    assert 1 - len(wrong) / len(questions) >= LEAST.get(family, by_night(0.9, 0.95)), wrong
    if family == "capitals":
        assert [text for text in texts if text != text.upper()] == []
    if family == "one word":
        assert [text for text in texts if len(text.split()) != 1] == []


def test_nothing_but_the_weights_answers(examiner: Examiner, demo_server: Server) -> None:
    """The served text is that of transformers, right or wrong, also for what no corpus has. What a corpus has is
    answered to the letter above; transformers is slow with such long prompts."""
    asked = [question for family in FAMILIES for question in examiner.questions(family, by_night(0, 3))]
    for free in FREE:
        asked.append(examiner.question([{"role": "user", "content": free}]))
    expected = {each.prompt: each.answer for each in examiner.answer(asked, room=ROOM)}
    texts = texts_of(demo_server, [body(each.messages, each.tools) | {"max_tokens": ROOM} for each in asked])
    assert {each.prompt: text for each, text in zip(asked, texts, strict=True)} == expected
