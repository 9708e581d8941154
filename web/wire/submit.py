"""Turns a request into `Submitted` events, which hold all of it: the seed too, so that a replay repeats it.

Also says what is strange about a request that is taken all the same, for a response header.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from urllib.parse import quote

from pydantic_core import from_json

from pipeline.events import Presentation, SamplingParams, Submitted
from pipeline.scored import pairs_told, too_many
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT
from web.wire.fields import MOST_SHOWN
from web.wire.openai.messages import plain_messages, templating_of
from web.wire.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest, SamplingFields
from web.wire.sglang.schemas import WITHIN, SGLangRequest, TextRequest

Defaults = Mapping[str, int | float]
"""The sampling parameters that a model recommends, by the names of SamplingParams."""


def chat_events(request: ChatRequest, *, frontend: str, model: str, defaults: Defaults) -> list[Submitted]:
    """Return the events of *request*, one for each choice. *frontend* listens for the answers; *model* is the served
    name, *defaults* are the sampling parameters that it recommends.
    """
    common = {
        "messages": plain_messages(request.messages or ()),
        "prompt": request.prompt or "",
        "templating": templating_of(
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            tools=request.tools,
            variables=request.variables,
        ),
        "calls": request.calls,
        "thinking_budget": request.thinking_budget_tokens,
        "prediction": request.prediction.text if request.prediction is not None else "",
    }
    request_fields = _common(request, CHAT_ENDPOINT, frontend, model) | common
    sampling = _sampling(request, defaults)
    presentation = _presentation(request).model_copy(update={"reasoning": request.reasoning_shown})
    return _choices(request_fields, sampling, presentation, request.num_choices, [{}])


def completion_events(request: CompletionRequest, *, frontend: str, model: str, defaults: Defaults) -> list[Submitted]:
    """Return the events of *request*, one for each choice of each prompt; those of the first prompt come first."""
    sampling = _sampling(request, defaults)
    prompt_only = request.longest == 0
    if prompt_only:
        sampling = sampling.model_copy(update={"max_tokens": 1, "min_tokens": 0})
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        sampling = sampling.model_copy(update={"prompt_logprobs": request.logprobs})
    presentation = _presentation(request).model_copy(update={"echo": bool(request.echo), "prompt_only": prompt_only})
    request_fields = _common(request, COMPLETIONS_ENDPOINT, frontend, model)
    return _choices(request_fields, sampling, presentation, request.num_choices, _prompts(request.prompts))


def generate_events(
    request: TextRequest | SGLangRequest, *, frontend: str, model: str, defaults: Defaults
) -> list[Submitted]:
    """Return the events of *request*: for SGLang's form as `completion_events`, for Mini-SGLang's form one."""
    said: dict[str, Any] = {"endpoint": GENERATE_ENDPOINT, "frontend": frontend, "model": model}
    if isinstance(request, TextRequest):
        greedy = SamplingParams(temperature=0, max_tokens=request.longest, ignore_eos=bool(request.ignore_eos))
        said["limit"] = "" if request.max_tokens is None else "max_tokens"
        return [Submitted(**said, prompt=request.prompt, sampling=greedy, presentation=Presentation(stream=True))]
    said["constraint"] = request.sampling.constraint(WITHIN)
    if request.sampling.max_new_tokens:
        said["limit"] = "sampling_params.max_new_tokens"
    presentation = Presentation(
        stream=bool(request.stream),
        continuous_usage=True,
        whole_text=True,
        in_list=request.in_list,
        prompt_only=request.sampling.longest == 0,
        scores_from=max(request.logprob_start_len or 0, 0),
        score_texts=bool(request.return_text_in_logprobs),
    )
    return _choices(
        said, _sglang_sampling(request, defaults), presentation, request.num_choices, _prompts(request.prompts)
    )


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of a choice: the client's own for the first, one derived from it for the others."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, choice), digest_size=8).digest(), "big", signed=True)


def _prompts(prompts: Sequence[str | list[int]]) -> list[Mapping[str, Any]]:
    return [{"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": tuple(prompt)} for prompt in prompts]


def _choices(
    said: Mapping[str, Any],
    sampling: SamplingParams,
    presentation: Presentation,
    num_choices: int,
    prompts: list[Mapping[str, Any]],
) -> list[Submitted]:
    """Return the requests of one body. Of the choices of a prompt, the first one has its log-probabilities.

    Raises:
        RequestError: The answers would tell too many of them. Prompts that are texts are counted by the tokenizer.
    """
    others = {"prompt_logprobs": None}
    seeded = [
        sampling.model_copy(update={"seed": seed_of(sampling.seed, choice), **(others if choice else {})})
        for choice in range(num_choices)
    ]
    siblings = num_choices * len(prompts)
    shown = presentation.model_copy(update={"choices": num_choices})
    alike = Submitted(**said, **prompts[0], siblings=siblings, sampling=sampling, presentation=shown)
    firsts = [alike.model_copy(update=prompt) for prompt in prompts]  # it is checked once
    if error := too_many(sum(pairs_told(first, _num_kept(first)) for first in firsts), firsts[0]):
        raise error
    return [first.model_copy(update={"sampling": each}) for first in firsts for each in seeded]


def _num_kept(event: Submitted) -> int:
    """Return how many token ids of a prompt are kept; 0 if only the tokenizer knows."""
    most = event.truncate_prompt_tokens
    return min(len(event.prompt_ids), most or len(event.prompt_ids)) if most != -1 else 0


def _common(request: GenerationRequest, endpoint: str, frontend: str, model: str) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "frontend": frontend,
        "model": model,
        "add_special_tokens": request.add_special_tokens,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "truncation_side": request.truncation_side or "left",
        "limit": request.limit if request.longest else "",
        "priority": request.priority or 0,
        "constraint": request.constraint(),
        "labels": request.labels,
    }


def _presentation(request: GenerationRequest) -> Presentation:
    options = request.stream_options
    include_usage = options is not None and bool(options.include_usage)
    return Presentation(
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
        cache_details=bool(request.return_cached_tokens_details),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prompt_scores=request.prompt_logprobs is not None,
    )


def _sampling(request: GenerationRequest, defaults: Defaults) -> SamplingParams:
    penalty = request.repeat_penalty if request.repetition_penalty is None else request.repetition_penalty
    own = {
        "max_tokens": request.longest or None,
        "logprobs": request.num_logprobs,
        "repetition_penalty": penalty,
    }
    return sampling_params(request, request.seed, own, defaults)


def _sglang_sampling(request: SGLangRequest, defaults: Defaults) -> SamplingParams:
    asked = request.sampling
    scores = (request.top_logprobs_num or 0) if request.return_logprob else None
    tells_prompt = request.logprob_start_len not in (None, -1)
    own = {
        "max_tokens": max(asked.longest, 1),
        "min_tokens": asked.min_new_tokens,
        "logprobs": scores,
        "prompt_logprobs": scores if tells_prompt else None,
        "include_stop_str_in_output": asked.no_stop_trim,
    }
    return sampling_params(asked, asked.sampling_seed, own, defaults)


def sampling_params(
    asked: SamplingFields, seed: int | None, own: Mapping[str, Any], defaults: Defaults
) -> SamplingParams:
    """Return the fields of *asked* that SamplingParams has, too, and those that an endpoint names its *own* way."""
    bias = asked.logit_bias
    params = asked.model_dump(include=set(SamplingParams.model_fields)) | {
        "top_k": None if asked.top_k is None else max(asked.top_k, 0),
        "seed": secrets.randbelow(2**63) if seed in (None, -1) else seed,
        "logit_bias": None if bias is None else tuple((int(token), value) for token, value in bias.items()),
        **own,
    }
    if asked.top_p == 0:
        params |= {"top_p": None, "temperature": 0.0}
    given = {name: value for name, value in params.items() if value is not None}
    return SamplingParams.model_validate({**defaults, **given})


WARNINGS: Final = "x-minisgl-warnings"
LONGEST_PLACE: Final = 128
"""Most characters of a place in a schema that a warning names."""


def warnings_of(events: Sequence[Submitted], bos: str, ignored: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the first warnings about the requests of one body, as `<code>=<field>`.

    *bos*: the text of the token that the tokenizer puts before a prompt; "" if it puts none. *ignored*: the keywords of
    schemas whose numbers no grammar can count.
    """
    found = [f"invalid_arguments={path}" for path in islice(_invalid_arguments(events[0]), MOST_SHOWN)]
    if any(_begins_twice(event, bos) for event in events):
        found.append("double_bos=prompt")
    found += [f"ignored_keyword={quote(place, safe='$[]')[:LONGEST_PLACE]}" for place in ignored[:MOST_SHOWN]]
    return tuple(found[:MOST_SHOWN])


def _invalid_arguments(event: Submitted) -> Iterator[str]:
    """Yield the path of each tool call whose arguments are no JSON object. No arguments are an empty object."""
    for place, message in enumerate(event.messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            text = call["function"]["arguments"]
            if text and not _is_object(text):
                yield f"messages.{place}.tool_calls.{number}.function.arguments"


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False


def _begins_twice(event: Submitted, bos: str) -> bool:
    """Return whether a prompt begins with the text of the token that the tokenizer puts before it."""
    return bool(bos) and event.add_special_tokens is not False and event.prompt.startswith(bos)
