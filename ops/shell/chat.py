"""The chat: lines in, answers out, and the commands. Input and output are objects passed in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.shell import conversation as kept
from ops.shell.conversation import Conversation, Turn
from ops.shell.lines import COMMANDS, Command, Say, Unknown, read_line
from ops.shell.params import read_settings
from ops.shell.refusals import Refusal
from ops.shell.reply import Reply
from ops.shell.screen import Screen
from ops.shell.server import NO_MODEL, Server, Unanswered
from pipeline.errors import MiniSGLError

KEYS: Final = (
    ("Alt-Enter, or \\ then Enter", "new line; a pasted text stays one message"),
    ("Ctrl-C", "stop the answer, or clear the line"),
    ("Up, Ctrl-R", "earlier lines"),
    ("//text", "send /text"),
)


class Nothing(MiniSGLError):
    """The command has nothing to work on."""


class Chat:
    """One conversation with one server."""

    def __init__(
        self,
        server: Server,
        conversation: Conversation,
        model: str,
        screen: Screen,
        unechoed: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """*unechoed* hides keys typed during an answer."""
        self._server = server
        self._conversation = conversation
        self._model = model
        self._is_chosen = bool(model)
        self._screen = screen
        self._unechoed = unechoed
        self.is_leaving = False
        """Whether `leave` was called."""
        self._figures: list[AnswerTimes] = []
        self._uid = ""
        """The server's uid of the last request."""
        self._failed = ""
        """The last question, if the server did not answer it."""

    def greet(self) -> None:
        """Print the server and the model in one line."""
        try:
            name = asyncio.run(self._find_model())
        except Unanswered as error:
            self._screen.error(f"{error} (/help lists the commands)")
            return
        self._screen.note(f"{self._server.name}, model {name}; /help lists the commands")

    def run(self, read: Callable[[], str]) -> None:
        """Handle input from *read* until EOFError, /exit or `leave`."""
        while not self.is_leaving:
            try:
                if not self.take(read()):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:  # between two answers; nothing is lost
                self._screen.end_line()

    def leave(self) -> None:
        """Interrupt the prompt or the answer, as Ctrl-C does, and end; both restore the terminal first.

        An exception from a signal handler would be lost in the prompt.
        """
        self.is_leaving = True
        signal.raise_signal(signal.SIGINT)

    def take(self, text: str) -> bool:
        """Handle a typed line; return False if it asks to leave."""
        match read_line(text):
            case Command("/exit"):
                return False
            case Command(name, argument):
                try:
                    getattr(self, f"do_{name[1:]}")(argument)
                except MiniSGLError as error:
                    self._screen.error(str(error))
            case Unknown(name, near):
                meant = f"; did you mean {' or '.join(near)}?" if near else "; /help lists the commands"
                self._screen.error(f"{name} is not a command and was not sent{meant} (//text sends /text)")
            case Say(question):
                self._ask(question, list(self._conversation.turns))
        return True

    def _ask(self, question: str, before: Sequence[Turn]) -> None:
        """Ask *question* after the turns *before*. On success they and the answer become the conversation."""
        reply = Reply()
        sent_s = time.monotonic()
        firsts: list[float] = []
        is_cut = False
        self._failed = ""
        try:
            with self._unechoed():
                asyncio.run(self._answer(question, before, reply, firsts))
        except KeyboardInterrupt:
            is_cut = True
        except Unanswered as error:
            self._fail(question, error.refusal)
            return
        finally:
            self._screen.end_line()
            self._uid = reply.uid
            if reply.num_frames:
                first_s = firsts[0] if firsts else None
                self._figures.append(AnswerTimes(sent_s, first_s, time.monotonic(), reply.usage))
        if is_cut and not reply.texts:
            self._failed = question
            self._screen.note("stopped before any text; the question is removed (/retry asks it again)")
            return
        self._conversation.turns = [*before, Turn(question, reply.text, is_cut)]
        if is_cut:
            self._screen.note("stopped; the conversation keeps the text so far")
        elif reply.finish_reason == "length":
            self._screen.note("the answer ends here: it reached its token limit (max_tokens), or the context is full")
        if reply.unknown_fields:
            self._screen.note(f"the server ignored unknown fields: {reply.unknown_fields}")

    async def _answer(self, question: str, before: Sequence[Turn], reply: Reply, firsts: list[float]) -> None:
        model = await self._find_model()
        body = self._conversation.body(model, question, before)
        async with contextlib.aclosing(self._server.answer(body, reply)) as pieces:
            async for piece in pieces:
                if not firsts and piece.kind != "note":
                    firsts.append(time.monotonic())
                self._screen.piece(piece)

    async def _find_model(self) -> str:
        """Return the model to ask: the chosen one, else the first of the server's."""
        if not self._model:
            names = await self._server.models()
            self._model = names[0] if names else ""
        return self._model or NO_MODEL

    def _fail(self, question: str, refusal: Refusal) -> None:
        self._failed = question
        if not self._is_chosen:
            self._model = ""  # another server at this address may have another model
        self._screen.error(refusal.message)
        if refusal.is_too_long:
            self._screen.note("/reset starts a new conversation, /undo removes the last turn")

    # The commands of `lines.COMMANDS`, by their names

    def do_help(self, argument: str) -> None:
        rows = [(f"{name} {follows}".strip(), about) for name, (follows, about) in COMMANDS.items()]
        self._screen.table([*rows, *KEYS])

    def do_reset(self, argument: str) -> None:
        self._conversation.turns = []
        self._failed = ""
        self._screen.note("the conversation is empty")

    def do_retry(self, argument: str) -> None:
        turns = self._conversation.turns
        if self._failed:
            question, before = self._failed, turns
        elif turns:
            question, before = turns[-1].question, turns[:-1]
        else:
            raise Nothing("there is no question yet")
        self._screen.note(f"again: {_start(question)}")
        self._ask(question, list(before))

    def do_undo(self, argument: str) -> None:
        if not self._conversation.turns:
            raise Nothing("the conversation is empty")
        *self._conversation.turns, last = self._conversation.turns
        self._failed = ""
        self._screen.note(f"removed: {_start(last.question)}")

    def do_system(self, argument: str) -> None:
        if argument:
            self._conversation.system = "" if argument in ('""', "''") else argument
        if argument and not self._conversation.system:
            self._screen.note("the system text is removed")
        elif self._conversation.system:
            self._screen.note(f"system: {self._conversation.system}")
        else:
            self._screen.note("no system text")

    def do_set(self, argument: str) -> None:
        settings = read_settings(argument)
        unknown = [name for name in settings.taken_back if name not in self._conversation.params]
        if unknown:
            raise Nothing(f"{unknown[0]} is not set")
        kept_params = {n: v for n, v in self._conversation.params.items() if n not in settings.taken_back}
        self._conversation.params = kept_params | dict(settings.values)
        self.do_params("")

    def do_params(self, argument: str) -> None:
        self._screen.note(_shown(self._conversation.params) or "no fields are set; the server's defaults apply")

    def do_model(self, argument: str) -> None:
        if argument:
            self._model, self._is_chosen = argument, True
        try:
            names = asyncio.run(self._server.models())
        except Unanswered as error:
            if not argument:
                raise
            self._screen.note(f"model {argument}; the server could not confirm it: {error}")
            return
        if argument and argument not in names:
            listed = ", ".join(names) or "none"
            self._screen.note(f"model {argument}, which the server does not list; it lists {listed}")
            return
        if not self._model:
            self._model = names[0] if names else ""
        for name in names:
            self._screen.say(f"{'*' if name == self._model else ' '} {name}")

    def do_stats(self, argument: str) -> None:
        if not self._figures:
            raise Nothing("there is no answer yet")
        self._screen.table(table(self._figures), header=("", "last", "session"), right=(1,))
        if self._uid:
            self._screen.note(f"`minisgl trace {self._uid}` shows what happened to the last request")

    def do_trace(self, argument: str) -> None:
        if not (argument or self._uid):
            raise Nothing("pass the uid of a request, or ask something first")
        from ops.trace import lines_of  # with the client of Redis, which a chat does not need

        for told in asyncio.run(self._server.stories(argument or self._uid)):
            for line in lines_of(told):
                self._screen.say(line)

    def do_save(self, argument: str) -> None:
        kept.save(self._conversation, _file(argument))
        self._screen.note(f"saved: {_summary(self._conversation)}")

    def do_load(self, argument: str) -> None:
        self._conversation = kept.load(_file(argument))
        self._failed = ""
        self._screen.note(f"loaded: {_summary(self._conversation)}")


def _file(argument: str) -> Path:
    if not argument:
        raise Nothing("pass a file after the command")
    return Path(argument)


def _shown(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in params.items())


def _start(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60]} .."


def _summary(conversation: Conversation) -> str:
    num = len(conversation.turns)
    system = f"system: {_start(conversation.system)}" if conversation.system else "no system text"
    return f"{num} {'turn' if num == 1 else 'turns'}, {system}, {_shown(conversation.params) or 'nothing set'}"


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """One answer. Times are of `time.monotonic`. Without text `first_s` is None; a stopped answer has no usage."""

    sent_s: float
    first_s: float | None
    """When the first text came."""
    ended_s: float
    usage: Mapping[str, Any]

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    def tokens(self, kind: str) -> int | None:
        """Return the number of "prompt", "cached" or "output" tokens, if the server said it."""
        details = self.usage.get("prompt_tokens_details")
        value = {
            "prompt": self.usage.get("prompt_tokens"),
            "cached": details.get("cached_tokens") if isinstance(details, Mapping) else None,
            "output": self.usage.get("completion_tokens"),
        }[kind]
        return value if isinstance(value, int) else None

    @property
    def decode(self) -> tuple[int, float] | None:
        """The number of tokens after the first one, and their seconds."""
        num = self.tokens("output") or 0
        if self.first_s is None or num < 2 or self.ended_s <= self.first_s:
            return None
        return num - 1, self.ended_s - self.first_s


def table(answers: Sequence[AnswerTimes]) -> list[tuple[str, str, str]]:
    """Return rows of (name, last answer, session)."""
    last = answers[-1:]
    return [
        ("answers", str(len(last)), str(len(answers))),
        ("time to first token", _mean_ttft(last), _mean_ttft(answers)),
        ("tokens per second", _speed(last), _speed(answers)),
        *((f"{kind} tokens", _sum(last, kind), _sum(answers, kind)) for kind in ("prompt", "cached", "output")),
    ]


def _mean_ttft(answers: Sequence[AnswerTimes]) -> str:
    times = [each.ttft_s for each in answers if each.ttft_s is not None]
    if not times:
        return "-"
    return f"{1000 * sum(times) / len(times):,.0f} ms{' on average' if len(times) > 1 else ''}"


def _speed(answers: Sequence[AnswerTimes]) -> str:
    decodes = [each.decode for each in answers if each.decode is not None]
    if not decodes:
        return "-"
    return f"{sum(num for num, _ in decodes) / sum(seconds for _, seconds in decodes):,.1f}"


def _sum(answers: Sequence[AnswerTimes], kind: str) -> str:
    """Add up the known counts; a stopped answer has none."""
    known = [count for each in answers if (count := each.tokens(kind)) is not None]
    missing = len(answers) - len(known)
    return f"{sum(known):,}{f' (+ {missing} unknown)' if missing else ''}" if known else "-"
