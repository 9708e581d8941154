"""Chat messages and tools: as clients send them, and as chat templates take them. Knows nothing of HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from pipeline.events import Templating
from web.wire.fields import refused
from web.wire.openai.bulk import MOST_LARGE, bulk_of
from web.wire.openai.held import HeldSchema, held
from web.wire.openai.strict import Strict, refuse_unsupported, wrong

MOST_MESSAGES: Final = 4096
MOST_PARTS: Final = 4096
"""Most parts of one message."""
MOST_CALLS: Final = 1024
"""Most calls in one message."""
MOST_TOOLS: Final = 1024
TOOL_NAME: Final = r"^[a-zA-Z0-9_.-]{1,128}$"
LONGEST_NAME: Final = 1024
"""Most characters of a name, or of an id."""
MOST_IN_ARGUMENTS: Final = 2 * MOST_LARGE
"""Most values in the arguments of all calls together. They are JSON within a text, which a parser has to read, too."""

Name = Annotated[str, Field(max_length=LONGEST_NAME)]


class Content(NamedTuple):
    """The content of a message."""

    text: str
    thought: str = ""
    """The text of its parts of type `thinking`."""


class TextPart(TypedDict):
    """A text."""

    type: Annotated[Literal["text", "input_text"], Field(description="`text`, or `input_text` with the same meaning.")]
    text: Annotated[str, Field(description="The text.")]


class RefusalPart(TypedDict):
    """A refusal of the assistant. The chat template gets it as text."""

    type: Annotated[Literal["refusal"], Field(description="Always `refusal`.")]
    refusal: Annotated[str, Field(description="What the assistant said.")]


class ThinkingPart(TypedDict):
    """What the assistant thought. The chat template gets it as `reasoning_content`."""

    type: Annotated[Literal["thinking"], Field(description="Always `thinking`.")]
    thinking: Annotated[str | list[TextPart], Field(description="The thought, or a list of text parts.")]


PARTS: Final = {"text": "text", "input_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of parts, and the member that has the text of each."""


def _content_of(content: object) -> Content | None:
    """Return the content of a message: a text, or the texts of a list of parts with line breaks in between."""
    if content is None:
        return None
    if isinstance(content, str):
        return Content(content)
    if not isinstance(content, list):
        raise PydanticCustomError("content", "Input should be a string or a list of parts")
    if not content:
        raise PydanticCustomError("no_parts", "Input should have at least one part")
    if len(content) > MOST_PARTS:
        message = "Input should have at most {most} parts, not {num}"
        raise PydanticCustomError("too_long", message, {"most": MOST_PARTS, "num": len(content)})
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(content):
        text = _text_of(part)
        if text is None:
            accepted = ", ".join(f"`{kind}` with a string in `{member}`" for kind, member in PARTS.items())
            message = f"Part {index} is not supported; accepted are {accepted}"
            raise PydanticCustomError("part", "{message}", {"message": message})
        (thoughts if part["type"] == "thinking" else texts).append(text)
    return Content("\n".join(texts), "\n".join(thoughts))


def _text_of(part: Any) -> str | None:
    """Return the text of a part; None if it is none that is supported. A thought may be a list of text parts."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PARTS:
        return None
    text = part.get(PARTS[kind])
    if kind == "thinking" and isinstance(text, list):
        within = [each["text"] for each in text if isinstance(each, dict) and isinstance(each.get("text"), str)]
        return "\n".join(within) if len(within) == len(text) else None
    return text if isinstance(text, str) else None


def _arguments_text(arguments: object) -> str:
    """Return arguments as the text that OpenAI's clients send; some others send the object itself."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class FunctionCall(Strict):
    """Which function the assistant called, and with what."""

    name: Annotated[Name, Field(min_length=1)]
    """Name of the function."""
    arguments: Annotated[str, BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any] | None)] = ""
    """Its arguments, as the text of a JSON object. Empty: none. If they are anything else, such as the beginning of an
    object, the chat template gets `{}`, or the text where it prints texts; the header `x-minisgl-warnings` says so."""


class ToolCall(Strict):
    """One call in a message of the assistant."""

    id: Name
    """Id of the call. The message with its result repeats it."""
    type: Literal["function"] | None = None
    """Always `function`."""
    function: FunctionCall
    """The function and its arguments."""


class Message(Strict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it. `developer` means `system`."""
    content: Annotated[
        Content | None,
        PlainValidator(_content_of, json_schema_input_type=str | list[TextPart | RefusalPart | ThinkingPart] | None),
    ] = None
    """The text, or a list of parts: texts, and of the assistant also refusals and thoughts."""
    name: Name | None = None
    """Name of who says it, for chat templates that show one."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_CALLS)] | None = None
    """The calls of an assistant's message."""
    tool_call_id: Name | None = None
    """In a message of role `tool`: the call that it answers."""
    reasoning_content: str | None = None
    """What the assistant thought before it answered."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    @property
    def thought(self) -> str:
        """What the assistant thought; "" if the message does not say."""
        return self.reasoning_content or self.reasoning or (self.content.thought if self.content is not None else "")

    @property
    def unknown(self) -> set[str]:
        """Unknown fields, without the index of a tool call."""
        names = set(self.extra) - set(_REFUSED)
        for call in self.tool_calls or ():
            names |= {f"tool_calls.{name}" for name in call.extra}
            names |= {f"tool_calls.function.{name}" for name in call.function.extra}
        return names


_REFUSED: Final = refused("message", Message.model_fields)


def _parameters(schema: object) -> HeldSchema:
    if not isinstance(schema, dict):
        raise PydanticCustomError("dict_type", "Input should be an object")
    return held(schema)


Parameters = Annotated[Any, AfterValidator(_parameters), WithJsonSchema({"type": "object"})]
"""The JSON schema of a tool's arguments. Becomes a HeldSchema."""


class FunctionOfTool(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    """Name of the function."""
    description: str | None = None
    """What the function does, for the model."""
    parameters: Parameters | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Arguments must follow `parameters`, also if the model may answer without a call."""


class Tool(Strict):
    """An entry of `tools`."""

    type: Literal["function"]
    """Always `function`."""
    function: FunctionOfTool
    """The function."""

    @property
    def unknown(self) -> set[str]:
        """Unknown fields."""
        return set(self.extra) | {f"function.{name}" for name in self.function.extra}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)]


def check_messages(messages: Sequence[Message]) -> None:
    """Check that each message has the fields that its role needs, and no others.

    Raises:
        RequestError: For the first message that is wrong.
    """
    left = MOST_IN_ARGUMENTS
    for index, message in enumerate(messages):
        path = f"messages.{index}."
        for number, call in enumerate(message.tool_calls or ()):
            left -= sum(bulk_of(call.function.arguments.encode()))
            if left < 0:
                most = f"the arguments of all calls have more than {MOST_LARGE} values together"
                raise wrong(f"{path}tool_calls.{number}.function.arguments", most)
        if message.content is None and message.role not in ("assistant", "tool"):
            raise wrong(f"{path}content", "should be a string or a list of parts")
        if message.tool_calls and message.role != "assistant":
            raise wrong(f"{path}tool_calls", "only a message of the assistant has calls")
        if message.role == "tool" and not message.tool_call_id:
            raise wrong(f"{path}tool_call_id", "missing; say which call this answers")
        if message.role != "tool" and message.tool_call_id is not None:
            raise wrong(f"{path}tool_call_id", "only a message of role `tool` answers a call")
        if message.thought and message.role != "assistant":
            name = next((name for name in ("reasoning_content", "reasoning") if getattr(message, name)), "content")
            raise wrong(f"{path}{name}", "only a message of the assistant has reasoning")
        if message.reasoning_content and message.reasoning not in (None, "", message.reasoning_content):
            raise wrong(f"{path}reasoning", "means the same as `reasoning_content`, which has another text")
        refuse_unsupported(message.extra, _REFUSED, path)


def plain_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return *messages* as `Submitted` keeps them and chat templates take them: `developer` becomes `system`, which all
    templates know. Arguments of calls stay the text that was sent."""
    return tuple(_plain(message) for message in messages)


def _plain(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.content.text if message.content is not None else ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.thought:
        plain["reasoning_content"] = message.thought
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def plain_tools(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Return *tools* as templates take them: the known fields that are set, in the order of the model."""
    return tuple({"type": tool.type, "function": _plain_function(tool.function)} for tool in tools)


def _plain_function(function: FunctionOfTool) -> dict[str, Any]:
    given = {name: getattr(function, name) for name in FunctionOfTool.model_fields}
    plain = {name: value.value if isinstance(value, HeldSchema) else value for name, value in given.items()}
    return {name: value for name, value in plain.items() if value is not None}


def member_of(
    item: Mapping[str, Any], name: str, path: str, *, most: int = LONGEST_NAME, usual: str | None = None
) -> str:
    """Return a text in an *item* at *path*, of at most so many characters if *most* is not 0.

    Raises:
        RequestError: It is not there and has no *usual* value, or is too long.
    """
    value = item.get(name, usual)
    if not isinstance(value, str):
        raise wrong(f"{path}.{name}", "should be a string")
    if most and not 0 < len(value) <= most:
        raise wrong(f"{path}.{name}", f"should have 1 to {most} characters")
    return value


def joined(texts: Sequence[str]) -> str:
    """Return the *texts* of an answer as one. Ours begins with line breaks where it comes after a call."""
    parts: list[str] = []
    for text in filter(None, texts):
        parts += ["\n", text] if parts and not text.startswith("\n") else [text]
    return "".join(parts)


def templating_of(
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any] | None,
) -> Templating:
    """Return what the template takes beside the messages. It opens a new answer, unless the last message continues.

    Raises:
        RequestError: Both are asked for.
    """
    if add_generation_prompt and continue_final_message:
        message = "not together with `add_generation_prompt`, which begins a new message"
        raise wrong("continue_final_message", message)
    opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    return Templating(
        add_generation_prompt=opens,
        continue_final_message=bool(continue_final_message),
        tools=plain_tools(tools or ()),
        variables=dict(variables or {}),
    )
