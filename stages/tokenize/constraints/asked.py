"""Decides what the grammar of an answer must enforce, without llguidance, which only another process loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pipeline.events import Calls, Submitted
from pipeline.markup import Markup
from pipeline.sampling import Constraint, Value

Wanted = Literal["", "may", "must"]


class Asked(Value):
    """Everything that decides the grammar of one answer, beside the model's dialect."""

    constraint: Constraint | None
    calls: Calls | None
    tools: tuple[dict[str, Any], ...]
    thinking_budget: int | None
    markup: Markup

    @property
    def param(self) -> str:
        """Field of the request that asks for the grammar."""
        if self.constraint is not None:
            return self.constraint.param
        has_calls = self.markup.tools and wanted_calls(self.calls, self.tools)
        return "tools" if has_calls else "thinking_token_budget"


def wanted_calls(calls: Calls | None, tools: Iterable[dict[str, Any]]) -> Wanted:
    """Return whether a grammar has tool calls in it, and whether the answer must be calls.

    Without `strict` and `names`, calls under `auto` are the model's own text. If the client wants no parallel calls,
    readers of the answer take only the first one.
    """
    if calls is None or calls.choice == "none":
        return ""
    if calls.choice == "required":
        return "must"
    strict = any(tool.get("function", {}).get("strict") is True for tool in tools)
    return "may" if strict or calls.names else ""


def needs_check(event: Submitted) -> bool:
    """Return whether an answer may need a grammar. A replayed request has its own."""
    if event.replay is not None:
        return False
    is_bound = event.constraint is not None or event.thinking_budget is not None
    return is_bound or bool(wanted_calls(event.calls, event.templating.tools))


def asked_of(event: Submitted, markup: Markup) -> Asked | None:
    """Return what the answer's grammar must enforce; None: nothing."""
    if not needs_check(event):
        return None
    return Asked(
        constraint=event.constraint,
        calls=event.calls,
        tools=event.templating.tools if event.calls is not None else (),
        thinking_budget=event.thinking_budget,
        markup=markup,
    )
