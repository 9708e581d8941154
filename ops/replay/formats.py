"""Recorded requests in the formats of others: OpenAI's batch files, and Mooncake's traces of traffic.

    OpenAI      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {..}}
    Mooncake    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..]}

Requests that computed another one again (`minisgl replay run`) are not written: no client had sent them.
A batch has no answers. A trace has no texts: its hashes name blocks of 512 tokens, each together with all blocks before
it (https://arxiv.org/abs/2407.00079, section 4). Knows no log.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias

import orjson

from ops.replay.redact import block_hashes, stand_in
from pipeline.errors import RequestError, UndecodableEvent
from pipeline.events import (
    MOST_MS,
    Event,
    Failed,
    Finished,
    Presentation,
    SamplingParams,
    Submitted,
    Timings,
    Tokenized,
    TokensProduced,
    Usage,
    decode,
    encode,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, base_uid, sibling_uids, tokens_id
from pipeline.recording import SHOWN, Recording, UnreadableRecording
from pipeline.walk import PROMPT, walk
from web.wire.endpoints import CHAT_ENDPOINT, COMPLETIONS_ENDPOINT
from web.wire.openai.schemas import parse_chat, parse_completion
from web.wire.resend import request_body
from web.wire.submit import chat_events, completion_events

IMPORTED_FROM: Final = "imported_from"
"""The label of an imported request: its file, what the header of that says, and what the file says of the request."""
CUSTOM_ID: Final = "custom_id"
"""The label of a request of a batch: its name in there."""


def about_of(history: Sequence[Entry]) -> Mapping[str, Any]:
    """Return what the file said of a request that was imported; nothing of others."""
    labels = history[0].fields.get("labels", "") if history else ""
    if IMPORTED_FROM not in labels:
        return {}
    try:
        about = orjson.loads(labels)[IMPORTED_FROM]["about"]
    except (orjson.JSONDecodeError, KeyError, TypeError):  # a label that a client sent
        return {}
    return about if isinstance(about, dict) else {}


def incoming(recording: Recording, origin: Mapping[str, Any], *, keep_owner: bool) -> list[Entry]:
    """Return the entries of *recording* as they are imported: with *origin* as a label, which tells where it came from
    first, and without an owner, unless *keep_owner*.

    Raises:
        UndecodableEvent: They are no history that the tools can read.
    """
    for _ in walk(recording.entries, over_holes=True):
        """Every event decodes."""
    first, *others = recording.entries
    event = decode(first.fields, without=PROMPT)
    if not isinstance(event, Submitted):
        raise UndecodableEvent(f"it begins with an event of the kind {event.kind}, expected submitted")
    told = dict(origin) | ({"about": dict(recording.about)} if recording.about else {})
    fields = dict(first.fields) | {"labels": orjson.dumps({IMPORTED_FROM: told} | event.labels).decode()}
    if not keep_owner:
        fields.pop("owner", None)
    return [Entry(first.id, fields), *others]


MOONCAKE_BLOCK: Final = 512
"""Tokens in a block of a trace."""
MOST_TOKENS: Final = 1 << 24
"""A line with more is not believed."""
NOT_COMPUTED: Final = "not_computed"
"""The code with which requests of a batch end: there is no answer to them yet."""

UNREADABLE: Final = "that cannot be read"
AGAIN: Final = "that computed another one again (replay run)"
"""Why requests are left out. Each follows the number of them."""

LeftOut: TypeAlias = Callable[[str], None]
"""Is told why a request is left out."""
Reader: TypeAlias = Callable[[int, bytes], Sequence[Recording]]


def reader_for(line: bytes) -> Reader | None:
    """Return what reads the lines of a file that begins with *line*; None if it is of no known format."""
    try:
        names = set(orjson.loads(line))
    except (orjson.JSONDecodeError, TypeError):
        return None
    if names >= {"custom_id", "url", "body"}:
        return from_openai
    return from_mooncake if names >= {"timestamp", "input_length"} else None


def _plain(line: bytes) -> dict[str, Any]:
    try:
        plain = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UnreadableRecording(f"not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise UnreadableRecording("expected a JSON object")
    return plain


def _uid_for(ms: int, number: int, line: bytes) -> str:
    """Return a uid of the moment *ms* that is always the same for a line: a second import finds it there."""
    digest = int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big") % 2**38
    value = ms << 80 | 0x7 << 76 | 0x2 << 62 | (number % 2**24) << 38 | digest
    return f"{value:032x}"


def _recorded(uid: str, ms: int, *events: tuple[str, Event], about: Mapping[str, Any]) -> Recording:
    entries = (Entry(entry_id, {"ms": str(ms)} | encode(event)) for entry_id, event in events)
    return Recording(uid, tuple(entries), about)


# OpenAI's batches


def from_openai(number: int, line: bytes) -> list[Recording]:
    """Return the requests of a line of a batch. They failed, because nobody has computed them.

    Raises:
        UnreadableRecording: It is no such line, or the server would refuse its body.
    """
    plain = _plain(line)
    url, uid = plain.get("url"), _uid_for(0, number, line)
    try:
        body = orjson.dumps({"seed": int(uid[-9:], 16)} | plain["body"])
        if url == CHAT_ENDPOINT:
            chat = parse_chat(body)
            events = chat_events(chat, frontend="", model=chat.model or "", defaults={})
        elif url == COMPLETIONS_ENDPOINT:
            asked = parse_completion(body)
            events = completion_events(asked, frontend="", model=asked.model or "", defaults={})
        else:
            raise UnreadableRecording(f"url {url!r}: expected {CHAT_ENDPOINT} or {COMPLETIONS_ENDPOINT}")
    except RequestError as error:
        raise UnreadableRecording(f"body: {error.message}") from error
    except (KeyError, TypeError) as error:
        raise UnreadableRecording("expected a custom_id, a url and a body") from error
    end = Failed(status=503, code=NOT_COMPUTED, message="The request came from a batch file and was not computed.")
    labels = {CUSTOM_ID: str(plain.get("custom_id", ""))}
    events = [event.model_copy(update={"labels": event.labels | labels}) for event in events]
    uids = sibling_uids(uid, len(events))
    return [
        _recorded(each, 0, (SUBMITTED_ID, event), (SEAL, end), about={})
        for each, event in zip(uids, events, strict=True)
    ]


def to_openai(recordings: Iterable[Recording], left_out: LeftOut = lambda reason: None) -> Iterator[bytes]:
    """Yield a line for each body that made *recordings*; siblings are one body, if all of them are there.

    A request of another endpoint than OpenAI's goes to /v1/completions. *left_out* is called with the reason for each
    request that generates nothing, computed another one again, has no prompt, or cannot be read.
    """
    for _, family in itertools.groupby(recordings, lambda recording: base_uid(recording.uid)):
        asked = []
        for recording in family:
            event = _asked(recording)
            if isinstance(event, str):
                left_out(event)
            else:
                asked.append((recording.uid, event))
        is_whole = bool(asked) and len(asked) == asked[0][1].siblings
        for body in [asked] if is_whole else [[one] for one in asked]:
            uid, first = body[0]
            name = first.labels.get(CUSTOM_ID) or (base_uid(uid) if is_whole else uid)
            plain = {"custom_id": name, "method": "POST", "url": first.endpoint}
            fields = request_body([event for _, event in body])
            yield orjson.dumps(plain | {"body": fields}, option=orjson.OPT_APPEND_NEWLINE)


def _asked(recording: Recording) -> Submitted | str:
    """Return what was asked, in a form that a batch can have; or why it cannot."""
    try:
        event = decode(stand_in(recording).entries[0].fields)
    except UndecodableEvent:
        return UNREADABLE
    if not isinstance(event, Submitted):
        return UNREADABLE
    if event.task != "generate":
        return "for the tokenizer alone"
    if event.replay:
        return AGAIN
    if not _has_prompt(event):
        return "without a prompt"
    shown = Presentation(echo=event.presentation.echo, choices=event.presentation.choices)
    limit = event.limit if "." not in event.limit else "max_tokens"
    endpoint = CHAT_ENDPOINT if event.messages else COMPLETIONS_ENDPOINT
    return event.model_copy(update={"presentation": shown, "limit": limit, "endpoint": endpoint})


def _has_prompt(event: Submitted) -> bool:
    return bool(event.prompt or event.prompt_ids or any(message.get("content") for message in event.messages))


# Mooncake's traces


def from_mooncake(number: int, line: bytes) -> list[Recording]:
    """Return the request of a line of a trace: as many tokens 0 as it had tokens, and the names of its blocks.

    All of its events have the moment of the request, counted from 1970, because a trace has no others.

    Raises:
        UnreadableRecording: It is no such line.
    """
    plain = _plain(line)
    ms, num_prompt, num_output = (_count(plain, name) for name in ("timestamp", "input_length", "output_length"))
    blocks = plain.get("hash_ids", [f"{number}/{index}" for index in range(_num_blocks(num_prompt))])
    if not isinstance(blocks, list) or num_prompt + num_output > MOST_TOKENS:
        raise UnreadableRecording(f"expected a list in hash_ids, and at most {MOST_TOKENS} tokens")
    sampling = SamplingParams(temperature=0, max_tokens=num_output or 1, ignore_eos=True)
    asked = Submitted(endpoint=COMPLETIONS_ENDPOINT, frontend="", limit="max_tokens", sampling=sampling)
    made = TokensProduced(count=num_output, tokens=(0,) * num_output, text="", step="0-0")
    usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_output)
    timings = Timings(admitted_ms=0, first_token_ms=0, total_ms=0)
    events: list[tuple[str, Event]] = [
        (SUBMITTED_ID, asked),
        (TOKENIZED_ID, Tokenized(token_ids=(0,) * num_prompt, fingerprint="", by="")),
        *([(tokens_id(num_output), made)] if num_output else []),
        (SEAL, Finished(n=num_output, reason="length", usage=usage, timings=timings)),
    ]
    about = {"redacted": {"block_tokens": MOONCAKE_BLOCK, "blocks": blocks}}
    return [_recorded(_uid_for(ms, number, line), ms, *events, about=about)]


def _count(plain: Mapping[str, Any], name: str) -> int:
    value = plain.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= MOST_MS:
        raise UnreadableRecording(f"{name} is {str(value)[:SHOWN]!r}, expected a number from 0 to {MOST_MS}")
    return int(value)


def _num_blocks(num_tokens: int) -> int:
    return -(-min(num_tokens, MOST_TOKENS) // MOONCAKE_BLOCK)


def to_mooncake(recordings: Iterable[Recording], left_out: LeftOut = lambda reason: None) -> Iterator[bytes]:
    """Yield a line for each of *recordings*, the earliest first. *left_out* is called with the reason for each
    that has no tokenized prompt, computed another one again, or cannot be read.

    Hashes are numbered in the order in which they come, so nothing of the tokens is in them.
    """
    rows = []
    for recording in recordings:
        row = _row(recording)
        if isinstance(row, str):
            left_out(row)
        else:
            rows.append(row)
    rows.sort(key=itemgetter(0))
    numbers: dict[object, int] = {}
    for ms, num_prompt, num_output, names in rows:
        plain = {
            "timestamp": ms - rows[0][0],
            "input_length": num_prompt,
            "output_length": num_output,
            "hash_ids": [numbers.setdefault(name, len(numbers)) for name in names],
        }
        yield orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE)


def _row(recording: Recording) -> tuple[int, int, int, list[object]] | str:
    """Return moment, lengths and blocks of a request; or why the trace cannot have it."""
    asked, prompt, n = None, None, 0
    try:
        for moment in walk(recording.entries, over_holes=True):
            n = moment.n
            if isinstance(moment.event, Submitted):
                asked = moment.event
            if isinstance(moment.event, Tokenized):
                prompt = moment.event.token_ids
    except UndecodableEvent:
        return UNREADABLE
    if asked is None:
        return UNREADABLE
    if asked.replay:
        return AGAIN
    if prompt is None:
        return "that ended before the prompt was tokenized"
    return asked.ms, len(prompt), n, _blocks(recording, prompt)


def _blocks(recording: Recording, prompt: Sequence[int]) -> list[object]:
    """Return a name for the prompt up to the end of each block."""
    told = recording.about.get("redacted")
    if not isinstance(told, Mapping):
        return [*block_hashes(prompt, b"", MOONCAKE_BLOCK)]
    names, size = [str(name) for name in told.get("blocks", ())], told.get("block_tokens")
    step = MOONCAKE_BLOCK // size if isinstance(size, int) and size > 0 and MOONCAKE_BLOCK % size == 0 else 0
    if not step:  # its blocks are no parts of ours
        return [f"{recording.uid}/{index}" for index in range(_num_blocks(len(prompt)))]
    return [names[min(last, len(names)) - 1] for last in range(step, len(names) + step, step)]
