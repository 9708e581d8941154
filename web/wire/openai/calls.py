"""The fields of a chat about calls of tools, and about thinking. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from pipeline.events import Calls
from web.wire.openai.messages import MOST_TOOLS, Name, Tool, Tools
from web.wire.openai.strict import INT32_MAX, Strict, kept_exactly, wrong

BUDGETS: Final = ("thinking_token_budget", "thinking_budget", "reasoning_budget", "reasoning_budget_tokens")
"""vLLM's, Qwen's and llama.cpp's names of one field."""
OF_CONVERSATIONS: Final = ("reasoning_effort", "enable_thinking", *BUDGETS)
"""Fields that change nothing with a `prompt`, which has no template."""
EXAMPLE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
"""What /openapi.json and the playground show."""
CHOICE_KINDS: Final = ("<word>", "<object>")
"""Tags of the two shapes of `tool_choice`; errors do not show them."""

Budget = Annotated[int, Field(ge=-1, le=INT32_MAX)]


class NamedFunction(Strict):
    """A function, by its name."""

    name: Name
    """Name of the function."""


class NamedTool(Strict):
    """One of `tools`, by its name."""

    type: Literal["function"]
    """Always `function`."""
    function: NamedFunction
    """Names the function."""


class AllowedTools(Strict):
    """Some of `tools`."""

    mode: Literal["auto", "required"]
    """`required`: the answer must be a call."""
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]
    """The tools that may be called."""


class ToolChoice(Strict):
    """OpenAI's objects for `tool_choice`."""

    type: Literal["function", "allowed_tools"]
    """Which of the two other members says it."""
    function: NamedFunction | None = None
    """The function that the answer must call."""
    allowed_tools: AllowedTools | None = None
    """The tools that the answer may, or must, call."""

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield the tools that it names, each with the path of its name.

        Raises:
            RequestError: It lacks the member that its type needs, or has another one.
        """
        members = ("function", self.function, "`name`"), ("allowed_tools", self.allowed_tools, "`mode` and `tools`")
        for name, value, within in members:
            if (value is not None) != (name == self.type):
                missing = f"missing; send an object with {within}"
                raise wrong(f"tool_choice.{name}", missing if value is None else f"only with type `{name}`")
        if self.function is not None:
            yield "tool_choice.function.name", self.function.name
        for index, tool in enumerate(self.allowed_tools.tools if self.allowed_tools is not None else ()):
            yield f"tool_choice.allowed_tools.tools.{index}.function.name", tool.function.name


def _choice_kind(choice: object) -> str:
    return CHOICE_KINDS[isinstance(choice, dict | ToolChoice)]


class TemplateFields(Strict):
    """The variables of a chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(kept_exactly)] | None = None
    """Variables for the chat template."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template. `none` also sets `enable_thinking` to false."""
    enable_thinking: bool | None = None
    """Variable of the chat template, as in `chat_template_kwargs`."""

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the template. Those in `chat_template_kwargs` come first."""
        effort, thinks = self.reasoning_effort, self.enable_thinking
        if effort == "none" and thinks is None:
            thinks = False
        given = {"reasoning_effort": effort, "enable_thinking": thinks}
        return {name: value for name, value in given.items() if value is not None} | (self.chat_template_kwargs or {})


class ToolFields(TemplateFields):
    """The fields that only chats have."""

    tools: Annotated[Tools | None, Field(examples=[[EXAMPLE_TOOL]])] = None
    """Functions that the model may call. `strict` in a function: arguments must follow its schema."""
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag(CHOICE_KINDS[0])]
            | Annotated[ToolChoice, Tag(CHOICE_KINDS[1])],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
    """Whether the answer may, must not or must be a call, and of which tools."""
    parallel_tool_calls: bool | None = None
    """`false`: the answer has at most one call."""
    thinking_token_budget: Budget | None = None
    """Most tokens of thinking. -1: any number."""
    thinking_budget: Budget | None = None
    """Qwen's name of `thinking_token_budget`."""
    reasoning_budget: Budget | None = None
    """llama.cpp's name of `thinking_token_budget`."""
    reasoning_budget_tokens: Budget | None = None
    """llama.cpp's name of `thinking_token_budget`."""
    include_reasoning: bool | None = None
    """`false`: reasoning is not sent. It counts as output tokens."""
    separate_reasoning: bool | None = None
    """`false`: reasoning stays in the content, with its markers."""
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    """llama.cpp's field; `none` means `separate_reasoning: false`."""

    @property
    def calls(self) -> Calls | None:
        """What it says about calls; None: it has no tools."""
        if not self.tools:
            return None
        choice, parallel = self.tool_choice or "auto", self.parallel_tool_calls is not False
        if isinstance(choice, str):
            return Calls(choice=choice, parallel=parallel)
        names = tuple(dict.fromkeys(name for _, name in choice.named()))
        if choice.allowed_tools is None:
            return Calls(choice="required", names=names, parallel=False)
        return Calls(choice=choice.allowed_tools.mode, names=names, parallel=parallel)

    @property
    def thinking_budget_tokens(self) -> int | None:
        """The most tokens of thinking; None: any number."""
        budget = next((value for name in BUDGETS if (value := getattr(self, name)) is not None), -1)
        return None if budget == -1 else budget

    @property
    def reasoning_shown(self) -> Literal["apart", "inline", "hidden"]:
        """How the client wants to see the thinking."""
        if self.include_reasoning is False:
            return "hidden"
        return "inline" if self.wants_inline else "apart"

    @property
    def wants_inline(self) -> bool:
        """Whether thinking is to be part of the content."""
        return self.separate_reasoning is False or self.reasoning_format == "none"

    @property
    def unknown_of_tools(self) -> set[str]:
        """The unknown fields within the fields of this class."""
        names = {f"tools.{name}" for tool in self.tools or () for name in tool.unknown}
        choice = self.tool_choice
        return names | {f"tool_choice.{name}" for name in (choice.extra if isinstance(choice, ToolChoice) else ())}


def ignored_keywords_of(tools: Sequence[Tool] | None) -> Iterator[str]:
    """Yield where schemas of *tools* have keywords whose numbers no grammar can count."""
    for place, tool in enumerate(tools or ()):
        for keyword in tool.function.parameters.ignored if tool.function.parameters is not None else ():
            yield f"tools.{place}.function.parameters.{keyword}"


def check_calls(request: ToolFields, *, constraint: str, has_messages: bool) -> None:
    """Check the fields about calls and thinking. *constraint* is the field that says what the answer must be, or "".

    Raises:
        RequestError: They do not go together.
    """
    _check_names(request)
    calls = request.calls
    if calls is not None and calls.choice == "required" and constraint:
        message = f"with it the answer is a call, so not together with `{constraint}`; leave one of them out"
        raise wrong("tool_choice", message)
    if not has_messages:
        useless = [name for name in OF_CONVERSATIONS if getattr(request, name) not in (None, -1)]
        useless += ["tools"] if calls is not None and calls.choice != "none" else []
        if useless:
            raise wrong(useless[0], "only with `messages`, for which there is a template")
    budgets = {name: getattr(request, name) for name in BUDGETS if getattr(request, name) is not None}
    if len(set(budgets.values())) > 1:
        first, *_, last = budgets
        raise wrong(last, f"means the same as `{first}`, which has another value; send one of them")
    apart = {"none": False, "deepseek": True}.get(request.reasoning_format or "")
    if apart is not None and request.separate_reasoning not in (None, apart):
        raise wrong("reasoning_format", "contradicts `separate_reasoning`; send one of them")
    if request.include_reasoning is False and request.wants_inline:
        raise wrong("include_reasoning", "thinking within the content cannot be left out; drop one of the fields")


def _check_names(request: ToolFields) -> None:
    """Check that names are unique, and that `tool_choice` names tools that there are. Raises RequestError."""
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        if tool.function.name in names:
            raise wrong(f"tools.{index}.function.name", "an earlier tool has this name; names must be unique")
        names.add(tool.function.name)
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not names:
        raise wrong("tool_choice", "only with `tools`; send some, or `none`")
    for path, name in choice.named() if isinstance(choice, ToolChoice) else ():
        if name not in names:
            raise wrong(path, "there is no such tool in `tools`")


def call_fields(calls: Calls | None) -> Mapping[str, Any]:
    """Return the fields from which *calls* came: the inverse of `ToolFields.calls`, for a request with tools."""
    if calls is None:
        return {"tool_choice": "none"}
    named = [{"type": "function", "function": {"name": name}} for name in calls.names]
    choice: object = calls.choice
    if named and calls.choice == "required" and len(named) == 1 and not calls.parallel:
        return {"tool_choice": named[0]}
    if named:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": calls.choice, "tools": named}}
    return {"tool_choice": choice} | ({} if calls.parallel else {"parallel_tool_calls": False})
