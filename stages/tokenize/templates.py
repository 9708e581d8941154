"""Turns conversations into text with the model's chat template. Knows no tokens."""

from __future__ import annotations

import inspect
from typing import Final

import jinja2
from transformers import PreTrainedTokenizerFast

from pipeline.errors import RequestError
from pipeline.events import Submitted
from stages.tokenize.shape import LONGEST_ERROR, Shape, applied

NO_VARIABLES: Final = {
    *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
    "conversations",
    "messages",
} - {"kwargs"}
"""Arguments that this module passes itself. A client's variable cannot have one of these names."""


def conversation_text(tokenizer: PreTrainedTokenizerFast, shape: Shape, event: Submitted) -> str:
    """Return a request's messages as text, by the chat template of *tokenizer*, which takes them in this *shape*.

    A template leaves out what it does not use, such as tools.

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
    try:
        return applied(
            tokenizer,
            shape.shaped(event.messages),
            tools=list(templating.tools) or None,
            add_generation_prompt=templating.add_generation_prompt,
            continue_final_message=templating.continue_final_message,
            **templating.variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise RequestError(
            f"The model's chat template refuses this conversation: {str(error)[:LONGEST_ERROR]}",
            code="template_error",
            param="messages",
        ) from error
