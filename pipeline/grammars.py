"""The limits under which grammars are checked and followed: the same in the tokenizer and in every engine.

They count work and not time, so that a grammar is refused everywhere or nowhere. Imports llguidance when it is asked.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits

STACK_BYTES: Final = 256 << 20
"""Of a thread that reads grammars. llguidance follows rules by recursion, and a full stack ends the process: a chain of
2,700 short rules needs 8 MiB, and 64 KiB of grammar have room for thousands."""
_starting = threading.Lock()


def start_with_stack(thread: threading.Thread) -> None:
    """Start a thread that reads grammars. Memory is only taken for as much of its stack as is used."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def parser_limits() -> LLParserLimits:
    """Return them. llguidance's own are 5 to 12 times as high: those of a program that trusts its grammars."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=20_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )
