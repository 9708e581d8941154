"""Limits for checking and following grammars: the same in the tokenizer and in every engine.

They count work and not time, so that a grammar is refused everywhere or nowhere. llguidance is imported on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

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
