"""The live page and the timeline in a browser before a real server, while it is disturbed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import Browser, browsing
from support.checkpoints import make_checkpoint
from support.servers import ROOT, Server, eventually, serve
from support.streams import Stream, assert_nothing_is_left

import minisgl
from pipeline.log.redis import RedisLog
from pipeline.names import GENERATE, WEB

pytestmark = [pytest.mark.slow, pytest.mark.night]

FLAGS = ("--dtype", "float32", "--page-size", "16", "--lease", "1", "--max-seq-len", "1024")
CROWDED = ("--num-pages", "128")
"""So few pages that not all requests can run to their end at once."""
NUM_STREAMS = 20
NUM_TOKENS = 300
FEW = 6
WALK = """
const field = name => document.querySelector(`[data-field="${name}"]`)?.textContent ?? "";
const states = [];
const last = Number(document.querySelector("#token").max);
for (let n = 0; n <= last; n++) {
  states.push({ token: field("token"), id: field("id"), engine: field("engine"), step: field("step"), at: field("at"),
    text: document.querySelector(".answer").textContent });
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
}
return states;
"""
"""What the page says before the first token, and at each token, as the right arrow key moves along."""
MOMENTS = "return [...document.querySelectorAll('#moments tbody tr')].map(row => JSON.parse(row.dataset.moment));"
SHOWN = "return document.querySelector('.answer').textContent"
STANDS_STILL = """
const text = () => [...document.querySelectorAll(".answer .body")].at(-1).textContent;
for (let last = "", since = performance.now(); performance.now() - since < 500;) {
  if (text() !== last) [last, since] = [text(), performance.now()];
  await new Promise(done => requestAnimationFrame(done));
}
"""
"""Waits until an answer of the playground has not grown for half a second."""
LAST_ERROR = "return [...document.querySelectorAll('.answer .notice')].at(-1).textContent"
ANSWER = 3000
"""Tokens of an answer in the playground that is disturbed."""
NESTED = ("presentation", "templating")
"""Fields of a moment that hold fields: the command tells their defaults, too."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_positions=1024)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "browser") as browser:
        yield browser


def begun(server: Server, number: int) -> list[Stream]:
    """Return streams that have begun."""
    streams = [Stream(server, f"Tell me story {each}.", max_tokens=NUM_TOKENS) for each in range(number)]
    eventually(lambda: all(stream.num_frames > 3 for stream in streams[:FEW]), "they have begun", 120)
    return streams


def kinds_of(log: RedisLog, uid: str) -> list[str]:
    return [entry.fields["kind"] for entry in log.histories([uid])[0]]


def traced(server: Server, uid: str, *flags: str) -> dict[str, Any]:
    """Return what `minisgl trace --json` prints."""
    line = [sys.executable, str(ROOT / "minisgl.py"), "trace", uid, "--redis-url", server.redis_url, "--json", *flags]
    story: dict[str, Any] = json.loads(subprocess.run(line, check=True, capture_output=True, timeout=60).stdout)
    return story


def last_answer(browser: Browser) -> str:
    """Return the text of the last answer of the playground, as far as it has come."""
    text: str = browser.run("return [...document.querySelectorAll('.answer .body')].at(-1)?.textContent ?? ''")
    return text


def without_nested(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name not in NESTED} for each in moments]


def test_the_live_page_shows_a_takeover_while_all_streams_go_on(model: Path, tmp_path: Path, browser: Browser) -> None:
    with serve(tmp_path, "--model", str(model), *FLAGS) as server, server.log() as log:
        browser.open(f"{server.url}/pipeline")
        browser.has("[data-slot='generate-0']", "ready")
        streams = begun(server, NUM_STREAMS)
        (engine,) = server.command.workers(GENERATE)
        engine.kill()
        browser.has("[data-slot='generate-0'] .took", "epoch 2, taken over")
        browser.has(".log", "generate-0: epoch 2, taken over by process")
        assert {stream.answer[1] for stream in streams} == {"length"}
        uids = {stream.uid for stream in streams}
        browser.until(lambda: set(_finished(browser)) >= uids, "the list says that all have finished")
        browser.has("[data-slot='generate-0'] .inside", f"running\n{0}")
        assert_nothing_is_left(log)
        browser.leave()


def _finished(browser: Browser) -> list[str]:
    """Return the requests of the list that have finished, as far as rows are in view."""
    browser.run("document.querySelector('.view').style.height = '2000px'")
    found: list[str] = browser.run(
        "const rows = [...document.querySelectorAll('.view .body .request')].filter(row => !row.hidden);"
        "const ended = rows.filter(row => row.querySelector('.state').textContent.startsWith('finished'));"
        "return ended.map(row => row.querySelector('a').textContent)"
    )
    return found


def test_the_live_page_shows_the_ranks_of_an_engine_and_the_death_of_one(
    model: Path, tmp_path: Path, browser: Browser
) -> None:
    with serve(tmp_path, "--model", str(model), *FLAGS, "--tp", "2") as server, server.log() as log:
        browser.open(f"{server.url}/pipeline")
        for slot in ("generate-0", "rank-0-0", "rank-1-0"):
            browser.has(f"[data-slot='{slot}']", "ready")
        ranks = browser.run("return [...document.querySelectorAll('.stage.rank .worker')].map(one => one.dataset.slot)")
        assert ranks == ["rank-0-0", "rank-1-0"]
        streams = begun(server, FEW)
        (victim,) = (each for each in server.command.workers(GENERATE) if "--rank 1" in " ".join(each.cmdline()))
        victim.kill()
        browser.has("[data-slot='rank-1-0'] .took", "epoch 2, taken over")
        browser.has("[data-slot='generate-0'] .took", "epoch 2, taken over")
        browser.has(".log", "rank-1-0: epoch 2, taken over by process")
        assert {stream.answer[1] for stream in streams} == {"length"}
        for slot in ("generate-0", "rank-0-0", "rank-1-0"):
            browser.has(f"[data-slot='{slot}']", "ready")
        assert_nothing_is_left(log)
        browser.leave()


def test_a_preempted_and_taken_over_request_is_what_trace_says_at_every_token(
    model: Path, tmp_path: Path, browser: Browser
) -> None:
    with serve(tmp_path, "--model", str(model), *FLAGS, *CROWDED) as server, server.log() as log:
        streams = begun(server, 2 * FEW)

        def disturbed(*wanted: str) -> list[str]:
            return [stream.uid for stream in streams if stream.uid and {*wanted} <= {*kinds_of(log, stream.uid)}]

        eventually(lambda: bool(disturbed("preempted", "tokens")), "one is preempted", 120)
        (engine,) = server.command.workers(GENERATE)
        engine.kill()
        assert {stream.answer[1] for stream in streams} == {"length"}
        (uid, *_) = disturbed("preempted", "taken_over")
        story = traced(server, uid)
        history = minisgl.History.open(uid, redis_url=server.redis_url)

        browser.open(f"{server.url}/requests/{uid}")
        browser.has("h1 .badge", "finished")
        browser.until(
            lambda: browser.run("return document.querySelector('#token').max") == str(NUM_TOKENS), "all tokens"
        )
        told = without_nested(story["moments"])
        assert without_nested(browser.run(MOMENTS)) == told
        figures = browser.text(".figures")
        assert f"Preempted\n{sum(each['what'] == 'preempted' for each in told)}" in figures
        assert f"Taken over\n{sum(each['what'] == 'taken_over' for each in told)}" in figures

        browser.find("#token").send_keys(Keys.HOME)
        states = browser.wait(WALK)
        assert states[0]["token"] == f"0 of {NUM_TOKENS}" and states[-1]["text"] == story["text"]
        spans = [each for each in told if each["what"] == "tokens"]
        for n, state in enumerate(states[1:], 1):
            recorded = history.at(n)
            (who,) = {span["who"] for span in spans if span["first_n"] <= n <= span["n"]}
            assert (state["token"], state["engine"]) == (f"{n} of {NUM_TOKENS}", who)
            assert (state["text"], state["id"]) == (recorded.text, str(recorded.token_ids[-1]))
        browser.leave()


def test_a_request_is_computed_again_compared_and_copied_as_curl(model: Path, tmp_path: Path, browser: Browser) -> None:
    with serve(tmp_path, "--model", str(model), *FLAGS) as server:
        sampled = {"temperature": 0.8, "seed": 2**62 + 1, "stream": False, "max_tokens": 40}
        answer = server.post({"messages": [{"role": "user", "content": 'It\'s $HOME "here"'}], **sampled})
        uid, text = answer.headers["x-minisgl-uid"], answer.json()["choices"][0]["message"]["content"]
        made = answer.json()["usage"]["completion_tokens"]
        browser.open(f"{server.url}/requests/{uid}")
        browser.has("h1 .badge", "finished")
        browser.run("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); };")
        browser.button("Copy as curl")
        curl = browser.until(lambda: browser.run("return window.copied"), "the command")
        browser.button("Replay")
        browser.has(".comparison .notice", f"Identical: all {made} tokens are the same.")
        words = shlex.split(curl)
        assert words[0] == "curl" and words[1] == f"{server.url}/v1/chat/completions"
        body = json.loads(words[words.index("-d") + 1])
        assert body["seed"] == sampled["seed"]
        assert server.post(body).json()["choices"][0]["message"]["content"] == text
        browser.leave()


def test_the_timeline_of_a_request_that_only_the_archive_has_is_what_trace_says(
    model: Path, tmp_path: Path, browser: Browser
) -> None:
    """Redis drops it after the retention. The list finds it, too, and the timeline computes it again."""
    kept = str(tmp_path / "kept")
    with serve(tmp_path / "server", "--model", str(model), *FLAGS, "--archive", kept, "--retention", "1") as server:
        stream = Stream(server, "Tell me", max_tokens=40)
        assert stream.answer[1] == "length"
        with server.log() as log:
            eventually(lambda: not log.histories([stream.uid])[0], "Redis has dropped it")
        story = traced(server, stream.uid, "--archive", kept)
        browser.open(f"{server.url}/pipeline")
        browser.has("[data-slot='archive-0']", "ready")
        browser.type("#search", stream.uid)
        browser.button(stream.uid)
        browser.has("h1 .badge", "finished")
        browser.until(lambda: browser.run(SHOWN) == story["text"], "the whole text")
        assert without_nested(browser.run(MOMENTS)) == without_nested(story["moments"])
        browser.find("#token").send_keys(Keys.HOME)
        assert [state["token"] for state in browser.wait(WALK)] == [f"{n} of 40" for n in range(41)]
        browser.button("Replay")
        browser.has(".comparison .notice", "Identical: all 40 tokens are the same.")
        browser.leave()


@pytest.mark.parametrize("disturbed", ["Redis", "the frontend"])
def test_an_answer_in_the_playground_outlives(disturbed: str, tmp_path: Path, browser: Browser) -> None:
    """It is complete, and nothing in it is repeated. What is asked meanwhile is answered when all is back."""
    browser.allow("Failed to load resource|ERR_|net::")
    with serve(tmp_path) as server:
        browser.open(f"{server.url}/")
        browser.fill("#field-ignore_eos", "true")
        browser.fill("#field-max_completion_tokens", str(ANSWER))
        (redis,) = (each for each in server.command.processes() if each.name().endswith("-server"))
        (frontend,) = server.command.workers(WEB)
        browser.type("#question", "Tell me a story.\n")
        browser.until(lambda: len(last_answer(browser)) > 20, "it has begun")
        if disturbed == "Redis":
            redis.suspend()
            try:
                browser.wait(STANDS_STILL)
                assert browser.all(".busy")
            finally:
                redis.resume()
        else:
            frontend.kill()
            browser.has(".answer .badge", "Connecting again")
        browser.gone(".busy")
        assert browser.run(LAST_ERROR) == ""
        browser.has(".answer:last-child .meta", f"tokens {ANSWER:,}")
        uid = browser.run("return [...document.querySelectorAll('.answer a.button')].at(-1).pathname.split('/').pop()")
        assert "".join(last_answer(browser).split()) == "".join(traced(server, uid)["text"].split())

        browser.fill("#field-max_completion_tokens", "8")
        if disturbed == "Redis":
            redis.suspend()
        else:
            server.command.workers(WEB)[0].kill()
        browser.type("#question", "And now?\n")
        if disturbed == "Redis":
            try:
                browser.has(".answer:last-child .badge", "The server cannot take it yet. Trying again.")
            finally:
                redis.resume()
        browser.gone(".busy")
        assert browser.run(LAST_ERROR) == "" and len(last_answer(browser)) >= 4
        browser.leave()


def test_the_pages_outlive_redis_and_the_frontend(model: Path, tmp_path: Path, browser: Browser) -> None:
    browser.allow("Failed to load resource|ERR_|net::")
    with serve(tmp_path, "--model", str(model), *FLAGS) as server:
        browser.open(f"{server.url}/pipeline")
        browser.has("[data-slot='generate-0']", "ready")
        (redis,) = (each for each in server.command.processes() if each.name().endswith("-server"))
        redis.suspend()
        try:
            browser.has(".notice", "The log cannot be read")
        finally:
            redis.resume()
        browser.gone(".notice")
        (frontend,) = server.command.workers(WEB)
        frontend.kill()
        browser.has(".notice", "Trying again")
        browser.gone(".notice")
        browser.has("[data-slot='web-0'] .took", "epoch 2, taken over")
        answer = server.post({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
        browser.has(".requests", answer.headers["x-minisgl-uid"])

        (stream,) = [Stream(server, "Tell me", max_tokens=900)]
        eventually(lambda: bool(stream.uid), "it has begun")
        browser.open(f"{server.url}/requests/{stream.uid}")
        browser.has(".figures", "Output")
        redis.suspend()
        try:
            browser.driver.refresh()
            browser.has(".notice", "Trying again")
        finally:
            redis.resume()
        assert stream.answer[1] == "length"
        browser.has("h1 .badge", "finished")
        browser.gone("main > .notice")
        browser.leave()
