"""What a caller may pass as prompts becomes checked requests, before anything runs. Knows the tokenizer and the limits
of the engine, and no log.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import orjson

from pipeline.errors import RequestError
from pipeline.events import Constraint, SamplingParams, Submitted
from stages.generate.schedule.schedule import ScheduleLimits
from stages.tokenize.prompts import PromptEncoder, Rendered, too_long
from web.wire.openai.schemas import parse_chat, parse_completion
from web.wire.submit import chat_events

Message: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, by the rules of /v1/chat/completions."""
Outputs: TypeAlias = Mapping[str, Any]
"""What an answer must be: `{"json": schema}`, `regex`, `choice`, `grammar` or `json_object`, by the rules of the field
`structured_outputs` of /v1/completions.
"""
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Plain text, a conversation (through the model's chat template), or token ids."""

EXPECTED = "a string, a list of messages or a list of token ids"
OF_THE_PROCESS = (KeyboardInterrupt, SystemExit)
"""Errors that no prompt causes. A prompt may cause any other: a Rust panic in a tokenizer is not an Exception."""


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A checked request, with a seed."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None


def checked_requests(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    encoder: PromptEncoder,
    limits: ScheduleLimits,
    structured_outputs: Outputs | Sequence[Outputs | None] | None = None,
) -> list[OfflineRequest]:
    """Return a request for each prompt, in order.

    Raises:
        ValueError: The first that is wrong, by its index.
    """
    several = _several(prompts)
    samplings = _samplings(sampling_params, len(several))
    constraints = _constraints(structured_outputs, len(several))
    rendered = [_rendered(place, prompt, encoder, limits) for place, prompt in enumerate(several)]
    requests = []
    for place, (token_ids, sampling) in enumerate(zip(_encode(rendered, encoder), samplings, strict=True)):
        _check_tokens(place, token_ids, limits)
        requests.append(OfflineRequest(token_ids, _with_seed(sampling), constraints[place]))
    return requests


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return a list of prompts; a single prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts: got {_kind(prompts)}, expected {EXPECTED}, or a list of such")
    if prompts and (_is_token_ids(prompts) or _is_conversation(prompts)):
        return [prompts]
    return list(prompts)


def _is_token_ids(prompt: Sequence[object]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt)


def _is_conversation(prompt: Sequence[object]) -> TypeGuard[Sequence[Message]]:
    return all(isinstance(item, Mapping) for item in prompt)


def _rendered(place: int, prompt: object, encoder: PromptEncoder, limits: ScheduleLimits) -> Rendered:
    if not isinstance(prompt, str) and (isinstance(prompt, bytes) or not isinstance(prompt, Sequence)):
        raise ValueError(f"prompts[{place}]: got {_kind(prompt)}, expected {EXPECTED}")
    if not prompt:
        raise ValueError(f"prompts[{place}]: is empty; pass {EXPECTED}")
    try:
        rendered = encoder.render(_submitted(place, prompt))
        encoder.refuse_too_long(rendered, limits.context)
    except RequestError as error:
        raise ValueError(f"prompts[{place}]: {error.message}") from error
    return rendered


def _submitted(place: int, prompt: str | Sequence[object]) -> Submitted:
    """Return the event that the server would submit for *prompt*; a conversation follows /v1/chat/completions."""
    if isinstance(prompt, str):
        return Submitted(endpoint="", frontend="", prompt=prompt, sampling=SamplingParams())
    if _is_token_ids(prompt):
        return Submitted(endpoint="", frontend="", prompt_ids=tuple(map(int, prompt)), sampling=SamplingParams())
    if not _is_conversation(prompt):
        kinds = ", ".join(sorted({_kind(item) for item in prompt}))
        raise ValueError(f"prompts[{place}]: got a list of {kinds}; expected messages alone, or token ids alone")
    try:
        body = orjson.dumps({"messages": [dict(message) for message in prompt]})
    except orjson.JSONEncodeError as error:
        raise ValueError(f"prompts[{place}]: its messages cannot be sent as JSON: {error}") from error
    return chat_events(parse_chat(body), frontend="", model="", defaults={})[0]


def _encode(rendered: Sequence[Rendered], encoder: PromptEncoder) -> list[tuple[int, ...]]:
    try:
        return [tuple(token_ids) for token_ids in encoder.encode(rendered)]
    except OF_THE_PROCESS:
        raise
    except BaseException:  # one of them is at fault: find out which
        return [_encode_one(place, prompt, encoder) for place, prompt in enumerate(rendered)]


def _encode_one(place: int, prompt: Rendered, encoder: PromptEncoder) -> tuple[int, ...]:
    try:
        return tuple(encoder.encode([prompt])[0])
    except OF_THE_PROCESS:
        raise
    except BaseException as error:
        raise ValueError(f"prompts[{place}]: could not be tokenized: {error}") from error


def _check_tokens(place: int, token_ids: Sequence[int], limits: ScheduleLimits) -> None:
    if not token_ids:
        raise ValueError(f"prompts[{place}]: has no tokens; pass some text")
    if len(token_ids) + 1 > limits.context:
        error = too_long(str(len(token_ids)), limits.context, "prompt")
        raise ValueError(f"prompts[{place}]: {error.message}")
    strange = next((token for token in token_ids if not 0 <= token < limits.vocab_size), None)
    if strange is not None:
        raise ValueError(
            f"prompts[{place}]: token {strange} is not of the model, whose vocabulary has {limits.vocab_size}; "
            "pass ids of its own tokenizer"
        )


def _samplings(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        given = [given or SamplingParams()] * count
    elif not isinstance(given, Sequence):
        raise ValueError(f"sampling_params: got {_kind(given)}, expected SamplingParams, or a list of them")
    elif len(given) != count:
        raise ValueError(f"sampling_params: {len(given)} given for {count} prompts; pass one for all, or one for each")
    for place, params in enumerate(given):
        where = f"sampling_params[{place}]"
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{where}: got {_kind(params)}, expected SamplingParams")
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise ValueError(f"{where}: min_tokens {params.min_tokens} is larger than max_tokens {params.max_tokens}")
        if "" in params.stop:
            raise ValueError(f"{where}: an empty stop string would end every answer at once; leave it out")
        if any("\ud800" <= letter <= "\udfff" for stop in params.stop for letter in stop):
            raise ValueError(f"{where}: a stop string contains a lone surrogate (half a character); remove it")
    return list(given)


def _constraints(given: Outputs | Sequence[Outputs | None] | None, count: int) -> list[Constraint | None]:
    if given is None:
        return [None] * count
    if isinstance(given, Mapping):
        return [_constraint("structured_outputs", given)] * count
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ValueError(
            f"structured_outputs: got {_kind(given)}, expected a dict such as {{'json': schema}}, or a list"
        )
    if len(given) != count:
        raise ValueError(
            f"structured_outputs: {len(given)} given for {count} prompts; pass one for all, or one for each"
        )
    return [
        None if one is None else _constraint(f"structured_outputs[{place}]", one) for place, one in enumerate(given)
    ]


def _constraint(where: str, given: Outputs) -> Constraint:
    """Return what an answer must be, after the checks of web and tokenizer."""
    from stages.tokenize.constraints.grammars import (
        grammar_of,  # llguidance takes 60 ms, and most programs never need it
    )

    try:
        body = orjson.dumps({"prompt": ".", "structured_outputs": given})
        asked = parse_completion(body)
        constraint = asked.constraint()
        assert constraint is not None, "the field is refused if it asks for nothing"
        grammar_of(constraint)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"{where}: cannot be sent as JSON: {error}") from error
    except RequestError as error:
        raise ValueError(error.message.replace("structured_outputs", where, 1)) from error
    if asked.unknown:
        name = asked.unknown[0].replace("structured_outputs", where, 1)
        raise ValueError(f"{name}: unknown; leave it out")
    return constraint


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """Return *sampling* with a random seed if it has none."""
    if "seed" in sampling.model_fields_set:
        return sampling
    return sampling.model_copy(update={"seed": secrets.randbelow(2**63)})


def _kind(value: object) -> str:
    return type(value).__name__
