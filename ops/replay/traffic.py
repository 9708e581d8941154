"""Recorded requests as traffic: what is sent again, when, and where its client leaves. Sends nothing.

And what came of a request, then or now: its times, its tokens and its end; and where two answers differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Literal

import orjson

from ops.bench import load
from ops.shell.params import Settings
from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Cancelled,
    Failed,
    Finished,
    HistoryEvent,
    Presentation,
    SamplingParams,
    Submitted,
    TokensProduced,
)
from pipeline.names import base_uid
from pipeline.recording import Recording
from pipeline.walk import walk
from web.wire import copies
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT, GENERATE_ENDPOINT
from web.wire.resend import ENDPOINTS, Body, request_body
from web.wire.sglang.schemas import SGLangSampling
from web.wire.uids import index_of

CANCELLED: Final = "cancelled"
FAILED: Final = "failed"
SHOWN: Final = 40
"""Characters of an answer that a difference shows, from where it begins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request. Times are in ms since its submit, or since its sending."""

    end: str
    """`stop`, `length`, `cancelled` or `failed`; empty: it had not ended."""
    text: str = ""
    tokens: tuple[int, ...] | None = None
    """None: only the text is known."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float | None = None
    """To the first token, or to the first text."""
    tpot_ms: float | None = None
    """Per token after the first; None if there are no two tokens."""
    e2e_ms: float | None = None
    error: str = ""
    by_client: bool = False
    """Its client cancelled it."""

    @property
    def is_whole(self) -> bool:
        """Whether the model ended the answer."""
        return self.end not in ("", CANCELLED, FAILED)

    def plain(self) -> dict[str, Any]:
        """Return it for JSON, without the answer itself."""
        names = ("end", "error", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms")
        return {name: getattr(self, name) for name in names}


def outcome_of(events: Iterable[HistoryEvent]) -> Outcome:
    """Fold a history, whose times are of Redis' clock."""
    began_ms, tokens, texts = 0, list[int](), list[str]()
    first, last = None, None
    ended: dict[str, Any] = {"end": ""}
    for event in events:
        match event:
            case Submitted():
                began_ms = event.ms
            case TokensProduced():
                first, last = first or event, event
                tokens += event.tokens
                texts.append(event.text)
            case Finished(usage=usage):
                ended = {"end": event.reason, "e2e_ms": event.ms - began_ms}
                ended |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
            case Failed():
                ended = {"end": FAILED, "error": f"{event.status} {event.code}: {event.message}"}
            case Cancelled():
                ended = {"end": CANCELLED, "e2e_ms": event.ms - began_ms, "by_client": event.by == "client"}
    if first is not None and last is not None:
        ended["ttft_ms"] = first.ms - began_ms
        if len(tokens) > first.count:
            ended["tpot_ms"] = (last.ms - first.ms) / (len(tokens) - first.count)
    return Outcome(text="".join(texts), tokens=tuple(tokens), output_tokens=len(tokens), **ended)


def outcome_seen(answer: load.Answer, *, left: bool) -> Outcome:
    """Return what the client saw of a stream, by its own clock. *left*: it went before the end."""
    ttft_ms, e2e_ms = answer.ttft_ms if answer.content_s else None, answer.e2e_ms
    if left:
        return Outcome(CANCELLED, answer.text, ttft_ms=ttft_ms, e2e_ms=e2e_ms, by_client=True)
    if answer.error:
        return Outcome(FAILED, answer.text, error=answer.error)
    return Outcome(
        answer.reason,
        answer.text,
        output_tokens=answer.output_tokens,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        ttft_ms=ttft_ms,
        tpot_ms=answer.tpot_ms,
        e2e_ms=e2e_ms,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer differs from the one before for the first time."""

    token: int | None
    """Its number, the first is 1; None: only the texts are known."""
    character: int
    """How many characters are the same."""
    before: str
    """How the answers go on from there; if only the tokens differ, their ids."""
    after: str

    def __str__(self) -> str:
        place = f"character {self.character + 1}" if self.token is None else f"token {self.token}"
        return f"{place}: {self.before!r}, now {self.after!r}"


def is_comparable(before: Outcome, after: Outcome) -> bool:
    """Say whether both have an answer, of which something can be compared. One that was cancelled may be short."""
    ended = {before.end, after.end}
    if ended & {"", FAILED}:
        return False
    return CANCELLED not in ended or bool(before.output_tokens and (after.tokens or after.text))


def first_difference(before: Outcome, after: Outcome) -> Difference | None:
    """Return where two comparable answers differ, if they do. Of cancelled ones, what both have is compared."""
    cancelled = CANCELLED in (before.end, after.end)
    same_text = _num_same(before.text, after.text)
    if before.tokens is None or after.tokens is None:
        if _is_same(before.text, after.text, same_text, cancelled=cancelled):
            return None
        return Difference(None, same_text, _from(before.text, same_text), _from(after.text, same_text))
    same = _num_same(before.tokens, after.tokens)
    if _is_same(before.tokens, after.tokens, same, cancelled=cancelled):
        return None
    shown = _from(before.text, same_text), _from(after.text, same_text)
    if shown[0] == shown[1]:  # special tokens have no text, and some texts have several spellings
        shown = _ids(before.tokens, same), _ids(after.tokens, same)
    return Difference(same + 1, same_text, *shown)


def _num_same(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _is_same(one: Sequence[object], other: Sequence[object], same: int, *, cancelled: bool) -> bool:
    lengths = len(one), len(other)
    return same == min(lengths) and (cancelled or lengths[0] == lengths[1])


def _from(text: str, start: int) -> str:
    return text[start : start + SHOWN]


def _ids(tokens: Sequence[int], start: int) -> str:
    return f"token id {tokens[start]}" if start < len(tokens) else "the end"


Form = Literal["chunks", "whole", "text"]
"""How a stream brings its text: in OpenAI's chunks; all of it again in each frame (SGLang); as it is (Mini-SGLang)."""
OPENAI: Final[Mapping[str, frozenset[str]]] = {
    path: frozenset(
        f"{names} model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
        "stream_options temperature top_p".split()
    )
    for path, names in (
        (CHAT_ENDPOINT, "messages max_completion_tokens response_format tools tool_choice top_logprobs"),
        (COMPLETIONS_ENDPOINT, "prompt"),
    )
}
"""The fields that servers with OpenAI's API know. Labels are not sent to others: they change nothing."""
NO_SETTINGS: Final = Settings({}, ())


@dataclass(frozen=True, slots=True)
class Target:
    """What is known of the server before anything is sent."""

    is_ours: bool
    """It gets every field, and its histories are read: it is a MiniSGL, and its times are to be those of Redis."""
    models: tuple[str, ...] = ()
    """The names that it serves; none if it does not say."""
    model: str = ""
    """The name that all requests use; empty: each uses the recorded one, if it is served."""
    settings: Settings = NO_SETTINGS
    """Fields that all bodies set, or leave out."""
    draws_alike: bool = True
    """It is a MiniSGL: the same seed gives the same tokens."""

    def model_for(self, recorded: str) -> str:
        """Return the name that a request uses."""
        if self.model or not self.models or recorded in self.models:
            return self.model or recorded
        return self.models[0]


@dataclass(frozen=True, slots=True)
class Leave:
    """Where the client of a request leaves."""

    characters: int
    """After so many characters of the answer; 0: after the time."""
    after_s: float


@dataclass(frozen=True, slots=True)
class Planned:
    """One body, and what came of it when it was recorded."""

    uids: tuple[str, ...]
    """Of the recorded request; several if they were siblings."""
    due_s: float
    """After the first one."""
    path: str
    headers: Mapping[str, str]
    body: bytes
    form: Form
    before: tuple[Outcome, ...]
    """One for each of `uids`."""
    is_sampled: bool
    """Its tokens were drawn, with a temperature above 0."""
    leave: Leave | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent, the earliest first, and what is not."""

    planned: tuple[Planned, ...]
    recorded_s: float
    """From the first recorded request to the last."""
    left_out: Mapping[str, int]
    """Why requests are not sent -> how many."""
    dropped: Mapping[str, int]
    """Fields that the server would not know -> how many bodies had them."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    uid: str
    submitted: Submitted
    outcome: Outcome


def traffic_of(recordings: Iterable[Recording], target: Target, *, speed: float = 1.0) -> Traffic:
    """Plan to send *recordings* again at *speed* times their pace. Siblings are one body, as they were.

    If the file lacks some of them, each of the others is a body of its own.
    """
    families: dict[str, list[_Recorded]] = {}
    left_out: Counter[str] = Counter()
    for recording in recordings:
        recorded, reason = _read(recording)
        if recorded is None:
            left_out[reason] += 1
        else:
            families.setdefault(base_uid(recorded.uid), []).append(recorded)
    bodies: list[list[_Recorded]] = []
    for family in families.values():
        family.sort(key=lambda one: index_of(one.uid))
        bodies += [family] if len(family) == family[0].submitted.siblings else [[one] for one in family]
    bodies.sort(key=lambda body: (body[0].submitted.ms, body[0].uid))
    moments_ms = [body[0].submitted.ms for body in bodies] or [0]
    dropped: Counter[str] = Counter()
    planned = [_planned(body, moments_ms[0], target, speed, dropped) for body in bodies]
    return Traffic(tuple(planned), (moments_ms[-1] - moments_ms[0]) / 1000, left_out, dropped)


def _read(recording: Recording) -> tuple[_Recorded | None, str]:
    """Return what can be sent of *recording*, or the reason why nothing can."""
    try:
        events = [moment.event for moment in walk(recording.entries, over_holes=True)]
    except UndecodableEvent:
        return None, "that cannot be read"
    match events:
        case [Submitted() as submitted, *_]:
            pass
        case _:
            return None, "without a beginning"
    if submitted.task != "generate" or submitted.endpoint not in ENDPOINTS:
        return None, f"of {submitted.endpoint or 'no endpoint'}"
    if submitted.replay is not None:
        return None, "that computed another one again"
    ids = submitted.prompt_ids if submitted.endpoint != CHAT_ENDPOINT else ()
    if not (submitted.messages or submitted.prompt or ids):
        return None, "without a prompt"
    return _Recorded(recording.uid, submitted, outcome_of(events)), ""


def _planned(body: Sequence[_Recorded], first_ms: int, target: Target, speed: float, dropped: Counter[str]) -> Planned:
    model = target.model_for(body[0].submitted.model)
    events = [one.submitted.model_copy(update={"model": model}) for one in body]
    outcomes = tuple(one.outcome for one in body)
    if target.is_ours:
        path, fields = events[0].endpoint, request_body(events)
    else:
        labels = events[0].labels if target.draws_alike else ()  # there `replay forget --user` must find it
        path, fields = translated(events, outcomes[0].output_tokens, dropped, labels)
    return Planned(
        uids=tuple(one.uid for one in body),
        due_s=(events[0].ms - first_ms) / 1000 / speed,
        path=path,
        headers={copies.HEADER: base_uid(body[0].uid) if len(body) > 1 else body[0].uid} if target.draws_alike else {},
        body=orjson.dumps(_with_settings(fields, target.settings)),
        form="chunks" if path != GENERATE_ENDPOINT else "whole" if events[0].presentation.whole_text else "text",
        before=outcomes,
        is_sampled=events[0].sampling.temperature > 0,
        leave=leave_of(events[0].presentation, outcomes),
    )


def leave_of(shown: Presentation, outcomes: Sequence[Outcome]) -> Leave | None:
    """Return where the client of a request left; None if it stayed, or one of the siblings failed."""
    left = [outcome for outcome in outcomes if outcome.by_client]
    if not left or any(outcome.end == FAILED for outcome in outcomes):
        return None
    after_s = max(outcome.e2e_ms or 0 for outcome in left) / 1000
    counts = shown.stream and not shown.echo  # a stream with `echo` begins with the prompt
    characters = sum(len(outcome.text.replace("\r\n", "\n")) for outcome in outcomes) if counts else 0
    return Leave(characters, after_s)


def translated(
    events: Sequence[Submitted], num_tokens: int, dropped: Counter[str], labels: Collection[str] = ()
) -> tuple[str, Body]:
    """Return path and body for any server with OpenAI's API, always as a stream. Count fields that are *dropped*.
    Of the labels, those in *labels* are sent.

    Prompts that no template touches go to /v1/completions. Its default length is 16 tokens. So a request without a
    limit gets *num_tokens*, the length of the recorded answer.
    """
    first = events[0]
    path = CHAT_ENDPOINT if first.messages else COMPLETIONS_ENDPOINT
    shown = Presentation(stream=True, include_usage=True, choices=first.presentation.choices)
    limit = first.limit if path == CHAT_ENDPOINT and first.limit in OPENAI[path] else "max_tokens"
    plain = {"endpoint": path, "limit": "", "presentation": shown}
    body = request_body([event.model_copy(update=plain) for event in events])
    longest = first.sampling.max_tokens or (max(num_tokens, 1) if path == COMPLETIONS_ENDPOINT else None)
    body = {name: value for name, value in body.items() if name not in ("max_tokens", "n_predict")}
    body |= {} if longest is None else {limit: longest}
    defaults = SamplingParams().model_dump()
    dropped.update(
        name
        for name, value in body.items()
        if name not in OPENAI[path] and name not in first.labels and value != defaults.get(name)
    )
    return path, {name: value for name, value in body.items() if name in OPENAI[path] or name in labels}


def _with_settings(body: Body, settings: Settings) -> Body:
    """Return *body* with the user's fields; SGLang's form has those of sampling in an object of their own."""
    body = dict(body)
    params: dict[str, Any] = dict(body.get("sampling_params", {}))
    for name in (*settings.taken_back, *settings.values):
        place = params if params and name in SGLangSampling.model_fields else body
        place.pop(name, None)
        if name in settings.values:
            place[name] = settings.values[name]
    return body | ({"sampling_params": params} if params else {})
