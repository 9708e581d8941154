"""From a request to the `Submitted` event that says all of it: the seed is drawn here, so that a replay repeats it."""

from __future__ import annotations

import secrets
from typing import Any

from pipeline.events import SamplingParams, Submitted
from web.openai.schemas import ChatRequest, Message

CHAT_ENDPOINT = "/v1/chat/completions"


def to_submitted(request: ChatRequest, *, frontend: str, model: str) -> Submitted:
    """Return the event of *request*, which *frontend* listens for; *model* is the served name it asked for."""
    labels = request.labels
    if request.stream:  # nothing that changes the output, but a later reader gets the frames that this client got
        labels |= {"stream": True, "include_usage": request.include_usage}
    return Submitted(
        endpoint=CHAT_ENDPOINT,
        frontend=frontend,
        model=model,
        messages=tuple(_plain(message) for message in request.messages or ()),
        prompt=request.prompt or "",
        sampling=_sampling(request),
        labels=labels,
    )


def _plain(message: Message) -> dict[str, Any]:
    """Return the message as chat templates know it: most have no role `developer`."""
    role = "system" if message.role == "developer" else message.role
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content or "", **name}


def _sampling(request: ChatRequest) -> SamplingParams:
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(request.top_k, 0),
        "min_p": request.min_p,
        "seed": secrets.randbelow(2**63) if request.seed is None else request.seed,
        "max_tokens": request.max_completion_tokens or request.max_tokens,
        "min_tokens": request.min_tokens,
        "stop": None if request.stop is None else tuple(request.stop),
        "stop_token_ids": None if request.stop_token_ids is None else tuple(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": None
        if request.logit_bias is None
        else tuple((int(token), bias) for token, bias in request.logit_bias.items()),
        "allowed_token_ids": None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
    }
    return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})
