"""Finds out how a model writes tool calls and thinking, from small conversations that its chat template renders.

The text of a template is never searched: templates share words and differ in what they write. Knows no grammar, and no
text of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from pipeline.events import Submitted
from pipeline.markup import Markup, ToolFormat
from pipeline.vocabulary import AddedTokens
from stages.tokenize.shape import ANSWER, ARGUMENTS, THOUGHT, TOOL, Shape, called, user

if TYPE_CHECKING:  # the process that checks grammars needs no tokenizer
    from transformers import PreTrainedTokenizerFast

FORMATS: Final[tuple[tuple[ToolFormat, re.Pattern[str]], ...]] = (
    (
        "hermes",
        re.compile(r'<tool_call>\s*\{\s*"name":\s*"probe_tool",\s*"arguments":\s*\{\s*"probe_key":\s*"probe_value"'),
    ),
    ("qwen3_coder", re.compile(r"<function=probe_tool>\s*<parameter=probe_key>\s*probe_value\s*</parameter>")),
    (
        "mistral",
        re.compile(r'\[TOOL_CALLS\]\s*\[\s*\{[^{}]*"name":\s*"probe_tool",\s*"arguments":\s*\{\s*"probe_key":'),
    ),
    ("mistral", re.compile(r'\[TOOL_CALLS\]\s*probe_tool(?:\[CALL_ID\]\w+)?\[ARGS\]\s*\{\s*"probe_key":')),
    (
        "llama3_json",
        re.compile(r'\{\s*"name":\s*"probe_tool",\s*"parameters":\s*\{\s*"probe_key":\s*"probe_value"'),
    ),
    (
        "lfm2",
        re.compile(r"""<\|tool_call_start\|>\s*\[\s*probe_tool\(\s*probe_key=(["'])probe_value\1\s*\)"""),
    ),
    (
        "minicpm",
        re.compile(r"""<\|tool_call_start\|>\s*```python\s*probe_tool\(\s*probe_key=(["'])probe_value\1\s*\)"""),
    ),
    (
        "glm",
        re.compile(
            r"<tool_call>\s*probe_tool\s*<arg_key>\s*probe_key\s*</arg_key>\s*<arg_value>\s*probe_value\s*</arg_value>"
        ),
    ),
    (
        "kimi_k2",
        re.compile(
            r'<\|tool_call_begin\|>\s*[\w.:]+\s*<\|tool_call_argument_begin\|>\s*\{\s*"probe_key":\s*"probe_value"'
        ),
    ),
    (
        "deepseek",
        re.compile(
            r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>probe_tool\s*```json|probe_tool<｜tool▁sep｜>)"
            r'\s*\{\s*"probe_key":\s*"probe_value"'
        ),
    ),
    (
        "apertus",
        re.compile(r'<\|tools_prefix\|>\s*\[\s*\{\s*"probe_tool":\s*\{\s*"probe_key":\s*"probe_value"\s*\}\s*\}\s*\]'),
    ),
    (
        "harmony",
        re.compile(
            r"to=functions\.probe_tool\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
            r'\s*\{\s*"probe_key":\s*"probe_value"'
        ),
    ),
    ("pythonic", re.compile(r"""\[\s*probe_tool\(\s*probe_key=(["'])probe_value\1\s*\)""")),
)
"""Patterns of calls. Only a call has the argument's value: a template's list of tools has the other names, too."""
NAMED_ARGUMENTS: Final = "[ARGS]"
"""Mistral's newer spelling has it: `[TOOL_CALLS]name[ARGS]{..}`. The older one is a list in JSON."""
FENCE: Final = "```json"
"""DeepSeek's older spelling has it around arguments."""
MARKERS: Final[Mapping[ToolFormat, tuple[str, ...]]] = {
    "": (),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", NAMED_ARGUMENTS),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "minicpm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "harmony": ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
}
"""Texts of each format that can be tokens."""
BEGINS: Final[Mapping[ToolFormat, tuple[str, ...]]] = {
    **{name: texts[:1] for name, texts in MARKERS.items()},
    "qwen3_coder": ("<tool_call>", "<function="),
    **{name: MARKERS[name][:2] for name in ("kimi_k2", "deepseek", "harmony")},
}
"""Texts that begin a call. Some models leave their first one out."""
CHANNELS: Final = ("<|channel|>analysis<|message|>", "<|end|>")
"""Text that harmony writes around the first message of thinking."""
THINKING: Final[tuple[tuple[str, str], ...]] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""Texts that models write around thinking. Others are found if the template writes an old thought."""
Render = Callable[..., str]
"""`Shape.rendered` for one tokenizer."""
_AROUND: Final = re.compile(rf"([<\[◁][^\s<>\[\]◁▷]+[>\]▷])\s*{THOUGHT}\s*([<\[◁][^\s<>\[\]◁▷]+[>\]▷])")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes tool calls and thinking."""

    tools: ToolFormat
    is_newer: bool
    """Whether Mistral or DeepSeek uses the newer one of its two spellings."""
    think: tuple[str, str] | tuple[()]
    added: AddedTokens
    channels: bool = False
    """See `Markup.channels`; it holds with calls and without."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, shape: Shape, added: AddedTokens, tool_parser: str) -> Dialect:
        """Find the dialect of a tokenizer's template, which takes conversations in this *shape*.

        *tool_parser* says the format of calls, unless it is `auto`.
        """
        render = partial(shape.rendered, tokenizer)
        text, found = "", ""
        if tokenizer.chat_template is not None:
            text, found = _format_of(render)
        channels = (found if tool_parser in ("auto", "none") else tool_parser) == "harmony"
        if tool_parser != "auto":
            found = "" if tool_parser == "none" else tool_parser
        is_newer = {
            "mistral": NAMED_ARGUMENTS in (text or added.ids),
            "deepseek": bool(text) and FENCE not in text,
        }
        think: tuple[str, str] | tuple[()] = CHANNELS if channels else ()
        if tokenizer.chat_template is not None and not channels:
            think = _thinking_of(render)
        return cls(found, is_newer.get(found, False), think, added, channels)  # type: ignore[arg-type]

    def written(self) -> bytes:
        """Return it as a message for the process that checks grammars."""
        ids, special = list(self.added.ids.items()), sorted(self.added.special)
        return orjson.dumps([self.tools, self.is_newer, self.think, self.channels, ids, special])

    @classmethod
    def read(cls, message: bytes) -> Dialect:
        """Return the dialect of a message."""
        tools, is_newer, think, channels, ids, special = orjson.loads(message)
        return cls(tools, is_newer, tuple(think), AddedTokens(dict(ids), frozenset(special)), channels)

    def markup(self, event: Submitted, prompt: str) -> Markup:
        """Return how to read the answer to a conversation, which the template made *prompt* of."""
        calls = event.calls
        may_call = calls is not None and calls.choice != "none" and bool(event.templating.tools)
        tools: ToolFormat = self.tools if may_call else ""
        opens, is_over = self._thinks(event, prompt)
        think = () if is_over else self.think
        texts = (*MARKERS["harmony" if self.channels else tools], *think)
        kept = sorted({self.added.ids[text] for text in texts if text in self.added.ids} & self.added.special)
        return Markup(tools=tools, think=think, opens_thinking=opens, channels=self.channels, tokens=tuple(kept))

    def _thinks(self, event: Submitted, prompt: str) -> tuple[bool, bool]:
        """Return whether a prompt ends inside thinking, and whether it ends after it.

        Only the end counts, which the template wrote: a user can write `<think>` as well. If the answer has begun, its
        beginning counts.
        """
        if not self.think:
            return False, False
        begin, end = self.think
        if self.channels:  # the prompt may end inside a message
            is_final = event.templating.continue_final_message or prompt.endswith("<|message|>")
            return prompt.endswith(begin), is_final and not prompt.endswith(begin)
        if event.templating.continue_final_message:
            begun = event.messages[-1].get("content") if event.messages else ""
            written = begun if isinstance(begun, str) else ""
            opens = written.rfind(begin) > written.rfind(end)
            return opens, bool(written.strip()) and not opens
        closing = prompt.rstrip()
        return closing.endswith(begin), closing.endswith(end)


def _format_of(render: Render) -> tuple[str, ToolFormat]:
    """Return what a template makes of a call, and the format of that; both empty if no format is found."""
    for probe in called(ARGUMENTS):
        text = render(probe, tools=[TOOL])
        for name, pattern in FORMATS:
            if found := pattern.search(text):
                return found[0], name
    return "", ""


def _thinking_of(render: Render) -> tuple[str, str] | tuple[()]:
    """Return what the model writes around its thinking; empty if the template shows none.

    A template shows it in one of three ways. It writes the thought of an old answer, it opens or closes thinking at the
    end of a prompt, or it removes the thought from the text of an old answer.
    """
    for text in _rendered_thoughts(render):
        for begin, end in _AROUND.findall(text):
            if end in (f"{begin[0]}/{begin[1:]}", begin.replace("START", "END"), begin.replace("start", "end")):
                return begin, end
    prompts = [
        render([user()], add_generation_prompt=True, **variables).rstrip()
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    for begin, end in THINKING:
        if any(prompt.endswith((begin, end)) for prompt in prompts):
            return begin, end
        old = {"role": "assistant", "content": f"{begin}\n{THOUGHT}\n{end}\n\n{ANSWER}"}
        text = render([user(), old, user()])
        if ANSWER in text and THOUGHT not in text:
            return begin, end
    return ()


def _rendered_thoughts(render: Render) -> Iterator[str]:
    """Yield conversations with a thought, in the ways that templates take one."""
    whole = {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}
    call = next(called(ARGUMENTS))[-1]
    chunks = [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}, {"type": "text", "text": ANSWER}]
    yield render([user(), {"role": "assistant", "content": ANSWER, **whole}])
    yield render([user(), {**call, **whole}], tools=[TOOL])  # some write only the thought before a call
    yield render([user(), {"role": "assistant", "content": chunks}])
