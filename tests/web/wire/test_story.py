"""What was asked of a request, as its page has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.events import Replay, Submitted
from web.wire.openai.schemas import parse_chat
from web.wire.story import asked_of
from web.wire.submit import chat_events


def submitted(**changed: Any) -> Submitted:
    body = {"messages": [{"role": "user", "content": "It's $HOME"}], "seed": 2**62 + 1, "stream": True}
    (event,) = chat_events(parse_chat(json.dumps(body).encode()), frontend="web-0", model="demo", defaults={})
    return event.model_copy(update=changed)


def test_what_was_asked_is_a_body_that_asks_it_again() -> None:
    asked = asked_of(submitted(siblings=2))
    body = json.loads(asked["body"])
    assert (body["seed"], body["stream"], body["messages"][0]["content"]) == (2**62 + 1, True, "It's $HOME")
    assert (asked["sampling"]["seed"], asked["siblings"]) == (str(2**62 + 1), 2)
    assert "messages" not in asked and "stop" not in asked["sampling"]


@pytest.mark.parametrize(
    "changed", [{"endpoint": "/tokenize"}, {"messages": (), "prompt_ids": (1, 2), "replay": Replay(of="a")}]
)
def test_what_no_body_can_ask_for_is_told_as_it_is(changed: dict[str, Any]) -> None:
    asked = asked_of(submitted(**changed))
    assert asked["body"] == "" and ("messages" in asked or asked["prompt_ids"] == [1, 2])
    assert asked["replay_of"] == ("a" if "replay" in changed else "")
