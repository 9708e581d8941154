"""Answers that mean harm, said by a real engine: a checkpoint is forced to, in pieces and as tokens that it has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx
import pytest
from support.browser import Browser, browsing
from support.checkpoints import make_checkpoint
from support.hostile_markup import CENSUS, HOSTILE, TRAP
from support.servers import Server, serve
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.night]

TURNS: Final = 10
"""Questions of one conversation."""
TOKENS: Final = 20
"""Texts that are tokens of one answer."""
PAGE: Final = f"""
const census = () => {{ {CENSUS} }};
const nextFrame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
const ask = async fields => {{
  for (const [name, value] of Object.entries({{ ...fields, question: "Say it." }})) {{
    const field = document.getElementById(name === "question" ? name : `field-${{name}}`);
    field.value = value;
    field.dispatchEvent(new Event("input", {{ bubbles: true }}));
  }}
  document.querySelector("#question").dispatchEvent(new KeyboardEvent("keydown", {{ key: "Enter", bubbles: true }}));
  const answer = [...document.querySelectorAll(".message.answer")].at(-1);
  while (answer.classList.contains("busy")) await nextFrame();
  const uid = answer.querySelector(".actions a")?.pathname.split("/").pop();
  return [answer, uid, answer.querySelector(".notice").textContent];
}};
"""
"""Functions of the scripts below, in the playground: *ask* sends a question, and waits until it is answered."""
ASK: Final = f"""{PAGE}
const found = [];
for (const choice of rest[0]) {{
  const [, uid, error] = await ask({{ structured_outputs: JSON.stringify({{ choice: [choice] }}) }});
  found.push([uid, error, census()]);
}}
return found;
"""
"""Has each text said; returns for each the uid, the error, and what a census of the page finds."""
POINT: Final = f"""{PAGE}
const [answer, uid, error] = await ask(rest[0]);
[...answer.querySelectorAll("button")].find(each => each.textContent === "Tokens").click();
const told = [...answer.querySelectorAll(".token")].map(token => {{
  token.dispatchEvent(new PointerEvent("pointerover", {{ bubbles: true }}));
  return [document.querySelector(".tip strong").textContent, ...census()];
}});
return [uid, error, told];
"""
"""Asks once, and points at each token; returns the uid, the error, and for each token its text and a census."""
WALK: Final = f"""
const census = () => {{ {CENSUS} }};
const field = name => document.querySelector(`[data-field="${{name}}"]`)?.textContent ?? "";
const seen = [];
for (let n = Number(document.querySelector("#token").max); n > 0; n--) {{
  seen.push([field("text"), field("logprob"), census()]);
  document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key: "ArrowLeft", bubbles: true }}));
}}
return seen;
"""
"""What the timeline says of each token, the last one first: its text, its log-probability, and the census."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every hostile text in its vocabulary, as one token."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_positions=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in HOSTILE])
    tokenizer.save_pretrained(folder)
    resized = AutoModelForCausalLM.from_pretrained(folder)
    resized.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    resized.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ids(model: Path) -> Mapping[str, int]:
    """The token of each text."""
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    return {text: vocabulary[text] for text in HOSTILE}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "browser") as browser:
        browser.before_each_page(TRAP)
        yield browser
        assert browser.run("return trapped") == []
        browser.leave()


def opened(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    browser.until(lambda: browser.run("return !!document.querySelector('#field-logprobs')"), "the form is there")


def test_no_answer_of_a_checkpoint_is_executed_in_the_playground(server: Server, browser: Browser) -> None:
    """It comes in pieces, of which Markdown is made again and again."""
    opened(browser, server)
    for first in range(0, len(HOSTILE), TURNS):
        texts = HOSTILE[first : first + TURNS]
        browser.button("New conversation")
        for text, (uid, error, census) in zip(texts, browser.wait(ASK, texts), strict=True):
            assert (error, census) == ("", []), text
            assert httpx.get(f"{server.url}/v1/requests/{uid}").json()["text"] == text
        assert browser.run("return trapped") == [], texts


def test_no_token_of_a_checkpoint_is_executed_under_the_pointer_or_on_its_timeline(
    server: Server, ids: Mapping[str, int], browser: Browser
) -> None:
    for first in range(0, len(HOSTILE), TOKENS):
        texts = HOSTILE[first : first + TOKENS]
        fields = {
            "allowed_token_ids": ", ".join(str(ids[text]) for text in texts),
            "temperature": "0",
            "frequency_penalty": "2",  # so that each of them comes soon
            "max_completion_tokens": str(8 * TOKENS),
            "logprobs": "true",
            "top_logprobs": "5",
        }
        opened(browser, server)
        browser.button("New conversation")
        uid, error, told = browser.wait(POINT, fields)
        assert error == "" and [census for _, *census in told if census] == []
        assert {*texts} == {json.loads(text) for text, *_ in told}
        assert browser.run("return trapped") == []

        browser.open(f"{server.url}/requests/{uid}")
        browser.has("h1 .badge", "finished")
        browser.click("summary")
        browser.until(lambda: browser.run("return document.querySelector('#token').max") == str(8 * TOKENS), "all")
        seen = browser.wait(WALK)
        assert {visible(text) for text in texts} == {text for text, _, _ in seen}
        assert all("; most probable: " in scores and not census for _, scores, census in seen)
        assert browser.run("return trapped") == []


def visible(text: str) -> str:
    """Return a text as the timeline writes it."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
