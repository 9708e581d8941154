"""The bodies of /v1/chat/completions and /v1/completions. Knows nothing of HTTP.

Unsupported fields that would change the output return 400. Labels are kept in the history. Unknown fields are accepted
and listed in a response header. Every optional field takes `null` as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline.errors import RequestError
from pipeline.events import MOST_LOGPROBS
from web.wire.openai.messages import Messages, Tools, check_messages
from web.wire.openai.strict import (
    INT32_MAX,
    INT64_MAX,
    Neutrals,
    Strict,
    at_most,
    kept_exactly,
    parsed,
    refuse_unsupported,
)

UNSUPPORTED: Final[Mapping[str, Neutrals]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "enable_thinking": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "input_ids": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "max_completion_tokens": (),
    "messages": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),  # without tools neither changes anything
    "prediction": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "sampling_seed": (),
    "separate_reasoning": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_interval": (1,),
    "stream_reasoning": (True, False),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "web_search_options": (),
}
"""Fields of OpenAI, vLLM and SGLang that would change the output and that some endpoint does not have."""
UNSUPPORTED_IN_STREAM_OPTIONS: Final[Mapping[str, Neutrals]] = {
    "include_obfuscation": (False,),
}
LABELS: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")

MOST_CHOICES: Final = 128
MOST_ANSWERS: Final = 1024
"""Most choices of all prompts together."""
MOST_COPIED_BYTES: Final = 8 << 20
"""Most bytes that all answers of a body have for themselves: how they are sampled, and the prompts that they repeat."""
MOST_BAD_WORDS: Final = 256
PROMPT_KINDS: Final = ("<text>", "<texts>", "<token ids>", "<lists of token ids>")
"""Tags of the four shapes of a prompt; errors do not show them."""
COMPLETION_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""
TOKEN_ID: Final = r"^(0|[1-9][0-9]{0,8})$"
MOST_BIASES: Final = 1024
MOST_ALLOWED: Final = 16_384
MOST_METADATA: Final = 1024


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1)]
ListsOfIds = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]


def as_list(stop: object) -> object:
    """Return a single text as a list; the field's type checks the rest."""
    return [stop] if isinstance(stop, str) else stop


def _named_token(key: str) -> str:
    if not re.fullmatch(TOKEN_ID, key):
        expected = "expected a whole number below 1000000000, such as `42`"
        raise PydanticCustomError("token_id", f"a key is not a token id; {expected}")
    return key


NamedToken = Annotated[str, AfterValidator(_named_token), WithJsonSchema({"type": "string", "pattern": TOKEN_ID})]


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
    """Send the token counts in a last chunk."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: send the token counts in every chunk."""


class SamplingFields(Strict):
    """Sampling and stop conditions, for which OpenAI, vLLM and SGLang have the same names."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """-1 and 0 turn it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True),
            BeforeValidator(as_list, json_schema_input_type=str | list[str]),
            Field(max_length=16),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[NamedToken, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_BIASES),
            at_most(MOST_BIASES),
        ]
        | None
    ) = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n


class GenerationRequest(SamplingFields):
    """The fields that both endpoints have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    include_stop_str_in_output: bool | None = None

    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_ALLOWED)] | None = (
        None
    )
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]], Field(fail_fast=True, max_length=MOST_BAD_WORDS)
        ]
        | None
    ) = None

    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool | None = None

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as fit into the context."""
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    """Among the requests that an engine holds, a lower number runs first."""

    user: str | None = None
    metadata: (
        Annotated[
            dict[str, Annotated[str | int | float | bool | None, AfterValidator(kept_exactly)]],
            Field(max_length=MOST_METADATA),
            at_most(MOST_METADATA),
        ]
        | None
    ) = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def longest(self) -> int | None:
        """The most tokens that an answer may have; None: as many as fit into the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many top tokens to return with the log-probability of each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def repeats_prompt(self) -> bool:
        """Say whether each answer tells the client about its prompt."""
        return bool(self.return_token_ids) or self.prompt_logprobs is not None

    @property
    def labels(self) -> dict[str, Any]:
        """The fields that change nothing but are kept in the history."""
        return {name: value for name in LABELS if (value := getattr(self, name)) is not None}

    @property
    def unknown(self) -> tuple[str, ...]:
        """Unknown fields, sorted; those of messages without an index."""
        names = set(self.extra) - set(UNSUPPORTED)
        if self.stream_options is not None:
            options = set(self.stream_options.extra) - set(UNSUPPORTED_IN_STREAM_OPTIONS)
            names |= {f"stream_options.{name}" for name in options}
        return tuple(sorted(names))


PER_ANSWER: Final = {*SamplingFields.model_fields, "allowed_token_ids", "bad_words"}
"""The fields that every stage holds for each answer."""


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Mini-SGLang's field: a text that goes to the model without the chat template."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(kept_exactly)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def unknown(self) -> tuple[str, ...]:
        names = set(super().unknown)
        for tool in self.tools or ():
            names |= {f"tools.{name}" for name in tool.unknown}
        for message in self.messages or ():
            names |= {f"messages.{name}" for name in message.unknown}
        return tuple(sorted(names))


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[Text, Tag(PROMPT_KINDS[0])]
        | Annotated[Texts, Tag(PROMPT_KINDS[1])]
        | Annotated[TokenIds, Tag(PROMPT_KINDS[2])]
        | Annotated[ListsOfIds, Tag(PROMPT_KINDS[3])],
        Discriminator(_prompt_kind),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """0 is allowed with `echo`: return only the prompt."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Must equal `n`: more candidates than choices are not supported."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]

    @property
    def longest(self) -> int:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=GenerationRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    request = _parse(ChatRequest, body)
    _check_prompt(request)
    _check_tools(request)
    refuse_copies(request, len(body), request.num_choices, repeats=request.repeats_prompt, param="n")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: only allowed with `logprobs: true`", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        message = "continue_final_message: not together with `add_generation_prompt`, which begins a new message"
        raise RequestError(message, param="continue_final_message")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """As `parse_chat`."""
    request = _parse(CompletionRequest, body)
    if request.longest == 0 and not request.echo:
        raise RequestError("max_tokens: 0 is only allowed with `echo: true`", param="max_tokens")
    if request.best_of is not None and request.best_of != request.num_choices:
        raise RequestError("best_of: must equal `n`; leave it out", code="unsupported_parameter", param="best_of")
    num_answers = len(request.prompts) * request.num_choices
    if num_answers > MOST_ANSWERS:
        raise RequestError(f"prompt: with `n` these are {num_answers} answers; at most {MOST_ANSWERS}", param="prompt")
    param = "n" if request.num_choices > 1 else "prompt"
    refuse_copies(request, len(body), num_answers, repeats=request.repeats_prompt or bool(request.echo), param=param)
    return request


def _parse(model: type[R], body: bytes) -> R:
    request = parsed(model, body)
    refuse_unsupported(request.extra, UNSUPPORTED, "")
    if request.stream_options is not None:
        if not request.stream:
            raise RequestError("stream_options: only allowed with `stream: true`", param="stream_options")
        refuse_unsupported(request.stream_options.extra, UNSUPPORTED_IN_STREAM_OPTIONS, "stream_options.")
    if request.longest is not None and (request.min_tokens or 0) > request.longest:
        raise RequestError("min_tokens: larger than the most tokens allowed", param="min_tokens")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: not with `stream: true`", param="prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise RequestError("truncate_prompt_tokens: 0 leaves no prompt", param="truncate_prompt_tokens")
    return request


def refuse_copies(asked: SamplingFields, num_bytes: int, num_answers: int, *, repeats: bool, param: str) -> None:
    """Refuse a body of *num_bytes* if what its answers have for themselves takes too much.

    A prompt is kept once for all its answers, but each *repeats* it to the client if that asks for it.

    Raises:
        RequestError: It takes too much; *param* is the field that makes several answers.
    """
    if repeats and asked.num_choices > 1 and asked.num_choices * num_bytes > MOST_COPIED_BYTES:
        most = max(MOST_COPIED_BYTES // num_bytes, 1)
        message = f"{param}: each answer repeats the prompt, so with a prompt of this size at most {most}"
        raise RequestError(message, param=param)
    own = len(asked.model_dump_json(include=PER_ANSWER, exclude_none=True)) if num_answers > 1 else 0
    if num_answers * own > MOST_COPIED_BYTES:
        what = f"each of {num_answers} answers has its own copy of `stop`, `logit_bias` and the like"
        raise RequestError(f"{param}: {what}; send fewer at once", param=param)


def _check_tools(request: ChatRequest) -> None:
    if request.tool_choice not in (None, "none"):
        message = "tool_choice: calling tools is not supported; send `none` or leave it out"
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    if request.tools and request.tool_choice is None:
        message = "tools: calling tools is not supported; send `tool_choice: none` to show them to the model"
        raise RequestError(message, code="unsupported_parameter", param="tools")


def _check_prompt(request: ChatRequest) -> None:
    if request.messages is None and request.prompt is None:
        raise RequestError("messages: missing; send a list of at least one message", param="messages")
    if request.messages is not None and request.prompt is not None:
        raise RequestError("prompt: not together with `messages`; send one of them", param="prompt")
    check_messages(request.messages or ())
