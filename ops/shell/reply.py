"""One answer as it comes: a fold of the frames of a stream, which may break and go on. Knows no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ops.shell.frames import Frame
from ops.shell.refusals import Refusal, refusal_in
from ops.shell.text import one_line

Kind = Literal["text", "thought", "note"]
DONE: Final = "[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is shown next: of the answer, of the thoughts before it, or a note about how it comes."""

    text: str
    kind: Kind = "text"


@dataclass(slots=True)
class Reply:
    """What is known of an answer so far.

    A stream that breaks goes on after the last id that was seen. What came after that id comes again then, letter by
    letter the same, and is not shown twice: a server may say an event in several frames, of which the last has its id.
    """

    texts: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    refusal: Refusal | None = None
    """The error that came instead of an end."""
    uid: str = ""
    """What a MiniSGL server calls the request."""
    unknown_fields: str = ""
    """What of the request means nothing to the server, where it says so."""
    is_done: bool = False
    """Whether the server has said that nothing more comes."""
    last_id: str = ""
    num_frames: int = 0
    _after_id: dict[Kind, int] = field(default_factory=dict)
    """How many characters came after the last id."""
    _again: dict[Kind, int] = field(default_factory=dict)
    """How many characters are still to come that came before."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is missing but perhaps the counts."""
        return self.is_done or bool(self.finish_reason)

    def go_on(self) -> None:
        """Begin to read the stream again, after the last id."""
        kinds = self._after_id.keys() | self._again.keys()
        self._again = {kind: self._again.get(kind, 0) + self._after_id.get(kind, 0) for kind in kinds}
        self._after_id = {}

    def take(self, frame: Frame) -> Iterator[Piece]:
        """Take the next frame in, and yield what of it is to be shown."""
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
            said = choice.get("delta") or choice.get("message")  # a whole message where the server does not stream
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
