"""Brings conversations into the shape that a chat template takes. It is found at the start by rendering small ones.

Templates differ in how they read content, where a system message may be, and how they print arguments of calls. A
template silently leaves out what it cannot read. The text of a template is never searched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
from pydantic_core import from_json

from pipeline.errors import ConfigError

if TYPE_CHECKING:  # the process that checks grammars needs no tokenizer
    from transformers import PreTrainedTokenizerFast

QUESTION: Final = "probe question"
ANSWER: Final = "probe answer"
RULE: Final = "probe rule"
LATER_RULE: Final = "probe instruction"
THOUGHT: Final = "probe thought"
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]},
    },
}
ARGUMENTS: Final = {"probe_key": "probe_value"}
OTHER_ARGUMENTS: Final = {"probe_key": "probe_other"}
CUT_ARGUMENTS: Final = '{"probe_key": "probe_val'
ROLES: Final = ("user", "assistant", "system", "tool")
SYSTEM_NOTE: Final = "System message:\n"
"""Beginning of a system message that a template takes only as text of the user."""
LONGEST_ERROR: Final = 400
"""Largest number of characters of a template's error: transformers may quote the whole conversation."""
_PRINTED_PART: Final = re.compile(r"""["']type["']: ?["']text["']""")
"""Text that shows that a template prints a list as it is, without reading its parts."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of the conversations that a chat template takes."""

    parts: frozenset[str] = frozenset()
    """Roles whose content is a list of parts."""
    arguments: Literal["object", "text", "both"] = "object"
    """Form of a call's arguments: `both` prints an object as JSON, and a text as it is."""
    systems: Literal["anywhere", "first", "nowhere"] = "anywhere"
    """Places where a system message may be."""
    calls_apart: bool = False
    """Whether calls are shown only in a message without content, which is None there."""
    one_call: bool = False
    """Whether only one call of a message is shown."""
    thought_or_content: bool = False
    """Whether a message that has calls, a thought and content is refused."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Shape:
        """Find the shape that the template of *tokenizer* takes.

        Raises:
            ConfigError: The template does not show a user's message.
        """
        try:
            tokenizer.get_chat_template()
        except ValueError:  # there is none for conversations without tools
            return cls()
        shape = _with_users(tokenizer)
        for role in ("assistant", "system"):
            shape = _with_contents(tokenizer, shape, role)
        shape = _with_calls(tokenizer, replace(shape, arguments=_arguments(tokenizer, shape)))
        return replace(_with_contents(tokenizer, shape, "tool"), systems=_systems(tokenizer, shape))

    def rendered(self, tokenizer: PreTrainedTokenizerFast, messages: Messages, **options: Any) -> str:
        """Return a small conversation as text; empty if the template refuses it."""
        try:
            return applied(tokenizer, self.shaped(messages), **options)
        except Exception:  # a template is a program and may raise anything; then it does not take this conversation
            return ""

    def shaped(self, messages: Messages) -> list[dict[str, Any]]:
        """Return *messages* as the template takes them; their content must be text, and their arguments JSON."""
        whole = self._with_systems(_merged(messages))
        each = (part for message in (_one_by_one(whole) if self.one_call else whole) for part in self._parted(message))
        return [self._message(message) for message in each]

    def _parted(self, message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield a message, or two messages if it has content and calls that must stand apart."""
        if not self.calls_apart or not message.get("tool_calls"):
            yield message
            return
        if message["content"]:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**message, "content": None}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        shaped, content, thought = dict(message), message.get("content"), message.get("reasoning_content")
        if thought and content and self.thought_or_content and message.get("tool_calls"):
            thought, content = f"{thought}\n\n{content}", ""
            shaped |= {"reasoning_content": thought, "content": content}
        if thought:
            shaped["thought"] = thought  # MiniCPM's name for it; transformers knows the others
        if message["role"] in self.parts and isinstance(content, str):
            shaped["content"] = [{"type": "text", "text": content}]
        if message.get("tool_calls"):
            shaped["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return shaped

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        function["arguments"] = self._printed(function.get("arguments") or "{}")
        return {**call, "function": function}

    def _printed(self, arguments: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
        """Return *arguments* as the template prints them: if they are not an object, `{}` or the text as it is."""
        if self.arguments == "text":
            return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        found = object_of(arguments) if isinstance(arguments, str) else arguments
        if found is None:
            return arguments if self.arguments == "both" else {}
        return found

    def _with_systems(self, messages: Messages) -> Messages:
        """Return *messages*; system messages that the template does not take become text of the user."""
        if self.systems == "anywhere":
            return messages
        kept = messages[:1] if self.systems == "first" else ()
        found, after_note = list(kept), False
        for message in messages[len(kept) :]:
            is_note = message["role"] == "system"
            if is_note:
                message = {"role": "user", "content": SYSTEM_NOTE + message["content"]}
            is_next = bool(found) and found[-1]["role"] == message["role"] == "user"
            if is_next and (is_note or after_note):  # many templates refuse two turns of the user in a row
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
            after_note = is_note
        return found


def object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object in *text*; None if there is something else."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def applied(tokenizer: PreTrainedTokenizerFast, messages: Messages, **options: Any) -> str:
    """Return a conversation as the template of *tokenizer* renders it.

    Like `apply_chat_template`, but keep content that is None: some templates require it.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=options.get("tools"))
    texts, _ = render_jinja_template([messages], chat_template=template, **{**tokenizer.special_tokens_map, **options})
    return str(texts[0])


def user() -> dict[str, str]:
    """Return the message of a user."""
    return {"role": "user", "content": QUESTION}


def called(*arguments: str | Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with a tool call for each of *arguments*. Templates differ in what they need around it."""
    calls = [
        {"id": f"probe000{number}", "type": "function", "function": {"name": "probe_tool", "arguments": each}}
        for number, each in enumerate(arguments, 1)  # Mistral's templates need nine letters and digits as an id
    ]
    answered = [{"role": "tool", "content": ANSWER, "tool_call_id": call["id"], "name": "probe_tool"} for call in calls]
    for content in ("", None):
        for after in ([], answered):
            yield [user(), {"role": "assistant", "content": content, "tool_calls": calls}, *after]


def _merged(messages: Messages) -> Messages:
    """Return *messages* with the system messages at their beginning as one."""
    num = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if num < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:num])
    return [{**messages[0], "content": text}, *messages[num:]]


def _one_by_one(messages: Messages) -> Iterator[Mapping[str, Any]]:
    """Yield *messages* with one call in each, and its result after it."""
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        *calls, last = message.get("tool_calls") or [None]
        results = defaultdict[str, list[Mapping[str, Any]]](list)
        while calls and place < len(messages) and messages[place]["role"] == "tool":
            results[messages[place].get("tool_call_id", "")].append(messages[place])
            place += 1
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from results.pop(call["id"], ())
            message = {"role": message["role"], "content": ""}
        yield {**message, "tool_calls": [last]} if last is not None else message
        yield from (result for those in results.values() for result in those)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {**first, **second, "content": f"{first['content']}\n\n{second['content']}"}


def _shows(tokenizer: PreTrainedTokenizerFast, shape: Shape, messages: Messages, **options: Any) -> bool:
    """Return whether the text of a small conversation has the text of all its messages."""
    text = shape.rendered(tokenizer, messages, **options)
    texts = [message["content"] for message in messages if message["content"]]
    return all(each in text for each in texts) and not (shape.parts and _PRINTED_PART.search(text))


def _with_users(tokenizer: PreTrainedTokenizerFast) -> Shape:
    """Return how the template reads a user's message. Other roles are read the same way, until they show otherwise."""
    alone, ruled = [user()], [{"role": "system", "content": RULE}, user()]
    for shape in (Shape(), Shape(parts=frozenset(ROLES))):
        if _shows(tokenizer, shape, alone) or _shows(tokenizer, shape, ruled):
            return shape
    try:
        tokenizer.apply_chat_template(alone, tokenize=False)
        why = ""
    except Exception as error:  # as in `rendered`
        why = f" ({str(error)[:LONGEST_ERROR]})"
    raise ConfigError(
        f"{tokenizer.name_or_path}: its chat template does not show a user's message, neither as a text nor as a list "
        f"of parts{why}; correct the template, or remove it and send `prompt` instead of `messages`"
    )


def _with_contents(tokenizer: PreTrainedTokenizerFast, shape: Shape, role: str) -> Shape:
    """Return *shape* with the content of *role* the other way, if the template shows it only that way."""
    said = {"role": role, "content": ANSWER}
    probes = {"assistant": [[user(), said, user()]], "system": [[said, user()]]}
    other = replace(shape, parts=shape.parts ^ {role})
    for probe in probes.get(role) or (each for each in called(ARGUMENTS) if each[-1]["role"] == role):
        if _shows(tokenizer, shape, probe, tools=[TOOL] if role == "tool" else None):
            return shape
        if _shows(tokenizer, other, probe, tools=[TOOL] if role == "tool" else None):
            return other
    return shape


def _arguments(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Literal["object", "text", "both"]:
    """Return how the template prints the arguments of a call; `object` if it shows no calls."""
    as_text = replace(shape, arguments="text")
    objects = [shape.rendered(tokenizer, probe, tools=[TOOL]) for probe in called(ARGUMENTS)]
    texts = [as_text.rendered(tokenizer, probe, tools=[TOOL]) for probe in called(CUT_ARGUMENTS)]
    if not any(CUT_ARGUMENTS in text for text in texts):
        return "object"
    printed = str(ARGUMENTS)  # what Python prints is not JSON
    return "both" if any(ARGUMENTS["probe_key"] in text and printed not in text for text in objects) else "text"


def _with_calls(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Shape:
    """Return *shape* with how the template takes messages that have calls and more."""

    def shows(shape: Shape, *arguments: Mapping[str, str], **more: str) -> bool:
        for probe in called(*arguments):
            probe[1] |= {"content": "", **more}
            text = shape.rendered(tokenizer, probe, tools=[TOOL])
            if all(each["probe_key"] in text for each in arguments):
                return True
        return False

    apart = replace(shape, calls_apart=True)
    if not shows(shape, ARGUMENTS) and shows(apart, ARGUMENTS):
        shape = apart
    if shows(shape, ARGUMENTS) and not shows(shape, ARGUMENTS, OTHER_ARGUMENTS):
        shape = replace(shape, one_call=True)
    has_either = shows(shape, ARGUMENTS, content=ANSWER) and shows(shape, ARGUMENTS, reasoning_content=THOUGHT)
    is_refused = has_either and not shows(shape, ARGUMENTS, content=ANSWER, reasoning_content=THOUGHT)
    return replace(shape, thought_or_content=is_refused)


def _systems(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Literal["anywhere", "first", "nowhere"]:
    """Return where the template takes a system message."""
    first, later = ({"role": "system", "content": text} for text in (RULE, LATER_RULE))
    answer = {"role": "assistant", "content": ANSWER}
    if _shows(tokenizer, shape, [first, user(), answer, later, user()]):
        return "anywhere"
    return "first" if _shows(tokenizer, shape, [first, user()]) else "nowhere"
