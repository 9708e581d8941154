"""Items of OpenAI's Responses API, as messages of a chat, and back.

What the assistant thought, said and called is an item each, and one message while nothing else comes in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from pipeline.errors import RequestError
from web.wire.openai.bulk import MOST_LARGE, bulk_of
from web.wire.openai.messages import (
    MOST_CALLS,
    MOST_IN_ARGUMENTS,
    MOST_MESSAGES,
    MOST_PARTS,
    joined,
    member_of,
)
from web.wire.openai.strict import wrong
from web.wire.signatures import Signatures
from web.wire.uids import uid_of

ITEMS: Final = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    "item_reference",
)
"""The types of items that a conversation may have."""
MEMBERS: Final = {
    *("type", "id", "status", "role", "content", "call_id", "name", "namespace", "arguments", "input", "output"),
    *("summary", "encrypted_content"),
}
"""The members that items may have."""
CALLS: Final[Mapping[str, str]] = {"function_call": "arguments", "custom_tool_call": "input"}
"""The types of calls, and the member with what is passed."""
TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts, and the member that has the text of each."""
ROLES: Final[Mapping[str, str]] = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
"""The roles of messages, and those that chat templates know."""
MOST_ITEMS: Final = 2 * MOST_MESSAGES
MOST_BYTES: Final = 4 << 20
"""Most bytes of text in a conversation, with all that it goes on after or refers to. No tokenizer takes more."""
BETWEEN: Final = "__"
"""Between a namespace and the name of its tool."""
INPUT: Final = "in"
"""Before the number of an item of the input, in its id; the output has numbers alone."""
_ID: Final = re.compile(rf"(?:msg|rs|fc|ctc|fco)_([0-9a-f.]+)_(?:{INPUT})?[0-9]{{1,6}}")

Item = dict[str, Any]
Message = dict[str, Any]


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return f"{namespace}{BETWEEN}{name}" if namespace else name


def response_uid(item_id: str) -> str:
    """Return the uid of the response that has the item with this id; "" if it is no id of ours."""
    found = _ID.fullmatch(item_id)
    return uid_of(found[1]) if found else ""


class Conversation:
    """The fold of items into messages."""

    def __init__(self, found: Mapping[str, Item] | None = None) -> None:
        """*found*: the items that references name, by their ids."""
        self.unknown: set[str] = set()
        """Unknown members of items, without their numbers."""
        self.left_out: list[str] = []
        """Places of thoughts that the model does not get: they have no text, and their content cannot be read."""
        self._messages: list[Message] = []
        self._found = found or {}
        self._signatures = Signatures()
        self._arguments_left = MOST_IN_ARGUMENTS
        self._bytes_left = MOST_BYTES
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        """Texts of the last message, if that is one of the assistant's to which more items may belong."""
        self._answers = False

    def begin(self, messages: Sequence[Message], path: str) -> None:
        """Add *messages* as they are, for the field at *path*. Raises RequestError: They are too long."""
        for message in messages:
            self._add(message, path)

    @property
    def messages(self) -> list[Message]:
        """All messages so far."""
        self._close()
        return self._messages

    def add(self, item: object, path: str) -> None:
        """Add the item at *path* of the body.

        Raises:
            RequestError: It is not supported, or a member of it is missing or wrong.
        """
        if not isinstance(item, dict):
            raise wrong(path, "should be an object")
        self.unknown |= {f"input.{name}" for name in item.keys() - MEMBERS}
        kind = kind_of(item)
        if kind == "item_reference":
            item = self._found[member_of(item, "id", path)]
            kind = kind_of(item)
        match kind:
            case "message":
                self._message(item, path)
            case "reasoning":
                if thought := self._thought(item, path):
                    self._answer(path)
                    self._thoughts.append(thought)
                    self._count(path, thought)
            case "function_call" | "custom_tool_call":
                self._call(item, kind, path)
            case "function_call_output" | "custom_tool_call_output":
                result = text_of(item.get("output"), f"{path}.output")
                self._add({"role": "tool", "content": result, "tool_call_id": member_of(item, "call_id", path)}, path)
            case _:
                raise _unsupported(f"an item of type `{kind[:32]}`", ITEMS, path, "type")

    def _add(self, message: Message, path: str, *, answers: bool = False) -> None:
        self._close()
        self._messages.append(message)
        self._answers = answers
        calls = (call["function"]["arguments"] for call in message.get("tool_calls") or ())
        self._count(path, message["content"], message.get("reasoning_content", ""), *calls)

    def _count(self, path: str, *texts: str) -> None:
        """Refuse a conversation that is too long, however it came to be: an item may be referred to many times."""
        self._bytes_left -= sum(len(text.encode()) for text in texts)
        if self._bytes_left < 0 or len(self._messages) > MOST_ITEMS:
            most = f"{MOST_ITEMS} messages, or {MOST_BYTES} bytes of text"
            raise wrong(path, f"up to here, the conversation has more than {most}")

    def _message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(f"{path}.role", f"should be one of {', '.join(ROLES)}")
        text = text_of(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._add({"role": ROLES[role], "content": text}, path)
            return
        self._answer(path)
        self._texts.append(text)
        self._count(path, text)

    def _call(self, item: Item, kind: str, path: str) -> None:
        call = _call(item, kind, path)
        arguments = call["function"]["arguments"]
        self._arguments_left -= sum(bulk_of(arguments.encode()))
        if self._arguments_left < 0:
            most = f"the arguments of all calls have more than {MOST_LARGE} values together"
            raise wrong(f"{path}.{CALLS[kind]}", most)
        calls = self._answer(path).setdefault("tool_calls", [])
        calls.append(call)
        self._count(path, arguments)
        if len(calls) > MOST_CALLS:
            raise wrong(path, f"up to here, one answer has more than {MOST_CALLS} calls")

    def _answer(self, path: str) -> Message:
        """Return the message of the assistant, which goes on or begins."""
        if not self._answers:
            self._add({"role": "assistant", "content": ""}, path, answers=True)
        return self._messages[-1]

    def _close(self) -> None:
        """Put the texts of the assistant's message together."""
        if self._answers:
            message = self._messages[-1]
            message["content"] = joined(self._texts)
            if self._thoughts:
                message["reasoning_content"] = "\n".join(self._thoughts)
        self._answers, self._texts, self._thoughts = False, [], []

    def _thought(self, item: Item, path: str) -> str:
        """Return what is thought in an item: its own text, or what its encrypted content carries."""
        content = item.get("content")
        if content:
            return text_of(content, f"{path}.content", {"reasoning_text": "text", "text": "text"})
        signature = item.get("encrypted_content")
        if signature is None:
            return ""
        thought = self._signatures.thought_of(member_of(item, "encrypted_content", path, most=0))
        if thought is None:
            self.left_out.append(f"{path}.encrypted_content")
        return thought or ""


def kind_of(item: Item) -> str:
    """Return the type of an item. Those of messages and references may be left out."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference" if "id" in item else "None"
    return str(kind)


def _call(item: Item, kind: str, path: str) -> Message:
    given = member_of(item, CALLS[kind], path, most=0)
    namespace = item.get("namespace")
    if namespace is not None:
        namespace = member_of(item, "namespace", path)
    name = full_name(member_of(item, "name", path), namespace)
    arguments = json.dumps({"input": given}, ensure_ascii=False) if kind == "custom_tool_call" else given
    function = {"name": name, "arguments": arguments}
    return {"id": member_of(item, "call_id", path), "type": "function", "function": function}


def text_of(content: object, path: str, kinds: Mapping[str, str] = TEXTS) -> str:
    """Return a text, or the texts of a list of parts with line breaks in between.

    Raises:
        RequestError: It is neither, or a part is not of *kinds*, which have the member with the text of each.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(path, "should be a string or a list of parts")
    if len(content) > MOST_PARTS:
        raise wrong(path, f"should have at most {MOST_PARTS} parts, not {len(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise _unsupported(f"a part of type `{str(kind)[:32]}`", kinds, f"{path}.{number}", "type")
        texts.append(member_of(part, kinds[kind], f"{path}.{number}", most=0))
    return "\n".join(texts)


def _unsupported(what: str, accepted: Sequence[str] | Mapping[str, str], path: str, member: str) -> RequestError:
    names = ", ".join(f"`{name}`" for name in accepted)
    message = f"{path}: {what} is not supported here; accepted are {names}"
    return RequestError(message, param=f"{path}.{member}", code="unsupported_content")


def input_in(arguments: str) -> str:
    """Return the one text in the arguments of a custom tool; all of them if there is none, as where a call was cut."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def items_of(messages: Sequence[Message], uid: str, special: Mapping[str, Mapping[str, Any]]) -> Iterator[Item]:
    """Yield *messages* as items of the input of the response *uid*. *special*: what calls of other tools than functions
    have beside a name."""
    number = 0
    custom = set[str]()

    def made(prefix: str, **fields: Any) -> Item:
        nonlocal number
        number += 1
        return {"id": f"{prefix}_{uid}_{INPUT}{number - 1}", "status": "completed", **fields}

    for message in messages:
        text, role = message.get("content") or "", message["role"]
        if role == "tool":
            kind = "custom_tool_call_output" if message["tool_call_id"] in custom else "function_call_output"
            yield made("fco", type=kind, call_id=message["tool_call_id"], output=text)
            continue
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            yield made("rs", type="reasoning", summary=[], content=content)
        if role == "assistant" and text:
            content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
            yield made("msg", type="message", role=role, content=content)
        elif role != "assistant":
            yield made("msg", type="message", role=role, content=[{"type": "input_text", "text": text}])
        for call in message.get("tool_calls") or ():
            made_of = call_item(call["id"], call["function"]["name"], call["function"]["arguments"], special)
            custom |= {call["id"]} if "input" in made_of else set()
            yield made("ctc" if "input" in made_of else "fc", **made_of)


def call_item(call_id: str, name: str, arguments: str, special: Mapping[str, Mapping[str, Any]]) -> Item:
    """Return what the item of a call has beside its id and status. *name*: that by which the model knows the tool."""
    told = special.get(name, {})
    item = {"call_id": call_id, "name": told.get("name", name)}
    if "namespace" in told:
        item["namespace"] = told["namespace"]
    if "custom" in told:
        return item | {"type": "custom_tool_call", "input": input_in(arguments)}
    return item | {"type": "function_call", "arguments": arguments}
