"""The shell's client for an OpenAI server. Knows HTTP and how to resume a broken stream, not what is shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final, TextIO
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp

from ops.shell.conversation import Conversation
from ops.shell.refusals import Refusal, refusal_of
from ops.shell.reply import Piece, Reply
from ops.shell.text import one_line, printable
from ops.sse_reader import Frame, FrameReader
from pipeline.errors import ConfigError, MiniSGLError

CONNECT_TIMEOUT_S: Final = 10.0
DOCUMENT_TIMEOUT_S: Final = 5.0
GO_ON_S: Final = 8.0
"""How long to retry a broken stream; a worker is back after two seconds, a server somewhat later."""
GO_ON_POLL_S: Final = 0.25
ASK_AGAIN_S: Final = (0.25, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0)
"""How long to wait before a question is sent again whose connection broke before an answer began."""
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
KEY: Final = "idempotency-key"
"""What is sent several times under one key is one request for a MiniSGL server."""
UID: Final = "x-minisgl-uid"
EVENT_IDS: Final = "x-minisgl-event-ids"
"""Asks a MiniSGL server for ids in the stream, after which a broken one resumes."""
UNKNOWN_FIELDS: Final = "x-minisgl-unknown-fields"
NOT_NOW: Final = (502, 503, 504)
BROKE: Final = Piece(" [the connection broke; reconnecting ..] ", "note")
NO_MODEL: Final = "default"
"""The model name for servers that list none."""
NETWORK: Final = (aiohttp.ClientError, OSError, TimeoutError)
NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
"""Those of them after which the server has got nothing."""


class Unanswered(MiniSGLError):
    """The server did not answer, or the answer broke off."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def base_of(url: str) -> str:
    """Return a server's address without /v1.

    Raises:
        ConfigError: It is not an address.
    """
    try:
        parts = urlsplit(url.strip())
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"--url {one_line(url)}: not a server address; expected one like http://127.0.0.1:1919")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class Server:
    """A server. Each request has its own connection, so none is stale after the server restarts."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """*url* comes from `base_of`."""
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def name(self) -> str:
        """The address without a password."""
        parts = urlsplit(self._url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    async def models(self) -> list[str]:
        """Return the names in /v1/models.

        Raises:
            Unanswered: There is no list.
        """
        try:
            return [str(model["id"]) for model in (await self._document("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unanswered(Refusal(f"{self.name}/v1/models does not list models")) from None

    async def stories(self, name: str) -> list[dict[str, Any]]:
        """Return what happened to the request that a MiniSGL server knows by *name*; of siblings, to each.

        Raises:
            Unanswered: The server does not know it, or is no MiniSGL.
        """
        path = f"/v1/requests/{quote(name, safe='')}"
        try:
            document = await self._document(path)
            stories: list[dict[str, Any]] = document.get("requests", [document])
            if all("moments" in story for story in stories):
                return stories
        except (ValueError, AttributeError, TypeError, RecursionError):
            pass
        raise Unanswered(Refusal(f"{self.name}{path} does not tell of a request"))

    async def _document(self, path: str) -> Any:
        """Return the JSON at *path*. Raises Unanswered without one, and as JSON does."""
        try:
            async with (
                self._session(aiohttp.ClientTimeout(total=DOCUMENT_TIMEOUT_S)) as session,
                session.get(f"{self._url}{path}") as response,
            ):
                content = await response.read()
                if response.status != 200:
                    raise Unanswered(refusal_of(response.status, content))
                return await response.json(content_type=None)
        except NETWORK as error:
            raise self._unreachable(error) from None

    async def answer(self, body: Mapping[str, Any], reply: Reply) -> AsyncGenerator[Piece, None]:
        """Send a request, fold the stream into *reply*, and yield the text to show. Closing the generator cancels it.

        Raises:
            Unanswered: The server refused it, or the stream broke and could not be resumed.
        """
        headers = {KEY: uuid.uuid4().hex, EVENT_IDS: "1"}
        has_begun, has_broken, trouble = False, False, "it ended too early"
        async with self._session(aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)) as session:
            for wait_s in (*ASK_AGAIN_S, 0.0):
                try:
                    async with session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
                        has_begun = response.status == 200
                        if not has_begun and not (has_broken and wait_s and response.status in NOT_NOW):
                            raise Unanswered(refusal_of(response.status, await response.read()))
                        if has_begun:
                            reply.uid = one_line(response.headers.get(UID, ""))
                            reply.unknown_fields = one_line(response.headers.get(UNKNOWN_FIELDS, ""))
                            async for piece in _pieces(response, reply):
                                yield piece
                except NETWORK as error:
                    trouble = _said(error)
                    was_sent = has_broken or not isinstance(error, NOT_CONNECTED)
                    if not has_begun and not (was_sent and wait_s):
                        raise self._unreachable(error) from None
                if has_begun:
                    break
                if not has_broken:
                    yield BROKE
                has_broken = True
                await asyncio.sleep(wait_s)
            if reply.uid and not reply.is_done and reply.refusal is None:
                async for piece in self._go_on(session, reply, trouble):
                    yield piece
            if reply.refusal is not None:
                raise Unanswered(reply.refusal)
            if not reply.has_ended:
                raise Unanswered(Refusal(f"the stream broke: {trouble}"))

    async def _go_on(self, session: aiohttp.ClientSession, reply: Reply, trouble: str) -> AsyncIterator[Piece]:
        """Read the rest of the answer from a MiniSGL server, as often as the stream breaks."""
        deadline_s = time.monotonic() + GO_ON_S
        has_told = False
        while time.monotonic() < deadline_s:
            after = {"last-event-id": reply.last_id} if reply.last_id else {}
            num_frames = reply.num_frames
            try:
                async with session.get(f"{self._url}/v1/requests/{reply.uid}/events", headers=after) as response:
                    if response.status == 200:
                        reply.go_on()
                        async for piece in _pieces(response, reply):
                            yield piece
                    elif response.status not in NOT_NOW:
                        found = refusal_of(response.status, await response.read())
                        raise Unanswered(Refusal(f"the stream broke: {trouble}; the rest: {found.message}"))
            except NETWORK as error:
                trouble = _said(error)
            if reply.is_done or reply.refusal is not None:
                return
            if reply.num_frames > num_frames:
                deadline_s = time.monotonic() + GO_ON_S
            elif not has_told:
                yield BROKE
                has_told = True
            await asyncio.sleep(GO_ON_POLL_S)

    def _session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        is_here = urlsplit(self._url).hostname in LOOPBACK  # a proxy could not reach it
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=not is_here)

    def _unreachable(self, error: BaseException) -> Unanswered:
        return Unanswered(Refusal(f"{self.name} cannot be reached: {_said(error)}"))


async def _pieces(response: aiohttp.ClientResponse, reply: Reply) -> AsyncIterator[Piece]:
    """Fold a response into *reply* until it ends or sends [DONE]."""
    if response.content_type == "application/json":  # the server does not stream
        for piece in reply.take(Frame((await response.read()).decode(errors="replace"))):
            yield piece
        return
    reader = FrameReader()
    while data := await response.content.readany():
        for frame in reader.feed(data):
            for piece in reply.take(frame):
                yield piece
            if reply.is_done or reply.refusal is not None:
                return


def _said(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError | OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return one_line(str(error) or type(error).__name__)[:200]


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
