"""What the endpoints that generate have in common with each other, and what sets them apart: how a body is read and how
an answer is put. The requests of the log remember the path; who opens one later looks up here how to tell it.
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
    """How the requests of one path are answered."""

    def frames(self, uid: str, events: Sequence[Submitted]) -> Frames:
        """Return the fold that makes the frames of a stream."""
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
    """/generate, in SGLang's form, which always has all text so far, and in Mini-SGLang's, which is always streamed."""

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
