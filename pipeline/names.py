"""The names of all streams, groups and keys, and the ids in a history. No other module builds a key."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.errors import NewerVersion, UndecodableEvent

TOKENIZE: Final = "tokenize"
GENERATE: Final = "generate"
DETOKENIZE: Final = "detokenize"
WEB: Final = "web"
WAITING: Final = "waiting"
"""Not a slot. The consumer of `tokenized` for requests that wait in the queues of their owners; commits/lib.lua has it,
too."""
JANITOR: Final = "janitor"
"""Not a stage. A frontend that holds this slot ends the requests that no other process ends."""
STAGES: Final = (TOKENIZE, GENERATE, DETOKENIZE, WEB)
"""The worker roles. The first three also name the consumer groups."""
ARCHIVE: Final = "archive"
"""A worker role that a server need not have, and its consumer group."""
SERVING_STAGES: Final = (TOKENIZE, GENERATE, DETOKENIZE)
"""The stages whose workers have a model or its tokenizer."""

PROBE: Final = "probe"
"""Endpoint of a web process' test requests, which must pass every stage. /ready names it while the first one is
running."""

VERSION: Final = 2
"""Newest version of entries and events that this code reads."""

SUBMITTED_ID: Final = "0-1"
TOKENIZED_ID: Final = "0-2"
SEAL: Final = "18446744073709551615-18446744073709551615"
"""Id of the terminal event. It is the largest possible one, so Redis refuses to append after it."""


def tokens_id(n: int) -> str:
    """Return the history id of the event with token number *n*."""
    return f"{n}-0"


def parse_id(entry_id: str) -> tuple[int, int]:
    """Return the two halves of a stream id; in a history (n, k), in `steps` (epoch, step)."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second)


def slot_name(stage: str, index: int) -> str:
    """Return the name of a slot of a stage, which is also its consumer's name: `generate-0`."""
    return f"{stage}-{index}"


def rank_stage(rank: int) -> str:
    """Return the worker role of a rank, which also names its consumer group: `rank-1`. Its slots are `rank-1-0` .."""
    return f"rank-{rank}"


def rank_of(stage: str) -> int | None:
    """Return the rank with the worker role *stage*; None: it is not the role of a rank."""
    first, _, rank = stage.partition("-")
    return int(rank) if first == "rank" and rank.isdecimal() else None


def slot_stage(slot: str) -> str:
    """Return the stage in a slot's name."""
    return slot.rpartition("-")[0]


def slot_index(slot: str) -> int:
    """Return the number in a slot's name."""
    return int(slot.rpartition("-")[2])


def newer_consumer(stage: str, version: int) -> str:
    """Return the consumer for entries that only workers of *version* can read: `tokenize-v2`. It is not a slot."""
    return f"{stage}-v{version}"


def is_too_new(consumer: str) -> bool:
    """Return whether *consumer* holds entries of a version that this code does not read."""
    _, found, version = consumer.rpartition("-v")
    return bool(found) and version.isdecimal() and int(version) > VERSION


def new_uid() -> str:
    """Return 32 hex digits that sort by time: a UUID version 7 (RFC 9562, 5.7)."""
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"


def sibling_uids(uid: str, count: int) -> tuple[str, ...]:
    """Return the uids of *count* requests that were submitted together as *uid*. A single request is *uid* itself."""
    return (uid,) if count == 1 else tuple(f"{uid}.{index}" for index in range(count))


def base_uid(uid: str) -> str:
    """Return the uid under which *uid* and its siblings were submitted. For a single request it is *uid*."""
    return uid.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Names:
    """The key names of one namespace and shard. The braces keep them all in one Redis Cluster slot."""

    namespace: str = "minisgl"
    shard: int = 0

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}:{self.shard}}}:{name}"

    @property
    def submitted(self) -> str:
        """Stream with group `tokenize`: uid and frontend of accepted requests."""
        return self._key("submitted")

    @property
    def tokenized(self) -> str:
        """Stream with group `generate`: an entry stays pending until its request ends."""
        return self._key("tokenized")

    @property
    def waiting(self) -> str:
        """Hash: whether all that wait for an engine are of one owner; if not, how many of each, and its share. See
        commits/take.lua."""
        return self._key("waiting")

    def queue(self, owner: str) -> str:
        """Sorted set, while requests of the owner wait: their entries of `tokenized`, by priority and arrival."""
        return self._key(f"queue:{owner}")

    @property
    def full(self) -> str:
        """Set with a time to live: engines that have no room. Others take the requests that prefer them."""
        return self._key("full")

    def account(self, uid: str) -> str:
        """String with a time to live: owner and model of a request, until its end is counted for them."""
        return self._key(f"account:{uid}")

    @property
    def control(self) -> str:
        """Stream: uids that ended without their engine, and flushes. It may lose entries; `live` is the truth."""
        return self._key("control")

    @property
    def live(self) -> str:
        """Sorted set uid -> deadline in ms, of the requests that have not ended."""
        return self._key("live")

    @property
    def dead(self) -> str:
        """Stream: dead letters, one for each request that killed its worker several times."""
        return self._key("dead")

    @property
    def ended(self) -> str:
        """Stream with group `archive`, only where the namespace has an archive: uids of requests that have ended."""
        return self._key("ended")

    @property
    def stored(self) -> str:
        """Sorted set uid -> time of its submit in ms, of stored responses, which are kept for longer than others."""
        return self._key("stored")

    @property
    def stored_bytes(self) -> str:
        """Hash uid -> about how many bytes a stored response takes, and `all`: the sum."""
        return self._key("stored_bytes")

    @property
    def archive(self) -> str:
        """Hash, as long as `ended`: `id` of the archive, how many requests were `unarchived` when they expired, and
        whether usage was `recounted` from it."""
        return self._key("archive")

    def copy(self, who: str) -> str:
        """Stream with a time to live: the entries to keep of a stream from which *who* purges others."""
        return self._key(f"copy:{who}")

    @property
    def copies(self) -> str:
        """Hash with a time to live, by key of a stream: how often a copy replaced it, or an entry was dropped."""
        return self._key("copies")

    def steps(self, engine: str) -> str:
        """Stream with group `detokenize`: the steps of one engine, id `<epoch>-<step>`."""
        return self._key(f"steps:{engine}")

    def journal(self, engine: str) -> str:
        """Stream with a time to live, id `<epoch>-<step>`: the last steps of one engine, for `minisgl replay`."""
        return self._key(f"journal:{engine}")

    def request(self, uid: str) -> str:
        """Stream: the history of one request."""
        return self._key(f"request:{uid}")

    def shared(self, uid: str) -> str:
        """Hash with a time to live, of the base uid of siblings: their histories' shared texts, by digest. `left`:
        number of siblings that have not ended; `gone`: when the histories of the others expire."""
        return self._key(f"shared:{uid}")

    def text(self, digest: str) -> str:
        """String with a time to live: a piece of a text that stored responses share, after the digest of the piece
        before it."""
        return self._key(f"text:{digest}")

    def replies(self, frontend: str) -> str:
        """Stream that one web process tails. It may lose entries; the histories are the truth."""
        return self._key(f"replies:{frontend}")

    def reader(self, uid: str) -> str:
        """Set with a time to live: web processes with a client that reads a request of another client. While it exists,
        the request is not cancelled for lack of a client."""
        return self._key(f"reader:{uid}")

    def idempotency(self, key: str) -> str:
        """String with a time to live, `<uid>:<digest of the body>`: the request that has an idempotency key (the base
        uid of siblings). It ends in `:left` once their sender has left while other clients read one of them."""
        return self._key(f"idempotency:{key}")

    def limit(self, owner: str) -> str:
        """String with a time to live: size of an owner's submits within the retention, as `<begin_ms>:<bytes>` for each
        sixteenth of it."""
        return self._key(f"limit:{owner}:bytes")

    def balance(self, owner: str) -> str:
        """Hash, until they are full: an owner's token buckets at `ms`, by limit: `<how much fits in> <how much is>`."""
        return self._key(f"balance:{owner}")

    @property
    def users(self) -> str:
        """Sorted set owner -> last day, for 40 days: who has usage."""
        return self._key("users")

    def usage(self, owner: str, day: int) -> str:
        """Hash `<what> <model>` -> figure, such as `output_tokens qwen3`: an owner's requests that ended on one day
        (UTC, counted from 1970), for 40 days. See `Used`."""
        return self._key(f"usage:{owner}:{day}")

    def running(self, key: str) -> str:
        """Set with a time to live: uids of an API key with a limit on concurrent requests. Uids that are not in `live`
        do not count."""
        return self._key(f"running:{key}")

    def ranks(self, group: str) -> str:
        """Stream with a time to live, a group for each rank but 0: the newest formation of the ranks of one engine."""
        return self._key(f"ranks:{group}")

    def lease(self, slot: str) -> str:
        """String with a time to live: the holder of the slot."""
        return self._key(f"lease:{slot}")

    def owner(self, slot: str) -> str:
        """String `<epoch>:<nonce>`: the owner, who may write for the slot."""
        return self._key(f"owner:{slot}")

    def serving(self, stage: str) -> str:
        """String, JSON, with a time to live: what the workers of a stage serve, while one of them lives."""
        return self._key(f"serving:{stage}")

    @property
    def last_engine(self) -> str:
        """String, JSON: what the engines offered that were there last, for frontends with --engines-on-demand."""
        return self._key("last_engine")

    def status(self, slot: str) -> str:
        """String, JSON, with a time to live of 10 s: the status that the slot's worker publishes."""
        return self._key(f"status:{slot}")


LASTING: Final = (
    *("submitted", "tokenized", "steps:*", "control", "live", "owner:*", "dead", "ended", "archive"),
    *("stored", "stored_bytes", "waiting", "queue:*", "last_engine"),
)
"""The keys without a time to live; every other key has one. `queue:*` are there while requests wait."""


UNREADABLE: Final = "unreadable"
"""Field with the reason, which readers of the log add to an entry that is not text, or whose key has another type."""
LONGEST_VERSION: Final = 6
"""Largest number of digits of a version."""


def check_readable(fields: Mapping[str, str]) -> None:
    """Return if an entry with these fields is text, of a version that this code reads.

    Raises:
        NewerVersion: The entry is of a newer version.
        UndecodableEvent: The entry is not text, or its version is not possible.
    """
    if UNREADABLE in fields:
        raise UndecodableEvent(fields[UNREADABLE])
    if "v" not in fields:
        return
    said = fields["v"]
    version = int(said) if said.isdecimal() and len(said) <= LONGEST_VERSION else 0
    if version > VERSION:
        raise NewerVersion(version)
    if version < 1:
        raise UndecodableEvent(f"its version is {said[:20]!r}, expected a whole number from 1 on")
