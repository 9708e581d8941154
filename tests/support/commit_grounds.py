"""Where the stories of test_commit_machine.py take place: a log on a server, or on a server that restarts.

A ground shows all that its log holds, and does to it what happens without a commit: keys that run out, streams that are
trimmed, scripts that are forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import redis
from support.commit_oracle import State
from support.redis_servers import running_server

from pipeline.log.protocol import Entry, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.log.shared import whole_history
from pipeline.names import Names

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
        self.lasting = []
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
                    pending[key] = [(item[0].decode(), item[1].decode(), item[3]) for item in items]
            elif kind in (b"zset", b"set"):
                sets[key] = frozenset(member.decode() for member in content)
            elif kind == b"string":
                strings[key] = content.decode()
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
