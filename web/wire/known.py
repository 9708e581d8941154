"""The characters of an answer that its client has, where it resumes a stream without the id of an event.

They are the code points of the text that was streamed: `content` of a chat, `text` of a completion, an echoed prompt
included, or the plain text of /generate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from pipeline.errors import RequestError
from pipeline.events import Submitted
from web.wire.markup.reader import Piece

AFTER_CHARACTERS: Final = "after_characters"
_COUNT: Final = re.compile(r"0|[1-9][0-9]{0,8}")
CHARACTERS: Final[dict[str, Any]] = {
    "description": "How many characters of the answer's text the client has.",
    "pattern": f"^({_COUNT.pattern})$",
}
_INSTEAD: Final = "resume after the id of an event (Last-Event-ID), or read the stream from its start"


class Known:
    """Removes these characters from the stream."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.are_over = False
        """Whether text after them has come: then the client has none of the following text."""
        self._left = num

    def rest(self, text: str) -> str:
        """Return the part of *text*, which comes next, that the client does not have."""
        known = min(self._left, len(text))
        self._left -= known
        self.are_over = self.are_over or known < len(text)
        return text[known:]

    def rest_of(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the parts of *pieces*, which come next, that the client does not have.

        Raises:
            RequestError: The client may have one that is no content, and so is not counted.
        """
        lacking = []
        for piece in pieces:
            if piece.kind == "content":
                piece = piece._replace(text=self.rest(piece.text))
            elif not self.are_over:
                raise not_resumable("reasoning" if piece.kind == "reasoning" else "tool calls")
            if piece.kind != "content" or piece.text:
                lacking.append(piece)
        return lacking

    def end(self) -> None:
        """Say that the answer has ended.

        Raises:
            RequestError: It is shorter than what the client says that it has.
        """
        if self._left:
            message = f"{AFTER_CHARACTERS}: {self.num} is too much; the answer has {self.num - self._left} characters"
            raise RequestError(message, param=AFTER_CHARACTERS, code="invalid_value")


def num_known(given: str) -> int:
    """Return the number that a client has *given*. Raises RequestError if it is none."""
    if not _COUNT.fullmatch(given):
        message = f"{AFTER_CHARACTERS}: should be the number of characters that the client has, 0 to 999999999"
        raise RequestError(message, param=AFTER_CHARACTERS, code="invalid_value")
    return int(given)


def check_countable(event: Submitted, num_choices: int) -> None:
    """Check that the stream of a request has nothing but text, as far as its first *event* tells.

    Raises:
        RequestError: It has more.
    """
    if num_choices > 1:
        each = f"resume each of them by its own uid, which ends with .0 to .{num_choices - 1}"
        raise not_resumable("several answers", each)
    if event.sampling.logprobs is not None or event.sampling.prompt_logprobs is not None:
        raise not_resumable("log-probabilities")
    if event.presentation.token_ids:
        raise not_resumable("token ids")


def not_resumable(what: str, instead: str = _INSTEAD) -> RequestError:
    """Return the error for a stream with something that is no text: *what* names it."""
    message = f"{AFTER_CHARACTERS}: the stream has {what}, so characters do not tell where it broke; {instead}"
    return RequestError(message, param=AFTER_CHARACTERS, code="not_resumable")
