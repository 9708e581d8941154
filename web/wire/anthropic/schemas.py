"""The bodies of /v1/messages and /v1/messages/count_tokens: https://docs.anthropic.com/en/api/messages.

A conversation becomes the same messages as in a chat (`plain_messages`), so the same turns are the same tokens on every
endpoint. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import AfterValidator, Field

from pipeline.events import Calls, Constraint, Presentation, SamplingParams, Submitted, Templating
from web.wire.anthropic.conversation import Conversation
from web.wire.endpoints import COUNT_ENDPOINT, MESSAGES_ENDPOINT
from web.wire.fields import Field as OtherField
from web.wire.fields import first_of, refused
from web.wire.openai.bulk import MOST_LARGE_OF_AGENTS
from web.wire.openai.messages import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, TOOL_NAME, Name, Parameters
from web.wire.openai.schemas import LONGEST_STOP, MOST_STOPS, SamplingFields, few_characters, refuse_long_labels
from web.wire.openai.strict import (
    INT32_MAX,
    INT64_MAX,
    TEXT_OR_LIST,
    WHOLE,
    Strict,
    at_most,
    kept_exactly,
    parsed,
    refuse_unsupported,
    text_or_list,
    wrong,
)
from web.wire.submit import Defaults, sampling_params

B = TypeVar("B", bound="Prompted")


Blocks = Annotated[Any, text_or_list("blocks", MOST_PARTS), TEXT_OR_LIST]
"""A text, or a list of blocks. `Conversation` reads them."""


class InputMessage(Strict):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    """Who says it. `developer` means `system`."""
    content: Blocks
    """The text, or a list of blocks: of the user `text` and `tool_result`, of the assistant `text`, `thinking` and
    `tool_use`."""


NOTED: Final = {
    f"tools.{name}" for name in ("cache_control", "defer_loading", "eager_input_streaming", "input_examples")
}
"""Fields that change nothing here. Agents send them with each tool."""


class InputTool(Strict):
    """An entry of `tools`."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    """Name of the tool."""
    type: str | None = None
    """`custom`, or nothing. A tool of Anthropic's servers is left out; the header `x-minisgl-ignored` names it."""
    description: str | None = None
    """What the tool does, for the model."""
    input_schema: Parameters | None = None
    """JSON schema of its input."""
    strict: bool | None = None
    """The input must follow `input_schema`, also if the model may answer without a call."""

    @property
    def is_hosted(self) -> bool:
        """Whether Anthropic's servers would run it."""
        return self.type not in (None, "custom")


class InputToolChoice(Strict):
    """Whether the answer may, must not or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    """`any`: the answer is a call. `tool`: of the tool in `name`."""
    name: Name | None = None
    """Name of the tool, with `type: tool`."""
    disable_parallel_tool_use: bool | None = None
    """The answer has at most one call."""


class Thinking(Strict):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`adaptive`: as the chat template has it."""
    budget_tokens: Annotated[int, Field(ge=1, le=INT64_MAX), WHOLE] | None = None
    """Most tokens of thinking."""
    display: Literal["summarized", "full", "omitted"] | None = None
    """`omitted`: blocks of thinking come without text. Their signature has it."""


class OutputFormat(Strict):
    """What the answer must be."""

    type: Literal["json_schema"]
    """Always `json_schema`."""
    schema_: Annotated[Parameters, Field(alias="schema")]
    """The schema that the answer follows."""


class OutputConfig(Strict):
    """Anthropic's settings of the answer."""

    format: OutputFormat | None = None
    """The answer is JSON of this schema."""
    effort: str | None = None
    """Changes nothing."""


class Prompted(Strict):
    """What both endpoints have."""

    model: str | None = None
    """Name of the model. If one model is served, any name means it."""
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    """The conversation, from the oldest message to the newest. An assistant's message at the end is continued."""
    system: Blocks | None = None
    """The system text, or a list of blocks of type `text`."""
    tools: Annotated[list[InputTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    """Tools that the model may call."""
    tool_choice: InputToolChoice | None = None
    """Whether the answer may, must not or must be a call, and of which tool."""
    thinking: Thinking | None = None
    """Whether the model thinks. Without it, it does not, if its template has the variable `enable_thinking`."""
    output_config: OutputConfig | None = None
    """`format`: the answer is JSON of a schema."""
    cache_control: dict[str, Any] | None = None
    """Changes nothing: the prefix cache finds what requests have in common."""
    context_management: dict[str, Any] | None = None
    """Changes nothing: the conversation is taken as it is sent."""

    @cached_property
    def conversation(self) -> Conversation:
        """The turns as messages of a chat. Raises RequestError: The first block that is not supported."""
        found = Conversation()
        found.system(self.system or [])
        for place, message in enumerate(self.messages):
            found.turn(message.role, message.content, f"messages.{place}.content")
        return found

    @property
    def own_tools(self) -> list[InputTool]:
        """The tools that the client runs."""
        return [tool for tool in self.tools or () if not tool.is_hosted]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The tools that Anthropic's servers would run, and thoughts that cannot be read."""
        hosted = [tool.name for tool in self.tools or () if tool.is_hosted]
        return first_of([*hosted, *self.conversation.left_out])

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted; those of messages and tools without an index."""
        names = {
            *(set(self.extra) - set(_REFUSED)),
            *(f"thinking.{name}" for name in (self.thinking.extra if self.thinking else ())),
        }
        names |= {f"messages.{name}" for message in self.messages for name in message.extra}
        return first_of(names | {f"tools.{name}" for tool in self.own_tools for name in tool.extra} - NOTED)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Where schemas have keywords whose numbers no grammar can count."""
        schemas = {
            f"tools.{place}.input_schema": tool.input_schema
            for place, tool in enumerate(self.tools or ())
            if not tool.is_hosted
        }
        if self.output_config is not None and self.output_config.format is not None:
            schemas["output_config.format.schema"] = self.output_config.format.schema_
        return first_of([f"{path}.{word}" for path, held in schemas.items() if held for word in held.ignored])

    @property
    def calls(self) -> Calls | None:
        """What it says about calls; None: it has no tools."""
        if not self.own_tools:
            return None
        choice = self.tool_choice or InputToolChoice(type="auto")
        word: Literal["auto", "none", "required"] = "required"
        if choice.type in ("auto", "none"):
            word = "auto" if choice.type == "auto" else "none"
        names = (choice.name,) if choice.type == "tool" and choice.name else ()
        return Calls(choice=word, names=names, parallel=not (choice.disable_parallel_tool_use or names))

    def templating(self, messages: Sequence[Mapping[str, Any]]) -> Templating:
        """Return what the template takes beside the *messages*."""
        continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        thinks = {"enabled": True, "adaptive": None}.get(self.thinking.type if self.thinking else "", False)
        return Templating(
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tools=tuple(_plain_tool(tool) for tool in self.own_tools),
            variables={} if thinks is None else {"enable_thinking": thinks},
        )

    def prompt(self, endpoint: str, frontend: str, model: str) -> dict[str, Any]:
        """Return the fields of the event that make its prompt. Raises RequestError: A block is not supported."""
        messages = tuple(self.conversation.messages)
        return {
            "endpoint": endpoint,
            "frontend": frontend,
            "model": model,
            "messages": messages,
            "templating": self.templating(messages),
        }


class CountRequest(Prompted):
    """The body of POST /v1/messages/count_tokens."""

    def submitted(self, *, frontend: str, model: str) -> list[Submitted]:
        """Return the event that holds all of it."""
        return [Submitted(**self.prompt(COUNT_ENDPOINT, frontend, model), task="tokenize", sampling=SamplingParams())]


class MessagesRequest(Prompted):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX), WHOLE]
    """Maximum number of output tokens. If they do not fit into the context, the answer ends where the context does."""
    stream: bool | None = None
    """Sends the answer as server-sent events while it is generated."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Randomness. 0 always takes the most probable token."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Samples from the smallest set of tokens whose probabilities add up to it."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Samples from this many of the most probable tokens."""
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP), at_most(LONGEST_STOP)]],
            Field(fail_fast=True, max_length=MOST_STOPS),
            AfterValidator(few_characters),
        ]
        | None
    ) = None
    """Ends the answer before one of these texts (`stop_sequence`). The text is not sent."""
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] | None = None
    """Not in Anthropic's API: the same seed gives the same answer."""
    metadata: Annotated[dict[str, Any], AfterValidator(kept_exactly)] | None = None
    """Label. Kept in the history, changes nothing."""
    service_tier: str | None = None
    """Label. Kept in the history, changes nothing."""

    @property
    def labels(self) -> dict[str, Any]:
        """The fields that change nothing but are kept in the history."""
        given = {"metadata": self.metadata, "service_tier": self.service_tier}
        return {name: value for name, value in given.items() if value is not None}

    def constraint(self) -> Constraint | None:
        """Return what the answer must be; None: anything."""
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = orjson.dumps(self.output_config.format.schema_.value).decode()
        return Constraint(kind="json", text=schema, param="output_config.format.schema")


def message_events(request: MessagesRequest, *, frontend: str, model: str, defaults: Defaults) -> list[Submitted]:
    """Return the event of *request*. *frontend* listens for the answer; *model* is the served name, *defaults* are the
    sampling parameters that it recommends.
    """
    thinking = request.thinking or Thinking(type="disabled")
    asked = SamplingFields(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, stop=request.stop_sequences or None
    )
    presentation = Presentation(
        stream=bool(request.stream),
        continuous_usage=True,
        reasoning="hidden" if thinking.type == "disabled" else "apart",
        omits_thoughts=thinking.display == "omitted",
    )
    event = Submitted(
        **request.prompt(MESSAGES_ENDPOINT, frontend, model),
        calls=request.calls,
        thinking_budget=thinking.budget_tokens,
        constraint=request.constraint(),
        labels=request.labels,
        sampling=sampling_params(asked, request.seed, {"max_tokens": request.max_tokens}, defaults),
        presentation=presentation,
    )
    return [event]


def parse_messages(body: bytes) -> MessagesRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    request = _parsed(MessagesRequest, body)
    refuse_unsupported(request.extra, _REFUSED, "")
    refuse_long_labels(request.labels)
    calls, constraint = request.calls, request.constraint()
    if calls is not None and calls.choice == "required" and constraint is not None:
        raise wrong("tool_choice", f"with it the answer is a call, so not together with `{constraint.param}`")
    return request


def parse_count(body: bytes) -> CountRequest:
    """As `parse_messages`, for the endpoint that counts tokens."""
    return _parsed(CountRequest, body)


_INSTEAD: Final = {
    "stop": "`stop_sequences`",
    "max_completion_tokens": "`max_tokens`",
    "response_format": "`output_config.format`",
    "reasoning_effort": "`thinking`",
}
_REFUSED: Final = {
    **refused("generate", {*MessagesRequest.model_fields, "betas", "stream_options"}, _INSTEAD),
    "output_format": OtherField("output_format", instead="`output_config.format`"),
    "mcp_servers": OtherField("mcp_servers", ([],)),
    "container": OtherField("container"),
}
"""Fields of other endpoints, and of Anthropic's servers, that would change the answer."""


def _parsed(model: type[B], body: bytes) -> B:
    request = parsed(model, body, most_large=MOST_LARGE_OF_AGENTS)
    names: set[str] = set()
    for place, tool in enumerate(request.tools or ()):
        if tool.is_hosted:
            continue
        if tool.name in names:
            raise wrong(f"tools.{place}.name", "an earlier tool has this name; names must be unique")
        names.add(tool.name)
    choice = request.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not names:
        raise wrong("tool_choice", "only with `tools`; send some, or `auto`")
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name", "missing" if choice.name is None else "only with `type: tool`")
    if choice is not None and choice.name is not None and choice.name not in names:
        raise wrong("tool_choice.name", "there is no such tool in `tools`")
    return request


def _plain_tool(tool: InputTool) -> dict[str, Any]:
    given = {
        "name": tool.name,
        "description": tool.description,
        "parameters": None if tool.input_schema is None else tool.input_schema.value,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}
