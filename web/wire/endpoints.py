"""How each endpoint that generates answers: as one body, or as the frames of a stream.

A request of the log keeps its path, so a client that opens it later gets the same frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.events import Submitted
from web.wire.frames import Frames
from web.wire.openai.answers import Choice
from web.wire.openai.responses import CHAT, COMPLETION, ChunkFrames, Style, body
from web.wire.sglang.responses import TextFrames, WholeTextFrames, whole_body

CHAT_ENDPOINT: Final = "/v1/chat/completions"
COMPLETIONS_ENDPOINT: Final = "/v1/completions"
GENERATE_ENDPOINT: Final = "/generate"


class Endpoint(Protocol):
    """One path."""

    def frames(self, uid: str, events: Sequence[Submitted]) -> Frames:
        """Return the fold that makes the frames of a stream; *uid* is that of siblings, or of the one request."""
        ...

    def body(self, uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> bytes:
        """Return the whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class OpenAIEndpoint:
    """An endpoint of OpenAI's API."""

    style: Style

    def frames(self, uid: str, events: Sequence[Submitted]) -> ChunkFrames:
        """As Endpoint.frames."""
        return ChunkFrames(self.style, uid, events)

    def body(self, uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> bytes:
        """As Endpoint.body."""
        return body(self.style, uid, events, choices)


class GenerateEndpoint:
    """/generate: in SGLang's form each frame has all text so far; Mini-SGLang's form is always a stream."""

    def frames(self, uid: str, events: Sequence[Submitted]) -> Frames:
        """As Endpoint.frames."""
        return WholeTextFrames(uid, events) if events[0].presentation.whole_text else TextFrames()

    def body(self, uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> bytes:
        """As Endpoint.body."""
        assert events[0].presentation.whole_text
        return whole_body(uid, events, choices)


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    CHAT_ENDPOINT: OpenAIEndpoint(CHAT),
    COMPLETIONS_ENDPOINT: OpenAIEndpoint(COMPLETION),
    GENERATE_ENDPOINT: GenerateEndpoint(),
}


def frames_for(uid: str, events: Sequence[Submitted]) -> Frames | None:
    """Return the frames that the endpoint of a request, or of its siblings, sends; None if it sends none."""
    endpoint = ENDPOINTS.get(events[0].endpoint)
    return None if endpoint is None else endpoint.frames(uid, events)
