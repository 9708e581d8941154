"""The two tools under other names, as different libraries declare them. Knows nothing of requests and answers.

A model that has met two names alone would call those two whatever is declared: it has to copy the name and the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from ops.demo_model import wordings
from ops.demo_model.messages import ADD, GET_WEATHER, Message
from ops.demo_model.wordings import is_held_out


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as a conversation declares it."""

    kind: str
    """What it does: "get_weather" or "add"."""
    keys: tuple[str, ...]
    """The names of its parameters."""
    declared: Message

    @property
    def name(self) -> str:
        found: str = self.declared["function"]["name"]
        return found


OF_KIND: Final = {"get_weather": GET_WEATHER, "add": ADD}
KEYS: Final = {
    "get_weather": (("city",), ("city",), ("place",), ("town",), ("location",), ("city_name",)),
    "add": (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n")),
}
OTHERS: Final = (
    ("Tell the time in a city.", {"city": {"type": "string"}}),
    ("Send a message.", {"to": {"type": "string"}, "text": {"type": "string"}}),
    ("Find a word in a book.", {"word": {"type": "string"}}),
    ("The larger one of two numbers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    ("The final answer.", {"answer": {"type": "string"}}),
)
"""What a tool does that no request needs, and its parameters."""
INVENTED: Final = 0.45
"""The share of invented names in the training."""
TOLD: Final = {"get_weather": ("weather", "forecast", "temperature"), "add": ("add", "sum", "plus", "total")}
"""A name with one of these words says what its tool does, so that its description may be missing."""


def plain(declared: Message) -> Tool:
    """Return *declared* as a tool under its own name."""
    function = declared["function"]
    return Tool(function["name"], tuple(function["parameters"]["properties"]), declared)


def letters_of(name: str) -> str:
    """Return a name of a tool without separators and capitals; that decides its side."""
    return name.replace("_", "").replace("-", "").lower()


class Namer:
    """Draws names of one side and declares tools under them."""

    def __init__(self, random: Random, invented: Callable[[], str], *, held_out: bool) -> None:
        self._random = random
        self._invented = invented
        self._held_out = held_out

    def tool(self, kind: str, *, but: Sequence[str] = (), invented: float = INVENTED) -> Tool:
        """Return a tool of *kind* whose name is on this side and is none of *but*.

        *invented*: how likely the name is one that says nothing of what the tool does.
        """
        random = self._random
        taken = {letters_of(name) for name in (*but, *OF_KIND)}
        name = self._name(kind, invented)
        while letters_of(name) in taken or is_held_out(letters_of(name)) is not self._held_out:
            name = self._name(kind, invented)
        function = random.choice(OF_KIND[kind])["function"]
        keys = random.choice(KEYS[kind])
        old = function["parameters"]["properties"]
        properties = {key: dict(value) for key, value in zip(keys, old.values(), strict=True)}
        if random.random() < 0.3:
            properties = {key: {"title": key.replace("_", " ").title(), **value} for key, value in properties.items()}
        told: Message = {"name": name}
        if not any(word in name.lower() for word in TOLD[kind]) or random.random() < 0.85:
            told["description"] = function["description"]
        told["parameters"] = self._object(name, properties)
        if random.random() < 0.15:
            told["strict"] = True
        return Tool(kind, keys, {"type": "function", "function": told})

    def other(self) -> Message:
        """Return a declaration of a tool that no request needs."""
        description, properties = self._random.choice(OTHERS)
        while is_held_out(name := self._invented()) is not self._held_out:
            pass
        function = {"name": name, "description": description, "parameters": self._object(name, dict(properties))}
        return {"type": "function", "function": function}

    def _object(self, name: str, properties: Message) -> Message:
        """Return a schema with its keywords in one of the orders that libraries write them in."""
        random = self._random
        closed = {"additionalProperties": False} if random.random() < 0.3 else {}
        title = {"title": f"{name}_args"} if random.random() < 0.1 else {}
        required = {"required": list(properties)}
        if random.random() < 0.6:
            return {"type": "object", "properties": properties, **required, **closed}
        return {**closed, "properties": properties, **required, **title, "type": "object"}

    def _name(self, kind: str, invented: float) -> str:
        random = self._random
        if random.random() < invented:
            words = [self._invented() for _ in range(random.choice((1, 1, 2)))]
        else:
            (verbs, nouns) = (wordings.values(f"{kind}_{part}") for part in ("verbs", "nouns"))
            words = [random.choice(verbs), random.choice(nouns)]
            words = random.choice((words, words, words[1:], words[::-1]))
        separator = random.choice(("_", "_", "_", "-", ""))
        if not separator:
            words = [words[0], *(word.capitalize() for word in words[1:])]
        return separator.join(words)
