"""Every stream, group and key name, and the ids of a history. Nothing else builds a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOKENIZE: Final = "tokenize"
GENERATE: Final = "generate"
DETOKENIZE: Final = "detokenize"
WEB: Final = "web"
JANITOR: Final = "janitor"
"""Whose slot the frontend holds that ends what nobody else ends; no stage."""
STAGES: Final = (TOKENIZE, GENERATE, DETOKENIZE, WEB)
"""The worker roles. The first three are also the names of the consumer groups."""

SUBMITTED_ID: Final = "0-1"
TOKENIZED_ID: Final = "0-2"
SEAL: Final = "18446744073709551615-18446744073709551615"
"""The id of the terminal event: the largest there is, so Redis itself refuses whatever would come after it."""


def tokens_id(n: int) -> str:
    """Return the history id of the event that brings token number *n*."""
    return f"{n}-0"


def parse_id(entry_id: str) -> tuple[int, int]:
    """Return the two halves of a stream id; in a history (n, k), in `steps` (epoch, step)."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second)


def slot_name(stage: str, index: int) -> str:
    """Return the name of a stage's numbered place, which is also its consumer's: `generate-0`."""
    return f"{stage}-{index}"


def slot_stage(slot: str) -> str:
    """Return the stage in a slot's name."""
    return slot.rpartition("-")[0]


def slot_index(slot: str) -> int:
    """Return the number in a slot's name."""
    return int(slot.rpartition("-")[2])


def sibling_uids(uid: str, count: int) -> tuple[str, ...]:
    """Return the uids of *count* requests that were submitted together as *uid*; a single one has that itself."""
    return (uid,) if count == 1 else tuple(f"{uid}.{index}" for index in range(count))


def base_uid(uid: str) -> str:
    """Return the uid as which *uid* and its siblings were submitted; a single one has that itself."""
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
        """Stream with group `tokenize`: uid and frontend of what was accepted."""
        return self._key("submitted")

    @property
    def tokenized(self) -> str:
        """Stream with group `generate`: an entry stays pending until its request ends."""
        return self._key("tokenized")

    @property
    def control(self) -> str:
        """Stream: uids whose end the engine did not say, and flushes. A doorbell; `live` is the truth."""
        return self._key("control")

    @property
    def live(self) -> str:
        """Sorted set uid -> deadline in ms. Who is in it has not ended."""
        return self._key("live")

    @property
    def dead(self) -> str:
        """Stream: dead letters, one for each request that killed its worker again and again."""
        return self._key("dead")

    def steps(self, engine: str) -> str:
        """Stream with group `detokenize`: the steps of one engine, id `<epoch>-<step>`."""
        return self._key(f"steps:{engine}")

    def request(self, uid: str) -> str:
        """Stream: the history of one request."""
        return self._key(f"request:{uid}")

    def replies(self, frontend: str) -> str:
        """Stream: what one web process tails. A doorbell with payload; the histories are the truth."""
        return self._key(f"replies:{frontend}")

    def reader(self, uid: str) -> str:
        """Set with a time to live: the web processes in which somebody reads a request that another client sent. While
        it exists, nobody cancels the request for want of a client."""
        return self._key(f"reader:{uid}")

    def idempotency(self, key: str) -> str:
        """String with a time to live, `<uid>:<digest of the body>`: which request has an idempotency key, or which
        siblings, by their base uid. It ends in `:left` once the client that sent them has left one of them to those who
        read it."""
        return self._key(f"idempotency:{key}")

    def limit(self, key: str, minute: int) -> str:
        """String with a time to live: how many requests an API key, by its hash, had accepted in one minute of Redis'
        clock."""
        return self._key(f"limit:{key}:{minute}")

    def running(self, key: str) -> str:
        """Set with a time to live: uids that an API key, by its hash, has submitted under a limit on how many it may
        have at once. Those that are not in `live` do not count."""
        return self._key(f"running:{key}")

    def lease(self, slot: str) -> str:
        """String with a time to live: somebody lives in the slot."""
        return self._key(f"lease:{slot}")

    def owner(self, slot: str) -> str:
        """String `<epoch>:<nonce>`: who may write for the slot."""
        return self._key(f"owner:{slot}")

    def status(self, slot: str) -> str:
        """String, JSON, 10 s to live: what the slot's worker says of itself."""
        return self._key(f"status:{slot}")


LASTING: Final = ("submitted", "tokenized", "steps:*", "control", "live", "owner:*", "dead")
"""The keys that have no time to live; every other key has one."""
