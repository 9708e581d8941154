"""The description of a route, beside its code: /openapi.json is made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., Any])

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_ATTRIBUTE: Final = "__operation__"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route."""

    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    """The models of the request body: one of them reads it. None: there is no body."""
    body_is_optional: bool = False
    answers: tuple[str, ...] = (JSON,)
    """The content types of an answer that is not an error."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Query parameter -> its JSON Schema, with a description."""
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Request header -> its JSON Schema, with a description."""
    not_ready: bool = False
    """503 is an answer, not an error: its body has the status."""


def operation(summary: str, *bodies: type[BaseModel], **more: Any) -> Callable[[F], F]:
    """Attach a description to a view function, which stays as it is. *more* as in Operation."""
    said = Operation(summary, bodies, **more)

    def say(view: F) -> F:
        setattr(view, _ATTRIBUTE, said)
        return view

    return say


def operation_of(view: Callable[..., Any]) -> Operation | None:
    """Return the description of *view*; None if it has none."""
    found: Operation | None = getattr(view, _ATTRIBUTE, None)
    return found
