"""Recordings without a word of prompt or answer: lengths, times, structure, and hashes of the blocks of the prompt.

Only fields that are named here stay. A field that events get later is left out until it is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.events import Answered, Event, Failed, Submitted, Tokenized, TokensProduced, as_plain, as_words
from pipeline.log.protocol import Entry
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID
from pipeline.recording import Recording
from pipeline.walk import walk
from web.wire.endpoints import COMPLETIONS_ENDPOINT

BLOCK_TOKENS: Final = 64
HASH_BYTES: Final = 8
SALT_BYTES: Final = 32
"""A salt is drawn for each file and forgotten, so nobody can try prompts against the hashes."""

KEPT: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(f"kind v {names}".split())
    for kind, names in {
        "submitted": (
            "endpoint frontend model task return_pieces add_special_tokens truncate_prompt_tokens truncation_side "
            "limit priority siblings deadline_ms"
        ),
        "tokenized": "fingerprint by",
        "admitted": "engine epoch step fingerprint numerics cached_tokens",
        "preempted": "engine epoch step",
        "taken_over": "engine epoch numerics alone",
        "tokens": "count step age_ms chunks drafted accepted predicted",
        "finished": "n reason usage timings",
        "failed": "n status code",
        "cancelled": "n by",
        "answered": "n by",
    }.items()
}
"""Fields of events that stay."""
KEPT_WITHIN: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(names.split())
    for name, names in {
        "sampling": (
            "temperature top_p top_k min_p typical_p seed max_tokens min_tokens ignore_eos presence_penalty "
            "frequency_penalty repetition_penalty logprobs prompt_logprobs include_stop_str_in_output "
            "skip_special_tokens"
        ),
        "presentation": (
            "stream include_usage continuous_usage cache_details token_ids echo prompt_scores prompt_only whole_text "
            "in_list scores_from tokens_as_ids score_texts choices"
        ),
        "templating": "add_generation_prompt continue_final_message",
    }.items()
}
"""Fields that stay of the objects that Submitted has. All of them are numbers, or yes and no."""
FIRST_MADE_UP: Final = 3
"""Lower tokens are often special ones."""
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def redacted(recording: Recording, salt: bytes) -> Recording:
    """Return *recording* with as many tokens 0 as it had tokens, with empty texts, and with hashes under *salt*.

    `about` has `redacted`, an object:
    - `block_tokens`, `blocks`: a hash of the prompt up to the end of each block; the last block may be shorter.
    - `message_chars`, `prompt_chars`, `answer_chars`: how long the texts were.
    - `left_out`: how many items the lists had that are left out.

    Raises:
        UndecodableEvent: An event cannot be read, so nobody can say what it holds.
    """
    prompt: tuple[int, ...] = ()
    told: dict[str, Any] = {"answer_chars": 0}
    entries = []
    for moment in walk(recording.entries, over_holes=True):
        event = moment.event
        match event:
            case Submitted():
                told |= _told_of(event)
                prompt = event.prompt_ids
            case Tokenized():
                prompt = event.token_ids
            case TokensProduced() | Answered():
                told["answer_chars"] += len(event.text)
        entries.append(Entry(moment.id, {"ms": str(event.ms)} | _fields(event)))
    told |= _blocks_again(recording, salt) or {"block_tokens": BLOCK_TOKENS, "blocks": block_hashes(prompt, salt)}
    return Recording(recording.uid, tuple(entries), {"redacted": told})


def _blocks_again(recording: Recording, salt: bytes) -> dict[str, Any]:
    """Return the blocks of a request that came from a redacted file, under another *salt*; nothing of others."""
    told = recording.about.get("redacted")
    if not isinstance(told, Mapping) or type(told.get("block_tokens")) is not int:
        return {}
    names = [str(name).encode() for name in told.get("blocks", ())]
    blocks = [hashlib.blake2b(name, key=salt, digest_size=HASH_BYTES).hexdigest() for name in names]
    return {"block_tokens": told["block_tokens"], "blocks": blocks}


def block_hashes(token_ids: Sequence[int], salt: bytes, block_tokens: int = BLOCK_TOKENS) -> list[str]:
    """Return a hash of *token_ids* up to the end of each block."""
    hashes, last = [], b""
    for first in range(0, len(token_ids), block_tokens):
        block = ",".join(map(str, token_ids[first : first + block_tokens]))
        last = hashlib.blake2b(last + block.encode(), key=salt, digest_size=HASH_BYTES).digest()
        hashes.append(last.hex())
    return hashes


def _told_of(event: Submitted) -> dict[str, Any]:
    """Return how much there was of what is left out."""
    lists = {name: getattr(event.sampling, name) for name in type(event.sampling).model_fields} | {
        "tools": event.templating.tools
    }
    return {
        "message_chars": [len(str(message.get("content") or "")) for message in event.messages],
        "prompt_chars": len(event.prompt),
        "left_out": {name: len(items) for name, items in lists.items() if isinstance(items, tuple) and items},
    }


def _fields(event: Event) -> dict[str, str]:
    """Return the fields of what stays of *event*."""
    plain = as_plain(event)
    kept = {name: value for name, value in plain.items() if name in KEPT[plain["kind"]]}
    match event:
        case Submitted():
            kept["messages"] = [{"role": _role(message), "content": ""} for message in event.messages]
            for name, names in KEPT_WITHIN.items():
                kept[name] = {key: value for key, value in plain.get(name, {}).items() if key in names}
        case Tokenized():
            kept["token_ids"] = [0] * len(event.token_ids)
        case TokensProduced():
            kept |= {"tokens": [0] * len(event.tokens), "text": ""}
            if event.prompt is not None:
                kept["prompt"] = {"num_tokens": event.prompt.num_tokens, "cached_tokens": event.prompt.cached_tokens}
        case Answered():
            kept["token_ids"] = [0] * len(event.token_ids)
        case Failed():
            kept["message"] = ""
    return {name: text.decode() for name, text in as_words(type(event), kept).items()}


def _role(message: Mapping[str, Any]) -> str:
    return message["role"] if message.get("role") in ROLES else "other"


def stand_in(recording: Recording) -> Recording:
    """Return a redacted request as one that can be sent: its prompt has made-up tokens, equal ones in equal blocks.

    It goes to /v1/completions. A recording that is not redacted stays as it is.
    """
    told = recording.about.get("redacted")
    tokenized = next((entry for entry in recording.entries if entry.id == TOKENIZED_ID), None)
    if not isinstance(told, Mapping) or tokenized is None:
        return recording
    num_tokens = len(list(filter(None, tokenized.fields["token_ids"].split(","))))
    made_up = made_up_tokens(told.get("blocks", ()), told.get("block_tokens", BLOCK_TOKENS), num_tokens)
    ids = ",".join(map(str, made_up))
    first = dict(recording.entries[0].fields) | {"endpoint": COMPLETIONS_ENDPOINT, "prompt_ids": ids}
    first.pop("messages", None)
    entries = [Entry(SUBMITTED_ID, first), Entry(TOKENIZED_ID, dict(tokenized.fields) | {"token_ids": ids})]
    others = [entry for entry in recording.entries if entry.id not in (SUBMITTED_ID, TOKENIZED_ID)]
    return Recording(recording.uid, (*entries, *others), recording.about)


def made_up_tokens(blocks: Sequence[object], block_tokens: int, num_tokens: int) -> list[int]:
    """Return *num_tokens* tokens that follow from the names of *blocks*; each model has tokens of these numbers."""
    tokens: list[int] = []
    for name in blocks:
        tokens += hashlib.shake_256(str(name).encode()).digest(block_tokens)
    return [FIRST_MADE_UP + byte for byte in tokens[:num_tokens]] + [FIRST_MADE_UP] * (num_tokens - len(tokens))
