"""Why a token took long is told from the steps that the journal has since the token before."""

from __future__ import annotations

from collections.abc import Sequence

from support.log_contract import put
from support.memory_log.log import MemoryLog

from ops.replay.show import why
from pipeline.events import Chunk, StepCompleted, StepStats, TokenRow, encode
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import Entry
from pipeline.names import Names

ENGINE = "generate-0"


def log_of(chunks: Sequence[int]) -> MemoryLog:
    """Return a log with the journal of as many steps: each has a chunk of another prompt, and ends after a second."""
    log, writer = MemoryLog(Names()), JournalWriter()
    for number, count in enumerate(chunks, 1):
        step = StepCompleted(
            rows=(TokenRow(uid="a", n=number, token=5),),
            figures=StepStats(forward_ms=900),
            chunks=(Chunk(uid="p", start=0, count=count),) if count else (),
        )
        entry = Entry(f"3-{number}", {"ms": str(1000 * number)} | encode(step))
        put(log, log.names.journal(ENGINE), writer.fields(entry, step), entry.id)
    return log


def test_only_the_steps_since_the_token_before_count() -> None:
    wait = why(log_of([100, 20, 30, 7]), ENGINE, "3-3", "a", 3, since_ms=1000)
    assert wait is not None
    assert str(wait) == "token 3 of a waited 2.0 s: a prompt of 50 tokens was prefilled in 2 chunks"


def test_a_long_wait_is_read_in_pieces() -> None:
    wait = why(log_of([1] * 1200), ENGINE, "3-1200", "a", 9, since_ms=50_000)
    assert wait is not None
    assert (wait.num_steps, wait.others[0].num_chunks) == (1150, 1150)


def test_a_step_that_the_journal_does_not_have_says_nothing() -> None:
    assert why(log_of([1, 1]), ENGINE, "3-7", "a", 9, since_ms=0) is None
    assert why(log_of([1, 1]), "generate-1", "3-1", "a", 9, since_ms=0) is None
