"""What a route says of itself, beside its code: what /openapi.json is made of."""

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
    """The models that read the request's body, one of them; none: it has no body."""
    answers: tuple[str, ...] = (JSON,)
    """The content types of an answer that is no error."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON Schemas, with a description, of what may stand in the address behind the question mark."""
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same of the request headers that change something."""
    not_ready: bool = False
    """503 is an answer, not an error: it says how things are."""


def operation(summary: str, *bodies: type[BaseModel], **more: Any) -> Callable[[F], F]:
    """Say of a view function what it does; it stays what it is. *more* as in Operation."""
    said = Operation(summary, bodies, **more)

    def say(view: F) -> F:
        setattr(view, _ATTRIBUTE, said)
        return view

    return say


def operation_of(view: Callable[..., Any]) -> Operation | None:
    """Return what was said of *view*."""
    found: Operation | None = getattr(view, _ATTRIBUTE, None)
    return found
