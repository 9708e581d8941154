"""The body of /v1/responses: https://platform.openai.com/docs/api-reference/responses/create.

A conversation becomes the same messages as in a chat, so the same turns are the same tokens on every endpoint. Knows
nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag

from pipeline.errors import RequestError
from pipeline.events import Calls, Constraint, Presentation, Submitted, Templating
from web.wire.constraints import ANY_OBJECT
from web.wire.endpoints import RESPONSES_ENDPOINT
from web.wire.fields import LABELS, first_of, refused
from web.wire.openai.bulk import MOST_LARGE_OF_AGENTS
from web.wire.openai.calls import CHOICE_KINDS
from web.wire.openai.messages import MOST_TOOLS, TOOL_NAME, Name, Parameters, member_of
from web.wire.openai.schemas import SamplingFields, refuse_long_labels
from web.wire.openai.strict import (
    INT64_MAX,
    TEXT_OR_LIST,
    WHOLE,
    Strict,
    kept_exactly,
    parsed,
    refuse_unsupported,
    text_or_list,
    wrong,
)
from web.wire.responses.items import MOST_ITEMS, Conversation, Item, Message, full_name, kind_of
from web.wire.submit import Defaults, sampling_params

ENCRYPTED: Final = "reasoning.encrypted_content"
"""The entry of `include` that asks for thoughts as opaque texts."""
LOGPROBS: Final = "message.output_text.logprobs"


Input = Annotated[Any, text_or_list("items", MOST_ITEMS), TEXT_OR_LIST]
"""A text, or a list of items. `Conversation` reads them."""
Echoed = Annotated[dict[str, Any], AfterValidator(kept_exactly)]


class InputTool(Strict):
    """An entry of `tools`."""

    type: str
    """`function`, `custom` (its input is one text), or `namespace` with `tools` of its own. Tools that OpenAI's servers
    would run are left out; the header `x-minisgl-ignored` names them."""
    name: str | None = None
    """Name of the tool, or of the namespace."""
    description: str | None = None
    """What the tool does, for the model."""
    parameters: Parameters | None = None
    """JSON schema of the arguments of a function."""
    strict: bool | None = None
    """Arguments must follow `parameters`, also if the model may answer without a call."""
    format: Echoed | None = None
    """Of a custom tool: what its input looks like. The model is told."""
    tools: Annotated[list[InputTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    """The tools of a namespace."""


class OwnTool(NamedTuple):
    """A tool that the client runs."""

    name: str
    """The name by which the model knows it."""
    namespace: str | None
    given: InputTool
    path: str
    """Its place in the body."""


class InputToolChoice(Strict):
    """A tool, or several, by name."""

    type: str
    """`function` or `custom`: the answer is a call of the tool in `name`. `allowed_tools`: of those in `tools`."""
    name: Name | None = None
    """Name of the tool."""
    namespace: Name | None = None
    """Namespace of the tool."""
    mode: Literal["auto", "required"] | None = None
    """Of `allowed_tools`: whether the answer must be a call."""
    tools: Annotated[list[InputToolChoice], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)] | None = None
    """Of `allowed_tools`: those tools."""


class Reasoning(Strict):
    """How the model thinks."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable `reasoning_effort` of the chat template. `none` also sets `enable_thinking` to false."""
    summary: str | None = None
    """Changes nothing: thoughts come as they are."""


class TextFormat(Strict):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`: any answer. `json_object`: a JSON object. `json_schema`: JSON of `schema`."""
    name: str | None = None
    """Name of the schema. Changes nothing."""
    description: str | None = None
    """What the schema is for. Changes nothing."""
    schema_: Annotated[Parameters | None, Field(alias="schema")] = None
    """The schema that the answer follows."""
    strict: bool | None = None
    """Changes nothing: a schema is always enforced."""


class Text(Strict):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    """What the answer must be."""
    verbosity: str | None = None
    """Changes nothing."""


class ResponsesRequest(Strict):
    """The body of POST /v1/responses."""

    model: str | None = None
    """Name of the model. If one model is served, any name means it."""
    input: Input | None = None
    """A text, or items: messages, reasoning, calls of tools and their results, references to items of responses."""
    instructions: str | None = None
    """The system text. The next response in a chain does not inherit it."""
    previous_response_id: Name | None = None
    """Goes on after this response, which must be stored."""
    stream: bool | None = None
    """Sends the answer as server-sent events while it is generated."""
    store: bool | None = None
    """`false`: the response cannot be read or continued later. Else it is kept for `--response-retention`."""
    background: bool | None = None
    """Answers at once; the response goes on without a client."""
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX), WHOLE] | None = None
    """Maximum number of output tokens. If they do not fit into the context, the answer ends where the context does."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Randomness. 0 always takes the most probable token."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Samples from the smallest set of tokens whose probabilities add up to it."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens that are in the answer already."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once for each time the token is in the answer."""
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] | None = None
    """Not in OpenAI's API: the same seed gives the same answer."""
    tools: Annotated[list[InputTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    """Tools that the model may call."""
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag(CHOICE_KINDS[0])]
            | Annotated[InputToolChoice, Tag(CHOICE_KINDS[1])],
            Discriminator(lambda given: CHOICE_KINDS[isinstance(given, dict | InputToolChoice)]),
        ]
        | None
    ) = None
    """Whether the answer may, must not or must be a call, and of which tools."""
    parallel_tool_calls: bool | None = None
    """`false`: the answer has at most one call."""
    max_tool_calls: Annotated[int, Field(ge=0, le=INT64_MAX), WHOLE] | None = None
    """Repeated in the response; it is for tools that OpenAI's servers run."""
    reasoning: Reasoning | None = None
    """How the model thinks."""
    text: Text | None = None
    """`format`: what the answer must be."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: of a prompt that does not fit into the context, the oldest tokens are dropped."""
    include: Annotated[list[str], Field(fail_fast=True, max_length=32)] | None = None
    """`reasoning.encrypted_content`: reasoning can be sent back without its text."""
    metadata: Echoed | None = None
    """Label. Kept in the history, changes nothing."""
    user: str | None = None
    """Label, as `metadata`."""
    safety_identifier: str | None = None
    """Label, as `metadata`."""
    prompt_cache_key: str | None = None
    """Label, as `metadata`: the prefix cache finds what requests have in common."""
    service_tier: str | None = None
    """Label, as `metadata`."""

    _past: Sequence[Message] = PrivateAttr(default=())
    _found: Mapping[str, Item] = PrivateAttr(default_factory=dict)

    def goes_on(self, past: Sequence[Message], found: Mapping[str, Item]) -> None:
        """Say what it refers to. *past*: the messages of the response that it goes on after, and its answer. *found*:
        the items that its references mean, by their ids."""
        self._past, self._found = past, found

    @cached_property
    def conversation(self) -> Conversation:
        """All messages. Raises RequestError: The first item that is not supported."""
        found = Conversation(self._found)
        if self.instructions is not None:
            found.begin([{"role": "system", "content": self.instructions}], "instructions")
        found.begin(self._past, "previous_response_id")
        for place, item in enumerate(self.items):
            found.add(item, "input" if isinstance(self.input, str) else f"input.{place}")
        if not found.messages:
            raise wrong("input", "missing; send a text or items")
        return found

    @property
    def left_out(self) -> tuple[str, ...]:
        """The tools that OpenAI's servers would run, and thoughts that cannot be read."""
        tools = [each for tool in self.tools or () for each in (tool, *(tool.tools or ()))]
        hosted = [tool.name or tool.type for tool in tools if tool.type not in ("function", "custom", "namespace")]
        return first_of([*hosted, *self.conversation.left_out])

    @property
    def items(self) -> Sequence[Any]:
        """The items of the input."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input or ()

    @property
    def references(self) -> tuple[str, ...]:
        """The ids of items that its input refers to. Raises RequestError: One is no text."""
        places = enumerate(self.items)
        asked = (
            (place, item) for place, item in places if isinstance(item, dict) and kind_of(item) == "item_reference"
        )
        return tuple(dict.fromkeys(member_of(item, "id", f"input.{place}") for place, item in asked))

    @cached_property
    def own_tools(self) -> list[OwnTool]:
        """The tools that the client runs. Raises RequestError: One has no name, or that of another."""
        found = list(_own(self.tools or (), "tools"))
        names: set[str] = set()
        for tool in found:
            if tool.name in names:
                raise wrong(f"{tool.path}.name", "an earlier tool has this name; names must be unique")
            names.add(tool.name)
        return found

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields and members of items, sorted."""
        parts: dict[str, Strict | None] = {
            "reasoning": self.reasoning,
            "text": self.text,
            "text.format": self.text and self.text.format,
        }
        if isinstance(self.tool_choice, InputToolChoice):
            parts["tool_choice"] = self.tool_choice
        names = {
            *(set(self.extra) - set(_REFUSED)),
            *(f"{path}.{name}" for path, part in parts.items() if part for name in part.extra),
        }
        spaces = [tool for tool in self.tools or () if tool.type == "namespace"]
        tools = [*spaces, *(tool.given for tool in self.own_tools)]
        return first_of(names | {f"tools.{name}" for tool in tools for name in tool.extra} | self.conversation.unknown)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Where schemas have keywords whose numbers no grammar can count."""
        schemas = {f"{tool.path}.parameters": tool.given.parameters for tool in self.own_tools}
        schemas["text.format.schema"] = self.text.format.schema_ if self.text and self.text.format else None
        return first_of([f"{path}.{word}" for path, held in schemas.items() if held for word in held.ignored])

    @property
    def calls(self) -> Calls | None:
        """What it says about calls; None: it has no tools. Raises RequestError: It names a tool that is not there."""
        choice, parallel = self.tool_choice or "auto", self.parallel_tool_calls is not False
        if not self.own_tools:
            if choice not in ("none", "auto"):
                raise wrong("tool_choice", "only with tools that the client runs; send some, or `auto`")
            return None
        if isinstance(choice, str):
            return Calls(choice=choice, parallel=parallel)
        if choice.type == "allowed_tools":
            named = [(f"tool_choice.tools.{place}", tool) for place, tool in enumerate(choice.tools or ())]
            if not named:
                raise wrong("tool_choice.tools", "missing; name the tools that may be called")
            return Calls(choice=choice.mode or "auto", names=self._named(named), parallel=parallel)
        return Calls(choice="required", names=self._named([("tool_choice", choice)]), parallel=False)

    def _named(self, choices: Sequence[tuple[str, InputToolChoice]]) -> tuple[str, ...]:
        known = {tool.name for tool in self.own_tools}
        names = []
        for path, choice in choices:
            if choice.type not in ("function", "custom"):
                raise wrong(
                    f"{path}.type", "tools that OpenAI's servers run are not here; name a `function` or `custom`"
                )
            name = full_name(choice.name or "", choice.namespace)
            if name not in known:
                raise wrong(f"{path}.name", "there is no such tool in `tools`")
            names.append(name)
        return tuple(dict.fromkeys(names))

    def constraint(self) -> Constraint | None:
        """Return what the answer must be; None: anything. Raises RequestError: There is no schema."""
        given = self.text.format if self.text else None
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return Constraint(kind="json", text=ANY_OBJECT, param="text.format")
        if given.schema_ is None:
            raise wrong("text.format.schema", "missing; send the schema that the answer follows")
        return Constraint(kind="json", text=orjson.dumps(given.schema_.value).decode(), param="text.format.schema")

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        effort = self.reasoning.effort if self.reasoning else None
        if effort is None:
            return {}
        return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})

    @property
    def labels(self) -> dict[str, Any]:
        """The fields that change nothing but are kept in the history."""
        given = {name: getattr(self, name) for name in LABELS} | {"store": self.store is not False}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def echoes(self) -> dict[str, Any]:
        """What the response repeats and its event does not have elsewhere."""
        told = ("tool_choice", "reasoning", "text", "truncation", "max_tool_calls", "max_output_tokens")
        special = [tool for tool in self.own_tools if tool.namespace or tool.given.type == "custom"]
        spaces = [tool for tool in self.tools or () if tool.type == "namespace"]
        given = {
            **{name: _declared(getattr(self, name)) for name in (*told, "previous_response_id", "parallel_tool_calls")},
            "special": {tool.name: _special(tool) for tool in special} or None,
            "namespaces": {tool.name: tool.description for tool in spaces} or None,
            "instructions": self.instructions is not None or None,
            "encrypted": ENCRYPTED in (self.include or ()) or None,
        }
        return {name: value for name, value in given.items() if value is not None}


_NAME: Final = re.compile(TOOL_NAME)
_INSTEAD: Final = {
    "messages": "`input`",
    "prompt": "`input`",
    "max_tokens": "`max_output_tokens`",
    "max_completion_tokens": "`max_output_tokens`",
    "response_format": "`text.format`",
    "reasoning_effort": "`reasoning.effort`",
}
_REFUSED: Final = refused("generate", {*ResponsesRequest.model_fields, "stream_options"}, _INSTEAD)
"""Fields of other endpoints that would change the answer."""


def _declared(value: Any) -> Any:
    """Return the fields of a model that it declares and that are set, without schemas; anything else as it is."""
    if isinstance(value, list):
        return [_declared(each) for each in value]
    if not isinstance(value, Strict):
        return value
    names = [name for name in type(value).model_fields if name != "schema_" and getattr(value, name) is not None]
    return {name: _declared(getattr(value, name)) for name in names}


def _own(tools: Sequence[InputTool], path: str, namespace: str | None = None) -> Iterator[OwnTool]:
    for place, tool in enumerate(tools):
        at = f"{path}.{place}"
        if tool.type == "namespace":
            if not tool.name or namespace is not None:
                raise wrong(f"{at}.name", "missing") if namespace is None else wrong(f"{at}.type", "within a namespace")
            yield from _own(tool.tools or (), f"{at}.tools", tool.name)
        elif tool.type in ("function", "custom"):
            name = full_name(tool.name or "", namespace)
            if not tool.name or not _NAME.fullmatch(name):
                raise wrong(f"{at}.name", f"should match {TOOL_NAME}, with its namespace before it")
            yield OwnTool(name, namespace, tool, at)


def _special(tool: OwnTool) -> dict[str, Any]:
    """Return what the response says of a tool beside its function."""
    given: dict[str, Any] = {"namespace": tool.namespace, "name": tool.given.name}
    if tool.given.type == "custom":
        given |= {"custom": True, "format": tool.given.format, "description": tool.given.description}
    return {name: value for name, value in given.items() if value is not None}


def _function(tool: OwnTool) -> dict[str, Any]:
    """Return a tool as chat templates take it. A custom one is a function of one text."""
    given = tool.given
    made: dict[str, Any] = {"name": tool.name, "description": given.description, "strict": given.strict}
    if given.type == "custom":
        shape = {name: value for name, value in (given.format or {}).items() if name != "type"}
        told = f"Its input: {orjson.dumps(shape).decode()}" if shape else ""
        made["description"] = "\n".join(filter(None, (given.description, told))) or None
        made["parameters"] = ONE_TEXT
    elif given.parameters is not None:
        made["parameters"] = given.parameters.value
    order = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: made[name] for name in order if made.get(name) is not None}}


ONE_TEXT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The arguments of a custom tool."""


def response_events(request: ResponsesRequest, *, frontend: str, model: str, defaults: Defaults) -> list[Submitted]:
    """Return the event of a request. *frontend* listens for the answer; *model* is the served name, *defaults* are the
    sampling parameters that it recommends.
    """
    sampled = SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )
    event = Submitted(
        endpoint=RESPONSES_ENDPOINT,
        frontend=frontend,
        model=model,
        messages=tuple(request.conversation.messages),
        templating=Templating(tools=tuple(map(_function, request.own_tools)), variables=request.variables),
        calls=request.calls,
        constraint=request.constraint(),
        labels=request.labels,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        sampling=sampling_params(sampled, request.seed, {"max_tokens": request.max_output_tokens}, defaults),
        presentation=Presentation(stream=bool(request.stream), continuous_usage=True, echoes=request.echoes),
        background=bool(request.background),
    )
    return [event]


def parse_response(body: bytes) -> ResponsesRequest:
    """Return the request that *body* holds.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    request = parsed(ResponsesRequest, body, most_large=MOST_LARGE_OF_AGENTS)
    refuse_unsupported(request.extra, _REFUSED, "")
    refuse_long_labels(request.labels)
    if LOGPROBS in (request.include or ()):
        message = f"include: `{LOGPROBS}` is not supported; /v1/chat/completions has `logprobs`"
        raise RequestError(message, param="include", code="unsupported_parameter")
    calls, constraint = request.calls, request.constraint()
    if calls is not None and calls.choice == "required" and constraint is not None:
        raise wrong("tool_choice", f"with it the answer is a call, so not together with `{constraint.param}`")
    if request.background and request.store is False:
        raise wrong("background", "needs `store: true`, because the response is read by its id")
    return request
