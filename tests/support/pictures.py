"""As a script, it takes the pictures of docs/images: the three pages before a real server, in light and dark.

PYTHONPATH=tests:. .venv/bin/python tests/support/pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from selenium.webdriver.common.keys import Keys
from support.browser import Browser, browsing
from support.servers import ROOT, Server, eventually, serve
from support.streams import Stream

from pipeline.names import GENERATE

FLAGS: Final = ("--lease", "1", "--page-size", "16", "--num-pages", "140")
"""So few pages that requests are preempted."""
NUM_STREAMS: Final = 24
BUSY_S: Final = 45.0
"""The chart of the live page begins so long before its picture."""
WIDE, TALL = (1280, 800), (1280, 1040)
QUESTION: Final = "Count from {} to 99."
CONVERSATION: Final = ("What can you do?", "What is 17 + 25?", "What is 123456789 + 987654321?")
FIELDS: Final = {"temperature": "1.4", "seed": "5", "logprobs": "true", "top_logprobs": "5"}
AT_REST: Final = """
await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
await Promise.allSettled(document.getAnimations().map(each => each.finished));
"""
"""Waits until colours have changed to those of the theme."""


def main(folder: Path) -> int:
    """Take all pictures."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-pictures-")))
        server = stack.enter_context(serve(scratch / "server", *FLAGS, demo=True))
        browser = stack.enter_context(browsing(scratch))

        def shoot(name: str, size: tuple[int, int]) -> None:
            browser.resize(*size)
            for theme in ("light", "dark"):
                browser.theme(theme)
                browser.wait(AT_REST)
                browser.shot(folder / f"{name}-{theme}.png")

        playground(browser, server)
        shoot("playground", WIDE)
        uid = live(browser, server, lambda: shoot("pipeline", TALL))
        timeline(browser, server, uid)
        shoot("timeline", TALL)
        timeline(browser, server, predicted(server))
        shoot("drafts", WIDE)
        browser.leave()
    return 0


def playground(browser: Browser, server: Server) -> None:
    """Have a conversation, the last answer of which is unlikely, and show the tokens of that."""
    browser.resize(*WIDE)
    browser.open(f"{server.url}/")
    for number, question in enumerate(CONVERSATION, 1):
        if number == len(CONVERSATION):
            for name, value in FIELDS.items():
                browser.fill(f"#field-{name}", value)
        else:
            browser.fill("#field-temperature", "0")
        browser.find("#question").send_keys(question, Keys.ENTER)
        browser.until(lambda number=number: len(browser.all(".answer")) == number, "the answer has begun")  # type: ignore[misc]
        browser.gone(".busy")
    browser.button("Tokens")
    browser.find(".tokens").click()
    browser.press(*[Keys.ARROW_RIGHT] * 8)
    browser.find(".tip")


def live(browser: Browser, server: Server, shoot: Callable[[], None]) -> str:
    """Let requests come for a while, and kill the engine; return a request that was preempted and taken over."""
    browser.resize(*TALL)
    browser.open(f"{server.url}/pipeline")
    browser.has("[data-slot='generate-0']", "ready")
    over = threading.Event()
    streams: list[Stream] = []

    def ask(number: int) -> None:
        while not over.is_set():
            stream = Stream(server, QUESTION.format(10 + number % 5), max_tokens=300)
            streams.append(stream)
            stream.join()

    askers = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(NUM_STREAMS)]
    for asker in askers:
        asker.start()
    over.wait(BUSY_S)
    (engine,) = server.command.workers(GENERATE)
    with server.log() as log:

        def marks(uid: str) -> str:
            return " ".join(
                entry.fields["kind"] for entry in log.histories([uid])[0] if entry.fields["kind"] != "tokens"
            )

        def one_is() -> bool:
            going = [stream for stream in tuple(streams) if 20 < stream.num_frames < 200]
            return any(marks(stream.uid).endswith("preempted admitted") for stream in going)

        eventually(one_is, "one was preempted and runs again", 120)
        engine.kill()
        browser.has("[data-slot='generate-0'] .took", "epoch 2, taken over")
        running = "[data-slot='generate-0'] .inside dd"  # the first of its figures
        browser.until(lambda: int(browser.text(running).strip("-") or 0) > NUM_STREAMS / 2, "most run again")
        shoot()
        over.set()
        for asker in askers:
            asker.join(120)
        found = [stream.uid for stream in streams if "preempted admitted taken_over" in marks(stream.uid)]
    return found[-1]


def predicted(server: Server) -> str:
    """Let a request be answered whose client predicts most of the answer; return its uid."""
    asked = {"messages": [{"role": "user", "content": QUESTION.format(40)}], "temperature": 0}
    text = server.ask("/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    answer = server.post(asked | {"prediction": {"type": "content", "content": text.replace("7", "8", 3)}})
    return answer.headers["x-minisgl-uid"]


def timeline(browser: Browser, server: Server, uid: str) -> None:
    """Show the request at a token in its middle."""
    browser.resize(*TALL)
    browser.open(f"{server.url}/requests/{uid}#token=70")
    browser.has("h1 .badge", "finished")
    browser.has("[data-field='token']", "70 of")
    browser.find("[data-field='batch']")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"))
