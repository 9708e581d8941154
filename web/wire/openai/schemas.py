"""The bodies of /v1/chat/completions and /v1/completions. Knows nothing of HTTP.

Unsupported fields that would change the output return 400. Labels are kept in the history. Unknown fields are accepted
and listed in a response header. Every optional field takes `null` as absent.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline.errors import RequestError
from pipeline.events import MOST_LOGPROBS
from web.wire import fields
from web.wire.constraints import ConstraintFields
from web.wire.openai.calls import ToolFields, check_calls, ignored_keywords_of
from web.wire.openai.messages import MOST_PARTS, Messages, TextPart, check_messages
from web.wire.openai.strict import (
    INT32_MAX,
    INT64_MAX,
    WHOLE,
    Strict,
    at_most,
    kept_exactly,
    parsed,
    refuse_unsupported,
    wrong,
)

MOST_CHOICES: Final = 128
MOST_ANSWERS: Final = 1024
"""Most choices of all prompts together."""
MOST_COPIED_BYTES: Final = 8 << 20
"""Most bytes that all answers of a body have for themselves: how they are sampled, and the prompts that they repeat."""
LONGEST_STOP: Final = 1024
"""Most characters of a stop string."""
MOST_STOPS: Final = 128
MOST_STOP_CHARACTERS: Final = 64 << 10
"""Of all stop strings together."""
MOST_BAD_WORDS: Final = 256
PROMPT_KINDS: Final = ("<text>", "<texts>", "<token ids>", "<lists of token ids>")
"""Tags of the four shapes of a prompt; errors do not show them."""
COMPLETION_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""
TOKEN_ID: Final = r"^(0|[1-9][0-9]{0,8})$"
MOST_BIASES: Final = 1024
MOST_ALLOWED: Final = 16_384
MOST_METADATA: Final = 1024
LONGEST_PREDICTION: Final = 64 << 10
"""Most characters of a prediction: a tokenizer encodes it in one go."""
MOST_LABEL_BYTES: Final = 64 << 10
"""Most bytes of all labels of a body. They are kept as long as the history, and no context bounds them."""


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1)]
ListsOfIds = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]


def as_list(stop: object) -> object:
    """Return a single text as a list, an empty one as none; the field's type checks the rest."""
    return [stop] * (stop != "") if isinstance(stop, str) else stop


def few_characters(stops: list[str]) -> list[str]:
    """Refuse stop strings that are too long together."""
    if (num := sum(map(len, stops))) > MOST_STOP_CHARACTERS:
        message = "Input should have at most {most} characters together, not {num}"
        raise PydanticCustomError("too_long", message, {"most": MOST_STOP_CHARACTERS, "num": num})
    return stops


def _named_token(key: str) -> str:
    if not re.fullmatch(TOKEN_ID, key):
        expected = "expected a whole number below 1000000000, such as `42`"
        raise PydanticCustomError("token_id", f"the key is not a token id; {expected}")
    return key


def _flat(value: object) -> object:
    """Refuse what is no single value, with one error instead of one for each type that it could have."""
    if isinstance(value, dict | list):
        raise PydanticCustomError("flat", "Input should be a text, a number, true, false or null")
    return value


NamedToken = Annotated[str, AfterValidator(_named_token), WithJsonSchema({"type": "string", "pattern": TOKEN_ID})]


def texts_or_one(text: object) -> str:
    """Return the tag of a text, or of several."""
    return PROMPT_KINDS[1] if isinstance(text, list) else PROMPT_KINDS[0]


def lists_or_one(token_ids: object) -> str:
    """Return the tag of a list of token ids, or of several."""
    nested = isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list)
    return PROMPT_KINDS[3] if nested else PROMPT_KINDS[2]


def _prompt_kind(prompt: object) -> str:
    """Return which of the four shapes a prompt has, so that an error is about that shape alone."""
    if not isinstance(prompt, list):
        return PROMPT_KINDS[0]
    first = prompt[0] if prompt else ""
    if isinstance(first, str):
        return PROMPT_KINDS[1]
    return PROMPT_KINDS[3 if isinstance(first, list) else 2]


class StreamOptions(Strict):
    """What a stream sends beside its text."""

    include_usage: bool | None = None
    """Sends the token counts in the last chunk."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: sends the token counts in every chunk."""


_REFUSED_OPTIONS: Final = fields.refused("stream_options", StreamOptions.model_fields)


class SamplingFields(ConstraintFields):
    """Sampling, stop conditions and constraints, for which OpenAI, vLLM and SGLang have the same names."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    """Number of answers. The first equals the answer with `n: 1`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Randomness. 0 always takes the most probable token."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Samples from the smallest set of tokens whose probabilities add up to it. 0: always the most probable one."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Samples from this many of the most probable tokens. -1 and 0 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drops tokens below this share of the highest probability."""
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keeps the tokens whose information is closest to the entropy, up to this total probability."""
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP), at_most(LONGEST_STOP)]],
            Field(fail_fast=True),
            BeforeValidator(as_list, json_schema_input_type=str | list[str]),
            Field(max_length=MOST_STOPS),
            AfterValidator(few_characters),
        ]
        | None
    ) = None
    """Ends the answer before this text (`stop`). The text is not sent."""
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    """Ends the answer at such a token (`stop`). Its text is not sent."""
    ignore_eos: bool | None = None
    """Continues after an end-of-sequence token."""
    skip_special_tokens: bool | None = None
    """`false` shows special tokens as text."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens that are in the answer already."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once for each time the token is in the answer."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Above 1, makes tokens of the prompt and the answer less likely."""
    logit_bias: (
        Annotated[
            dict[NamedToken, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_BIASES),
            at_most(MOST_BIASES),
        ]
        | None
    ) = None
    """Added to the logits of these tokens. 100 forces a token."""

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n


class GenerationRequest(SamplingFields):
    """The fields that both endpoints have."""

    model: str | None = None
    """Name of the model. The served model answers any name, unless the server has --strict-model-names."""
    stream: bool | None = None
    """Sends the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Token counts in the last chunk, or in every chunk."""

    max_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX), WHOLE] | None = None
    """Older name of `max_completion_tokens`. -1: the rest of the context."""
    n_predict: Annotated[int, Field(ge=-1, le=INT64_MAX), WHOLE] | None = None
    """llama.cpp's name of `max_tokens`. -1: the rest of the context."""
    repeat_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """llama.cpp's and Ollama's name of `repetition_penalty`. Counts all tokens of the prompt and the answer."""
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX), WHOLE] | None = None
    """Minimum number of output tokens before any stop condition applies."""
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] | None = None
    """The same seed gives the same answer. -1 draws one, as without a seed."""
    include_stop_str_in_output: bool | None = None
    """Keeps the stop text at the end of the answer."""

    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_ALLOWED)] | None = (
        None
    )
    """Only these tokens can be generated."""
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]], Field(fail_fast=True, max_length=MOST_BAD_WORDS)
        ]
        | None
    ) = None
    """These texts are not generated, with or without a leading space."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    """Log-probabilities of the prompt's tokens, in vLLM's format."""
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_LOGPROBS)] | None = None
    """Shows these tokens instead of the most probable ones. Needs `logprobs`."""
    return_token_ids: bool | None = None
    """Adds the token ids of the prompt and the answer."""
    return_cached_tokens_details: bool | None = None
    """Adds `sglext.cached_tokens_details`, as in SGLang. `usage` has the number of cached tokens in any case."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as `token_id:<id>`, as in vLLM."""

    add_special_tokens: bool | None = None
    """Adds the tokenizer's special tokens, such as the one that starts a text."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Keeps only this many tokens from the end of the prompt. -1 keeps as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """With `truncate_prompt_tokens`: `right` drops the end of the prompt and keeps its beginning."""
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None = None
    """Of requests of the same owner, lower numbers run first."""

    user: str | None = None
    """Label, kept in the history. On a server without keys, users take turns when requests wait."""
    metadata: (
        Annotated[
            dict[
                str,
                Annotated[str | int | float | bool | None, BeforeValidator(_flat), AfterValidator(kept_exactly)],
            ],
            Field(max_length=MOST_METADATA),
            at_most(MOST_METADATA),
        ]
        | None
    ) = None
    """Label. Kept in the history, changes nothing."""
    store: bool | None = None
    """Label, as `metadata`. A chat with `true` is also kept for `--response-retention`, to be read under its id."""
    service_tier: str | None = None
    """Label. Kept in the history, changes nothing."""
    safety_identifier: str | None = None
    """Label. Kept in the history, changes nothing."""
    prompt_cache_key: str | None = None
    """Label. Kept in the history, changes nothing."""

    limits: ClassVar[tuple[str, ...]] = ("max_tokens", "n_predict")
    """The fields for the most tokens of an answer; the first one that is set counts."""

    @property
    def limit(self) -> str:
        """The one of `limits` that counts; "" if none is set."""
        return next((name for name in self.limits if getattr(self, name) is not None), "")

    @property
    def longest(self) -> int | None:
        """The most tokens that an answer may have; None: as many as fit into the context."""
        longest = getattr(self, self.limit) if self.limit else None  # the body may have a field without a name
        return None if longest == -1 else longest

    @property
    def num_logprobs(self) -> int | None:
        """How many top tokens to return with the log-probability of each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def repeats_prompt(self) -> bool:
        """Return whether each answer tells the client about its prompt."""
        return bool(self.return_token_ids) or self.prompt_logprobs is not None

    @property
    def labels(self) -> dict[str, Any]:
        """The fields that change nothing but are kept in the history."""
        return {name: value for name in fields.LABELS if (value := getattr(self, name)) is not None}

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted; those of messages without an index."""
        names = set(self.extra) - set(_refused(type(self))) | self.unknown_members
        if self.stream_options is not None:
            names |= {f"stream_options.{name}" for name in set(self.stream_options.extra) - set(_REFUSED_OPTIONS)}
        return fields.first_of(names)

    @property
    def ignored(self) -> tuple[str, ...]:
        return fields.first_of(list(self.ignored_keywords()))


class Prediction(Strict):
    """What the client expects as answer, such as a file of which little changes."""

    type: Literal["content"]
    """Always `content`."""
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PARTS)]
    """The text, or a list of text parts."""

    @property
    def text(self) -> str:
        """The text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)


PER_ANSWER: Final = {*SamplingFields.model_fields, "allowed_token_ids", "bad_words"}
"""The fields that every stage holds for each answer."""


class ChatRequest(GenerationRequest, ToolFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages | None = None
    """The conversation, from the oldest message to the newest."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Mini-SGLang's field: a text that goes to the model without the chat template."""
    max_completion_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX), WHOLE] | None = None
    """Maximum number of output tokens. Reaching it ends the answer with `length`. The request is refused if prompt
    and answer would not fit into the context. -1: the rest of the context."""
    logprobs: bool | None = None
    """Log-probability of each token, from the model's own logits."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    """Number of alternatives shown for each token. Needs `logprobs`."""
    add_generation_prompt: bool | None = None
    """`false` leaves out the start of the assistant's message."""
    continue_final_message: bool | None = None
    """Continues the last message instead of starting a new one."""
    prediction: Prediction | None = None
    """What you expect as answer, such as a file in which little changes. The answer is the same and may come sooner."""

    limits: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens", "n_predict")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def unknown(self) -> tuple[str, ...]:
        names = set(super().unknown) | self.unknown_of_tools
        if self.prediction is not None:
            names |= {f"prediction.{name}" for name in self.prediction.extra}
        for message in self.messages or ():
            names |= {f"messages.{name}" for name in message.unknown}
        return fields.first_of(names)

    @property
    def ignored(self) -> tuple[str, ...]:
        return fields.first_of([*self.ignored_keywords(), *ignored_keywords_of(self.tools)])


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[Text, Tag(PROMPT_KINDS[0])]
        | Annotated[Texts, Tag(PROMPT_KINDS[1])]
        | Annotated[TokenIds, Tag(PROMPT_KINDS[2])]
        | Annotated[ListsOfIds, Tag(PROMPT_KINDS[3])],
        Discriminator(_prompt_kind),
    ]
    """What the model continues: a text, several texts, token ids, or several lists of them."""
    max_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX), WHOLE] | None = None
    """Maximum number of output tokens. Reaching it ends the answer with `length`. 0 is allowed with `echo`. -1: the
    rest of the context."""
    echo: bool | None = None
    """Puts the prompt before the answer, with its log-probabilities where `logprobs` is set. `max_tokens` may be 0."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    """Log-probabilities, with this many alternatives for each token."""
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    """Must equal `n`: more candidates than answers are not supported."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]

    @property
    def longest(self) -> int | None:
        return super().longest if self.limit else COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


@functools.cache
def _refused(model: type[GenerationRequest]) -> Mapping[str, fields.Field]:
    return fields.refused("generate", model.model_fields)


R = TypeVar("R", bound=GenerationRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    request = _parse(ChatRequest, body)
    _check_prompt(request)
    constraint = request.constraint()
    check_calls(
        request,
        constraint="" if constraint is None else constraint.param,
        has_messages=request.messages is not None,
    )
    refuse_copies(request, len(body), request.num_choices, repeats=request.repeats_prompt, param="n")
    if request.top_logprobs and not request.logprobs:
        raise wrong("top_logprobs", "only allowed with `logprobs: true`")
    if request.prediction is not None and len(request.prediction.text) > LONGEST_PREDICTION:
        raise wrong(
            "prediction.content", f"at most {LONGEST_PREDICTION} characters, not {len(request.prediction.text)}"
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise wrong("continue_final_message", "not together with `add_generation_prompt`, which begins a new message")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """As `parse_chat`."""
    request = _parse(CompletionRequest, body)
    if request.best_of is not None and request.best_of != request.num_choices:
        raise RequestError("best_of: must equal `n`; leave it out", code="unsupported_parameter", param="best_of")
    num_answers = len(request.prompts) * request.num_choices
    if num_answers > MOST_ANSWERS:
        raise wrong("prompt", f"with `n` these are {num_answers} answers; at most {MOST_ANSWERS}")
    param = "n" if request.num_choices > 1 else "prompt"
    refuse_copies(request, len(body), num_answers, repeats=request.repeats_prompt or bool(request.echo), param=param)
    return request


def _parse(model: type[R], body: bytes) -> R:
    request = parsed(model, body)
    refuse_unsupported(request.extra, _refused(model), "")
    refuse_long_labels(request.labels)
    if request.stream_options is not None:
        if not request.stream:
            raise wrong("stream_options", "only allowed with `stream: true`")
        refuse_unsupported(request.stream_options.extra, _REFUSED_OPTIONS, "stream_options.")
    if request.longest == 0 and not getattr(request, "echo", False):
        raise wrong(request.limit, "0 is only allowed with `echo: true`, in /v1/completions")
    _refuse_two_values(request, request.limit, "n_predict")
    _refuse_two_values(request, "repetition_penalty", "repeat_penalty")
    if request.logprob_token_ids and request.num_logprobs is None:
        raise wrong("logprob_token_ids", "only allowed with `logprobs`")
    if request.longest is not None and (request.min_tokens or 0) > request.longest:
        limit = request.limit or "max_tokens"
        raise wrong("min_tokens", f"{request.min_tokens} is above {limit} ({request.longest}); raise {limit}")
    if request.stream and request.prompt_logprobs is not None:
        raise wrong("prompt_logprobs", "not with `stream: true`")
    if request.truncate_prompt_tokens == 0:
        raise wrong("truncate_prompt_tokens", "0 leaves no prompt")
    request.constraint()  # whether its fields go together
    return request


def refuse_long_labels(labels: Mapping[str, Any]) -> None:
    """Refuse labels that take too much of the log. Raises RequestError, which names the largest one."""
    sizes = {name: len(orjson.dumps(value)) for name, value in labels.items()}
    if sum(sizes.values()) > MOST_LABEL_BYTES:
        all_labels = ", ".join(f"`{name}`" for name in fields.LABELS)
        seen = f"{sum(sizes.values())} bytes together, at most {MOST_LABEL_BYTES}"
        raise wrong(max(sizes, key=sizes.__getitem__), f"the labels ({all_labels}) have {seen}; shorten them")


def _refuse_two_values(request: GenerationRequest, name: str, alias: str) -> None:
    """Refuse another value of a field under its *alias*. Raises RequestError."""
    value, other = getattr(request, name, None), getattr(request, alias)
    if value is not None and other is not None and value != other:
        raise wrong(alias, f"means the same as `{name}`, which has another value; send one of them")


def refuse_copies(asked: SamplingFields, num_bytes: int, num_answers: int, *, repeats: bool, param: str) -> None:
    """Refuse a body of *num_bytes* if what its answers have for themselves takes too much.

    A prompt is kept once for all its answers, but each *repeats* it to the client if that asks for it.

    Raises:
        RequestError: It takes too much; *param* is the field that makes several answers.
    """
    if repeats and asked.num_choices > 1 and asked.num_choices * num_bytes > MOST_COPIED_BYTES:
        most = max(MOST_COPIED_BYTES // num_bytes, 1)
        raise wrong(param, f"each answer repeats the prompt, so with a prompt of this size at most {most}")
    own = len(asked.model_dump_json(include=PER_ANSWER, exclude_none=True)) if num_answers > 1 else 0
    if num_answers * own > MOST_COPIED_BYTES:
        what = f"each of {num_answers} answers has its own copy of `stop`, `logit_bias` and the like"
        raise wrong(param, f"{what}; send fewer at once")


def _check_prompt(request: ChatRequest) -> None:
    if request.messages is None and request.prompt is None:
        raise wrong("messages", "missing; send a list of at least one message")
    if request.messages is not None and request.prompt is not None:
        raise wrong("prompt", "not together with `messages`; send one of them")
    check_messages(request.messages or ())
