"""Requests that come into Redis from elsewhere, where they meet what only a server does."""

from __future__ import annotations

import pytest
from support.log_contract import LONG_MS, NAMES
from support.redis_servers import command

from pipeline.errors import LogFull
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID

WHOLE = (Entry(SUBMITTED_ID, {"ms": "1", "kind": "submitted"}), Entry(SEAL, {"ms": "2", "kind": "finished"}))


def test_an_import_makes_one_key_with_a_time_to_live(log: RedisLog) -> None:
    log.import_history("a", WHOLE)
    assert command(log.url, "KEYS", "*") == [NAMES.request("a").encode()]
    assert LONG_MS - 10_000 < command(log.url, "PTTL", NAMES.request("a")) <= LONG_MS


def test_at_maxmemory_an_import_is_refused_and_leaves_nothing(log: RedisLog) -> None:
    command(log.url, "CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(LogFull):
        log.import_history("a", WHOLE)
    assert log.histories(["a"]) == [[]]


def test_a_history_of_very_many_entries_comes_in(log: RedisLog) -> None:
    many = tuple(Entry(f"{n}-0", {"kind": "tokens", "tokens": str(n)}) for n in range(1, 20_000))
    assert log.import_history("a", (*many, WHOLE[-1]))
    assert command(log.url, "XLEN", NAMES.request("a")) == 20_000
