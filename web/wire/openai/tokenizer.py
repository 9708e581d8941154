"""Bodies of the tokenizer's endpoints, in vLLM's and SGLang's forms. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import Discriminator, Field, Tag

from pipeline.errors import RequestError
from pipeline.events import Answered, Presentation, SamplingParams, Submitted
from web.wire.fields import first_of, refused
from web.wire.openai.bulk import MOST_VALUES
from web.wire.openai.calls import TemplateFields, ignored_keywords_of
from web.wire.openai.messages import Messages, Tools, check_messages, plain_messages, templating_of
from web.wire.openai.schemas import MOST_ANSWERS, PROMPT_KINDS, lists_or_one, texts_or_one
from web.wire.openai.strict import INT32_MAX, Strict, parsed, refuse_unsupported, wrong

TOKENIZE_ENDPOINT: Final = "/tokenize"
DETOKENIZE_ENDPOINT: Final = "/detokenize"
DESCRIBE_ENDPOINT: Final = "/tokenizer_info"
MOST_TOKENS: Final = MOST_VALUES - 16
"""Few enough that one more is refused by this bound, and not by that of the whole body."""
OF_CONVERSATIONS: Final = ("continue_final_message", "tools", *TemplateFields.model_fields)
"""Fields that change nothing with a `prompt`, which has no template."""


Tokens = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(fail_fast=True, max_length=MOST_TOKENS)]


class TokenizeRequest(TemplateFields):
    """The body of POST /tokenize."""

    model: str | None = None
    """Name of the model. Without it: the served model."""
    prompt: (
        Annotated[
            Annotated[str, Tag(PROMPT_KINDS[0])]
            | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_ANSWERS), Tag(PROMPT_KINDS[1])],
            Discriminator(texts_or_one),
        ]
        | None
    ) = None
    """A text, or in SGLang's form several."""
    messages: Messages | None = None
    """A conversation, in place of `prompt`. It goes through the chat template."""
    add_special_tokens: bool | None = None
    """Adds the tokenizer's special tokens, such as the one that starts a text."""
    add_generation_prompt: bool | None = None
    """`false` leaves out the start of the assistant's message."""
    continue_final_message: bool | None = None
    """Continues the last message instead of starting a new one."""
    tools: Tools | None = None
    """Functions that the chat template shows to the model."""
    return_token_strs: bool | None = None
    """Adds the tokens as the vocabulary has them."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Unknown fields, sorted; those of messages and tools without an index."""
        names = set(self.extra) - set(_REFUSED)
        for message in self.messages or ():
            names |= {f"messages.{name}" for name in message.unknown}
        for tool in self.tools or ():
            names |= {f"tools.{name}" for name in tool.unknown}
        return first_of(names)

    @property
    def ignored(self) -> tuple[str, ...]:
        return first_of(list(ignored_keywords_of(self.tools)))

    def submitted(self, *, frontend: str, model: str) -> list[Submitted]:
        """Return the events that hold all of it, one for each text. Raises RequestError if fields contradict."""
        texts = self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]
        first = Submitted(
            endpoint=TOKENIZE_ENDPOINT,
            frontend=frontend,
            model=model,
            task="tokenize",
            siblings=len(texts),
            presentation=Presentation(in_list=isinstance(self.prompt, list)),
            messages=plain_messages(self.messages or ()),
            add_special_tokens=self.add_special_tokens,
            templating=templating_of(
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=self.tools,
                variables=self.variables,
            ),
            return_pieces=bool(self.return_token_strs),
            sampling=SamplingParams(),
        )
        return [first.model_copy(update={"prompt": text}) for text in texts]


_REFUSED: Final = refused("tokenize", TokenizeRequest.model_fields)


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    """Name of the model. Without it: the served model."""
    tokens: Annotated[
        Annotated[Tokens, Tag(PROMPT_KINDS[2])]
        | Annotated[list[Tokens], Field(fail_fast=True, max_length=MOST_ANSWERS), Tag(PROMPT_KINDS[3])],
        Discriminator(lists_or_one),
    ]
    """Token ids, or in SGLang's form several lists of them."""
    skip_special_tokens: bool | None = None
    """SGLang's field: leaves special tokens out. Without it they are kept, as in vLLM."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted."""
        return first_of(self.extra)

    def submitted(self, *, frontend: str, model: str) -> list[Submitted]:
        """Return the events that hold all of it, one for each list."""
        in_list = lists_or_one(self.tokens) == PROMPT_KINDS[3]
        lists: list[Any] = self.tokens if in_list else [self.tokens]
        first = Submitted(
            endpoint=DETOKENIZE_ENDPOINT,
            frontend=frontend,
            model=model,
            task="detokenize",
            siblings=len(lists),
            presentation=Presentation(in_list=in_list),
            sampling=SamplingParams(skip_special_tokens=bool(self.skip_special_tokens)),
        )
        return [first.model_copy(update={"prompt_ids": tuple(tokens)}) for tokens in lists]


@dataclass(frozen=True, slots=True)
class DescribeRequest:
    """GET /tokenizer_info: it has no fields."""

    model: None = None
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def submitted(self, *, frontend: str, model: str) -> list[Submitted]:
        """Return the event that holds all of it."""
        sampling = SamplingParams()
        return [
            Submitted(endpoint=DESCRIBE_ENDPOINT, frontend=frontend, model=model, task="describe", sampling=sampling)
        ]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    request = parsed(TokenizeRequest, body)
    refuse_unsupported(request.extra, _REFUSED, "")
    if request.messages is None and request.prompt is None:
        raise wrong("prompt", "missing; send a text, or `messages`")
    if request.messages is not None and request.prompt is not None:
        raise wrong("prompt", "not together with `messages`; send one of them")
    if request.messages is None:
        useless = next((name for name in OF_CONVERSATIONS if getattr(request, name)), None)
        if useless is not None:
            raise wrong(useless, "only with `messages`")
    check_messages(request.messages or ())
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    return parsed(DetokenizeRequest, body)


def refuse_too_many(answers: Collection[Answered]) -> None:
    """Refuse several texts that have more tokens together than one may have; called as their *answers* come.

    Raises:
        RequestError: They have.
    """
    if len(answers) > 1 and sum(len(answer.token_ids) for answer in answers) > MOST_VALUES:
        message = f"prompt: these texts have more than {MOST_VALUES} tokens together; send fewer at once"
        raise RequestError(message, code="request_too_large", param="prompt", status=413)


def tokens_body(answers: Sequence[Answered], asked: Submitted, context: int) -> bytes:
    """Return the answer of POST /tokenize: of several texts, lists in their order.

    *context* is the most tokens that a request of this model can have.
    """
    rows = [(len(answer.token_ids), answer.token_ids, answer.pieces) for answer in answers]
    count, tokens, pieces = zip(*rows, strict=True) if asked.presentation.in_list else rows[0]
    return orjson.dumps(
        {
            "count": count,
            "max_model_len": context,
            "tokens": tokens,
            "token_strs": pieces if asked.return_pieces else None,
        }
    )


def text_body(answers: Sequence[Answered], asked: Submitted) -> bytes:
    """Return the answer of POST /detokenize: `prompt` is vLLM's name for the text, `text` is SGLang's."""
    texts = [answer.text for answer in answers]
    text = texts if asked.presentation.in_list else texts[0]
    return orjson.dumps({"prompt": text, "text": text})
