"""Turns conversations into text with the model's chat template. Knows no tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import jinja2
from pydantic_core import from_json
from transformers import PreTrainedTokenizerFast

from pipeline.errors import RequestError
from pipeline.events import Submitted

LONGEST_ERROR: Final = 400
"""Characters of a template's error that are kept: transformers may quote the whole conversation."""
NO_VARIABLES: Final = {
    *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
    "conversations",
    "messages",
} - {"kwargs"}
"""Arguments that this module passes itself. A client's variable cannot have one of these names."""


def conversation_text(tokenizer: PreTrainedTokenizerFast, event: Submitted, *, text_arguments: bool = False) -> str:
    """Return a request's messages as text, by the chat template of *tokenizer*.

    A template leaves out what it does not use, such as tools. With *text_arguments*, it takes those of calls as text.

    Raises:
        RequestError: There is no template, or it refuses the conversation (the message quotes it), or the client sets a
            variable that it must not set.
    """
    templating = event.templating
    if tokenizer.chat_template is None:
        raise RequestError(
            "This model has no chat template, so it takes no `messages`; send `prompt` instead.",
            code="no_chat_template",
            param="messages",
        )
    if templating.add_generation_prompt and templating.continue_final_message:
        message = "continue_final_message: cannot be combined with `add_generation_prompt`"
        raise RequestError(message, param="continue_final_message")
    taken = next((name for name in templating.variables if name in NO_VARIABLES), None)
    if taken is not None:
        raise RequestError(
            f"chat_template_kwargs: clients cannot set `{taken}`; fields of the request go beside chat_template_kwargs",
            param="chat_template_kwargs",
        )
    messages = [
        _with_calls(message, place, text_arguments=text_arguments) for place, message in enumerate(event.messages)
    ]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=list(templating.tools) or None,
            add_generation_prompt=templating.add_generation_prompt,
            continue_final_message=templating.continue_final_message,
            tokenize=False,
            **templating.variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise RequestError(
            f"The model's chat template refuses this conversation: {str(error)[:LONGEST_ERROR]}",
            code="template_error",
            param="messages",
        ) from error
    assert isinstance(text, str)
    return text


def _with_calls(message: Mapping[str, Any], place: int, *, text_arguments: bool) -> dict[str, Any]:
    """Return *message* with its tool calls as the template takes them. Clients send arguments as text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            path = f"messages.{place}.tool_calls.{number}.function.arguments"
            written = function["arguments"] or "{}"
            value = _object_of(written, path)
            function["arguments"] = written if text_arguments else value
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _object_of(text: str, path: str) -> dict[str, Any]:
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{path}: should be a JSON object, written as a string", param=path)
    return value
