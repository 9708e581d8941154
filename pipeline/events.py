"""The vocabulary: every event that the log can hold, and its fields. Knows nothing of Redis.

An event is stored as the fields of its stream entry, under its own names; only nested values are JSON. Fields with
their default value are left out. Lists of numbers have commas and no brackets. `v` is the version of an event, for
readers of old logs. Version 2 may have texts elsewhere (`pipeline.log.shared`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import orjson
from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from pipeline.errors import UndecodableEvent
from pipeline.markup import Calls as Calls
from pipeline.markup import Markup as Markup
from pipeline.names import check_readable
from pipeline.names import new_uid as new_uid
from pipeline.sampling import MOST_LOGPROBS as MOST_LOGPROBS
from pipeline.sampling import Constraint as Constraint
from pipeline.sampling import SamplingParams as SamplingParams
from pipeline.sampling import Value as Value
from pipeline.scores import Logprob as Logprob
from pipeline.scores import Logprobs as Logprobs
from pipeline.scores import PromptInfo as PromptInfo
from pipeline.scores import Score as Score
from pipeline.scores import Scores as Scores
from pipeline.scores import TokenText as TokenText
from pipeline.scores import TopLogprob as TopLogprob

MOST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, in ms since 1970. A later time has no date."""
MOST_COUNT: Final = 2**53 - 1
"""The largest number that JavaScript reads exactly."""
Moment = Annotated[int, Field(ge=0, le=MOST_MS)]
Span = Annotated[int, Field(ge=-MOST_MS, le=MOST_MS)]
"""Milliseconds between two times. Negative if a clock was set back."""
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
NumberOfId = Annotated[int, Field(ge=0, lt=2**64)]
"""Any number that a stream id can have: a commit reads it from a history, whatever was written there."""


FinishReason = Literal["stop", "length"]
Task = Literal["generate", "tokenize", "detokenize", "describe"]


class Usage(Value):
    """Token counts of one request."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    """Prompt tokens that were found in the prefix cache."""
    accepted_prediction_tokens: Count | None = None
    """Tokens of the client's prediction that were drafted, and were right; None: it sent none."""
    rejected_prediction_tokens: Count | None = None
    """Tokens of the client's prediction that were drafted, and were wrong; None: it sent none."""


class Timings(Value):
    """Milliseconds since submit, by Redis' clock."""

    admitted_ms: Span
    first_token_ms: Span
    total_ms: Span


class Templating(Value):
    """Arguments of a chat template besides the messages."""

    add_generation_prompt: bool = True
    """Whether the template opens an answer after the last message."""
    continue_final_message: bool = False
    """Whether the last message is the beginning of the answer and stays open."""
    tools: tuple[dict[str, Any], ...] = ()
    variables: dict[str, Any] = Field(default_factory=dict)
    """The client's own variables (`chat_template_kwargs`)."""


class Presentation(Value):
    """How the answer is shown to its client. It does not change the answer, but later readers get the same frames."""

    stream: bool = False
    include_usage: bool = False
    """Whether the last chunk has the token counts."""
    continuous_usage: bool = False
    """Whether every other chunk has them, too."""
    cache_details: bool = False
    """Whether the answer says where its cached tokens were, as SGLang's does."""
    token_ids: bool = False
    """Whether token ids are sent with the text."""
    echo: bool = False
    """Whether the prompt is sent before the answer."""
    prompt_scores: bool = False
    """Whether the log-probabilities of the prompt are sent with the answer."""
    prompt_only: bool = False
    """Whether only the prompt is sent: the client asked for no tokens, and one was made."""
    whole_text: bool = False
    """Whether each frame has all text so far, as SGLang's have."""
    in_list: bool = False
    """Whether the answer is an item of a list, even if it is the only one."""
    scores_from: int = 0
    """First token of the prompt whose log-probability is sent."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name a token by its id instead of its text."""
    score_texts: bool = False
    """Whether log-probabilities by token id have the text of the token, too."""
    choices: int = 1
    """Number of siblings for each prompt."""
    reasoning: Literal["apart", "inline", "hidden"] = "apart"
    """How thinking is sent: in fields of its own, within the content with its markers, or not at all."""
    omits_thoughts: bool = False
    """Whether blocks of thinking come with a signature alone, as Anthropic's API has it."""
    echoes: dict[str, Any] = Field(default_factory=dict)
    """Fields of the request that the response repeats, as OpenAI's Responses API has it."""

    @property
    def tells_prompt(self) -> bool:
        """Whether the first token's event has what the client asks of its prompt."""
        return self.continuous_usage or self.token_ids or self.echo


class Replay(Value):
    """The special fields of a request that computes a recorded one again. Its `prompt_ids` are the recorded ones."""

    of: str
    """Uid of the recorded request."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """See the recorded Tokenized. The texts in the sampling parameters are not encoded again."""
    grammar: str = ""
    """See the recorded Tokenized."""
    markup: Markup = Markup()
    """See the recorded Tokenized."""
    cached: bool = False
    """Whether it may read pages of the prefix cache. If not, its whole prompt is computed."""


LONGEST_USER: Final = 64
"""Most characters of a `user` that `Submitted.turn` has; of a longer one it has the hash."""
INFORMATIVE: Final = frozenset(
    {
        *("Presentation.omits_thoughts", "Presentation.echoes", "StepStats.target_ms"),
        *("Submitted.background", "Submitted.stored", "Submitted.prediction", "Tokenized.prediction"),
        *("Submitted.weight", "Submitted.overtakes", "Admitted.prompt_tokens"),
        *("TokenRow.drafted", "TokenRow.accepted", "TokenRow.predicted", "StepStats.drafts"),
        *("TokensProduced.drafted", "TokensProduced.accepted", "TokensProduced.predicted"),
        *("Usage.accepted_prediction_tokens", "Usage.rejected_prediction_tokens"),
    }
)
"""Fields that were added after 0.2.0 and change no answer, as `Class.field`. Older workers ignore them. An event with
any other new field needs a higher `v`: older workers then leave the whole entry to newer ones."""


class Event(Value):
    """The fields of every event: a version, and the time of its commit (ms of Redis' clock; 0 before the commit).
    Version 1 is not written: it would take 2 bytes for each token in a history.
    """

    v: Literal[1, 2] = 1
    ms: Moment = 0


class Submitted(Event):
    """A request was accepted. History `0-1`. It has one of `messages` (for the chat template), `prompt` (text) and
    `prompt_ids` (tokens).

    Requests that were submitted together, all or none, have the uids `<uid>.0`, `<uid>.1` and so on.
    """

    kind: Literal["submitted"] = "submitted"
    endpoint: str
    frontend: str
    """Frontend whose `replies` stream serves the client."""
    owner: str = ""
    """Name or hash of the API key that sent it; "" for the admin key, or if the server has no keys."""
    model: str = ""
    """Name of the model that the client used."""
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    constraint: Constraint | None = None
    """Constraint on the answer."""
    calls: Calls | None = None
    """The client's settings for tool calls; None: it sent no tools."""
    thinking_budget: int | None = None
    """Largest number of thinking tokens."""
    prediction: str = ""
    """What the client expects as answer. It changes no token."""
    task: Task = "generate"
    """The tokenizer answers all but the first: with a prompt's tokens, the text of `prompt_ids`, its description."""
    return_pieces: bool = False
    """Whether the answer to `tokenize` has each token as the vocabulary writes it."""
    templating: Templating = Templating()
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens, as at the start of a text; None: to `prompt`, not to `messages`."""
    truncate_prompt_tokens: int | None = None
    """Number of the prompt's tokens that are kept. -1: as many as the context holds besides `max_tokens`, or besides
    one token."""
    truncation_side: Literal["left", "right"] = "left"
    """Side of the prompt on which tokens are dropped."""
    limit: str = ""
    """The client's field for `max_tokens`, if it set one. Then the request fails unless the prompt and that many tokens
    fit into the context. Otherwise the answer ends where the context does."""
    priority: int = 0
    """Among the requests of its owner, a lower one runs first .."""
    overtakes: bool = False
    """.. and with this, among those of all owners."""
    weight: Annotated[int, Field(ge=1, le=MOST_COUNT)] = 1
    """Share of its owner where requests wait, against the weights of others."""
    siblings: int = 1
    """Number of requests that were submitted together, including this one; set by the commit."""
    presentation: Presentation = Presentation()
    deadline_ms: Moment = 0
    """Time of Redis' clock; set by the commit."""
    background: bool = False
    """Whether it goes on without a client: `frontend` is empty, and it has a deadline of its own."""
    stored: bool = False
    """Whether its client may read it for long: its history is kept for `--response-retention`, not `--retention`."""
    labels: dict[str, Any] = Field(default_factory=dict)
    """Fields of the request that have no effect but are kept: user, metadata .."""
    replay: Replay | None = None
    """Set if it computes a recorded request again."""

    @property
    def turn(self) -> str:
        """Whose turn it is when it runs: its owner, or the `user` that a client without a key names."""
        user = self.labels.get("user")
        if self.owner or not user or not isinstance(user, str):
            return self.owner
        return f"~{user}" if len(user) <= LONGEST_USER else f"~{sha256(user.encode()).hexdigest()}"


class Tokenized(Event):
    """The prompt as token ids. History `0-2`."""

    kind: Literal["tokenized"] = "tokenized"
    token_ids: tuple[int, ...]
    fingerprint: str
    """Fingerprint of the tokenizer and the template."""
    by: str
    """Slot of the tokenizer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not have."""
    grammar: str = ""
    """Lark grammar with llguidance's additions that the output must follow; empty: none."""
    grammar_param: str = ""
    """Field of the request that asked for the grammar."""
    markup: Markup = Markup()
    """How to read the text of the answer."""
    prediction: tuple[int, ...] = ()
    """What the client expects as output."""


class Admitted(Event):
    """An engine allocated pages for the request and will compute it from the next step on."""

    kind: Literal["admitted"] = "admitted"
    engine: str
    epoch: Count
    step: Count
    fingerprint: str
    """Fingerprint of the weights and the model's config; if `numerics` is empty, of the dtype as well."""
    numerics: str = ""
    """How the engine computes with them, such as `bfloat16/none/avx512/1/64/torch-2.13.0+cpu-avx512/sampler-2`. Older
    histories lack it."""
    version: str = ""
    """Version of MiniSGL. Older histories lack it."""
    cached_tokens: Count = 0
    prompt_tokens: Count = 0
    """Length of the prompt. Older histories lack it."""


class Preempted(Event):
    """The pages ran out, and the least important request (the newest of them) lost its own. It is admitted again."""

    kind: Literal["preempted"] = "preempted"
    engine: str
    epoch: Count
    step: Count


class TakenOver(Event):
    """Another owner of a slot continues the request. This is written before it computes anything for the request. So
    the number of these events since the last token is the number of engines that died on it."""

    kind: Literal["taken_over"] = "taken_over"
    engine: str
    epoch: Count
    numerics: str = ""
    """See Admitted."""
    alone: bool = False
    """Whether the engine computes nothing else until the request has another token, to see whether it kills engines."""


class TokensProduced(Event):
    """The next `count` tokens. The last one is number n, the first half of the history id. History `n-0`."""

    kind: Literal["tokens"] = "tokens"
    count: Count = 1
    tokens: tuple[int, ...]
    text: str
    """Text that can be shown now; empty while a character or a possible stop string is incomplete."""
    step: Annotated[str, Field(pattern=r"^([0-9]{1,20}(-[0-9]{1,20})?)?$")]
    """`<epoch>-<step>` of the engine."""
    age_ms: Span | None = None
    """Time from the computation of the last of these tokens to `ms`; set by the commit. Older histories lack it."""
    chunks: Count = 0
    """Number of prefill chunks in which the prompt (after a preemption: prompt and output) was computed before this
    token; 0 for the token of a decode row."""
    drafted: Count = 0
    """Number of drafts in the step of these tokens: guesses of the first one and of those after it."""
    accepted: Count = 0
    """Number of them that were right: so many of these tokens and the next ones were drafted."""
    predicted: bool = False
    """Whether the drafts are of the client's prediction."""
    scores: tuple[Logprob, ...] = ()
    """One score for each of `tokens`, if the client asked for them."""
    prompt: PromptInfo | None = None
    """Set with the first token, if the client asked about its prompt."""
    markup: Markup | None = None
    """Set with the first token, if the text has markup."""


class Finished(Event):
    """The request ended normally. Seals the history."""

    kind: Literal["finished"] = "finished"
    n: Count
    reason: FinishReason
    stop_string: str = ""
    """Stop string that ended the request; empty if its last token did."""
    usage: Usage
    timings: Timings


class Failed(Event):
    """The request ended with an error, which is sent to its client. Seals the history."""

    kind: Literal["failed"] = "failed"
    n: NumberOfId = 0
    """Set by the commit."""
    status: int
    """HTTP status for a client that has received nothing yet."""
    code: str
    message: str
    param: str = ""
    """Field of the request that is wrong, if one is."""


class Cancelled(Event):
    """The request was cancelled. Seals the history."""

    kind: Literal["cancelled"] = "cancelled"
    n: NumberOfId = 0
    """Set by the commit."""
    by: str


class Answered(Event):
    """The tokenizer answered a request that needs no engine. Seals the history."""

    kind: Literal["answered"] = "answered"
    n: Count = 0
    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    """Each token as the vocabulary writes it, if the client asked for that."""
    text: str = ""
    by: str
    """Slot of the tokenizer."""


class TokenRow(Value):
    """Row of a step that made token number `n` (the first is 1)."""

    kind: Literal["token"] = "token"
    uid: str
    n: int
    token: int
    end: FinishReason | None = None
    """None: the request goes on."""
    chunks: int = 0
    """See TokensProduced."""
    drafted: int | None = None
    """Number of drafts in its step, guesses of this token and of those after it. None: there are none, or it is not the
    first token of its step."""
    accepted: int | None = None
    """Number of these that were right."""
    predicted: bool | None = None
    """Whether these are of the client's prediction."""
    score: Score | None = None
    prompt_scores: Scores | None = None
    """Scores of all tokens of the prompt but the first; set with the first token, if they were asked for."""


class EventRow(Value):
    """Row of a step with another event of a request, which had `n` tokens then."""

    kind: Literal["event"] = "event"
    uid: str
    n: int
    event: Annotated[Admitted | Preempted | TakenOver | Failed, Field(discriminator="kind")]


StepRow: TypeAlias = Annotated[TokenRow | EventRow, Field(discriminator="kind")]


class StepStats(Value):
    """Numbers about what one step computed, and what the engine held after it."""

    decode_rows: int = 0
    drafts: int | None = None
    """Number of drafts: guesses of the tokens that decode rows make, each computed as another row; None: none."""
    prefill_rows: int = 0
    prefill_tokens: int = 0
    mixed_prefill_length: int | None = None
    """Largest number of prompt tokens, if measured times decided it: to make the same plan again."""
    target_ms: int | None = None
    """Time that the step should take, if measured times decided it."""
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    forward_ms: float = 0.0
    """Time that the engine's loop stood still for the forward pass. Requests are admitted to a step before it."""


class Chunk(Value):
    """A part of a prompt that one step computed; after a preemption or a takeover, of prompt and output."""

    uid: str
    start: int
    """Position of its first token."""
    count: int
    """Number of its tokens."""


class StepCompleted(Event):
    """One forward pass of an engine. Stream `steps:<engine>`, id `<epoch>-<step>`."""

    kind: Literal["step"] = "step"
    made_ms: Moment = 0
    """Time when it was computed, by Redis' clock; 0: unknown. Until `ms` it waited for other steps of its commit."""
    rows: tuple[StepRow, ...]
    released: Annotated[tuple[str, ...], Field(validation_alias=AliasChoices("released", "let_go"))] = ()
    """Uids that ended elsewhere (cancel, stop string, deadline), which the engine forgets now."""
    figures: StepStats = StepStats()
    inputs: Annotated[tuple[str, ...], Field(validation_alias=AliasChoices("inputs", "given"))] = ()
    """Calls of the schedule since the step before, in order: `add <n> <length> <uid>` (a request with n tokens of
    output and a prompt of this length), `drop <uid>`, `flush`, `alone <uid>`, `all`, `plan`, `complete`, `skip` and
    `start over`. If the last four are missing, it ends with `plan` and `complete`. With a step in flight, `plan <n>`
    has its own `mixed_prefill_length`, and `no plan` means that the step must land first. Before a plan, `draft <n>
    <uid>` says that it has n drafts of a request, `force <n> <uid>` that its grammar forces their text; with a grammar
    their tokens follow. Only for the journal."""
    chunks: tuple[Chunk, ...] = ()
    """Chunks of prompts, in the order of the plan. Only for the journal."""
    schedule: str = ""
    """The schedule before `inputs`, in JSON: in an engine's first step, and then every 1,000 steps and every minute.
    Only for the journal."""


Mark: TypeAlias = Admitted | Preempted | TakenOver
"""Events of an engine about a request besides its tokens. Clients do not see them."""
End: TypeAlias = Finished | Failed | Cancelled | Answered
"""Events that seal a history."""
HistoryEvent: TypeAlias = Submitted | Tokenized | Mark | TokensProduced | End
"""Events of a history."""
AnyEvent: TypeAlias = HistoryEvent | StepCompleted

_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
_BY_KIND: Mapping[str, type[Event]] = {model.model_fields["kind"].default: model for model in get_args(AnyEvent)}


def encode(event: Event) -> dict[str, str]:
    """Return the stream fields of *event*; the commit, which knows Redis' clock, adds `ms`."""
    return {name: text.decode() for name, text in as_words(type(event), as_plain(event)).items()}


def as_words(model: type[Event], plain: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the stream fields of an event of kind *model* from the result of `as_plain`, in UTF-8.

    As `str`, a long text can take four times as much memory.
    """
    numbers = _number_lists(model)
    words = {}
    for name, value in plain.items():
        text = value.encode() if isinstance(value, str) else orjson.dumps(value)
        words[name] = text[1:-1] if name in numbers else text
    return words


def as_plain(event: Event, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return *event* as plain values. Fields with their default are left out, but not the kind, and those *without*."""
    defaults, numbers = _defaults(type(event)), _number_lists(type(event))
    plain: dict[str, Any] = {}
    is_plain = True  # as for tokens and steps, which are most events: pydantic takes three times as long
    for name, value in vars(event).items():
        if value is None or name == "ms" or name in without or (name in defaults and value == defaults[name]):
            continue
        if name in numbers:
            plain[name] = list(value)
        elif type(event) is StepCompleted and name == "rows":
            plain[name] = [_plain_row(row) for row in value]
        elif type(value) is StepStats:
            plain[name] = {name: number for name, number in vars(value).items() if number is not None}
        else:
            plain[name] = value
            is_plain = is_plain and type(value) in (str, int)
    return plain if is_plain else event.model_dump(mode="json", include=set(plain), exclude_none=True)


def _plain_row(row: StepRow) -> dict[str, Any]:
    if type(row) is not TokenRow or row.score is not None or row.prompt_scores is not None:
        return row.model_dump(mode="json", exclude_none=True)
    plain = {"kind": "token", "uid": row.uid, "n": row.n, "token": row.token}
    if row.end is not None:
        plain["end"] = row.end
    plain["chunks"] = row.chunks
    if row.drafted is not None:
        plain["drafted"] = row.drafted
    if row.accepted is not None:
        plain["accepted"] = row.accepted
    if row.predicted is not None:
        plain["predicted"] = row.predicted
    return plain


def decode(fields: Mapping[str, str], *, without: Collection[str] = ()) -> AnyEvent:
    """Return the event of *fields*. Fields *without*, which the caller does not need, get their defaults. Unknown ones,
    at any depth, are left out: a newer version that adds a field on which an answer depends raises `v`.

    Raises:
        UndecodableEvent: The fields are of no known kind or break its rules; NewerVersion: they are of a newer version.
    """
    check_readable(fields)
    model = _BY_KIND.get(fields.get("kind", ""))
    if model is None:
        raise UndecodableEvent(f"entry of unknown kind {fields.get('kind')!r}; expected one of {sorted(_BY_KIND)}")
    known, texts, numbers = _names(model), _text_fields(model), _number_lists(model)
    plain: dict[str, Any] = {}
    try:
        for name, value in fields.items():
            if name in without or name not in known:
                continue
            listed = f"[{value}]" if name in numbers and value[:1] != "[" else value
            plain[name] = value if name in texts else orjson.loads(listed)
        return _ADAPTER.validate_python(plain, extra="ignore")
    except (ValidationError, orjson.JSONDecodeError) as error:
        raise UndecodableEvent(f"a {fields.get('kind')} entry does not decode: {error}") from error


@functools.cache
def _names(model: type[Event]) -> frozenset[str]:
    """Return the names of the fields, and those that they had in older versions."""
    older = (field.validation_alias for field in model.model_fields.values())
    choices = (name for alias in older if isinstance(alias, AliasChoices) for name in alias.choices)
    return frozenset({*model.model_fields, *(name for name in choices if isinstance(name, str))})


@functools.cache
def _defaults(model: type[Event]) -> Mapping[str, Any]:
    """Return the defaults of the fields that have one. Looked up once for each kind, not for each token."""
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
        if name not in ("kind", "ms") and not field.is_required()
    }


@functools.cache
def _number_lists(model: type[Event]) -> frozenset[str]:
    """Return the fields that hold lists of whole numbers. They are stored with commas, without JSON's brackets.

    So a single number takes half the bytes in Redis, and most entries of a history hold one token.
    """
    return frozenset(name for name, field in model.model_fields.items() if field.annotation == tuple[int, ...])


@functools.cache
def _text_fields(model: type[Event]) -> frozenset[str]:
    """Return the fields that are stored as text; all others are JSON."""
    return frozenset(name for name, field in model.model_fields.items() if _is_text(field.annotation))


def _is_text(annotation: Any) -> bool:
    """Return whether *annotation* is text, or one of several words."""
    words = get_args(annotation)
    return annotation is str or (bool(words) and all(isinstance(word, str) for word in words))
