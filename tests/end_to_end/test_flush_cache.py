"""A flush from a client to the engine's pages: a prompt that was found in the cache is computed again."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from servers import Server, serve

pytestmark = pytest.mark.slow

PROMPT = "The same long words for everybody, again and again. " * 12
"""Over 600 tokens of the demo model, which has one for each byte: nine full pages of 64 and more."""


def cached_tokens(server: Server) -> int:
    answer = server.post({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_after_a_flush_a_known_prompt_is_computed_again(tmp_path: Path) -> None:
    with serve(tmp_path, "--page-size", "64") as server:
        assert cached_tokens(server) == 0
        found = cached_tokens(server)
        assert found >= 9 * 64
        for send in (httpx.post, httpx.get):
            answer = send(f"{server.url}/flush_cache", timeout=30)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert body["engines"] == ["generate-0"] and body["flushed_pages"] >= found // 64
            assert [cached_tokens(server), cached_tokens(server)] == [0, found]
        assert server.command.log_lines("books_wrong") == []
