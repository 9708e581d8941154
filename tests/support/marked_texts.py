"""Answers with tool calls and thinking, as models of each family write them, and what is in them.

A seeded writer makes them: the same seed gives the same text. Near misses, such as half a marker in the content or a
whole one within a string, are part of the texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

from pipeline.events import Markup
from pipeline.markup import ToolFormat

FAMILIES: Sequence[ToolFormat] = tuple(name for name in get_args(ToolFormat) if name)
THINK = ("<think>", "</think>")
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|>")
WORDS = (
    "Let me look.", "日本語", "naïve", "🙂", "a < b", "</tool_call>", "<tool_cal", "<tool_call> is a tag",
    "[TOOL_CALL",
    "<|python_tag", "{", "}", "[1, 2]", '"name"', "<function", "<functional=", "</parameter>", "f(a=1)", "<thin",
    "x\ny",
    "1; 2", "\\", "\u2028", "<tool_call>{\"name\": 5}", "[TOOL_CALLS] none", "<|chan",
)  # fmt: skip
STRINGS = (
    "", "Rome", "naïve 日本", "🙂\u2028", 'a "quoted" word', "it's", "back\\slash", "two\nlines", "\ttab",
    "</tool_call>",
    "<tool_call>", "[TOOL_CALLS]", "{]", "}", "a, b) c", "x=1", "</function>", "<parameter=k>", "</think>", "é\\n",
    "; {",
    " padded ", "true", "5", "null",
)  # fmt: skip
KEYS = ("city", "n", "x-y", "größe", "deep_key", "all")


@dataclass(frozen=True, slots=True)
class Written:
    """A text, and what is in it."""

    text: str
    markup: Markup
    tools: Sequence[dict[str, Any]]
    content: str
    """Whitespace around calls is not counted."""
    reasoning: str
    calls: Sequence[tuple[str, Any]]
    """The name and the value of the arguments of each."""
    arguments: Sequence[str]
    """The arguments as the model wrote them, if it writes JSON."""


def written(family: ToolFormat, seed: int) -> Written:
    """Return the text number *seed* of a family."""
    return _Writer(family, Random(f"{family}/{seed}")).answer()


class _Writer:
    def __init__(self, family: ToolFormat, random: Random) -> None:
        self._family: ToolFormat = family
        self._random = random
        self._tools = [
            self._tool(f"{random.choice('fgh')}{index}{random.choice(['', '_x', '.y'])}") for index in (0, 1, 2)
        ]

    def answer(self) -> Written:
        random = self._random
        thinks, opens = random.random() < 0.5, random.random() < 0.5
        calls = [self._call() for _ in range(random.choice([0, 1, 1, 2, 3]))]
        is_bare = self._family in ("llama3_json", "pythonic")
        before = "" if is_bare and calls else self._words()
        after = self._words() if random.random() < 0.3 else ""
        reasoning = self._words() if thinks else ""
        text = f"\n{reasoning}\n</think>\n\n" if thinks else ""
        text = ("" if opens or not thinks else "<think>") + text + before
        told = ["\n" if before else "", self._calls(calls), "\n", after] if calls else [after]
        markup = Markup(tools=self._family, think=THINK, opens_thinking=thinks and opens)
        if self._family == "harmony":
            messages = [("analysis", reasoning), ("commentary", before), ("", self._calls(calls)), ("final", after)]
            text, told = self._messages(messages), []
            markup = Markup(tools="harmony", think=CHANNELS, channels=True)
        return Written(
            text=text + "".join(told),
            markup=markup,
            tools=self._tools,
            content=before + after,
            reasoning=reasoning,
            calls=[(name, value) for name, value, _ in calls],
            arguments=[json_text for _, _, json_text in calls] if self._writes_json else (),
        )

    @property
    def _writes_json(self) -> bool:
        return self._family not in ("qwen3_coder", "pythonic", "lfm2", "minicpm", "glm")

    # what is written

    def _words(self) -> str:
        """Return content that begins as no call does."""
        return "So " + " ".join(self._random.choices(WORDS, k=self._random.randint(1, 4))) + "."

    def _value(self, depth: int = 0) -> Any:
        kinds = ["text", "text", "number", "word"] + ["list", "object"] * (depth < 2)
        match self._random.choice(kinds):
            case "text":
                return self._random.choice(STRINGS)
            case "number":
                return self._random.choice([0, -1, 17, 2.5, 1e-7, 10**15])
            case "word":
                return self._random.choice([True, False, None])
            case "list":
                return [self._value(depth + 1) for _ in range(self._random.randint(0, 3))]
            case _:
                return {key: self._value(depth + 1) for key in self._keys()}

    def _keys(self) -> list[str]:
        return self._random.sample(KEYS, self._random.randint(0, 3))

    def _tool(self, name: str) -> dict[str, Any]:
        kinds = [
            {"type": "string"},
            {"type": ["string", "null"]},
            {"type": "integer"},
            {"type": "object"},
            {"type": "boolean"},
        ]
        kinds += [{"$ref": "#/$defs/Deep"}, {"anyOf": [{"type": "array"}, {"type": "null"}]}, {"enum": ["a", "b"]}]
        properties = {
            key: self._random.choice(kinds)
            for key in KEYS
            if key.isidentifier() or self._family not in ("pythonic", "lfm2", "minicpm")
        }
        schema = {"type": "object", "properties": properties, "$defs": {"Deep": {"type": "object"}}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    def _call(self) -> tuple[str, dict[str, Any], str]:
        """Return the name, the arguments, and their JSON as this model would write it."""
        function = self._random.choice(self._tools)["function"]
        properties = function["parameters"]["properties"]
        keys = [key for key in self._keys() if key in properties]
        if self._family in ("qwen3_coder", "glm"):
            arguments = {key: self._of_kind(properties[key]) for key in keys}
        else:
            arguments = {key: self._value() for key in keys}
        separators = self._random.choice([None, (",", ":")])
        indent = self._random.choice([None, None, 1])
        ascii_only = self._random.random() < 0.5
        return (
            function["name"],
            arguments,
            json.dumps(arguments, ensure_ascii=ascii_only, indent=indent, separators=separators),
        )

    def _of_kind(self, schema: dict[str, Any]) -> Any:
        """Return a value that the schema allows, and that can be told from its text."""
        texts = [text for text in STRINGS if text != "null"]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        if "$ref" in schema:
            return {"k": self._value(1)}
        if "anyOf" in schema:
            return self._random.choice([None, [self._value(1)]])
        values: dict[str, list[Any]] = {
            "string": texts,
            "integer": [0, -4, 10**12],
            "object": [{}, {"a": self._value(1)}],
            "boolean": [True, False],
        }
        kind = schema["type"]
        return self._random.choice(values[kind] if isinstance(kind, str) else [*texts, None])

    # how each family writes calls

    def _calls(self, calls: Sequence[tuple[str, dict[str, Any], str]]) -> str:
        random = self._random
        match self._family:
            case "hermes":
                space = random.choice(["\n", ""])
                return random.choice(["\n", ""]).join(
                    f"<tool_call>{space}{self._object(call, 'arguments')}{space}</tool_call>" for call in calls
                )
            case "llama3_json":
                tag = random.choice(["", "<|python_tag|>"])
                return tag + random.choice(["; ", ";"]).join(self._object(call, "parameters") for call in calls)
            case "mistral" if random.random() < 0.5:
                told = ", ".join(self._object(call, "arguments") for call in calls)
                return f"[TOOL_CALLS]{random.choice([' ', ''])}[{told}]"
            case "mistral":
                number = random.choice(["", "[CALL_ID]abc12DEF9"])
                return "".join(f"[TOOL_CALLS]{name}{number}[ARGS]{text}" for name, _, text in calls)
            case "pythonic" | "lfm2" | "minicpm":
                told = ("\n" if self._family == "minicpm" else ", ").join(
                    f"{name}({', '.join(f'{key}={self._literal(value)}' for key, value in arguments.items())})"
                    for name, arguments, _ in calls
                )
                if self._family == "minicpm":
                    return f"<|tool_call_start|>\n```python\n{told}\n```\n<|tool_call_end|>"
                if self._family == "lfm2":
                    return f"<|tool_call_start|>[{told}]<|tool_call_end|>"
                return random.choice(["[{}]", "<|python_start|>[{}]<|python_end|>"]).format(told)
            case "glm":
                space = random.choice(["\n", ""])
                return space.join(self._keyed(name, arguments, space) for name, arguments, _ in calls)
            case "kimi_k2":
                told = "".join(
                    f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
                    for number, (name, _, text) in enumerate(calls)
                )
                return f"<|tool_calls_section_begin|>{told}<|tool_calls_section_end|>"
            case "deepseek" if random.random() < 0.5:
                told = "".join(
                    f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, _, text in calls
                )
                return f"<｜tool▁calls▁begin｜>{told}<｜tool▁calls▁end｜>"
            case "deepseek":
                told = "\n".join(
                    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                    for name, _, text in calls
                )
                return f"<｜tool▁calls▁begin｜>{told}<｜tool▁calls▁end｜>"
            case "apertus":
                told = ", ".join(f'{{"{name}": {text}}}' for name, _, text in calls)
                return f"<|tools_prefix|>[{told}]<|tools_suffix|>"
            case "harmony":
                return "<|start|>assistant".join(self._channel_call(name, text) for name, _, text in calls)
            case _:
                return "\n".join(self._tagged(name, arguments) for name, arguments, _ in calls)

    def _channel_call(self, name: str, text: str) -> str:
        json_type = self._random.choice(["", " json", " <|constrain|>json"])
        header = self._random.choice(
            [
                f"<|channel|>commentary to=functions.{name}{json_type}",
                f" to=functions.{name}<|channel|>commentary{json_type}",
                f"<|channel|>analysis to={name}{json_type}",
            ]
        )
        return f"{header}<|message|>{text}{self._random.choice(['<|call|>', '<|end|>'])}"

    @staticmethod
    def _messages(messages: Sequence[tuple[str, str]]) -> str:
        """Return messages with text, each of a channel or whole already."""
        return "<|start|>assistant".join(
            f"<|channel|>{channel}<|message|>{text}<|end|>" if channel else text for channel, text in messages if text
        )

    def _object(self, call: tuple[str, dict[str, Any], str], member: str) -> str:
        name, _, text = call
        members = [
            f'"name": "{name}"',
            f'"{member}": {text}',
            *(['"type": "function"'] * (self._random.random() < 0.2)),
        ]
        if self._random.random() < 0.2:
            self._random.shuffle(members)
        return "{" + ", ".join(members) + "}"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str) and self._random.random() < 0.5:
            return json.dumps(value, ensure_ascii=False)
        return json.dumps(value) if isinstance(value, bool | None) and self._random.random() < 0.3 else repr(value)

    @staticmethod
    def _keyed(name: str, arguments: dict[str, Any], space: str) -> str:
        told = "".join(
            f"<arg_key>{key}</arg_key>{space}"
            f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>{space}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{space}{told}</tool_call>"

    @staticmethod
    def _tagged(name: str, arguments: dict[str, Any]) -> str:
        told = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"
