"""Bodies of the tokenizer's endpoints, in vLLM's and SGLang's forms. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pipeline.errors import RequestError
from pipeline.events import Answered, SamplingParams, Submitted
from web.wire.openai.bulk import MOST_VALUES
from web.wire.openai.messages import Messages, Tools, check_messages, plain_messages, templating_of
from web.wire.openai.strict import INT32_MAX, Neutrals, Strict, kept_exactly, parsed, refuse_unsupported

TOKENIZE_ENDPOINT: Final = "/tokenize"
DETOKENIZE_ENDPOINT: Final = "/detokenize"
DESCRIBE_ENDPOINT: Final = "/tokenizer_info"
MOST_TOKENS: Final = MOST_VALUES - 16
"""Few enough that one more is refused by this bound, and not by that of the whole body."""
UNSUPPORTED: Final[Mapping[str, Neutrals]] = {
    "chat_template": (),
    "documents": ([],),
    "enable_thinking": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "reasoning_effort": (),
    "truncate_prompt_tokens": (),
}
"""Fields of vLLM and SGLang that would change the tokens and are not supported."""
OF_CONVERSATIONS: Final = ("continue_final_message", "tools", "chat_template_kwargs")
"""Fields that change nothing with a `prompt`, which has no template."""


def _one_text(prompt: object) -> object:
    """Refuse SGLang's list of prompts, and say what to do instead; the field's type checks the rest."""
    if isinstance(prompt, list):
        raise PydanticCustomError("one_text", "Input should be one text; send a request for each of several")
    return prompt


def _one_list(tokens: object) -> object:
    """Refuse SGLang's list of lists, and say what to do instead; the field's type checks the rest."""
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        raise PydanticCustomError("one_list", "Input should be one list of tokens; send a request for each of several")
    return tokens


class TokenizeRequest(Strict):
    """The body of POST /tokenize."""

    model: str | None = None
    prompt: Annotated[str | None, BeforeValidator(_one_text)] = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(kept_exactly)] = None
    return_token_strs: bool | None = None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Unknown fields, sorted; those of messages and tools without an index."""
        names = set(self.extra) - set(UNSUPPORTED)
        for message in self.messages or ():
            names |= {f"messages.{name}" for name in message.unknown}
        for tool in self.tools or ():
            names |= {f"tools.{name}" for name in tool.unknown}
        return tuple(sorted(names))

    def submitted(self, *, frontend: str, model: str) -> Submitted:
        """Return the event that holds all of it. Raises RequestError if fields contradict each other."""
        return Submitted(
            endpoint=TOKENIZE_ENDPOINT,
            frontend=frontend,
            model=model,
            task="tokenize",
            prompt=self.prompt or "",
            messages=plain_messages(self.messages or ()),
            add_special_tokens=self.add_special_tokens,
            templating=templating_of(
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=self.tools,
                variables=self.chat_template_kwargs,
            ),
            return_pieces=bool(self.return_token_strs),
            sampling=SamplingParams(),
        )


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=INT32_MAX)]],
        Field(fail_fast=True, max_length=MOST_TOKENS),
        BeforeValidator(_one_list),
    ]
    skip_special_tokens: bool | None = None
    """SGLang's field; by default special tokens are kept, as in vLLM."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Unknown fields, sorted."""
        return tuple(sorted(self.extra))

    def submitted(self, *, frontend: str, model: str) -> Submitted:
        """Return the event that holds all of it."""
        return Submitted(
            endpoint=DETOKENIZE_ENDPOINT,
            frontend=frontend,
            model=model,
            task="detokenize",
            prompt_ids=tuple(self.tokens),
            sampling=SamplingParams(skip_special_tokens=bool(self.skip_special_tokens)),
        )


@dataclass(frozen=True, slots=True)
class DescribeRequest:
    """GET /tokenizer_info: it has no fields."""

    model: None = None
    unknown: tuple[str, ...] = ()

    def submitted(self, *, frontend: str, model: str) -> Submitted:
        """Return the event that holds all of it."""
        return Submitted(
            endpoint=DESCRIBE_ENDPOINT, frontend=frontend, model=model, task="describe", sampling=SamplingParams()
        )


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    request = parsed(TokenizeRequest, body)
    refuse_unsupported(request.extra, UNSUPPORTED, "")
    if request.messages is None and request.prompt is None:
        raise _wrong("prompt", "missing; send a text, or `messages`")
    if request.messages is not None and request.prompt is not None:
        raise _wrong("prompt", "not together with `messages`; send one of them")
    if request.messages is None:
        useless = next((name for name in OF_CONVERSATIONS if getattr(request, name)), None)
        if useless is not None:
            raise _wrong(useless, "only with `messages`")
    check_messages(request.messages or ())
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    return parsed(DetokenizeRequest, body)


def tokens_body(answered: Answered, asked: Submitted, context: int) -> bytes:
    """Return the answer of POST /tokenize. *context* is the most tokens that a request of this model can have."""
    return orjson.dumps(
        {
            "count": len(answered.token_ids),
            "max_model_len": context,
            "tokens": answered.token_ids,
            "token_strs": answered.pieces if asked.return_pieces else None,
        }
    )


def text_body(answered: Answered) -> bytes:
    """Return the answer of POST /detokenize: `prompt` is vLLM's name for the text, `text` is SGLang's."""
    return orjson.dumps({"prompt": answered.text, "text": answered.text})


def _wrong(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")
