"""The chat: lines in, answers out, and the commands. What is typed and printed comes and goes by objects passed in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ops.shell import conversation as kept
from ops.shell.conversation import Conversation, Turn
from ops.shell.figures import Figures, table
from ops.shell.lines import COMMANDS, Command, Say, Unknown, read_line
from ops.shell.params import read_settings
from ops.shell.refusals import Refusal
from ops.shell.reply import Reply
from ops.shell.screen import Screen
from ops.shell.server import NO_MODEL, Server, Unanswered
from pipeline.errors import MiniSGLError

KEYS: Final = (
    ("Alt-Enter, or \\ then Enter", "a new line; a pasted text stays one message"),
    ("Ctrl-C", "ends the answer, or empties the line"),
    ("Up, Ctrl-R", "lines typed before"),
    ("//text", "says /text"),
)


class Nothing(MiniSGLError):
    """There is nothing that the command could be about."""


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
        """*unechoed* keeps what is typed during an answer off the screen."""
        self._server = server
        self._conversation = conversation
        self._model = model
        self._is_chosen = bool(model)
        self._screen = screen
        self._unechoed = unechoed
        self.is_leaving = False
        """Whether `leave` was called."""
        self._figures: list[Figures] = []
        self._uid = ""
        """What the server calls the last request."""
        self._failed = ""
        """The question that the server did not answer last."""
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/retry": self._retry,
            "/undo": self._undo,
            "/system": self._system,
            "/set": self._set,
            "/params": self._params,
            "/model": self._choose,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }

    def greet(self) -> None:
        """Say in one line who will answer."""
        try:
            name = asyncio.run(self._find_model())
        except Unanswered as error:
            self._screen.error(f"{error} (/help lists the commands)")
            return
        self._screen.note(f"{self._server.name}, model {name}; /help lists the commands")

    def run(self, read: Callable[[], str]) -> None:
        """Answer what *read* brings until it has no more (EOFError), or /exit, or `leave`."""
        while not self.is_leaving:
            try:
                if not self.take(read()):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:  # between two answers: nothing is lost by it
                self._screen.end_line()

    def leave(self) -> None:
        """End as soon as what is under way has ended, which it is asked to, as by Ctrl-C: the terminal gets back what
        prompt and answer changed. An exception out of a signal handler would be lost in the prompt.
        """
        self.is_leaving = True
        signal.raise_signal(signal.SIGINT)

    def take(self, text: str) -> bool:
        """Do what a typed line means; False when it asks to leave."""
        match read_line(text):
            case Command("/exit"):
                return False
            case Command(name, argument):
                try:
                    self._commands[name](argument)
                except Unanswered as error:
                    self._tell(error.refusal)
                except MiniSGLError as error:
                    self._screen.error(str(error))
            case Unknown(name, near):
                meant = f"; did you mean {' or '.join(near)}?" if near else "; /help lists the commands"
                self._screen.error(f"{name} is no command, and was not sent{meant} (//text says /text)")
            case Say(question):
                self._ask(question, list(self._conversation.turns))
        return True

    def _ask(self, question: str, before: Sequence[Turn]) -> None:
        """Ask *question* after the turns *before*; they and its answer are the conversation then, unless it fails."""
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
                self._figures.append(Figures(sent_s, first_s, time.monotonic(), reply.usage))
        if is_cut and not reply.texts:
            self._failed = question
            self._screen.note("cut before anything came; the question is taken back (/retry asks it again)")
            return
        self._conversation.turns = [*before, Turn(question, reply.text, is_cut)]
        if is_cut:
            self._screen.note("cut; the conversation has what came so far")
        elif reply.finish_reason == "length":
            self._screen.note("the answer ends here by its token limit (max_tokens), or because the context is full")
        if reply.unknown_fields:
            self._screen.note(f"the server does not know {reply.unknown_fields}, and did without")

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
            self._model = ""  # who comes back at this address may serve another one
        self._tell(refusal)
        if refusal.is_too_long:
            self._screen.note("/reset begins a new conversation, /undo takes the last turn back")

    def _tell(self, refusal: Refusal) -> None:
        self._screen.error(refusal.message)

    def _help(self, argument: str) -> None:
        rows = [(f"{name} {follows}".strip(), about) for name, (follows, about) in COMMANDS.items()]
        self._screen.table([*rows, *KEYS])

    def _reset(self, argument: str) -> None:
        self._conversation.turns = []
        self._failed = ""
        self._screen.note("the conversation is empty")

    def _retry(self, argument: str) -> None:
        turns = self._conversation.turns
        if self._failed:
            question, before = self._failed, turns
        elif turns:
            question, before = turns[-1].question, turns[:-1]
        else:
            raise Nothing("there is no question yet")
        self._screen.note(f"again: {_start(question)}")
        self._ask(question, list(before))

    def _undo(self, argument: str) -> None:
        if not self._conversation.turns:
            raise Nothing("the conversation is empty")
        *self._conversation.turns, last = self._conversation.turns
        self._failed = ""
        self._screen.note(f"taken back: {_start(last.question)}")

    def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = "" if argument in ('""', "''") else argument
        if argument and not self._conversation.system:
            self._screen.note("no system text any more")
        elif self._conversation.system:
            self._screen.note(f"system: {self._conversation.system}")
        else:
            self._screen.note("no system text")

    def _set(self, argument: str) -> None:
        settings = read_settings(argument)
        unknown = [name for name in settings.taken_back if name not in self._conversation.params]
        if unknown:
            raise Nothing(f"{unknown[0]} is not set")
        kept_params = {n: v for n, v in self._conversation.params.items() if n not in settings.taken_back}
        self._conversation.params = kept_params | dict(settings.values)
        self._params("")

    def _params(self, argument: str) -> None:
        self._screen.note(_shown(self._conversation.params) or "nothing is set; the server's defaults count")

    def _choose(self, argument: str) -> None:
        if argument:
            self._model, self._is_chosen = argument, True
        try:
            names = asyncio.run(self._server.models())
        except Unanswered as error:
            if not argument:
                raise
            self._screen.note(f"{argument} it is; whether there is such a model is not known: {error}")
            return
        if argument and argument not in names:
            listed = ", ".join(names) or "none"
            self._screen.note(f"{argument} it is, though the server does not list it; it lists {listed}")
            return
        if not self._model:
            self._model = names[0] if names else ""
        for name in names:
            self._screen.say(f"{'*' if name == self._model else ' '} {name}")

    def _stats(self, argument: str) -> None:
        if not self._figures:
            raise Nothing("nothing was answered yet")
        self._screen.table(table(self._figures), header=("", "last", "session"), right=(1,))
        if self._uid:
            self._screen.note(f"`minisgl trace {self._uid}` tells the last one's story")

    def _save(self, argument: str) -> None:
        kept.save(self._conversation, _file(argument))
        self._screen.note(f"saved: {_summary(self._conversation)}")

    def _load(self, argument: str) -> None:
        self._conversation = kept.load(_file(argument))
        self._failed = ""
        self._screen.note(f"loaded: {_summary(self._conversation)}")


def _file(argument: str) -> Path:
    if not argument:
        raise Nothing("which file? Name it after the command")
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
