"""StreamLog: everything that a stage can do with the log. Its methods are commits and reads; there is no plain append.

Knows the types of arguments and results, and not Redis. `redis.RedisLog` implements it. The tests have another
one, `MemoryLog`, with which a contract suite compares it (tests/pipeline/log/contract).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from pipeline.errors import LogError
from pipeline.events import End, Failed, Mark, StepCompleted, Submitted, Tokenized, TokensProduced
from pipeline.names import DETOKENIZE, GENERATE, SEAL, TOKENIZE, Names
from pipeline.serving import Served, Serving


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
    """The API key has used up its requests of this minute."""
    TOO_MANY = "TOO_MANY"
    """The API key has as many running requests as it may."""
    TOO_MUCH = "TOO_MUCH"
    """The API key has used up its share of the log."""


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
    """Limits of what an API key may submit; 0: no limit."""

    key: str
    """Hash of an API key."""
    requests_per_minute: int = 0
    """Largest number of accepted submits in each minute of the log's clock; siblings count as one."""
    concurrent_requests: int = 0
    """Largest number of accepted requests that have not ended; siblings count each. Siblings are accepted where one
    request would be, because more than may run at once could never be accepted otherwise."""
    log_bytes: int = 0
    """Largest size of accepted requests within the retention, as `shared.submitted_bytes` counts it. The submit that
    reaches the limit is still accepted, because one above it could never be accepted otherwise."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """Outcome of a submit, and its request."""

    submission: Submission
    uid: str
    """Request that has the idempotency key, else the submitted one; the base uid of siblings."""
    again_ms: int = 0
    """With TOO_FAST: time left of the minute. With TOO_MUCH: time until the key is below its share."""
    used_bytes: int = 0
    """With TOO_MUCH: size of the key's part of the log."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of every request of a process. A log gets them when it is made."""

    timeout_s: float = 600.0
    """Time from submit to deadline."""
    retention_s: float = 900.0
    """Time for which an ended history is kept; `entries.kept_ms` has the exceptions."""
    max_queued: int = 1024
    """Largest number of requests that no engine has taken; a submit beyond that is BUSY."""
    drops_ended: bool = True
    """Whether commits drop entries of `ended` that are older than the retention, because their histories are gone.
    Tools do not: they do not know the server's retention."""
    journal_bytes: int = 0
    """Largest size of the journal of one engine; 0: none is written."""

    @property
    def timeout_ms(self) -> int:
        return int(self.timeout_s * 1000)

    @property
    def retention_ms(self) -> int:
        return int(self.retention_s * 1000)

    @property
    def ended_ms(self) -> int:
        """Age at which commits drop entries of `ended`; 0: never."""
        return self.retention_ms if self.drops_ended else 0


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
    """Last id of `tokenized` that was delivered to any engine; `wait` waits for what comes after it."""
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

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        """Consume *entry* of `submitted`, write the prompt's tokens to its history, and append it to `tokenized`."""

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


class StreamLog(RequestLog, Protocol):
    """The log for stages.

    A commit is safe to run twice. If it is not, its operation sets `once`, and it is never sent again.

    Every method raises LogUnavailable if the log cannot be reached, and GroupLost if it lost its data.
    """

    # requests

    def abandon(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        once: Once | None = None,
        attached: bool = False,
        refused: bool = False,
    ) -> bool:
        """End a request whose client left, as `end` does. Return False also if another client reads it.

        *once*: idempotency key of the client. *attached*: the client did not send the request; the key led it there.
        Such a client ends the request only after the sender has left. A sender that leaves one of several siblings to
        its readers has left them all; abandon each of them all the same. *refused*: the client left because a sibling
        was refused; without tokens the history is kept as briefly as that sibling's.
        """

    def reading(self, uids: Sequence[str], who: str) -> None:
        """Record for 60 s that the process *who* reads requests of others: those of *uids* that have not ended."""

    def stop_reading(self, uid: str, who: str) -> None:
        """Remove what `reading` recorded."""

    # the janitor

    def overdue(self, max_uids: int) -> list[str]:
        """Return requests that are past their deadline and have not ended, by Redis' clock."""

    def living(self) -> list[str]:
        """Return all requests that have not ended."""

    def read_by_others(self, uids: Sequence[str]) -> set[str]:
        """Return which of *uids* are read by another client than their sender."""

    # dead letters

    def drop_dead(self, entry_id: str) -> bool:
        """Remove a letter; return False if it does not exist."""

    # after the log could not be reached

    def incarnation(self) -> str:
        """Return a text that changes when another server process holds the log.

        A new process may know less than the old one had confirmed: it lacks the last second before a crash, or what a
        replica had not received.
        """

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        """Read up to *max_entries* new entries of `tokenized` for an engine. They are pending until `step` ends them.

        Raise Fenced.
        """

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        """Wait up to *block_ms* until `tokenized` or `control` has something after the cursors."""

    def step(
        self,
        owner: Owner,
        steps: Mapping[int, StepCompleted],
        *,
        ended: Sequence[str],
        control_cursor: str,
        lease_ms: int,
    ) -> StepCommitted:
        """Append *steps* of an engine, all or none, and consume the `tokenized` entries *ended*. Raise Fenced.

        Without steps, only return what is new. A step has the id `<epoch>-<number>`. The numbers ascend. A caller that
        did not get the reply commits the same steps again. Raise LogUnavailable while the stream holds a later entry
        that is not the engine's.
        """

    def flush(self, by: str) -> str:
        """Ask all engines to remove the prefixes that no request uses; return an id, which `take` and `step` deliver.

        The message may be lost, so a caller that waits for the engines' answer asks again.
        """

    # detokenizers

    def produced(
        self,
        owner: Owner,
        entries: Sequence[Entry],
        engine: str,
        events: Sequence[Produced],
        journal: Journalled = (),
        *,
        tries: int = 0,
    ) -> bool:
        """Consume steps and write the events that follow to the histories and the replies. Raise Fenced.

        Nothing is written unless all *entries* are pending. *journal* goes into the engine's journal, with the ids of
        the steps, and the oldest entries leave it. If memory is short, the whole journal is deleted instead.

        With *tries* the single step is not consumed: *events* are a part of what follows from it, and *tries* becomes
        its number of tries. Nothing is written if it already had as many.
        """

    # consumer groups

    def backlog(self, inbox: Inbox) -> int:
        """Return how many entries the stream holds: unread ones and those that are being worked on."""

    def prepare(self, inbox: Inbox) -> None:
        """Create the stream and its group where they are missing. The group also reads entries appended before."""

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        """Read new entries for *consumer*, waiting up to *block_ms*."""

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        """Return the entries that *consumer* has read and not consumed, in order. This does not count as a try."""

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        """Take over pending entries of consumers whose slots are free. Raise Fenced if there is one to claim."""

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        """Take over pending entries of the slot that *guest* owns; none if it has another owner. Raise Fenced."""

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        """Add one to the tries of a pending entry, before the work on it begins; return the number of tries.

        The read that delivered the entry is the first try. 0: the entry is not pending for this slot. Raise Fenced.
        """

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        """Return how many entries *consumer* has read and not consumed."""

    def forsaken(self, inbox: Inbox, *, but: str = "") -> list[str]:
        """Return the consumers that have entries pending and whose slots no worker holds; not the slot *but*."""

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int, serving: Serving | None = None) -> Owner | None:
        """Take a free slot under a new epoch; return None if its lease is held.

        A slot that a guest holds is free for a worker. The nonce of a guest begins with GUEST. *serving*: what the
        worker serves. Its stage serves that from now on, if no other worker of it lives. Raise DoesNotFit if the living
        workers of any stage serve something else.
        """

    def announce(self, slot: str, status: str) -> bool:
        """Publish the *status* (JSON) of a worker that will ask for *slot*; return False if the slot is held."""

    def unattended(self) -> list[str]:
        """Return the engines that live or have steps waiting, and whose detokenizer is away."""

    def renew(self, owner: Owner, lease_ms: int, status: str, serving: Serving | None = None) -> bool:
        """Keep the lease, or take it again if it expired, and publish *status* (JSON) unless that is empty.

        Return False if the slot has another owner, or if others serve something else since the lease expired.
        """

    def release(self, owner: Owner) -> bool:
        """Give the lease back and drop the status; return False if another owner has the lease."""

    def lease(self, slot: str) -> Lease:
        """Return the holder of a slot's lease, and its remaining time."""

    def serving(self) -> dict[str, Served]:
        """Return what each stage with a living worker serves."""

    # frontends

    def open_replies(self, frontend: str, *, read: str = "") -> str:
        """Create the replies stream, or keep it for 60 s more; return its last id.

        Drop the replies before the id *read*. Large ones would stay in a stream to which little is added.
        """

    def read_replies(
        self, frontend: str, after: str, *, block_ms: int, skipped: Callable[[str, str], None] = ...
    ) -> tuple[str, list[Reply]]:
        """Wait up to *block_ms* for replies after the id *after*; return them and the id for the next call.

        *skipped* is called with the id of an entry that cannot be read, and the reason; the default writes a log line.
        """

    def import_history(self, uid: str, entries: Sequence[Entry], *, again: bool = False) -> bool:
        """Write the whole history of an ended request unchanged, and keep it for the retention of this log.

        Return False if there is a history of *uid*, which stays as it is.

        Raises:
            NotWhole: The new history has no seal.
            Forgotten: The request was erased, and *again* is not set.
            LogFull: Redis is at its maxmemory.
        """


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
