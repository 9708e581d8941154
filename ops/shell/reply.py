"""One answer, folded from the frames of a stream that may break and resume. Knows no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ops.shell.refusals import Refusal, refusal_in
from ops.shell.text import one_line
from ops.sse_reader import Frame

Kind = Literal["text", "thought", "note"]
DONE: Final = "[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text to show: of the answer, of the thoughts before it, or a note about the stream."""

    text: str
    kind: Kind = "text"


@dataclass(slots=True)
class Reply:
    """An answer so far.

    A broken stream resumes after the last id. One event may make several frames, and only the last one has its id. So
    text after the last id comes again, letter by letter the same, and must not be shown twice.
    """

    texts: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    refusal: Refusal | None = None
    """The error that ended the stream."""
    uid: str = ""
    """The request's uid on a MiniSGL server."""
    unknown_fields: str = ""
    """Request fields that the server reports as unknown."""
    is_done: bool = False
    """Whether the server sent [DONE]."""
    last_id: str = ""
    num_frames: int = 0
    _after_id: dict[Kind, int] = field(default_factory=dict)
    """Number of characters after the last id."""
    _again: dict[Kind, int] = field(default_factory=dict)
    """Number of characters that will come again."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete; the token counts may be missing."""
        return self.is_done or bool(self.finish_reason)

    def go_on(self) -> None:
        """Prepare for a stream that resumes after the last id."""
        kinds = self._after_id.keys() | self._again.keys()
        self._again = {kind: self._again.get(kind, 0) + self._after_id.get(kind, 0) for kind in kinds}
        self._after_id = {}

    def take(self, frame: Frame) -> Iterator[Piece]:
        """Take in the next frame, and yield the text to show."""
        self.num_frames += 1
        if frame.data == DONE:
            self.is_done = True
            return
        try:
            document = json.loads(frame.data)
        except (ValueError, RecursionError):
            self.refusal = Refusal(f"the stream holds something that is not JSON: {one_line(frame.data[:80])}")
            return
        self.refusal = refusal_in(document) or (Refusal(one_line(frame.data[:400])) if frame.kind == "error" else None)
        if self.refusal is None and isinstance(document, dict):
            yield from self._take_chunk(document)
        if frame.id:
            self.last_id = frame.id
            self._after_id = {}

    def _take_chunk(self, chunk: dict[str, Any]) -> Iterator[Piece]:
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            said = choice.get("delta") or choice.get("message")  # `message` if the server does not stream
            if isinstance(said, dict):
                yield from self._take_text("thought", said.get("reasoning_content") or said.get("reasoning"))
                yield from self._take_text("text", said.get("content"))
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)

    def _take_text(self, kind: Kind, text: object) -> Iterator[Piece]:
        if not isinstance(text, str) or not text:
            return
        self._after_id[kind] = self._after_id.get(kind, 0) + len(text)
        num_known = min(self._again.get(kind, 0), len(text))
        if num_known:
            self._again[kind] -= num_known
            text = text[num_known:]
        if text:
            if kind == "text":
                self.texts.append(text)
            yield Piece(text, kind)
