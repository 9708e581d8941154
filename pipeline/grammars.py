"""The limits under which grammars are checked and followed, and which numbers of a JSON schema a grammar can count: the
same in web processes, in the tokenizer and in every engine.

They count work and not time, so that a grammar is refused everywhere or nowhere. llguidance is imported on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from llguidance import LLParserLimits
from collections.abc import Iterator
from typing import Any

T = TypeVar("T")

STACK_BYTES: Final = 256 << 20
"""Stack of a thread that reads grammars. llguidance follows rules by recursion, and a full stack ends the process: a
chain of 2,700 short rules needs 8 MiB, and 64 KiB of grammar have room for thousands."""
LIMITS_SAY: Final = ("too many", "too complex", "limit", "max is", "unable to determine", "fuel exhausted")
"""Words in llguidance's errors about limits. It has no error codes."""
_starting = threading.Lock()


def start_with_stack(thread: threading.Thread) -> None:
    """Start a thread that reads grammars. Only the used part of its stack takes memory."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def with_stack(work: Callable[[], T]) -> T:
    """Return the result of *work*, or raise its error. It runs in a thread with a large stack, to read grammars."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # `result` raises it
            done.set_exception(error)

    start_with_stack(threading.Thread(target=run, name="grammar", daemon=True))
    return done.result()


def brief(reason: str) -> str:
    """Return an error of llguidance without its advice, which is for programmers."""
    return " ".join(reason.replace("<non-verbose/>", "").partition("; either increase limits.")[0].split())[:300]


def is_limit(reason: str) -> bool:
    """Return whether an error of llguidance means that a grammar takes too much work."""
    return any(word in reason.lower() for word in LIMITS_SAY)


def parser_limits() -> LLParserLimits:
    """Return the limits. llguidance's own are for programs that trust their grammars.

    - `step_lexer_fuel`: in a field of JSON, the pattern `^[\\p{L}\\p{N} .'-]{1,50}$` needs more than 20,000: letters of
      all alphabets are many expressions. Patterns of that kind pass with 50,000. The time of the worst mask grows
      with it: 2 ms with 20,000, 6 ms with 50,000 and 16 ms with 200,000, of grammars made for that.
    - `step_max_items`: a mask checks what each token would begin. The same pattern needs more than 5,000 for a
      vocabulary of 50,000 tokens, and more than 20,000 for one of 150,000.
    - `max_items_in_row`: the time of an ambiguous grammar's mask grows with its square. Half of llguidance's 2,000
      reduces 34 ms to 6 ms.

    So none of the three makes a mask much slower than the others do. They decide which grammars are refused, and no bit
    of a mask. So they are not part of an engine's numerics.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_items_in_row=1_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


Path = tuple[str, ...]
"""A place in a schema: keywords, names and places in lists."""

OF_A_SCHEMA: Final = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "then"}
    | {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords that have a schema (in older drafts `items` may have a list) .."""
OF_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
""".. a list of schemas .."""
OF_NAMED_SCHEMAS: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
""".. or an object of them."""
LARGEST_NUMBER: Final = 2**53
"""Largest number that llguidance counts exactly: it counts with floats."""
SMALLEST_BOUND: Final = 1e-60
"""Smallest bound above 0. A smaller one has more zeros than llguidance's patterns can be nested."""
LARGEST_COUNT: Final = 2**32 - 1
"""Largest number of characters, items or properties. The coefficient of a `multipleOf` has as many bits."""
BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
COUNTS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def mapped(name: str, value: Any, change: Callable[[Any, Path], Any], at: Path) -> Any:
    """Return the value of a keyword with *change* applied to each schema in it. *at*: the place of the keyword."""
    if name in OF_A_SCHEMA and isinstance(value, dict):
        return change(value, at)
    if (name in OF_SCHEMAS or name == "items") and isinstance(value, list):
        return [change(one, (*at, str(place))) for place, one in enumerate(value)]
    if name in OF_NAMED_SCHEMAS and isinstance(value, dict):
        return {key: change(one, (*at, key)) for key, one in value.items()}
    return value


def holds_schemas(name: str, value: Any) -> bool:
    """Return whether a keyword has schemas in it."""
    if isinstance(value, dict):
        return name in OF_A_SCHEMA or name in OF_NAMED_SCHEMAS
    return isinstance(value, list) and (name in OF_SCHEMAS or name == "items")


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers within a value of JSON; true and false are 1 and 0."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int | float):
            yield one


def is_countable(name: str, value: Any) -> bool:
    """Return whether a grammar can count the numbers of a keyword; True for keywords without numbers."""
    if name in ("const", "enum"):
        return all(abs(one) <= LARGEST_NUMBER for one in numbers_in(value) if isinstance(one, int))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if name == "multipleOf":
        return _has_few_digits(value)
    if name in BOUNDS:
        return abs(value) <= LARGEST_NUMBER and (value == 0 or abs(value) >= SMALLEST_BOUND)
    return name not in COUNTS or value <= LARGEST_COUNT


def _has_few_digits(value: float) -> bool:
    """Return whether a `multipleOf` is a small whole number over a power of ten, as llguidance counts it."""
    scaled = abs(value)
    while scaled <= LARGEST_COUNT and scaled % 1:
        scaled *= 10
    return scaled <= LARGEST_COUNT
