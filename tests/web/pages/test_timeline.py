"""The timeline of a request in a browser: requests of every kind, and texts that mean harm."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import PHONE, Browser, problems
from support.hostile_markup import CENSUS, HOSTILE, TRAP
from support.lived_requests import LivedRequests
from support.stand_in_stages import SAY, StandIn
from support.web_process import Server, Starts

from pipeline.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    Failed,
    Preempted,
    SamplingParams,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
)
from web.wire.frames import ClientEvent
from web.wire.story import StoryFrames

NUM_TOKENS = 4000
DRAWN_MS = 500.0
DRAW = """
const { Timeline } = await import("/pages/js/timeline/model.js");
const { Chart } = await import("/pages/js/timeline/chart.js");
const steps = new Map();
for (let n = 1; n <= rest[0].length - 3; n++)
  steps.set(`generate-0/1-${n}`, { id: `1-${n}`, engine: "generate-0", ms: 13 * n, made_ms: 13 * n, forward_ms: 8,
    companions: [] });
const begunMs = performance.now();
const timeline = new Timeline("x");
for (const text of rest[0]) timeline.take("0-1", JSON.parse(text));
const chart = new Chart({ onPick() {} });
document.querySelector("#main").replaceChildren(chart.node);
chart.show(timeline, 0, steps);
await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
const drawn = chart.node.querySelector("canvas").getContext("2d").getImageData(200, 45, 1, 1).data[3];
return [performance.now() - begunMs, drawn, timeline.tokens.length];
"""
"""Draws a timeline from the frames of its stream; returns how long that took, whether its line has colour, and how many
tokens there are."""

AWAY = """
const real = fetch;
let left = 1;
window.fetch = (...given) => left-- > 0 ? Promise.reject(new TypeError("Failed to fetch")) : real(...given);
"""
"""The first request of the page meets no server."""
SHUT_DOWN = """
const real = fetch;
let left = 1;
const said = { error: { message: "The server was shut down.", code: "shutting_down" } };
window.fetch = (path, ...given) => String(path).includes("format=story") && left-- > 0
  ? Promise.resolve(new Response(`data: ${JSON.stringify(said)}\\n\\ndata: [DONE]\\n\\n`)) : real(path, ...given);
"""
"""The first stream of the page is one of a server that shuts down."""

pytestmark = [pytest.mark.slow, pytest.mark.night]

WORDS = ("one ", "two ", "three ", "four")


def url(server: Server, uid: str) -> str:
    return f"http://127.0.0.1:{server.port}/requests/{uid}"


def field(browser: Browser, name: str) -> str:
    """Return what the page says of the token: a field, or "" if it has no such field."""
    found: str = browser.run("return document.querySelector(`[data-field='${arguments[0]}']`)?.textContent ?? ''", name)
    return found


def shown(browser: Browser) -> str:
    """Return the text up to the token."""
    text: str = browser.run("return document.querySelector('.answer').textContent")
    return text


def submitted(server: Server, prompt: str, **fields: object) -> str:
    """Ask, and wait until the answer has ended; return the uid."""
    with server.client() as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            **fields,
        )
    uid: str = answer.id.removeprefix("chatcmpl-")
    return uid


def test_a_request_can_be_walked_through_by_keys_alone(browser: Browser, server: Server, lasting: StandIn) -> None:
    uid = submitted(server, f"{SAY}{'x' * 24}{'y' * 24}end")
    browser.open(url(server, uid))
    browser.has("h1 .badge", "finished")
    browser.until(lambda: field(browser, "token") == "3 of 3", "the cursor is at the last token")
    assert shown(browser) == "x" * 24 + "y" * 24 + "end"
    browser.press(Keys.ARROW_LEFT)
    assert (field(browser, "token"), field(browser, "text"), shown(browser)) == (
        "2 of 3",
        "y" * 24,
        "x" * 24 + "y" * 24,
    )
    browser.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert field(browser, "token") == "0 of 3" and shown(browser) == ""
    while browser.focused().get_attribute("id") != "token":
        browser.press(Keys.TAB)
        assert browser.focused().accessible_name or browser.focused().tag_name == "body"
    browser.press(Keys.ARROW_RIGHT)
    assert field(browser, "token") == "1 of 3"
    browser.press(Keys.END)
    assert field(browser, "token") == "3 of 3"
    browser.press(Keys.ARROW_LEFT)
    browser.until(lambda: browser.run("return location.hash") == "#token=2", "the address names the token")
    browser.driver.refresh()
    browser.until(lambda: field(browser, "token") == "2 of 3", "the page opens at this token")


def test_a_request_that_runs_grows_and_can_be_cancelled(browser: Browser, server: Server, lasting: StandIn) -> None:
    with server.client() as client:
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "endless"}], stream=True
        )
        uid = next(iter(stream)).id.removeprefix("chatcmpl-")
        browser.open(url(server, uid))
        browser.has(".answer", "5 ")
        browser.has("h1 .badge", "running")
        browser.button("Cancel")
        browser.has("h1 .badge", "cancelled")
        assert isinstance(browser.until(lambda: lasting.stages.ends(uid), "it has ended"), Cancelled)
        browser.gone(".actions .danger")
        stream.close()


def test_a_preemption_a_takeover_and_an_end_are_moments(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    uid = lived.running(prompt="Tell me")
    lived.tokens(uid, *WORDS[:2])
    lived.mark(uid, 2, Preempted(engine="generate-0", epoch=1, step=3))
    lived.mark(uid, 2, Admitted(engine="generate-0", epoch=1, step=5, fingerprint="w1"))
    lived.tokens(uid, WORDS[2], after=2)
    lived.mark(uid, 3, TakenOver(engine="generate-0", epoch=2, numerics="n/2"))
    lived.ended(uid, Failed(status=500, code="poisonous", message="It <b>killed</b> its engine."))
    server = starts()
    browser.open(url(server, uid))
    browser.has(".notice.bad", "500 poisonous: It <b>killed</b> its engine.")
    rows = browser.run(
        "return [...document.querySelectorAll('#moments tbody tr')].map(row => row.children[1].textContent)"
    )
    assert rows == [
        "submitted",
        "tokenized",
        "admitted",
        "tokens",
        "preempted",
        "admitted",
        "tokens",
        "taken over",
        "failed",
    ]
    assert "={" not in browser.text("#moments") and "endpoint" not in browser.text("#moments")
    figures = browser.text(".figures")
    assert "Preempted\n1" in figures and "Taken over\n1" in figures
    browser.open(url(server, uid) + "#token=3")
    browser.until(lambda: field(browser, "token") == "3 of 3", "the token of the address")
    assert "preempted" in field(browser, "before") and shown(browser) == "".join(WORDS[:3])
    label = browser.run("return document.querySelector('.chart canvas').ariaLabel")
    assert "1 preemption, 1 takeover." in label


def test_a_request_that_failed_without_a_token_says_so(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    uid = lived.submitted()
    lived.ended(uid, Failed(status=400, code="invalid_grammar", message="It is wrong."))
    browser.open(url(starts(), uid))
    browser.has(".notice.bad", "It is wrong.")
    browser.until(lambda: field(browser, "token") == "no tokens", "the figure of the token")
    assert field(browser, "prompt") == "not counted"
    assert "Longest pause\n-" in browser.text(".figures")


def test_a_dead_letter_is_offered_to_be_sent_again(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    uid = lived.dead()
    server = starts()
    browser.open(url(server, uid))
    browser.has(".actions .badge", "dead letter of generate")
    browser.button("Requeue")
    browser.until(lambda: uid not in browser.driver.current_url, "the page of the new request")
    browser.has("h1", "Request")
    again = browser.driver.current_url.rpartition("/")[2]
    browser.has("h1 .uid", again)


def test_the_first_difference_of_a_replay_is_marked(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    """The stand-in stages answer with other tokens than the recorded ones."""
    uid = lived.running()
    lived.tokens(uid, *WORDS)
    lived.finished(uid, len(WORDS))
    browser.open(url(starts(), uid))
    browser.has("h1 .badge", "finished")
    browser.button("Replay")
    browser.has(".comparison .notice", "The first difference is at token 1: “one␣”, now “Hel”.")
    marked = browser.run("return [...document.querySelectorAll('mark.differs')].map(mark => mark.textContent)")
    assert marked == [WORDS[0], "Hel"]
    browser.button(browser.text(".comparison .stack:last-child a"))
    browser.has(".notice", "This request is a replay of another one.")
    browser.button("Compare them")
    browser.has(".comparison .notice", "The first difference is at token 1: “one␣”, now “Hel”.")


def test_the_page_waits_for_a_server_that_does_not_answer(browser: Browser, server: Server, lasting: StandIn) -> None:
    uid = submitted(server, f"{SAY}end")
    browser.before_each_page(AWAY)
    browser.open(url(server, uid))
    browser.has(".notice.warn", "The server does not answer.")
    browser.has("h1 .badge", "finished")


def test_a_request_that_runs_is_followed_after_the_server_was_shut_down(
    browser: Browser, server: Server, lasting: StandIn
) -> None:
    uid = submitted(server, f"{SAY}{'x' * 24}end")
    browser.before_each_page(SHUT_DOWN)
    browser.open(url(server, uid))
    browser.has(".notice.warn", "The server was shut down. Trying again.")
    browser.has("h1 .badge", "finished")
    browser.gone("main > .notice")
    assert shown(browser) == "x" * 24 + "end"


def test_siblings_are_listed_and_lead_to_each_other(browser: Browser, server: Server, lasting: StandIn) -> None:
    uid = submitted(server, "say: two", n=2)
    browser.open(url(server, uid))
    browser.has("h1", "Siblings")
    browser.button(f"{uid}.1")
    browser.has("h1 .uid", f"{uid}.1")
    browser.has("nav .chips", ".0")
    browser.button(".0", "main nav")
    browser.has("h1 .uid", f"{uid}.0")


@pytest.mark.parametrize(
    "name",
    ["01a20a39bd8e714c81743df92a28d17f", "nobody", "%3Cimg%20src=x%20onerror=alert(1)%3E", "%ff", "a/b", "a%2Fb"],
)
def test_an_unknown_uid_says_what_is_known(browser: Browser, server: Server, lasting: StandIn, name: str) -> None:
    browser.allow("status of 404")
    browser.before_each_page(TRAP)
    browser.open(url(server, name))
    browser.find(".notice.bad")
    said = browser.text("main")
    assert "request" in browser.text(".notice.bad").lower()
    assert ("was made on" in said) == name.startswith("01a2")
    assert browser.run("return trapped") == [] and browser.run(CENSUS) == []


def test_nothing_that_a_request_says_is_executed(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    browser.before_each_page(TRAP)
    requests: list[tuple[str, tuple[str, ...]]] = []
    for first in range(0, len(HOSTILE), 20):
        texts = HOSTILE[first : first + 20]
        uid = lived.running(prompt=texts[0], labels={text: text for text in texts})
        lived.tokens(uid, *texts)
        lived.ended(uid, Failed(status=500, code="x", message=texts[0]))
        requests.append((uid, texts))
    server = starts()
    for uid, texts in requests:
        browser.open(url(server, uid))
        browser.has("h1 .badge", "failed")
        browser.until(lambda: field(browser, "token") == f"{len(texts)} of {len(texts)}", "all tokens")  # noqa: B023
        assert shown(browser) == "".join(texts)
        browser.click("summary")
        for _ in texts:
            browser.press(Keys.ARROW_LEFT)
        assert browser.run("return trapped") == [] and browser.run(CENSUS) == []


def frames_of(num_tokens: int) -> list[str]:
    """Return the frames of a request that gets a token every 13 ms, and seldom one later."""
    asked = Submitted(endpoint="/v1/completions", frontend="web-0", prompt="x", sampling=SamplingParams(), ms=1000)
    frames = StoryFrames()
    told: list[tuple[str, int, AnyEvent]] = [
        ("0-1", 0, asked),
        ("0-2", 0, Tokenized(token_ids=(1, 2), fingerprint="f", by="tokenize-0", ms=1009)),
        ("0-3", 0, Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w", ms=1020)),
    ]
    for n in range(1, num_tokens + 1):
        ms = 1020 + n * 13 + (0 if n % 97 else 200)
        told.append((f"{n}-0", n, TokensProduced(tokens=(n,), text=" word", step=f"1-{n}", ms=ms, age_ms=1)))
    return [frames.of(ClientEvent(*each)).decode().split("data: ")[1] for each in told]


def test_a_timeline_of_4000_tokens_is_drawn_at_once(browser: Browser, server: Server, lasting: StandIn) -> None:
    frames = frames_of(NUM_TOKENS)
    browser.open(url(server, submitted(server, "say: x")))
    browser.has("h1 .badge", "finished")
    drawn = [browser.wait(DRAW, frames) for _ in range(5)]
    assert all(colour and count == NUM_TOKENS for _, colour, count in drawn)
    assert min(took_ms for took_ms, _, _ in drawn) < DRAWN_MS, drawn


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, lived: LivedRequests, starts: Starts, theme: str) -> None:
    browser.allow("status of 404")
    browser.theme(theme)
    uid = lived.dead()
    server = starts()
    browser.open(url(server, uid))
    browser.has(".actions .badge", "dead letter")
    browser.click("summary")
    assert problems(browser) == []
    browser.resize(*PHONE)
    assert problems(browser) == []
    browser.open(url(server, "nobody"))
    browser.find(".notice.bad")
    assert problems(browser) == []
