"""Recorded requests for tests of `replay drive`, written down token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.histories import entries_of

from pipeline.events import (
    AnyEvent,
    Cancelled,
    Failed,
    Finished,
    Presentation,
    SamplingParams,
    Submitted,
    Timings,
    TokensProduced,
    Usage,
)
from pipeline.names import SEAL, SUBMITTED_ID, tokens_id
from pipeline.recording import Recording

HELLO = ({"role": "user", "content": "hello"},)
UID = f"{5000:012x}" + "7000" + "8" * 16
TIMINGS = Timings(admitted_ms=0, first_token_ms=0, total_ms=0)


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
