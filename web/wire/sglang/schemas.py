"""The bodies of POST /generate, in Mini-SGLang's form (`prompt`) and SGLang's form (`text` or `input_ids`), and of POST
/abort_request. As strict as `web.wire.openai.schemas`: unsupported fields that would change the output return 400.
"""

from __future__ import annotations

import dataclasses
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError

from pipeline.errors import RequestError
from pipeline.events import MOST_LOGPROBS
from web.wire import fields
from web.wire.openai.bulk import refuse_bulk
from web.wire.openai.schemas import (
    MOST_ANSWERS,
    PROMPT_KINDS,
    ListsOfIds,
    SamplingFields,
    Text,
    Texts,
    TokenIds,
    lists_or_one,
    refuse_copies,
    texts_or_one,
)
from web.wire.openai.strict import (
    INT32_MAX,
    INT64_MAX,
    WHOLE,
    Strict,
    first_of,
    parsed,
    refusal,
    refuse_unsupported,
    wrong,
)

TEXT_TOKENS: Final = 16
"""The default of `max_tokens` in Mini-SGLang's form."""
NEW_TOKENS: Final = 128
"""SGLang's default of `max_new_tokens`."""
MOST_RID: Final = 256
WITHIN: Final = "sampling_params."
"""Prefix of the names of its fields."""


class TextRequest(Strict):
    """Mini-SGLang's form of POST /generate: greedy sampling, streamed as plain text."""

    prompt: Text
    """The text that the model continues."""
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX), WHOLE] | None = None
    """Maximum number of output tokens. Without it: 16."""
    ignore_eos: bool | None = None
    """Continues after an end-of-sequence token."""
    model: str | None = None
    """Name of the model. Without it: the served model."""

    @property
    def longest(self) -> int:
        return TEXT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted."""
        return fields.first_of(set(self.extra) - set(_NOT_BESIDE_PROMPT))


class SGLangSampling(SamplingFields):
    """SGLang's `sampling_params`."""

    max_new_tokens: Annotated[int, Field(ge=0, le=INT64_MAX), WHOLE] | None = None
    """Maximum number of output tokens. Without it: 128. 0 returns only the fields about the prompt."""
    min_new_tokens: Annotated[int, Field(ge=0, le=INT64_MAX), WHOLE] | None = None
    """Minimum number of output tokens before any stop condition applies."""
    sampling_seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] | None = None
    """The same seed gives the same answer. -1 draws one, as without a seed."""
    no_stop_trim: bool | None = None
    """Keeps the stop text, or the text of the stop token, at the end of the answer."""

    @property
    def longest(self) -> int:
        return NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens


class SGLangRequest(Strict):
    """SGLang's form of POST /generate."""

    text: (
        Annotated[
            Annotated[Text, Tag(PROMPT_KINDS[0])] | Annotated[Texts, Tag(PROMPT_KINDS[1])],
            Discriminator(texts_or_one),
        ]
        | None
    ) = None
    """The text that the model continues, or several."""
    input_ids: (
        Annotated[
            Annotated[TokenIds, Tag(PROMPT_KINDS[2])] | Annotated[ListsOfIds, Tag(PROMPT_KINDS[3])],
            Discriminator(lists_or_one),
        ]
        | None
    ) = None
    """In place of `text`: token ids, or several lists of them."""
    sampling_params: SGLangSampling | None = None
    """How tokens are chosen, where the answer ends, and what it must be."""
    stream: bool | None = None
    """Sends the answer as server-sent events while it is generated."""
    return_logprob: bool | None = None
    """Log-probability of each token, from the model's own logits."""
    logprob_start_len: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Log-probabilities from this token of the prompt on. -1: only of the answer."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    """Number of alternatives shown for each token. Needs `return_logprob`."""
    return_text_in_logprobs: bool | None = None
    """Log-probabilities also have the text of each token."""
    model: str | None = None
    """Name of the model. Without it: the served model."""

    @property
    def sampling(self) -> SGLangSampling:
        return self.sampling_params or SGLangSampling()

    @property
    def num_choices(self) -> int:
        return self.sampling.num_choices

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        match self.input_ids if self.text is None else self.text:
            case str() | [int(), *_] as prompt:
                return [prompt]  # type: ignore[list-item]
            case prompts:
                return prompts  # type: ignore[return-value]

    @property
    def in_list(self) -> bool:
        """Return whether the answer is a list: also if the only prompt is in a list."""
        return self.num_choices > 1 or isinstance(self.text, list) or lists_or_one(self.input_ids) == PROMPT_KINDS[3]

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted."""
        names = set(self.extra) - set(_REFUSED)
        of_sampling = set(self.sampling.extra) - set(_REFUSED_IN_SAMPLING) | self.sampling.unknown_members
        names |= {f"{WITHIN}{name}" for name in of_sampling}
        return fields.first_of(names)

    @property
    def ignored(self) -> tuple[str, ...]:
        return fields.first_of(list(self.sampling.ignored_keywords(WITHIN)))


class AbortRequest(Strict):
    """The body of POST /abort_request."""

    rid: Annotated[str, Field(max_length=MOST_RID)] | None = None
    """Uid of the request, or id of its answer."""
    abort_all: bool | None = None
    """Cancels all requests. Needs the admin key, if there are keys."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted."""
        return fields.first_of(set(self.extra) - set(_REFUSED_IN_ABORT))


_NEUTRAL_BESIDE_PROMPT: Final[Mapping[str, fields.Neutrals]] = {"stream": (True,), "temperature": (0,)}
"""Values that Mini-SGLang's form has anyway: it is greedy, and always a stream."""
_SAMPLING_TOO: Final = "`text` and `sampling_params`"
_NOT_BESIDE_PROMPT: Final[Mapping[str, fields.Field]] = {
    name: dataclasses.replace(field, neutral=_NEUTRAL_BESIDE_PROMPT.get(name, field.neutral), instead=_SAMPLING_TOO)
    for name, field in fields.refused("generate", TextRequest.model_fields).items()
}
_REFUSED: Final = fields.refused("generate", SGLangRequest.model_fields)
_REFUSED_IN_SAMPLING: Final = fields.refused("generate", SGLangSampling.model_fields)
_REFUSED_IN_ABORT: Final = fields.refused("abort", AbortRequest.model_fields)

_TEXT_FORM: Final = "Mini-SGLang's"
_SGLANG_FORM: Final = "SGLang's"


def _form(body: object) -> str:
    """Return which form a body has, so that an error is about that form alone."""
    given = {name for name, value in body.items() if value is not None} if isinstance(body, dict) else set()
    return _TEXT_FORM if "prompt" in given and not given & {"text", "input_ids"} else _SGLANG_FORM


_FORMS: Final[TypeAdapter[TextRequest | SGLangRequest]] = TypeAdapter(
    Annotated[
        Annotated[TextRequest, Tag(_TEXT_FORM)] | Annotated[SGLangRequest, Tag(_SGLANG_FORM)], Discriminator(_form)
    ]
)


def parse_generate(body: bytes) -> TextRequest | SGLangRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    body = body.removeprefix(BOM_UTF8)
    refuse_bulk(body)
    try:
        request = _FORMS.validate_json(body)
    except ValidationError as error:
        first = first_of(error)
        first["loc"] = first["loc"][1:]  # without the form
        raise refusal(first) from None
    if request.extra.get("rid") is not None:
        message = "rid: the server chooses the id; read it from `meta_info.id` or the header x-minisgl-uid"
        raise RequestError(message, code="unsupported_parameter", param="rid")
    if isinstance(request, TextRequest):
        refuse_unsupported(request.extra, _NOT_BESIDE_PROMPT, "")
    else:
        _check(request, len(body))
    return request


def parse_abort(body: bytes) -> AbortRequest:
    """As `parse_generate`."""
    request = parsed(AbortRequest, body)
    refuse_unsupported(request.extra, _REFUSED_IN_ABORT, "")
    if not request.rid and not request.abort_all:
        raise wrong("rid", "missing; send the id of a request, or `abort_all: true`")
    return request


def _check(request: SGLangRequest, num_bytes: int) -> None:
    """Check fields against each other. Raises RequestError."""
    own, sampling = SGLangRequest.model_fields, SGLangSampling.model_fields  # pydantic makes them at each look
    for name, value in request.extra.items():
        if name in sampling and value is not None:
            message = f"{name}: belongs in `sampling_params`"
            raise RequestError(message, code="unsupported_parameter", param=name)
    for name, value in request.sampling.extra.items():
        if name in own and value is not None:
            param = f"sampling_params.{name}"
            raise RequestError(f"{param}: belongs beside `sampling_params`", code="unsupported_parameter", param=param)
    given = [name for name in ("text", "input_ids") if getattr(request, name) is not None]
    if len(given) == 2:
        raise wrong("input_ids", "not together with `text`; send one of them")
    if given and request.extra.get("prompt") is not None:
        raise wrong("prompt", f"not together with `{given[0]}`; send one of them")
    if not given:
        raise wrong("text", "missing; send a text or several, or `input_ids`, or `prompt`")
    refuse_unsupported(request.extra, _REFUSED, "")
    refuse_unsupported(request.sampling.extra, _REFUSED_IN_SAMPLING, "sampling_params.")
    if not request.return_logprob:
        for name, neutral in (("logprob_start_len", -1), ("top_logprobs_num", 0)):
            if getattr(request, name) not in (None, neutral):
                raise wrong(name, "only allowed with `return_logprob: true`")
    least, longest = request.sampling.min_new_tokens or 0, request.sampling.longest
    if least > longest:
        message = f"{least} is above max_new_tokens ({longest}); raise max_new_tokens"
        raise wrong("sampling_params.min_new_tokens", message)
    request.sampling.constraint(WITHIN)  # whether its fields go together
    num_answers = len(request.prompts) * request.num_choices
    if num_answers > MOST_ANSWERS:
        raise wrong(given[0], f"with `n` these are {num_answers} answers; at most {MOST_ANSWERS}")
    repeats = request.logprob_start_len not in (None, -1)
    param = "sampling_params.n" if request.num_choices > 1 else given[0]
    refuse_copies(request.sampling, num_bytes, num_answers, repeats=repeats, param=param)
