"""Every supported field of a request: the values it takes, and a request that shows its effect.

`tests/end_to_end/test_fields.py` runs the rows against a server, `tests/web/wire/test_fields.py` checks the values they
refuse. `make docs` writes the table in docs/http-api.md from them. What a field does is said in its schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.checkpoints import STOP

from web.wire.openai.schemas import ChatRequest, CompletionRequest

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
WILD = {"temperature": 2, "seed": 5, "max_tokens": 24, "ignore_eos": True}
FEW = {"allowed_token_ids": list(range(100, 140)), "max_tokens": 64, "temperature": 1, "seed": 3, "ignore_eos": True}
"""So few tokens that some come again."""
PROMPT = "Tell me how a log remembers."
PARTIAL = {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
SCHEMA = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
GRAMMAR = 'root ::= [xy] "-" [0-9]'
EOS = "the end-of-sequence token"
"""Stands for its id."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a request was answered with."""

    text: str
    token_ids: list[int]
    reason: str
    prompt_tokens: int
    answer: Any
    """Its JSON; of a stream a list of that of its frames."""
    submitted: Mapping[str, Any]
    """How its history begins."""

    @property
    def choice(self) -> Any:
        """The first choice of the answer."""
        return self.answer["choices"][0]

    @property
    def details(self) -> Any:
        """The counts of some of its tokens."""
        return self.answer["usage"]["completion_tokens_details"]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_different(self) -> int:
        return len(set(self.token_ids))

    @property
    def most_of_one(self) -> int:
        return max(Counter(self.token_ids).values())


Fields = Mapping[str, Any]
Shown = Callable[[Said, Said], bool]


@dataclass(frozen=True, slots=True)
class Field:
    """One field, and what is sent to show it: `base` without it, then with it."""

    name: str
    takes: str
    default: str
    base: Fields
    value: Any
    shows: Shown
    """Whether the answer without (first) and the one with the field are as `effect` says."""
    refused: Any
    """A value that gets a 400."""
    more: Callable[[Said], Fields] = field(default=lambda said: {})
    """What else is sent with the field, or instead of `value`, where it depends on the answer without it."""
    completions: bool = False
    """It is a field of /v1/completions, and not of chats, or another one there."""

    @property
    def effect(self) -> str:
        """What the answer is like with the field, as the schema of the request says."""
        model = CompletionRequest if self.completions else ChatRequest
        return " ".join((model.model_fields[self.name].description or "").split())


FIELDS = (
    Field(
        "max_completion_tokens", "whole number from 1, or -1", "rest of the context",
        GREEDY, 5, lambda a, b: b.token_ids == a.token_ids[:5] and b.reason == "length", 0,
    ),
    Field(
        "max_tokens", "the same; `max_completion_tokens` wins", "rest of the context; completions: 16",
        {"temperature": 0, "ignore_eos": True}, 7,
        lambda a, b: b.num_tokens == 7 < a.num_tokens and b.reason == "length", "7",
    ),
    Field(
        "n_predict", "the same, or -1", "rest of the context; completions: 16",
        GREEDY, 3, lambda a, b: b.token_ids == a.token_ids[:3] and b.reason == "length", -2,
        more=lambda said: {"max_tokens": None},
    ),
    Field(
        "min_tokens", "whole number from 0", "0",
        {**GREEDY, "logit_bias": {"50": 100}, "stop_token_ids": [50]}, 6,
        lambda a, b: a.num_tokens == 1 and b.num_tokens == 7 and 50 not in b.token_ids[:6], -1,
    ),
    Field(
        "stop", "a text of up to 1,024 characters, or up to 128", "none",
        GREEDY, None, lambda a, b: a.text.startswith(b.text) and b.text != a.text and b.reason == "stop", [""],
        lambda said: {"stop": said.text[3:5]},
    ),
    Field(
        "stop_token_ids", "up to 256 token ids", "none",
        GREEDY, None,
        lambda a, b: b.token_ids == a.token_ids[: a.token_ids.index(a.token_ids[4]) + 1] and b.reason == "stop", [-1],
        lambda said: {"stop_token_ids": [said.token_ids[4]]},
    ),
    Field(
        "ignore_eos", "true or false", "false",
        {"temperature": 0, "max_tokens": 9, "logit_bias": {EOS: 100}}, True,
        lambda a, b: (a.num_tokens, a.reason, b.num_tokens, b.reason) == (1, "stop", 9, "length"), "true",
    ),
    Field(
        "temperature", "0 to 2", "the model's, else 1",
        {**WILD, "temperature": 0}, 1.5, lambda a, b: a.token_ids != b.token_ids, 2.1,
    ),
    *(
        Field(name, takes, default, WILD, value, lambda a, b: a.token_ids != b.token_ids, refused)
        for name, takes, default, value, refused in (
            ("top_p", "0 to 1", "the model's, else 1", 0, -0.1),
            ("top_k", "whole number from -1", "the model's, else 0", 1, -2),
            ("min_p", "0 to 1", "the model's, else 0", 1, 1.1),
            ("typical_p", "above 0, at most 1", "1", 0.05, 0),
            ("seed", "whole number of 64 bits", "random", 6, "6"),
        )
    ),
    Field(
        "presence_penalty", "-2 to 2", "0",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 2.1,
    ),
    Field(
        "frequency_penalty", "-2 to 2", "0",
        FEW, 2, lambda a, b: b.most_of_one < a.most_of_one, -2.1,
    ),
    Field(
        "repetition_penalty", "above 0, to 2", "the model's, else 1",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 0,
    ),
    Field(
        "repeat_penalty", "the same", "the model's, else 1",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 0,
    ),
    Field(
        "logit_bias", "token id: -100 to 100, up to 1,024", "none",
        GREEDY, {"77": 100}, lambda a, b: set(b.token_ids) == {77} != set(a.token_ids), {"a": 1},
    ),
    Field(
        "allowed_token_ids", "up to 16,384 token ids", "all",
        GREEDY, [90, 91, 92], lambda a, b: set(b.token_ids) <= {90, 91, 92} and not set(a.token_ids) <= {90, 91, 92},
        [],
    ),
    Field(
        "bad_words", "up to 256 texts", "none",
        {**GREEDY, "logprobs": True}, None,
        lambda a, b: _first_word(a) not in _pieces(b) and b.token_ids != a.token_ids, "",
        lambda said: {"bad_words": [_first_word(said)]},
    ),
    Field(
        "response_format", "`text`, `json_object` or `json_schema`", "`text`",
        GREEDY, {"type": "json_schema", "json_schema": {"name": "two", "schema": SCHEMA}},
        lambda a, b: not _is_two(a) and _is_two(b) and b.reason == "stop", {"type": "json_schema"},
    ),
    Field(
        "structured_outputs", "one of `json`, `regex`, `choice`, `grammar`, `json_object`", "none",
        GREEDY, {"choice": ["red", "blue"]}, lambda a, b: b.text in ("red", "blue") and b.reason == "stop", {},
    ),
    *(
        Field(
            name, "a schema, or its text", "none",
            GREEDY, SCHEMA, lambda a, b: not _is_two(a) and _is_two(b), refused,
        )
        for name, refused in (("guided_json", "{"), ("json_schema", [1]))
    ),
    *(
        Field(
            name, "text", "none",
            GREEDY, "[xy]{4}", lambda a, b: len(b.text) == 4 and set(b.text) <= set("xy") and b.reason == "stop", "",
        )
        for name in ("guided_regex", "regex")
    ),
    Field(
        "guided_choice", "up to 4,096 texts", "none",
        GREEDY, ["red", "blue"], lambda a, b: b.text in ("red", "blue") and b.reason == "stop", [],
    ),
    *(
        Field(
            name, "text", "none", GREEDY, GRAMMAR,
            lambda a, b: b.text[:2] in ("x-", "y-") and len(b.text) == 3 and b.reason == "stop", refused,
        )
        for name, refused in (("guided_grammar", ""), ("ebnf", ""), ("grammar", 3))
    ),
    Field(
        "guided_whitespace_pattern", "text, with a schema", "one space, or a line break and up to 16 spaces",
        {**GREEDY, "guided_json": SCHEMA}, "", lambda a, b: _is_two(a) and _is_two(b) and " " not in b.text, 3,
    ),
    Field(
        "include_stop_str_in_output", "true or false", "false",
        GREEDY, None, lambda a, b: b.text.endswith(a.text[3:5]) and a.text.startswith(b.text) and b.reason == "stop", 1,
        more=lambda said: {"stop": said.text[3:5], "include_stop_str_in_output": True},
    ),
    Field(
        "skip_special_tokens", "true or false", "true",
        {"temperature": 0, "max_tokens": 3, "logit_bias": {EOS: 100}, "ignore_eos": True}, False,
        lambda a, b: a.text == "" and b.text == 3 * STOP and a.token_ids == b.token_ids, "no",
    ),
    Field(
        "n", "whole number, 1 to 128", "1",
        WILD, 3,
        lambda a, b: [one["message"]["content"] for one in b.answer["choices"]].index(a.text) == 0
        and len({one["message"]["content"] for one in b.answer["choices"]}) == 3
        and (b.answer["usage"]["prompt_tokens"], b.answer["usage"]["completion_tokens"]) == (a.prompt_tokens, 72), 0,
    ),
    Field(
        "logprobs", "true or false", "false",
        WILD, True, lambda a, b: a.choice["logprobs"] is None
        and len(b.choice["logprobs"]["content"]) == b.num_tokens
        and all(one["logprob"] < 0 and one["top_logprobs"] == [] for one in b.choice["logprobs"]["content"]), 3,
    ),
    Field(
        "top_logprobs", "0 to 20", "0",
        {**WILD, "logprobs": True}, 4,
        lambda a, b: all(len(one["top_logprobs"]) == 4 for one in b.choice["logprobs"]["content"]), 21,
    ),
    Field(
        "logprobs", "completions: 0 to 20", "none",
        WILD, 2, lambda a, b: a.choice["logprobs"] is None
        and all(len(one) in (2, 3) for one in b.choice["logprobs"]["top_logprobs"]), -1, completions=True,
    ),
    Field(
        "logprob_token_ids", "up to 20 token ids", "none",
        {**WILD, "logprobs": True, "return_tokens_as_token_ids": True}, [50, 40],
        lambda a, b: a.token_ids == b.token_ids and all(
            [other["token"] for other in one["top_logprobs"]] == ["token_id:50", "token_id:40"]
            for one in b.choice["logprobs"]["content"]
        ), [-1],
    ),
    Field(
        "return_tokens_as_token_ids", "true or false", "false",
        {**WILD, "logprobs": True}, True, lambda a, b: a.token_ids == b.token_ids
        and [one["token"] for one in b.choice["logprobs"]["content"]] == [f"token_id:{one}" for one in b.token_ids]
        and [one["bytes"] for one in a.choice["logprobs"]["content"]]
        == [one["bytes"] for one in b.choice["logprobs"]["content"]], 1,
    ),
    Field(
        "prompt_logprobs", "0 to 20, not streamed", "none",
        GREEDY, 0, lambda a, b: b.answer["prompt_logprobs"][0] is None and a.token_ids == b.token_ids
        and len(b.answer["prompt_logprobs"]) == b.prompt_tokens, -1,
    ),
    Field(
        "echo", "completions: true or false", "false",
        GREEDY, True, lambda a, b: b.text == PROMPT + a.text, "true", completions=True,
    ),
    Field(
        "return_token_ids", "true or false", "false",
        GREEDY, True, lambda a, b: b.choice["token_ids"] == a.token_ids
        and len(b.answer["prompt_token_ids"]) == a.prompt_tokens, 1,
    ),
    Field(
        "return_cached_tokens_details", "true or false", "false",
        GREEDY, True, lambda a, b: a.token_ids == b.token_ids and "sglext" not in a.answer
        and b.answer["sglext"]["cached_tokens_details"]["device"]
        == b.answer["usage"]["prompt_tokens_details"]["cached_tokens"], 1,
    ),
    Field(
        "stream", "true or false", "false",
        GREEDY, True, lambda a, b: isinstance(b.answer, list) and len(b.answer) > 3 and b.text == a.text, "true",
    ),
    Field(
        "stream_options", "`include_usage`, `continuous_usage_stats`, with `stream`", "neither",
        {**GREEDY, "stream": True}, {"include_usage": True, "continuous_usage_stats": True},
        lambda a, b: not any(chunk.get("usage") for chunk in a.answer)
        and [chunk["usage"]["completion_tokens"] for chunk in b.answer][-1] == b.num_tokens
        and len({chunk["usage"]["completion_tokens"] for chunk in b.answer}) > 3, {"include_usage": 1},
    ),
    Field(
        "prediction", '`{"type": "content", "content": ..}` with a text, or a list of text parts', "none",
        GREEDY, None,
        lambda a, b: a.token_ids == b.token_ids and "accepted_prediction_tokens" in b.details, {"type": "content"},
        lambda said: {"prediction": {"type": "content", "content": said.text}},
    ),
    Field(
        "continue_final_message", "true or false", "false",
        {**GREEDY, **PARTIAL}, True, lambda a, b: b.prompt_tokens < a.prompt_tokens and a.token_ids != b.token_ids, 1,
    ),
    Field(
        "add_generation_prompt", "true or false", "true",
        GREEDY, False, lambda a, b: b.prompt_tokens < a.prompt_tokens, "no",
    ),
    Field(
        "chat_template_kwargs", "object", "none",
        GREEDY, {"preface": "Be brief. "}, lambda a, b: b.prompt_tokens > a.prompt_tokens, [],
    ),
    Field(
        "tools", "up to 1,024 functions ([tool calls](#tool-calls))", "none",
        GREEDY, [TOOL], lambda a, b: b.prompt_tokens > a.prompt_tokens
        and (a.submitted["calls"], b.submitted["calls"]["choice"]) == (None, "auto"), {},
    ),
    Field(
        "tool_choice", "`auto`, `none`, `required`, a function, `allowed_tools`", "`auto`",
        {**GREEDY, "tools": [TOOL]}, "none", lambda a, b: a.token_ids == b.token_ids
        and (a.submitted["calls"]["choice"], b.submitted["calls"]["choice"]) == ("auto", "none"), "any",
    ),
    Field(
        "parallel_tool_calls", "true or false", "true",
        {**GREEDY, "tools": [TOOL]}, False, lambda a, b: a.token_ids == b.token_ids
        and (a.submitted["calls"]["parallel"], b.submitted["calls"]["parallel"]) == (True, False), "no",
    ),
    Field(
        "reasoning_effort", "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`", "none",
        GREEDY, "none", lambda a, b: a.token_ids == b.token_ids
        and b.submitted["templating"]["variables"] == {"reasoning_effort": "none", "enable_thinking": False}, "huge",
    ),
    Field(
        "enable_thinking", "true or false", "none",
        GREEDY, True, lambda a, b: a.token_ids == b.token_ids
        and b.submitted["templating"]["variables"] == {"enable_thinking": True}, "yes",
    ),
    Field(
        "thinking_token_budget", "whole number from 0, or -1 ([reasoning](#reasoning))", "-1",
        GREEDY, 16, lambda a, b: (a.submitted["thinking_budget"], b.submitted["thinking_budget"]) == (None, 16), -2,
    ),
    *(
        Field(
            alias, "the same", "-1", GREEDY, 16,
            lambda a, b: (a.submitted["thinking_budget"], b.submitted["thinking_budget"]) == (None, 16), 0.5,
        )
        for alias in ("thinking_budget", "reasoning_budget", "reasoning_budget_tokens")
    ),
    Field(
        "include_reasoning", "true or false", "true",
        GREEDY, False, lambda a, b: a.token_ids == b.token_ids
        and b.submitted["presentation"]["reasoning"] == "hidden", 0,
    ),
    Field(
        "separate_reasoning", "true or false", "true",
        GREEDY, False, lambda a, b: a.token_ids == b.token_ids
        and b.submitted["presentation"]["reasoning"] == "inline", "no",
    ),
    Field(
        "reasoning_format", "`auto`, `deepseek`, `none`", "`auto`",
        GREEDY, "none", lambda a, b: a.token_ids == b.token_ids
        and b.submitted["presentation"]["reasoning"] == "inline", "deepseek-legacy",
    ),
    Field(
        "add_special_tokens", "true or false", "true only for a `prompt` as text",
        GREEDY, True, lambda a, b: b.prompt_tokens == a.prompt_tokens + 1, "yes",
    ),
    Field(
        "truncate_prompt_tokens", "whole number from 1, or -1", "none",
        GREEDY, 5, lambda a, b: b.prompt_tokens == 5 < a.prompt_tokens, 0,
    ),
    Field(
        "truncation_side", "`left` or `right`", "left",
        {**GREEDY, "truncate_prompt_tokens": 5, "return_token_ids": True}, "right",
        lambda a, b: len(b.answer["prompt_token_ids"]) == 5
        and a.answer["prompt_token_ids"] != b.answer["prompt_token_ids"], "middle",
    ),
    Field(
        "priority", "whole number", "0",
        GREEDY, -3, lambda a, b: a.token_ids == b.token_ids and b.submitted["priority"] == -3, 0.5,
    ),
    *(
        Field(
            label, takes, "none",
            GREEDY, value, lambda a, b, label=label, value=value:  # type: ignore[misc]
            a.token_ids == b.token_ids and b.submitted["labels"] == {label: value}, refused,
        )
        for label, takes, value, refused in (
            ("user", "text", "ann", 3),
            ("metadata", "object of texts and numbers", {"team": "red"}, [1]),
            ("store", "true or false", True, "yes"),
            ("service_tier", "text", "flex", 1),
            ("safety_identifier", "text", "s-1", 1),
            ("prompt_cache_key", "text", "k-1", 1),
        )
    ),
)  # fmt: skip


def _pieces(said: Said) -> list[str]:
    """Return the texts of an answer's tokens, without the spaces around them."""
    return [str(one["token"]).strip() for one in said.choice["logprobs"]["content"]]


def _is_two(said: Said) -> bool:
    """Whether an answer is what SCHEMA allows."""
    return "".join(said.text.split()) in ("[1,1]", "[1,2]", "[2,1]", "[2,2]")


def _first_word(said: Said) -> str:
    """Return the first whole word of an answer that is one token."""
    return next(piece for piece in _pieces(said) if len(piece) > 1 and piece.isascii() and piece.isalpha())


def table() -> str:
    """Return the table of docs/http-api.md."""
    rows = [f"| `{one.name}` | {one.takes} | {one.default} | {one.effect} |" for one in FIELDS]
    return "\n".join(["| field | takes | default | what it does |", "|---|---|---|---|", *rows])
