"""What a chat request may look like. What would change the output is honoured or refused, never ignored; a label is
kept; an unknown name is let through and named. Every optional field takes `null` as absent. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from pipeline.errors import RequestError

Neutrals = tuple[Any, ...]
"""The values of an unsupported field that change nothing; `null` always is one."""

UNSUPPORTED: Final[Mapping[str, Neutrals]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "bad_words": ([],),
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
    "include_stop_str_in_output": (False,),
    "input_ids": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "lora_path": (),
    "modalities": (["text"],),
    "n": (1,),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),  # without tools neither changes anything
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "sampling_seed": (),
    "separate_reasoning": (False,),
    "skip_special_tokens": (True,),
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
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "web_search_options": (),
}
"""Fields of OpenAI, vLLM and SGLang that would change the output and that we do not have."""
UNSUPPORTED_IN_MESSAGE: Final[Mapping[str, Neutrals]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "partial": (False,),
    "prefix": (False,),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}
UNSUPPORTED_IN_STREAM_OPTIONS: Final[Mapping[str, Neutrals]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
LABELS: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
TOKEN_ID: Final = r"^(0|[1-9][0-9]{0,8})$"
MOST_BIASES: Final = 1024
MOST_ALLOWED: Final = 16_384


def _joined_parts(content: object) -> object:
    """Return the text of a list of text parts; anything else is left to the field's own type."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            message = f"Part {index} is not of type text with a string in `text`; other parts are not supported"
            raise PydanticCustomError("text_part", "{message}", {"message": message})
        texts.append(part["text"])
    if not texts:
        raise PydanticCustomError("no_parts", "Input should have at least one part")
    return "".join(texts)


def _as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _kept_exactly(value: object) -> object:
    """Refuse a whole number that JSON in the log cannot hold; bounds on `int` alone would make a float of it."""
    if isinstance(value, int) and not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise PydanticCustomError("int64", "Input should be a whole number of at most 64 bits")
    return value


class _Strict(BaseModel):
    """No "3" for 3 and no "yes" for true; NaN and infinities are refused."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def extra(self) -> Mapping[str, Any]:
        """What was sent beside the declared fields."""
        return self.model_extra or {}


class Message(_Strict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_joined_parts)] = None
    name: str | None = None


class StreamOptions(_Strict):
    """What a stream says beside its text."""

    include_usage: bool | None = None


class ChatRequest(_Strict):
    """The body of POST /v1/chat/completions, as far as it is honoured; made by `parse_chat` only."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Mini-SGLang's field: a text that goes to the model as it is, without the chat template."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """-1 and 0 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: (
        Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=16)] | None
    ) = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=TOKEN_ID)], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_BIASES),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, max_length=MOST_ALLOWED)] | None
    ) = None

    user: str | None = None
    metadata: dict[str, Annotated[str | int | float | bool | None, AfterValidator(_kept_exactly)]] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def labels(self) -> dict[str, Any]:
        """The fields that change nothing but are kept."""
        return {name: value for name in LABELS if (value := getattr(self, name)) is not None}

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names that mean nothing to us, sorted; those of messages without their place."""
        names = set(self.extra) - set(UNSUPPORTED)
        for message in self.messages or ():
            names |= {f"messages.{name}" for name in set(message.extra) - set(UNSUPPORTED_IN_MESSAGE)}
        if self.stream_options is not None:
            options = set(self.stream_options.extra) - set(UNSUPPORTED_IN_STREAM_OPTIONS)
            names |= {f"stream_options.{name}" for name in options}
        return tuple(sorted(names))


def parse_chat(body: bytes) -> ChatRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong with it; what was sent is not repeated.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refusal(first) from None
    _refuse_unsupported(request.extra, UNSUPPORTED, "")
    _check_prompt(request)
    if request.stream_options is not None:
        if not request.stream:
            raise RequestError("stream_options: only allowed with `stream: true`", param="stream_options")
        _refuse_unsupported(request.stream_options.extra, UNSUPPORTED_IN_STREAM_OPTIONS, "stream_options.")
    longest = request.max_completion_tokens or request.max_tokens
    if longest is not None and (request.min_tokens or 0) > longest:
        raise RequestError("min_tokens: larger than the most tokens allowed", param="min_tokens")
    return request


def _check_prompt(request: ChatRequest) -> None:
    if request.messages is None and request.prompt is None:
        raise RequestError("messages: missing; send a list of at least one message", param="messages")
    if request.messages is not None and request.prompt is not None:
        raise RequestError("prompt: not together with `messages`; send one of them", param="prompt")
    for index, message in enumerate(request.messages or ()):
        if message.content is None and message.role != "assistant":
            param = f"messages.{index}.content"
            raise RequestError(f"{param}: should be a string or a list of text parts", param=param)
        _refuse_unsupported(message.extra, UNSUPPORTED_IN_MESSAGE, f"messages.{index}.")


def _refuse_unsupported(extra: Mapping[str, Any], table: Mapping[str, Neutrals], path: str) -> None:
    for name, value in extra.items():
        neutrals = table.get(name)
        if neutrals is None or value is None or any(_same(value, neutral) for neutral in neutrals):
            continue
        accepted = "".join(f" or send {orjson.dumps(neutral).decode()}" for neutral in neutrals)
        raise RequestError(
            f"{path}{name} is not supported with this value; leave it out{accepted}",
            code="unsupported_parameter",
            param=f"{path}{name}",
        )


def _same(value: object, neutral: object) -> bool:
    """Compare as JSON does: 1 is 1.0, but true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(first: ErrorDetails) -> RequestError:
    """Return the error for what pydantic found first."""
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not JSON that we can read: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return RequestError("The body should be a JSON object", code="invalid_json")
    path = []
    for part in first["loc"]:  # up to what the client named itself, which is not repeated: a key of an object
        path.append(str(part))
        if part in ("metadata", "logit_bias"):
            break
    param = ".".join(path)
    return RequestError(f"{param}: {first['msg']}", param=param, code="invalid_value")
