"""The playground in a browser: what a user does with it, by pointer and by keyboard, and texts that mean harm."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys
from support import stand_in_stages
from support.browser import PHONE, Browser, problems
from support.hostile_markup import CENSUS, HOSTILE, TRAP
from support.stand_in_stages import SAY, StandIn
from support.web_process import Server, serving


class Relay:
    """Passes connections to *to*, a port of this machine, on."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open = True
        self._ends: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Cut all connections. New ones are cut, too, until `open`."""
        with self._lock:
            self._open = False
            ends = set(self._ends)
        for end in ends:
            _cut(end)

    def open(self) -> None:
        """Pass new connections on again."""
        with self._lock:
            self._open = True

    def end(self) -> None:
        """Stop for good."""
        self.close()
        _cut(self._listener)
        self._accepting.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                server = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    self._ends |= {client, server}
                    is_open = self._open
                if not is_open:
                    _cut(client)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while read := source.recv(65536):
                sink.sendall(read)
        _cut(source)
        _cut(sink)
        with self._lock:
            self._ends.discard(source)
        source.close()


def _cut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cutting(to: int) -> Iterator[Relay]:
    """Run a relay to a port of this machine until the block ends."""
    relay = Relay(to)
    try:
        yield relay
    finally:
        relay.end()


pytestmark = [pytest.mark.slow, pytest.mark.night]

REACHED = (
    "Skip to the content", "Playground", "Pipeline", "New conversation", "Export", "Side by side", "Settings", "Edit",
    "Copy", "Regenerate", "Timeline", "Question", "Send", "System text", "temperature", "Reset",
)  # fmt: skip
"""Names of what the Tab key leads to."""
KEY = "sk-playground-0123456789"
RICH = (
    "# Title\n\nSome **bold** text, `code`, and [a link](https://example.org/).\n\n- one\n- two\n\n"
    "```python\nprint(1 < 2)\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quoted"
)

NOTES_DELETE = """
const real = fetch;
window.fetch = async (path, options) => {
  const response = await real(path, options);
  if (options?.method === "DELETE") response.clone().text().then(() =>
    requestAnimationFrame(() => requestAnimationFrame(() => { window.answered = response.status; })));
  return response;
};
"""
"""Keeps the status of a DELETE as soon as the page has drawn what it makes of it."""


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def opened(browser: Browser, server: Server) -> None:
    """Open the page, and wait until it has read what the server takes."""
    browser.open(f"{url(server)}/")
    browser.until(lambda: browser.run("return !!document.querySelector('#field-temperature')"), "the form is there")


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    """A browser whose page has read what the server takes."""
    opened(browser, server)
    return browser


def put(browser: Browser, selector: str, text: str) -> None:
    """Make *text* the value of a field as a paste does; typing has no line breaks, and few signs."""
    browser.find(selector)
    browser.run(
        "const [selector, text] = arguments; const field = document.querySelector(selector);"
        "field.value = text; field.dispatchEvent(new Event('input', {bubbles: true}));",
        selector,
        text,
    )


def sent(browser: Browser, text: str) -> None:
    """Send a question."""
    put(browser, "#question", text)
    browser.find("#question").send_keys(Keys.ENTER)


def asked(browser: Browser, text: str) -> None:
    """Ask, and wait until every column has its answer."""
    sent(browser, text)
    ended(browser)


def ended(browser: Browser) -> None:
    browser.until(lambda: not browser.all(".busy") and bool(browser.all(".message.answer")), "all answers have ended")


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(
        "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector
    )
    return found


def uids(browser: Browser) -> list[str]:
    """Return the requests whose timelines the answers link to."""
    links: list[str] = browser.run(
        "return [...document.querySelectorAll('.answer a.button')].map(link => link.pathname)"
    )
    return [link.removeprefix("/requests/") for link in links]


def test_a_conversation_of_three_turns_tells_its_figures_and_survives_a_reload(page: Browser, lasting: StandIn) -> None:
    for text in ("say: first", f"{SAY}{RICH}", "third"):
        asked(page, text)
    submitted = [event for _, event in lasting.requests()]
    assert [len(event.messages) for event in submitted] == [1, 3, 5]
    assert submitted[2].messages[1] == {"role": "assistant", "content": "first"}
    assert submitted[2].messages[3]["content"] == RICH
    assert uids(page) == [uid for uid, _ in lasting.requests()]
    for words in ("first token", "prompt 5", "cached 2", "tokens 3"):
        page.has(".answer:last-child .meta", words)

    assert texts(page, ".answer h3") == ["Title"] and texts(page, ".answer li") == ["one", "two"]
    assert texts(page, ".answer pre code") == ["print(1 < 2)"] and texts(page, ".answer td") == ["1", "2"]
    assert page.run("return document.querySelector('.answer .markdown a').href") == "https://example.org/"
    before = texts(page, ".said, .body .markdown")

    page.driver.refresh()
    page.has("#conversations li", "say: first")
    assert texts(page, ".said, .body .markdown") == before


GROWN = """
const [text, step] = rest, { markdown } = await import("/pages/js/markdown.js"), grown = markdown(), whole = markdown();
for (let end = 0; end < text.length; end += step) grown.show(text.slice(0, end), false);
grown.show(text, false);
const early = grown.element.textContent;
grown.show(text);
whole.show(text);
return [early, grown.element.outerHTML, whole.element.outerHTML, whole.element.textContent];
"""


def test_markdown_that_grows_looks_like_markdown_that_is_there_at_once(page: Browser) -> None:
    text = "\n\n".join((RICH, "1. one\n\n   more of one\n2. two", "a\r\nb", RICH, "[link][to]", "end", "```\nopen"))
    for step in (1, 7, 100):
        early, grown, whole, shown = page.wait(GROWN, text, step)
        assert early == shown and grown == whole and whole.count("<table") == 2
        _, grown, whole, _ = page.wait(GROWN, f"{text}\n```\n\n[to]: https://example.org/to", step)
        assert grown == whole and "https://example.org/to" in whole


def test_escape_stops_a_stream_and_the_server_ends_its_request(page: Browser, lasting: StandIn) -> None:
    sent(page, "endless")
    page.has(".answer .markdown", "5 ")
    page.button("Show the request", ".composer")
    page.button("JSON")
    assert json.loads(page.text(".dialog pre"))["messages"] == [{"role": "user", "content": "endless"}]
    page.button("Close")
    page.press(Keys.ESCAPE)
    page.has(".answer .badge", "stopped")
    ((uid, _),) = lasting.requests()
    page.until(lambda: lasting.stages.ends(uid) is not None, "the request has ended")
    said = texts(page, ".answer .body .markdown")
    asked(page, "say: and then")
    assert lasting.requests()[-1][1].messages[1]["content"].strip() == said[0].strip()


def test_a_stop_asks_for_no_key_where_the_conversation_needs_none(
    browser: Browser, redis_url: str, lasting: StandIn
) -> None:
    browser.allow("status of 401")
    browser.before_each_page(NOTES_DELETE)
    with serving(redis_url, "--admin-key", KEY) as server:
        opened(browser, server)
        sent(browser, "endless")
        browser.has(".answer .markdown", "5 ")
        browser.press(Keys.ESCAPE)
        browser.has(".answer .badge", "stopped")
        browser.until(lambda: browser.run("return window.answered"), "the server has answered the DELETE")
        assert browser.run("return answered") == 401 and not browser.all("dialog")
        ((uid, _),) = lasting.requests()
        browser.until(lambda: lasting.stages.ends(uid) is not None, "the request has ended with its reader")
        browser.leave()


def test_an_answer_can_be_had_again_and_a_question_changed(page: Browser, lasting: StandIn) -> None:
    asked(page, "say: one")
    page.button("Regenerate")
    page.has(".versions", "2 / 2")
    ended(page)
    assert len(lasting.requests()) == 2
    page.button("Previous answer")
    page.has(".versions", "1 / 2")
    asked(page, "say: two")

    page.run("document.querySelector('.message.user .actions button').click()")
    put(page, ".editor textarea", "say: other")
    page.button("Send again")
    page.until(lambda: texts(page, ".body .markdown") == ["other"], "the new answer")
    ended(page)
    assert texts(page, ".said") == ["say: other"]
    assert [event.messages[-1]["content"] for _, event in lasting.requests()] == ["say: one"] * 2 + [
        "say: two",
        "say: other",
    ]


def test_two_columns_ask_side_by_side_with_settings_of_their_own(page: Browser, lasting: StandIn) -> None:
    asked(page, "say: before")
    page.button("Side by side")
    page.button("B", "#settings")
    put(page, "#field-temperature", "0.5")
    put(page, "#system", "Be short.")
    asked(page, "say: both")
    assert len(page.all(".side")) == 2 and texts(page, ".body .markdown") == ["before", "both"] * 2
    one, other = [event for _, event in lasting.requests()[1:]]
    if one.sampling.temperature == 0.5:
        one, other = other, one
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user"]
    assert other.messages[0] == {"role": "system", "content": "Be short."} and other.sampling.temperature == 0.5
    page.button("Side by side")
    page.button("Close column B")
    page.until(lambda: len(page.all(".side")) == 1, "one column")


def test_the_form_has_every_field_and_sends_what_it_says(page: Browser, server: Server, lasting: StandIn) -> None:
    schema = httpx.get(f"{url(server)}/openapi.json").json()["components"]["schemas"]["ChatRequest"]
    fields = set(schema["properties"]) - {"messages", "model", "prompt", "stream_options"}
    labels = page.run(
        "return [...document.querySelectorAll('#settings .fields label')].map(label => label.textContent)"
    )
    assert set(labels) == fields and len(labels) == len(fields)
    hints = page.run(
        "return Object.fromEntries([...document.querySelectorAll('#settings .fields .field')]"
        ".map(field => [field.querySelector('label').textContent, field.querySelector('.hint').textContent]))"
    )
    for name in fields:
        assert " ".join(schema["properties"][name]["description"].replace("`", "").split()) in " ".join(
            hints[name].split()
        )
    for name in ("tools", "response_format"):
        example = page.run("return document.getElementById(`field-${arguments[0]}`).placeholder", name)
        assert example and [json.loads(example)] == schema["properties"][name]["examples"]

    page.button(f"All other fields ({len(fields) - 10})")
    values = {
        "temperature": "0.25", "top_k": "7", "seed": "42", "stop": "a b\n\\n\\n", "logit_bias": '{"7": -1.5}',
        "bad_words": "one\ntwo", "stop_token_ids": "3, 4", "user": "ann", "metadata": '{"a": "b"}', "n": "2",
    }  # fmt: skip
    for name, value in values.items():
        put(page, f"#field-{name}", value)
    page.fill("#field-ignore_eos", "true")
    asked(page, "say: x")
    event = lasting.requests()[0][1]
    sampling = event.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.ignore_eos) == (0.25, 7, 42, True)
    assert set(sampling.stop) == {"a b", "\n\n"} and dict(sampling.logit_bias) == {7: -1.5}
    assert len(lasting.requests()) == 2 and texts(page, ".versions .number") == ["1 / 2"]

    put(page, "#field-top_p", "7")
    page.has("#field-top_p-wrong", "7 is outside of the range")
    sent(page, "say: y")
    page.has(".composer .notice", "Settings, top_p: 7 is outside of the range")
    assert len(lasting.requests()) == 2
    put(page, "#field-search", "penal")
    shown = [label.text for label in page.all("#settings .fields label")]
    assert shown == [name for name in sorted(fields) if "penal" in name]


def test_the_request_is_shown_as_curl_python_and_json(page: Browser, server: Server, lasting: StandIn) -> None:
    asked(page, 'say: it\'s "quoted" \\ and $HOME')
    page.button("Show the request", ".answer")
    curl = page.text(".dialog pre")
    page.button("JSON")
    body = json.loads(page.text(".dialog pre"))
    assert body["messages"] == [{"role": "user", "content": 'say: it\'s "quoted" \\ and $HOME'}]
    page.button("Python")
    program = page.text(".dialog pre")
    page.button("Close")
    assert compile(program, "shown", "exec") and "OpenAI(" in program
    assert curl.startswith("curl -N ") and f"{url(server)}/v1/chat/completions" in curl


def test_an_error_is_a_sentence_and_the_question_stays(browser: Browser, server: Server) -> None:
    browser.allow("status of 400")
    opened(browser, server)
    asked(browser, "refuse")
    assert texts(browser, ".answer .notice") == ["Too long."] and texts(browser, ".said") == ["refuse"]
    asked(browser, "break")
    assert texts(browser, ".answer .notice") == ["Too long.", "It broke."]
    browser.button("Try again")
    browser.has(".versions", "2 / 2")
    ended(browser)


def test_a_key_is_asked_for_once_and_stays_in_the_tab(browser: Browser, redis_url: str, lasting: StandIn) -> None:
    browser.allow("status of 401")
    with serving(redis_url, "--api-key", KEY) as server:
        browser.open(f"{url(server)}/")
        browser.has("dialog", "Enter an API key of this server. It stays in this tab.")
        browser.type("#api-key", "sk-wrong-0123456789")
        browser.button("Use this key")
        browser.has("dialog", "The API key is not one of this server")
        browser.button("Cancel")
        browser.has(".composer .notice", "The API key is not one of this server")
        browser.button("API key")
        browser.type("#api-key", KEY)
        browser.button("Use this key")
        browser.has(".welcome", "org/demo")
        browser.gone(".composer .notice")
        asked(browser, "say: hello")
        assert texts(browser, ".body .markdown") == ["hello"]
        assert KEY not in browser.run("return JSON.stringify(localStorage)")
        browser.driver.refresh()
        browser.has(".message .markdown", "hello")
        assert not browser.all("dialog")
        browser.leave()


def test_a_stream_whose_connection_breaks_goes_on_where_it_stopped(
    browser: Browser, redis_url: str, lasting: StandIn
) -> None:
    browser.allow("ERR_")
    with serving(redis_url, "--disconnect-grace", "60") as server, cutting(server.port) as relay:
        browser.open(f"http://127.0.0.1:{relay.port}/")
        browser.find("#settings")
        sent(browser, "held")
        browser.has(".answer .body", "Hel")
        relay.close()
        browser.has(".answer .badge", "Connecting again")
        relay.open()
        lasting.released.set()
        ended(browser)
        assert texts(browser, ".body .markdown") == ["Hello!"] and texts(browser, ".answer .notice") == [""]
        assert len(lasting.requests()) == 1
        browser.leave()


def test_an_answer_that_the_page_left_is_read_to_its_end_when_it_is_opened_again(
    browser: Browser, redis_url: str, lasting: StandIn
) -> None:
    with serving(redis_url, "--disconnect-grace", "60") as server:
        opened(browser, server)
        sent(browser, "held")
        browser.has(".answer .body", "Hel")
        browser.driver.refresh()
        browser.has(".answer .body", "Hel")
        assert browser.all(".busy")
        lasting.released.set()
        ended(browser)
        assert texts(browser, ".body .markdown") == ["Hello!"] and texts(browser, ".answer .notice") == [""]
        assert [uid for uid, _ in lasting.requests()] == uids(browser)
        browser.leave()


def test_an_answer_in_one_piece_is_shown_as_it_came(page: Browser, lasting: StandIn) -> None:
    page.run("document.querySelector('.more').open = true")
    page.fill("#field-stream", "false")
    asked(page, "say: whole")
    assert texts(page, ".body .markdown") == ["whole"]
    page.button("Show the request", ".answer")
    assert "-N" not in page.text(".dialog pre")
    page.button("Answer")
    body = json.loads(page.text(".dialog pre"))
    page.button("Close")
    assert body["object"] == "chat.completion" and body["choices"][0]["message"]["content"] == "whole"


CALLING = r"""
const chunks = [
  {delta: {role: "assistant", content: ""}},
  {delta: {reasoning_content: "I need "}},
  {delta: {reasoning_content: "the time."}},
  {delta: {tool_calls: [{index: 0, id: "call_1", type: "function", function: {name: "clock", arguments: ""}}]}},
  {delta: {tool_calls: [{index: 0, function: {arguments: '{"zone"'}}]}},
  {delta: {tool_calls: [{index: 0, function: {arguments: ': "UTC"}'}}]}},
  {delta: {tool_calls: [{index: 1, id: "call_2", function: {name: "moon", arguments: "{}"}}]}},
  {delta: {content: "So:"}, logprobs: {content: [
    {token: "So", logprob: -0.25, top_logprobs: [{token: "So", logprob: -0.25}, {token: "Oh", logprob: -1.5}]},
    {token: ":", logprob: -4.5, top_logprobs: [{token: "!", logprob: -0.01}]},
  ]}},
  {delta: {}, finish_reason: "tool_calls"},
];
const real = window.fetch;
window.fetch = async (path, options) => {
  const asked = path === "/v1/chat/completions" && JSON.parse(options.body);
  if (!asked || asked.messages.at(-1).role === "tool") return real(path, options);
  const said = chunks.map(chunk => JSON.stringify({choices: [{index: 0, ...chunk}]}));
  const stream = new Blob([...said, "[DONE]"].map(data => `data: ${data}\n\n`)).stream();
  return new Response(stream, {headers: {"content-type": "text/event-stream"}});
};
"""
"""Answers of a model that thinks, calls two tools, and says two tokens, for every question."""


def test_reasoning_is_folded_up_and_calls_of_tools_get_results(page: Browser, lasting: StandIn) -> None:
    page.run(CALLING)
    asked(page, "What time is it?")
    assert texts(page, ".reasoning .markdown") == ["I need the time."]
    assert page.run("return document.querySelector('.reasoning').open") is False
    assert texts(page, ".call strong") == ["clock", "moon"]
    assert [json.loads(text) for text in texts(page, ".call code")] == [{"zone": "UTC"}, {}]
    put(page, ".call:nth-child(1) textarea", "say: noon")
    put(page, ".call:nth-child(2) textarea", "say: full moon")
    page.button("Send the results")
    page.until(lambda: texts(page, ".body .markdown") == ["So:", "full moon"], "the answer to the results")
    ended(page)
    ((_, event),) = lasting.requests()
    assert [message["role"] for message in event.messages] == ["user", "assistant", "tool", "tool"]
    assert [call["function"]["name"] for call in event.messages[1]["tool_calls"]] == ["clock", "moon"]
    assert [message["tool_call_id"] for message in event.messages[2:]] == ["call_1", "call_2"]


def test_the_arrow_keys_tell_the_probability_of_each_token(page: Browser) -> None:
    page.run(CALLING)
    asked(page, "What time is it?")
    page.button("Tokens")
    assert texts(page, ".token") == ["So", ":"]
    page.run("document.querySelector('.tokens').focus()")
    page.press(Keys.HOME)
    page.has(".tip", '"So"')
    assert [row.split() for row in page.text(".tip table").splitlines()] == [
        ['"So"', "77.9", "%"],
        ['"Oh"', "22.3", "%"],
    ]
    page.press(Keys.ARROW_RIGHT)
    page.has(".tip", "log-probability -4.5000")
    assert [row.split()[0] for row in page.text(".tip table").splitlines()] == ['":"', '"!"']
    page.press(Keys.TAB)
    page.gone(".tip")


NO_TEMPLATE = """
const real = window.fetch, models = {data: [{id: "org/base", max_model_len: 64, has_chat_template: false}]};
window.fetch = (path, options) => path === "/v1/models" ? Promise.resolve(Response.json(models)) : real(path, options);
"""


def test_an_empty_conversation_has_prompts_to_click_unless_the_model_has_no_template(
    browser: Browser, server: Server
) -> None:
    browser.open(f"{url(server)}/")
    browser.until(lambda: len(browser.all(".welcome .examples .button")) == 4, "four prompts")
    browser.has(".welcome", "A context of")
    browser.before_each_page(NO_TEMPLATE)
    browser.open(f"{url(server)}/")
    browser.has(".welcome", "This model has no chat template")
    browser.gone(".welcome .examples")


SILENT = """
const real = window.fetch;
let refused = 0;
window.fetch = (path, options) => {
  if (path === "/v1/models" && refused++ < 1) return Promise.reject(new TypeError("Failed to fetch"));
  if (path === "/v1/models" && refused++ < 3) return Promise.resolve(Response.json({data: []}));
  return real(path, options);
};
"""
"""A server that does not answer at first, and then has no model yet."""


def test_the_page_waits_for_a_server_that_starts(browser: Browser, server: Server) -> None:
    browser.before_each_page(SILENT)
    browser.open(f"{url(server)}/")
    browser.has(".composer .notice", "The server does not answer.")
    browser.has(".welcome", "org/demo")
    browser.gone(".composer .notice")
    browser.find("#field-temperature")


NOT_YET = """
const real = window.fetch;
const error = { message: "The server is still loading: generate; send it again later.", code: "loading" };
let left = arguments[0];
window.fetch = (path, options) => path === "/v1/chat/completions" && left-- > 0
  ? Promise.resolve(Response.json({ error }, { status: 503, headers: { "retry-after": "1" } })) : real(path, options);
"""
"""A server that takes no question at first."""


def test_a_question_that_the_server_cannot_take_yet_is_asked_again_until_it_is_stopped(
    page: Browser, server: Server, lasting: StandIn
) -> None:
    page.run(NOT_YET, 1)
    sent(page, "say: at last")
    page.has(".answer .badge", "The server cannot take it yet. Trying again.")
    ended(page)
    assert texts(page, ".body .markdown") == ["at last"] and texts(page, ".answer .notice") == [""]

    page.run(NOT_YET, 1000)
    sent(page, "say: never")
    page.has(".answer:last-child .badge", "The server cannot take it yet.")
    page.press(Keys.ESCAPE)
    page.has(".answer:last-child .badge", "stopped")
    assert len(lasting.requests()) == 1


BREAKS = """
const real = window.fetch;
let left = arguments[0];
window.keys = [];
window.fetch = async (path, options) => {
  if (path === "/v1/chat/completions") {
    window.keys.push(options.headers["idempotency-key"]);
    if (left-- > 0) {
      await real(path, options);
      throw new TypeError("Failed to fetch");
    }
  }
  return real(path, options);
};
"""
"""Connections that break before an answer begins, when the server has the question."""


def test_a_question_whose_connection_breaks_before_an_answer_is_asked_again_under_its_key(
    page: Browser, lasting: StandIn
) -> None:
    page.run(BREAKS, 2)
    sent(page, "say: once")
    page.has(".answer .badge", "The connection broke. Asking again.")
    ended(page)
    assert texts(page, ".body .markdown") == ["once"] and texts(page, ".answer .notice") == [""]
    asked(page, "say: more")
    *same, other = page.run("return window.keys")
    assert len(same) == 3 and len(set(same)) == 1 and other not in same
    assert len(lasting.requests()) == 2

    page.run(BREAKS, 1000)
    sent(page, "say: never")
    page.has(".answer:last-child .badge", "The connection broke. Asking again.")
    page.press(Keys.ESCAPE)
    page.has(".answer:last-child .badge", "stopped")


def test_conversations_are_exported_and_imported(page: Browser, tmp_path: Path) -> None:
    asked(page, f"{SAY}{RICH}")
    page.button("Export")
    files: list[Path] = page.until(lambda: list((tmp_path / "downloads").glob("*.json")), "a file")
    (file,) = files
    said = json.loads(file.read_text())
    assert said["conversations"][0]["sides"][0]["messages"][1]["answers"][0]["content"] == RICH

    hostile = said["conversations"][0]
    hostile["title"] = HOSTILE[10]
    hostile["sides"][0]["messages"][0]["content"] = HOSTILE[11]
    answer = hostile["sides"][0]["messages"][1]["answers"][0]
    answer |= {
        "content": HOSTILE[12],
        "reasoning": HOSTILE[13],
        "uid": '"><img src=x>',
        "model": HOSTILE[14],
        "finish": HOSTILE[15],
    }
    answer["calls"] = [{"id": HOSTILE[16], "name": HOSTILE[17], "arguments": HOSTILE[18]}]
    answer["tokens"] = [{"text": HOSTILE[19], "logprob": -1, "top": [{"text": HOSTILE[20], "logprob": -2}]}]
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(said))
    page.before_each_page(TRAP)
    page.driver.refresh()
    page.until(lambda: page.run("return !!document.querySelector('#import')"), "the page is there")
    page.run("return document.querySelector('#import')").send_keys(str(changed))
    page.has(".toast", "Imported 1 conversation.")
    page.has("#conversations li.open", HOSTILE[10])
    assert texts(page, ".said") == [HOSTILE[11]]
    page.button("Tokens")
    assert texts(page, ".token") == [HOSTILE[19]]
    assert page.run("return trapped") == [] and page.run(CENSUS) == []

    hostile["sides"][0]["fields"] = {"stop": [5], "logit_bias": 7, "temperature": 0.5}
    changed.write_text(json.dumps(said))
    page.run("return document.querySelector('#import')").send_keys(str(changed))
    page.has(".settings-line", "temperature 0.5")

    damaged = tmp_path / "damaged.json"
    answer["tokens"] = "x"
    damaged.write_text(json.dumps(said))
    page.run("return document.querySelector('#import')").send_keys(str(damaged))
    page.has("dialog .notice", "damaged.json: conversation 1 is damaged. Nothing was imported.")


def test_nothing_that_a_prompt_or_an_answer_says_is_executed(browser: Browser, server: Server) -> None:
    browser.before_each_page(TRAP)
    opened(browser, server)
    for at, text in enumerate(HOSTILE):
        if at % 20 == 0:
            browser.button("New conversation")
        asked(browser, f"{SAY}{text}")
        (said,) = texts(browser, ".message.user:nth-last-child(2) .said")
        assert said == f"{SAY}{text}".replace("\r", "\n")
        assert texts(browser, ".answer:last-child .notice") == [""], text
        assert browser.run(CENSUS) == [], text
    assert browser.run("return trapped") == []
    browser.driver.refresh()
    browser.find(".message .markdown")
    assert browser.run("return trapped") == [] and browser.run(CENSUS) == []


def test_nothing_that_a_model_is_called_is_executed(
    browser: Browser, redis_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    names = [text for text in HOSTILE if len(text) < 200]
    monkeypatch.setattr(stand_in_stages, "MODELS", tuple(names))
    request.getfixturevalue("lasting")
    browser.before_each_page(TRAP)
    with serving(redis_url) as server:
        opened(browser, server)
        options = texts(browser, ".side-head option")
        assert options == names
        browser.fill(".side-head select", names[3])
        asked(browser, "say: x")
        assert texts(browser, ".fact.model") == [names[3]]
        assert browser.run("return trapped") == [] and browser.run(CENSUS) == []
        browser.leave()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, server: Server, theme: str) -> None:
    browser.theme(theme)
    opened(browser, server)
    assert problems(browser) == []
    asked(browser, f"{SAY}{RICH}")
    browser.button(f"All other fields ({browser.run('return document.querySelectorAll(`.more .field`).length')})")
    assert problems(browser) == []
    browser.button("Side by side")
    assert problems(browser) == []
    browser.button("Show the request", ".side:last-child")
    assert problems(browser) == []
    browser.button("Close")
    browser.button("Side by side")
    browser.run(CALLING)
    asked(browser, "What time is it?")
    browser.button("Tokens")
    browser.run("document.querySelector('.reasoning').open = true; document.querySelector('.tokens').focus()")
    browser.press(Keys.HOME)
    browser.find(".tip")
    assert problems(browser) == []
    browser.resize(*PHONE)
    assert problems(browser) == []
    browser.button("Settings")
    assert problems(browser) == []


def test_on_a_phone_panels_lie_over_the_chat_one_at_a_time(browser: Browser, server: Server) -> None:
    browser.resize(*PHONE)
    opened(browser, server)
    assert not browser.all(".panel")
    browser.button("Settings")
    browser.find("#settings")
    browser.run("document.querySelector('[aria-controls=conversations]').click()")
    browser.find("#conversations")
    assert not browser.all("#settings")
    browser.press(Keys.ESCAPE)
    browser.gone(".panel")
    assert browser.focused().accessible_name == "Conversations"
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]


def test_the_keyboard_alone_is_enough(page: Browser) -> None:
    page.until(lambda: page.focused().get_attribute("id") == "question", "the question has the focus")
    page.press("say: by key", Keys.SHIFT, Keys.ENTER, Keys.NULL, "alone", Keys.ENTER)
    page.has(".answer .markdown", "by key")
    ended(page)
    reached: list[tuple[Any, Any]] = []
    for _ in range(60):
        page.press(Keys.TAB)
        reached.append((page.focused().accessible_name, page.focused().tag_name))
    names = [name for name, _ in reached]
    missing = [name for name in REACHED if not any(name in found for found in names)]
    assert not missing, names
    assert all(name for name, tag in reached if tag not in ("html", "body")), reached
    while page.focused().accessible_name != "Regenerate":
        page.press(Keys.TAB)
    page.press(Keys.ENTER)
    page.has(".versions", "2 / 2")
    ended(page)
    assert page.focused().get_attribute("id") == "question"
