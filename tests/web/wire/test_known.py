"""Streams that go on after the characters that their client has: exactly the rest comes, whatever the tokens are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunks import documents, ended, finished, frames_of
from support.selection import by_night

from ops.sse_reader import frames_in
from pipeline.errors import RequestError
from pipeline.events import (
    Calls,
    Cancelled,
    End,
    Failed,
    Markup,
    Presentation,
    PromptInfo,
    SamplingParams,
    Submitted,
    Templating,
    TokensProduced,
)
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT
from web.wire.frames import ClientEvent
from web.wire.known import Known, check_countable, num_known

TOOLS = ({"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},)
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
MARKUP = Markup(tools="hermes", think=("<think>", "</think>"))
PROMPT = PromptInfo(num_tokens=2, text="Dear é")


def asked(endpoint: str = CHAT_ENDPOINT, sampling: SamplingParams | None = None, **shown: Any) -> Submitted:
    return Submitted(
        endpoint=endpoint,
        frontend="web-0",
        model="m",
        messages=({"role": "user", "content": "Hello!"},) if endpoint == CHAT_ENDPOINT else (),
        prompt="" if endpoint == CHAT_ENDPOINT else "Dear é",
        sampling=sampling or SamplingParams(),
        calls=Calls() if endpoint == CHAT_ENDPOINT else None,
        templating=Templating(tools=TOOLS),
        presentation=Presentation(stream=True, **shown),
    )


def said(*texts: str, end: End | None = None, markup: Markup | None = None) -> list[ClientEvent]:
    """Return the events of an answer that has these texts in its tokens."""
    events = [
        TokensProduced(
            tokens=(n,), text=text, step="1-1", prompt=PROMPT if n == 1 else None, markup=markup if n == 1 else None
        )
        for n, text in enumerate(texts, 1)
    ]
    return [*(ClientEvent(f"{n}-0", n, event) for n, event in enumerate(events, 1)), ended(end or finished())]


def told(event: Submitted, history: Sequence[ClientEvent], known: int | None) -> bytes:
    frames = frames_of([event], known=None if known is None else Known(known))
    return b"".join(map(frames.of, history))


def text_of(event: Submitted, stream: bytes) -> str:
    """Return the text of a stream, as its client puts it together."""
    if event.endpoint == GENERATE_ENDPOINT:
        return "".join(frame.data for frame in frames_in(stream) if not frame.kind)
    choices = [choice for chunk in documents(stream) for choice in chunk["choices"]]
    return "".join((choice["text"] if "text" in choice else choice["delta"].get("content")) or "" for choice in choices)


@pytest.mark.parametrize(
    "event",
    [
        asked(),
        asked(include_usage=True, continuous_usage=True),
        asked(COMPLETIONS_ENDPOINT),
        asked(COMPLETIONS_ENDPOINT, echo=True),
        asked(GENERATE_ENDPOINT),
    ],
    ids=["chat", "chat with counts", "completion", "completion with its prompt", "text"],
)
@settings(max_examples=by_night(40, 400), deadline=None)
@given(texts=st.lists(st.text(alphabet="ab\r\n 🙂", max_size=4), max_size=6))
def test_after_any_number_of_characters_exactly_the_rest_comes(event: Submitted, texts: list[str]) -> None:
    history = said(*texts)
    whole = told(event, history, None)
    text, end = text_of(event, whole), frames_in(whole)[-1:]
    for known in range(len(text) + 1):
        rest = told(event, history, known)
        assert text_of(event, rest) == text[known:]
        assert frames_in(rest)[-1:] == end or event.endpoint == GENERATE_ENDPOINT, "how it ended, and its counts"
        assert b'"role"' not in rest or not known, "a client with text has the opening"


def test_the_frame_that_straddles_is_cut_and_the_later_ones_are_as_they_were() -> None:
    history = said("Hel", "lo", "", "!")
    whole, rest = (documents(told(asked(), history, known)) for known in (None, 4))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in whole] == ["", "Hel", "lo", "!", None]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in rest] == ["o", "!", None]
    assert rest[1:] == whole[3:]
    assert [frame.id for frame in frames_in(told(asked(), history, 4))][:2] == ["2-0", "4-0"]


def test_text_that_was_held_back_for_a_call_counts_when_it_is_sent() -> None:
    history = said("a <tool", "_cal", "m> b", "c", markup=MARKUP)
    text = text_of(asked(), told(asked(), history, None))
    assert text == "a <tool_calm> bc"
    for known in range(len(text) + 1):
        assert text_of(asked(), told(asked(), history, known)) == text[known:]


@pytest.mark.parametrize(
    ("texts", "known", "what"),
    [
        (["<think>", "Hm", "</think>", "Yes"], 0, "reasoning"),
        (["<think>", "Hm", "</think>", "Yes"], 2, "reasoning"),
        (["Yes", CALL], 3, "tool calls"),
        ([CALL], 0, "tool calls"),
    ],
)
def test_what_is_not_counted_and_the_client_may_have_is_refused(texts: list[str], known: int, what: str) -> None:
    with pytest.raises(RequestError, match=f"the stream has {what}") as refused:
        told(asked(), said(*texts, markup=MARKUP), known)
    assert (refused.value.status, refused.value.code) == (400, "not_resumable")


def test_nothing_is_sent_of_a_stream_that_may_be_refused_yet() -> None:
    first, second, third, *_ = said("", "<think", ">Hm", markup=MARKUP)
    frames = frames_of([asked()], known=Known(0))
    assert frames.of(first) == frames.of(second) == b""
    with pytest.raises(RequestError, match="reasoning"):
        frames.of(third)
    opened = told(asked(), said("", "a"), 0)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in documents(opened)] == ["", "a", None]


def test_hidden_reasoning_is_no_part_of_the_stream_and_calls_after_the_missing_text_come() -> None:
    history = said("<think>", "Hm", "</think>", "Yes", markup=MARKUP)
    assert text_of(asked(), told(asked(reasoning="hidden"), history, 1)) == "es"
    rest = told(asked(), said("Yes", CALL, markup=MARKUP), 2)
    assert text_of(asked(), rest) == "s" and b'"tool_calls"' in rest


def test_of_whole_texts_those_come_that_are_longer() -> None:
    event, history = asked(GENERATE_ENDPOINT, whole_text=True), said("He", "l", "", "lo")
    for known, texts in ((0, 4), (1, 4), (2, 3), (3, 1), (5, 0)):
        frames = [json.loads(frame.data)["text"] for frame in frames_in(told(event, history, known))]
        assert frames == [*["He", "Hel", "Hel", "Hello"][4 - texts :], "Hello"]


@pytest.mark.parametrize("endpoint", [CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT])
@pytest.mark.parametrize("whole_text", [False, True])
@pytest.mark.parametrize("end", [None, Cancelled(by="me"), Failed(status=500, code="c", message="m")])
def test_more_characters_than_an_ended_answer_has_are_refused(endpoint: str, whole_text: bool, end: End | None) -> None:
    event, history = asked(endpoint, whole_text=whole_text), said("Hel", "lo", end=end)
    told(event, history, 5)
    with pytest.raises(RequestError, match=r"6 .* 5 ") as refused:
        told(event, history, 6)
    assert (refused.value.param, refused.value.code) == ("after_characters", "invalid_value")


def test_an_end_that_is_not_the_answers_own_is_told_however_many_characters_are_known() -> None:
    stopping = ClientEvent("", 0, Failed(status=503, code="shutting_down", message="Connect again."))
    for endpoint in (CHAT_ENDPOINT, GENERATE_ENDPOINT):
        for whole_text in (False, True):
            stream = told(asked(endpoint, whole_text=whole_text), [*said("Hel")[:-1], stopping], 9)
            assert b'"code":"shutting_down"' in stream


@pytest.mark.parametrize(
    ("event", "num_choices", "what"),
    [
        (asked(sampling=SamplingParams(logprobs=0)), 1, "log-probabilities"),
        (asked(COMPLETIONS_ENDPOINT, SamplingParams(prompt_logprobs=1)), 1, "log-probabilities"),
        (asked(token_ids=True), 1, "token ids"),
        (asked(choices=2), 2, r"several answers, .*\.0 to \.1"),
    ],
)
def test_streams_with_more_than_one_text_are_refused_before_they_are_read(
    event: Submitted, num_choices: int, what: str
) -> None:
    with pytest.raises(RequestError, match=f"the stream has {what}") as refused:
        check_countable(event, num_choices)
    assert (refused.value.status, refused.value.code) == (400, "not_resumable")
    check_countable(asked(), 1)


@pytest.mark.parametrize("given", ["", "-1", "x", "1.5", "01", "+1", " 1", "1e3", "٣", "1000000000", "9" * 5000])
def test_what_is_no_number_of_characters_is_refused(given: str) -> None:
    with pytest.raises(RequestError, match="999999999") as refused:
        num_known(given)
    assert (refused.value.param, refused.value.code) == ("after_characters", "invalid_value")
    assert [num_known(good) for good in ("0", "999999999")] == [0, 999999999]
