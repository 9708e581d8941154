"""The vocabulary: every event that the log can hold, and what they carry. Knows nothing of Redis.

An event is stored as the fields of its stream entry, under its own names; only nested values are JSON. Fields that have
their default are left out, lists of numbers have commas and no brackets. `v` is the version of an event, for readers of
old logs; there is one version so far.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.errors import UndecodableEvent

FinishReason = Literal["stop", "length"]
TokenId = Annotated[int, Field(ge=0)]
Task = Literal["generate", "tokenize", "detokenize", "describe"]
MOST_LOGPROBS = 20
"""OpenAI's bound of `top_logprobs`."""


class Value(BaseModel):
    """A frozen value whose unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SamplingParams(Value):
    """How tokens are chosen and when to stop. The seed is drawn before submit, so that a replay can repeat it."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy, whatever top_p, top_k, min_p and seed say."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)
    """None: the rest of the served context."""
    min_tokens: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from the logit of each token that the output has (OpenAI's formula)."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """The same, times how often the output has it."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Divides the logit of each token that prompt or output have, or multiplies it where it is negative (CTRL, Keskar
    et al. 2019)."""
    logit_bias: tuple[tuple[TokenId, Annotated[float, Field(ge=-100, le=100)]], ...] = ()
    """(token id, what is added to its logit)."""
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Nothing else comes out; empty: all."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not come out; as token ids in Tokenized."""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """How many tokens beside the chosen one are told with their log-probability; None: not even that one's."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """The same for each token of the prompt but the first; no cached page is read then."""
    include_stop_str_in_output: bool = False
    """What ended the answer, a stop string or the text of a stop token, is part of it."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""

    @property
    def penalizes(self) -> bool:
        """Whether what came before changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def shapes(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.penalizes or bool(self.logit_bias or self.allowed_token_ids)


class Usage(Value):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """How many prompt tokens were found in the prefix cache."""


class Timings(Value):
    """Milliseconds since submit, by Redis' clock."""

    admitted_ms: int
    first_token_ms: int
    total_ms: int


class Score(Value):
    """How probable the model found a token: of its own logits, before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens and their log-probabilities, the most probable one first."""


class ToldToken(Value):
    """A token as clients are told of it."""

    token: int
    text: str
    """Where its bytes are no UTF-8: `bytes:` and each as `\\x..`, as OpenAI writes it."""


class ToldCandidate(ToldToken):
    """A token that was more or less probable in its place."""

    logprob: float


class ToldScore(ToldCandidate):
    """A token of prompt or answer, and the most probable ones in its place."""

    top: tuple[ToldCandidate, ...] = ()


class ToldPrompt(Value):
    """What a client asked to be told of its prompt."""

    num_tokens: int
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """Where it asked for them."""
    text: str = ""
    """Where it asked for its prompt before the answer (`echo`)."""
    scores: tuple[ToldScore, ...] = ()
    """Of all tokens but the first, where it asked for them."""
    first: ToldToken | None = None
    """The first token, which has no score, beside the others."""


class Templating(Value):
    """What a chat template is given beside the messages."""

    add_generation_prompt: bool = True
    """Whether the template opens an answer after the last message."""
    continue_final_message: bool = False
    """The last message is the beginning of the answer, and is not closed."""
    tools: tuple[dict[str, Any], ...] = ()
    variables: dict[str, Any] = Field(default_factory=dict)
    """The client's own (`chat_template_kwargs`)."""


class Presentation(Value):
    """How the answer is shown to its client. Changes nothing in it, but who reads it later gets the same frames."""

    stream: bool = False
    include_usage: bool = False
    """The last chunk has the token counts."""
    continuous_usage: bool = False
    """And so has every other."""
    token_ids: bool = False
    """Token ids are sent beside the text."""
    echo: bool = False
    """The prompt is sent before the answer."""
    prompt_scores: bool = False
    """The log-probabilities of the prompt are sent beside the answer."""
    prompt_only: bool = False
    """Nothing but the prompt is sent: the client asked for no token, and one was made."""
    whole_text: bool = False
    """Each frame has all text so far, as SGLang sends it."""
    in_list: bool = False
    """The answer is an item of a list, also where it is the only one."""
    scores_from: int = 0
    """The log-probabilities of the prompt are sent from this token on."""
    score_texts: bool = False
    """Beside a log-probability that is told by token id is the text of its token."""
    choices: int = 1
    """How many of the siblings belong to each prompt."""

    @property
    def tells_prompt(self) -> bool:
        """Whether the client is told something of its prompt with the first token."""
        return self.continuous_usage or self.token_ids or self.echo


class Event(Value):
    """What every event has: a version, and when it was committed (milliseconds, Redis' clock; 0 before the commit).

    The first version is not written: it would take 2 bytes of each token that a history holds.
    """

    v: Literal[1] = 1
    ms: int = 0


class Submitted(Event):
    """A request was accepted. History `0-1`. It has one of `messages` (through the chat template), `prompt` (text as it
    is) and `prompt_ids` (tokens as they are).

    Several that were submitted together, all or none, have the uids `<uid>.0`, `<uid>.1` and so on.
    """

    kind: Literal["submitted"] = "submitted"
    endpoint: str
    frontend: str
    """Whose `replies` stream its client listens to."""
    model: str = ""
    """The name that the client used."""
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    task: Task = "generate"
    """All but the first are answered by the tokenizer: the tokens of a prompt, the text of `prompt_ids`, what the
    tokenizer is like."""
    return_pieces: bool = False
    """The tokens of a prompt are answered with their texts."""
    templating: Templating = Templating()
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own, such as the one that begins a text; None: to `prompt`, not to `messages`."""
    truncate_prompt_tokens: int | None = None
    """So many tokens of the prompt are kept, the last ones; -1: as many as the context has room for beside
    `max_tokens`, or beside one token."""
    priority: int = 0
    """Of what an engine holds, the lower runs earlier."""
    siblings: int = 1
    """How many were submitted together, this one included; set by the commit."""
    presentation: Presentation = Presentation()
    deadline_ms: int = 0
    """Redis' clock; set by the commit."""
    labels: dict[str, Any] = Field(default_factory=dict)
    """Fields of the request that change nothing but are kept: user, metadata ..."""


class Tokenized(Event):
    """The prompt as token ids. History `0-2`."""

    kind: Literal["tokenized"] = "tokenized"
    token_ids: tuple[int, ...]
    fingerprint: str
    """Which tokenizer and template made them."""
    by: str
    """The slot of the tokenizer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not come out, from the words of the request."""


class Admitted(Event):
    """An engine gave the request pages and computes it from the next step on."""

    kind: Literal["admitted"] = "admitted"
    engine: str
    epoch: int
    step: int
    fingerprint: str
    """Which weights and dtype compute it."""
    cached_tokens: int = 0


class Preempted(Event):
    """The pages ran out and the least important request, of those the newest, gave its own back; it will be admitted
    again and recomputed."""

    kind: Literal["preempted"] = "preempted"
    engine: str
    epoch: int
    step: int


class TakenOver(Event):
    """Another owner of a slot goes on with the request. Written before anything is computed for it there, so the number
    of them since its last token says how many engines ended that tried to bring it forward."""

    kind: Literal["taken_over"] = "taken_over"
    engine: str
    epoch: int
    alone: bool = False
    """Nothing else is computed until it has another token: to see whether it is this request that kills engines."""


class TokensProduced(Event):
    """`count` tokens, the last of which is number n (n is the first half of the history id). History `n-0`."""

    kind: Literal["tokens"] = "tokens"
    count: int = 1
    tokens: tuple[int, ...]
    text: str
    """What became certain to be shown; empty while a character or a possible stop string is incomplete."""
    step: str
    """`<epoch>-<step>` of the engine."""
    chunks: int = 0
    """In how many prefill chunks the prompt (or, after a preemption, prompt and output) was computed before this
    token; 0 for the token of a decode row."""
    scores: tuple[ToldScore, ...] = ()
    """One for each of `tokens`, where the client asked for them."""
    prompt: ToldPrompt | None = None
    """With the first token, where the client asked to be told of its prompt."""


class Finished(Event):
    """The request ended as it should. Seals the history."""

    kind: Literal["finished"] = "finished"
    n: int
    reason: FinishReason
    stop_string: str = ""
    """The one that was met; empty where a token ended the request, which is the last one then."""
    usage: Usage
    timings: Timings


class Failed(Event):
    """The request ended with an error that its client is told. Seals the history."""

    kind: Literal["failed"] = "failed"
    n: int = 0
    """Set by the commit."""
    status: int
    """The HTTP status for a client that has seen no byte yet."""
    code: str
    message: str
    param: str = ""
    """The field of the request that is at fault, where one is."""


class Cancelled(Event):
    """Somebody ended the request. Seals the history."""

    kind: Literal["cancelled"] = "cancelled"
    n: int = 0
    """Set by the commit."""
    by: str


class Answered(Event):
    """A request that is for the tokenizer alone was answered. Seals the history."""

    kind: Literal["answered"] = "answered"
    n: int = 0
    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    """Each token's text, where the client asked for them."""
    text: str = ""
    by: str
    """The slot of the tokenizer."""


class TokenRow(Value):
    """Row of a step that made token number `n` (the first is 1)."""

    kind: Literal["token"] = "token"
    uid: str
    n: int
    token: int
    end: FinishReason | None = None
    """None: the request goes on."""
    chunks: int = 0
    """As in TokensProduced."""
    score: Score | None = None
    prompt_scores: tuple[Score, ...] | None = None
    """With the first token, where they are wanted: of all tokens of the prompt but the first."""


class EventRow(Value):
    """Row of a step that says something else of a request, when it had `n` tokens."""

    kind: Literal["event"] = "event"
    uid: str
    n: int
    event: Annotated[Admitted | Preempted | TakenOver | Failed, Field(discriminator="kind")]


StepRow: TypeAlias = Annotated[TokenRow | EventRow, Field(discriminator="kind")]


class Figures(Value):
    """What one step was made of, and what the engine held after it."""

    decode_rows: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    forward_ms: float = 0
    """How long the forward pass took. What was admitted to this step was admitted before it."""


class StepCompleted(Event):
    """One forward pass of an engine. Stream `steps:<engine>`, id `<epoch>-<step>`."""

    kind: Literal["step"] = "step"
    rows: tuple[StepRow, ...]
    let_go: tuple[str, ...] = ()
    """Uids that ended elsewhere (cancel, stop string, deadline) and are forgotten now."""
    figures: Figures = Figures()


Mark: TypeAlias = Admitted | Preempted | TakenOver
"""What an engine says of a request beside its tokens; clients do not see it."""
End: TypeAlias = Finished | Failed | Cancelled | Answered
"""What seals a history."""
HistoryEvent: TypeAlias = Submitted | Tokenized | Mark | TokensProduced | End
"""What a history holds."""
AnyEvent: TypeAlias = HistoryEvent | StepCompleted

_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
_BY_KIND: Mapping[str, type[Event]] = {model.model_fields["kind"].default: model for model in get_args(AnyEvent)}


def encode(event: Event) -> dict[str, str]:
    """Return the stream fields of *event*; `ms` is left to the commit, which knows Redis' clock."""
    return as_fields(type(event), as_plain(event))


def as_fields(model: type[Event], plain: Mapping[str, Any]) -> dict[str, str]:
    """Return the stream fields of an event of kind *model* that `as_plain` has made plain."""
    numbers = _number_lists(model)
    fields = {}
    for name, value in plain.items():
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        fields[name] = text[1:-1] if name in numbers else text
    return fields


def as_plain(event: Event) -> dict[str, Any]:
    """Return *event* as plain values without what has its default; the kind is always there."""
    omitted = {"ms"} | {name for name, default in _defaults(type(event)) if getattr(event, name) == default}
    return event.model_dump(mode="json", exclude=omitted, exclude_none=True)


def decode(fields: Mapping[str, str]) -> AnyEvent:
    """Return the event that *fields* hold.

    Raises:
        UndecodableEvent: The fields are of no known kind or break its rules.
    """
    model = _BY_KIND.get(fields.get("kind", ""))
    if model is None:
        raise UndecodableEvent(f"entry of unknown kind {fields.get('kind')!r}; expected one of {sorted(_BY_KIND)}")
    texts, numbers = _text_fields(model), _number_lists(model)
    plain: dict[str, Any] = {}
    try:
        for name, value in fields.items():
            if name in texts:
                plain[name] = value
            else:
                plain[name] = orjson.loads(f"[{value}]" if name in numbers and value[:1] != "[" else value)
        return _ADAPTER.validate_python(plain)
    except (ValidationError, orjson.JSONDecodeError) as error:
        raise UndecodableEvent(f"a {fields.get('kind')} entry does not decode: {error}") from error


@functools.cache
def _defaults(model: type[Event]) -> tuple[tuple[str, Any], ...]:
    """Return the fields that are left out where they have their default, and those; looked up once, not per token."""
    return tuple(
        (name, field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
        if name not in ("kind", "ms") and not field.is_required()
    )


@functools.cache
def _number_lists(model: type[Event]) -> frozenset[str]:
    """Return the fields that hold whole numbers: stored with commas, without JSON's brackets.

    A single one is a number to Redis then, which takes half the bytes: most entries of a history hold one token.
    """
    return frozenset(name for name, field in model.model_fields.items() if field.annotation == tuple[int, ...])


@functools.cache
def _text_fields(model: type[Event]) -> frozenset[str]:
    """Return the fields that are stored as they are; all others are JSON."""
    return frozenset(name for name, field in model.model_fields.items() if _is_text(field.annotation))


def _is_text(annotation: Any) -> bool:
    """Say whether it is text, or one of several words."""
    words = get_args(annotation)
    return annotation is str or (bool(words) and all(isinstance(word, str) for word in words))


def new_uid() -> str:
    """Return 32 hex digits that sort by time: a UUID version 7 (RFC 9562, 5.7)."""
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"
