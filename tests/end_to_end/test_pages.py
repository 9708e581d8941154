"""The pages of a real server in a real browser: a conversation with a model, and the request that it was."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.browser import Browser, browsing
from support.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

SAID = "A **bold** word, <b>no tag</b>."
"""What the model is made to say, whatever its weights are."""


def test_a_conversation_in_the_playground_is_requests_of_the_server(llama3_server: Server, tmp_path: Path) -> None:
    with browsing(tmp_path) as browser:
        browser.open(f"{llama3_server.url}/")
        browser.fill("#field-structured_outputs", f'{{"choice": ["{SAID}"]}}')
        for turn in (1, 2):
            browser.fill("#field-logprobs", "true")
            browser.type("#question", f"Question {turn}\n")
            browser.until(lambda turn=turn: len(answers(browser)) == turn, f"answer {turn}")  # type: ignore[misc]
        assert answers(browser) == ["A bold word, <b>no tag</b>."] * 2
        assert len(browser.all(".answer strong")) == 2 and not browser.all(".answer .body b")
        browser.button("Tokens")
        tokens = browser.run("return [...document.querySelectorAll('.token')].map(token => token.textContent).join('')")
        assert tokens.startswith(SAID)

        link = browser.run("return [...document.querySelectorAll('.answer a.button')].at(-1).pathname")
        story = httpx.get(f"{llama3_server.url}/v1{link}").json()
        assert story["text"] == SAID
        browser.has(".answer:last-child .meta", f"tokens {story['completion_tokens']}")
        browser.leave()


def answers(browser: Browser) -> list[str]:
    """Return the texts of the answers that have ended."""
    found: list[str] = browser.run(
        "return [...document.querySelectorAll('.answer[aria-busy=\"false\"] .body')].map(body => body.innerText.trim())"
    )
    return found
