"""A fold of the text of one answer into pieces: content, reasoning, and calls of tools.

The same text gives the same pieces, in whichever portions it comes; only where a text or arguments are divided depends
on that. No more text is held back than may still become something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from pipeline.events import Calls, Markup, Submitted
from web.wire.markup.apertus import Apertus
from web.wire.markup.deepseek import DeepSeek
from web.wire.markup.glm import Glm
from web.wire.markup.harmony import Harmony
from web.wire.markup.hermes import Hermes
from web.wire.markup.kimi_k2 import KimiK2
from web.wire.markup.llama3_json import Llama3Json
from web.wire.markup.mistral import Mistral
from web.wire.markup.pythonic import Pythonic
from web.wire.markup.qwen3_coder import Qwen3Coder
from web.wire.markup.source import SPACE, Family, Source, Steps, ToolParameters

FAMILIES: Final[Mapping[str, Family]] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "pythonic": Pythonic("<|python_start|>", "<|python_end|>", "["),
    "lfm2": Pythonic("<|tool_call_start|>", "<|tool_call_end|>", ""),
    "minicpm": Pythonic("<|tool_call_start|>", "<|tool_call_end|>", "", fence="```"),
    "glm": Glm(),
    "kimi_k2": KimiK2(),
    "deepseek": DeepSeek(),
    "apertus": Apertus(),
    "harmony": Harmony(),
}
"""`Markup.tools` -> who reads its calls."""


BETWEEN: Final = "\n\n"
"""Between two messages of an answer that are both content, or both reasoning."""


class Piece(NamedTuple):
    """A piece of an answer."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    """Its text; for a call, the name of the tool."""
    call: int = -1
    """Which call of the answer it belongs to, from 0; -1: none."""


def reader_for(markup: Markup, request: Submitted, tools: Callable[[], Mapping[str, ToolParameters]]) -> Reader | None:
    """Return the fold of an answer to *request*; None if its text is all content. *tools* returns those of `tools_of`,
    which siblings share."""
    calls, thinks = request.calls or Calls(choice="none"), request.presentation.reasoning != "inline"
    read = Markup(
        tools=markup.tools if calls.choice != "none" else "",
        think=markup.think if thinks else (),
        opens_thinking=markup.opens_thinking and thinks,
        channels=markup.channels,
    )
    return Reader(read, calls, tools()) if read.tools or read.think or read.channels else None


def tools_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, ToolParameters]:
    """Return name -> what a reader has to know about it, for the *tools* of a request."""
    found = {}
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        known = [schema.get(name) for name in ("properties", "$defs", "definitions")]
        properties, new, old = (each if isinstance(each, dict) else {} for each in known)
        found[tool["function"]["name"]] = ToolParameters(properties, {**old, **new})
    return found


class Reader:
    """Takes the text of an answer and returns what it consists of. It is also the Sink of its family."""

    def __init__(self, markup: Markup, calls: Calls, tools: Mapping[str, ToolParameters]) -> None:
        """*calls* and *tools* are those of the request."""
        self.tools = tools
        self.format = markup.tools
        self.thinks = bool(markup.think)
        self.thinking = self._goes_on_thinking = markup.opens_thinking and self.thinks
        """Whether the next text is reasoning. After markup it is the same as before, unless a message begins."""
        self.reasoning_tokens = 0
        """Tokens between the markers of thinking."""
        self.num_calls = 0
        self._calls = calls
        self._family = FAMILIES.get("harmony" if markup.channels else markup.tools)
        self._begins_with_header = markup.channels and self.thinks and not self.thinking
        """Else the prompt may end inside a message."""
        self._think = markup.think
        self._source = Source()
        self._pieces: list[Piece] = []
        self._unsure: list[tuple[int, int]] = []
        """Tokens of thinking that may be part of a marker: where in the answer their text ends, and how many."""
        self._num_chars = self._marked_at = 0
        """How much text came, and where in it the last marker within thinking began."""
        self._content = _Lines(keeps_ends=self._family is None, after_markup=self._begins_with_header)
        self._reasoning = _Lines(keeps_ends=False, after_markup=True)
        of_calls = self._family.markers if self._family else ()
        self._of_content, self._of_reasoning = _Markers(of_calls), _Markers(markup.think[1:] + of_calls)
        self._steps = self._read()
        next(self._steps)

    def take(self, text: str, num_tokens: int) -> list[Piece]:
        """Return the pieces that *text* completes, which is that of so many tokens."""
        was_thinking = self.thinking
        self._source.text += text
        self._num_chars += len(text)
        next(self._steps)
        if was_thinking:
            self._count(num_tokens)
        elif self.thinking:
            self.reasoning_tokens += num_tokens - 1  # the last one is the marker, or came with it
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """Return the last pieces: there is no more text. *cut*: the limit of its length ended it.

        Markup that a cut answer did not finish is left out, also the beginning of a marker.
        """
        self._source.over, self._source.cut = True, cut
        next(self._steps, None)
        if self.thinking:
            self.reasoning_tokens += sum(num for _, num in self._unsure)
        self._unsure.clear()
        return self._taken()

    # the Sink

    def allows(self, name: str, *, bare: bool = False) -> bool:
        """As Sink.allows."""
        return bool(self.format) and name in (self._calls.names or (self.tools if bare else (name,)))

    def begin(self, name: str) -> None:
        """As Sink.begin."""
        self._source.drop()
        self._content.after_markup = True
        self.thinking = False
        self.num_calls += 1
        if self._is_told:
            self._pieces.append(Piece("call", name, self.num_calls - 1))

    def message(self, *, thinks: bool) -> None:
        """As Sink.message."""
        self._source.drop()
        self.thinking = self._goes_on_thinking = thinks and self.thinks
        self._content.after_markup = True
        self._say(BETWEEN)

    def arguments(self, text: str) -> None:
        """As Sink.arguments."""
        self._source.drop()
        if self._is_told:
            self._add("arguments", text, self.num_calls - 1)

    @property
    def _is_told(self) -> bool:
        """Return whether the client gets the current call: only the first one, if it wants no parallel calls."""
        return self._calls.parallel or self.num_calls == 1

    # the fold

    def _read(self) -> Steps[None]:
        """Read the whole answer."""
        source = self._source
        while True:
            if (yield from self._read_opening()) or (yield from self._read_bare()):
                continue
            markers = self._of_reasoning if self.thinking else self._of_content
            marker, place = markers.find(source.text)
            if not marker:
                keeps_end = source.over and not source.cut
                place = len(source.text) - (0 if keeps_end else markers.held(source.text))
            if marker and self.thinking:
                self._marked_at = self._num_chars - len(source.text) + place
            source.at = place
            self._say(source.drop())
            if marker:
                yield from self._read_marked(marker)
            elif source.over:
                self._drop_all()
                self._add("content", self._content.rest())
                return
            else:
                yield

    def _read_opening(self) -> Steps[bool]:
        """Read what begins thinking, which counts only before content; say whether it is there.

        Some models write it although the prompt ends with it.
        """
        source, lines = self._source, self._reasoning if self.thinking else self._content
        if lines.begun:
            return False
        source.at = len(source.text) - len(source.text.lstrip(SPACE))
        self._say(source.drop())
        if not source.text or not self.thinks or (self.thinking and self._think[0] == self._think[-1]):
            return False
        if not (yield from source.skip(self._think[0])):
            if source.cut and source.ran_out:
                self._drop_all()
            return False
        source.drop()
        self.thinking = self._content.after_markup = True
        return True

    def _read_bare(self) -> Steps[bool]:
        """Read calls at the start of the content, if there are any; say whether there were."""
        source, family = self._source, self._family
        if self.thinking or self._content.begun or family is None or not family.bare:
            return False
        if not source.text.startswith(family.bare):
            return False
        source.ran_out = False
        found = yield from family.read(source, self, family.bare)
        never_content = self._calls.choice == "required" or self._begins_with_header
        if source.ran_out and (found or (source.cut and never_content)):
            self._drop_all()
        read = source.drop()
        if not found:
            self._say(read)
        return found

    def _read_marked(self, marker: str) -> Steps[None]:
        """Read the markup that *marker* begins."""
        source = self._source
        source.at = len(marker)
        if self.thinking and marker == self._think[-1]:
            source.drop()
            self.thinking, self._content.after_markup = False, True
            return
        assert self._family is not None
        self._goes_on_thinking, source.ran_out = self.thinking, False
        found = yield from self._family.read(source, self, marker)
        if source.ran_out and (found or source.cut):
            self._drop_all()
        read, self.thinking = source.drop(), self._goes_on_thinking
        if not found:
            self._say(read)

    def _drop_all(self) -> None:
        """Forget the rest of the answer: markup that it did not finish."""
        self._source.at = len(self._source.text)
        self._source.drop()

    def _say(self, text: str) -> None:
        """Add text that is content or reasoning."""
        if self.thinking:
            self._add("reasoning", self._reasoning.told(text))
        else:
            self._add("content", self._content.told(text))

    def _add(self, kind: Literal["content", "reasoning", "arguments"], text: str, call: int = -1) -> None:
        """Add a piece, or to the last one."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.kind == kind and last.call == call:
            self._pieces[-1] = Piece(kind, last.text + text, call)
        else:
            self._pieces.append(Piece(kind, text, call))

    def _taken(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    def _count(self, num_tokens: int) -> None:
        """Count tokens that came while it was thinking, unless they are part of a marker."""
        if not self.thinking:
            self.reasoning_tokens += num_tokens - 1 + sum(num for end, num in self._unsure if end <= self._marked_at)
            self._unsure.clear()
        elif self._source.text:
            self._unsure.append((self._num_chars, num_tokens))
        else:
            self.reasoning_tokens += num_tokens + sum(num for _, num in self._unsure)
            self._unsure.clear()


class _Lines:
    """Leaves out whitespace that only separates a text from markup."""

    def __init__(self, *, keeps_ends: bool, after_markup: bool = False) -> None:
        self.begun = False
        """Whether it has text."""
        self.after_markup = after_markup
        """Whether there was markup since its last text."""
        self._keeps_ends = keeps_ends
        self._space: list[str] = []
        """Whitespace since the last text, in pieces: a model may write nothing else for long."""

    def told(self, text: str) -> str:
        """Return the part of *text*, and of the whitespace before it, that is shown now."""
        if self.begun and self._keeps_ends:
            return text
        if not text.rstrip(SPACE):
            self._space.append(text)
            return ""
        text = "".join((*self._space, text))
        end = len(text.rstrip(SPACE))
        start = len(text) - len(text.lstrip(SPACE)) if self.after_markup and not self.begun else 0
        self.begun, self.after_markup = True, False
        if self._keeps_ends:
            end = len(text)
        self._space = [text[end:]]
        return text[start:end]

    def rest(self) -> str:
        """Return the part of the whitespace at the end that is shown."""
        return "" if self.after_markup else "".join(self._space)


class _Markers:
    """Searches for several texts at once."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self._longest = max(map(len, words), default=0)
        self._firsts = {word[0] for word in words}
        self._pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True)))) if words else None

    def find(self, text: str) -> tuple[str, int]:
        """Return the first of them in *text*, and where it is; "" if there is none."""
        found = self._pattern.search(text) if self._pattern else None
        return (found[0], found.start()) if found else ("", 0)

    def held(self, text: str) -> int:
        """Return how many characters at the end of *text* may be the beginning of one."""
        for place in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[place] in self._firsts and any(word.startswith(text[place:]) for word in self._words):
                return len(text) - place
        return 0
