"""Our pages in a real browser: Debian's Chromium without a window, driven by Selenium through its own chromedriver.

What the browser writes into its console from warnings on fails the test that caused it, unless the test allowed it: a
script that failed, a policy that was violated, a file that was missing. Call `leave` before the page's server ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

PROGRAMS: Final = ("chromium", "chromedriver")
FLAGS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
    "--disable-background-networking", "--disable-component-update", "--disable-search-engine-choice-screen",
    "--force-color-profile=srgb", "--hide-scrollbars",
)  # fmt: skip
WIDE: Final = (1360, 900)
PHONE: Final = (390, 844)
PATIENCE_S: Final = 60.0
PASSING: Final = (
    StaleElementReferenceException,
    NoSuchElementException,
    ElementClickInterceptedException,
    ElementNotInteractableException,
)
"""What a page that changes makes of a step; the step is tried again."""

SET: Final = """
const [selector, value] = arguments, field = document.querySelector(selector);
if (field) {
  field.value = value;
  for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
}
return Boolean(field);
"""

T = TypeVar("T")


def programs() -> list[str]:
    """Return the browser and its driver; without them the test is skipped, but in CI it fails."""
    found = [path for name in PROGRAMS if (path := shutil.which(name))]
    if len(found) < len(PROGRAMS):
        remedy = f"{' and '.join(PROGRAMS)} are not both on PATH: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(remedy)
    return found


class Browser:
    """One window of a browser. Its steps wait for what they need, and none waits for a time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.said: list[dict[str, Any]] = []
        """Warnings and errors of the console."""
        self._allowed: list[re.Pattern[str]] = []

    def open(self, url: str) -> None:
        """Load a page."""
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        """Give the page this many pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def theme(self, name: str) -> None:
        """Be a system that prefers *name*: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def before_each_page(self, script: str) -> None:
        """Run *script* in each page that is loaded from now on, before its own."""
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})

    def run(self, script: str, *arguments: Any) -> Any:
        """Call *script*, the body of a function, in the page; return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Call *script*, the body of an async function that finds *arguments* in `rest`; return what it resolves to."""
        whole = "const done = arguments[arguments.length - 1], rest = [...arguments].slice(0, -1);"
        whole += f"(async function() {{ {script} }})(...rest).then(value => done([value]), e => done(String(e)));"
        said = self.driver.execute_async_script(whole, *arguments)
        assert isinstance(said, list), said
        return said[0]

    def until(self, check: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
        """Wait until *check* gives something true, and return it; fail with *what* was waited for."""
        waiting = WebDriverWait(self.driver, timeout_s, poll_frequency=0.05, ignored_exceptions=PASSING)
        return waiting.until(lambda _: check(), f"waited {timeout_s:.0f} s in vain: {what}")

    def all(self, selector: str) -> list[WebElement]:
        """Return the visible elements that match, now."""
        return [found for found in self.driver.find_elements(By.CSS_SELECTOR, selector) if found.is_displayed()]

    def find(self, selector: str) -> WebElement:
        """Return the first visible element that matches, as soon as there is one."""
        return self.until(lambda: self.all(selector), f"{selector} is visible")[0]

    def gone(self, selector: str) -> None:
        """Wait until nothing visible matches."""
        self.until(lambda: not self.all(selector), f"{selector} is gone")

    def text(self, selector: str) -> str:
        """Return the text of the first visible element that matches."""
        return self.until(lambda: [self.find(selector).text], f"{selector} has a text")[0]

    def has(self, selector: str, words: str) -> None:
        """Wait until a visible element that matches has these words."""
        self.until(lambda: any(words in one.text for one in self.all(selector)), f"{selector} says {words!r}")

    def click(self, selector: str) -> None:
        """Click on the first visible element that matches."""

        def clicked() -> bool:
            self.find(selector).click()
            return True

        self.until(clicked, f"{selector} can be clicked")

    def button(self, name: str, within: str = "") -> None:
        """Click on the visible button or link of this accessible name, the last one where there are several."""

        def clicked() -> bool:
            named = [one for one in self.all(f"{within} :is(button, a, summary)") if one.accessible_name == name]
            if named:
                named[-1].click()
            return bool(named)

        self.until(clicked, f"a button {name!r} can be clicked")

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, as a user would."""
        field = self.find(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(text)

    def fill(self, selector: str, value: str) -> None:
        """Give a field a value at once, as soon as it is there."""
        self.until(lambda: self.run(SET, selector, value), f"{selector} is there")

    def press(self, *keys: str) -> None:
        """Press keys, whatever has the focus."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> WebElement:
        """Return what has the focus."""
        return self.driver.switch_to.active_element

    def shot(self, file: Path) -> None:
        """Write what the page looks like."""
        file.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(file)), f"no screenshot in {file}"

    def allow(self, pattern: str) -> None:
        """Let lines of the console that match pass, such as the failed requests that a test causes."""
        self._allowed.append(re.compile(pattern))

    def complaints(self) -> list[str]:
        """Return what the console said that no test allowed."""
        lines = self.driver.get_log("browser")  # type: ignore[no-untyped-call]  # Selenium has no annotation there
        self.said += [line for line in lines if line["level"] in ("WARNING", "SEVERE")]
        messages = [str(line["message"]) for line in self.said]
        return [message for message in messages if not any(allowed.search(message) for allowed in self._allowed)]

    def check(self) -> None:
        """Fail if the console is not clean; begin with an empty one."""
        found = self.complaints()
        self.said.clear()
        self._allowed.clear()
        assert not found, "the browser's console:\n" + "\n".join(found)

    def leave(self) -> None:
        """Fail if the console is not clean, and leave the page: its server may end now."""
        self.check()
        self.open("about:blank")


@contextlib.contextmanager
def browsing(folder: Path, size: tuple[int, int] = WIDE) -> Iterator[Browser]:
    """Run a browser with its profile in *folder*; see at the end that its console is clean."""
    chromium, chromedriver = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    downloads = folder / "downloads"
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    try:
        driver.set_script_timeout(PATIENCE_S)
        browser = Browser(driver)
        browser.resize(*size)
        yield browser
        browser.check()
    finally:
        driver.quit()


PACKAGE: Final = "axe-core@4.14.1"
SERIOUS: Final = ("serious", "critical")


@functools.cache
def axe() -> str:
    """Return the source of axe-core; without npm the test is skipped, but in CI it fails."""
    if shutil.which("npm") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("npm is not on PATH: apt-get install npm")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, timeout=120)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            source = packed.extractfile("package/axe.min.js")
            assert source is not None, f"{PACKAGE} has no axe.min.js"
            return source.read().decode()


def problems(browser: Browser) -> list[str]:
    """Return what is seriously wrong with the page as it looks now: the rule, and where."""
    if not browser.run("return !!window.axe"):
        browser.run(axe())
    found = browser.wait("const found = await axe.run(document); return found.violations;")
    return [
        f"{violation['id']}: {node['target']}: {node['failureSummary']}"
        for violation in found
        if violation["impact"] in SERIOUS
        for node in violation["nodes"]
    ]
