"""Answers with calls and reasoning, as the official client reads them: whole, streamed, and from the middle on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from openai.types.chat import ChatCompletion
from support.chunks import UID, answered, documents, ended, finished, frames_of, put_together, split

from pipeline.events import (
    Calls,
    FinishReason,
    Logprob,
    Markup,
    Presentation,
    SamplingParams,
    Submitted,
    Templating,
    TokensProduced,
)
from pipeline.markup import ToolFormat
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT
from web.wire.frames import ClientEvent

TOOLS = ({"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},)
HELLO = ({"role": "user", "content": "Hello!"},)
MARKUP = Markup(tools="hermes", think=("<think>", "</think>"), opens_thinking=True)
ANY_CALLS = Calls()
CALL = '<tool_call>{"name": "find", "arguments": {"n": 1}}</tool_call>'
TEXT = f"Well\n</think>\n\nLet me see.\n{CALL}\n{CALL}\n"


def chat(*, calls: Calls | None = ANY_CALLS, endpoint: str = CHAT_ENDPOINT, **shown: Any) -> Submitted:
    return Submitted(
        endpoint=endpoint,
        frontend="web-0",
        model="m",
        messages=HELLO,
        sampling=SamplingParams(),
        calls=calls,
        templating=Templating(tools=TOOLS),
        presentation=Presentation(**shown),
    )


def history(text: str, markup: Markup = MARKUP, *, reason: FinishReason = "stop", index: int = 0) -> list[ClientEvent]:
    """Return the events of an answer that has three characters in a token."""
    texts = [text[place : place + 3] for place in range(0, len(text), 3)]
    events = [
        TokensProduced(tokens=(n,), text=each, step="1-1", markup=markup if n == 1 else None)
        for n, each in enumerate(texts, 1)
    ]
    said = [ClientEvent(f"{n}-0", n, event, index) for n, event in enumerate(events, 1)]
    return [*said, ended(finished(reason), index)]


def whole(events: Sequence[Submitted], *histories: Sequence[ClientEvent], uid: str = UID) -> Any:
    return json.loads(answered(events, itertools.chain(*histories), uid))


def streamed(events: Sequence[Submitted], *histories: Sequence[ClientEvent], uid: str = UID) -> list[Any]:
    return documents(b"".join(map(frames_of(events, uid).of, itertools.chain(*histories))))


def test_an_answer_with_calls_and_reasoning_is_what_the_official_client_expects() -> None:
    answer = whole([chat()], history(TEXT))
    parsed = ChatCompletion.model_validate(answer, strict=True)
    (choice,) = parsed.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert (
        answer["choices"][0]["message"]["reasoning_content"] == "Well" == answer["choices"][0]["message"]["reasoning"]
    )
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        ("function", "find", '{"n": 1}')
    ] * 2
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
    assert parsed.usage is not None and parsed.usage.completion_tokens_details is not None
    assert parsed.usage.completion_tokens_details.reasoning_tokens == 1, "the other one may become a marker"


@pytest.mark.parametrize("shown", [{}, {"include_usage": True, "continuous_usage": True}, {"token_ids": True}])
def test_a_stream_tells_what_the_whole_answer_does(shown: dict[str, Any]) -> None:
    answer = whole([chat(**shown)], history(TEXT))
    chunks = streamed([chat(stream=True, **shown)], history(TEXT))
    message, said = answer["choices"][0]["message"], put_together(chunks)
    assert {name: said[name] for name in ("content", "reasoning", "reasoning_content")} == {
        name: message[name] for name in ("content", "reasoning", "reasoning_content")
    }
    assert said["calls"] == [
        [call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]
    ]
    assert said["reason"] == answer["choices"][0]["finish_reason"]
    if shown.get("include_usage"):
        assert chunks[-1]["usage"] == answer["usage"]
        counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks[1:]]
        assert counts == sorted(counts) and counts[-1] == 1
    if shown.get("token_ids"):
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
        assert ids == answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("text", ['"\x00', "\u2028", 'a "b"\n', "\\u0000"])
def test_no_thought_breaks_its_chunk(text: str) -> None:
    said = history(f".{text}.</think>")
    assert put_together(streamed([chat(stream=True)], said))["reasoning"] == f".{text}."
    told = streamed([chat(stream=True)], said)[1:-1]
    assert [chunk["choices"][0]["delta"].keys() for chunk in told] == [{"reasoning", "reasoning_content"}] * len(told)
    assert told and all(chunk["choices"][0]["logprobs"] is None for chunk in told)


def test_an_answer_of_calls_alone_has_no_content() -> None:
    markup = Markup(tools="hermes")
    (choice,) = whole([chat()], history(f"\n{CALL}\n", markup))["choices"]
    assert choice["message"]["content"] is None and "reasoning" not in choice["message"]
    said = put_together(streamed([chat()], history(f"\n{CALL}\n", markup)))
    assert (said["content"], len(said["calls"])) == ("", 1)


@pytest.mark.parametrize(
    ("calls", "reason", "expected"),
    [
        (Calls(), "stop", ("tool_calls", 1)),
        (Calls(), "length", ("length", 1)),
        (Calls(choice="required", names=("find",)), "stop", ("tool_calls", 1)),
        (Calls(choice="none"), "stop", ("stop", 0)),
        (None, "stop", ("stop", 0)),
    ],
)
def test_an_answer_with_calls_ends_by_them_unless_it_was_too_long(
    calls: Calls | None, reason: FinishReason, expected: tuple[str, int]
) -> None:
    said = history(CALL, Markup(tools="hermes"), reason=reason)
    (choice,) = whole([chat(calls=calls)], said)["choices"]
    assert (choice["finish_reason"], len(choice["message"].get("tool_calls", ()))) == expected
    assert choice["message"]["content"] == (None if expected[1] else CALL)
    told = put_together(streamed([chat(calls=calls)], said))
    assert (told["reason"], len(told["calls"])) == expected


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_answer_that_is_cut_within_a_call_tells_the_same_streamed_and_whole(
    choice: Literal["auto", "required"],
) -> None:
    text = f"Let me see.\n{CALL}"
    for place in range(1, len(text)):
        said, event = history(text[:place], Markup(tools="hermes"), reason="length"), chat(calls=Calls(choice=choice))
        (answer,) = whole([event], said)["choices"]
        told, message = put_together(streamed([event], said)), answer["message"]
        calls = [
            [call["id"], call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ]
        assert (told["content"], told["calls"], told["reason"]) == (message["content"], calls, "length"), place
        assert (message["content"] or "").strip() == "Let me see."[:place].strip() and answer[
            "finish_reason"
        ] == "length", place
        assert all('{"n": 1}'.startswith(arguments) for _, _, arguments in calls), place


def test_a_call_that_is_cut_before_its_arguments_has_none() -> None:
    said = history(CALL[: CALL.index('{"n"')], Markup(tools="hermes"), reason="length")
    (choice,) = whole([chat()], said)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": ""}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


def test_an_answer_that_ends_within_thinking_is_all_reasoning() -> None:
    (choice,) = whole([chat()], history("Well, then", reason="length"))["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "Well, then")
    (choice,) = whole([chat()], history("</think>Yes."))["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Yes.", None)


@pytest.mark.parametrize("markup", [Markup(), Markup(tools="hermes"), Markup(think=("<think>", "</think>"))])
def test_an_answer_to_a_conversation_without_thinking_has_no_reasoning_tokens(markup: Markup) -> None:
    said, events = history("Yes.", markup), [chat(stream=True, include_usage=True)]
    assert whole(events, said)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert streamed(events, said)[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_is_left_out_or_stays_in_the_content_where_the_client_wants_that() -> None:
    hidden = whole([chat(reasoning="hidden")], history(TEXT))
    assert not hidden["choices"][0]["message"].keys() & {"reasoning", "reasoning_content"}
    assert hidden["choices"][0]["message"]["content"] == "Let me see."
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert put_together(streamed([chat(reasoning="hidden")], history(TEXT)))["reasoning"] == ""
    inline = whole([chat(reasoning="inline")], history(TEXT))
    assert inline["choices"][0]["message"]["content"] == "Well\n</think>\n\nLet me see."
    assert len(inline["choices"][0]["message"]["tool_calls"]) == 2


def test_siblings_have_calls_of_their_own_and_share_the_count_of_reasoning() -> None:
    events = [chat(choices=2, stream=True, include_usage=True)] * 2
    texts = [TEXT, TEXT.replace("Well", "Well then")]
    histories = [history(text, index=index) for index, text in enumerate(texts)]
    mixed = sorted(
        (event for said in histories for event in said), key=lambda event: (event.event.kind == "finished", event.n)
    )
    chunks = streamed(events, mixed)
    answer = whole(events, *histories)
    ids = set()
    for index, choice in enumerate(answer["choices"]):
        said = put_together(chunks, index)
        assert said["reasoning"] == choice["message"]["reasoning"]
        assert [call[0] for call in said["calls"]] == [call["id"] for call in choice["message"]["tool_calls"]]
        ids |= {call[0] for call in said["calls"]}
        alone = put_together(streamed([events[0]], history(texts[index]), uid=f"{UID}.{index}"), index)
        assert alone["calls"] == said["calls"], "who reads one of them by its own uid gets the same ids"
    assert len(ids) == 4
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize(("family", "length"), [("mistral", 9), ("hermes", 29)])
def test_ids_of_calls_are_as_long_as_templates_take_them(family: ToolFormat, length: int) -> None:
    text = {"hermes": CALL, "mistral": '[TOOL_CALLS]find[ARGS]{"n": 1}'}[family]
    (choice,) = whole([chat()], history(text, Markup(tools=family)))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert len(call["id"]) == length and call["id"].removeprefix("call_").isalnum()
    (other,) = whole([chat()], history(text, Markup(tools=family)), uid=UID.replace("8", "9", 1))["choices"]
    assert other["message"]["tool_calls"][0]["id"] != call["id"]


def test_an_id_of_kimi_has_the_name_and_the_number_of_the_call_in_the_conversation() -> None:
    told = "".join(
        f"<|tool_call_begin|>functions.find:{n}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for n in (7, 7)
    )
    old = {"role": "assistant", "content": "", "tool_calls": [{"id": "functions.find:0"}]}
    event = chat().model_copy(update={"messages": (*HELLO, old)})
    (choice,) = whole([event], history(told, Markup(tools="kimi_k2")))["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.find:1", "functions.find:2"]


def test_logprobs_and_token_ids_come_with_tokens_that_show_nothing_yet() -> None:
    scores = (Logprob(token=5, text="<tool", logprob=-0.5),)
    first = TokensProduced(tokens=(5,), text="<tool", step="1-1", markup=Markup(tools="hermes"), scores=scores)
    frames = frames_of([chat(token_ids=True)])
    _, held = documents(frames.of(ClientEvent("1-0", 1, first)))
    choice = held["choices"][0]
    assert (choice["delta"], choice["token_ids"], len(choice["logprobs"]["content"])) == ({}, [5], 1)
    *others, last = documents(frames.of(ended(finished())))
    assert [one["choices"][0]["delta"] for one in others] == [{"content": "<tool"}]
    assert "token_ids" not in others[0]["choices"][0] and last["choices"][0]["delta"] == {}


def test_the_last_frame_of_an_event_has_its_id_also_if_it_has_several_pieces() -> None:
    first = TokensProduced(tokens=(5,), text=f"Hm.{CALL}", step="1-1", markup=Markup(tools="hermes"))
    *others, last = split(frames_of([chat()]).of(ClientEvent("1-0", 1, first)))
    assert len(others) == 3 and not any(b"id: " in frame.replace(b'"id":', b"") for frame in others)
    assert last.startswith(b"id: 1-0\n")


def test_the_rest_of_a_stream_is_the_same_from_every_event_on() -> None:
    said = history(TEXT)
    frames = frames_of([chat(stream=True, include_usage=True)])
    told = [frames.of(event) for event in said]
    for place in range(len(said)):
        again = frames_of([chat(stream=True, include_usage=True)])
        for event in said[:place]:
            again.of(event)
        assert [again.of(event) for event in said[place:]] == told[place:]


@pytest.mark.parametrize("endpoint", [COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT])
def test_a_prompt_without_a_template_is_continued_as_it_is(endpoint: str) -> None:
    event = chat(endpoint=endpoint, whole_text=True).model_copy(update={"messages": (), "prompt": "Hello!"})
    answer = whole([event], history(TEXT))
    text = answer["text"] if endpoint == GENERATE_ENDPOINT else answer["choices"][0]["text"]
    assert text == TEXT
    stream = streamed([event], history(TEXT))
    if endpoint == COMPLETIONS_ENDPOINT:
        assert "".join(chunk["choices"][0]["text"] for chunk in stream) == TEXT
    else:
        assert stream[-1]["text"] == TEXT


@pytest.mark.parametrize("markup", [Markup(), Markup(tools="hermes", tokens=(5,))])
def test_an_answer_without_anything_to_read_has_the_frames_of_any_other(markup: Markup) -> None:
    event = chat(calls=None, stream=True)
    marked, plain = frames_of([event]), frames_of([event.model_copy(update={"messages": (), "prompt": "x"})])
    for each in history(TEXT, markup):
        assert marked.of(each) == plain.of(each)
