"""The table of all fields: what is refused, what passes, what is listed. What honoured fields do is in
tests/support/fields.py and, for SGLang's form, in test_sglang_schemas.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.request_models import NAMES

from pipeline.errors import RequestError
from web.wire.constraints import StructuredOutputs
from web.wire.fields import TABLE, Field, Place
from web.wire.openai.messages import Message
from web.wire.openai.schemas import ChatRequest, CompletionRequest, StreamOptions, parse_chat, parse_completion
from web.wire.openai.tokenizer import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize
from web.wire.sglang.schemas import (
    AbortRequest,
    SGLangRequest,
    SGLangSampling,
    TextRequest,
    parse_abort,
    parse_generate,
)

ODD = {"odd": ["value"]}
HELLO = {"role": "user", "content": "hello"}


@dataclass(frozen=True, slots=True)
class Form:
    """An object of some request that has the fields of a place."""

    place: Place
    declared: Collection[str]
    parse: Callable[[bytes], Any]
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns a body that has these fields there."""
    param: str = ""
    """Before the field's name in an error."""
    listed: str = ""
    """Before the field's name in the header."""
    elsewhere: Collection[str] = ()
    """Names that belong in another object of the same body, whatever their value."""


FORMS = {
    "chat": Form("generate", ChatRequest.model_fields, parse_chat, lambda more: {"messages": [HELLO], **more}),
    "completions": Form(
        "generate", CompletionRequest.model_fields, parse_completion, lambda more: {"prompt": "a", **more}
    ),
    "SGLang's form": Form(
        "generate", SGLangRequest.model_fields, parse_generate, lambda more: {"text": "a", **more},
        elsewhere=SGLangSampling.model_fields,
    ),
    "sampling_params": Form(
        "generate", SGLangSampling.model_fields, parse_generate, lambda more: {"text": "a", "sampling_params": more},
        "sampling_params.", "sampling_params.", SGLangRequest.model_fields,
    ),
    "Mini-SGLang's form": Form(
        "generate", TextRequest.model_fields, parse_generate, lambda more: {"prompt": "a", **more},
        elsewhere=("text", "input_ids"),
    ),
    "tokenize": Form(
        "tokenize", TokenizeRequest.model_fields, parse_tokenize, lambda more: {"messages": [HELLO], **more}
    ),
    "detokenize": Form(
        "detokenize", DetokenizeRequest.model_fields, parse_detokenize, lambda more: {"tokens": [1], **more}
    ),
    "message": Form(
        "message", Message.model_fields, parse_chat, lambda more: {"messages": [{**HELLO, **more}]},
        "messages.0.", "messages.",
    ),
    "stream_options": Form(
        "stream_options", StreamOptions.model_fields, parse_chat,
        lambda more: {"messages": [HELLO], "stream": True, "stream_options": more},
        "stream_options.", "stream_options.",
    ),
    "structured_outputs": Form(
        "structured_outputs", [info.alias or name for name, info in StructuredOutputs.model_fields.items()],
        parse_chat, lambda more: {"messages": [HELLO], "structured_outputs": {"regex": "a", **more}},
        "structured_outputs.", "structured_outputs.",
    ),
    "abort": Form("abort", AbortRequest.model_fields, parse_abort, lambda more: {"rid": "a", **more}),
}  # fmt: skip
ROWS = [(place, row) for place, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize(("place", "row"), ROWS, ids=[f"{place}-{row.name}" for place, row in ROWS])
def test_a_field_is_honoured_or_refused_by_its_name_or_listed(place: Place, row: Field) -> None:
    forms = [form for form in FORMS.values() if form.place == place]
    for form in forms:
        if row.name in form.declared:
            continue
        if row.kind != "effect":
            assert _unknown(form, row.name, ODD) == (form.listed + row.name,)
            continue
        with pytest.raises(RequestError) as caught:
            form.parse(json.dumps(form.body({row.name: ODD})).encode())
        assert (caught.value.status, caught.value.param) == (400, form.param + row.name)
        assert row.name in caught.value.message and "odd" not in caught.value.message
        for neutral in (None, *(row.neutral if row.name not in form.elsewhere else ())):
            assert _unknown(form, row.name, neutral) == ()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_field_that_an_endpoint_has_is_in_the_table(form: Form) -> None:
    assert set(form.declared) <= {row.name for row in TABLE[form.place]}


@pytest.mark.parametrize("place", TABLE)
def test_no_field_is_in_the_table_twice(place: Place) -> None:
    names = [row.name for row in TABLE[place]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("project", "place"), NAMES, ids=lambda value: value)
def test_every_field_of_other_projects_is_in_the_table(project: str, place: Place) -> None:
    assert set(NAMES[project, place].split()) <= {row.name for row in TABLE[place]}


def test_an_error_says_what_to_use_instead() -> None:
    for form, asked, expected in (
        ("chat", {"stop_sequences": ["a"]}, "leave it out or send [], or use `stop`"),
        ("chat", {"max_output_tokens": 5}, "leave it out, or use `max_tokens`"),
        ("chat", {"think": False}, "leave it out, or use variables in `chat_template_kwargs`"),
        ("sampling_params", {"max_tokens": 5}, "leave it out, or use `max_new_tokens` in `sampling_params`"),
        ("sampling_params", {"return_logprob": True}, "belongs beside `sampling_params`"),
        ("chat", {"functions": [{"name": "f"}]}, "leave it out or send [], or use `tools`"),
        ("completions", {"tools": [{"type": "function"}]}, "or send [], or use /v1/chat/completions"),
        ("completions", {"thinking_budget": 0}, "or send -1, or use /v1/chat/completions"),
        ("tokenize", {"content": "a"}, "leave it out, or use `prompt`"),
    ):
        with pytest.raises(RequestError, match=".*" + re.escape(expected)):
            FORMS[form].parse(json.dumps(FORMS[form].body(asked)).encode())


SENT_BY_DEFAULT: Mapping[str, Mapping[str, Any]] = {
    "a message of OpenAI's, sent back": {
        "messages": [
            HELLO,
            {
                "role": "assistant", "content": "Hi.", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None,
            },
            HELLO,
        ]
    },
    "all samplers of llama.cpp, off": {
        "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "top_n_sigma": -1,
        "xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "dynatemp_range": 0, "dynatemp_exponent": 1, "repeat_penalty": 1.0,
        "cache_prompt": True, "id_slot": -1, "n_predict": -1, "n_keep": 0, "grammar": "", "timings_per_token": False,
    },
    "a reasoning client": {
        "reasoning_effort": "low",
        "verbosity": "high",
        "messages": [
            HELLO,
            {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm.", "thinking_blocks": [{"thinking": ""}]},
            HELLO,
        ],
    },
    "OpenAI's defaults": {
        "n": 1, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
        "logprobs": False, "stop": None, "response_format": {"type": "text"}, "modalities": ["text"], "tools": [],
        "parallel_tool_calls": True, "store": False, "service_tier": "auto", "stream": False, "tool_choice": None,
        "prompt_cache_retention": "24h", "functions": [], "seed": None, "user": "", "metadata": {},
    },
}  # fmt: skip


@pytest.mark.parametrize("asked", SENT_BY_DEFAULT.values(), ids=SENT_BY_DEFAULT)
def test_what_clients_send_by_default_passes(asked: Mapping[str, Any]) -> None:
    parse_chat(json.dumps({"messages": [HELLO], **asked}).encode())


def test_advice_is_listed() -> None:
    asked = SENT_BY_DEFAULT["a reasoning client"]
    listed = ("messages.thinking_blocks", "verbosity")
    assert parse_chat(json.dumps(asked).encode()).unknown == listed


def _unknown(form: Form, name: str, value: Any) -> tuple[str, ...]:
    """Return the names that are listed in the header."""
    unknown: tuple[str, ...] = form.parse(json.dumps(form.body({name: value})).encode()).unknown
    return unknown
