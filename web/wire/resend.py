"""Turns `Submitted` events back into a body: the inverse of `web.wire.submit`. Knows nothing of HTTP.

The body makes the same events again, seed included, whatever sampling parameters the model recommends. Fields that
change no event are lost, such as the name of a role that is kept as `system`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pipeline.events import SamplingParams, Submitted
from web.wire import fields
from web.wire.constraints import constraint_fields
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT
from web.wire.openai.calls import call_fields
from web.wire.openai.schemas import COMPLETION_TOKENS, SamplingFields
from web.wire.sglang.schemas import NEW_TOKENS, TEXT_TOKENS, WITHIN

ENDPOINTS: Final = (CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT)
"""Paths of the bodies that can be made."""
RECOMMENDED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model may recommend: a body that leaves it out gets that, not the default of SamplingParams."""

Body = dict[str, Any]


def request_body(events: Sequence[Submitted]) -> Body:
    """Return the body that makes *events*, for the endpoint that they name: one event, or all siblings in order.

    One of several siblings makes a body for itself alone. Only the first one of a prompt has its scores.
    """
    first = events[0]
    choices = first.presentation.choices if len(events) == first.siblings else 1
    if first.endpoint != GENERATE_ENDPOINT:
        return _openai_body(first, _prompts(events[::choices]), choices)
    if first.presentation.whole_text:
        return _sglang_body(first, _prompts(events[::choices]), choices)
    longest = first.sampling.max_tokens
    body: Body = {"model": first.model, "prompt": first.prompt}
    body |= {"max_tokens": longest} if first.limit or longest != TEXT_TOKENS else {}
    return body | ({"ignore_eos": True} if first.sampling.ignore_eos else {})


def _prompts(events: Sequence[Submitted]) -> list[str | list[int]]:
    return [list(event.prompt_ids) if event.prompt_ids else event.prompt for event in events]


def _openai_body(first: Submitted, prompts: Sequence[str | list[int]], choices: int) -> Body:
    shown, sampling = first.presentation, _sampling(first.sampling)
    scores = sampling.pop("logprobs", None)
    if not shown.prompt_scores:  # `echo` with `logprobs` asks for them, too
        sampling.pop("prompt_logprobs", None)
    sampling.pop("max_tokens", None)
    body = {
        "model": first.model,
        **sampling,
        **_openai_length(first),
        **_shown(first),
        **constraint_fields(first.constraint),
    }
    if choices > 1:
        body["n"] = choices
    if first.endpoint == COMPLETIONS_ENDPOINT:
        body["prompt"] = prompts[0] if len(prompts) == 1 else list(prompts)
        return body if scores is None else body | {"logprobs": scores}
    body |= {"messages": list(first.messages)} if first.messages else {"prompt": first.prompt}
    body |= _templating(first) | _reasoning(first)
    if first.prediction:
        body["prediction"] = {"type": "content", "content": first.prediction}
    return body if scores is None else body | {"logprobs": True, "top_logprobs": scores}


def _openai_length(first: Submitted) -> Body:
    longest = first.sampling.max_tokens
    if first.presentation.prompt_only:
        return {"max_tokens": 0}
    if first.limit:
        return {first.limit: longest}
    if longest == (COMPLETION_TOKENS if first.endpoint == COMPLETIONS_ENDPOINT else None):
        return {}
    return {"n_predict": -1} if longest is None else {"max_tokens": longest}


def _shown(first: Submitted) -> Body:
    shown = first.presentation
    options = {"include_usage": shown.include_usage, "continuous_usage_stats": shown.continuous_usage}
    given = {
        "stream": shown.stream,
        "stream_options": {name: True for name, wanted in options.items() if wanted},
        "return_cached_tokens_details": shown.cache_details,
        "return_token_ids": shown.token_ids,
        "return_tokens_as_token_ids": shown.tokens_as_ids,
        "echo": shown.echo,
        "truncation_side": first.truncation_side if first.truncation_side != "left" else "",
        "priority": first.priority,
    }
    others = {"add_special_tokens": first.add_special_tokens, "truncate_prompt_tokens": first.truncate_prompt_tokens}
    others |= {name: first.labels.get(name) for name in fields.LABELS}
    return {name: value for name, value in given.items() if value} | _set(others)


def _templating(first: Submitted) -> Body:
    templating = first.templating
    body: Body = {}
    if templating.continue_final_message:
        body["continue_final_message"] = True
    elif not templating.add_generation_prompt:
        body["add_generation_prompt"] = False
    if templating.tools:
        body |= {"tools": list(templating.tools), **call_fields(first.calls)}
    return body | ({"chat_template_kwargs": templating.variables} if templating.variables else {})


def _reasoning(first: Submitted) -> Body:
    budget = {} if first.thinking_budget is None else {"thinking_token_budget": first.thinking_budget}
    match first.presentation.reasoning:
        case "hidden":
            return budget | {"include_reasoning": False}
        case "inline":
            return budget | {"separate_reasoning": False}
        case "apart":
            return budget


def _sglang_body(first: Submitted, prompts: Sequence[str | list[int]], choices: int) -> Body:
    shown, sampling = first.presentation, _sampling(first.sampling)
    scores, of_prompt = first.sampling.logprobs, first.sampling.prompt_logprobs
    params = {name: value for name, value in sampling.items() if name in SamplingFields.model_fields}
    params |= {"sampling_seed": first.sampling.seed, "n": choices, **constraint_fields(first.constraint, WITHIN)}
    if shown.prompt_only:
        params["max_new_tokens"] = 0
    elif first.limit or first.sampling.max_tokens != NEW_TOKENS:
        params["max_new_tokens"] = first.sampling.max_tokens
    params |= {"min_new_tokens": first.sampling.min_tokens} if first.sampling.min_tokens else {}
    params |= {"no_stop_trim": True} if first.sampling.include_stop_str_in_output else {}
    body: Body = {"model": first.model, "sampling_params": params}
    body["text" if isinstance(prompts[0], str) else "input_ids"] = list(prompts) if shown.in_list else prompts[0]
    asked = {"stream": shown.stream, "return_logprob": scores is not None, "return_text_in_logprobs": shown.score_texts}
    body |= {name: True for name, wanted in asked.items() if wanted}
    return body | _set(
        {"top_logprobs_num": scores or None, "logprob_start_len": None if of_prompt is None else shown.scores_from}
    )


def _sampling(sampling: SamplingParams) -> Body:
    """Return the parameters that differ from their defaults, and those whose defaults the model may change."""
    said: Body = sampling.model_dump(mode="json", exclude_defaults=True)
    said |= {name: getattr(sampling, name) for name in RECOMMENDED} | {"seed": sampling.seed}
    if sampling.logit_bias:
        said["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return said


def _set(given: Body) -> Body:
    return {name: value for name, value in given.items() if value is not None}
