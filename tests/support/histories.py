"""Histories that tests write down as pairs of id and event or token by token, and what a fold is given of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    Failed,
    Finished,
    Presentation,
    SamplingParams,
    Submitted,
    Timings,
    Tokenized,
    TokensProduced,
    Usage,
    encode,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, tokens_id
from pipeline.recording import Recording
from pipeline.walk import Moment, walk

TIMINGS = Timings(admitted_ms=0, first_token_ms=0, total_ms=0)


def entries_of(pairs: Iterable[tuple[str, AnyEvent]]) -> list[Entry]:
    """Return the entries that a stream would hold."""
    return [Entry(entry_id, {"ms": str(event.ms), **encode(event)}) for entry_id, event in pairs]


def moments_of(pairs: Iterable[tuple[str, AnyEvent]]) -> list[Moment]:
    """Return what a walk over the history gives."""
    return list(walk(entries_of(pairs), over_holes=True))


def answered(
    *token_ids: int,
    text: Callable[[int], str] = chr,
    end: AnyEvent | None = None,
    ids: Sequence[int] = (5,),
    admitted: Admitted | None = None,
    **fields: Any,
) -> list[tuple[str, AnyEvent]]:
    """Return a request with the prompt *ids* and a token for each of *token_ids*; its end: *end*, or Finished."""
    n, usage = len(token_ids), Usage(prompt_tokens=len(ids), completion_tokens=len(token_ids))
    given: dict[str, Any] = {"endpoint": "/v1/completions", "frontend": "web-0", "sampling": SamplingParams()} | fields
    tokens = [TokensProduced(tokens=(each,), text=text(each), step=f"1-{at}") for at, each in enumerate(token_ids, 1)]
    return [
        (SUBMITTED_ID, Submitted(**given)),
        (TOKENIZED_ID, Tokenized(token_ids=tuple(ids), fingerprint="t", by="tokenize-0")),
        *([("0-3", admitted)] if admitted else []),
        *((tokens_id(at), event) for at, event in enumerate(tokens, 1)),
        (SEAL, end or Finished(n=n, reason="length", usage=usage, timings=TIMINGS)),
    ]


HELLO = ({"role": "user", "content": "hello"},)
UID = f"{5000:012x}" + "7000" + "8" * 16


def uid(number: int) -> str:
    """Return the uid of the request *number*."""
    return f"{5000 + number:012x}" + "7000" + "8" * 16


def asked(**fields: Any) -> Submitted:
    """Return how a request begins: a chat, if *fields* do not say otherwise."""
    prompt = {} if fields.keys() & {"prompt", "prompt_ids", "messages"} else {"messages": HELLO}
    given: dict[str, Any] = {"endpoint": "/v1/chat/completions", "frontend": "web-0", "model": "m", "ms": 1000} | prompt
    given |= {"sampling": SamplingParams(seed=7), "presentation": Presentation(stream=True)}
    return Submitted(**given | fields)


def recording(
    words: Sequence[str] = (),
    end: str = "stop",
    *,
    name: str = UID,
    first_ms: int = 20,
    pause_ms: int = 10,
    **fields: Any,
) -> Recording:
    """Return a request that got *words*, one for each token, from *first_ms* after its submit on, and ended so."""
    begin = asked(**fields)
    pairs: list[tuple[str, AnyEvent]] = [(SUBMITTED_ID, begin)]
    came_ms = begin.ms
    for n, word in enumerate(words, 1):
        came_ms = begin.ms + first_ms + (n - 1) * pause_ms
        token = TokensProduced(ms=came_ms, tokens=(sum(word.encode()),), text=word, step="1-1")
        pairs.append((tokens_id(n), token))
    ended: dict[str, AnyEvent] = {
        "cancelled": Cancelled(ms=came_ms + 5, n=len(words), by="client"),
        "failed": Failed(ms=came_ms + 5, status=503, code="poisonous", message="it broke"),
    }
    usage = Usage(prompt_tokens=9, completion_tokens=len(words), cached_tokens=4)
    reason: Any = end
    if end not in ended:
        ended[end] = Finished(ms=came_ms + 5, n=len(words), reason=reason, usage=usage, timings=TIMINGS)
    return Recording(name, tuple(entries_of([*pairs, (SEAL, ended[end])])))
