"""StreamLog: what a stage may do to the log. Its methods are the commits; there is no append.

Knows the shapes of what goes in and comes out, and nothing of Redis. `redis_log.RedisLog` and `memory_log.MemoryLog`
implement it under one contract suite (tests/pipeline/test_log_contract.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pipeline.events import End, Mark, StepCompleted, Submitted, Tokenized, TokensProduced
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, Names


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream, its fields as text."""

    id: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Inbox:
    """A stream and the consumer group that works on it."""

    stream: str
    group: str

    @classmethod
    def submitted(cls, names: Names) -> Inbox:
        return cls(names.submitted, TOKENIZE)

    @classmethod
    def tokenized(cls, names: Names) -> Inbox:
        return cls(names.tokenized, GENERATE)

    @classmethod
    def steps(cls, names: Names, engine: str) -> Inbox:
        return cls(names.steps(engine), DETOKENIZE)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may write for a slot. Once a later one came, with a larger epoch, its commits are refused (the fence)."""

    slot: str
    epoch: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.epoch}:{self.nonce}"


class Submission(Enum):
    """What became of a submit."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    """The uid was submitted before: a retry that had got through."""
    BUSY = "BUSY"
    """The backlog is at --max-queued-requests."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What `take` brought, and how to wait for more."""

    entries: tuple[Entry, ...]
    cursor: str
    """Everything up to this id of `tokenized` was delivered to somebody; `wait` watches for what comes after it."""
    ended: tuple[str, ...]
    """Uids that somebody else ended since `control_cursor`."""
    control_cursor: str
    flush: str
    """Id of the last `flush` since `control_cursor`; empty when there was none."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """What the engine learns from the commit of a step."""

    steps_length: int
    """How many steps wait for the detokenizer."""
    newest: str
    """Id of the newest entry of `tokenized`, `0-0` when there is none: what `take` could bring is not newer."""
    ended: tuple[str, ...]
    """Uids that somebody else ended since `control_cursor`."""
    control_cursor: str
    flush: str
    """As in Taken."""


@dataclass(frozen=True, slots=True)
class Produced:
    """One event of a step for one history: tokens, a mark such as Admitted, or the end."""

    uid: str
    entry_id: str
    """The explicit id in the history; `names.SEAL` for an end."""
    n: int
    event: TokensProduced | End | Mark
    frontend: str
    tell_engine: bool = False
    """The engine does not know of this end yet: say it in `control`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An event as a frontend hears it. A gap shows: `n - count` is not the n before."""

    uid: str
    entry_id: str
    n: int
    event: TokensProduced | End


@dataclass(frozen=True, slots=True)
class Lease:
    """What is known of a slot's lease at one moment."""

    holder: str
    """The owner that holds it, or empty when it is free."""
    ttl_ms: int


class StreamLog(Protocol):
    """The log as stages use it. Every commit is safe to run twice; `False` means that it was done before.

    Raises, all of them: LogUnavailable when the log cannot be reached; GroupLost when it lost its data.
    """

    names: Names

    # requests

    def submit(self, uid: str, event: Submitted, *, timeout_ms: int, retention_ms: int, max_queued: int) -> Submission:
        """Begin the history of *uid* and hand it to the tokenizers. Raises LogFull when no new work can be taken."""
        ...

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        """Consume *entry* of `submitted`, write the prompt's tokens to its history and hand it to the engines."""
        ...

    def end(self, uid: str, event: End, *, frontend: str, retention_ms: int, consume: Entry | None = None) -> bool:
        """Seal the history of *uid*, once; consume *consume*, the entry of `submitted` that it answers, if any."""
        ...

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        """Return the entries of each history, from its start or after the id *after*; empty where there is none."""
        ...

    def alive(self, uids: Sequence[str]) -> set[str]:
        """Return which of *uids* have not ended."""
        ...

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        """Read up to *max_entries* new entries of `tokenized` for an engine; they stay pending until `step` ends them.

        Raises Fenced.
        """
        ...

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        """Wait until `tokenized` or `control` holds something later than the cursors, or *block_ms* are over."""
        ...

    def step(
        self,
        owner: Owner,
        number: int,
        event: StepCompleted,
        *,
        ended: Sequence[str],
        control_cursor: str,
        lease_ms: int,
    ) -> StepCommitted:
        """Append step `<epoch>-<number>` of an engine and consume the `tokenized` entries *ended*. Raises Fenced."""
        ...

    def flush(self, by: str) -> str:
        """Ask all engines to forget the prefixes that nobody uses; return an id, which `take` and `step` give them.

        A doorbell: it may be lost, so who waits for the engines to say that they did it asks again.
        """
        ...

    # detokenizers

    def produced(
        self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced], *, retention_ms: int
    ) -> bool:
        """Consume a step and write what followed from it to the histories and the replies. Raises Fenced."""
        ...

    # consumer groups

    def backlog(self, inbox: Inbox) -> int:
        """Return how many entries the stream holds: those nobody has read, and those that are worked on."""
        ...

    def prepare(self, inbox: Inbox) -> None:
        """Create the stream and its group where they are missing; what was appended before is read too."""
        ...

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        """Read new entries for *consumer*, waiting up to *block_ms*."""
        ...

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        """Return what *consumer* has read and not consumed, in order. This is no delivery."""
        ...

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        """Take over pending entries of consumers whose slots nobody holds. Raises Fenced."""
        ...

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        """Take a free slot under a new epoch; None when somebody holds its lease."""
        ...

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        """Keep (or take again) the lease and publish *status* (JSON); False when the owner has changed."""
        ...

    def release(self, owner: Owner) -> bool:
        """Give the lease back and drop the status; False when it was somebody else's."""
        ...

    def lease(self, slot: str) -> Lease:
        """Say who holds a slot, and for how long."""
        ...

    def statuses(self, stage: str) -> dict[str, str]:
        """Return slot -> status (JSON) of all workers of *stage* that spoke in the last 10 s."""
        ...

    # frontends

    def open_replies(self, frontend: str) -> str:
        """Make sure that the replies stream exists for 60 s more, and return its last id."""
        ...

    def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        """Return the replies after id *after* and the id to go on from, waiting up to *block_ms*."""
        ...
