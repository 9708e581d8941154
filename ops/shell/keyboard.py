"""The prompt: one or several lines, the history, and completion of commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory, ThreadedHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.shortcuts import CompleteStyle

from ops.shell.lines import NAMES
from pipeline.process.private import make_private, open_private

PROMPT: Final = "> "
WITH_FILES: Final = ("/save ", "/load ")


class _Lines(FileHistory):
    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the chat
            super().store_string(string)


class _Commands(Completer):
    """Completes command names, and file names after /save and /load."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """See Completer."""
        text = document.text_before_cursor
        for command in WITH_FILES:
            if text.startswith(command):
                path = text[len(command) :]
                yield from self._paths.get_completions(Document(path, len(path)), complete_event)
        if text.startswith("/"):
            yield from (Completion(name, -len(text)) for name in NAMES if name.startswith(text))


def lines_before(file: Path) -> tuple[History, str]:
    """Return the history in *file*, which only its owner may read, and the reason if it cannot be kept."""
    try:
        make_private(file.parent)
        os.close(open_private(file, os.O_RDWR | os.O_CREAT))
    except OSError as error:
        return InMemoryHistory(), f"the history is not kept: {file}: {error.strerror}"
    return ThreadedHistory(_Lines(str(file))), ""


class Keyboard:
    """Reads input. Enter sends it; Alt-Enter, or a backslash before Enter, starts a new line."""

    def __init__(self, before: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=Condition(
                lambda: "\n" in self._session.default_buffer.text
            ),  # else Ctrl-R takes the whole screen
            prompt_continuation=" " * len(PROMPT),
            history=before,
            completer=_Commands(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_keys(),
            enable_suspend=True,
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
        )

    def read(self) -> str:
        """Return the next input.

        Raises:
            EOFError: Ctrl-D at an empty prompt.
            KeyboardInterrupt: SIGINT came. The key Ctrl-C does not send it here.
        """
        return self._session.prompt()


def _keys() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and not buffer.document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def go_to_new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=typing)
    def empty(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    @keys.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:  # the signal, not the key; also during a search
        event.app.exit(exception=KeyboardInterrupt)

    return keys
