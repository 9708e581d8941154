"""One question and its answer, for scripts: only the answer goes to the output."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TextIO

from ops.shell.conversation import Conversation
from ops.shell.reply import Reply
from ops.shell.server import NO_MODEL, Server
from ops.shell.text import printable


def answer_once(server: Server, conversation: Conversation, model: str, question: str, out: TextIO) -> Reply:
    """Ask *question*, write the answer and a newline to *out*, and return the reply.

    Raises:
        Unanswered: There was no answer, or it broke off.
        BrokenPipeError: The reader of *out* is gone.
    """
    reply = Reply()
    asyncio.run(_answer(server, conversation.body(model, question, ()), out, reply))
    return reply


async def _answer(server: Server, body: dict[str, Any], out: TextIO, reply: Reply) -> None:
    is_terminal = out.isatty()
    last = ""
    if not body["model"]:
        body["model"] = next(iter(await server.models()), NO_MODEL)
    pieces = server.answer(body, reply)
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece.kind == "text":
                    out.write(printable(piece.text) if is_terminal else piece.text)
                    out.flush()
                    last = piece.text[-1]
    except BaseException:
        last = last or "\n"  # without text there is no line to end
        raise
    finally:
        if last != "\n":
            out.write("\n")
            out.flush()
