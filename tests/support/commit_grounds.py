"""Where the stories of test_commit_machine.py take place: a log on a server, or on a server that restarts; and what a
commit must do there, as MemoryLog does it.

A ground shows all that its log holds, and does to it what happens without a commit: keys that run out, streams that are
trimmed, scripts that are forgotten. The clock of the oracle stands still: nothing expires unless it is told to. An id
that a clock makes is learnt from the log beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis
from support.memory_log.log import MemoryLog
from support.memory_log.streams import Id, id_text
from support.redis_servers import running_server

from pipeline.log.protocol import Entry, Owner, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.log.shared import whole_history
from pipeline.names import WAITING, Names, parse_id

NAMES: Final = Names("story")
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=600, max_queued=20)
NUM_SLOTS: Final = 2
"""Of each stage."""


OBSERVE: Final = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, content, pending = redis.call('TYPE', key).ok, {}, {}
  if kind == 'stream' then
    content = redis.call('XRANGE', key, '-', '+')
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      pending[#pending + 1] = redis.call('XPENDING', key, group[2], '-', '+', 10000)
    end
  elseif kind == 'zset' then
    content = redis.call('ZRANGE', key, 0, -1)
  elseif kind == 'set' then
    content = redis.call('SMEMBERS', key)
  elseif kind == 'hash' then
    content = redis.call('HGETALL', key)
  else
    content = redis.call('GET', key)
  end
  found[#found + 1] = { key, kind, content, pending, redis.call('PTTL', key) }
end
return found
"""


class RedisGround:
    """RedisLog on a running server, what can be seen of it through another connection, and what happens to it without a
    commit."""

    def __init__(self, url: str) -> None:
        self._connect(url)
        self.num_used = 0
        """Number of requests in the usage of all owners."""
        self.lasting: list[str] = []
        """Keys that had no time to live when they were observed."""
        self._read: dict[str, tuple[object, list[Entry]]] = {}
        """Of each stream, as it was read last: a long one is not taken apart again when nothing has changed."""

    def close(self) -> None:
        self._redis.close()
        self.log.close()

    def begin(self) -> None:
        """Empty the log."""
        self._redis.execute_command("FLUSHALL")

    def observe(self) -> State:
        streams: dict[str, list[Entry]] = {}
        pending: dict[str, list[tuple[str, str, int]]] = {}
        sets: dict[str, frozenset[str]] = {}
        strings: dict[str, str] = {}
        waiting: dict[str, set[str]] = {}
        queued = set[str]()
        self.lasting, self.num_used = [], 0
        seen = self._redis.execute_command("EVAL", OBSERVE, 0)
        shared = [_entry(b"", content).fields for _, kind, content, *_ in seen if kind == b"hash"]
        texts = {digest: text for fields in shared for digest, text in fields.items()}
        for raw_key, kind, content, groups, ttl_ms in seen:
            key = raw_key.decode()
            if ttl_ms < 0:
                self.lasting.append(key)
            if kind == b"stream":
                if key not in self._read or self._read[key][0] != content:
                    entries = [_entry(*raw) for raw in content]
                    self._read[key] = (content, whole_history(entries, texts) or entries)
                streams[key] = self._read[key][1]
                if groups:
                    (items,) = groups
                    held = [(item[0].decode(), item[1].decode(), item[3]) for item in items]
                    pending[key] = [item for item in held if item[1] != WAITING]
                    waiting[key] = {item[0] for item in held if item[1] == WAITING}
            elif key == NAMES.users or key.startswith(NAMES.account("")):
                continue
            elif kind == b"hash" and key.startswith(NAMES.usage("", 0).removesuffix("0")):
                figures = zip(content[::2], content[1::2], strict=True)
                self.num_used += sum(int(figure) for what, figure in figures if what.startswith(b"requests "))
            elif key.startswith(NAMES.queue("")):
                queued |= {_queued_id(member.decode()) for member in content}
            elif kind in (b"zset", b"set"):
                sets[key] = frozenset(member.decode() for member in content)
            elif kind == b"string":
                strings[key] = content.decode()
        assert queued >= waiting.get(NAMES.tokenized, set()), "whoever waits is in a queue"
        return State(streams, pending, sets, strings)

    def expire(self, key: str) -> None:
        """Lose a key, as when its time is over."""
        self._redis.execute_command("DEL", key)

    def trim(self, key: str, keep: int) -> None:
        self._redis.execute_command("XTRIM", key, "MAXLEN", keep)

    def forget_scripts(self) -> None:
        self._redis.execute_command("SCRIPT", "FLUSH")

    def restart(self) -> None:
        """Kill the server and start it again on what it has written."""
        raise AssertionError("other tests use this server")

    def _connect(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, protocol=2)
        self._redis.response_callbacks.clear()
        self.log: RedisLog = RedisLog(url, NAMES, LIMITS)


class DurableGround(RedisGround):
    """RedisLog on a server of its own that writes down what it holds, each commit before its answer.

    With appendfsync everysec, as the embedded one has it, a commit is written only when the sync that is under way is
    done: Redis answers before, and being killed then it loses what it has answered.
    """

    def __init__(self, binary: Path, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        super().__init__(self._start())

    def close(self) -> None:
        super().close()
        self._server.process.kill()
        self._stack.close()

    def restart(self) -> None:
        self.close()
        self._connect(self._start())

    def _start(self) -> str:
        self._stack = contextlib.ExitStack()
        options = ("--appendonly", "yes", "--appendfsync", "no")
        self._server = self._stack.enter_context(running_server(self._binary, self._folder, *options))
        return self._server.url


def _entry(entry_id: bytes, parts: Sequence[bytes]) -> Entry:
    texts = [part.decode() for part in parts]
    return Entry(entry_id.decode(), dict(zip(texts[::2], texts[1::2], strict=True)))


def _queued_id(member: str) -> str:
    """Return the id of an entry that waits in a queue."""
    ms, _, seq = member.partition(" ")[0].partition("-")
    return f"{ms}-{int(seq)}"


OF_THE_CLOCK: Final = ("ms", "age_ms", "deadline_ms")
"""Fields that a commit adds by Redis' clock."""
OF_THE_COPY: Final = ("history", "history_cut")
"""Fields of a dead letter that are compared with the history itself."""


@dataclass(frozen=True, slots=True)
class State:
    """All that a log holds, by key. Times to live are no part of it."""

    streams: Mapping[str, Sequence[Entry]]
    """With what siblings share. A stream that has not changed may be the same object as before."""
    pending: Mapping[str, Sequence[tuple[str, str, int]]]
    """Of each group, by stream: id, consumer, how often it was worked on."""
    sets: Mapping[str, frozenset[str]]
    """Of `live` the members alone: the deadlines are of the clock."""
    strings: Mapping[str, str]


def who_lives(sets: Mapping[str, frozenset[str]], names: Names) -> dict[str, frozenset[str]]:
    """Leave out of the sets of what runs under a quota who has ended: when that one is removed is not said."""
    live = sets.get(names.live, frozenset())
    found = {key: members & live if key.startswith(names.running("")) else members for key, members in sets.items()}
    return {key: members for key, members in found.items() if members}


def without_clock(entry: Entry) -> Entry:
    fields = {name: text for name, text in entry.fields.items() if name not in (*OF_THE_CLOCK, *OF_THE_COPY)}
    return Entry(entry.id, fields)


class CommitOracle:
    """A MemoryLog that stands beside another log, and what happens to it without a commit."""

    def __init__(self, names: Names, limits: RequestLimits) -> None:
        self.names = names
        self.log = MemoryLog(names, limits, clock_ms=lambda: 0)

    def learn_ids(self, streams: Mapping[str, Sequence[Entry]]) -> None:
        """Take over the ids that the clock of the other log has made since the last time."""
        for key, stream in self.log._streams.by_key.items():
            told = streams.get(key, ())
            if len(told) != len(stream.entries):
                continue  # the comparison of what both hold will say so
            learnt: dict[Id, Id] = {}
            for own, entry in zip(reversed(stream.entries), reversed(told), strict=True):
                if own == parse_id(entry.id):
                    break
                learnt[own] = parse_id(entry.id)
            if learnt:
                stream.entries = {learnt.get(own, own): fields for own, fields in stream.entries.items()}
                stream.last = next(reversed(stream.entries))

    def state(self) -> State:
        """Return all that the log holds, without what a clock makes."""
        log, names = self.log, self.names
        pending = {
            key: [(id_text(item), group.pending[item], group.retries.get(item, 1)) for item in sorted(group.pending)]
            for key, stream in log._streams.by_key.items()
            for group in stream.groups.values()
        }
        sets = {names.reader(uid): frozenset(readers) for uid, readers in log._readers.items()}
        sets |= {names.running(key): frozenset(uids) for key, uids in log._quotas.running.items()}
        sets |= {names.live: frozenset(log._live)}
        strings = {names.owner(slot): str(owner) for slot, owner in log._leases.owners.items()}
        strings |= {names.lease(slot): str(owner) for slot, (owner, _) in log._leases.held.items()}
        strings |= {names.status(slot): text for slot, (text, _) in log._leases.said.items()}
        strings |= {
            names.idempotency(key): f"{uid}:{digest}" + (":left" if uid in log._left else "")
            for key, (uid, digest, _) in log._once.items()
        }
        streams = {
            key: [without_clock(entry) for entry in stream.read(stream.entries)]
            for key, stream in log._streams.by_key.items()
        }
        return State(streams, pending, who_lives(sets, names), strings)

    def has_history(self, uid: str) -> bool:
        return self.names.request(uid) in self.log._streams.by_key

    def holder_of(self, key: str) -> str:
        """Return the uid of the request, or of the siblings, with an idempotency key; empty where none has it."""
        return self.log._once.get(key, ("",))[0]

    def owns(self, owner: Owner) -> bool:
        """Return whether *owner* may write for its slot."""
        return self.log._leases.owners.get(owner.slot) == owner

    def expire(self, key: str) -> None:
        """Lose a key, as when its time is over."""
        self.log._streams.drop(key)
        for slot in [slot for slot in self.log._leases.held if self.names.lease(slot) == key]:
            del self.log._leases.held[slot]

    def trim(self, key: str, keep: int) -> None:
        """Lose all but the last *keep* entries of a stream."""
        stream = self.log._streams.by_key.get(key)
        while stream is not None and len(stream.entries) > keep:
            del stream.entries[next(iter(stream.entries))]
