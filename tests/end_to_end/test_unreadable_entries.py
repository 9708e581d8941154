"""Entries that cannot be read, on a whole server: it buries them, and its clients do not notice."""

from __future__ import annotations

import httpx
import pytest
from support.measured import Scrape
from support.redis_servers import command
from support.servers import Server, eventually
from support.streams import begun

from pipeline.names import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

GARBAGE = ((b"\xff", b"\xfe"), (b"frontend", b"web-0"), (b"kind", b"step"))


def test_garbage_in_every_stream_is_buried_and_no_worker_ends(
    plain_server: Server, undisturbed: dict[str, tuple[str, str]]
) -> None:
    workers = [process.pid for stage in STAGES for process in plain_server.command.workers(stage)]
    streams = begun(plain_server)
    with plain_server.log() as log:
        names, before = log.names, len(log.dead_letters(99))
        for key in (names.submitted, names.tokenized, names.steps("generate-0"), names.replies("web-0")):
            for words in GARBAGE:
                command(plain_server.redis_url, "XADD", key, "*", *words)
        assert {stream.prompt: stream.answer for stream in streams}.items() <= undisturbed.items()
        eventually(lambda: len(log.dead_letters(99)) == before + 9, "all are buried")
        for letter in log.dead_letters(9):
            assert letter.fields["stream"] and log.drop_dead(letter.id)
    assert [process.pid for stage in STAGES for process in plain_server.command.workers(stage)] == workers
    assert len(plain_server.command.log_lines("entry_buried")) == 9

    def counted() -> dict[str, float]:
        scrape = Scrape(httpx.get(f"{plain_server.url}/metrics", timeout=30).text)
        streams = ("submitted", "tokenized", "steps", "replies")
        return {stream: scrape.total("unreadable_entries_total", stream=stream) for stream in streams}

    eventually(lambda: set(counted().values()) == {3}, "each is counted once")
