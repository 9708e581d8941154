"""StreamLog: what a stage may do to the log. Its methods are the commits; there is no append.

Knows the shapes of what goes in and comes out, and nothing of Redis. `redis.RedisLog` and `memory.MemoryLog`
implement it under one contract suite (tests/pipeline/log/contract).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

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


GUEST = "guest-"
"""How the nonce of an owner begins who looks after a slot while its worker is away."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may write for a slot. Once a later one came, with a larger epoch, its commits are refused (the fence)."""

    slot: str
    epoch: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.epoch}:{self.nonce}"

    @property
    def is_guest(self) -> bool:
        """Say whether it only looks after the slot while its worker is away."""
        return self.nonce.startswith(GUEST)


class Submission(Enum):
    """What became of a submit."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    """The uid was submitted before: a retry that had got through."""
    BUSY = "BUSY"
    """The backlog is at --max-queued-requests, or would be past it with all that come together."""
    ATTACH = "ATTACH"
    """Another request has the idempotency key: that one is what the client means."""
    MISMATCH = "MISMATCH"
    """Another request has the idempotency key, and another body."""
    TOO_FAST = "TOO_FAST"
    """The API key has had as many requests in this minute as it may."""
    TOO_MANY = "TOO_MANY"
    """As many requests of the API key as may have not ended."""


@dataclass(frozen=True, slots=True)
class Once:
    """An idempotency key: all that is submitted under it, with one body, is one request."""

    key: str
    """The hash of the client's own key within its scope."""
    digest: str
    """The hash of the body; without a colon."""
    instead_of: str = ""
    """The uid that the key may be taken from: of a request that is gone, or that ended in vain; the base uid of
    siblings."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Who submits, and how much that one may; 0 is without a limit."""

    key: str
    """The hash of an API key."""
    requests_per_minute: int = 0
    """Accepted ones, in each minute of the log's clock; those that are submitted together are one."""
    concurrent_requests: int = 0
    """Accepted ones that have not ended, each of those that were submitted together. These are accepted where one more
    would be, however many they are: otherwise more than may run at once could never be."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """What became of a submit, and of which request it says so."""

    submission: Submission
    uid: str
    """The request that has the idempotency key, else the submitted one; the base uid of siblings."""
    again_ms: int = 0
    """With TOO_FAST: how long the minute still lasts."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What holds for every request of a process, so that a log is told once, when it is made."""

    timeout_s: float = 600.0
    """A request fails so long after its submit."""
    retention_s: float = 900.0
    """A history is kept so long after its end."""
    max_queued: int = 1024
    """Requests that wait or run; a submit that would lead beyond them is BUSY."""

    @property
    def timeout_ms(self) -> int:
        return int(self.timeout_s * 1000)

    @property
    def retention_ms(self) -> int:
        return int(self.retention_s * 1000)


DEFAULT_LIMITS: Final = RequestLimits()


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
class DeadLetter:
    """What is kept of a request that killed its worker again and again; the commit adds a copy of its history."""

    stage: str
    """Whose worker it was."""
    entry: Mapping[str, str]
    """Fields of the entry on which the worker died."""
    deaths: int
    error: str
    """What is known of the last death."""


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

    @property
    def is_free(self) -> bool:
        """Say whether no worker holds it: nobody does, or a guest."""
        return not self.holder or f":{GUEST}" in self.holder


@dataclass(frozen=True, slots=True)
class Depth:
    """How much one stream holds for its consumer group. What is consumed is deleted, so that all of it is work."""

    length: int
    """Entries that wait or are worked on."""
    pending: int
    """Those of them that a consumer has read."""

    @property
    def lag(self) -> int:
        """Those that no consumer has read. Redis 6.2 does not say it, and 7 does not once one was deleted unread."""
        return max(self.length - self.pending, 0)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How much the log holds."""

    submitted: Depth
    tokenized: Depth
    steps: Mapping[str, Depth]
    """Of every engine that has or had a detokenizer."""
    num_dead: int
    """Dead letters."""
    num_live: int
    """Requests that have not ended."""


class StreamLog(Protocol):
    """The log as stages use it. Every commit is safe to run twice; `False` means that it was done before.

    Raises, all of them: LogUnavailable when the log cannot be reached; GroupLost when it lost its data.
    """

    names: Names
    limits: RequestLimits

    # requests

    def submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None = None, *, quota: Quota | None = None
    ) -> SubmitResult:
        """Begin the history of each of *events* and hand them to the tokenizers, in this order: all of them or none.

        One event is the request *uid*. Several are siblings, under the uids that `names.sibling_uids` gives. A refusal
        changes nothing and counts for no quota. An accepted submit takes the idempotency key *once*. Raises LogFull
        when Redis is at its maxmemory.
        """
        ...

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        """Consume *entry* of `submitted`, write the prompt's tokens to its history and hand it to the engines."""
        ...

    def end(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        consume: Entry | None = None,
        dead: DeadLetter | None = None,
    ) -> bool:
        """Seal the history of *uid*, once; consume *consume*, the entry of `submitted` that it answers, if any.

        Where this seal is the first, *dead* is kept with a copy of the sealed history, of 64 KB at most.
        """
        ...

    def abandon(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        once: Once | None = None,
        attached: bool = False,
    ) -> bool:
        """As `end`, for a request whose client left; False also where somebody else reads it.

        *once*: the key under which the client sent it. *attached*: or rather, under which it came to a request that
        another one had sent. By leaving it ends that only if the other one has left before, but for the readers. Who
        has left one of several siblings to its readers has left them all; each is to be abandoned all the same.
        """
        ...

    def reading(self, uids: Sequence[str], who: str) -> None:
        """Say for 60 s that *who*, a process, reads requests of others: those among *uids* that have not ended."""
        ...

    def stop_reading(self, uid: str, who: str) -> None:
        """Take that back."""
        ...

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        """Return the entries of each history, from its start or after the id *after*; empty where there is none."""
        ...

    def alive(self, uids: Sequence[str]) -> set[str]:
        """Return which of *uids* have not ended."""
        ...

    # the janitor

    def overdue(self, max_uids: int) -> list[str]:
        """Return requests that have not ended by their deadline, by Redis' clock."""
        ...

    def living(self) -> list[str]:
        """Return all requests that have not ended."""
        ...

    def frontends_of(self, uids: Sequence[str]) -> dict[str, str]:
        """Return uid -> the frontend that it was submitted by; "" where nobody listens or the history is gone."""
        ...

    def read_by_others(self, uids: Sequence[str]) -> set[str]:
        """Return which of *uids* somebody reads beside the client that sent them."""
        ...

    # dead letters

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        """Return up to *max_entries* letters, the newest first, or those older than the id *before*.

        Fields: uid, ms, stage, deaths, error, entry (JSON), history (JSON, see history.copied_history) and, where that
        is cut, history_cut: how many entries it lacks.
        """
        ...

    def drop_dead(self, entry_id: str) -> bool:
        """Remove a letter; False when it is not there."""
        ...

    # after a time in which the log could not be reached

    def incarnation(self) -> str:
        """Return what changes when another process, with other memory, keeps the log: it may know less than the one
        before had said yes to (the last second before a crash, the tail that a replica had not got)."""
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

    def produced(self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced]) -> bool:
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
        """Take over pending entries of consumers whose slots nobody holds.

        Raises Fenced, where there is something to claim.
        """
        ...

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        """Take over pending entries of the slot that *guest* looks after; none once it has another owner.

        Raises Fenced.
        """
        ...

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        """Count that a pending entry is about to be worked on again; return how often it was, this time included.

        The read that brought it counts as the first; 0: it is not pending for this slot any more. Raises Fenced.
        """
        ...

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        """Return how many entries *consumer* has read and not consumed."""
        ...

    def forsaken(self, inbox: Inbox) -> list[str]:
        """Return the consumers that have entries pending and whose slots no worker holds."""
        ...

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        """Take a free slot under a new epoch; None when somebody holds its lease.

        A guest, whose nonce begins with GUEST, looks after a slot while its worker is away: for a worker it is free.
        """
        ...

    def announce(self, slot: str, status: str) -> bool:
        """Publish *status* (JSON) for who is going to ask for *slot*; False, and nothing, when somebody holds it."""
        ...

    def unattended(self) -> list[str]:
        """Return the engines that live or have steps waiting, and whose detokenizer's slot no worker holds."""
        ...

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        """Keep (or take again) the lease and publish *status* (JSON), unless it is empty; False when the owner has
        changed."""
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
