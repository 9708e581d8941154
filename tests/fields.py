"""Every supported field of a request: the values it takes, and a request that shows its effect.

`tests/end_to_end/test_fields.py` runs the rows against a server, `tests/web/wire/test_fields.py` checks the values they
refuse. `make docs` writes the table in docs/http-api.md from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints import STOP

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
    effect: str
    """What the answer is like with the field, as against the one without."""
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


FIELDS = (
    Field(
        "max_completion_tokens", "whole number from 1", "rest of the context",
        "Maximum number of output tokens. Reaching it ends the answer with `length`. The request is refused if prompt "
        "and answer would not fit into the context.",
        GREEDY, 5, lambda a, b: b.token_ids == a.token_ids[:5] and b.reason == "length", 0,
    ),
    Field(
        "max_tokens", "the same; `max_completion_tokens` wins", "rest of the context", "Older name of the same field.",
        {"temperature": 0, "ignore_eos": True}, 7,
        lambda a, b: b.num_tokens == 7 < a.num_tokens and b.reason == "length", "7",
    ),
    Field(
        "n_predict", "the same, or -1", "rest of the context",
        "llama.cpp's name of `max_tokens`. -1: the rest of the context.",
        GREEDY, 3, lambda a, b: b.token_ids == a.token_ids[:3] and b.reason == "length", -2,
        more=lambda said: {"max_tokens": None},
    ),
    Field(
        "min_tokens", "whole number from 0", "0", "Minimum number of output tokens before any stop condition applies.",
        {**GREEDY, "logit_bias": {"50": 100}, "stop_token_ids": [50]}, 6,
        lambda a, b: a.num_tokens == 1 and b.num_tokens == 7 and 50 not in b.token_ids[:6], -1,
    ),
    Field(
        "stop", "a text, or up to 16", "none", "Ends the answer before this text (`stop`). The text is not sent.",
        GREEDY, None, lambda a, b: a.text.startswith(b.text) and b.text != a.text and b.reason == "stop", "",
        lambda said: {"stop": said.text[3:5]},
    ),
    Field(
        "stop_token_ids", "up to 256 token ids", "none",
        "Ends the answer at such a token (`stop`). Its text is not sent.",
        GREEDY, None,
        lambda a, b: b.token_ids == a.token_ids[: a.token_ids.index(a.token_ids[4]) + 1] and b.reason == "stop", [-1],
        lambda said: {"stop_token_ids": [said.token_ids[4]]},
    ),
    Field(
        "ignore_eos", "true or false", "false", "Continues after an end-of-sequence token.",
        {"temperature": 0, "max_tokens": 9, "logit_bias": {EOS: 100}}, True,
        lambda a, b: (a.num_tokens, a.reason, b.num_tokens, b.reason) == (1, "stop", 9, "length"), "true",
    ),
    Field(
        "temperature", "0 to 2", "the model's, else 1",
        "Randomness. 0 always takes the most probable token.",
        {**WILD, "temperature": 0}, 1.5, lambda a, b: a.token_ids != b.token_ids, 2.1,
    ),
    Field(
        "top_p", "above 0, at most 1", "the model's, else 1",
        "Samples from the smallest set of tokens whose probabilities add up to it.",
        WILD, 1e-9, lambda a, b: a.token_ids != b.token_ids, 0,
    ),
    Field(
        "top_k", "whole number from -1", "the model's, else 0",
        "Samples from this many of the most probable tokens. -1 and 0 mean all.",
        WILD, 1, lambda a, b: a.token_ids != b.token_ids, -2,
    ),
    Field(
        "min_p", "0 to 1", "the model's, else 0",
        "Drops tokens below this share of the highest probability.",
        WILD, 1, lambda a, b: a.token_ids != b.token_ids, 1.1,
    ),
    Field(
        "typical_p", "above 0, at most 1", "1",
        "Keeps the tokens whose information is closest to the entropy, up to this total probability.",
        WILD, 0.05, lambda a, b: a.token_ids != b.token_ids, 0,
    ),
    Field(
        "seed", "whole number of 64 bits", "random", "The same seed gives the same answer.",
        WILD, 6, lambda a, b: a.token_ids != b.token_ids, "6",
    ),
    Field(
        "presence_penalty", "-2 to 2", "0", "Subtracted from the logits of tokens that are in the answer already.",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 2.1,
    ),
    Field(
        "frequency_penalty", "-2 to 2", "0", "Subtracted once for each time the token is in the answer.",
        FEW, 2, lambda a, b: b.most_of_one < a.most_of_one, -2.1,
    ),
    Field(
        "repetition_penalty", "above 0, to 2", "the model's, else 1",
        "Above 1, makes tokens of the prompt and the answer less likely.",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 0,
    ),
    Field(
        "repeat_penalty", "the same", "the model's, else 1",
        "llama.cpp's and Ollama's name of `repetition_penalty`. Counts all tokens of the prompt and the answer.",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 0,
    ),
    Field(
        "logit_bias", "token id: -100 to 100, up to 1,024", "none",
        "Added to the logits of these tokens. 100 forces a token.",
        GREEDY, {"77": 100}, lambda a, b: set(b.token_ids) == {77} != set(a.token_ids), {"a": 1},
    ),
    Field(
        "allowed_token_ids", "up to 16,384 token ids", "all", "Only these tokens can be generated.",
        GREEDY, [90, 91, 92], lambda a, b: set(b.token_ids) <= {90, 91, 92} and not set(a.token_ids) <= {90, 91, 92},
        [],
    ),
    Field(
        "bad_words", "up to 256 texts", "none", "These texts are not generated, with or without a leading space.",
        {**GREEDY, "logprobs": True}, None,
        lambda a, b: _first_word(a) not in _pieces(b) and b.token_ids != a.token_ids, "",
        lambda said: {"bad_words": [_first_word(said)]},
    ),
    Field(
        "response_format", "`text`, `json_object` or `json_schema`", "`text`",
        "The answer is a JSON object, or JSON that the schema in `json_schema` allows, whatever `strict` says.",
        GREEDY, {"type": "json_schema", "json_schema": {"name": "two", "schema": SCHEMA}},
        lambda a, b: not _is_two(a) and _is_two(b) and b.reason == "stop", {"type": "json_schema"},
    ),
    Field(
        "structured_outputs", "one of `json`, `regex`, `choice`, `grammar`, `json_object`", "none",
        "The same, as in vLLM; `choice`: one of these texts. With JSON, `whitespace_pattern` says what whitespace is.",
        GREEDY, {"choice": ["red", "blue"]}, lambda a, b: b.text in ("red", "blue") and b.reason == "stop", {},
    ),
    Field(
        "guided_json", "a schema, or its text", "none", "vLLM's older name of `structured_outputs.json`.",
        GREEDY, SCHEMA, lambda a, b: not _is_two(a) and _is_two(b), "{",
    ),
    Field(
        "guided_regex", "text", "none", "vLLM's older name of `structured_outputs.regex`.",
        GREEDY, "[xy]{4}", lambda a, b: len(b.text) == 4 and set(b.text) <= set("xy") and b.reason == "stop", "",
    ),
    Field(
        "guided_choice", "up to 4,096 texts", "none", "vLLM's older name of `structured_outputs.choice`.",
        GREEDY, ["red", "blue"], lambda a, b: b.text in ("red", "blue") and b.reason == "stop", [],
    ),
    Field(
        "guided_grammar", "text", "none", "vLLM's older name of `structured_outputs.grammar`.",
        GREEDY, GRAMMAR, lambda a, b: b.text[:2] in ("x-", "y-") and len(b.text) == 3 and b.reason == "stop", "",
    ),
    Field(
        "guided_whitespace_pattern", "text, with a schema", "one space, or a line break and up to 16 spaces",
        "Pattern of the whitespace between tokens of JSON, for all fields but `structured_outputs`. Empty: none.",
        {**GREEDY, "guided_json": SCHEMA}, "", lambda a, b: _is_two(a) and _is_two(b) and " " not in b.text, 3,
    ),
    Field(
        "json_schema", "a schema, or its text", "none", "SGLang's and llama.cpp's name of `structured_outputs.json`.",
        GREEDY, SCHEMA, lambda a, b: not _is_two(a) and _is_two(b), [1],
    ),
    Field(
        "regex", "text", "none", "SGLang's name of `structured_outputs.regex`.",
        GREEDY, "[xy]{4}", lambda a, b: len(b.text) == 4 and set(b.text) <= set("xy") and b.reason == "stop", "",
    ),
    Field(
        "ebnf", "text", "none", "SGLang's name of `structured_outputs.grammar`.",
        GREEDY, GRAMMAR, lambda a, b: b.text[:2] in ("x-", "y-") and len(b.text) == 3 and b.reason == "stop", "",
    ),
    Field(
        "grammar", "text", "none", "llama.cpp's name of `structured_outputs.grammar`. Empty: none.",
        GREEDY, GRAMMAR, lambda a, b: b.text[:2] in ("x-", "y-") and len(b.text) == 3 and b.reason == "stop", 3,
    ),
    Field(
        "include_stop_str_in_output", "true or false", "false", "Keeps the stop text at the end of the answer.",
        GREEDY, None, lambda a, b: b.text.endswith(a.text[3:5]) and a.text.startswith(b.text) and b.reason == "stop", 1,
        more=lambda said: {"stop": said.text[3:5], "include_stop_str_in_output": True},
    ),
    Field(
        "skip_special_tokens", "true or false", "true", "`false` shows special tokens as text.",
        {"temperature": 0, "max_tokens": 3, "logit_bias": {EOS: 100}, "ignore_eos": True}, False,
        lambda a, b: a.text == "" and b.text == 3 * STOP and a.token_ids == b.token_ids, "no",
    ),
    Field(
        "n", "whole number, 1 to 128", "1", "Number of answers. The first equals the answer with `n: 1`.",
        WILD, 3,
        lambda a, b: [one["message"]["content"] for one in b.answer["choices"]].index(a.text) == 0
        and len({one["message"]["content"] for one in b.answer["choices"]}) == 3
        and (b.answer["usage"]["prompt_tokens"], b.answer["usage"]["completion_tokens"]) == (a.prompt_tokens, 72), 0,
    ),
    Field(
        "logprobs", "true or false", "false", "Log-probability of each token, from the model's own logits.",
        WILD, True, lambda a, b: a.choice["logprobs"] is None
        and len(b.choice["logprobs"]["content"]) == b.num_tokens
        and all(one["logprob"] < 0 and one["top_logprobs"] == [] for one in b.choice["logprobs"]["content"]), 3,
    ),
    Field(
        "top_logprobs", "0 to 20, with `logprobs`", "0", "Number of alternatives shown for each token.",
        {**WILD, "logprobs": True}, 4,
        lambda a, b: all(len(one["top_logprobs"]) == 4 for one in b.choice["logprobs"]["content"]), 21,
    ),
    Field(
        "logprobs", "completions: 0 to 20", "none", "Log-probabilities, with this many alternatives for each token.",
        WILD, 2, lambda a, b: a.choice["logprobs"] is None
        and all(len(one) in (2, 3) for one in b.choice["logprobs"]["top_logprobs"]), -1, completions=True,
    ),
    Field(
        "logprob_token_ids", "up to 20 token ids, with `logprobs`", "none",
        "Shows these tokens instead of the most probable ones.",
        {**WILD, "logprobs": True, "return_tokens_as_token_ids": True}, [50, 40],
        lambda a, b: a.token_ids == b.token_ids and all(
            [other["token"] for other in one["top_logprobs"]] == ["token_id:50", "token_id:40"]
            for one in b.choice["logprobs"]["content"]
        ), [-1],
    ),
    Field(
        "return_tokens_as_token_ids", "true or false", "false",
        "Log-probabilities name tokens as `token_id:<id>`, as in vLLM.",
        {**WILD, "logprobs": True}, True, lambda a, b: a.token_ids == b.token_ids
        and [one["token"] for one in b.choice["logprobs"]["content"]] == [f"token_id:{one}" for one in b.token_ids]
        and [one["bytes"] for one in a.choice["logprobs"]["content"]]
        == [one["bytes"] for one in b.choice["logprobs"]["content"]], 1,
    ),
    Field(
        "prompt_logprobs", "0 to 20, not streamed", "none",
        "Log-probabilities of the prompt's tokens, in vLLM's format.",
        GREEDY, 0, lambda a, b: b.answer["prompt_logprobs"][0] is None and a.token_ids == b.token_ids
        and len(b.answer["prompt_logprobs"]) == b.prompt_tokens, -1,
    ),
    Field(
        "echo", "completions: true or false", "false",
        "Puts the prompt before the answer, with its log-probabilities where `logprobs` is set. `max_tokens` may be 0.",
        GREEDY, True, lambda a, b: b.text == PROMPT + a.text, "true", completions=True,
    ),
    Field(
        "return_token_ids", "true or false", "false", "Adds the token ids of the prompt and the answer.",
        GREEDY, True, lambda a, b: b.choice["token_ids"] == a.token_ids
        and len(b.answer["prompt_token_ids"]) == a.prompt_tokens, 1,
    ),
    Field(
        "stream", "true or false", "false", "Sends the answer as server-sent events while it is generated.",
        GREEDY, True, lambda a, b: isinstance(b.answer, list) and len(b.answer) > 3 and b.text == a.text, "true",
    ),
    Field(
        "stream_options", "`include_usage`, `continuous_usage_stats`, with `stream`", "neither",
        "Token counts in the last chunk, or in every chunk.",
        {**GREEDY, "stream": True}, {"include_usage": True, "continuous_usage_stats": True},
        lambda a, b: not any(chunk.get("usage") for chunk in a.answer)
        and [chunk["usage"]["completion_tokens"] for chunk in b.answer][-1] == b.num_tokens
        and len({chunk["usage"]["completion_tokens"] for chunk in b.answer}) > 3, {"include_usage": 1},
    ),
    Field(
        "continue_final_message", "true or false", "false", "Continues the last message instead of starting a new one.",
        {**GREEDY, **PARTIAL}, True, lambda a, b: b.prompt_tokens < a.prompt_tokens and a.token_ids != b.token_ids, 1,
    ),
    Field(
        "add_generation_prompt", "true or false", "true", "`false` leaves out the start of the assistant's message.",
        GREEDY, False, lambda a, b: b.prompt_tokens < a.prompt_tokens, "no",
    ),
    Field(
        "chat_template_kwargs", "object", "none", "Variables for the chat template.",
        GREEDY, {"preface": "Be brief. "}, lambda a, b: b.prompt_tokens > a.prompt_tokens, [],
    ),
    Field(
        "tools", "up to 1,024 functions", "none",
        "Functions that the model may call ([tool calls](#tool-calls)). `strict` in a function: arguments must follow "
        "its schema.",
        GREEDY, [TOOL], lambda a, b: b.prompt_tokens > a.prompt_tokens
        and (a.submitted["calls"], b.submitted["calls"]["choice"]) == (None, "auto"), {},
    ),
    Field(
        "tool_choice", "`auto`, `none`, `required`, a function, `allowed_tools`", "`auto`",
        "Whether the answer may, must not or must be a call, and of which tools.",
        {**GREEDY, "tools": [TOOL]}, "none", lambda a, b: a.token_ids == b.token_ids
        and (a.submitted["calls"]["choice"], b.submitted["calls"]["choice"]) == ("auto", "none"), "any",
    ),
    Field(
        "parallel_tool_calls", "true or false", "true", "`false`: the answer has at most one call.",
        {**GREEDY, "tools": [TOOL]}, False, lambda a, b: a.token_ids == b.token_ids
        and (a.submitted["calls"]["parallel"], b.submitted["calls"]["parallel"]) == (True, False), "no",
    ),
    Field(
        "reasoning_effort", "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`", "none",
        "Variable of the chat template. `none` also sets `enable_thinking` to false.",
        GREEDY, "none", lambda a, b: a.token_ids == b.token_ids
        and b.submitted["templating"]["variables"] == {"reasoning_effort": "none", "enable_thinking": False}, "huge",
    ),
    Field(
        "enable_thinking", "true or false", "none", "Variable of the chat template, as in `chat_template_kwargs`.",
        GREEDY, True, lambda a, b: a.token_ids == b.token_ids
        and b.submitted["templating"]["variables"] == {"enable_thinking": True}, "yes",
    ),
    Field(
        "thinking_token_budget", "whole number from 0, or -1", "-1",
        "Most tokens of thinking ([reasoning](#reasoning)). -1: any number.",
        GREEDY, 16, lambda a, b: (a.submitted["thinking_budget"], b.submitted["thinking_budget"]) == (None, 16), -2,
    ),
    *(
        Field(
            alias, "the same", "-1", f"{whose} name of `thinking_token_budget`.", GREEDY, 16,
            lambda a, b: (a.submitted["thinking_budget"], b.submitted["thinking_budget"]) == (None, 16), 0.5,
        )
        for alias, whose in (
            ("thinking_budget", "Qwen's"),
            ("reasoning_budget", "llama.cpp's"),
            ("reasoning_budget_tokens", "llama.cpp's"),
        )
    ),
    Field(
        "include_reasoning", "true or false", "true", "`false`: reasoning is not sent. It counts as output tokens.",
        GREEDY, False, lambda a, b: a.token_ids == b.token_ids
        and b.submitted["presentation"]["reasoning"] == "hidden", 0,
    ),
    Field(
        "separate_reasoning", "true or false", "true", "`false`: reasoning stays in the content, with its markers.",
        GREEDY, False, lambda a, b: a.token_ids == b.token_ids
        and b.submitted["presentation"]["reasoning"] == "inline", "no",
    ),
    Field(
        "reasoning_format", "`auto`, `deepseek`, `none`", "`auto`",
        "llama.cpp's field; `none` means `separate_reasoning: false`.",
        GREEDY, "none", lambda a, b: a.token_ids == b.token_ids
        and b.submitted["presentation"]["reasoning"] == "inline", "deepseek-legacy",
    ),
    Field(
        "add_special_tokens", "true or false", "true only for a `prompt` as text",
        "Adds the tokenizer's special tokens, such as the one that starts a text.",
        GREEDY, True, lambda a, b: b.prompt_tokens == a.prompt_tokens + 1, "yes",
    ),
    Field(
        "truncate_prompt_tokens", "whole number from 1, or -1", "none",
        "Keeps only this many tokens from the end of the prompt. -1 keeps as many as fit.",
        GREEDY, 5, lambda a, b: b.prompt_tokens == 5 < a.prompt_tokens, 0,
    ),
    Field(
        "truncation_side", "`left` or `right`", "left",
        "With `truncate_prompt_tokens`: `right` drops the end of the prompt and keeps its beginning.",
        {**GREEDY, "truncate_prompt_tokens": 5, "return_token_ids": True}, "right",
        lambda a, b: len(b.answer["prompt_token_ids"]) == 5
        and a.answer["prompt_token_ids"] != b.answer["prompt_token_ids"], "middle",
    ),
    Field(
        "priority", "whole number", "0", "Within an engine, lower numbers run first.",
        GREEDY, -3, lambda a, b: a.token_ids == b.token_ids and b.submitted["priority"] == -3, 0.5,
    ),
    *(
        Field(
            label, takes, "none", "Label. Kept in the history, changes nothing.",
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
