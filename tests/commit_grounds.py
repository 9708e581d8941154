"""Where the stories of test_commit_machine.py take place: a log on a server, or on a server that restarts.

A ground shows all that its log holds, and does to it what happens without a commit: keys that run out, streams that are
trimmed, scripts that are forgotten.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import redis
from commit_oracle import State
from redis_servers import until

from pipeline.log.protocol import Entry, RequestLimits, StreamLog
from pipeline.log.redis import RedisLog
from pipeline.names import Names

NAMES: Final = Names("story")
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=600, max_queued=20)
NUM_SLOTS: Final = 2
"""Of each stage."""


class Ground(Protocol):
    """A log, what can be seen of it from outside, and what can happen to it without a commit."""

    @property
    def log(self) -> StreamLog: ...

    def begin(self) -> None:
        """Empty the log."""

    def observe(self) -> State: ...

    def expire(self, key: str) -> None:
        """Lose a key, as when its time is over."""

    def trim(self, key: str, keep: int) -> None: ...

    def forget_scripts(self) -> None: ...

    def restart(self) -> None:
        """Kill the server and start it again on what it has written."""

    def lasting_keys(self) -> list[str]:
        """Return the keys that have no time to live."""


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
  else
    content = redis.call('GET', key)
  end
  found[#found + 1] = { key, kind, content, pending, redis.call('PTTL', key) }
end
return found
"""


class RedisGround:
    """RedisLog on a running server, looked at through a connection of its own."""

    def __init__(self, url: str) -> None:
        self._connect(url)
        self._lasting: list[str] = []
        self._read: dict[str, tuple[object, list[Entry]]] = {}
        """Of each stream, as it was read last: a long one is not taken apart again when nothing has changed."""

    def close(self) -> None:
        self._redis.close()
        self.log.close()

    def begin(self) -> None:
        self._redis.execute_command("FLUSHALL")

    def observe(self) -> State:
        streams: dict[str, list[Entry]] = {}
        pending: dict[str, list[tuple[str, str, int]]] = {}
        sets: dict[str, frozenset[str]] = {}
        strings: dict[str, str] = {}
        self._lasting = []
        for raw_key, kind, content, groups, ttl_ms in self._redis.execute_command("EVAL", OBSERVE, 0):
            key = raw_key.decode()
            if ttl_ms < 0:
                self._lasting.append(key)
            if kind == b"stream":
                if key not in self._read or self._read[key][0] != content:
                    self._read[key] = (content, [_entry(*raw) for raw in content])
                streams[key] = self._read[key][1]
                if groups:
                    (items,) = groups
                    pending[key] = [(item[0].decode(), item[1].decode(), item[3]) for item in items]
            elif kind in (b"zset", b"set"):
                sets[key] = frozenset(member.decode() for member in content)
            else:
                strings[key] = content.decode()
        return State(streams, pending, sets, strings)

    def expire(self, key: str) -> None:
        self._redis.execute_command("DEL", key)

    def trim(self, key: str, keep: int) -> None:
        self._redis.execute_command("XTRIM", key, "MAXLEN", keep)

    def forget_scripts(self) -> None:
        self._redis.execute_command("SCRIPT", "FLUSH")

    def restart(self) -> None:
        raise AssertionError("other tests use this server")

    def lasting_keys(self) -> list[str]:
        return self._lasting

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
        self._start()
        super().__init__(self._url)

    def close(self) -> None:
        super().close()
        self._kill()

    def restart(self) -> None:
        super().close()
        self._kill()
        self._start()
        self._connect(self._url)

    @property
    def _url(self) -> str:
        return f"unix://{self._folder / 'redis.sock'}"

    def _start(self) -> None:
        where = f"--port 0 --unixsocket {self._folder / 'redis.sock'} --dir {self._folder} --save"
        options = [*where.split(), "", "--appendonly", "yes", "--appendfsync", "no"]
        self._output = (self._folder / "redis.log").open("ab")
        self._process = subprocess.Popen(
            [self._binary, *options], stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )
        until(self._answers)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "redis.log").read_text()
        try:
            with redis.Redis.from_url(self._url, protocol=2) as client:
                return bool(client.execute_command("PING"))
        except redis.ConnectionError:  # also while it loads
            return False


def _entry(entry_id: bytes, parts: Sequence[bytes]) -> Entry:
    texts = [part.decode() for part in parts]
    return Entry(entry_id.decode(), dict(zip(texts[::2], texts[1::2], strict=True)))
