"""The live page of the pipeline in a browser: what comes, goes and waits, long lists, and texts that mean harm."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import openai
import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import PHONE, Browser, problems
from support.hostile_markup import CENSUS, HOSTILE, TRAP
from support.lived_requests import LivedRequests
from support.stand_in_stages import StandIn
from support.web_process import Server, Starts, serving

from pipeline.log.operations.usage import DAY_MS
from pipeline.log.protocol import Used
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from web.http.keys import hash_of

pytestmark = [pytest.mark.slow, pytest.mark.night]

KEY = "sk-pipeline-0123456789"
ROWS = 10_000
FRAMES = 60
FRAME_MS = 10.0
LIST = """
const { RequestList } = await import("/pages/js/pipeline/list.js");
window.list = new RequestList();
document.querySelector("#main").replaceChildren(list.node);
list._load = list._refresh = async () => {};
const uid = at => at.toString(16).padStart(12, "0") + "7000" + "8".padEnd(16, "0");
list.requests.take(Array.from({ length: rest[0] }, (_, at) => ({
  uid: uid(1795467885966 + at), state: ["running", "finished", "failed"][at % 3], reason: "",
  endpoint: "/v1/chat/completions",
  submitted_ms: 1795467885966 + at, took_ms: at, prompt_tokens: at, cached_tokens: 0, output_tokens: at,
  tokens_per_s: at / 3, engine: "generate-0", labels: { user: `user ${at % 7}` },
})));
list.show({ at_ms: 1795467985966, requests: [] });
await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
return list.requests.size;
"""
SCROLL = """
const view = document.querySelector(".view");
for (let frame = 0; frame < rest[0]; frame++) {
  const grown = list.requests.rows.slice(0, 50).map(row => ({ ...row, output_tokens: row.output_tokens + 1 }));
  if (frame % 30 === 0) list.show({ at_ms: 1795467985966 + frame * 500, requests: grown });
  view.scrollTop += 400;
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
}
return view.scrollTop;
"""
FAILS = """
const { RequestList } = await import("/pages/js/pipeline/list.js");
const list = new RequestList(), nextFrame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
let asked = 0;
window.fetch = () => { asked++; return Promise.reject(new TypeError("Failed to fetch")); };
document.querySelector("#main").replaceChildren(list.node);
list._next = "01";
list._draw();
for (let frame = 0; frame < 8; frame++) await nextFrame();
return asked;
"""
"""Shows a list with older pages before a server that is away; returns how often it asked for them."""
TAKEOVERS = """
const { Pipeline } = await import("/pages/js/pipeline/model.js");
const slot = { slot: "generate-0", phase: "ready", detail: "", progress: 0 };
return rest[0].map((story) => {
  const pipeline = new Pipeline();
  for (const [at_ms, epoch, pid, lease_ms] of story)
    pipeline.hear({ at_ms, num_dead: 0, engines: [], slots: [{ ...slot, epoch, pid, lease_ms }] });
  return pipeline.happenings.map(({ says }) => says);
});
"""
"""Returns what the page tells of each story, a list of pictures of a slot: time, epoch, process and lease."""
PHASES = """
const { Pipeline } = await import("/pages/js/pipeline/model.js");
const pipeline = new Pipeline();
const slot = { slot: "tokenize-0", epoch: 1, pid: 7, detail: "", progress: 0, lease_ms: 900 };
for (const [at, phase] of ["loading", "ready", "held", "away"].entries())
  pipeline.hear({ at_ms: 500 * at, num_dead: 0, engines: [], slots: [{ ...slot, phase }] });
return pipeline.happenings.map(({ says }) => says);
"""
"""Returns what the page tells of a slot that goes through these phases, the last one first."""
COSTS = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/pipeline"


def opened(browser: Browser, server: Server) -> None:
    browser.open(url(server))
    browser.has("[data-slot='generate-0']", "ready")


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    """A browser whose page shows that the engine is ready."""
    opened(browser, server)
    return browser


def test_the_page_shows_workers_streams_and_requests_and_finds_them(
    browser: Browser, server: Server, lasting: StandIn
) -> None:
    with server.client() as client:
        for words in ("say: one", "say: two", "break"):
            body: Any = {
                "model": "default",
                "messages": [{"role": "user", "content": words}],
                "user": f"user of {words}",
            }
            try:
                client.with_options(max_retries=0).chat.completions.create(**body)
            except openai.APIStatusError:
                assert words == "break"
    opened(browser, server)
    uids = [uid for uid, event in lasting.seen if event.endpoint != "probe"]
    browser.until(lambda: all(uid in browser.text(".requests") for uid in uids), "all requests are listed")
    for slot in ("web-0", "tokenize-0", "detokenize-0"):
        browser.has(f"[data-slot='{slot}']", "ready")
    browser.has("[data-stream='submitted']", "empty")
    browser.fill("#state", "failed,unreadable")
    browser.until(lambda: _listed(browser) == [uids[2]], "the failed one alone")
    browser.fill("#state", "all")
    browser.type("#search", "SAY: TWO")
    browser.until(lambda: _listed(browser) == [uids[1]], "the one with this label")
    browser.button(uids[1])
    browser.has("h1 .uid", uids[1])


def _listed(browser: Browser) -> list[str]:
    found: list[str] = browser.run(
        "const rows = [...document.querySelectorAll('.view .body .request')].filter(row => !row.hidden);"
        "return rows.map(row => row.querySelector('a').textContent)"
    )
    return found


def test_a_takeover_is_told_once_with_both_processes_whenever_the_new_one_is_seen(page: Browser) -> None:
    before, named = [0, 1, 7, 900], "epoch 2, taken over by process 8, before it was 7"
    told = {
        "at once": ([before, [500, 2, 8, 900], [900, 2, 8, 900]], [named]),
        "while it waits for the slot": ([before, [200, 1, 8, 0], [500, 2, 8, 900]], [named]),
        "before it says who it is": ([before, [500, 2, 0, 900], [900, 2, 8, 900], [1300, 2, 8, 900]], [named]),
        "never": ([before, [500, 2, 0, 900], [900, 2, 0, 900], [2500, 2, 0, 900]], ["epoch 2, taken over"]),
        "the same one": ([before, [500, 2, 7, 900]], ["epoch 2, taken over"]),
    }
    found = page.wait(TAKEOVERS, [story for story, _ in told.values()])
    assert dict(zip(told, found, strict=True)) == {name: lines for name, (_, lines) in told.items()}


def test_phases_of_a_slot_are_told_in_plain_words(page: Browser) -> None:
    assert page.wait(PHASES) == ["no worker", "active", "ready"]


def test_a_dead_letter_is_shown_and_sent_again(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    uid = lived.dead()
    server = starts()
    opened(browser, server)
    browser.has(".dead", uid)
    browser.button("Requeue", ".dead")
    browser.has(".toast", "Sent again as")
    browser.gone(".dead")


def test_the_keyboard_alone_is_enough(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    uid, other = lived.dead(), lived.submitted()
    server = starts()
    opened(browser, server)
    browser.has(".dead", uid)
    _go_to(browser, "Requeue")
    browser.press(Keys.ENTER)
    browser.has(".toast", "Sent again as")
    _go_to(browser, "State")
    browser.press("f")  # finished, failed: the first one that begins so
    _go_to(browser, "Search")
    browser.press(other)
    _go_to(browser, "State", back=True)
    browser.press(Keys.HOME)
    browser.until(lambda: _listed(browser) == [other], "it is found")
    _go_to(browser, "Requests, the newest first")
    _go_to(browser, other)
    browser.press(Keys.ENTER)
    browser.has("h1 .uid", other)


def _go_to(browser: Browser, name: str, *, back: bool = False) -> None:
    """Press Tab until what has this name has the focus. All on the way has a name, too."""
    for _ in range(100):
        focused = browser.focused()
        if focused.accessible_name == name:
            return
        assert focused.accessible_name or focused.tag_name == "body", focused.get_attribute("outerHTML")
        browser.press(*((Keys.SHIFT, Keys.TAB, Keys.NULL) if back else (Keys.TAB,)))
    pytest.fail(f"no Tab leads to {name!r}")


def test_a_page_of_the_list_that_cannot_be_read_is_asked_for_again_by_the_user_alone(
    browser: Browser, server: Server, lasting: StandIn
) -> None:
    browser.open(url(server))
    assert browser.wait(FAILS) == 1
    browser.has(".requests [role=status]", "The server does not answer.")
    browser.find(".requests button")


def test_a_plain_key_sees_its_own_requests_and_no_dead_letters(
    browser: Browser, redis_url: str, lived: LivedRequests, request: pytest.FixtureRequest
) -> None:
    browser.allow("status of 40[13]")
    uid = lived.dead()
    request.getfixturevalue("lasting")
    with serving(redis_url, "--api-key", KEY, "--admin-key", f"{KEY}-admin") as server:
        browser.open(url(server))
        browser.type("#api-key", KEY)
        browser.button("Use this key")
        browser.has(".dead", "The admin key shows them")
        assert uid not in browser.text("main")
        browser.button("API key")
        browser.type("#api-key", f"{KEY}-admin")
        browser.button("Use this key")
        browser.has(".dead", uid)
        browser.leave()


def test_what_was_used_today_is_shown_by_owner_and_without_usage_there_is_no_table(
    browser: Browser, redis_url: str, lasting: StandIn
) -> None:
    browser.allow("status of 40[13]")
    today = int(time.time() * 1000) // DAY_MS
    with (
        serving(redis_url, "--api-key", KEY, "--admin-key", f"{KEY}-admin") as server,
        closing(RedisLog(redis_url, Names())) as log,
    ):
        for model in ("m", "n"):
            log.recount("team-a", today, {model: Used(1000, 1, 20_000, 30, 500)})
        log.recount(hash_of(f"{KEY}-2"), today, {"m": Used(requests=7, output_tokens=9)})
        browser.open(url(server))
        browser.type("#api-key", KEY)
        browser.button("Use this key")
        browser.has("[data-slot='generate-0']", "ready")
        assert not browser.all(".usage")
        browser.button("API key")
        browser.type("#api-key", f"{KEY}-admin")
        browser.button("Use this key")
        browser.has(".usage", "team-a 2,000 2 40,000 60 1,000")
        browser.has(".usage", f"{hash_of(f'{KEY}-2')[:8]} 7 0 0 0 9")
        browser.leave()


def test_nothing_that_a_request_says_is_executed(browser: Browser, lived: LivedRequests, starts: Starts) -> None:
    browser.before_each_page(TRAP)
    for text in HOSTILE[:40]:
        lived.dead(prompt=text, error=text)
    for text in HOSTILE:
        lived.submitted(prompt=text, labels={text: text})
    server = starts()
    opened(browser, server)
    browser.has(".dead", HOSTILE[39].split("\n")[0].strip())
    browser.type("#search", "alert(1)")
    browser.until(lambda: "of" in browser.text(".requests .row"), "the search is applied")
    assert browser.run("return trapped") == [] and browser.run(CENSUS) == []


def test_a_list_of_ten_thousand_scrolls_within_a_frame(page: Browser, lasting: StandIn) -> None:
    page.driver.execute_cdp_cmd("Performance.enable", {})

    def cost_ms() -> float:
        metrics = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return 1000 * sum(float(one["value"]) for one in metrics if one["name"] in COSTS)

    assert page.wait(LIST, ROWS) == ROWS
    costs = []
    for _ in range(5):
        before = cost_ms()
        page.wait(SCROLL, FRAMES)
        costs.append((cost_ms() - before) / FRAMES)
    assert page.run("return document.querySelectorAll('.view .body .request').length") < 60
    assert min(costs) < FRAME_MS, costs


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, lived: LivedRequests, starts: Starts, theme: str) -> None:
    browser.theme(theme)
    uid = lived.dead()
    server = starts()
    opened(browser, server)
    browser.has(".dead", uid)
    assert problems(browser) == []
    browser.resize(*PHONE)
    assert problems(browser) == []
