"""How each endpoint that generates answers: as one body, or as the frames of a stream.

A request of the log keeps its path, so a client that opens it later gets the same frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pipeline.events import Submitted
from web.wire.anthropic import responses as anthropic
from web.wire.frames import Frames
from web.wire.known import Known, not_resumable
from web.wire.openai.answers import Choice
from web.wire.openai.responses import CHAT, COMPLETION, ChunkFrames, Style, body
from web.wire.responses import answers as responses
from web.wire.sglang.responses import TextFrames, WholeTextFrames, whole_body

CHAT_ENDPOINT: Final = "/v1/chat/completions"
COMPLETIONS_ENDPOINT: Final = "/v1/completions"
GENERATE_ENDPOINT: Final = "/generate"
MESSAGES_ENDPOINT: Final = "/v1/messages"
RESPONSES_ENDPOINT: Final = "/v1/responses"
COUNT_ENDPOINT: Final = "/v1/messages/count_tokens"
STYLES: Final[Mapping[str, Style]] = {CHAT_ENDPOINT: CHAT, COMPLETIONS_ENDPOINT: COMPLETION}


def frames_for(
    uid: str, events: Sequence[Submitted], *, ids: bool = False, known: Known | None = None, posted: bool = False
) -> Frames | None:
    """Return the fold that makes the frames of a stream; None for an endpoint that sends none.

    *uid* is that of siblings, or of the one request. The frames of one request have event ids with *ids*, and leave out
    what is *known* to the client. /generate in SGLang's form sends all text so far in each frame.
    *posted*: they answer the POST itself, and end as the endpoint's own streams do.

    Raises:
        RequestError: The stream has no characters that could be *known*.
    """
    endpoint = events[0].endpoint
    if endpoint in STYLES:
        return ChunkFrames(STYLES[endpoint], uid, events, ids=ids, known=known)
    if endpoint == MESSAGES_ENDPOINT:
        if known is not None:
            raise not_resumable("blocks")
        return anthropic.MessageFrames(uid, events[0], ids=ids, posted=posted)
    if endpoint == RESPONSES_ENDPOINT:
        if known is not None:
            raise not_resumable("items")
        return responses.ResponseFrames(uid, events[0], ids=ids, posted=posted)
    if endpoint != GENERATE_ENDPOINT:
        return None
    whole_text = events[0].presentation.whole_text
    return WholeTextFrames(uid, events, ids=ids, known=known) if whole_text else TextFrames(ids=ids, known=known)


def body_of(uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> Iterator[bytes]:
    """Yield the whole answer in pieces. Mini-SGLang's form of /generate has none: it is always a stream."""
    if events[0].endpoint == MESSAGES_ENDPOINT:
        return anthropic.body(uid, events[0], choices[0])
    if events[0].endpoint == RESPONSES_ENDPOINT:
        return responses.body(uid, events[0], choices[0])
    style = STYLES.get(events[0].endpoint)
    return whole_body(uid, events, choices) if style is None else body(style, uid, events, choices)
