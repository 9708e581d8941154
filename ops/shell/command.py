"""`minisgl shell`: a chat on a terminal, or one answer for scripts."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from ops.shell.config import ShellConfig
from ops.shell.conversation import Conversation
from ops.shell.params import NotSet, read_settings
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.flags import parse_flags
from pipeline.process.config import state_folder

ABOUT: Final = """\
Chats with any OpenAI server. With -q or piped input it asks one question and prints only the answer. With both, the
question is the prompt of -q, a blank line and the piped input.
"""
HISTORY: Final = "shell_history"
EXIT_BROKEN_PIPE: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143


class NoPrompt(MiniSGLError):
    """There is no question."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Chat, or ask once; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
        NoPrompt: The piped input is no text.
        Unanswered: The one question was not answered.
    """
    (config,) = parse_flags("shell", (ShellConfig,), arguments, environment, about=ABOUT)
    conversation = Conversation(system=config.system, params=_params(config))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters that its encoding lacks must not end an answer
            stream.reconfigure(errors="backslashreplace")
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if config.prompt or not is_typed:
        return _ask_once(config, conversation, _question(config.prompt, "" if is_typed else _piped()))
    if not sys.stdout.isatty():
        raise ConfigError("standard output is not a terminal: pass a question with -q, or pipe it in")
    return _chat(config, conversation, environment)


def _ask_once(config: ShellConfig, conversation: Conversation, question: str) -> int:
    from ops.shell.server import Server, answer_once, base_of

    server = Server(base_of(config.url), config.key)
    try:
        reply = answer_once(server, conversation, config.model, question, sys.stdout)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if reply.unknown_fields:
        sys.stderr.write(f"minisgl: the server ignored unknown fields: {reply.unknown_fields}\n")
    return 0


def _chat(config: ShellConfig, conversation: Conversation, environment: Mapping[str, str]) -> int:
    from ops.shell.chat import Chat
    from ops.shell.keyboard import Keyboard, lines_before
    from ops.shell.screen import Screen
    from ops.shell.server import Server, base_of

    screen = Screen(sys.stdout)
    keyboard = sys.stdin.fileno()
    server = Server(base_of(config.url), config.key)
    chat = Chat(server, conversation, config.model, screen, lambda: screen.unechoed(keyboard))
    signal.signal(signal.SIGTERM, lambda *_: chat.leave())
    before, why_not_kept = lines_before(state_folder() / HISTORY)
    with contextlib.suppress(KeyboardInterrupt):  # the chat can start while the server does not answer
        chat.greet()
    if why_not_kept:
        screen.note(why_not_kept)
    chat.run(Keyboard(before).read)
    return EXIT_TERMINATED if chat.is_leaving else 0


def _params(config: ShellConfig) -> dict[str, object]:
    try:
        settings = read_settings(" ".join(config.params))
        if settings.taken_back:  # nothing is set yet
            raise NotSet(f"{settings.taken_back[0]}: expected NAME=VALUE, say temperature=0.2")
        return dict(settings.values)
    except NotSet as error:
        raise ConfigError(f"--set: {error}") from None


def _question(prompt: str, piped: str) -> str:
    question = "\n\n".join(part for part in (prompt, piped) if part.strip())
    if not question:
        raise NoPrompt("standard input is empty: there is no question")
    return question


def _piped() -> str:
    content = b"" if sys.stdin is None else sys.stdin.buffer.read()
    try:
        return content.decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise NoPrompt(f"standard input is not UTF-8 text: byte {error.start} is {content[error.start]:#x}") from None
