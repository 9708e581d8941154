"""What the methods of the log take and return, and its parts that another log than the one in Redis has, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from pipeline.errors import LogError
from pipeline.events import End, Failed, Mark, Submitted, Tokenized, TokensProduced
from pipeline.names import DETOKENIZE, GENERATE, SEAL, TOKENIZE, Names


class Submission(Enum):
    """Outcome of a submit."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    """The uid was submitted before: an earlier try had succeeded."""
    BUSY = "BUSY"
    """Too many requests would wait with these: --max-queued-requests."""
    FULL = "FULL"
    """The log would hold more bytes than allowed: --max-log-bytes. The frontend checks that, not the log."""
    ATTACH = "ATTACH"
    """Another request has the idempotency key and the same body: the client means that one."""
    MISMATCH = "MISMATCH"
    """Another request has the idempotency key, but another body."""
    GONE = "GONE"
    """The dead letter to send again does not exist: another client has sent it again, or dropped it."""
    TOO_FAST = "TOO_FAST"
    """A token bucket of the API key's owner is empty."""
    TOO_MANY_WAIT = "TOO_MANY_WAIT"
    """The owner has as many requests waiting for an engine as it may."""
    TOO_MANY = "TOO_MANY"
    """The API key has as many running requests as it may."""
    TOO_MANY_IN_BACKGROUND = "TOO_MANY_IN_BACKGROUND"
    """Its owner has as many running requests in the background as it may: --max-background."""
    TOO_MUCH = "TOO_MUCH"
    """The API key has used up its share of the log."""
    UNACKNOWLEDGED = "UNACKNOWLEDGED"
    """The request is in the log, but not on as many servers as it must be: --acks. The caller takes it back, unless
    it is another client's."""


@dataclass(frozen=True, slots=True)
class Once:
    """An idempotency key. Submits with the same key and the same body are one request."""

    key: str
    """Hash of the client's key and its scope."""
    digest: str
    """Hash of the body; without a colon."""
    instead_of: str = ""
    """Uid that may lose the key, because its request is gone or failed; the base uid of siblings."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of what an owner, the holder of one or several API keys, may submit; 0: no limit.

    Rates are token buckets by the log's clock: each is full at first and is filled again within its minute or day.
    """

    key: str
    """The owner: name or hash of its API key."""
    requests_per_minute: int = 0
    """Number of accepted submits; siblings count as one."""
    concurrent_requests: int = 0
    """Largest number of accepted requests that have not ended; siblings count each. Siblings are accepted where one
    request would be, because more than may run at once could never be accepted otherwise."""
    log_bytes: int = 0
    """Largest size of accepted requests within the retention, as `shared.submitted_bytes` counts it. The submit that
    reaches the limit is still accepted, because one above it could never be accepted otherwise."""
    requests_per_day: int = 0
    tokens_per_minute: int = 0
    """Tokens of prompts and answers, charged when a request ends. A submit is refused while more are charged than the
    bucket held."""
    tokens_per_day: int = 0
    queued_requests: int = 0
    """Largest number of accepted requests that no engine has taken; siblings as above."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """Outcome of a submit, and its request."""

    submission: Submission
    uid: str
    """Request that has the idempotency key, else the submitted one; the base uid of siblings."""
    again_ms: int = 0
    """With TOO_FAST: time until the token bucket lets it through. With TOO_MUCH: time until the key is below its
    share."""
    used_bytes: int = 0
    """With TOO_MUCH: size of the key's part of the log."""
    limit: str = ""
    """With TOO_FAST: name of the limit, a field of Quota."""
    acks: str = ""
    """With UNACKNOWLEDGED: how many servers have it, and how many should, for people."""


@dataclass(frozen=True, slots=True)
class Turn:
    """How a request waits for an engine."""

    owner: str = ""
    """Whose turn it is when the request is taken."""
    weight: int = 1
    """The owner's share, against the weights of the others."""
    tokens: int = 1
    """Size of the request: its prompt and the longest answer."""
    priority: int = 0
    """Among the requests of its owner, a lower one comes first .."""
    overtakes: bool = False
    """.. and with this, among those of all owners."""
    prefer: str = ""
    """Slot of the engine that should take it, because its cache has the beginning of the prompt; empty: any engine."""

    @property
    def line(self) -> str:
        """What requests have in common that are taken in the order of their arrival; empty if it prefers an engine."""
        return "" if self.prefer else f"{self.owner}\n{self.priority}\n{self.overtakes:d}"

    def fields(self) -> dict[str, str]:
        """Return the fields of its entry in `tokenized`: those that are not the defaults."""
        said = {"owner": self.owner, "weight": self.weight, "tokens": self.tokens, "priority": self.priority}
        said |= {"overtakes": int(self.overtakes), "prefer": self.prefer}
        return {name: str(value) for name, value in said.items() if value != getattr(NO_TURN, name)}


NO_TURN: Final = Turn()


class Used(NamedTuple):
    """What the requests of an owner have used that have ended. The names are those in the log."""

    requests: int = 0
    """Siblings count each."""
    failed: int = 0
    prompt_tokens: int = 0
    """Of prompts that an engine began to compute. The choices of one prompt count it once."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of every request of a process. A log gets them when it is made."""

    timeout_s: float = 600.0
    """Time from submit to deadline."""
    retention_s: float = 900.0
    """Time for which an ended history is kept; `entries.brief_ms` has the exceptions."""
    max_queued: int = 1024
    """Largest number of requests that no engine has taken; a submit beyond that is BUSY."""
    drops_ended: bool = True
    """Whether commits drop entries of `ended` that are older than the retention, because their histories are gone.
    Tools do not: they do not know the server's retention."""
    journal_bytes: int = 0
    """Largest size of the journal of one engine; 0: none is written."""
    response_retention_s: float = 86_400.0
    """The same of a stored response."""
    background_timeout_s: float = 3600.0
    """Time from submit to deadline of a request in the background."""
    max_background: int = 64
    """Largest number of requests in the background of one owner that have not ended."""
    acks: int = 0
    """Number of replicas that must have a request before its submit is done."""
    acks_disk: bool = False
    """Whether the server and these replicas must also have it on disk."""

    @property
    def timeout_ms(self) -> int:
        return int(self.timeout_s * 1000)

    @property
    def retention_ms(self) -> int:
        return int(self.retention_s * 1000)

    @property
    def ended_ms(self) -> int:
        """Age at which commits drop entries of `ended`; 0: never."""
        return max(self.retention_ms, self.response_retention_ms) if self.drops_ended else 0

    @property
    def response_retention_ms(self) -> int:
        return int(self.response_retention_s * 1000)

    @property
    def background_timeout_ms(self) -> int:
        return int(self.background_timeout_s * 1000)


DEFAULT_LIMITS: Final = RequestLimits()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream, its fields as text."""

    id: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Inbox:
    """A stream and the consumer group that reads it."""

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
"""Beginning of a guest's nonce. A guest is an owner that looks after a slot while its worker is away."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a slot, who may write for it. Once the slot has a later owner, with a larger epoch, Redis refuses
    the commits of this one (the fence)."""

    slot: str
    epoch: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.epoch}:{self.nonce}"

    @property
    def is_guest(self) -> bool:
        """Whether it looks after the slot while its worker is away."""
        return self.nonce.startswith(GUEST)


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of `take`, with the cursors for `wait`."""

    entries: tuple[Entry, ...]
    cursor: str
    """Last id of `tokenized` that was delivered, or 0-0 if requests wait; `wait` waits for what comes after it."""
    num_left: int
    """Number of requests that it left to the engines that they prefer."""
    ended: tuple[str, ...]
    """Uids that somebody else ended since `control_cursor`."""
    control_cursor: str
    flush: str
    """Id of the last `flush` since `control_cursor`; empty if there was none."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Reply to the commit of a step."""

    steps_length: int
    """Number of steps that wait for the detokenizer."""
    newest: str
    """Id of the newest entry of `tokenized`, or `0-0`: `take` could return nothing newer."""
    ended: tuple[str, ...]
    """Uids that somebody else ended since `control_cursor`."""
    control_cursor: str
    flush: str
    """See Taken."""
    ms: int
    """Time of the commit, by Redis' clock."""


class Produced(NamedTuple):
    """One event of a step for one history: tokens, a mark such as Admitted, or the end.

    There is one for each token, as of Reply, and a frozen dataclass takes three times as long to make.
    """

    uid: str
    entry_id: str
    """Explicit id in the history; `names.SEAL` for an end."""
    n: int
    event: TokensProduced | End | Mark
    frontend: str
    tell_engine: bool = False
    """Whether `control` must tell the engine about this end, which it does not know yet."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that killed its worker several times. The commit adds a copy of its history."""

    stage: str
    """Stage of the worker."""
    entry: Mapping[str, str]
    """Fields of the entry that the worker had read."""
    deaths: int
    error: str
    """Error of the last death, as far as it is known."""


class Reply(NamedTuple):
    """An event that a frontend receives. After a gap, `n - count` is not the n of the reply before."""

    uid: str
    entry_id: str
    n: int
    event: TokensProduced | End


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot's lease at one moment."""

    holder: str
    """Owner that holds it; empty if it is free."""
    ttl_ms: int

    @property
    def is_free(self) -> bool:
        """Whether a worker may take it: it has no holder, or a guest holds it."""
        return not self.holder or f":{GUEST}" in self.holder


@dataclass(frozen=True, slots=True)
class Depth:
    """Amount of work in one stream. Consumed entries are deleted, so every entry is work."""

    length: int
    """Number of entries that wait or are being worked on."""
    pending: int
    """Number of entries that a consumer has read."""

    @property
    def lag(self) -> int:
        """Number of unread entries. Redis 6.2 does not know it; 7 loses it once an unread entry was deleted."""
        return max(self.length - self.pending, 0)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Amount of work and data in the log."""

    submitted: Depth
    tokenized: Depth
    steps: Mapping[str, Depth]
    """Depth by engine, for every engine that has or had a detokenizer."""
    num_dead: int
    """Number of dead letters."""
    num_live: int
    """Number of requests that have not ended."""


Journalled: TypeAlias = Sequence[Mapping[str, str]]
"""Steps in the journal's format (`pipeline.log.journal`), one for each entry; none: they are not kept."""


class HistoryLog(Protocol):
    """What can be read of the log when no stage runs."""

    names: Names
    limits: RequestLimits

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        """Return the entries of each history, from its start or after the id *after*; [] if it is gone or erased."""

    def begins(self, uids: Sequence[str]) -> dict[str, Entry]:
        """Return the first entries of the histories that exist; for an erased request, its tombstone."""

    def alive(self, uids: Sequence[str]) -> set[str]:
        """Return which of *uids* have not ended."""

    def statuses(self, stage: str) -> dict[str, str]:
        """Return slot -> status (JSON) of the workers of *stage* that published one in the last 10 s."""

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        """Return the uids of the requests that were made from *since_ms* to before *until_ms*, the oldest first.

        The times are those in the uids, by the clock of the process that drew them. This reads all keys of the server.
        """

    def journal(
        self, engine: str, *, first: str = "-", last: str = "+", max_entries: int = 0, newest: bool = False
    ) -> list[Entry]:
        """Return the steps of an engine's journal from the id *first* to *last*, in their order.

        If there are more than *max_entries*, return the first ones, or the last ones with *newest*; 0: return all.
        """

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        """Return up to *max_entries* letters, the newest first; with *before*, those older than that id.

        Fields: uid, ms, stage, deaths, error, entry (JSON), history (JSON) and, if the history was too long,
        history_cut: how many entries between the first and the last ones it lacks.

        The letter of an entry that could not be read has no history, and uid only if one is known. Its `deaths` is 0,
        `stream` is where the entry was, and `entry` is a list of its id, names and values.
        """


class RequestLog(HistoryLog, Protocol):
    """The log for those who send requests, and for tokenizers. `False` from a commit means that it was done before."""

    def submit(
        self,
        uid: str,
        events: Sequence[Submitted],
        once: Once | None = None,
        *,
        quota: Quota | None = None,
        letter: str = "",
    ) -> SubmitResult:
        """Begin the history of each of *events* and append them to `submitted`, in this order: all of them or none.

        One event is the request *uid*. Several are siblings, with the uids of `names.sibling_uids`. A refusal changes
        nothing and uses no quota. An accepted submit takes the idempotency key *once*, and drops the dead letter
        *letter*, which must exist. Raise LogFull when Redis is at its maxmemory.
        """

    def tokenized(self, entry: Entry, event: Tokenized, *, stored: bool = False, turn: Turn = NO_TURN) -> bool:
        """Consume *entry* of `submitted`, write the prompt's tokens to its history, and append it to `tokenized`.

        *stored*: it is a stored response, which shares its texts with others. *turn*: how it waits for an engine.
        """

    def end(
        self, uid: str, event: End, *, frontend: str, consume: Entry | None = None, dead: DeadLetter | None = None
    ) -> bool:
        """Seal the history of *uid*, once. Consume *consume*, the entry of `submitted` that this end answers.

        If this seal is the first, keep *dead* with a copy of the sealed history, of at most 64 KB.
        """

    def bury(
        self,
        inbox: Inbox,
        entry: Entry,
        reason: str,
        event: Failed,
        requests: Mapping[str, str],
        owner: Owner | None = None,
    ) -> tuple[str, ...] | None:
        """Consume *entry*, keep it unchanged as a dead letter, and end *requests*, uid -> frontend, with *event*.

        Return the uids of those that had not ended before; None if another worker has consumed the entry. With *owner*,
        raise Fenced if the slot has another owner.
        """

    def leave(self, inbox: Inbox, consumer: str, entry: Entry, version: int) -> bool:
        """Leave a pending entry to workers that read *version*: they `claim` it. Return False if it is not pending."""

    def left(self, inbox: Inbox, max_entries: int) -> list[Entry]:
        """Return entries that were left to workers of a newer version than this code."""

    def frontends_of(self, uids: Sequence[str]) -> dict[str, str]:
        """Return uid -> the frontend that submitted it; "" if no client listens or the history is gone."""


MOMENT_DIGITS: Final = 12
"""Number of hex digits at the beginning of a uid: the time when it was made."""
UID_DIGITS: Final = 32
LARGEST: Final = 2**64 - 1
"""Largest half of an id in Redis."""


class NotWhole(LogError):
    """Entries are not a whole history, so they were not imported."""


class Forgotten(LogError):
    """A request was erased. Its tombstone refuses an import."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(f"it was erased; its tombstone stays for {left_ms} ms")
        self.left_ms = left_ms


def is_between(uid: str, since_ms: int, until_ms: int) -> bool:
    """Return whether *uid*, which may be any text, was made from *since_ms* to before *until_ms*."""
    moment = uid[:MOMENT_DIGITS]
    return len(uid) >= UID_DIGITS and _digits(since_ms) <= moment < _digits(until_ms)


def _digits(moment_ms: int) -> str:
    return f"{min(max(moment_ms, 0), 16**MOMENT_DIGITS - 1):0{MOMENT_DIGITS}x}"


def check_whole(uid: str, entries: Sequence[Entry]) -> None:
    """Check that *entries* are a history to which nothing can be added.

    Raises:
        NotWhole: They have no seal, or are not entries of a stream in order.
    """
    if not entries or entries[-1].id != SEAL:
        raise NotWhole(f"{uid}: the history has no end; only requests that have ended can be imported")
    last = (0, 0)
    for entry in entries:
        new = _parsed(entry.id)
        if new <= last or not entry.fields:
            raise NotWhole(f"{uid}: expected ids in rising order, each with fields; found {entry.id!r} after {last}")
        last = new


def _parsed(entry_id: str) -> tuple[int, int]:
    """Return the halves of an id in Redis' format; (0, 0) if *entry_id* is not one."""
    found = _ID.fullmatch(entry_id)
    first, second = (int(found[1]), int(found[2])) if found else (0, 0)
    return (first, second) if max(first, second) <= LARGEST else (0, 0)


_ID: Final = re.compile("(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})")
