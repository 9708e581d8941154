"""Rules in Lark for tool calls, in each format in which models write them. Knows no tokens but the added ones.

| format | a call |
|---|---|
| hermes | `<tool_call>\\n{"name": "f", "arguments": {..}}\\n</tool_call>` |
| qwen3_coder | `<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>` |
| llama3_json | `{"name": "f", "parameters": {..}}` |
| mistral | `[TOOL_CALLS] [{"name": "f", "arguments": {..}}]` or `[TOOL_CALLS]f[ARGS]{..}` |
| pythonic | `[f(a=1)]` |
| lfm2 | `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` |
| minicpm | the same markers around the lines "```python", `f(a=1)` and "```" |
| glm | `<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>` |
| kimi_k2 | `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`, all in one section |
| deepseek | `function<｜tool▁sep｜>f\\n```json\\n{..}\\n```` or `f<｜tool▁sep｜>{..}`, each between two markers |
| apertus | `<|tools_prefix|>[{"f": {..}}]<|tools_suffix|>` |
| harmony | `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}`: it ends the answer |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipeline.errors import RequestError
from pipeline.markup import ToolFormat
from stages.tokenize.constraints.grammars import checked, json_of, refusal
from stages.tokenize.constraints.literals import (
    ANY_PYTHON,
    OF_AN_OBJECT,
    PythonLiterals,
    Rules,
    TaggedValues,
    fields_of,
    quoted,
    refuse_others,
    types_of,
)
from stages.tokenize.constraints.schemas import reduced
from stages.tokenize.markup import FENCE, MARKERS, NAMED_ARGUMENTS, Dialect

NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without `parameters`."""
TAG_END: Final = "\n</parameter>"
IN_PYTHON: Final = ("pythonic", "lfm2", "minicpm")


@dataclass(frozen=True)
class CallableTool:
    """A function that may be called."""

    place: int
    """Its place in `tools`."""
    name: str
    parameters: Mapping[str, Any] | None
    is_bound: bool
    """Whether its arguments must follow its schema."""

    @property
    def param(self) -> str:
        """Field of the request that holds its schema."""
        return f"tools.{self.place}.function.parameters"

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of its arguments, an object. It has only keywords that bind values.

        Raises:
            ValueError: The schema says something else.
        """
        if not self.is_bound:
            return {"type": "object"}
        if not self.parameters:
            return dict(NO_ARGUMENTS)
        if types_of(self.parameters) and "object" not in types_of(self.parameters):
            raise ValueError(f"its type is {self.parameters['type']!r}; arguments are an object")
        return reduced({**self.parameters, "type": "object"})


@dataclass(frozen=True, slots=True)
class CallRules:
    """How one or more calls are written, as items of a rule: `trigger` and then `rest`."""

    trigger: str
    """Added token or text that begins them; empty: they are the whole answer, and nothing is before them."""
    rest: str
    first: str = ""
    """Letter that begins them if there is no trigger."""


def call_rules(
    rules: Rules, dialect: Dialect, form: ToolFormat, tools: Sequence[CallableTool], *, parallel: bool
) -> CallRules:
    """Add the *rules* for one call or, with *parallel*, for more; return how they begin.

    Raises:
        RequestError: The schema of a tool cannot be enforced.
        ValueError: The rules are too large together.
    """
    write = _Writer(dialect, rules)
    bodies = []
    for tool in tools:
        _check_alone(write, form, tool)
        bodies.append(_WRITERS[form](write, tool))
    body = rules.add(" | ".join(bodies))
    begin, end = write.marker("<tool_call>"), write.marker("</tool_call>")
    match form:
        case "hermes" | "qwen3_coder":
            rest = rules.add(f'"\\n" {body} "\\n" {end}')
            found = CallRules("<tool_call>", _repeated(rest, f'"\\n" {begin} {rest}', parallel))
        case "mistral" if dialect.is_newer:
            calls = write.marker("[TOOL_CALLS]")
            found = CallRules("[TOOL_CALLS]", _repeated(body, f"{calls} {body}", parallel))
        case "mistral":
            listed = _repeated(body, f'", " {body}', parallel)
            found = CallRules("[TOOL_CALLS]", f'/ ?/ "[" {listed} "]"')
        case "glm":
            rest = rules.add(f"{body} {end}")
            found = CallRules("<tool_call>", _repeated(rest, f"/\\n?/ {begin} {rest}", parallel))
        case "kimi_k2":
            listed = _repeated(body, body, parallel)
            found = CallRules(MARKERS[form][0], f"{listed} {write.marker(MARKERS[form][-1])}")
        case "deepseek":
            listed = _repeated(body, body if dialect.is_newer else f'"\\n" {body}', parallel)
            found = CallRules(MARKERS[form][0], f"{listed} {write.marker(MARKERS[form][-1])}")
        case "apertus":
            listed = _repeated(body, f'", " {body}', parallel)
            found = CallRules(MARKERS[form][0], f'"[" {listed} "]" {write.marker(MARKERS[form][-1])}')
        case "harmony":
            found = CallRules(MARKERS[form][0], body)
        case "lfm2":
            listed = _repeated(body, f'", " {body}', parallel)
            rules.lines.append(ANY_PYTHON)
            found = CallRules(MARKERS[form][0], f'"[" {listed} "]" {write.marker(MARKERS[form][-1])}')
        case "minicpm":
            listed = _repeated(body, f'"\\n" {body}', parallel)
            rules.lines.append(ANY_PYTHON)
            begin, end = quoted("\n```python\n"), quoted("\n```\n")
            found = CallRules(MARKERS[form][0], f"{begin} {listed} {end} {write.marker(MARKERS[form][-1])}")
        case "llama3_json":
            found = CallRules("", _repeated(body, f'"; " {body}', parallel), "{")
        case _:
            listed = _repeated(body, f'", " {body}', parallel)
            rules.lines.append(ANY_PYTHON)
            found = CallRules("", f'"[" {listed} "]"', "[")
    return found


def _repeated(first: str, other: str, parallel: bool) -> str:
    return f"{first} ({other})*" if parallel else first


def _check_alone(write: _Writer, form: ToolFormat, tool: CallableTool) -> None:
    """Raise RequestError if the call of one tool cannot be enforced."""
    try:
        alone = Rules()
        body = _WRITERS[form](_Writer(write.dialect, alone), tool)
        rules = "\n".join([f"start: {body}", *alone.lines, *([ANY_PYTHON] if form in IN_PYTHON else [])])
        checked(rules, tool.parameters if tool.is_bound else None)
    except RequestError:
        raise
    except (ValueError, TypeError, AttributeError) as error:  # a schema may have anything in any place
        raise refusal("unsupported_schema", tool.param, f"{error}") from error


@dataclass(frozen=True, slots=True)
class _Writer:
    dialect: Dialect
    rules: Rules

    def marker(self, text: str) -> str:
        """Return the item of a rule for a marker: an added token by its id, as their text alone never is them."""
        return marker(self.dialect, text)

    def json_object(self, before: str, tool: CallableTool, after: str) -> str:
        return self.rules.add(f"{before} {json_of(tool.schema)} {after}")

    def hermes(self, tool: CallableTool) -> str:
        return self.json_object(quoted(f'{{"name": {quoted(tool.name)}, "arguments": '), tool, quoted("}"))

    def llama(self, tool: CallableTool) -> str:
        return self.json_object(quoted(f'{{"name": {quoted(tool.name)}, "parameters": '), tool, quoted("}"))

    def mistral(self, tool: CallableTool) -> str:
        if not self.dialect.is_newer:
            return self.hermes(tool)
        return self.json_object(f"{quoted(tool.name)} {self.marker(NAMED_ARGUMENTS)}", tool, "")

    def kimi(self, tool: CallableTool) -> str:
        _, begin, arguments, end, _ = map(self.marker, MARKERS["kimi_k2"])
        return self.json_object(f"{begin} {quoted(f'functions.{tool.name}:')} /[0-9]{{1,3}}/ {arguments}", tool, end)

    def deepseek(self, tool: CallableTool) -> str:
        _, begin, separator, end, _ = map(self.marker, MARKERS["deepseek"])
        if self.dialect.is_newer:
            return self.json_object(f"{begin} {quoted(tool.name)} {separator}", tool, end)
        fence = quoted(f"{tool.name}\n{FENCE}\n")
        return self.json_object(f'{begin} "function" {separator} {fence}', tool, f"{quoted(chr(10) + '```')} {end}")

    def apertus(self, tool: CallableTool) -> str:
        return self.json_object(quoted(f"{{{quoted(tool.name)}: "), tool, quoted("}"))

    def harmony(self, tool: CallableTool) -> str:
        return self.json_object(
            f"{quoted(f'commentary to=functions.{tool.name}')} {header_end(self.dialect)}", tool, ""
        )

    def glm(self, tool: CallableTool) -> str:
        key, key_end, begin, end = map(self.marker, MARKERS["glm"][2:])
        token = end if MARKERS["glm"][-1] in self.dialect.added.ids else ""
        values = TaggedValues(self.rules, tool.schema, MARKERS["glm"][-1], json_of, token)
        refuse_others(tool.schema, OF_AN_OBJECT)
        gap = "/\\n?/"
        if "properties" not in tool.schema and tool.schema.get("additionalProperties") is not False:
            name = self.rules.add("/[^<>\\n]+/", terminal=True)
            parameter = self.rules.add(f"{key} {name} {key_end} {gap} {begin} {values.any()} {gap}")
            return self.rules.add(f"{quoted(tool.name)} {gap} {parameter}*")
        items = []
        for name, schema, is_required in fields_of(tool.schema):
            if re.search(r"[<>\n]", name):
                raise ValueError(f"the name {name!r} cannot stand in a tag, as this model writes it")
            written = f"{key} {quoted(name)} {key_end} {gap} {begin} {values.value(schema)} {gap}"
            items.append(written if is_required else f"({written})?")
        return self.rules.add(f"{quoted(tool.name)} {gap} {' '.join(items)}")

    def tagged(self, tool: CallableTool) -> str:
        values = TaggedValues(self.rules, tool.schema, TAG_END, json_of)
        begin, end = quoted(f"<function={tool.name}>\n"), quoted("</function>")
        if "properties" not in tool.schema and tool.schema.get("additionalProperties") is not False:
            refuse_others(tool.schema, OF_AN_OBJECT)
            name = self.rules.add("/[^<>\\n]+/", terminal=True)
            parameter = self.rules.add(f'"<parameter=" {name} ">\\n" {values.any()} "\\n"')
            return self.rules.add(f"{begin} {parameter}* {end}")
        refuse_others(tool.schema, OF_AN_OBJECT)
        items = []
        for name, schema, is_required in fields_of(tool.schema):
            if re.search(r"[<>\n]", name):
                raise ValueError(f"the name {name!r} cannot stand in a tag, as this model writes it")
            item = self.rules.add(f'{quoted(f"<parameter={name}>" + chr(10))} {values.value(schema)} "\\n"')
            items.append(item if is_required else f"{item}?")
        return self.rules.add(f"{begin} {' '.join(items)} {end}")

    def pythonic(self, tool: CallableTool) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w.]*", tool.name, re.ASCII):
            raise ValueError(f"the name {tool.name!r} is no name in Python, as this model writes calls")
        begin = quoted(f"{tool.name}(")
        if "properties" not in tool.schema and tool.schema.get("additionalProperties") is not False:
            refuse_others(tool.schema, OF_AN_OBJECT)
            argument = self.rules.add('/[A-Za-z_][A-Za-z0-9_]*/ "=" any_value')
            return self.rules.add(f'{begin} ({argument} (", " {argument})*)? ")"')
        for name, _, _ in fields_of(tool.schema):
            if not name.isidentifier():
                raise ValueError(f"the name {name!r} is no name in Python, as this model writes calls")
        return self.rules.add(f'{begin} {PythonLiterals(self.rules, tool.schema).arguments(tool.schema)} ")"')


_WRITERS: Final[Mapping[ToolFormat, Callable[[_Writer, CallableTool], str]]] = {
    "hermes": _Writer.hermes,
    "qwen3_coder": _Writer.tagged,
    "llama3_json": _Writer.llama,
    "mistral": _Writer.mistral,
    "pythonic": _Writer.pythonic,
    "lfm2": _Writer.pythonic,
    "minicpm": _Writer.pythonic,
    "glm": _Writer.glm,
    "kimi_k2": _Writer.kimi,
    "deepseek": _Writer.deepseek,
    "apertus": _Writer.apertus,
    "harmony": _Writer.harmony,
}


def marker(dialect: Dialect, text: str) -> str:
    """Return the items of a rule for a text that may be an added token, or have some in it."""
    ids = dialect.added.ids
    pieces = [text] if text in ids else filter(None, re.split(r"(<\|\w+\|>)", text))
    return " ".join(f"<[{ids[piece]}]>" if piece in ids else quoted(piece) for piece in pieces)


def header_end(dialect: Dialect) -> str:
    """Return what may be the rest of a header in harmony, as items of a rule."""
    return f'(/ ?/ {marker(dialect, "<|constrain|>")} "json" | " json")? {marker(dialect, "<|message|>")}'
