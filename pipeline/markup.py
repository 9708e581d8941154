"""How a model marks tool calls and thinking in its text: values in events, so that every reader reads alike."""

from __future__ import annotations

from typing import Literal

from pipeline.sampling import Value

ToolFormat = Literal[
    "",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "pythonic",
    "lfm2",
    "minicpm",
    "glm",
    "kimi_k2",
    "deepseek",
    "apertus",
    "harmony",
]


class Calls(Value):
    """A client's settings for tool calls. The tools themselves are with the template (`Templating.tools`)."""

    choice: Literal["auto", "required", "none"] = "auto"
    """With `required`, the answer has at least one call; with `none` it has no calls, whatever the text looks like."""
    names: tuple[str, ...] = ()
    """The only tools that may be called; empty: all of them."""
    parallel: bool = True
    """Whether the answer may have more than one call."""


class Markup(Value):
    """How to read the text of one answer. The tokenizer finds it in the model's template and the prompt."""

    tools: ToolFormat = ""
    """Format of tool calls; empty: the text has none."""
    think: tuple[str, ...] = ()
    """Texts that begin and end thinking, such as `<think>` and `</think>`; empty: the model does not think."""
    opens_thinking: bool = False
    """Whether the prompt ends inside thinking, so the answer begins there."""
    channels: bool = False
    """Whether the text is a row of messages, each after a header with its channel (harmony)."""
    tokens: tuple[int, ...] = ()
    """Special tokens of this markup: their text is kept, whatever `skip_special_tokens` says."""
