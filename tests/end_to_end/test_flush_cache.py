"""A flush from a client to the engine's pages: a prompt that was found in the cache is computed again."""

from __future__ import annotations

import httpx
import pytest
from support.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

PAGE_SIZE = 64
PROMPT = "The same long words for everybody, again and again. " * 12
"""Over 600 tokens, one for each byte: more than nine full pages."""


def cached_tokens(server: Server) -> int:
    answer = server.post({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_after_a_flush_a_known_prompt_is_computed_again(plain_server: Server) -> None:
    assert cached_tokens(plain_server) < PAGE_SIZE
    found = cached_tokens(plain_server)
    assert found >= 9 * PAGE_SIZE
    for _ in range(2):
        answer = httpx.post(f"{plain_server.url}/flush_cache", timeout=30)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["engines"] == ["generate-0"] and body["flushed_pages"] >= found // PAGE_SIZE
        assert [cached_tokens(plain_server), cached_tokens(plain_server)] == [0, found]
    assert plain_server.command.log_lines("books_wrong") == []
