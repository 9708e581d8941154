"""Makes one grammar from all demands on an answer: thinking and its budget, tool calls, and a constraint.

Thinking comes first, where the model thinks in this prompt. It is text without the markers of this model. So no marker,
spelled letter by letter or as a token, can end it early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from pipeline.errors import RequestError
from pipeline.events import Calls
from pipeline.sampling import Constraint
from stages.tokenize.constraints.asked import Asked, Wanted, wanted_calls
from stages.tokenize.constraints.calls import CallableTool, CallRules, call_rules, header_end, marker
from stages.tokenize.constraints.grammars import (
    UNFORCED,
    answered,
    checked,
    choices_of,
    grammar_of,
    made,
    rules_of,
    tokens_of,
)
from stages.tokenize.constraints.literals import Rules, quoted
from stages.tokenize.markup import BEGINS, MARKERS, Dialect

GAP: Final = "/\\n{0,2}/"
"""Whitespace between thinking and JSON or a call."""
NEXT: Final = "<|start|>assistant"
"""Text between two messages of harmony."""
PREAMBLE: Final = "<|channel|>commentary<|message|>"
"""Header of text that harmony writes before a call."""


def answer_grammar(asked: Asked, dialect: Dialect) -> str:
    """Return the grammar of an answer; empty if it may be anything. Needs a large stack (`with_stack`).

    Raises:
        RequestError: It cannot be enforced, or this model lacks what is asked for.
    """
    wanted = wanted_calls(asked.calls, asked.tools)
    if not asked.markup.tools:
        if wanted == "must":
            raise _no_format()
        wanted = ""
    elif asked.markup.channels and not asked.markup.think:
        if wanted:
            raise _begun()
    elif not wanted and (asked.constraint is not None or (asked.markup.channels and asked.thinking_budget is not None)):
        wanted = "may"  # else the grammar would forbid calls
    thinks = bool(asked.markup.think) and (asked.constraint is not None or wanted or asked.thinking_budget is not None)
    if not thinks and not wanted:
        return "" if asked.constraint is None else grammar_of(asked.constraint)
    missing = [text for text in MARKERS["harmony"] if text not in dialect.added.ids]
    if asked.markup.channels and missing:
        raise _no_tokens(asked.param, missing[0])
    if asked.constraint is not None:
        grammar_of(asked.constraint)  # an error of the constraint alone names it alone
    answer = _Answer(asked, dialect, wanted)
    return made(
        lambda: answered(checked(answer.grammar()), tokens_of(dialect.added)), "unsupported_schema", asked.param
    )


def _no_format() -> RequestError:
    return RequestError(
        "tool_choice: this model's chat template writes no tool calls in a format that is known, so none can be "
        "required; leave tool_choice out, or start the server with --tool-parser",
        code="unsupported_parameter",
        param="tool_choice",
    )


def _no_tokens(param: str, text: str) -> RequestError:
    return RequestError(
        f"{param}: this model writes its answers in harmony, but its tokenizer has no token {text}, so that no grammar "
        "can hold it to them; leave the field out",
        code="unsupported_parameter",
        param=param,
    )


def _begun() -> RequestError:
    return RequestError(
        "tools: the prompt ends inside the message that is content, by continue_final_message or the chat template. "
        "This model calls no tools there, so no call can be required, nor bound by a schema; begin with a new answer, "
        "or send tool_choice `none`",
        code="unsupported_parameter",
        param="tools",
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer, of which at least something must be enforced."""

    asked: Asked
    dialect: Dialect
    wanted: Wanted

    def grammar(self) -> str:
        """Return its grammar in Lark, or in llguidance's JSON if a client's grammar is part of it."""
        rules = Rules()
        thought = self._thought(rules)
        nested: list[dict[str, str]] = []
        body = self._body(rules, nested)
        lark = "\n".join([f"start: {' '.join((*thought, body))}", *rules.lines])
        if not nested:
            return lark
        grammars = [{"lark_grammar": f"{lark}\n{UNFORCED}\n"}, *nested]
        return orjson.dumps({"grammars": grammars}).decode()

    # thinking

    def _thought(self, rules: Rules) -> Sequence[str]:
        """Return the items of a rule for what comes before the answer."""
        budget, opens = self.asked.thinking_budget, self.asked.markup.opens_thinking
        if not self.asked.markup.think or (budget == 0 and not opens):
            return ()
        begin, end = self.asked.markup.think
        gap = marker(self.dialect, NEXT) if self.asked.markup.channels else GAP if self._allows_gap() else ""
        if budget == 0:
            return marker(self.dialect, end), gap
        is_token = end in self.dialect.added.ids
        if budget is not None and not is_token:
            raise RequestError(
                f"thinking_token_budget: this model writes {end} as several tokens, so that its thinking cannot be "
                "counted; leave the field out, or send 0",
                code="unsupported_parameter",
                param="thinking_token_budget",
            )
        closed = self._counted(rules, end, budget) if is_token else self._spelled(rules, end)
        if opens:
            return closed, gap
        opened = marker(self.dialect, begin)
        # llguidance cannot choose between text and a nested grammar, such as JSON; so such models must think
        is_optional = opened.startswith("<[") or self.asked.constraint is None
        return (f"({opened} {closed} {gap})?",) if is_optional else (opened, closed, gap)

    def _counted(self, rules: Rules, end: str, budget: int | None) -> str:
        """Return thinking of at most *budget* tokens that a token ends. The last one may end inside a character."""
        text = rules.add(self._text_without(end), terminal=True)
        attributes = "" if budget is None else f"[max_tokens={budget}]"
        return f"{rules.add(text, attributes=attributes)} {marker(self.dialect, end)}"

    def _spelled(self, rules: Rules, end: str) -> str:
        """Return thinking that ends where its end marker, a text, comes first."""
        text = rules.add(f"({self._text_without(end)}) {quoted(end)}", terminal=True)
        return rules.add(text, attributes="[lazy]")

    def _text_without(self, *texts: str, of: str = "/(?s:.*)/") -> str:
        """Return any text, or text *of* a form, without *texts* in it, and without a call where calls matter."""
        begins = BEGINS[self.asked.markup.tools] if self.wanted else ()
        escaped = [re.escape(text).replace("/", "\\/") for text in dict.fromkeys((*texts, *begins))]
        return f"{of} & ~/(?s:.*)({'|'.join(escaped)})(?s:.*)/" if escaped else of

    def _allows_gap(self) -> bool:
        constraint = self.asked.constraint
        return bool(self.wanted) or (constraint is not None and constraint.kind == "json")

    # the answer

    def _body(self, rules: Rules, nested: list[dict[str, str]]) -> str:
        constraint = self.asked.constraint
        if not self.wanted:
            return self._final(self._loose(rules) if constraint is None else self._bound(constraint, rules, nested))
        calls = self._calls(rules)
        begin = marker(self.dialect, calls.trigger) if calls.trigger else self._optional_tag()
        whole = f"{begin} {calls.rest}"
        if self.wanted == "must":
            return whole
        if constraint is None:
            return self._free(rules, calls, whole)
        if calls.trigger not in self.dialect.added.ids:
            raise RequestError(
                f"{constraint.param}: cannot be combined with tools that this model calls in plain text; send one of "
                "the two, or tool_choice `required` or `none`",
                code="unsupported_parameter",
                param=constraint.param,
            )
        return f"({whole} | {self._final(self._bound(constraint, rules, nested))})"

    def _final(self, body: str) -> str:
        """Return text that is content, with its header in harmony."""
        if not self.asked.markup.channels:
            return body
        return f"{marker(self.dialect, '<|channel|>final')} {header_end(self.dialect)} {body}"

    def _bound(self, constraint: Constraint, rules: Rules, nested: list[dict[str, str]]) -> str:
        text = rules_of(constraint)
        if constraint.kind == "choice":
            return rules.add(rules.add(choices_of(constraint), terminal=True))
        if constraint.kind == "json":
            return rules.add(text.removeprefix("start: "))
        nested.append({"name": "answer", "lark_grammar": f"{text}\n{UNFORCED}\n"})
        return rules.add("@answer")

    def _calls(self, rules: Rules) -> CallRules:
        said = self.asked.calls or Calls()
        tools = []
        for place, tool in enumerate(self.asked.tools):
            function = tool["function"]
            if not said.names or function["name"] in said.names:
                is_bound = self.wanted == "must" or function.get("strict") is True
                tools.append(CallableTool(place, function["name"], function.get("parameters"), is_bound))
        if not tools:
            raise RequestError("tool_choice: names no tool of `tools`", param="tool_choice")
        return call_rules(rules, self.dialect, self.asked.markup.tools, tools, parallel=said.parallel)

    def _optional_tag(self) -> str:
        """Return the optional tag before calls that are the whole answer."""
        tags = [text for text in MARKERS[self.asked.markup.tools] if text in self.dialect.added.ids]
        return f"{marker(self.dialect, tags[0])}?" if tags else ""

    def _free(self, rules: Rules, calls: CallRules, whole: str) -> str:
        """Return text with calls in it. The text that begins a call can be nothing else."""
        parallel = (self.asked.calls or Calls()).parallel
        others = self._other_tokens()
        if not calls.trigger:
            not_a_call = f"/(\\s*[^\\s{re.escape(calls.first)}](?s:.*))?/"
            text = rules.add(self._text_without(of=not_a_call), terminal=True)
            return f"({whole} | {self._loose_text(rules, text, others)})"
        text = rules.add(self._text_without(), terminal=True)
        if self.asked.markup.channels:
            preamble = f"{marker(self.dialect, PREAMBLE)} {text} {marker(self.dialect, f'<|end|>{NEXT}')}"
            return f"({preamble})* ({whole} | {self._final(text)})"
        if calls.trigger in self.dialect.added.ids:
            free = rules.add(self._loose_text(rules, text, others))
            return f"{free} ({whole} {free})*" if parallel else f"{free} ({whole})?"
        begun = rules.add(f"({self._text_without()}) {quoted(calls.trigger)}", terminal=True)
        call = f"{rules.add(begun, attributes='[lazy]')} {calls.rest}"
        return f"({call})* {text}" if parallel else f"({call} | {text})"

    def _loose_text(self, rules: Rules, text: str, others: str) -> str:
        if not others:
            return text
        more = rules.add(self._text_without(), terminal=True)
        return f"{text} ({others} {more})*"

    def _loose(self, rules: Rules) -> str:
        """Return any text, but for further thinking."""
        text = rules.add("/(?s:.*)/", terminal=True)
        return self._loose_text(rules, text, self._other_tokens())

    def _other_tokens(self) -> str:
        """Return the added tokens of free text as an item of a rule; empty: there are none.

        Tokens of calls are among them, unless the grammar has rules for calls. Tokens of thinking are not.
        """
        added, markup = self.dialect.added, self.asked.markup
        of_thinking, of_calls = (
            {added.ids[text] for text in texts if text in added.ids} for texts in (markup.think, MARKERS[markup.tools])
        )
        free = set(added.ids.values()) - added.special - of_thinking
        free = free - of_calls if self.wanted else free | of_calls
        return f"<[{','.join(map(str, sorted(free)))}]>" if free else ""
