"""Answers that tell the scores of their prompts: bounded, scored once for all choices, and written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chunks import UID, answered, ended, finished, frames_of
from support.wire import Body, chats, completions, generations, refusal

from pipeline.events import (
    Cancelled,
    Failed,
    Finished,
    Logprob,
    Logprobs,
    PromptInfo,
    Submitted,
    TokensProduced,
    TokenText,
    TopLogprob,
)
from pipeline.scored import MOST_SCORES
from pipeline.scores import Row
from web.wire.endpoints import body_of
from web.wire.frames import ClientEvent
from web.wire.openai.answers import choices_for
from web.wire.pieces import PIECE_BYTES, Slices, encoded, sliced

CHAT = {"prompt_logprobs": 2, "logprobs": True, "seed": 1}
COMPLETION = {"prompt": ["a", "b"], "prompt_logprobs": 1, "seed": 1}
ECHO = {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "seed": 1}
GENERATE = {"text": ["a", "b"], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}

TOPS = {**GENERATE, "top_logprobs_num": 20}


def chat(body: Body) -> list[Submitted]:
    return chats(**body)


ToEvents = Callable[[Body], list[Submitted]]
WAYS: list[tuple[ToEvents, Body]] = [
    (chat, {**CHAT, "n": 3}),
    (completions, {**COMPLETION, "n": 3}),
    (completions, {**ECHO, "n": 3}),
    (completions, {**ECHO, "n": 3, "prompt_logprobs": 2, "max_tokens": 0}),
    (completions, {**ECHO, "n": 3, "stream": True, "stream_options": {"include_usage": True}}),
    (completions, {**ECHO, "n": 3, "stream": True, "max_tokens": 0, "return_token_ids": True}),
    (generations, {**GENERATE, "sampling_params": {"n": 3}}),
    (generations, {**GENERATE, "sampling_params": {"n": 3}, "stream": True}),
]


def score(token: int, *others: int) -> Logprob:
    top = tuple(TopLogprob(token=each, text=f"<{each}>", logprob=-each / 8) for each in others)
    return Logprob(token=token, text=f"<{token}>", logprob=-token / 8, top=top)


def scored(prompt: int, length: int = 3, width: int = 1) -> PromptInfo:
    scores = [score(prompt + place, *range(width)) for place in range(1, length)]
    first = TokenText(token=prompt, text=f"<{prompt}>")
    return PromptInfo(
        num_tokens=length, token_ids=(7,) * length, text=f"prompt {prompt}", scores=Logprobs(scores), first=first
    )


def told(events: list[Submitted], *, each_scored: bool) -> list[list[ClientEvent]]:
    """Return the events of each choice: a token, and the end. Of those of one prompt all are *scored*, or the first."""
    histories = []
    for index, event in enumerate(events):
        shown, per_prompt = event.presentation, event.presentation.choices
        prompt: PromptInfo | None = scored(10 * (1 + index // per_prompt))
        if index % per_prompt and not each_scored:  # as the detokenizer tells it
            unscored = PromptInfo(**{**vars(prompt), "scores": (), "first": None})
            prompt = unscored if shown.tells_prompt else None
        scores = (score(1, 2),) if event.sampling.logprobs is not None else ()
        token = TokensProduced(tokens=(5,), text=f"answer {index}", step="1-1", prompt=prompt, scores=scores)
        histories.append([ClientEvent("1-0", 1, token, index), ended(finished("length"), index)])
    return histories


def answer_of(events: list[Submitted], given: list[ClientEvent]) -> bytes:
    """Return the whole answer, or the whole stream."""
    if events[0].presentation.stream:
        return b"".join(map(frames_of(events, ids=False).of, given))
    return answered(events, given)


@pytest.mark.parametrize(("to_events", "body"), WAYS)
def test_the_choices_of_a_prompt_share_its_scores_and_the_answer_is_the_same(to_events: ToEvents, body: Body) -> None:
    events = to_events(body)
    of_prompts = [event.sampling.prompt_logprobs for event in events]
    assert [scores is not None for scores in of_prompts] == [True, False, False] * (len(events) // 3)
    kept, before = (
        [each for history in told(events, each_scored=all_of_them) for each in history] for all_of_them in (False, True)
    )
    everywhere = [
        event.model_copy(update={"sampling": events[0].sampling.model_copy(update={"seed": event.sampling.seed})})
        for event in events
    ]
    alone = [choices_for(UID, [event])[0] for event in everywhere]
    assert all(choice.scorer is None for choice in alone)
    assert answer_of(events, kept) == answer_of(everywhere, before)


@pytest.mark.parametrize(("to_events", "body"), [way for way in WAYS if way[1].get("stream")])
def test_a_choice_that_comes_before_the_scores_of_its_prompt_waits_for_them(to_events: ToEvents, body: Body) -> None:
    events = to_events(body)
    first, second, *rest = told(events, each_scored=False)
    frames, usual = (frames_of(events, ids=False) for _ in range(2))
    assert [frames.of(each) for each in second] == [b"", b""]
    expected = b"".join(usual.of(each) for each in (first[0], *second, first[1]))
    assert b"".join(frames.of(each) for each in first) == expected
    for each in [event for history in rest for event in history]:
        assert frames.of(each) == usual.of(each)


@pytest.mark.parametrize("event", [Failed(status=500, code="c", message="m"), Cancelled(by="client")])
def test_a_failure_waits_for_no_scores(event: Failed | Cancelled) -> None:
    frames = frames_of(completions({**ECHO, "n": 2, "stream": True}))
    assert b"error" in frames.of(ended(event, 1))


def test_one_of_several_choices_is_told_alone_without_the_scores() -> None:
    events = completions({**ECHO, "n": 2, "stream": True})
    frames = frames_of([events[1]], f"{UID}.1", ids=False)
    (produced, _) = told(events, each_scored=False)[1]
    opening, token = frames.of(ClientEvent("1-0", 1, produced.event)).split(b"\n\n")[:2]
    assert b'"text":"prompt 10","logprobs":null' in opening and b"answer 1" in token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("to_events", "body"), [(chat, CHAT), (completions, ECHO), (generations, TOPS)])
def test_a_long_answer_comes_in_pieces_of_which_each_is_made_when_it_is_due(
    to_events: ToEvents, body: Body, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stream and to_events is chat:
        pytest.skip("prompt_logprobs is not streamed")
    rows: list[int] = []
    row_of = Logprobs._row

    def counted(scores: Logprobs, first: int, end: int) -> Row:
        rows.append(first)
        return row_of(scores, first, end)

    monkeypatch.setattr(Logprobs, "_row", counted)
    body = {name: value[0] if name in ("text", "prompt") else value for name, value in body.items()}
    events = to_events({**body, "stream": stream})
    (history,) = told(events, each_scored=True)
    token = history[0].event
    assert isinstance(token, TokensProduced)
    history[0].event = token.model_copy(update={"prompt": scored(10, length=2000, width=20)})
    if stream:
        frames = frames_of(events, ids=False)
        assert frames.are_long
        pieces: Iterator[bytes] = frames.pieces(history[0])
    else:
        (choice,) = choices_for(UID, events)
        choice.apply(history[0].event)
        assert isinstance(history[1].event, Finished)
        choice.finish(history[1].event)
        pieces = body_of(UID, events, [choice])
    sizes, at_once = [], 0
    while piece := next(pieces, b""):
        sizes.append(len(piece))
        at_once = max(at_once, len(rows))
        rows.clear()
    assert len(sizes) > 5 and max(sizes) < 2 * PIECE_BYTES, "of more than a megabyte"
    assert at_once < 2000, "rows of 21 pairs, for one piece"


def test_pieces_are_the_json_of_the_whole() -> None:
    def value(listed: Callable[[list[Any]], Any]) -> Any:
        return {"a": listed([]), "b": [listed([1]), "\u00ff\u0000"], "c": {"d": listed([["é"] * 9] * 5000)}, "e": 1}

    pieces = list(encoded(value(sliced)))
    assert len(pieces) > 3 and json.loads(b"".join(pieces)) == value(list)
    assert list(encoded({"a": Slices([[1], [2, 3]])})) == [b'{"a":[1,2,3]}']
    with pytest.raises(TypeError):
        list(encoded({"a": object()}))


IDS = {"prompt": [5] * 3000, "max_tokens": 1}


@pytest.mark.parametrize(
    ("to_events", "body", "param"),
    [
        (completions, {**IDS, "prompt_logprobs": 20, "n": 64}, "prompt_logprobs"),
        (completions, {**IDS, "prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        (completions, {**IDS, "echo": True, "logprobs": 20, "n": 16}, "logprobs"),
        (completions, {**IDS, "prompt": [[5] * 1000] * 48, "prompt_logprobs": 20}, "prompt_logprobs"),
        (completions, {**IDS, "prompt": [[5] * 3000] * 2, "prompt_logprobs": 1, "n": 100}, "prompt_logprobs"),
        (
            generations,
            {"input_ids": [5] * 3000, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 128},
             "top_logprobs_num": 2},
            "logprob_start_len",
        ),
        (
            generations,
            {"input_ids": [5] * 3000, "return_logprob": True, "logprob_start_len": 0, "stream": True,
             "sampling_params": {"max_new_tokens": 500}},
            "logprob_start_len",
        ),
    ],
)  # fmt: skip
def test_a_body_of_ids_that_asks_for_too_many_scores_is_refused(to_events: ToEvents, body: Body, param: str) -> None:
    error = refusal(lambda raw: to_events(json.loads(raw)), body)
    assert (error.status, error.code, error.param) == (400, "too_many_scores", param)
    assert str(MOST_SCORES) in error.message


@pytest.mark.parametrize(
    ("to_events", "body"),
    [
        (completions, {**IDS, "prompt_logprobs": 20, "n": 15}),
        (completions, {**IDS, "prompt_logprobs": 20, "n": 64, "truncate_prompt_tokens": 700}),
        (completions, {**IDS, "prompt_logprobs": 20, "n": 64, "truncate_prompt_tokens": -1}),
        (completions, {**IDS, "logprobs": 20, "n": 128}),
        (completions, {"prompt": "x" * 100_000, "prompt_logprobs": 20, "n": 64}),
        (generations, {"input_ids": [5] * 3000, "return_logprob": True, "sampling_params": {"n": 128}}),
    ],
)
def test_a_body_is_taken_if_the_scores_are_fewer_or_only_the_tokenizer_can_count(
    to_events: ToEvents, body: Body
) -> None:
    assert to_events(body)
