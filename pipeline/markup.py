"""How a model marks tool calls and thinking in its text: values that events hold, so that every reader reads alike."""

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
    """What a client says about tool calls. The tools themselves are with the template (`Templating.tools`)."""

    choice: Literal["auto", "required", "none"] = "auto"
    """With `required`, the answer has at least one call; with `none` it has no calls, whatever the text looks like."""
    names: tuple[str, ...] = ()
    """The only tools that may be called; empty: all of them."""
    parallel: bool = True
    """The answer may have more than one call."""


class Markup(Value):
    """How the text of one answer is to be read. The tokenizer finds it in the model's template and the prompt."""

    tools: ToolFormat = ""
    """Empty: the text has no tool calls."""
    think: tuple[str, ...] = ()
    """What begins and what ends thinking, such as `<think>` and `</think>`; empty: the model does not think."""
    opens_thinking: bool = False
    """The prompt ends inside thinking, so the answer begins there."""
    channels: bool = False
    """The text is a row of messages, each behind a header that names its channel (harmony)."""
    tokens: tuple[int, ...] = ()
    """Special tokens that are part of this markup: their text is kept, whatever `skip_special_tokens` says."""
