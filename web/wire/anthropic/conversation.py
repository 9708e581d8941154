"""Anthropic's turns and blocks, as messages of a chat.

A turn of the user may answer calls and ask something: that becomes several messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pipeline.errors import RequestError
from web.wire.openai.messages import MOST_CALLS, MOST_MESSAGES, joined, member_of
from web.wire.openai.strict import wrong
from web.wire.signatures import Signatures

BILLING: Final = "x-anthropic-billing-header:"
"""Begins a line of the system text that Claude Code changes from one request to the next. It says nothing to a model,
and the prefix cache would not find what follows it."""
BLOCKS: Final[Mapping[str, Sequence[str]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text", "tool_reference"),
}
"""The types of blocks that each role, and the result of a tool, may have."""
MOST_PARTS_OF_TURNS: Final = 2 * MOST_MESSAGES
"""Most messages that the turns of a conversation become."""

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]


class Conversation:
    """The fold of turns into messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: list[str] = []
        """Places of thoughts that the model does not get: they have no text, and their signature cannot be read."""
        self._signatures = Signatures()

    def system(self, content: Content) -> None:
        """Add the system text.

        Raises:
            RequestError: A block is no text.
        """
        texts = [_text(block, path, "system") for path, block in _blocks(content, "system")]
        text = "\n\n".join(filter(None, map(_without_billing, texts)))
        if text:
            self.messages.append({"role": "system", "content": text})

    def turn(self, role: str, content: Content, path: str) -> None:
        """Add a turn, whose content is at *path* in the body.

        Raises:
            RequestError: A block is not supported, or a member of it is missing or wrong.
        """
        blocks = list(_blocks(content, path))
        if role == "assistant":
            self.messages.append(self._answer(blocks))
        elif role == "user":
            self.messages += _asked(blocks)
        else:
            self.messages.append({"role": "system", "content": _joined(blocks, "system")})
        if len(self.messages) > MOST_PARTS_OF_TURNS:
            raise wrong(path, f"up to here, the turns have more than {MOST_PARTS_OF_TURNS} texts and results of tools")

    def _answer(self, blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Message] = []
        for path, block in blocks:
            match block.get("type"):
                case "thinking":
                    if thought := member_of(block, "thinking", path, most=0, usual="") or self._signed(block, path):
                        thoughts.append(thought)
                case "redacted_thinking":
                    self.left_out.append(path)
                case "tool_use":
                    calls.append(_call(block, path))
                case _:
                    texts.append(_text(block, path, "assistant"))
        message: Message = {"role": "assistant", "content": joined(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if len(calls) > MOST_CALLS:
            raise wrong(blocks[0][0].rpartition(".")[0], f"should have at most {MOST_CALLS} calls, not {len(calls)}")
        if calls:
            message["tool_calls"] = calls
        return message

    def _signed(self, block: Mapping[str, Any], path: str) -> str:
        """Return the thought in the signature of a *block*; "" if it cannot be read."""
        thought = self._signatures.thought_of(member_of(block, "signature", path, most=0, usual=""))
        if thought is None:
            self.left_out.append(f"{path}.signature")
        return thought or ""


def _asked(blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Message]:
    """Yield the messages of a turn of the user: results of tools, and the texts between them."""
    texts: list[str] = []
    for path, block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block, path, "user"))
            continue
        if texts:
            yield {"role": "user", "content": "\n".join(texts)}
            texts = []
        within = list(_blocks(block.get("content") or "", f"{path}.content"))
        call = member_of(block, "tool_use_id", path)
        yield {"role": "tool", "content": _joined(within, "tool_result"), "tool_call_id": call}
    if texts or not blocks:
        yield {"role": "user", "content": "\n".join(texts)}


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text


def _call(block: Mapping[str, Any], path: str) -> Message:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise wrong(f"{path}.input", "should be an object")
    function = {"name": member_of(block, "name", path), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": member_of(block, "id", path), "type": "function", "function": function}


def _blocks(content: Content, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each block with its path. A text is one block."""
    if isinstance(content, str):
        yield path, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise wrong(path, "should be a string or a list of blocks")
    for number, block in enumerate(content):
        if not isinstance(block, dict):
            raise wrong(f"{path}.{number}", "should be an object")
        yield f"{path}.{number}", block


def _joined(blocks: Sequence[tuple[str, Mapping[str, Any]]], where: str) -> str:
    return "\n".join(_text(block, path, where) for path, block in blocks)


def _text(block: Mapping[str, Any], path: str, where: str) -> str:
    """Return the text of a block of type `text`.

    Raises:
        RequestError: It has another type, which *where* does not accept.
    """
    if block.get("type") == "tool_reference" and where == "tool_result":  # a tool that a search found
        return member_of(block, "tool_name", path)
    if block.get("type") != "text":
        kind = str(block.get("type"))[:32]
        accepted = ", ".join(f"`{name}`" for name in BLOCKS[where])
        message = f"{path}: a block of type `{kind}` is not supported here; accepted are {accepted}"
        raise RequestError(message, param=path, code="unsupported_content")
    return member_of(block, "text", path, most=0)
