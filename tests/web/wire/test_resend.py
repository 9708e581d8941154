"""A body, what it submits, and the body that submits the same again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from support.selection import by_night

from pipeline.errors import RequestError
from pipeline.events import Presentation, Submitted
from web.wire.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from web.wire.resend import request_body
from web.wire.sglang.schemas import SGLangRequest, SGLangSampling, TextRequest, parse_generate
from web.wire.submit import chat_events, completion_events, generate_events

Strategies = dict[str, st.SearchStrategy[Any]]

FLAG = st.booleans()
ID = st.integers(0, 40)
IDS = st.lists(ID, min_size=1, max_size=3)
TEXT = st.text(min_size=1, max_size=5)
TEXTS = st.lists(TEXT, min_size=1, max_size=3)
LENGTH = st.sampled_from([1, 16, 40])
SEED = st.integers(-(2**63), 2**63 - 1)
SCORES = st.integers(0, 20)
SHARE = st.sampled_from([0.25, 1, 1.0])
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
OTHER_TOOL = {"type": "function", "function": {"name": "g-2"}}
NAMED = [{"type": "function", "function": {"name": name}} for name in ("f", "g-2")]
TOOL_CHOICE = st.sampled_from(
    ["none", "auto", "required", *NAMED]
    + [
        {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        for mode in ("auto", "required")
        for tools in (NAMED[:1], NAMED)
    ]
)
BUDGET = st.sampled_from([-1, 0, 16])
CALL = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = st.sampled_from(
    [
        [{"role": "user", "content": "hello"}],
        [{"role": "developer", "content": [{"type": "text", "text": "be"}]}, {"role": "user", "content": ""}],
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
        ],
        [{"role": "user", "name": "ann", "content": "你好"}, {"role": "assistant"}],
        [{"role": "assistant", "content": "So.", "reasoning": "Hm."}, {"role": "user", "content": "And?"}],
    ]
)
SCHEMA = st.sampled_from([{}, {"type": "object", "properties": {"b": {"const": 1.5}, "a": {}}}, '{"enum": ["é"]}'])
SPACE = st.sampled_from(["", " ?"])
CONSTRAINTS: Strategies = {
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_object", "schema": {"type": "object"}},
            {"type": "json", "value": {"enum": [1.5]}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}, "strict": True}},
        ]
    ),
    "structured_outputs": st.one_of(
        st.fixed_dictionaries({"json": SCHEMA}, optional={"whitespace_pattern": SPACE}),
        st.fixed_dictionaries({"json_object": st.just(True)}, optional={"whitespace_pattern": SPACE}),
        st.sampled_from([{"regex": "a+"}, {"choice": ["a", "é"]}, {"grammar": 'root ::= "a"'}]),
    ),
    "guided_json": SCHEMA,
    "json_schema": SCHEMA,
    "guided_regex": TEXT,
    "regex": TEXT,
    "guided_choice": TEXTS,
    "guided_grammar": TEXT,
    "ebnf": TEXT,
    "grammar": st.just("") | TEXT,
}
SAMPLING: Strategies = CONSTRAINTS | {
    "guided_whitespace_pattern": SPACE,
    "n": st.integers(1, 3),
    "temperature": st.sampled_from([0, 0.5, 1, 2]),
    "top_p": SHARE,
    "top_k": st.integers(-1, 40),
    "min_p": st.sampled_from([0, 0.1]),
    "typical_p": SHARE,
    "stop": TEXT | TEXTS | st.just([]),
    "stop_token_ids": IDS,
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "presence_penalty": st.sampled_from([0, -1.5]),
    "frequency_penalty": st.sampled_from([0, 0.5]),
    "repetition_penalty": st.sampled_from([1, 1.2]),
    "logit_bias": st.dictionaries(ID.map(str), st.sampled_from([-100, 0, 2.5]), max_size=3),
}
GENERATION: Strategies = SAMPLING | {
    "model": st.sampled_from(["m", "other"]),
    "stream": FLAG,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": FLAG, "continuous_usage_stats": FLAG}),
    "max_tokens": LENGTH,
    "n_predict": st.just(-1) | LENGTH,
    "repeat_penalty": st.just(1.2),
    "min_tokens": st.integers(0, 1),
    "seed": SEED,
    "include_stop_str_in_output": FLAG,
    "allowed_token_ids": IDS,
    "bad_words": TEXTS,
    "prompt_logprobs": SCORES,
    "logprob_token_ids": IDS,
    "return_cached_tokens_details": FLAG,
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "add_special_tokens": FLAG,
    "truncate_prompt_tokens": st.sampled_from([-1, 5]),
    "truncation_side": st.sampled_from(["left", "right"]),
    "priority": st.integers(-2, 2),
    "user": TEXT,
    "metadata": st.dictionaries(TEXT, TEXT | st.integers(-5, 5) | st.none(), max_size=2),
    "store": FLAG,
    "service_tier": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
}
CHAT: Strategies = GENERATION | {
    "messages": MESSAGES,
    "prompt": TEXT,
    "max_completion_tokens": LENGTH,
    "logprobs": FLAG,
    "top_logprobs": SCORES,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": TEXT}),
    "chat_template_kwargs": st.dictionaries(TEXT, TEXT | FLAG | st.lists(ID, max_size=2), max_size=2),
    "tools": st.sampled_from([[], [TOOL], [TOOL, OTHER_TOOL]]),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "enable_thinking": FLAG,
    "thinking_token_budget": BUDGET,
    "thinking_budget": BUDGET,
    "reasoning_budget": BUDGET,
    "reasoning_budget_tokens": BUDGET,
    "include_reasoning": FLAG,
    "separate_reasoning": FLAG,
    "reasoning_format": st.sampled_from(["none", "auto", "deepseek"]),
}
COMPLETION: Strategies = GENERATION | {
    "prompt": TEXT | TEXTS | IDS | st.lists(IDS, min_size=1, max_size=3),
    "max_tokens": st.sampled_from([0, 1, 16]),
    "echo": FLAG,
    "logprobs": SCORES,
    "best_of": st.just(1),
}
SGLANG_SAMPLING: Strategies = SAMPLING | {
    "max_new_tokens": st.sampled_from([0, 5, 128]),
    "min_new_tokens": st.integers(0, 1),
    "sampling_seed": SEED,
    "no_stop_trim": FLAG,
}
SGLANG: Strategies = {
    "text": TEXT | TEXTS,
    "input_ids": IDS | st.lists(IDS, min_size=1, max_size=3),
    "sampling_params": st.fixed_dictionaries({}, optional=dict(SGLANG_SAMPLING)),
    "stream": FLAG,
    "return_logprob": FLAG,
    "logprob_start_len": st.integers(-1, 4),
    "top_logprobs_num": SCORES,
    "return_text_in_logprobs": FLAG,
    "model": st.sampled_from(["m", "other"]),
}
PLAIN: Strategies = {"prompt": TEXT, "max_tokens": LENGTH, "ignore_eos": FLAG, "model": st.just("other")}
DEFAULTS = st.sampled_from([{}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}])
KINDS: Mapping[str, tuple[Strategies, Any, Any]] = {
    "chat": (CHAT, parse_chat, chat_events),
    "completions": (COMPLETION, parse_completion, completion_events),
    "sglang": (SGLANG, parse_generate, generate_events),
    "mini-sglang": (PLAIN, parse_generate, generate_events),
}


NEEDS = {
    "stream_options": "stream",
    "top_logprobs": "logprobs",
    "logprob_token_ids": "logprobs",
    "logprob_start_len": "return_logprob",
    "top_logprobs_num": "return_logprob",
}
"""Field -> the one without which it is refused."""
EXCLUDES = (
    ("messages", "prompt"),
    ("text", "input_ids"),
    ("stream", "prompt_logprobs"),
    ("add_generation_prompt", "continue_final_message"),
    ("max_tokens", "n_predict"),
    ("max_completion_tokens", "n_predict"),
    ("repetition_penalty", "repeat_penalty"),
    ("n", "best_of"),
    ("thinking_token_budget", "thinking_budget"),
    ("thinking_token_budget", "reasoning_budget"),
    ("thinking_budget", "reasoning_budget"),
    ("thinking_token_budget", "reasoning_budget_tokens"),
    ("thinking_budget", "reasoning_budget_tokens"),
    ("reasoning_budget", "reasoning_budget_tokens"),
    ("separate_reasoning", "reasoning_format"),
)
"""(a field, the one that is refused beside it)"""


def submitted(kind: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Submitted]:
    _, parse, to_events = KINDS[kind]
    asked = parse(json.dumps(body).encode())
    events: list[Submitted] = to_events(asked, frontend="web-0", model=asked.model or "m", defaults=defaults)
    return events


def keep_one_constraint(draw: st.DrawFn, fields: dict[str, Any]) -> None:
    """Leave at most one of the fields that say what an answer must be, and a pattern of whitespace only with JSON."""
    given = [name for name in CONSTRAINTS if name in fields]
    kept = draw(st.sampled_from(given)) if given else ""
    for name in given:
        if name != kept:
            del fields[name]
    if kept not in ("response_format", "guided_json", "json_schema"):
        fields.pop("guided_whitespace_pattern", None)


@st.composite
def bodies(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Draw a body. A few contradict themselves in other ways than the tables say."""
    body: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=dict(KINDS[kind][0])))
    for fields in (body, body.get("sampling_params", {})):
        keep_one_constraint(draw, fields)
    for field, other in EXCLUDES:
        if body.get(field) is not None:
            body.pop(other, None)
    for field, needed in NEEDS.items():
        if not body.get(needed) and not (needed == "logprobs" and needed in body and kind == "completions"):
            body.pop(field, None)
    if not body.keys() & {"messages", "prompt", "text", "input_ids"}:
        body["text" if kind == "sglang" else "prompt"] = "a"
    return body


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=by_night(25, 3000))
@given(data=st.data())
def test_the_body_of_events_makes_the_same_events(kind: str, data: st.DataObject) -> None:
    body, defaults = data.draw(bodies(kind)), data.draw(DEFAULTS)
    try:
        events = submitted(kind, body, defaults)
    except RequestError:
        reject()
    again = request_body(events)
    assert submitted(kind, again, defaults) == events
    assert submitted(kind, again, {}) == events, "whatever the model recommends"
    assert request_body(submitted(kind, again, {})) == again
    for event in events[:3]:
        alone = event.model_copy(update={"siblings": 1, "presentation": with_choices(event, 1)})
        if len(events) > 1:
            (told,) = submitted(kind, request_body([event]), {})
            assert unscored(told) == unscored(alone), "only the first choice of a prompt has its log-probabilities"
            assert told == alone or not is_scored(alone)


def is_scored(event: Submitted) -> bool:
    return event.sampling.prompt_logprobs is not None


def unscored(event: Submitted) -> Submitted:
    shown = event.presentation.model_copy(update={"prompt_scores": False, "scores_from": 0})
    sampling = event.sampling.model_copy(update={"prompt_logprobs": None})
    return event.model_copy(update={"presentation": shown, "sampling": sampling})


def with_choices(event: Submitted, choices: int) -> Presentation:
    return event.presentation.model_copy(update={"choices": choices})


def test_every_field_is_drawn() -> None:
    models: Mapping[str, type[BaseModel]] = {
        "chat": ChatRequest,
        "completions": CompletionRequest,
        "sglang": SGLangRequest,
        "mini-sglang": TextRequest,
    }
    for kind, model in models.items():
        assert KINDS[kind][0].keys() == model.model_fields.keys(), kind
    assert SGLANG_SAMPLING.keys() == SGLangSampling.model_fields.keys()


def test_a_body_says_no_more_than_the_request_that_was_recorded() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7, "seed": 3}
    assert request_body(submitted("chat", body, {})) == body | {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
